"""The format of one checkpoint: a directory of safetensors and JSON files, and a manifest with
their hashes.

    model.safetensors, ...   named tensors, one file for each entry of `Checkpoint.files`
    model.00001-of-00002.safetensors, ...   rows of sharded tensors, one file per rank (`manifest.py`)
    state.json               all other state
    manifest.json            the step, the size and SHA-256 of each file, and the older checkpoints that have its frozen
                             tensors (`frozen.py`); written last (`manifest.py`)

The format has no pickle, so that a checkpoint cannot execute code. `reader.py` reads and checks the
files.
"""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Base,
    Manifest,
    Pieces,
    as_json,
    piece_file,
    to_bytes,
)
from surefoot.checkpoint.state_json import SavedState, typed_state
from surefoot.checkpoint.tensor_file import NAMES, Stored, file_of, not_writable
from surefoot.errors import CheckpointError, Remedy, first_line

Entries = dict[str, tuple[int, str]]  # length and SHA-256 of each file
SHARDED = "sharded"  # key in state.json if tensors are sharded
_HASHED_AT_ONCE = 1 << 18  # bytes; hashing them takes 0.2 ms, as long as starting a thread


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after `step` updates: JSON, and named tensors for each file ("model",
    "optimizer", ...).

    `log` has the length in bytes and the SHA-256 of metrics.jsonl at this step. Tensors to write
    must be contiguous on the host, share no memory, and stay unchanged until the write ends.
    `pieces` has this rank's rows of sharded tensors. `bases` are older checkpoints with the tensors
    that `files` lacks. Tensors read from disk are complete, including those of `bases`; a `Stored`
    tensor is loaded on demand. If `files` has the mean of several checkpoints, `of_newest` has the
    tensors of the newest one, of which models take their buffers.

    >>> import torch
    >>> Checkpoint(step=3, files={"model": {"weight": torch.ones(2)}}).tensors("model")
    {'weight': tensor([1., 1.])}
    """

    step: int
    files: Mapping[str, Mapping[str, Tensor | Stored]]
    state: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[int, str] | None = None
    pieces: Pieces | None = None
    directory: Path | None = field(default=None, compare=False)  # from which it was read
    bases: Sequence[Base] = ()
    of_newest: Mapping[str, Mapping[str, Tensor | Stored]] = field(default_factory=dict)

    @cached_property
    def saved(self) -> SavedState:
        """The typed state of a run. Raises `CheckpointError` for a missing key, as in checkpoints
        of other surefoot versions.
        """
        try:
            return typed_state(self.state)
        except ValueError as problem:
            raise CheckpointError(
                "state-of-another-version",
                problem=f"step-{self.step:08d}: its {STATE} {problem}",
                reason="was it written by another version of surefoot?",
                step=self.step,
            ) from problem

    def tensors(self, file: str) -> dict[str, Tensor]:
        """Return all tensors of a file, loaded into memory."""
        loaded = {}
        for name, tensor in self.files[file].items():
            loaded[name] = tensor.load() if isinstance(tensor, Stored) else tensor
        return loaded


@dataclass(frozen=True)
class Damage:
    """The path of a damaged checkpoint and its problem, as one line of text."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"checkpoint {self.path.name} is damaged ({self.problem})"


class DamageError(CheckpointError):
    """An error for an unusable checkpoint."""

    @property
    def damage(self) -> Damage:
        return Damage(self.fields["path"], self.fields["damage"])


def damage_error(path: Path, problem: str, *, cure: str | None = None) -> DamageError:
    """Return the error of a damaged checkpoint."""
    return DamageError(
        "checkpoint-damaged",
        problem=f"{Damage(path, problem)}: {path}",
        remedy=cure,
        path=path,
        damage=problem,
    )


def not_saved(
    step: int, why: str, *, where: str | None = None, remedy: Remedy | None = None
) -> CheckpointError:
    """Return the error of a checkpoint that was not saved."""
    return CheckpointError(
        "checkpoint-not-saved",
        problem=f"step {step} is not saved: {why}",
        reason=where,
        remedy=remedy,
        step=step,
    )


class Others(Protocol):
    """The other ranks that write pieces of a checkpoint."""

    def begin(self) -> None:
        """Start the writes of the other ranks. The directory must exist."""

    def entries(self) -> Entries:
        """Wait for all ranks, and return their files; raise `CheckpointError` if a rank failed."""

    def abandon(self) -> None:
        """Wait until no rank writes to the checkpoint of a failed save."""


def write(
    checkpoint: Checkpoint, *, directory: Path, disk: Disk = DISK, others: Others | None = None
) -> str:
    """Write a checkpoint into a new directory, and flush all files; return the SHA-256 of the
    manifest.

    The manifest is written last and marks a complete checkpoint. It names the `bases` of tensors
    that `files` lacks. Raises `CheckpointError` for values that JSON changes (a tuple or a NaN in
    `state`), and `OSError` if the disk fails.
    """
    pieces = checkpoint.pieces
    state = dict(checkpoint.state)
    if pieces is not None:
        state[SHARDED] = as_json(pieces)
    state_bytes = _state_bytes(state)
    disk.make_directory(directory)
    if others is not None:
        others.begin()
    entries = write_tensors(checkpoint, directory=directory, disk=disk)
    if others is not None:
        entries |= others.entries()
    if pieces is not None:
        _refuse_absent_pieces(pieces, entries, step=checkpoint.step)
    entries[STATE] = _write_file([memoryview(state_bytes)], directory / STATE, disk=disk)
    manifest = Manifest(checkpoint.step, entries, checkpoint.log, _needed_bases(checkpoint))
    manifest_bytes = to_bytes(manifest)
    _, digest = _write_file([memoryview(manifest_bytes)], directory / MANIFEST, disk=disk)
    disk.flush_directory(directory)
    return digest


