"""Reports where they are asked for, and the one at the end of every run that has a directory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.config.paths import local_path
from surefoot.diagnose.checks import findings
from surefoot.diagnose.finding import Finding
from surefoot.diagnose.reading import Collected, described_in
from surefoot.errors import ConfigError, DataError, first_line
from surefoot.report.figures import write_file
from surefoot.report.page import POLICY, run_page, runs_page
from surefoot.report.series import read_reported_run
from surefoot.tracking.panels_file import read_panels
from surefoot.tracking.record import Record

FILE = "report.html"  # in a run's directory


def write_page(*paths: str | Path, out: str | Path | None = None) -> Path:
    """Write one page of HTML on a run, or on several with their curves over each other; returns its path.

    paths: directories of runs, finished, running or dead; nothing in them is changed but the page itself.
    out: the file to write. Absent: report.html in the run's directory, or, of several runs, in the current one.
    The page needs no network and no other file, and has at most a megabyte. It is there whole or not at all. Raises
    `ConfigError` where a path is no directory of a run, or the file cannot be written.

    >>> import tempfile
    >>> run = Path(tempfile.mkdtemp())
    >>> _ = (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}' + chr(10))
    >>> write_page(run).name, write_page(run).read_text()[:15]
    ('report.html', '<!DOCTYPE html>')
    """
    if not paths:
        raise ConfigError("report on which run? give the directory of one, or of several")
    places = [local_path(path, setting="paths") for path in paths]
    alone = places[0] if len(places) == 1 else Path()
    target = alone if out is None else local_path(out, setting="out")
    page = page_of(places).encode()
    return write_file(target / FILE if target.is_dir() else target, page)


def page_of(places: Sequence[Path], *, script: str = "", policy: str = POLICY) -> str:
    """The page on some runs as they are now; `ConfigError` where a directory is none of a run."""
    for place in places:
        if place.is_dir() and not (place / "metrics.jsonl").exists() and not (place / "config.toml").exists():
            raise ConfigError(f"{place} is no directory of a run: it has neither config.toml nor metrics.jsonl")
    if len(places) > 1:
        return runs_page([read_reported_run(place) for place in places], script=script, policy=policy)
    looked, panels = _Findings(), None
    run = read_reported_run(places[0], also=looked.add)
    found, notes = looked.at(run.files.path)
    try:
        panels = read_panels(run.files.path)
    except DataError as problem:
        notes.insert(0, first_line(problem))
    run = replace(run, problems=(*run.problems, *notes))
    return run_page(run, findings=found, panels=panels, script=script, policy=policy)


def report_at_end(path: Path, *, warn: Callable[[str], None]) -> None:
    """Write the page of a run that this process has just trained; whatever goes wrong with it is one warning."""
    try:
        write_file(path / FILE, page_of([path]).encode())
    except Exception as problem:  # looking at a run never breaks it
        kind = "" if isinstance(problem, ConfigError) else f"{type(problem).__name__}: "
        warn(f"warning: no {path / FILE}: {kind}{first_line(problem)}")


class _Findings:
    """What is wrong with a run, from its records as they are read; a fault of ours in that costs the page nothing else."""

    def __init__(self) -> None:
        self.held = Collected()
        self.problem: Exception | None = None

    def add(self, record: Record) -> None:
        try:
            if self.problem is None:
                self.held.add(record)
        except Exception as problem:
            self.problem = problem

    def at(self, path: Path) -> tuple[list[Finding], list[str]]:
        """The findings, and why there are none, where that is no good sign."""
        try:
            if self.problem is None:
                return findings(self.held.history(described_in(path))) if self.held.kinds else [], []
        except Exception as problem:
            self.problem = problem
        return [], [f"Findings cannot be told: {type(self.problem).__name__}: {self.problem}"]
