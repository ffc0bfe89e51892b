"""surefoot trains PyTorch models without losing its footing. The public names, resolved when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot import data, generate, losses, models
    from surefoot.checks import check_settings
    from surefoot.classification import Classified, classification_scores, classified, top_k_accuracy
    from surefoot.data.augmentation import Augmentation
    from surefoot.data.bpe import BpeTokenizer
    from surefoot.data.choices import Question, choice_accuracy, choices, cloze
    from surefoot.data.image_sets import ImageSets, load_images
    from surefoot.data.images import ImageFiles, Images, picture_as_input
    from surefoot.data.mixture import Mixture
    from surefoot.data.text import (
        encode_documents,
        held_out_documents,
        held_out_split,
        load_documents,
        stdlib_documents,
    )
    from surefoot.data.tokenizers import ByteTokenizer, CharacterTokenizer, load_tokenizer, tokenizer_from_json
    from surefoot.data.tokens import HeldOut, TokenShards, Windows, write_shards
    from surefoot.errors import CheckpointError, ConfigError, DataError, DivergedError, SurefootError
    from surefoot.evaluate import Split, accuracy, perplexity
    from surefoot.loop import Step, forward_backward, update
    from surefoot.losses import cross_entropy, linear_cross_entropy
    from surefoot.means import Mean
    from surefoot.mixing import Mixed, mixed, mixed_cross_entropy
    from surefoot.optimizers.specs import adamw, sgd
    from surefoot.run import Run
    from surefoot.schedules import (
        constant,
        exponential,
        inverse_sqrt,
        join,
        linear,
        one_cycle,
        polynomial,
        step_decay,
        warm_restarts,
        warmup_cosine,
        warmup_stable_decay,
    )
    from surefoot.snapshot import load_weights
    from surefoot.stopping import EarlyStopping

__all__ = [
    "Augmentation",
    "BpeTokenizer",
    "ByteTokenizer",
    "CharacterTokenizer",
    "CheckpointError",
    "Classified",
    "ConfigError",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "HeldOut",
    "ImageFiles",
    "ImageSets",
    "Images",
    "Mean",
    "Mixed",
    "Mixture",
    "Question",
    "Run",
    "Split",
    "Step",
    "SurefootError",
    "TokenShards",
    "Windows",
    "accuracy",
    "adamw",
    "check_settings",
    "choice_accuracy",
    "choices",
    "classification_scores",
    "classified",
    "cloze",
    "constant",
    "cross_entropy",
    "data",
    "encode_documents",
    "exponential",
    "forward_backward",
    "generate",
    "held_out_documents",
    "held_out_split",
    "inverse_sqrt",
    "join",
    "linear",
    "linear_cross_entropy",
    "load_documents",
    "load_images",
    "load_tokenizer",
    "load_weights",
    "losses",
    "mixed",
    "mixed_cross_entropy",
    "models",
    "one_cycle",
    "perplexity",
    "picture_as_input",
    "polynomial",
    "sgd",
    "stdlib_documents",
    "step_decay",
    "tokenizer_from_json",
    "top_k_accuracy",
    "update",
    "warm_restarts",
    "warmup_cosine",
    "warmup_stable_decay",
    "write_shards",
]

_HOME = {
    "errors": ("CheckpointError", "ConfigError", "DataError", "DivergedError", "SurefootError"),
    "checks": ("check_settings",),
    "classification": ("Classified", "classification_scores", "classified", "top_k_accuracy"),
    "data.augmentation": ("Augmentation",),
    "data.image_sets": ("ImageSets", "load_images"),
    "data.images": ("ImageFiles", "Images", "picture_as_input"),
    "data.mixture": ("Mixture",),
    "data.bpe": ("BpeTokenizer",),
    "data.choices": ("Question", "choice_accuracy", "choices", "cloze"),
    "data.text": (
        "encode_documents",
        "held_out_documents",
        "held_out_split",
        "load_documents",
        "stdlib_documents",
    ),
    "data.tokenizers": ("ByteTokenizer", "CharacterTokenizer", "load_tokenizer", "tokenizer_from_json"),
    "data.tokens": ("HeldOut", "TokenShards", "Windows", "write_shards"),
    "evaluate": ("Split", "accuracy", "perplexity"),
    "loop": ("Step", "forward_backward", "update"),
    "losses": ("cross_entropy", "linear_cross_entropy"),
    "means": ("Mean",),
    "mixing": ("Mixed", "mixed", "mixed_cross_entropy"),
    "optimizers.specs": ("adamw", "sgd"),
    "run": ("Run",),
    "schedules": (
        "constant",
        "exponential",
        "inverse_sqrt",
        "join",
        "linear",
        "one_cycle",
        "polynomial",
        "step_decay",
        "warm_restarts",
        "warmup_cosine",
        "warmup_stable_decay",
    ),
    "snapshot": ("load_weights",),
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
