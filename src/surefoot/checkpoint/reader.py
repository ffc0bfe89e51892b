"""Reading of checkpoints, with every byte checked against the manifest: complete or by rows, on one
rank or several.

Tensors that are in older checkpoints (`Manifest.bases`) are read and checked there, and belong to
the result like all others.
"""

import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from surefoot.checkpoint.filesystem import DISK, Disk
from surefoot.checkpoint.format import SHARDED, Checkpoint, DamageError, damage_error, reason_of
from surefoot.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    Manifest,
    Pieces,
    from_json,
    logical_name,
    piece_file,
)
from surefoot.checkpoint.source import Source, bases_of, files_of_bases, pieces_of
from surefoot.checkpoint.state_json import UNREADABLE, parse_state
from surefoot.checkpoint.tensor_file import Stored, stored_in
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError, first_line, passed_others

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def interpreted(directory: Path | None) -> Iterator[None]:
    """Turn errors from saved state into `DamageError`, unless user code or a package raised the
    error, or `directory` is None.
    """
    try:
        yield
    except UNREADABLE as problem:
        if directory is None or passed_others(problem):
            raise
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        words = f"{type(problem).__name__}: {first_line(problem)} at {where}"
        raise damage_error(directory, f"{STATE}: {words}") from problem


def interprets(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function with `interpreted` for the directory of its `Checkpoint` argument."""

    @wraps(function)
    def interpreting(*arguments: _P.args, **more: _P.kwargs) -> _R:
        checkpoint = next(value for value in arguments if isinstance(value, Checkpoint))
        with interpreted(checkpoint.directory):
            return function(*arguments, **more)

    return interpreting


def read(directory: Path, *, only: Collection[str] | None = None, disk: Disk = DISK) -> Checkpoint:
    """Read a checkpoint, and check every byte against the manifest; raise `DamageError` for any
    mismatch.

    `only` names the entries of `Checkpoint.files` to read and check. The state is always read. An
    unknown name raises a plain `CheckpointError`.
    """
    return _join_files(Source(directory, disk), only, _load)


def open_checkpoint(
    directory: Path, *, only: Collection[str] | None = None, disk: Disk = DISK
) -> Checkpoint:
    """Return a checkpoint with unchecked tensors on disk. `only` selects entries as in `read`."""
    return _join_files(Source(directory, disk), only, _open)


def verify(
    directory: Path, *, disk: Disk = DISK, checked: dict[Path, list[str]] | None = None
) -> list[str]:
    """Return all problems in a checkpoint, as lines with file names. An intact checkpoint gives an
    empty list.

    `checked` remembers the problems of files that several checkpoints share.
    """
    if checked is None:
        checked = {}
    problems: list[str] = []
    try:
        source = Source(directory, disk)
        problems += _check([(source, file) for file in source.manifest.files])
        for base, file in files_of_bases(source, None):
            path = base.directory / file
            if path not in checked:
                checked[path] = _check([(base, file)])
            problems += checked[path]
    except DamageError as error:
        problems.append(error.damage.problem)
    return problems


def read_manifest(directory: Path, *, disk: Disk = DISK) -> Manifest:
    """Return the manifest after a check of its hash, of its bases, and of all file sizes. No tensor
    is read.
    """
    source = Source(directory, disk)
    for source_or_base, file in _files_with_bases(source, None):
        source_or_base.check_length(file)
    return source.manifest


def read_bases(directory: Path, *, disk: Disk = DISK) -> set[int]:
    """Return the steps of the older checkpoints with tensors of this one. Only the manifest is
    read.
    """
    return {base.step for base in Source(directory, disk).manifest.bases}


def read_together(
    directory: Path,
    world: World,
    *,
    only: Collection[str] | None = None,
    step: int | None = None,
    disk: Disk = DISK,
) -> Checkpoint:
    """Open a checkpoint of `step` on all ranks. The ranks share the check and raise the same
    errors. Collective.
    """
    contents: Checkpoint | None = None
    try:
        manifest = read_manifest(directory, disk=disk)
        if step is not None and manifest.step != step:
            raise damage_error(directory, f"{MANIFEST}: is for step {manifest.step}")
        files = _files_with_bases(Source(directory, disk), only)
        files.sort(key=_largest_first)
        problems = _check(files[world.rank :: world.size])
        contents = open_checkpoint(directory, only=only, disk=disk)
    except DamageError as error:
        problems = [error.damage.problem]
    problems = list(chain.from_iterable(world.gathered(problems)))
    if problems or contents is None:
        raise damage_error(directory, problems[0])
    return contents


def files_of(manifest: Manifest, only: Collection[str] | None = None) -> list[str]:
    """Return the files of the state and of the entries in `only`; all files if `only` is None."""
    if only is None:
        return list(manifest.files)
    return [
        file
        for file in manifest.files
        if file == STATE or logical_name(file.removesuffix(".safetensors")) in only
    ]


def _files_with_bases(source: Source, only: Collection[str] | None) -> list[tuple[Source, str]]:
    files = [(source, file) for file in files_of(source.manifest, only)]
    return files + files_of_bases(source, only)


def _largest_first(entry: tuple[Source, str]) -> tuple[int, Path, str]:
    source, file = entry
    length, _ = source.manifest.files[file]
    return -length, source.directory, file


def _check(files: Iterable[tuple[Source, str]]) -> list[str]:
    problems = []
    for source, file in files:
        try:
            deque(source.chunks(file), maxlen=0)  # reads the file in chunks
        except DamageError as error:
            problems.append(error.damage.problem)
    return problems


def _join_files(
    source: Source,
    only: Collection[str] | None,
    read_file: Callable[[Source, str], Mapping[str, Tensor | Stored]],
) -> Checkpoint:
    with source.damage_in(STATE):
        state = parse_state(b"".join(source.chunks(STATE)))
        _check_complete(state, source.manifest)
        pieces = from_json(state.pop(SHARDED, None))
    sharded = {} if pieces is None else pieces.shapes
    files: dict[str, dict[str, Tensor | Stored]] = {}
    for name, files_of_name in _wanted_files(source, pieces, only).items():
        tensors = _join_pieces(source, files_of_name, read_file)
        for tensor_name, shape in sharded.get(name, {}).items():
            if tensor_name not in tensors or tuple(tensors[tensor_name].shape) != shape:
                raise damage_error(
                    source.directory, f"{name}: its pieces do not form {tensor_name} {list(shape)}"
                )
        files[name] = tensors
    for base_source, base in bases_of(source, files):
        for name in base.tensors.keys() & files.keys():
            stored = _join_pieces(base_source, pieces_of(base_source, name), read_file)
            for tensor_name in base.tensors[name]:
                if tensor_name not in stored:
                    raise base_source.damage(f"{name}: lacks {tensor_name}")
                files[name][tensor_name] = stored[tensor_name]
    manifest = source.manifest
    return Checkpoint(
        manifest.step, files, state, manifest.log, directory=source.directory, bases=manifest.bases
    )


def _join_pieces(
    source: Source,
    files: Sequence[str],
    read_file: Callable[[Source, str], Mapping[str, Tensor | Stored]],
) -> dict[str, Tensor | Stored]:
    pieces: dict[str, list[Any]] = {}
    for file in files:
        for name, piece in read_file(source, file).items():
            pieces.setdefault(name, []).append(piece)
    return {name: _join(pieces_of_tensor) for name, pieces_of_tensor in pieces.items()}


def _join(pieces: list[Any]) -> Any:
    first, *others = pieces
    if not others:
        return first
    return torch.cat(pieces) if isinstance(first, Tensor) else first.followed_by(others)


def _check_complete(state: Mapping[str, Any], manifest: Manifest) -> None:
    """Raise `ValueError` if the state lacks a model or an optimizer that has a file."""
    keys_of_kind = {"model": ("aliases", "eval_mode"), "optimizer": ("param_groups", "optimizer")}
    for file in manifest.files:
        kind, _, suffix = logical_name(file.removesuffix(".safetensors")).partition("-")
        name = suffix or "model"
        for key in keys_of_kind.get(kind, ()):
            if key in state and name not in state[key]:
                raise ValueError(f"{key} lacks {name}")


def _wanted_files(
    source: Source, pieces: Pieces | None, only: Collection[str] | None
) -> dict[str, list[str]]:
    sharded: dict[str, list[str]] = {}
    if pieces is not None:
        for name in pieces.shapes:
            stems = [piece_file(name, rank, pieces.count) for rank in range(pieces.count)]
            sharded[name] = [f"{stem}.safetensors" for stem in stems]
    available: dict[str, list[str]] = {}
    for file in source.manifest.files:
        match = TENSORS.fullmatch(file)
        if match is None:
            continue
        name = logical_name(match["name"])
        if name in sharded:
            available[name] = sharded[name]
        else:
            available[match["name"]] = [file]
    for name in only or ():
        if name not in available:
            raise CheckpointError(
                "checkpoint-without-tensors",
                problem=f"{source.directory} has no tensors {name!r}",
                reason=f"available: {', '.join(sorted(available)) or 'none'}",
                path=source.directory,
                name=name,
                available=sorted(available),
            )
    for name, files in sharded.items():
        if any(file not in source.manifest.files for file in files):
            raise damage_error(source.directory, f"{MANIFEST}: lacks a piece of {name}")
    if only is None:
        return available
    return {name: files for name, files in available.items() if name in only}


def _load(source: Source, file: str) -> dict[str, Tensor]:
    data = b"".join(source.chunks(file))
    try:
        return safetensors.torch.load(data)
    except Exception as problem:  # a foreign file can make the parser raise anything
        raise source.damage(f"{file}: not a safetensors file: {reason_of(problem)}") from problem


def _open(source: Source, file: str) -> dict[str, Stored]:
    with source.damage_in(file):
        return stored_in(source.directory / file, disk=source.disk)
