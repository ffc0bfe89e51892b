"""What one checkpoint is on disk: a directory of safetensors and JSON, and a manifest that proves the rest.

    model.safetensors, ...   named tensors, one file for each entry of `Checkpoint.files`
    model.00001-of-00002.safetensors, ...   in the place of one, where tensors lie over ranks (`manifest.py`)
    state.json               everything that is not a tensor
    manifest.json            written last: the step, and length and SHA-256 of all files (`manifest.py`)

No byte of it is ever executed: there is no pickle here. `reader.py` reads and checks it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.checkpoint.manifest import MANIFEST, STATE, TENSORS, Manifest, Pieces, as_json, piece_file, to_bytes
from surefoot.checkpoint.state_json import SavedState, typed_state
from surefoot.checkpoint.tensor_file import NAMES, Stored, file_of
from surefoot.errors import CheckpointError, first_line

Entries = dict[str, tuple[int, str]]  # length and SHA-256 by file
SHARDED = "sharded"  # in state.json, where there are pieces
_HASHED_AT_ONCE = 1 << 18  # bytes, hashed in a fifth of a millisecond: what a thread costs to start


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` updates: named tensors by file ("model", "optimizer", ...), and JSON.

    `log` is the length in bytes and the SHA-256 of metrics.jsonl at this step. Tensors to be written must be on the host,
    contiguous, share no memory, and not change until they are; `pieces` are this rank's rows of those that lie over several.
    Tensors that were read are whole, in memory or still on disk.

    >>> import torch
    >>> Checkpoint(step=3, files={"model": {"weight": torch.ones(2)}}).step
    3
    """

    step: int
    files: Mapping[str, Mapping[str, Tensor | Stored]]
    state: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[int, str] | None = None
    pieces: Pieces | None = None
    directory: Path | None = field(default=None, compare=False)  # where it was read

    @cached_property
    def saved(self) -> SavedState:
        """The state of a run, typed; `CheckpointError` if it lacks a part: one of another version of surefoot, perhaps."""
        try:
            return typed_state(self.state)
        except ValueError as problem:
            raise CheckpointError(
                f"step-{self.step:08d}: its {STATE} {problem}: was it written by another version?"
            ) from problem

    def tensors(self, file: str) -> dict[str, Tensor]:
        """All tensors of a file, in memory."""
        return {name: each.load() if isinstance(each, Stored) else each for name, each in self.files[file].items()}


@dataclass(frozen=True)
class Damage:
    """A checkpoint that is not what was saved, and what is wrong with it; as text, one line for the user."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"checkpoint {self.path.name} is damaged ({self.problem})"


class DamageError(CheckpointError):
    """A checkpoint that cannot be used; `damage` says which and why."""

    def __init__(self, path: Path, problem: str) -> None:
        self.damage = Damage(path, problem)
        super().__init__(f"{self.damage}: {path}")


class Others(Protocol):
    """The other ranks that write pieces of the same checkpoint."""

    def begin(self) -> None:
        """Let them write; the directory is there now."""

    def entries(self) -> Entries:
        """Wait for all of them; what they have written. `CheckpointError` where one could not."""

    def abandon(self) -> None:
        """Return when none of them writes any more, since nothing comes of this one."""


def write(checkpoint: Checkpoint, *, directory: Path, disk: Disk = DISK, others: Others | None = None) -> None:
    """Write a checkpoint into a new directory and flush it; until the manifest is there, it is none.

    Raises `CheckpointError` for what cannot be written as it is (a tuple or a NaN in `state`), `OSError` for a failing disk.
    """
    pieces = checkpoint.pieces
    state = _state_bytes(checkpoint.state if pieces is None else {**checkpoint.state, SHARDED: as_json(pieces)})
    disk.make_directory(directory)
    if others is not None:
        others.begin()
    entries = write_tensors(checkpoint, directory=directory, disk=disk)
    if others is not None:
        entries |= others.entries()
    count, spread = (0, {}) if pieces is None else (pieces.count, pieces.shapes)
    files = [f"{piece_file(name, rank, count)}.safetensors" for name in spread for rank in range(count)]
    if absent := [file for file in files if file not in entries]:
        raise CheckpointError(f"nobody has written {absent[0]}")
    entries[STATE] = _write_file([memoryview(state)], directory / STATE, disk=disk)
    manifest = to_bytes(Manifest(checkpoint.step, entries, checkpoint.log))
    _write_file([memoryview(manifest)], directory / MANIFEST, disk=disk)
    disk.flush_directory(directory)


def write_tensors(checkpoint: Checkpoint, *, directory: Path, disk: Disk = DISK) -> Entries:
    """Write the files of tensors that are this rank's into a directory, flushed each; their lengths and hashes."""
    pieces = checkpoint.pieces
    mine, entries = {} if pieces is None else pieces.files, Entries()
    for name in dict.fromkeys([*checkpoint.files, *mine]):
        tensors = (checkpoint.tensors(name) if name in checkpoint.files else {}) | dict(mine.get(name, {}))
        file = (
            f"{piece_file(name, pieces.rank, pieces.count) if pieces and name in pieces.shapes else name}.safetensors"
        )
        entries[file] = _write_file(_file_of(file, tensors), directory / file, disk=disk)
    return entries


