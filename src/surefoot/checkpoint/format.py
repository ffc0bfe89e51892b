"""What one checkpoint is on disk: a directory of safetensors and JSON, and a manifest that proves the rest.

    model.safetensors, ...   named tensors, one file for each entry of `Contents.files`
    state.json               everything that is not a tensor
    manifest.json            written last: the step, and length and SHA-256 of all files (`manifest.py`)

No byte of it is ever executed: there is no pickle here. Which checkpoints exist and which stay is `store.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from surefoot.checkpoint.disk import DISK, Files
from surefoot.checkpoint.manifest import MANIFEST, STATE, TENSORS, Manifest, from_bytes, to_bytes
from surefoot.errors import CheckpointError

_CHUNK_BYTES = 16 << 20
_MANIFEST_BYTES = 1 << 20  # far more than a manifest needs; a larger one is not read


@dataclass(frozen=True)
class Contents:
    """A run after `step` updates: named tensors on the host by file ("model", "optimizer", ...), and JSON.

    `log` is the length in bytes and the SHA-256 of metrics.jsonl at this step. Tensors must be contiguous,
    share no memory, and not change until they are written.
    """

    step: int
    files: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any] = field(default_factory=dict)
    log: tuple[int, str] | None = None


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


def write(contents: Contents, *, directory: Path, disk: Files = DISK) -> None:
    """Write a checkpoint into a new directory and flush it; until the manifest is there, it is none.

    What cannot be written as it is (a tuple or a NaN in `state`, tensors that share memory) is a
    `CheckpointError`, a failing disk an `OSError`; either leaves a directory without a manifest.
    """
    state = _state_bytes(contents.state)
    disk.make_directory(directory)
    entries: dict[str, tuple[int, str]] = {}
    for name, tensors in contents.files.items():
        entries[f"{name}.safetensors"] = _put(
            _tensor_bytes(name, tensors), directory / f"{name}.safetensors", disk=disk
        )
    entries[STATE] = _put(state, directory / STATE, disk=disk)
    _put(to_bytes(Manifest(contents.step, entries, contents.log)), directory / MANIFEST, disk=disk)
    disk.flush_directory(directory)


def read(directory: Path, *, only: Collection[str] | None = None, disk: Files = DISK) -> Contents:
    """Read a checkpoint, every byte of it checked against the manifest; anything wrong is a `DamageError`.

    `only` names the entries of `Contents.files` to read and to check; the others are not looked at. The state
    always comes. A name that the checkpoint never had is a plain `CheckpointError`.
    """
    manifest = _manifest(directory, disk=disk)
    state = _state(_get(STATE, manifest, directory=directory, disk=disk), directory)
    held = {match["name"]: file for file in manifest.files if (match := TENSORS.fullmatch(file))}
    absent = [name for name in only or () if name not in held]
    if absent:
        there = ", ".join(sorted(held)) or "none"
        raise CheckpointError(
            f"checkpoint {directory.name} has no tensors {absent[0]!r}; it has: {there}\n  {directory}"
        )
    files: dict[str, dict[str, Tensor]] = {}
    for name, file in held.items():
        if only is not None and name not in only:
            continue
        data = _get(file, manifest, directory=directory, disk=disk)
        try:
            files[name] = safetensors.torch.load(data)
        except Exception as problem:  # whatever a file made by someone else brings the parser to say
            raise DamageError(directory, f"{file}: not safetensors: {_first_line(problem)}") from problem
    return Contents(manifest.step, files, state, manifest.log)


def read_manifest(directory: Path, *, disk: Files = DISK) -> Manifest:
    """Read and check the manifest alone, and that each file has the length it states: no tensor is read."""
    manifest = _manifest(directory, disk=disk)
    for file in manifest.files:
        _check_length(file, manifest, directory=directory, disk=disk)
    return manifest


def verify(directory: Path, *, disk: Files = DISK) -> list[str]:
    """All that is wrong with a checkpoint, each line naming its file; an empty list for an intact one."""
    try:
        manifest = _manifest(directory, disk=disk)
    except DamageError as error:
        return [error.damage.problem]
    problems = []
    for file in manifest.files:
        try:
            _get(file, manifest, directory=directory, disk=disk)
        except DamageError as error:
            problems.append(error.damage.problem)
    return problems


def size_bytes(contents: Contents) -> int:
    """What a checkpoint takes on disk, rounded up: tensors, their headers, a megabyte for the rest."""
    tensors = [tensor for held in contents.files.values() for tensor in held.values()]
    names = sum(len(name) for held in contents.files.values() for name in held)
    return (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 256 * len(tensors) + 6 * names + (1 << 20)
    )


def _put(data: bytes, path: Path, *, disk: Files) -> tuple[int, str]:
    handle = disk.create(path)
    try:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            disk.append(handle, view[start : start + _CHUNK_BYTES])
        # On the handle that wrote: one opened later is not surely told of an error while writing back.
        disk.flush(handle)
    except BaseException:
        with suppress(OSError):
            disk.close(handle)
        raise
    disk.close(handle)
    return len(data), sha256(data).hexdigest()


def _get(file: str, manifest: Manifest, *, directory: Path, disk: Files) -> bytes:
    length, digest = _check_length(file, manifest, directory=directory, disk=disk)
    try:
        data = b"".join(_chunks(directory / file, length, disk=disk))
    except OSError as problem:
        raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
    if len(data) != length or sha256(data).hexdigest() != digest:
        raise DamageError(directory, f"{file}: hash differs")
    return data


def _chunks(path: Path, length: int, *, disk: Files) -> Iterator[bytes]:
    for start in range(0, length, _CHUNK_BYTES):
        yield disk.read(path, start=start, length=min(_CHUNK_BYTES, length - start))


def _check_length(file: str, manifest: Manifest, *, directory: Path, disk: Files) -> tuple[int, str]:
    try:
        length = disk.size(directory / file)
    except OSError as problem:
        raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
    if length != manifest.files[file][0]:
        raise DamageError(directory, f"{file}: {length} bytes long, {manifest.files[file][0]} were saved")
    return manifest.files[file]


def _tensor_bytes(name: str, tensors: Mapping[str, Tensor]) -> bytes:
    if not TENSORS.fullmatch(f"{name}.safetensors"):
        raise CheckpointError(f"cannot save {name!r}: use letters, digits, '_', '.' and '-' in the name of a file")
    try:
        return safetensors.torch.save(dict(tensors))
    except (RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as problem:
        raise CheckpointError(f"cannot save {name}.safetensors: {_first_line(problem)}") from problem


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    try:
        _check_json(dict(state), "state")
        return (json.dumps(dict(state), indent=1, allow_nan=False) + "\n").encode()
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"cannot save {STATE}: {_first_line(problem)}") from problem


def _check_json(value: Any, where: str) -> None:
    """Refuse what JSON would give back changed: a tuple as a list, the key 1 as "1", NaN not at all."""
    if isinstance(value, dict):
        for key, held in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"cannot save {where}: its key {key!r} is not text; write {str(key)!r}")
            _check_json(held, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for place, held in enumerate(value):
            _check_json(held, f"{where}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CheckpointError(f"cannot save {where}: JSON has no {value!r}; write it as text, {repr(value)!r}")
    elif not (value is None or isinstance(value, str | int | float)):
        raise CheckpointError(
            f"cannot save {where}: a {type(value).__name__} is not JSON; use dicts, lists, text, numbers"
        )


def _state(data: bytes, directory: Path) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise DamageError(directory, f"{STATE}: not JSON: {_first_line(problem)}") from problem
    if not isinstance(state, dict):
        raise DamageError(directory, f"{STATE}: holds a {type(state).__name__}, not named values")
    return state


def _manifest(directory: Path, *, disk: Files) -> Manifest:
    path = directory / MANIFEST
    try:
        if disk.size(path) > _MANIFEST_BYTES:
            raise DamageError(directory, f"{MANIFEST}: {disk.size(path)} bytes long, far too long")
        data = disk.read(path, start=0, length=_MANIFEST_BYTES)
    except OSError as problem:
        raise DamageError(directory, f"{MANIFEST}: {_reason(problem)}") from problem
    try:
        return from_bytes(data)
    except (ValueError, RecursionError) as problem:
        raise DamageError(directory, f"{MANIFEST}: {_first_line(problem)}") from problem


def _reason(problem: OSError) -> str:
    return "missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"


def _first_line(problem: BaseException) -> str:
    return str(problem).strip().partition("\n")[0] or type(problem).__name__
