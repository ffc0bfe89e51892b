"""Checkpoints as several ranks find them: all take the same one, and each checks a share of its bytes. Every call is collective."""

from collections.abc import Collection
from functools import partial
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
    return store.newest_intact(there=_named_by_main(store, world), read_one=partial(_checked, store, world, only))


def at(store: Store, world: World, step: int, *, only: Collection[str] | None = None) -> Contents:
    """As `Store.at`, with the tensors on disk where there are several ranks."""
    if world.size == 1:
        return store.at(step, only=only)
    return store.at(step, there=_named_by_main(store, world), read_one=partial(_checked, store, world, only))


def in_directory(path: Path, world: World) -> Contents:
    """As `read`, with the tensors on disk where there are several ranks; a `DamageError` is the same on all of them."""
    return read(path) if world.size == 1 else _read_together(path, world, None, disk=DISK)


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


def _checked(store: Store, world: World, only: Collection[str] | None, step: int, path: Path) -> Contents:
    contents = _read_together(path, world, only, disk=store.disk, step=step)
    if only is None and path == store.path(step):
        store.intact.add(step)
    return contents


def _read_together(
    path: Path, world: World, only: Collection[str] | None, *, disk: Files, step: int | None = None
) -> Contents:
    """A checkpoint whose every byte one of the ranks has checked; what is wrong all raise alike. `step` is that of its name."""
    contents: Contents | None = None
    try:
        manifest = read_manifest(path, disk=disk)
        if step is not None and manifest.step != step:
            raise DamageError(path, f"{MANIFEST}: is that of step {manifest.step}")
        by_size = sorted(files_of(manifest, only), key=lambda file: (-manifest.files[file][0], file))
        problems = check(path, by_size[world.rank :: world.size], disk=disk)
        contents = opened(path, only=only, disk=disk)
    except DamageError as error:
        problems = [error.damage.problem]
    problems = [problem for each in world.gathered(problems) for problem in each]
    if problems or contents is None:
        raise DamageError(path, problems[0])
    return contents
