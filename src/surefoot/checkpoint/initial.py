"""Weights to start from, out of a file that need not fit whole: what was loaded, renamed, skipped and new is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from surefoot.errors import CheckpointError

_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "model.",
)  # DDP, torch.compile, and trainers that hold the model as an attribute


def load_initial_weights(models: Mapping[str, nn.Module], place: Path) -> str:
    """Copy every tensor of `place` that fits by name and shape; return a line for each kind of tensor that did not.

    `place` is a .safetensors file, a checkpoint's directory, or a run's (its newest checkpoint). Raises `CheckpointError`
    where it cannot be read or nothing fits.
    """
    file = _file(place)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(
            f"cannot read weights from {file}: {str(problem).splitlines()[0]}\n  --init takes .safetensors files only: others may run code"
        ) from problem
    live = {name: value for model in models.values() for name, value in model.state_dict(keep_vars=True).items()}
    loaded, renamed, skipped = _copied(tensors, live)
    if not loaded:
        raise CheckpointError(
            f"none of the {len(tensors)} tensors in {file} fits this model\n  it holds {', '.join(list(tensors)[:3])} ..."
        )
    shared = {id(live[name]) for name in loaded}
    new = [name for name, value in live.items() if id(value) not in shared]
    lines = [f"init    {len(loaded)} of {len(live)} tensors from {file}"]
    lines += [
        f"  {what}: {_listed(names)}"
        for what, names in (("renamed", renamed), ("skipped", skipped), ("new", new))
        if names
    ]
    return "\n".join(lines)


def _copied(tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> tuple[list[str], list[str], list[str]]:
    loaded, renamed, skipped = [], [], []
    for name, tensor in tensors.items():
        own = name
        while own not in live and own.startswith(_WRAPPERS):
            own = own.split(".", 1)[1]
        if own not in live:
            skipped.append(f"{name} (not in this model)")
        elif live[own].shape != tensor.shape:
            skipped.append(f"{name} ({list(tensor.shape)}, here {list(live[own].shape)})")
        else:
            with torch.no_grad():
                live[own].copy_(tensor)
            loaded.append(own)
            renamed += [f"{name} -> {own}"] if own != name else []
    return loaded, renamed, skipped


def _file(place: Path) -> Path:
    if not place.exists():
        raise CheckpointError(f"no such file or directory: {place} (given as init)")
    if place.is_file():
        return place
    newest = sorted(place.glob("checkpoints/step-*/model.safetensors"))
    found = place / "model.safetensors"
    if not found.exists() and newest:
        found = newest[-1]
    if not found.exists():
        raise CheckpointError(
            f"{place} holds neither model.safetensors nor checkpoints/: init takes a file, a checkpoint or a run"
        )
    return found


def _listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
