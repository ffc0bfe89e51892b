"""A checkpoint on disk as it is read: every byte checked against the manifest, whole or by rows, by one rank or several."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Files
from surefoot.checkpoint.format import SHARDED, Contents, DamageError
from surefoot.checkpoint.json_shapes import UNREADABLE
from surefoot.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Manifest,
    Pieces,
    bounds,
    from_bytes,
    from_json,
    logical_name,
    piece_file,
)
from surefoot.checkpoint.state_json import find_misshapen
from surefoot.checkpoint.tensor_file import CHUNK_BYTES, Stored, Stretch, entries
from surefoot.errors import CheckpointError, first_line, passed_others

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MANIFEST_BYTES = 16 << 20  # far more than a manifest needs; a larger one is not read


@contextmanager
def interpreted(directory: Path | None) -> Iterator[None]:
    """Make an error over the state of a checkpoint `DamageError`, unless it is one of ours: no value ends in a traceback.

    The cause is kept. Errors that came through the user's code, or a package's, stay what they are; and all if `directory` is
    None, as it is for contents that were not read.
    """
    try:
        yield
    except UNREADABLE as problem:
        if directory is None or passed_others(problem):
            raise
        where = traceback.extract_tb(problem.__traceback__)[-1]
        words = f"{type(problem).__name__}: {first_line(problem)} at {Path(where.filename).name}:{where.lineno}"
        raise DamageError(directory, f"{STATE}: {words}") from problem


def interprets(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate what reads the state of a checkpoint, one of its arguments (`interpreted`)."""

    @wraps(function)
    def interpreting(*arguments: _P.args, **more: _P.kwargs) -> _R:
        with interpreted(next(each.directory for each in arguments if isinstance(each, Contents))):
            return function(*arguments, **more)

    return interpreting


def read(directory: Path, *, only: Collection[str] | None = None, disk: Files = DISK) -> Contents:
    """Read a checkpoint, every byte of it checked against the manifest; anything wrong is a `DamageError`.

    `only` names the entries of `Contents.files` to read and to check; the others are not looked at. The state
    always comes. A name that the checkpoint never had is a plain `CheckpointError`.
    """
    manifest = _manifest(directory, disk=disk)
    bare, pieces = _without_tensors(manifest, directory, disk=disk)
    files: dict[str, dict[str, Tensor]] = {}
    for name, held in _held(manifest, pieces, only, directory).items():
        loaded: dict[str, dict[str, Tensor]] = {}
        for file in held:
            data = _get(file, manifest, directory=directory, disk=disk)
            try:
                loaded[file] = safetensors.torch.load(data)
            except Exception as problem:  # whatever a file made by someone else brings the parser to say
                raise DamageError(directory, f"{file}: not safetensors: {_said(problem)}") from problem
        files[name] = _joined(name, loaded, pieces, directory)
    return replace(bare, files=files)


def opened(directory: Path, *, only: Collection[str] | None = None, disk: Files = DISK) -> Contents:
    """A checkpoint whose tensors stay on disk until they are asked for, whole or by rows.

    Manifest and state are checked, the tensors' bytes are not: `check` does that. `only` as for `read`.
    """
    manifest = _manifest(directory, disk=disk)
    bare, pieces = _without_tensors(manifest, directory, disk=disk)
    files: dict[str, dict[str, Stored]] = {}
    for name, held in _held(manifest, pieces, only, directory).items():
        found: dict[str, list[Stretch]] = {}
        for place, file in enumerate(held):
            try:
                there = entries(directory / file, disk=disk)
            except OSError as problem:
                raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
            except ValueError as problem:
                raise DamageError(directory, f"{file}: {_said(problem)}") from problem
            whole = {} if pieces is None else pieces.shapes.get(name, {})
            for tensor, entry in there.items():
                first = bounds(whole[tensor][0], place, len(held))[0] if tensor in whole else 0
                found.setdefault(tensor, []).append(Stretch(directory / file, entry, first))
        files[name] = {tensor: _stored(stretches, disk) for tensor, stretches in found.items()}
        _refuse_misfit(name, files[name], pieces, directory)
    return replace(bare, files=files)


