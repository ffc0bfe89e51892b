"""Patterns of frozen parameters, compared with the names of tensors in a checkpoint. Imports no
torch.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from surefoot.checkpoint.manifest import MANIFEST, from_bytes, logical_name
from surefoot.checkpoint.state_json import SavedState
from surefoot.config.paths import open_regular, read_regular
from surefoot.config.setting_change import SettingChange
from surefoot.errors import ConfigError
from surefoot.optim.lr_multipliers import FROZEN, match_frozen
from surefoot.tracking.run_reader import newest_state

_SIZE_BYTES = 8  # at the beginning of a .safetensors file: those of its header


def refuse_unknown_parts(run: Path, changes: Iterable[SettingChange], state: SavedState) -> None:
    """Raise `ConfigError` for a change that freezes what no model of the run has, or all of a
    model. A checkpoint that cannot be read has no names, and the next start compares them.
    """
    for change in changes:
        prefix, _, part = change.setting.rpartition(".")
        if part != FROZEN or change.now is None:
            continue
        model = prefix.removeprefix("optimizer").removeprefix(".")
        described = next(iter(state.architecture.values()))
        if model:
            described = state.architecture[model]
        kind = described.partition("(")[0]
        names: list[str] = []
        with suppress(OSError, ValueError, LookupError, AttributeError):
            names = _names_in_models(run, state, model)
        if not names:
            continue
        if len(match_frozen(names, change.now, model=kind)) == len(names):
            raise ConfigError(
                "all-parts-frozen",
                problem=f"{change.setting} would freeze all parameters of {kind}",
                reason="nothing would be left to train",
                remedy="name fewer of them",
                setting=change.setting,
                value=change.now,
            )


def _names_in_models(run: Path, state: SavedState, model: str) -> list[str]:
    """Return the names of the tensors of a model in the newest checkpoint; of all models for ""."""
    step, _ = newest_state(run)
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    manifest = from_bytes(read_regular(checkpoint / MANIFEST))

    def is_of_model(file: str) -> bool:
        kind, _, name = file.partition("-")
        return kind == "model" and model in ("", name or "model")

    names: dict[str, None] = {}
    for base in manifest.bases:
        for file, of_file in base.tensors.items():
            if is_of_model(file):
                names |= dict.fromkeys(of_file)
    for file in manifest.files:
        stem, _, suffix = file.rpartition(".")
        if suffix == "safetensors" and is_of_model(logical_name(stem)):
            with open_regular(checkpoint / file) as content:
                size = int.from_bytes(content.read(_SIZE_BYTES), "little")
                names |= dict.fromkeys(json.loads(content.read(size)))
    names.pop("__metadata__", None)
    for name, aliases in state.aliases.items():
        if model in ("", name):
            names |= dict.fromkeys(aliases)
    return list(names)
