"""Checkpoints as several ranks find them: all take the same one, and each checks a share of its bytes. Every call is collective."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.filesystem import DISK, Files
from surefoot.checkpoint.format import Contents, Damage, DamageError
from surefoot.checkpoint.manifest import MANIFEST
from surefoot.checkpoint.reader import check, files_of, opened, read, read_manifest
from surefoot.checkpoint.store import Store
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError


def newest_intact(
    store: Store, world: World, *, only: Collection[str] | None = None
) -> tuple[Contents, list[Damage]] | None:
    """As `Store.newest_intact`; of several ranks all find the same, and its tensors stay on disk until they are asked for."""
    if world.size == 1:
        return store.newest_intact(only=only)
    damaged: list[Damage] = []
    for step, path in _named_by_main(store, world):
        found = _checked(step, path, store, world, only)
        if isinstance(found, Contents):
            return found, damaged
        damaged.append(found)
    if not damaged:
        return None
    raise store.nothing_intact(damaged)


def at(store: Store, world: World, step: int, *, only: Collection[str] | None = None) -> Contents:
    """As `Store.at`, with the tensors on disk where there are several ranks."""
    if world.size == 1:
        return store.at(step, only=only)
    error: CheckpointError | None = None
    for there, path in _named_by_main(store, world):
        if there == step:
            found = _checked(step, path, store, world, only)
            if isinstance(found, Contents):
                return found
            error = error or DamageError(path, found.problem)
    raise error or store.absent(step)


def in_directory(path: Path, world: World) -> Contents:
    """As `read`, with the tensors on disk where there are several ranks; a `DamageError` is the same on all of them."""
    if world.size == 1:
        return read(path)
    found = _together(path, _look(path, world, None, disk=DISK), world)
    if isinstance(found, Damage):
        raise DamageError(path, found.problem)
    return found


@dataclass(frozen=True)
class _Looked:
    """What one rank has seen of a checkpoint."""

    problems: list[str]
    contents: Contents | None


def _named_by_main(store: Store, world: World) -> list[tuple[int, Path]]:
    """The checkpoints there are, the newest first, as rank 0 sees the directory."""
    found: list[tuple[int, str]] = []
    problem: str | None = None
    if world.is_main:
        try:
            found = [(step, path.name) for step, path in store.all()]
        except CheckpointError as error:
            problem = str(error)
    found, problem = world.from_main([found, problem])
    if problem is not None:
        raise CheckpointError(problem)
    return [(step, store.directory / name) for step, name in found]


def _checked(step: int, path: Path, store: Store, world: World, only: Collection[str] | None) -> Contents | Damage:
    """A checkpoint whose every byte one of the ranks has checked, or what is wrong with it, as all ranks say together."""
    found = _together(path, _look(path, world, only, disk=store.disk, step=step), world)
    if only is None and isinstance(found, Contents) and path == store.path(step):
        store.intact.add(step)
    return found


def _together(path: Path, looked: _Looked, world: World) -> Contents | Damage:
    problems = [problem for each in world.gathered(looked.problems) for problem in each]
    if problems or looked.contents is None:
        return Damage(path, next(iter(problems), "cannot be read"))
    return looked.contents


def _look(path: Path, world: World, only: Collection[str] | None, *, disk: Files, step: int | None = None) -> _Looked:
    """What this rank sees of a checkpoint, having checked its share of the bytes; `step` is that of its name."""
    try:
        manifest = read_manifest(path, disk=disk)
        if step is not None and manifest.step != step:
            return _Looked([f"{MANIFEST}: is that of step {manifest.step}"], None)
        by_size = sorted(files_of(manifest, only), key=lambda file: (-manifest.files[file][0], file))
        problems = check(path, by_size[world.rank :: world.size], disk=disk)
        return _Looked(problems, opened(path, only=only, disk=disk))
    except DamageError as error:
        return _Looked([error.damage.problem], None)
