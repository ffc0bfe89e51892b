"""Weights to start from, which need not fit whole: what was loaded, renamed, skipped and new is told in a table."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.gpt2 import fitted_gpt2, is_gpt2_layout
from surefoot.checkpoint.manifest import MANIFEST
from surefoot.checkpoint.module_state import EXTRA, ModelState, Saved, give_back, live_state, taken
from surefoot.checkpoint.reader import read, read_together
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.tensor_file import Stored
from surefoot.checkpoint.weight_files import WEIGHTS, has_weights, read_weights
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError
from surefoot.models.gpt import GPT

_WRAPPERS = ("module.", "_orig_mod.", "model.")  # DDP, torch.compile, trainers that hold the model as an attribute
_NAMES = 3  # shown of each kind


def load_initial_weights(models: Mapping[str, nn.Module], place: Path, *, world: World) -> str:
    """Copy every tensor of `place` that fits by name and shape; return a table of those that did and those that did not.

    `place` is a .safetensors file, a directory of such with their index, a checkpoint's directory, or a run's (its newest
    intact checkpoint). Of several models each takes its own from a checkpoint, and what fits by name from a file. GPT-2's
    weights as transformers names them must fit a `GPT` whole. Raises `CheckpointError` if nothing can be read or fits. Collective.
    """
    sources, said = _sources(place, models, world)
    rows: dict[str, list[tuple[str, Tensor | Stored]]] = {"loaded": [], "renamed": [], "skipped": [], "new": []}
    filled: dict[int, tuple[str, Tensor | Stored]] = {}
    states = {name: live_state(model)[0] for name, model in models.items()}  # kept: `filled` knows tensors by their ids
    for name, model in models.items():
        live, fitting = states[name], dict[str, Tensor | Stored]()
        for saved_name, tensor in sources.get(name, {}).items():
            own = _own_name(saved_name, live)
            if own is None or own.startswith("extra/"):  # state of a module that is not one tensor
                rows["skipped"].append((f"{saved_name} (not in this model)", tensor))
            elif live[own].shape != tensor.shape and not own.endswith(EXTRA):
                rows["skipped"].append((f"{saved_name} ({list(tensor.shape)}, here {list(live[own].shape)})", tensor))
            elif id(live[own]) in filled and not _equal(filled[id(live[own])][1], tensor):
                rows["skipped"].append((f"{saved_name} (one with {filled[id(live[own])][0]} here)", tensor))
            else:
                fitting[own] = tensor
                filled[id(live[own])] = own, tensor
                kind, shown = ("loaded", own) if own == saved_name else ("renamed", f"{saved_name} -> {own}")
                rows[kind].append((shown, tensor))
        give_back(model, ModelState(fitting, {}, {}), where=f"init from {place}", partial=True)()
    rows["new"] = [entry for live in states.values() for entry in live.items() if id(entry[1]) not in filled]
    if not filled:
        names = [name for tensors in sources.values() for name in tensors]
        raise CheckpointError(
            f"none of the {len(names)} tensors in {place} fits this model\n  it holds {', '.join(names[:3])} ..."
        )
    return "\n".join([f"init    {said}", *(_row(kind, held) for kind, held in rows.items() if held)])


def _equal(first: Tensor | Stored, second: Tensor | Stored) -> bool:
    return first is second or torch.equal(taken(first, None), taken(second, None))


def _sources(place: Path, models: Mapping[str, nn.Module], world: World) -> tuple[dict[str, Saved], str]:
    """The tensors for each model by name, and what they come from."""
    if not place.exists():
        raise CheckpointError(f"no such file or directory: {place} (given as init)")
    if place.is_file() or (has_weights(place) and not (place / MANIFEST).exists()):
        tensors = read_weights(place) if place.is_dir() else _of_file(place)
        if len(models) == 1:
            (only,) = models.values()
            if isinstance(only, GPT) and is_gpt2_layout(tensors):
                fitted = fitted_gpt2(tensors, only, place=place / WEIGHTS if place.is_dir() else place)
                return dict.fromkeys(models, fitted), f"{place}, GPT-2's weights as transformers names them"
            return dict.fromkeys(models, tensors), str(place)
        names = {name: set(live_state(model)[0]) for name, model in models.items()}
        return {name: {key: tensors[key] for key in tensors if key in own} for name, own in names.items()}, str(place)
    found, said = _checkpoint(place, world)
    sources: dict[str, Saved] = {}
    for name in models:
        trained, averaged = ("model", "ema") if name == "model" else (f"model-{name}", f"ema-{name}")
        held = found.files.get(averaged, found.files.get(trained, {}))
        aliases = found.state.get("aliases", {}).get(name, {})  # of any checkpoint, also one that holds no run
        sources[name] = {**held, **{alias: held[first] for alias, first in aliases.items() if first in held}}
        said += " (averaged weights)" * (averaged in found.files)
    return sources, said


def _of_file(file: Path) -> dict[str, Tensor]:
    try:
        return read_weights(file)
    except CheckpointError as problem:
        raise CheckpointError(
            f"{problem}\n  --init-from takes .safetensors files only: others may run code"
        ) from problem


def _checkpoint(place: Path, world: World) -> tuple[Checkpoint, str]:
    if (place / MANIFEST).exists():
        return read_together(place, world) if world.size > 1 else read(place), str(place)
    newest = Store(place / "checkpoints").newest_intact(world=world if world.size > 1 else None)
    if newest is None:
        raise CheckpointError(
            f"{place} holds neither model.safetensors nor checkpoints/: init takes a file, a checkpoint or a run"
        )
    return newest[0], f"{place}, step {newest[0].step}" + "".join(f"\n  warning: {damage}" for damage in newest[1])


def _own_name(name: str, live: Mapping[str, Tensor]) -> str | None:
    """The name in this model, with or without a wrapper's prefix; None where it has none."""
    while name not in live and name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name if name in live else None


def _row(kind: str, held: list[tuple[str, Tensor | Stored]]) -> str:
    shown = ", ".join(name for name, _ in held[:_NAMES]) + f", and {len(held) - _NAMES} more" * (len(held) > _NAMES)
    numbers = sum(tensor.shape.numel() for _, tensor in held)
    return f"  {kind:<8}{len(held):>5} tensors {numbers:>13,} numbers   {shown}"
