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
from surefoot.tools.report.curves import Curve
from surefoot.tools.report.followed import FollowedRun, RunRow
from surefoot.tools.report.headline import headline, main_curve, state_of
from surefoot.tools.report.page import coordinates
from surefoot.tools.report.run_charts import points_of
from surefoot.tools.report.series import ReportedRun
from surefoot.tracking.run_reader import RunFiles, Settings, is_run, is_running

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
    row: RunRow | None = None
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
    def has_rates(self) -> bool:
        """True if the run takes changes of its learning rates while it trains."""
        session = self.files.sessions[-1] if self.files and self.files.sessions else {}
        rates = [name for name in session.get("settings", {}) if name.endswith("lr")]
        return bool(session.get("takes_changes")) and bool(rates)

    @property
    def state(self) -> str:
        """The state of the last row, corrected by the current holder of the lock."""
        if self.running and self.read != self.stamp:
            return "running"
        state = "dead" if self.row is None else self.row["state"]
        if state in ("running", "dead"):
            return "running" if self.running else "dead"
        return state


def row_of(run: WatchedRun, followed: FollowedRun, findings: Sequence[Finding] | None) -> RunRow:
    """Return what the page shows of a run; `findings` None keeps those of the last row."""
    records = followed.records
    reported = ReportedRun(run.files or no_files(run.path), records, running=run.running)
    row = RunRow(
        step=reported.last_step,
        planned=reported.files.planned_steps,
        state=state_of(reported),
        records=records.count,
        eta_s=records.eta_s,
        metric=None,
        last=None,
        best=None,
        best_step=None,
        spark=[],
        findings=[],
        alerted=list(run.alerted),
    )
    main = headline(reported)
    if main is not None:
        row["metric"] = main.name
        row["last"] = main.last
        row["best"] = main.best
        row["best_step"] = main.best_step
        row["spark"] = _spark(main_curve(reported, main))
    if findings is not None:
        for finding in findings:
            values = finding.to_dict()
            row["findings"].append({name: values[name] for name in _OF_FINDING})
    elif run.row is not None:
        row["findings"] = run.row["findings"]
    return row


def _spark(curve: Curve) -> list[list[float]]:
    """Return the points of the small curve of a row."""
    line = Line("", points_of(curve, _SPARKS))
    both = axes(Chart("", "", (line,)))
    if both is None:
        return []
    horizontal, vertical = both
    return [list(point) for point in coordinates(line, horizontal, vertical)]


def runs_in(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the runs' directories below a directory; a run's own directories are not searched."""
    with suppress(OSError):
        for entry in os.scandir(directory):
            path = Path(entry.path)
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            if is_run(path):
                yield path
            elif depth > 1 and not entry.is_symlink():
                yield from runs_in(path, depth - 1)


def began_at(path: Path) -> float:
    """Return when the last session of a run began."""
    file = path / "config.toml"
    if not file.exists():
        file = path / "metrics.jsonl"
    return file.stat().st_mtime


def stamp_of(path: Path) -> tuple[Any, ...]:
    """Return size and time of a run's records, and whether a process trains it."""
    with suppress(OSError):
        status = (path / "metrics.jsonl").stat()
        return status.st_size, status.st_mtime_ns, is_running(path)
    return 0, 0, is_running(path)


def no_files(path: Path) -> RunFiles:
    """Return the files of a run as if it had none."""
    return RunFiles(path, Settings({}, {}, {}, {}), (), (), 0, None, ())
