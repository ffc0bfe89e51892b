"""Run directories by number: `{n}` in run_dir is the next free number, or the newest one after a
restart. Imports no torch.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeGuard

from surefoot.config.paths import named_path, unusable_path

PLACEHOLDER = "{n}"
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_rebuilt: ContextVar[Path | None] = ContextVar("run that is built again", default=None)
_rebuilt_step: ContextVar[int | None] = ContextVar("step of its settings", default=None)


def is_numbered(run_dir: object) -> TypeGuard[str | Path]:
    """Return True if a run directory contains `{n}`.

    >>> is_numbered("runs/gpt-{n}"), is_numbered("runs/gpt"), is_numbered(None)
    (True, False, False)
    """
    return isinstance(run_dir, str | Path) and PLACEHOLDER in str(run_dir)


def choose_directory(run_dir: str | Path, *, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of a run with a number for `{n}`: one more than the highest that exists,
    which is created, so that no other process takes it. A process that a launcher or Slurm has
    restarted takes the highest. A run that is built again stays in its directory.
    """
    rebuilt = _rebuilt.get()
    if rebuilt is not None:
        return rebuilt
    path = named_path(run_dir, setting="run_dir")
    place = next(index for index, part in enumerate(path.parts) if PLACEHOLDER in part)
    parent = Path(*path.parts[:place])
    try:
        highest = max(_numbers(parent, path.parts[place]), default=0)
        if highest and is_restarted(environment):
            return _with_number(path, highest)
        parent.mkdir(parents=True, exist_ok=True)
        while True:  # until no other process takes the number
            highest += 1
            with suppress(FileExistsError):
                _with_number(Path(*path.parts[: place + 1]), highest).mkdir()
                return _with_number(path, highest)
    except OSError as problem:
        raise unusable_path(path, problem, setting="run_dir") from problem


def _with_number(path: Path, number: int) -> Path:
    return Path(str(path).replace(PLACEHOLDER, str(number)))


def _numbers(parent: Path, name: str) -> Iterator[int]:
    """Yield the numbers of the entries of a directory whose name is `name` with a number."""
    if not parent.is_dir():
        return
    before, _, after = name.partition(PLACEHOLDER)
    same_number_after = re.escape(after).replace(re.escape(PLACEHOLDER), r"\1")
    numbered = re.compile(f"{re.escape(before)}([0-9]+){same_number_after}")
    for entry in os.listdir(parent):
        match = numbered.fullmatch(entry)
        if match is not None:
            yield int(match[1])


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Return True in a process that torchrun, surefoot's launcher or Slurm has started again.

    >>> is_restarted({"SLURM_RESTART_COUNT": "1"}), is_restarted({"SLURM_RESTART_COUNT": "0"})
    (True, False)
    """
    return any(environment.get(name, "0") not in ("", "0") for name in _RESTARTS)


def give_back(directory: Path) -> None:
    """Remove a directory that was chosen and not used."""
    with suppress(OSError):  # it is not empty, or another process uses it
        directory.rmdir()


@contextmanager
def built_again(run: Path | None, *, step: int | None = None) -> Iterator[None]:
    """Build a run in this context in the directory `run`, whatever number would be next, with the
    settings that it had after `step` steps. None: those after its newest checkpoint.
    """
    before = _rebuilt.set(run)
    step_before = _rebuilt_step.set(step)
    try:
        yield
    finally:
        _rebuilt.reset(before)
        _rebuilt_step.reset(step_before)


def rebuilt_step() -> int | None:
    """Return the step whose settings a run that is built again in this context has, or None for
    those after its newest checkpoint.
    """
    return _rebuilt_step.get()


def rebuilt_run() -> Path | None:
    """Return the directory of the run that is built again in this context, or None."""
    return _rebuilt.get()


def free_directory(directory: Path) -> Path:
    """Return a directory beside another one that does not exist: runs/gpt-2 after runs/gpt.

    >>> str(free_directory(Path("no-such/gpt")))
    'no-such/gpt-2'
    """
    name = directory.name
    counted = re.fullmatch(r"(.+)-([0-9]+)", name)
    if counted is not None and directory.with_name(counted[1]).exists():
        name = counted[1]
    elif not name:  # the current directory
        name = "run"
        directory = directory / name
    number = 2
    while os.path.lexists(directory.with_name(f"{name}-{number}")):
        number += 1
    return directory.with_name(f"{name}-{number}")