def size_bytes(checkpoint: Checkpoint) -> int:
    """What a checkpoint takes on disk, rounded up: tensors, their headers, a megabyte for the rest; of all ranks."""
    files = [*checkpoint.files.values()]
    if checkpoint.pieces is not None:  # the first rank's rows are never fewer than another's
        files += checkpoint.pieces.count * [*checkpoint.pieces.files.values()]
    named = [named for tensors in files for named in tensors.items()]
    return sum(math.prod(each.shape) * each.dtype.itemsize + 256 + 6 * len(name) for name, each in named) + (1 << 20)


def _write_file(data: Sequence[memoryview], path: Path, *, disk: Disk) -> tuple[int, str]:
    """Write a file and flush it; its length and its hash, which is computed meanwhile."""

    def hash_of_all() -> str:
        digest = sha256()
        for stretch in data:
            digest.update(stretch)
        return digest.hexdigest()

    handle = disk.create(path)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="surefoot-hash") as beside:
            hashed = None
            with suppress(RuntimeError):  # no more threads allowed, or the interpreter is about to end
                hashed = beside.submit(hash_of_all) if sum(map(len, data)) > _HASHED_AT_ONCE else None
            for stretch in data:
                disk.append(handle, stretch)
            # On the handle that wrote: one opened later is not surely told of an error while writing back.
            disk.flush(handle)
            entry = sum(map(len, data)), hash_of_all() if hashed is None else hashed.result()
    except BaseException:
        with suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)
    return entry


def _file_of(file: str, tensors: Mapping[str, Tensor]) -> list[memoryview]:
    if not TENSORS.fullmatch(file):
        name = file.removesuffix(".safetensors")
        raise CheckpointError(f"cannot save {name!r}: use letters, digits, '_', '.' and '-' in the name of a file")
    if unknown := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in NAMES]:
        raise CheckpointError(f"cannot save {file}: {unknown[0]}, which safetensors has no name for")
    try:
        return file_of(tensors)
    except (RuntimeError, ValueError, TypeError) as problem:
        raise CheckpointError(f"cannot save {file}: {reason_of(problem)}") from problem


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    try:
        _check_json(dict(state), "state")
        return (json.dumps(dict(state), indent=1, allow_nan=False) + "\n").encode()
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"cannot save {STATE}: {reason_of(problem)}") from problem


def _check_json(value: Any, where: str) -> None:
    """Refuse what JSON would give back changed: a tuple as a list, the key 1 as "1", NaN not at all."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"cannot save {where}: its key {key!r} is not text; write {str(key)!r}")
            _check_json(entry, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_json(entry, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"cannot save {where}: JSON has no {value!r}; write it as text, {repr(value)!r}")
    elif not (value is None or isinstance(value, str | int | float)):
        raise CheckpointError(
            f"cannot save {where}: a {type(value).__name__} is not JSON; use dicts, lists, text, numbers"
        )


def reason_of(problem: BaseException) -> str:
    """What an exception says in its first line, or else its kind."""
    return first_line(problem).strip() or type(problem).__name__
