"""The content of a run's records for a report, collected from one record at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from surefoot.report.curves import Curve, total_of
from surefoot.report.heatmap import Layers
from surefoot.tracking.columns import Columns, in_columns
from surefoot.tracking.record import BY_OPTIMIZER, OWN, PHASES, Phase, Record, scores_in
from surefoot.tracking.run_reader import (
    RunFiles,
    is_running,
    missing_run,
    read_blocks,
    read_run,
    refuse_other_format,
)

_DRAWN = {"loss", "grad_norm", "grad_norm_max", "clip_fraction", "targets_per_s", "ms_per_step"}
_DRAWN |= {"lr", "momentum"}  # and those that begin like BY_OPTIMIZER
_DRAWN |= {"host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes"}
_MOST_CURVES = 60  # names of one kind; further names are left out
_MOST_EVENTS = 200
_LONGEST_EVENT = 500  # characters
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 6_000  # characters


@dataclass(frozen=True)
class Event:
    """An event and the number of steps completed before the event."""

    step: int
    what: str
    resumed: bool = False


@dataclass
class Recorded:
    """The content of a run's records."""

    train: dict[str, Curve] = field(default_factory=dict)
    users: dict[str, Curve] = field(default_factory=dict)  # values of `step.log`
    scores: dict[str, Curve] = field(default_factory=dict)
    at_end: dict[str, float] = field(default_factory=dict)  # computed once at the end of the run
    at_end_of_step: int | None = None
    kept_samples: list[tuple[int, str]] = field(default_factory=list)
    last_sample: tuple[int, str] | None = None
    sampled: int = 0
    sampled_every: int = 1  # one sample in this number is stored
    layers: Layers = field(default_factory=Layers)
    events: list[Event] = field(default_factory=list)
    more_events: int = 0
    trained_spent_s: dict[str, float] = field(default_factory=dict)  # from the training records
    ending_spent_s: dict[str, float] = field(
        default_factory=dict
    )  # after the last training record, until a resume
    targets: float = 0.0  # without the first steps
    skipped: int = 0
    last_step: int = 0
    count: int = 0
    eta_s: float | None = None
    over: str | None = None  # the last event, if no record followed

    def add(self, record: Record) -> None:
        """Add a record to the series of its kind."""
        self.count += 1
        step, kind = record["step"], record["kind"]
        self.last_step = max(self.last_step, step)
        self.over = str(record.get("event", "")) or None if kind == "event" else None
        match kind:
            case "train":
                self._add_train(step, record)
            case "eval":
                for name, value in scores_in(record).items():
                    self._add(self.scores, name, step, value)
            case "final_eval":
                self.at_end, weights = scores_in(record), record.get("weights_step")
                self.at_end_of_step = weights if isinstance(weights, int) else None
            case "sample" if isinstance(record.get("text"), str):
                self._add_sample(step, record["text"])
            case "layer_stats":
                self.layers.add(record)
            case "resume":
                self.ending_spent_s = {}
                self._tell(Event(step, f"resumed after step {step:,}", resumed=True))
            case "event" if isinstance(record.get("event"), str):
                self.ending_spent_s = _add_seconds({}, record)
                self._tell(Event(step, record["event"][:_LONGEST_EVENT]))

    def add_part(self, part: Columns | list[Record]) -> None:
        """Add records, or columns of training records."""
        if isinstance(part, Columns):
            self._add_columns(part)
            return
        for record in part:
            self.add(record)

    def _curves_with(self, name: str, logged_rates: Sequence[str] = ()) -> dict[str, Curve] | None:
        """Return the curves to which a value of a training record belongs, or None if no chart has
        it.
        """
        if name in logged_rates:
            return self.users
        if name in _DRAWN or name.startswith(BY_OPTIMIZER):
            return self.train
        return None if name in OWN else self.users

    def _add_columns(self, columns: Columns) -> None:
        steps = columns.values["step"]
        for name, values in columns.values.items():
            curves = self._curves_with(name)
            curve = None if curves is None else _curve(curves, name)
            if curve is not None:
                curve.extend(steps, values)
        for phase in PHASES:
            seconds = _timed(columns, f"{phase}_s")
            finite = seconds[np.isfinite(seconds)]
            if f"{phase}_s" in columns.values and len(finite):
                self.trained_spent_s[phase] = total_of(finite, self.trained_spent_s.get(phase, 0.0))
        self.targets = total_of(
            _timed(columns, "targets") - _timed(columns, "starting_targets"), self.targets
        )
        eta = columns.values.get("eta_s")
        self.eta_s = None if eta is None else eta[-1].item()
        self.count, self.last_step, self.over = (
            self.count + len(steps),
            max(self.last_step, int(steps.max())),
            None,
        )

    def _add_train(self, step: int, record: Record) -> None:
        for name, value in record.items():
            curves = self._curves_with(name, record.get("logged_rates", ()))
            if _is_number(value) and curves is not None:
                self._add(curves, name, step, value)
        applied = record.get("loss_applied")
        if _is_number(applied) and applied and not math.isfinite(record.get("loss") or 0.0):
            self._add(self.train, "loss", step, applied)  # 0 if no step was applied
        _add_seconds(self.trained_spent_s, record)
        self.targets += _timed_targets(record)
        self.eta_s = _number_in(record, "eta_s")
        skipped, steps = record.get("skipped"), record.get("skipped_steps")
        if isinstance(skipped, int) and skipped > 0:
            self.skipped += skipped
            which = (
                f": {', '.join(str(index) for index in steps[:5])}"
                if isinstance(steps, list) and steps
                else ""
            )
            more = ", ..." if which and skipped > 5 else ""
            subject = "1 step was" if skipped == 1 else f"{skipped:,} steps were"
            self._tell(
                Event(
                    step, f"{subject} skipped because of a non-finite gradient or loss{which}{more}"
                )
            )

    def _add(self, curves: dict[str, Curve], name: str, step: int, value: float) -> None:
        if (curve := _curve(curves, name)) is not None:
            curve.add(step, value)

    def _add_sample(self, step: int, text: str) -> None:
        cut = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} \u2026"
        if self.sampled % self.sampled_every == 0:
            self.kept_samples.append((step, cut))
        self.sampled += 1
        self.last_sample = (step, cut)
        if len(self.kept_samples) > _MOST_SAMPLES:
            self.kept_samples = self.kept_samples[::2]
            self.sampled_every *= 2

    @property
    def spent_s(self) -> dict[Phase, float]:
        """The seconds of all sessions by phase, from the clock of the run (`train/timer.py`)."""
        return {
            phase: self.trained_spent_s.get(phase, 0.0) + self.ending_spent_s.get(phase, 0.0)
            for phase in PHASES
        }

    @property
    def samples(self) -> list[tuple[int, str]]:
        """The steps and texts of samples, thinned if there are many. The last sample is always
        included.
        """
        last = (
            []
            if self.last_sample is None or self.last_sample in self.kept_samples[-1:]
            else [self.last_sample]
        )
        return self.kept_samples + last

    def _tell(self, event: Event) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        else:
            self.more_events += 1