def check(directory: Path, files: Collection[str], *, disk: Files = DISK) -> list[str]:
    """All that is wrong with some files of a checkpoint, each line naming its file; they are never in memory whole."""
    manifest = _manifest(directory, disk=disk)
    problems = []
    for file in files:
        try:
            _check(file, manifest, directory=directory, disk=disk)
        except DamageError as error:
            problems.append(error.damage.problem)
    return problems


def verify(directory: Path, *, disk: Files = DISK) -> list[str]:
    """All that is wrong with a checkpoint, each line naming its file; an empty list for an intact one."""
    try:
        manifest = _manifest(directory, disk=disk)
    except DamageError as error:
        return [error.damage.problem]
    return check(directory, manifest.files, disk=disk)


def read_manifest(directory: Path, *, disk: Files = DISK) -> Manifest:
    """Read and check the manifest alone, and that each file has the length it states: no tensor is read."""
    manifest = _manifest(directory, disk=disk)
    for file in manifest.files:
        _check_length(file, manifest, directory=directory, disk=disk)
    return manifest


def files_of(manifest: Manifest, only: Collection[str] | None = None) -> list[str]:
    """The files of a checkpoint that hold what is asked for, the state among them; all where `only` is None."""
    if only is None:
        return list(manifest.files)
    wanted = {name for name in manifest.files if logical_name(name.removesuffix(".safetensors")) in only}
    return [file for file in manifest.files if file in wanted or file == STATE]


def _without_tensors(manifest: Manifest, directory: Path, *, disk: Files) -> tuple[Contents, Pieces | None]:
    state = _state(_get(STATE, manifest, directory=directory, disk=disk), directory)
    misshapen = find_misshapen(state) or _untold(state, manifest)
    if misshapen is not None:
        raise DamageError(directory, f"{STATE}: {misshapen}")
    try:
        pieces = from_json(state.pop(SHARDED, None))
    except ValueError as problem:
        raise DamageError(directory, f"{STATE}: {problem}") from problem
    return Contents(manifest.step, {}, state, manifest.log, directory=directory), pieces


def _untold(state: Mapping[str, Any], manifest: Manifest) -> str | None:
    """Which model or optimizer, whose tensors are there, the state does not tell of; None if it tells of all."""
    tells = {"model": ("aliases", "evaluating"), "optimizer": ("groups", "optimizer")}
    for file in manifest.files:
        kind, _, name = logical_name(file.removesuffix(".safetensors")).partition("-")
        for key in tells.get(kind, ()):
            if key in state and (name or "model") not in state[key]:
                return f"{key} lacks {name or 'model'}"
    return None


def _held(
    manifest: Manifest, pieces: Pieces | None, only: Collection[str] | None, directory: Path
) -> dict[str, list[str]]:
    """The files of each entry of `Contents.files` that is wanted, in the order of their rows."""
    there = [match["name"] for file in manifest.files if (match := TENSORS.fullmatch(file))]
    spread = {} if pieces is None else pieces.shapes
    held: dict[str, list[str]] = {}
    for file in there:
        name = logical_name(file) if logical_name(file) in spread else file
        count = 1 if pieces is None or name not in spread else pieces.count
        held[name] = [file] if name not in spread else [piece_file(name, place, count) for place in range(count)]
    absent = [name for name in only or () if name not in held]
    if absent:
        said = ", ".join(sorted(held)) or "none"
        raise CheckpointError(
            f"checkpoint {directory.name} has no tensors {absent[0]!r}; it has: {said}\n  {directory}"
        )
    lost = [name for name in spread if any(file not in there for file in held.get(name, [name]))]
    if lost:
        raise DamageError(directory, f"{MANIFEST}: lacks a piece of {lost[0]}")
    return {
        name: [f"{file}.safetensors" for file in files] for name, files in held.items() if only is None or name in only
    }


