"""Which trackers there are, what each needs, and what a run is called in them. Torch-free, and imports none of them."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from surefoot.config.tree import nearest
from surefoot.errors import ConfigError

PACKAGES = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""Each tracker with what it imports. Its extra and its file have its name, and its class too, with a capital letter."""

_USUAL = ("runs", "outputs", "experiments")  # directories of runs, which name no project
_LONGEST = 100  # characters of a name: Weights & Biases takes 128


def tracker_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The trackers in "wandb,mlflow" or a sequence of names; `ConfigError` for one that is unknown or named twice.

    >>> tracker_names("wandb, mlflow"), tracker_names(["trackio"]), tracker_names(None)
    (('wandb', 'mlflow'), ('trackio',), ())
    """
    names = tuple(name.strip() for name in (given.split(",") if isinstance(given, str) else given or ()))
    for name in names:
        if name not in PACKAGES:
            meant = nearest(name, PACKAGES)
            cure = f"did you mean {meant}?" if meant else f"there are: {', '.join(PACKAGES)}"
            raise ConfigError(f"no tracker {name!r}: {cure}")
    if len(set(names)) < len(names):
        raise ConfigError(f"trackers = {given!r} names one of them twice")
    return names


def trackers_of(given: str | Sequence[str] | None, *, out: str | Path | None) -> tuple[str, ...]:
    """The trackers of a run; `ConfigError` where it has no directory to keep in which run of theirs it is.

    >>> trackers_of("trackio", out="runs/first")
    ('trackio',)
    """
    names = tracker_names(given)
    if names and out is None:
        raise ConfigError(
            f"trackers = {given!r}: which of their runs this is, is kept in the run's directory, and there is none\n  give one: --out DIR"
        )
    return names


def refuse_missing(names: Sequence[str]) -> None:
    """Raise one `ConfigError` for all trackers whose packages are not installed here.

    >>> refuse_missing([])
    """
    missing = {name: [package for package in PACKAGES[name] if not _is_there(package)] for name in names}
    lacking = [name for name, packages in missing.items() if packages]
    if lacking:
        what = "; ".join(f"{name} needs {', '.join(missing[name])}" for name in lacking)
        raise ConfigError(
            f'trackers: {what}, not installed here\n  pip install "surefoot[{",".join(lacking)}]", or leave it out'
        )


def project_and_name(out: Path) -> tuple[str, str]:
    """What a run is called in a tracker: the directory that its own lies in, and its own; one called "runs" names no project.

    >>> project_and_name(Path("/home/ann/poems/runs/first")), project_and_name(Path("/data/poems/second try"))
    (('poems', 'first'), ('poems', 'second_try'))
    """
    place = out.resolve()
    above = next((folder for folder in place.parents if folder.name not in _USUAL), place.parent)
    return _plain(above.name) or "surefoot", _plain(place.name) or "run"


def _is_there(package: str) -> bool:
    """Whether it can be imported; a directory of its name, such as the one that wandb leaves behind, is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _plain(name: str) -> str:
    """A name in characters that every tracker takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_.-")[:_LONGEST]
