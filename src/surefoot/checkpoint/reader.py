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
        where = traceback.extract_tb(problem.__traceback__)[-1]
        words = f"{type(problem).__name__}: {first_line(problem)} at {Path(where.filename).name}:{where.lineno}"
        raise damage_error(directory, f"{STATE}: {words}") from problem


def interprets(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function with `interpreted` for the directory of its `Checkpoint` argument."""

    @wraps(function)
    def interpreting(*arguments: _P.args, **more: _P.kwargs) -> _R:
        with interpreted(
            next(each.directory for each in arguments if isinstance(each, Checkpoint))
        ):
            return function(*arguments, **more)

    return interpreting


def read(directory: Path, *, only: Collection[str] | None = None, disk: Disk = DISK) -> Checkpoint:
    """Read a checkpoint, and check every byte against the manifest; raise `DamageError` for any
    mismatch.

    `only` names the entries of `Checkpoint.files` to read and check. The state is always read. An
    unknown name raises a plain `CheckpointError`.
    """
    return _join_files(Source(directory, disk), only, _load)


def opened(
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
    problems, checked = list[str](), {} if checked is None else checked
    try:
        source = Source(directory, disk)
        problems += _check([(source, file) for file in source.manifest.files])
        for base, file in files_of_bases(source, None):
            if (path := base.directory / file) not in checked:
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
    for each, file in [
        *((source, file) for file in source.manifest.files),
        *files_of_bases(source, None),
    ]:
        each.check_length(file)
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
        source = Source(directory, disk)
        files = [
            *((source, file) for file in files_of(manifest, only)),
            *files_of_bases(source, only),
        ]
        files.sort(
            key=lambda each: (-each[0].manifest.files[each[1]][0], each[0].directory, each[1])
        )
        problems = _check(files[world.rank :: world.size])
        contents = opened(directory, only=only, disk=disk)
    except DamageError as error:
        problems = [error.damage.problem]
    problems = [problem for each in world.gathered(problems) for problem in each]
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
    parts_of: Callable[[Source, str], Mapping[str, Tensor | Stored]],
) -> Checkpoint:
    with source.damage_in(STATE):
        state = parse_state(b"".join(source.chunks(STATE)))
        _check_complete(state, source.manifest)
        pieces = from_json(state.pop(SHARDED, None))
    files: dict[str, dict[str, Tensor | Stored]] = {}
    for name, names_of_files in _wanted_files(source, pieces, only).items():
        files[name] = _join_pieces(source, names_of_files, parts_of)
        for tensor, shape in ({} if pieces is None else pieces.shapes.get(name, {})).items():
            if tensor not in files[name] or tuple(files[name][tensor].shape) != shape:
                raise damage_error(
                    source.directory, f"{name}: its pieces do not form {tensor} {list(shape)}"
                )
    for base, entry in bases_of(source, files):
        for name in entry.tensors.keys() & files.keys():
            stored = _join_pieces(base, pieces_of(base, name), parts_of)
            if lost := [tensor for tensor in entry.tensors[name] if tensor not in stored]:
                raise base.damage(f"{name}: lacks {lost[0]}")
            files[name] |= {tensor: stored[tensor] for tensor in entry.tensors[name]}
    manifest = source.manifest
    return Checkpoint(
        manifest.step, files, state, manifest.log, directory=source.directory, bases=manifest.bases
    )


def _join_pieces(
    source: Source,
    files: Sequence[str],
    parts_of: Callable[[Source, str], Mapping[str, Tensor | Stored]],
) -> dict[str, Tensor | Stored]:
    parts: dict[str, list[Any]] = {}
    for file in files:
        for tensor, part in parts_of(source, file).items():
            parts.setdefault(tensor, []).append(part)
    return {tensor: _join(each) for tensor, each in parts.items()}


def _check_complete(state: Mapping[str, Any], manifest: Manifest) -> None:
    tells = {"model": ("aliases", "eval_mode"), "optimizer": ("param_groups", "optimizer")}
    for file in manifest.files:
        kind, _, name = logical_name(file.removesuffix(".safetensors")).partition("-")
        for key in tells.get(kind, ()):
            if key in state and (name or "model") not in state[key]:
                raise ValueError(f"{key} lacks {name or 'model'}")


def _wanted_files(
    source: Source, pieces: Pieces | None, only: Collection[str] | None
) -> dict[str, list[str]]:
    there = [match["name"] for file in source.manifest.files if (match := TENSORS.fullmatch(file))]
    spread, count = ({}, 1) if pieces is None else (pieces.shapes, pieces.count)
    names = [logical_name(file) if logical_name(file) in spread else file for file in there]
    pieces_of = {name: [piece_file(name, rank, count) for rank in range(count)] for name in spread}
    by_name = {name: pieces_of.get(name, [name]) for name in names}
    if absent := [name for name in only or () if name not in by_name]:
        raise CheckpointError(
            "checkpoint-without-tensors",
            problem=f"{source.directory} has no tensors {absent[0]!r}",
            reason=f"available: {', '.join(sorted(by_name)) or 'none'}",
            path=source.directory,
            name=absent[0],
            available=sorted(by_name),
        )
    if lost := [
        name for name in spread if any(file not in there for file in by_name.get(name, [name]))
    ]:
        raise damage_error(source.directory, f"{MANIFEST}: lacks a piece of {lost[0]}")
    return {
        name: [f"{file}.safetensors" for file in files]
        for name, files in by_name.items()
        if only is None or name in only
    }


def _load(source: Source, file: str) -> dict[str, Tensor]:
    data = b"".join(source.chunks(file))
    try:
        return safetensors.torch.load(data)
    except Exception as problem:  # a foreign file can make the parser raise anything
        raise source.damage(f"{file}: not a safetensors file: {reason_of(problem)}") from problem


def _open(source: Source, file: str) -> dict[str, Stored]:
    with source.damage_in(file):
        return stored_in(source.directory / file, disk=source.disk)


def _join(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0].followed_by(parts[1:])
