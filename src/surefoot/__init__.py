"""surefoot trains PyTorch models without losing its footing. The public names, resolved when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot import data, generate, losses, models
    from surefoot.data.mixture import Mixture
    from surefoot.data.text import held_out_split, load_text, stdlib_text
    from surefoot.data.tokenizers import ByteTokenizer, CharacterTokenizer
    from surefoot.data.tokens import HeldOut, TokenShards, Windows, write_shards
    from surefoot.errors import CheckpointError, ConfigError, DataError, DivergedError, SurefootError
    from surefoot.evaluate import Split, accuracy
    from surefoot.loop import Step, forward_backward, update
    from surefoot.losses import cross_entropy
    from surefoot.means import Mean
    from surefoot.optimizers.specs import adamw, sgd
    from surefoot.run import Run
    from surefoot.schedules import constant, linear, warmup_cosine
    from surefoot.stopping import EarlyStopping

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "HeldOut",
    "Mean",
    "Mixture",
    "Run",
    "Split",
    "Step",
    "SurefootError",
    "TokenShards",
    "Windows",
    "accuracy",
    "adamw",
    "constant",
    "cross_entropy",
    "data",
    "forward_backward",
    "generate",
    "held_out_split",
    "linear",
    "load_text",
    "losses",
    "models",
    "sgd",
    "stdlib_text",
    "update",
    "warmup_cosine",
    "write_shards",
]

_HOME = {
    "errors": ("CheckpointError", "ConfigError", "DataError", "DivergedError", "SurefootError"),
    "data.mixture": ("Mixture",),
    "data.text": ("held_out_split", "load_text", "stdlib_text"),
    "data.tokenizers": ("ByteTokenizer", "CharacterTokenizer"),
    "data.tokens": ("HeldOut", "TokenShards", "Windows", "write_shards"),
    "evaluate": ("Split", "accuracy"),
    "loop": ("Step", "forward_backward", "update"),
    "losses": ("cross_entropy",),
    "means": ("Mean",),
    "optimizers.specs": ("adamw", "sgd"),
    "run": ("Run",),
    "schedules": ("constant", "linear", "warmup_cosine"),
    "stopping": ("EarlyStopping",),
}
_ROOMS = ("data", "generate", "losses", "models")


def __getattr__(name: str) -> Any:
    """Import a public name where it lives; PEP 562."""
    if name in _ROOMS:
        return import_module(f"surefoot.{name}")
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"surefoot.{home}"), name)
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
