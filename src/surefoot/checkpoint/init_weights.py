"""Initial weights from a file, a checkpoint or a run. A table lists the loaded, renamed, skipped
and new tensors.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.gpt2 import fitted_gpt2, is_gpt2_layout
from surefoot.checkpoint.manifest import MANIFEST
from surefoot.checkpoint.module_state import (
    EXTRA,
    ModelState,
    Saved,
    copy_into,
    live_state,
    read_rows,
)
from surefoot.checkpoint.reader import read, read_together
from surefoot.checkpoint.store import Store
from surefoot.checkpoint.tensor_file import Stored
from surefoot.checkpoint.weight_files import INDEX, WEIGHTS, read_weights
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError
from surefoot.models.gpt import GPT

# of DDP, torch.compile, and trainers with a model attribute
_WRAPPERS = ("module.", "_orig_mod.", "model.")
_NAMES = 3  # names printed per row of the table
_Row = list[tuple[str, Tensor | Stored]]  # names with tensors
_Filled = dict[
    int, tuple[str, Tensor | Stored]
]  # by id of a live tensor: its name, and what it got


def load_initial_weights(models: Mapping[str, nn.Module], path: Path, *, world: World) -> str:
    """Copy all tensors of `path` with matching names and shapes; return a table with the result.
    Collective.

    `path` is a .safetensors file, a directory of such files with an index, a checkpoint, or a run
    (its newest intact checkpoint). If the run has several models, each takes its own tensors from a
    checkpoint, and tensors with its names from a file. GPT-2 weights of transformers must fit a
    `GPT` completely. Raises `CheckpointError` if nothing is readable or no tensor matches.
    """
    sources, source = _sources(path, models, world)
    loaded: _Row = []
    renamed: _Row = []
    skipped: _Row = []
    new: _Row = []
    filled: _Filled = {}
    # keeps the tensors alive: `filled` has their ids
    states = {name: live_state(model)[0] for name, model in models.items()}
    for name, model in models.items():
        live = states[name]
        fitting: dict[str, Tensor | Stored] = {}
        for saved_name, tensor in sources.get(name, {}).items():
            own_name = _own_name(saved_name, live)
            if own_name is None:
                skipped.append((f"{saved_name} (not in this model)", tensor))
                continue
            misfit = _misfit(own_name, tensor, live, filled)
            if misfit is not None:
                skipped.append((f"{saved_name} ({misfit})", tensor))
                continue
            fitting[own_name] = tensor
            filled[id(live[own_name])] = (own_name, tensor)
            if own_name == saved_name:
                loaded.append((own_name, tensor))
            else:
                renamed.append((f"{saved_name} -> {own_name}", tensor))
        state = ModelState(fitting, aliases={}, extra={})
        check = copy_into(model, state, where=f"init from {path}", partial=True)
        check()
    for live in states.values():
        new += [(name, tensor) for name, tensor in live.items() if id(tensor) not in filled]
    if not filled:
        names = list(chain.from_iterable(sources.values()))
        raise CheckpointError(
            "no-initial-weight-fits",
            problem=f"none of the {len(names)} tensors in {path} fits this model",
            reason=f"it holds {', '.join(names[:3])} ...",
            setting="init_from",
            path=path,
        )
    lines = [f"init    {source}"]
    rows = {"loaded": loaded, "renamed": renamed, "skipped": skipped, "new": new}
    for kind, row in rows.items():
        if row:
            lines.append(_line(kind, row))
    return "\n".join(lines)


def _own_name(name: str, live: Mapping[str, Tensor]) -> str | None:
    """Return the name of a saved tensor in this model, or None if the model has no such tensor."""
    while name not in live and name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    if name not in live or name.startswith("extra/"):  # module state that is not a single tensor
        return None
    return name


def _misfit(
    name: str, tensor: Tensor | Stored, live: Mapping[str, Tensor], filled: _Filled
) -> str | None:
    """Return why a saved tensor is not copied into the tensor `name` of this model, or None."""
    shape = live[name].shape
    if shape != tensor.shape and not name.endswith(EXTRA):
        return f"{list(tensor.shape)}, here {list(shape)}"
    if id(live[name]) in filled:
        tied_name, tied_tensor = filled[id(live[name])]
        if not _equal(tied_tensor, tensor):
            return f"tied to {tied_name} here"
    return None


def _equal(first: Tensor | Stored, second: Tensor | Stored) -> bool:
    return first is second or torch.equal(read_rows(first, None), read_rows(second, None))


def _line(kind: str, row: _Row) -> str:
    names = ", ".join(name for name, _ in row[:_NAMES])
    if len(row) > _NAMES:
        names += f", and {len(row) - _NAMES} more"
    numbers = sum(tensor.shape.numel() for _, tensor in row)
    return f"  {kind:<8}{len(row):>5} tensors {numbers:>13,} values   {names}"


def _sources(
    path: Path, models: Mapping[str, nn.Module], world: World
) -> tuple[dict[str, Saved], str]:
    if not path.exists():
        raise CheckpointError(
            "initial-weights-missing",
            problem=f"init_from: no such file or directory: {path}",
            setting="init_from",
            path=path,
        )
    if path.is_file() or _is_directory_of_weights(path):
        return _sources_in_weights(path, models)
    return _sources_in_checkpoint(path, models, world)


def _is_directory_of_weights(path: Path) -> bool:
    has_weights = (path / WEIGHTS).is_file() or (path / INDEX).is_file()
    return has_weights and not (path / MANIFEST).exists()


def _sources_in_weights(
    path: Path, models: Mapping[str, nn.Module]
) -> tuple[dict[str, Saved], str]:
    tensors = read_weights(path) if path.is_dir() else _read_file(path)
    sources: dict[str, Saved] = {}
    if len(models) > 1:
        for name, model in models.items():
            live, _ = live_state(model)
            sources[name] = {key: tensor for key, tensor in tensors.items() if key in live}
        return sources, str(path)
    ((name, model),) = models.items()
    if isinstance(model, GPT) and is_gpt2_layout(tensors):
        file = path / WEIGHTS if path.is_dir() else path
        sources[name] = fitted_gpt2(tensors, model, path=file)
        return sources, f"{path}, GPT-2 weights of transformers"
    sources[name] = tensors
    return sources, str(path)


def _sources_in_checkpoint(
    path: Path, models: Mapping[str, nn.Module], world: World
) -> tuple[dict[str, Saved], str]:
    checkpoint, source = read_initial_checkpoint(path, world)
    sources: dict[str, Saved] = {}
    for name in models:
        suffix = "" if name == "model" else f"-{name}"
        averaged = f"ema{suffix}"
        saved = dict(checkpoint.files.get(f"model{suffix}", {}))
        if averaged in checkpoint.files:
            saved = dict(checkpoint.files[averaged])
            source += " (averaged weights)"
        aliases = checkpoint.state.get("aliases", {}).get(name, {})  # the state may have no aliases
        for alias, first in aliases.items():
            if first in saved:
                saved[alias] = saved[first]
        sources[name] = saved
    return sources, source


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        return read_weights(file)
    except CheckpointError as problem:
        problem.reason = "init_from takes .safetensors files only: other formats may run code"
        raise


def read_initial_checkpoint(path: Path, world: World) -> tuple[Checkpoint, str]:
    """Return the checkpoint in a directory, or the newest intact one of a run, and its name. Raises
    `CheckpointError` for another path. Collective.
    """
    are_ranks = world.size > 1
    if (path / MANIFEST).exists():
        checkpoint = read_together(path, world) if are_ranks else read(path)
        return checkpoint, str(path)
    newest = Store(path / "checkpoints").newest_intact(world=world if are_ranks else None)
    if newest is None:
        raise CheckpointError(
            "initial-weights-not-in-directory",
            problem=f"{path} holds neither model.safetensors nor checkpoints/",
            reason="init_from takes a file, a checkpoint or a run",
            setting="init_from",
            path=path,
        )
    checkpoint, damaged = newest
    source = f"{path}, step {checkpoint.step}"
    for damage in damaged:
        source += f"\n  warning: {damage}"
    return checkpoint, source