def _refuse_absent_pieces(pieces: Pieces, entries: Entries, *, step: int) -> None:
    for name in pieces.shapes:
        for rank in range(pieces.count):
            file = f"{piece_file(name, rank, pieces.count)}.safetensors"
            if file not in entries:
                raise not_saved(step, f"no rank has written {file}")


def _needed_bases(checkpoint: Checkpoint) -> list[Base]:
    """Return the bases without tensors that the checkpoint itself has, as after it was read."""
    sharded = {} if checkpoint.pieces is None else checkpoint.pieces.shapes
    bases = []
    for base in checkpoint.bases:
        needed = {}
        for file, names in base.tensors.items():
            present = {*checkpoint.files.get(file, ()), *sharded.get(file, ())}
            lacking = [name for name in names if name not in present]
            if lacking:
                needed[file] = lacking
        if needed:
            bases.append(replace(base, tensors=needed))
    return bases


def write_tensors(checkpoint: Checkpoint, *, directory: Path, disk: Disk = DISK) -> Entries:
    """Write and flush the tensor files of this rank in a directory, and return their sizes and
    hashes.
    """
    pieces = checkpoint.pieces
    rows_of_rank = {} if pieces is None else pieces.files
    entries = Entries()
    for name in dict.fromkeys([*checkpoint.files, *rows_of_rank]):
        tensors = checkpoint.tensors(name) if name in checkpoint.files else {}
        tensors |= rows_of_rank.get(name, {})
        stem = name
        if pieces is not None and name in pieces.shapes:
            stem = piece_file(name, pieces.rank, pieces.count)
        file = f"{stem}.safetensors"
        entries[file] = _write_file(_file_of(file, tensors), directory / file, disk=disk)
    return entries


def size_bytes(checkpoint: Checkpoint) -> int:
    """Return an upper bound of a checkpoint's size over all ranks: tensors, headers, and 1 MiB for
    other files.
    """
    files = [*checkpoint.files.values()]
    if checkpoint.pieces is not None:  # no rank holds more rows than the first rank
        files += checkpoint.pieces.count * [*checkpoint.pieces.files.values()]
    needed_bytes = 1 << 20
    for tensors in files:
        for name, tensor in tensors.items():
            header_bytes = 256 + 6 * len(name)
            needed_bytes += math.prod(tensor.shape) * tensor.dtype.itemsize + header_bytes
    return needed_bytes


def _write_file(data: Sequence[memoryview], path: Path, *, disk: Disk) -> tuple[int, str]:
    """Write and flush a file; return its length and SHA-256, which a thread computes meanwhile."""
    length = sum(map(len, data))
    handle = disk.create(path)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="surefoot-hash") as beside:
            hashing = None
            if length > _HASHED_AT_ONCE:
                # the thread limit may be reached, or the interpreter about to exit
                with suppress(RuntimeError):
                    hashing = beside.submit(_hash_of, data)
            for stretch in data:
                disk.append(handle, stretch)
            # Flush the writing handle: a handle opened later may miss an error of the write-back.
            disk.flush(handle)
            digest = _hash_of(data) if hashing is None else hashing.result()
    except BaseException:
        with suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)
    return length, digest


def _hash_of(data: Sequence[memoryview]) -> str:
    digest = sha256()
    for stretch in data:
        digest.update(stretch)
    return digest.hexdigest()


def _file_of(file: str, tensors: Mapping[str, Tensor]) -> list[memoryview]:
    if not TENSORS.fullmatch(file):
        name = file.removesuffix(".safetensors")
        raise not_writable(
            repr(name), "it names a file", remedy="use letters, digits, '_', '.' and '-'"
        )
    for tensor_name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            why = f"{tensor_name} is {tensor.dtype}, which safetensors does not support"
            raise not_writable(file, why)
    try:
        return file_of(tensors)
    except (RuntimeError, ValueError, TypeError) as problem:
        raise not_writable(file, reason_of(problem)) from problem


def _state_bytes(state: dict[str, Any]) -> bytes:
    try:
        _check_json(state, "state")
        text = json.dumps(state, indent=1, allow_nan=False)
    except (ValueError, RecursionError) as problem:
        raise not_writable(STATE, reason_of(problem)) from problem
    return f"{text}\n".encode()


def _check_json(value: Any, where: str) -> None:
    """Raise an error for values that JSON changes: a tuple becomes a list, the key 1 becomes "1",
    and NaN is not allowed.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                why = f"its key {key!r} is not a string"
                raise not_writable(where, why, remedy=f"use {str(key)!r}")
            _check_json(entry, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_json(entry, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        remedy = f"save the string {repr(value)!r}"
        raise not_writable(where, f"JSON has no {value!r}", remedy=remedy)
    elif not (value is None or isinstance(value, str | int | float)):
        remedy = "use dicts, lists, strings or numbers"
        raise not_writable(where, f"a {type(value).__name__} is not JSON", remedy=remedy)


def reason_of(problem: BaseException) -> str:
    """Return the first line of an exception's message, or the type name if the message is empty."""
    return first_line(problem).strip() or type(problem).__name__