class Following(Protocol):
    """A run whose next records `advance` reads; it returns True if there are more."""

    recorded: Recorded
    data: Record

    def advance(self) -> bool: ...


@dataclass(frozen=True)
class ReportedRun:
    """The data of a run's directory for a report. `running` is True if a process was training in
    the directory.
    """

    files: RunFiles
    recorded: Recorded
    data: Mapping[str, Any]  # the last record of kind "data_check"
    problems: tuple[str, ...]
    running: bool

    @property
    def last_step(self) -> int:
        """The last step that is known to be complete, from the records or the newest checkpoint."""
        return max(self.recorded.last_step, self.files.step)

    @property
    def count_unit(self) -> str:
        """The unit of the run's targets, such as "tokens"."""
        return (
            str(self.files.sessions[-1].get("count_unit", "targets"))
            if self.files.sessions
            else "targets"
        )


def read_reported_run(
    path: Path,
    *,
    also: Callable[[Columns | list[Record]], object] = lambda _: None,
    following: Following | None = None,
) -> ReportedRun:
    """Read a run for a report and call `also` with all records, many at once; `following` reads
    only what is new.

    Raises `ConfigError` if the directory does not exist.
    """
    if not path.is_dir():
        raise missing_run(path, path.parent)
    refuse_other_format(path)
    files, recorded, data = read_run(path), Recorded(), dict[str, Any]()
    problems = list(files.problems)
    try:
        following = following if (path / "metrics.jsonl").exists() else None
        while following is not None and following.advance():
            pass
        for part in in_columns(read_blocks(path)) if following is None else ():
            data = data_check_in(part) or data
            recorded.add_part(part)
            also(part)
    except OSError as problem:
        problems.insert(0, f"metrics.jsonl cannot be read: {problem.strerror or problem}")
    if following is not None:
        recorded, data = following.recorded, following.data
    return ReportedRun(files, recorded, data, tuple(problems), is_running(path))


def data_check_in(part: Columns | list[Record]) -> Record | None:
    """Return the last record of kind "data_check"."""
    records = [] if isinstance(part, Columns) else reversed(part)
    return next((record for record in records if record["kind"] == "data_check"), None)


def _add_seconds(spent_s: dict[str, float], record: Record) -> dict[str, float]:
    for phase in PHASES:
        seconds = _number_in(record, f"{phase}_s")
        if seconds is not None and math.isfinite(seconds):
            spent_s[phase] = spent_s.get(phase, 0.0) + seconds
    return spent_s


def _curve(curves: dict[str, Curve], name: str) -> Curve | None:
    if name not in curves and len(curves) < _MOST_CURVES:
        curves[name] = Curve()
    return curves.get(name)


def _timed_targets(record: Record) -> float:
    return (_number_in(record, "targets") or 0.0) - (_number_in(record, "starting_targets") or 0.0)


def _timed(columns: Columns, name: str) -> NDArray[Any]:
    return columns.values.get(name, np.zeros(len(columns)))


def _number_in(record: Record, name: str) -> float | None:
    value = record.get(name)
    return value if _is_number(value) else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
