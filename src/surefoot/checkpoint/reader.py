"""Reading of checkpoints, with every byte checked against the manifest: complete or by rows, on one rank or several."""

import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.checkpoint.format import SHARDED, Checkpoint, DamageError, reason_of
from surefoot.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Manifest,
    Pieces,
    from_bytes,
    from_json,
    logical_name,
    piece_file,
)
from surefoot.checkpoint.state_json import UNREADABLE, parse_state
from surefoot.checkpoint.tensor_file import CHUNK_BYTES, Stored, stored_in
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, first_line, passed_others

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MANIFEST_BYTES = 16 << 20  # far above the size of any manifest; larger files are not read


@contextmanager
def interpreted(directory: Path | None) -> Iterator[None]:
    """Turn errors from saved state into `DamageError`, unless user code or a package raised the error, or `directory` is None."""
    try:
        yield
    except UNREADABLE as problem:
        if directory is None or passed_others(problem):
            raise
        where = traceback.extract_tb(problem.__traceback__)[-1]
        words = f"{type(problem).__name__}: {first_line(problem)} at {Path(where.filename).name}:{where.lineno}"
        raise DamageError(directory, f"{STATE}: {words}") from problem


def interprets(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function with `interpreted` for the directory of its `Checkpoint` argument."""

    @wraps(function)
    def interpreting(*arguments: _P.args, **more: _P.kwargs) -> _R:
        with interpreted(next(each.directory for each in arguments if isinstance(each, Checkpoint))):
            return function(*arguments, **more)

    return interpreting


def read(directory: Path, *, only: Collection[str] | None = None, disk: Disk = DISK) -> Checkpoint:
    """Read a checkpoint, and check every byte against the manifest; raise `DamageError` for any mismatch.

    `only` names the entries of `Checkpoint.files` to read and check. The state is always read. An unknown name raises a
    plain `CheckpointError`.
    """
    return _join_files(_Source(directory, disk), only, _load)


def opened(directory: Path, *, only: Collection[str] | None = None, disk: Disk = DISK) -> Checkpoint:
    """Return a checkpoint with unchecked tensors on disk. `only` selects entries as in `read`."""
    return _join_files(_Source(directory, disk), only, _open)


def check(directory: Path, files: Collection[str], *, disk: Disk = DISK) -> list[str]:
    """Return all problems in some files of a checkpoint, as lines with file names. Files are read in chunks."""
    source, problems = _Source(directory, disk), list[str]()
    for file in files:
        try:
            deque(source.chunks(file), maxlen=0)
        except DamageError as error:
            problems.append(error.damage.problem)
    return problems


def verify(directory: Path, *, disk: Disk = DISK) -> list[str]:
    """Return all problems in a checkpoint, as lines with file names. An intact checkpoint gives an empty list."""
    try:
        return check(directory, _Source(directory, disk).manifest.files, disk=disk)
    except DamageError as error:
        return [error.damage.problem]


def read_manifest(directory: Path, *, disk: Disk = DISK) -> Manifest:
    """Return the manifest after a check of its hash and of all file sizes. No tensor is read."""
    source = _Source(directory, disk)
    for file in source.manifest.files:
        source.check_length(file)
    return source.manifest


def read_together(
    directory: Path, world: World, *, only: Collection[str] | None = None, step: int | None = None, disk: Disk = DISK
) -> Checkpoint:
    """Open a checkpoint of `step` on all ranks. The ranks share the check and raise the same errors. Collective."""
    contents: Checkpoint | None = None
    try:
        manifest = read_manifest(directory, disk=disk)
        if step is not None and manifest.step != step:
            raise DamageError(directory, f"{MANIFEST}: is for step {manifest.step}")
        by_size = sorted(files_of(manifest, only), key=lambda file: (-manifest.files[file][0], file))
        problems = check(directory, by_size[world.rank :: world.size], disk=disk)
        contents = opened(directory, only=only, disk=disk)
    except DamageError as error:
        problems = [error.damage.problem]
    problems = [problem for each in world.gathered(problems) for problem in each]
    if problems or contents is None:
        raise DamageError(directory, problems[0])
    return contents


def files_of(manifest: Manifest, only: Collection[str] | None = None) -> list[str]:
    """Return the files of the state and of the entries in `only`; all files if `only` is None."""
    if only is None:
        return list(manifest.files)
    return [file for file in manifest.files if file == STATE or logical_name(file.removesuffix(".safetensors")) in only]


class _Source:
    def __init__(self, directory: Path, disk: Disk) -> None:
        self.directory, self.disk = directory, disk
        with self.damage_in(MANIFEST):
            size = disk.size(directory / MANIFEST)
            if size > _MANIFEST_BYTES:
                raise ValueError(f"{size} bytes long, too long for a manifest")
            self.manifest = from_bytes(disk.read(directory / MANIFEST, start=0, length=size))

    @contextmanager
    def damage_in(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as problem:
            raise DamageError(self.directory, f"{file}: missing") from problem
        except OSError as problem:
            raise DamageError(self.directory, f"{file}: cannot be read: {problem.strerror or problem}") from problem
        except (ValueError, RecursionError) as problem:
            raise DamageError(self.directory, f"{file}: {reason_of(problem)}") from problem

    def check_length(self, file: str) -> int:
        with self.damage_in(file):
            length = self.disk.size(self.directory / file)
        if length != (saved := self.manifest.files[file][0]):
            raise DamageError(self.directory, f"{file}: {length} bytes long, but {saved} bytes were saved")
        return length

    def chunks(self, file: str) -> Iterator[bytes]:
        length, digest = self.check_length(file), sha256()
        with self.damage_in(file):
            for start in range(0, length, CHUNK_BYTES):
                chunk = self.disk.read(self.directory / file, start=start, length=min(CHUNK_BYTES, length - start))
                digest.update(chunk)
                yield chunk
        if digest.hexdigest() != self.manifest.files[file][1]:
            raise DamageError(self.directory, f"{file}: hash differs")


def _join_files(
    source: _Source, only: Collection[str] | None, parts_of: Callable[[_Source, str], Mapping[str, Tensor | Stored]]
) -> Checkpoint:
    with source.damage_in(STATE):
        state = parse_state(b"".join(source.chunks(STATE)))
        _check_complete(state, source.manifest)
        pieces = from_json(state.pop(SHARDED, None))
    files: dict[str, dict[str, Tensor | Stored]] = {}
    for name, names_of_files in _wanted_files(source, pieces, only).items():
        parts: dict[str, list[Any]] = {}
        for file in names_of_files:
            for tensor, part in parts_of(source, file).items():
                parts.setdefault(tensor, []).append(part)
        files[name] = {tensor: _join(each) for tensor, each in parts.items()}
        for tensor, shape in ({} if pieces is None else pieces.shapes.get(name, {})).items():
            if tensor not in files[name] or tuple(files[name][tensor].shape) != shape:
                raise DamageError(source.directory, f"{name}: its pieces do not form {tensor} {list(shape)}")
    return Checkpoint(source.manifest.step, files, state, source.manifest.log, directory=source.directory)


def _check_complete(state: Mapping[str, Any], manifest: Manifest) -> None:
    tells = {"model": ("aliases", "eval_mode"), "optimizer": ("param_groups", "optimizer")}
    for file in manifest.files:
        kind, _, name = logical_name(file.removesuffix(".safetensors")).partition("-")
        for key in tells.get(kind, ()):
            if key in state and (name or "model") not in state[key]:
                raise ValueError(f"{key} lacks {name or 'model'}")


def _wanted_files(source: _Source, pieces: Pieces | None, only: Collection[str] | None) -> dict[str, list[str]]:
    there = [match["name"] for file in source.manifest.files if (match := TENSORS.fullmatch(file))]
    spread, count = ({}, 1) if pieces is None else (pieces.shapes, pieces.count)
    names = [logical_name(file) if logical_name(file) in spread else file for file in there]
    pieces_of = {name: [piece_file(name, rank, count) for rank in range(count)] for name in spread}
    by_name = {name: pieces_of.get(name, [name]) for name in names}
    if absent := [name for name in only or () if name not in by_name]:
        raise CheckpointError(
            f"checkpoint {source.directory.name} has no tensors {absent[0]!r}; available: {', '.join(sorted(by_name)) or 'none'}\n"
            f"  {source.directory}"
        )
    if lost := [name for name in spread if any(file not in there for file in by_name.get(name, [name]))]:
        raise DamageError(source.directory, f"{MANIFEST}: lacks a piece of {lost[0]}")
    return {
        name: [f"{file}.safetensors" for file in files]
        for name, files in by_name.items()
        if only is None or name in only
    }


def _load(source: _Source, file: str) -> dict[str, Tensor]:
    data = b"".join(source.chunks(file))
    try:
        return safetensors.torch.load(data)
    except Exception as problem:  # a foreign file can make the parser raise anything
        raise DamageError(source.directory, f"{file}: not a safetensors file: {reason_of(problem)}") from problem


def _open(source: _Source, file: str) -> dict[str, Stored]:
    with source.damage_in(file):
        return stored_in(source.directory / file, disk=source.disk)


def _join(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0].followed_by(parts[1:])
