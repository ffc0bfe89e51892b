"""Reports where they are asked for, and the one at the end of every run that has a directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.reporting.page import run_page, runs_page
from surefoot.reporting.reading import read_run

FILE = "report.html"  # in a run's directory


def report(*paths: str | Path, out: str | Path | None = None) -> Path:
    """Write one page of HTML on a run, or on several with their curves over each other; returns its path.

    paths: directories of runs, finished, running or dead; nothing in them is changed but the page itself.
    out: the file to write. Absent: report.html in the run's directory, or, of several runs, in the current one.
    The page needs no network and no other file, and has at most a megabyte. It is there whole or not at all. Raises
    `ConfigError` where a path is no directory of a run, or the file cannot be written.
    """
    if not paths:
        raise ConfigError("report on which run? give the directory of one, or of several")
    places = [Path(path) for path in paths]
    target = Path(out) if out is not None else places[0] / FILE if len(places) == 1 else Path(FILE)
    write(page_of(places), target)
    return target


def page_of(places: list[Path]) -> str:
    """The page on some runs as they are now."""
    for place in places:
        refuse_no_run(place)
    runs = [read_run(place) for place in places]
    running = [is_running(place) for place in places]
    return run_page(runs[0], running=running[0]) if len(runs) == 1 else runs_page(runs, running=running)


def report_at_end(path: Path, *, warn: Callable[[str], None]) -> None:
    """Write the page of a run that this process has just trained; whatever goes wrong with it is one warning."""
    try:
        write(run_page(read_run(path)), path / FILE)
    except Exception as problem:  # looking at a run never breaks it
        told = str(problem).partition("\n")[0]
        warn(f"warning: no {path / FILE}: {told if isinstance(problem, ConfigError) else f'{type(problem).__name__}: {told}'}")


def write(page: str, target: Path) -> None:
    """Write a page so that it is there whole or not at all; `ConfigError` where that cannot be."""
    beside = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, encoding="utf-8")
        beside.replace(target)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(f"cannot write {target}: {why}\n  choose another place: --out FILE") from problem


def refuse_no_run(path: Path) -> None:
    """Raise `ConfigError` where a directory is none of a run."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory of a run")
    if not (path / "metrics.jsonl").exists() and not (path / "config.toml").exists():
        raise ConfigError(f"{path} is no directory of a run: it has neither config.toml nor metrics.jsonl")


def is_running(path: Path) -> bool:
    """Whether a process trains into a run's directory now, as far as its lock tells."""
    if "surefoot.directory" in sys.modules:  # else this process trains nothing
        from surefoot.directory import held_here

        if held_here(path):  # to open and close its lock would let go of it
            return True
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        lock = (path / ".lock").open("r+")
    except OSError:  # there is none, or it is another user's
        return False
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
