"""A run as a report reads it: its files, and the curves of its records."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from surefoot.config.setting_change import in_effect
from surefoot.tools.report.curves import Curve, curve_of
from surefoot.tools.report.followed import FollowedRun
from surefoot.tracking.branches import BRANCHES, is_at_branching
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.record import BY_OPTIMIZER, OWN
from surefoot.tracking.run_reader import (
    RunFiles,
    is_running,
    missing_run,
    read_run,
    refuse_other_format,
)
from surefoot.tracking.run_records import RunEvent, RunRecords, records_of
from surefoot.tracking.table import Table
from surefoot.train.changed_settings import described

_DRAWN = {"loss", "grad_norm", "grad_norm_max", "clip_fraction", "targets_per_s", "ms_per_step"}
_DRAWN |= {"lr", "momentum"}  # and those that begin like BY_OPTIMIZER
_DRAWN |= {"host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes"}
_MOST_CURVES = 60  # names of one kind; further names are left out
_MOST_LEFT = 3  # branches that a run has left; the newest ones are drawn


@dataclass(frozen=True)
class LeftBranch:
    """The losses of the steps that a run has left by going back, by name: "loss" of training, and
    "SPLIT/loss".
    """

    number: int  # of the line by which the run went back
    losses: dict[str, Curve]


@dataclass(frozen=True)
class ReportedRun:
    """The data of a run's directory for a report. `running` is True if a process was training in
    the directory.
    """

    files: RunFiles
    records: RunRecords
    problems: tuple[str, ...] = ()
    running: bool = False

    @cached_property
    def train(self) -> dict[str, Curve]:
        """The curves of training that have a chart."""
        names = []
        for name in self.records.train.names:
            is_drawn = name in _DRAWN or name.startswith(BY_OPTIMIZER)
            if is_drawn and not self._is_of_user(name):
                names.append(name)
        return _curves(self.records.train, names)

    @cached_property
    def users(self) -> dict[str, Curve]:
        """The curves of the values of `step.log`."""
        names = [name for name in self.records.train.names if self._is_of_user(name)]
        return _curves(self.records.train, names)

    @cached_property
    def scores(self) -> dict[str, Curve]:
        """The curves of the scores of evaluations."""
        return _curves(self.records.scores, self.records.scores.names)

    def _is_of_user(self, name: str) -> bool:
        if name in self.records.user_rates:
            return True
        return name not in OWN and not name.startswith(BY_OPTIMIZER)

    @cached_property
    def events(self) -> tuple[RunEvent, ...]:
        """What the records tell beside curves, and the changes of settings, in the order of their
        steps.
        """
        changes = [
            RunEvent(each.from_step, described(each)) for each in in_effect(self.files.changes)
        ]
        return tuple(sorted([*self.records.events, *changes], key=lambda event: event.step))

    @cached_property
    def left(self) -> tuple[LeftBranch, ...]:
        """The newest branches that the run has left."""
        branches = []
        for change in self.files.changes:
            metrics = self.files.path / BRANCHES / str(change.number) / "metrics.jsonl"
            if change.goes_back and metrics.is_file():
                size_bytes = metrics.stat().st_size
                losses = _left_losses(metrics, change.from_step, size_bytes)
                branches.append(LeftBranch(change.number, losses))
        return tuple(branches[-_MOST_LEFT:])

    @cached_property
    def went_back(self) -> bool:
        """True if the run has gone back to an earlier step, from which nobody has trained it."""
        return not self.running and is_at_branching(self.files.path, self.files.changes)

    @property
    def last_step(self) -> int:
        """The last step that is known to be complete, from the records or the newest checkpoint.
        That of the checkpoint if the run has gone back: the records have steps that it has left.
        """
        if self.went_back:
            return self.files.step
        return self.records.completed_step(self.files.step)

    @property
    def count_unit(self) -> str:
        """The unit of the run's targets, such as "tokens"."""
        if not self.files.sessions:
            return "targets"
        return str(self.files.sessions[-1].get("count_unit", "targets"))


def read_reported_run(path: Path, *, followed: FollowedRun | None = None) -> ReportedRun:
    """Read a run for a report; of a `followed` one, only what is new.

    Raises `ConfigError` if the directory does not exist.
    """
    if not path.is_dir():
        raise missing_run(path, path.parent)
    refuse_other_format(path)
    files = read_run(path)
    problems = list(files.problems)
    records = RunRecords()
    try:
        if followed is None:
            records = records_of(path)
        elif (path / "metrics.jsonl").exists():
            while followed.advance():
                pass
            records = followed.records
    except OSError as problem:
        problems.insert(0, f"metrics.jsonl cannot be read: {problem.strerror or problem}")
    return ReportedRun(files, records, tuple(problems), is_running(path))


@lru_cache(maxsize=8)
def _left_losses(metrics: Path, since: int, size_bytes: int) -> dict[str, Curve]:
    """Return the losses after step `since` in the records of a branch, which never change again."""
    records = RunRecords()
    try:
        for record in read_records(metrics, size_bytes=size_bytes):
            if record["step"] > since:
                records.add(record)
    except OSError:
        return {}
    names = [name for name in records.scores.names if name.endswith("/loss")]
    return _curves(records.train, ["loss"]) | _curves(records.scores, names)


def _curves(values: Table, names: Sequence[str]) -> dict[str, Curve]:
    return {name: curve_of(values, name) for name in names[:_MOST_CURVES]}
