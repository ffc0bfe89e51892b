"""Initial weights from a file, a checkpoint or a run. A table lists the loaded, renamed, skipped
and new tensors.
"""

from collections.abc import Mapping
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

_WRAPPERS = (
    "module.",
    "_orig_mod.",
    "model.",
)  # DDP, torch.compile, and trainers with a model attribute
_NAMES = 3  # names printed per row of the table


def load_initial_weights(models: Mapping[str, nn.Module], path: Path, *, world: World) -> str:
    """Copy all tensors of `path` with matching names and shapes; return a table with the result.
    Collective.

    `path` is a .safetensors file, a directory of such files with an index, a checkpoint, or a run
    (its newest intact checkpoint). If the run has several models, each takes its own tensors from a
    checkpoint, and tensors with its names from a file. GPT-2 weights of transformers must fit a
    `GPT` completely. Raises `CheckpointError` if nothing is readable or no tensor matches.
    """
    sources, source = _sources(path, models, world)
    rows: dict[str, list[tuple[str, Tensor | Stored]]] = {
        "loaded": [],
        "renamed": [],
        "skipped": [],
        "new": [],
    }
    filled: dict[int, tuple[str, Tensor | Stored]] = {}
    states = {
        name: live_state(model)[0] for name, model in models.items()
    }  # keeps the tensors alive: `filled` has their ids
    for name, model in models.items():
        live, fitting = states[name], dict[str, Tensor | Stored]()
        for saved_name, tensor in sources.get(name, {}).items():
            own = _own_name(saved_name, live)
            if own is None or own.startswith("extra/"):  # module state that is not a single tensor
                rows["skipped"].append((f"{saved_name} (not in this model)", tensor))
            elif live[own].shape != tensor.shape and not own.endswith(EXTRA):
                rows["skipped"].append(
                    (f"{saved_name} ({list(tensor.shape)}, here {list(live[own].shape)})", tensor)
                )
            elif id(live[own]) in filled and not _equal(filled[id(live[own])][1], tensor):
                rows["skipped"].append(
                    (f"{saved_name} (tied to {filled[id(live[own])][0]} here)", tensor)
                )
            else:
                fitting[own] = tensor
                filled[id(live[own])] = own, tensor
                kind, label = (
                    ("loaded", own) if own == saved_name else ("renamed", f"{saved_name} -> {own}")
                )
                rows[kind].append((label, tensor))
        copy_into(model, ModelState(fitting, {}, {}), where=f"init from {path}", partial=True)()
    rows["new"] = [
        entry for live in states.values() for entry in live.items() if id(entry[1]) not in filled
    ]
    if not filled:
        names = [name for tensors in sources.values() for name in tensors]
        raise CheckpointError(
            "no-initial-weight-fits",
            problem=f"none of the {len(names)} tensors in {path} fits this model",
            reason=f"it holds {', '.join(names[:3])} ...",
            setting="init_from",
            path=path,
        )
    return "\n".join(
        [f"init    {source}", *(_row(kind, entries) for kind, entries in rows.items() if entries)]
    )


def _equal(first: Tensor | Stored, second: Tensor | Stored) -> bool:
    return first is second or torch.equal(read_rows(first, None), read_rows(second, None))


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
    if path.is_file() or (
        any((path / name).is_file() for name in (WEIGHTS, INDEX)) and not (path / MANIFEST).exists()
    ):
        tensors = read_weights(path) if path.is_dir() else _read_file(path)
        if len(models) == 1:
            (only,) = models.values()
            if isinstance(only, GPT) and is_gpt2_layout(tensors):
                fitted = fitted_gpt2(tensors, only, path=path / WEIGHTS if path.is_dir() else path)
                return dict.fromkeys(models, fitted), f"{path}, GPT-2 weights of transformers"
            return dict.fromkeys(models, tensors), str(path)
        names = {name: set(live_state(model)[0]) for name, model in models.items()}
        return {
            name: {key: tensors[key] for key in tensors if key in own}
            for name, own in names.items()
        }, str(path)
    checkpoint, source = _read_checkpoint(path, world)
    sources: dict[str, Saved] = {}
    for name in models:
        trained, averaged = (
            ("model", "ema") if name == "model" else (f"model-{name}", f"ema-{name}")
        )
        saved = checkpoint.files.get(averaged, checkpoint.files.get(trained, {}))
        aliases = checkpoint.state.get("aliases", {}).get(name, {})  # the state may have no aliases
        sources[name] = {
            **saved,
            **{alias: saved[first] for alias, first in aliases.items() if first in saved},
        }
        source += " (averaged weights)" * (averaged in checkpoint.files)
    return sources, source


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        return read_weights(file)
    except CheckpointError as problem:
        problem.reason = "init_from takes .safetensors files only: other formats may run code"
        raise


def _read_checkpoint(path: Path, world: World) -> tuple[Checkpoint, str]:
    if (path / MANIFEST).exists():
        return read_together(path, world) if world.size > 1 else read(path), str(path)
    newest = Store(path / "checkpoints").newest_intact(world=world if world.size > 1 else None)
    if newest is None:
        raise CheckpointError(
            "initial-weights-not-in-directory",
            problem=f"{path} holds neither model.safetensors nor checkpoints/",
            reason="init_from takes a file, a checkpoint or a run",
            setting="init_from",
            path=path,
        )
    return newest[0], f"{path}, step {newest[0].step}" + "".join(
        f"\n  warning: {damage}" for damage in newest[1]
    )


def _own_name(name: str, live: Mapping[str, Tensor]) -> str | None:
    while name not in live and name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name if name in live else None


def _row(kind: str, entries: list[tuple[str, Tensor | Stored]]) -> str:
    more = f", and {len(entries) - _NAMES} more" * (len(entries) > _NAMES)
    names = ", ".join(name for name, _ in entries[:_NAMES]) + more
    numbers = sum(tensor.shape.numel() for _, tensor in entries)
    return f"  {kind:<8}{len(entries):>5} tensors {numbers:>13,} values   {names}"
