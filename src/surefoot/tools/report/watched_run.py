"""One run on the page of a directory: its row, and the files that say whether there is something
new.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.tools.diagnose.finding import Finding
from surefoot.tools.report.charts import Chart, Line, axes
from surefoot.tools.report.followed import FollowedRun, Row
from surefoot.tools.report.headline import headline, state_of
from surefoot.tools.report.page import coordinates
from surefoot.tools.report.run_charts import points_of
from surefoot.tools.report.series import ReportedRun
from surefoot.tracking.run_reader import RunFiles, Settings, is_running

_SPARKS = 24  # stretches of the small curve of a row
_OF_FINDING = ("name", "severity", "message", "step", "evidence", "causes", "try")


@dataclass(eq=False)
class WatchedRun:
    """A run of the directory. `row` is None until records are read."""

    path: Path
    name: str
    key: str  # in addresses of the page
    began: float = 0.0
    stamp: tuple[Any, ...] = ()  # size and time of its records, and whether it is running
    read: tuple[Any, ...] | None = None  # the stamp when all records were read
    row: Row | None = None
    fraction: float = 0.0  # of its records that are read
    note: str = ""  # the answer to a request
    stopped: int = 0  # the process that was asked to stop
    watched: bool = False  # it was running since the page exists, so that its findings are sent
    alerted: list[str] = field(default_factory=list)  # names of findings that were sent
    files: RunFiles | None = None
    checked_at: float = 0.0
    saved_at: float = 0.0
    dirty: bool = False  # read further than the cache

    @property
    def running(self) -> bool:
        return bool(self.stamp) and self.stamp[-1] is True

    @property
    def state(self) -> str:
        """The state of the last row, corrected by the current holder of the lock."""
        state = self.row["state"] if self.row is not None else "dead"
        if state in ("running", "dead") or (self.running and self.read != self.stamp):
            return "running" if self.running else "dead"
        return state


def row_of(run: WatchedRun, followed: FollowedRun, findings: Sequence[Finding] | None) -> Row:
    """Return what the page shows of a run; `findings` None keeps those of the last row."""
    records, before = followed.records, run.row
    reported = ReportedRun(run.files or no_files(run.path), records, running=run.running)
    main = headline(reported)
    curve = None if main is None else reported.scores.get(main.name) or reported.train["loss"]
    line = Line("", points_of(curve, _SPARKS))
    both = axes(Chart("", "", (line,)))
    listed = before["findings"] if before is not None else []
    if findings is not None:
        listed = [
            {name: each[name] for name in _OF_FINDING} for each in map(Finding.to_dict, findings)
        ]
    return Row(
        step=reported.last_step,
        planned=reported.files.planned_steps,
        state=state_of(reported),
        records=records.count,
        eta_s=records.eta_s,
        metric=None if main is None else main.name,
        last=None if main is None else main.last,
        best=None if main is None else main.best,
        best_step=None if main is None else main.best_step,
        spark=[] if both is None else [list(point) for point in coordinates(line, *both)],
        findings=listed,
        alerted=list(run.alerted),
    )


def runs_in(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the runs' directories below a directory; a run's own directories are not searched."""
    with suppress(OSError):
        for entry in os.scandir(directory):
            path = Path(entry.path)
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            if (path / "config.toml").exists() or (path / "metrics.jsonl").exists():
                yield path
            elif depth > 1 and not entry.is_symlink():
                yield from runs_in(path, depth - 1)


def began_at(path: Path) -> float:
    """Return when the last session of a run began."""
    file = path / "config.toml"
    return (file if file.exists() else path / "metrics.jsonl").stat().st_mtime


def stamp_of(path: Path) -> tuple[Any, ...]:
    """Return size and time of a run's records, and whether a process trains it."""
    with suppress(OSError):
        status = (path / "metrics.jsonl").stat()
        return status.st_size, status.st_mtime_ns, is_running(path)
    return 0, 0, is_running(path)


def no_files(path: Path) -> RunFiles:
    """Return the files of a run as if it had none."""
    return RunFiles(path, Settings({}, {}, {}, {}), (), (), 0, None, ())