def _joined(
    name: str, loaded: Mapping[str, dict[str, Tensor]], pieces: Pieces | None, directory: Path
) -> dict[str, Tensor]:
    """One entry of `Contents.files`, its tensors whole."""
    spread = {} if pieces is None else pieces.shapes.get(name, {})
    parts: dict[str, list[Tensor]] = {}
    for held in loaded.values():
        for tensor, part in held.items():
            parts.setdefault(tensor, []).append(part)
    found = {tensor: torch.cat(held) if tensor in spread else held[0] for tensor, held in parts.items()}
    _refuse_misfit(name, found, pieces, directory)
    return found


def _stored(stretches: list[Stretch], disk: Files) -> Stored:
    shape = stretches[0].entry.shape
    rows = sum(stretch.entry.shape[0] for stretch in stretches) if shape else 0
    return Stored(stretches[0].entry.dtype, torch.Size((rows, *shape[1:]) if shape else ()), tuple(stretches), disk)


def _refuse_misfit(name: str, found: Mapping[str, Tensor | Stored], pieces: Pieces | None, directory: Path) -> None:
    """Raise `DamageError` where pieces do not make the wholes that the state tells of."""
    for tensor, shape in ({} if pieces is None else pieces.shapes.get(name, {})).items():
        if tensor not in found or tuple(found[tensor].shape) != shape:
            raise DamageError(directory, f"{name}: its pieces do not make {tensor} {list(shape)}")


def _get(file: str, manifest: Manifest, *, directory: Path, disk: Files) -> bytes:
    length, digest = _check_length(file, manifest, directory=directory, disk=disk)
    try:
        data = b"".join(_chunks(directory / file, length, disk=disk))
    except OSError as problem:
        raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
    if len(data) != length or sha256(data).hexdigest() != digest:
        raise DamageError(directory, f"{file}: hash differs")
    return data


def _check(file: str, manifest: Manifest, *, directory: Path, disk: Files) -> None:
    length, digest = _check_length(file, manifest, directory=directory, disk=disk)
    found = sha256()
    try:
        for chunk in _chunks(directory / file, length, disk=disk):
            found.update(chunk)
    except OSError as problem:
        raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
    if found.hexdigest() != digest:
        raise DamageError(directory, f"{file}: hash differs")


def _chunks(path: Path, length: int, *, disk: Files) -> Iterator[bytes]:
    for start in range(0, length, CHUNK_BYTES):
        yield disk.read(path, start=start, length=min(CHUNK_BYTES, length - start))


def _check_length(file: str, manifest: Manifest, *, directory: Path, disk: Files) -> tuple[int, str]:
    try:
        length = disk.size(directory / file)
    except OSError as problem:
        raise DamageError(directory, f"{file}: {_reason(problem)}") from problem
    if length != manifest.files[file][0]:
        raise DamageError(directory, f"{file}: {length} bytes long, {manifest.files[file][0]} were saved")
    return manifest.files[file]


def _state(data: bytes, directory: Path) -> dict[str, Any]:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise DamageError(directory, f"{STATE}: not JSON: {_said(problem)}") from problem
    if not isinstance(state, dict):
        raise DamageError(directory, f"{STATE}: holds a {type(state).__name__}, not named values")
    return state


def _manifest(directory: Path, *, disk: Files) -> Manifest:
    path = directory / MANIFEST
    try:
        size = disk.size(path)
        if size > _MANIFEST_BYTES:
            raise DamageError(directory, f"{MANIFEST}: {size} bytes long, far too long")
        data = disk.read(path, start=0, length=size)
    except OSError as problem:
        raise DamageError(directory, f"{MANIFEST}: {_reason(problem)}") from problem
    try:
        return from_bytes(data)
    except (ValueError, RecursionError) as problem:
        raise DamageError(directory, f"{MANIFEST}: {_said(problem)}") from problem


def _reason(problem: OSError) -> str:
    return "missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"


def _said(problem: BaseException) -> str:
    return first_line(problem).strip() or type(problem).__name__
