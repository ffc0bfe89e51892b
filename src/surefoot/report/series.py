"""What the records of a run come to: curves, events, samples, layers and times, gathered one record at a time; and the whole run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from surefoot.checkpoint.state_json import Watched
from surefoot.errors import ConfigError
from surefoot.report.layer_tables import Layers
from surefoot.tracking.record import OWN, Record, scores_in
from surefoot.tracking.run_reader import RunFiles, read_records, read_run

STRETCHES = 300  # of a curve, each of two points: about as many as a screen has columns for

_STRANGE = 50  # steps with a value that is not finite, of which the number is kept


@dataclass(slots=True)
class Stretch:
    """Neighbouring points as one: the least and the largest of them, and their mean."""

    low_at: int
    low: float
    high_at: int
    high: float
    steps: float  # summed up, as `total` is
    total: float
    count: int

    def with_next(self, later: Stretch) -> Stretch:
        """This stretch and the one after it as one; of equal values the first stands."""
        low = (later.low_at, later.low) if later.low < self.low else (self.low_at, self.low)
        high = (later.high_at, later.high) if later.high > self.high else (self.high_at, self.high)
        return Stretch(*low, *high, self.steps + later.steps, self.total + later.total, self.count + later.count)


class Curve:
    """Values by step, added in order. Up to `stretches` of them are kept as they are; of more, pairs of neighbours are joined.

    >>> curve = Curve(stretches=2)
    >>> for step, value in enumerate([3.0, 1.0, 2.0, 9.0, 2.0, 2.0]):
    ...     curve.add(step, value)
    >>> curve.points(), len(curve.held) <= 4
    ([(0, 3.0), (1, 1.0), (2, 2.0), (3, 9.0), (4, 2.0), (5, 2.0)], True)
    """

    def __init__(self, stretches: int = STRETCHES) -> None:
        self.most = 2 * stretches
        self.held: list[Stretch] = []
        self.size = 1  # points of each stretch but the last
        self.count = 0  # finite values
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.strange: list[int] = []  # the first steps with a value that is not finite
        self.strange_count = 0

    def add(self, step: int, value: float) -> None:
        """One more value, of a later step than those before."""
        if not math.isfinite(value):
            self.strange_count += 1
            if len(self.strange) < _STRANGE:
                self.strange.append(step)
            return
        self.count += 1
        self.last = (step, value)
        if self.first is None:
            self.first = self.last
        held = self.held
        if held and held[-1].count < self.size:
            stretch = held[-1]
            if value < stretch.low:
                stretch.low_at, stretch.low = step, value
            if value > stretch.high:
                stretch.high_at, stretch.high = step, value
            stretch.steps += step
            stretch.total += value
            stretch.count += 1
            return
        if len(held) == self.most:
            self.held = held = [one.with_next(other) for one, other in zip(held[::2], held[1::2], strict=True)]
            self.size *= 2
        held.append(Stretch(step, value, step, value, float(step), value, 1))

    def points(self, stretches: int | None = None) -> list[tuple[int, float]]:
        """What is drawn of the curve: the first and last value, and the least and the largest of each stretch, by step.

        `stretches` asks for fewer than are held.
        """
        found: dict[int, float] = {}
        for stretch in _joined(self.held, stretches):
            for step, value in sorted({(stretch.low_at, stretch.low), (stretch.high_at, stretch.high)}):
                found[step] = value
        for end in (self.first, self.last):
            if end is not None:
                found[end[0]] = end[1]
        return sorted(found.items())

    def means(self) -> list[tuple[float, float, int]]:
        """Mean step, mean value and number of values of each stretch."""
        return [(held.steps / held.count, held.total / held.count, held.count) for held in self.held]

    @property
    def least(self) -> tuple[int, float] | None:
        """The step of the least value, the first of equals, and that value; None where there is none."""
        low = min(self.held, key=lambda held: (held.low, held.low_at), default=None)
        return None if low is None else (low.low_at, low.low)

    @property
    def largest(self) -> tuple[int, float] | None:
        """The step of the largest value, the first of equals, and that value; None where there is none."""
        high = min(self.held, key=lambda held: (-held.high, held.high_at), default=None)
        return None if high is None else (high.high_at, high.high)

    def at_or_before(self, step: float) -> float | None:
        """The mean of the last stretch that begins no later than `step`; None where there is none."""
        found = [held.total / held.count for held in self.held if min(held.low_at, held.high_at) <= step]
        return found[-1] if found else None


def smoothed(curve: Curve, *, width: float = 0.012) -> list[tuple[float, float]]:
    """A curve without its noise: means of stretches, each weighed with its neighbours by a Gaussian.

    `width`: its standard deviation, as a fraction of the stretches; at the ends it is cut off and weighed anew.

    >>> flat = Curve()
    >>> for step in range(100):
    ...     flat.add(step, 2.0)
    >>> {round(value, 9) for _, value in smoothed(flat)}
    {2.0}
    """
    means = curve.means()
    deviation = width * len(means)
    reach = math.ceil(3 * deviation)
    if reach < 2:
        return [(step, value) for step, value, _ in means]
    weights = [math.exp(-0.5 * (offset / deviation) ** 2) for offset in range(-reach, reach + 1)]
    found = []
    for place, (step, _, _) in enumerate(means):
        first = max(0, place - reach)
        near = means[first : place + reach + 1]
        weighed = [
            weight * count for (_, _, count), weight in zip(near, weights[first - place + reach :], strict=False)
        ]
        total = math.fsum(weight * value for (_, value, _), weight in zip(near, weighed, strict=True))
        found.append((step, total / math.fsum(weighed)))
    return found


def _joined(held: list[Stretch], stretches: int | None) -> list[Stretch]:
    while stretches is not None and len(held) > max(1, stretches):
        joined = [one.with_next(other) for one, other in zip(held[::2], held[1::2], strict=False)]
        held = joined + held[2 * len(joined) :]
    return held


PHASES = {
    "starting": "first steps",
    "training": "training",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "user": "your own code",
}

_SPENT = {phase: f"{phase}_s" for phase in PHASES}

_DRAWN = {
    "loss",
    "norm",
    "norm_max",
    "clipped",
    "learning_rate",
    "targets_per_s",
    "host_memory_bytes",
    "host_memory_peak_bytes",
    "device_memory_peak_bytes",
}

_MOST_CURVES = 60  # names of one kind: more are left out

_MOST_EVENTS = 200

_LONGEST_EVENT = 500  # letters

_MOST_SAMPLES = 8

_LONGEST_SAMPLE = 6_000  # letters


@dataclass(frozen=True)
class Event:
    """Something that happened after so many steps."""

    step: int
    what: str
    kind: str = "event"  # or "resumed", "skipped"


@dataclass
class Recorded:
    """What the records of a run tell."""

    train: dict[str, Curve] = field(default_factory=dict)
    users: dict[str, Curve] = field(default_factory=dict)  # what `step.log` added
    scores: dict[str, Curve] = field(default_factory=dict)
    at_end: dict[str, float] = field(default_factory=dict)  # scored once, when the run was over
    at_end_of_step: int | None = None
    kept_samples: list[tuple[int, str]] = field(default_factory=list)
    last_sample: tuple[int, str] | None = None
    sampled: int = 0
    sampled_every: int = 1  # of so many samples one is kept
    layers: Layers = field(default_factory=Layers)
    events: list[Event] = field(default_factory=list)
    more_events: int = 0
    trained_spent_s: dict[str, float] = field(default_factory=dict)  # by the records of training
    ending_spent_s: dict[str, float] = field(default_factory=dict)  # after the last of them; a resume counts it anew
    targets: float = 0.0
    starting_targets: float = 0.0
    skipped: int = 0
    last_step: int = 0
    count: int = 0
    left_s: float | None = None
    over: str | None = None  # the last event, where nothing came after it
    left_out: int = 0  # curves

    def add(self, record: Record) -> None:
        """Take one record."""
        self.count += 1
        step, kind = record["step"], record["kind"]
        self.last_step = max(self.last_step, step)
        self.over = str(record.get("what", "")) or None if kind == "event" else None
        match kind:
            case "train":
                self._add_train(step, record)
            case "scores":
                for name, value in scores_in(record).items():
                    self._add(self.scores, name, step, value)
                if _is_number(record.get("rate_factor")):
                    self._add(self.train, "rate_factor", step, record["rate_factor"])
            case "end":
                self.at_end = scores_in(record)
                weights = record.get("weights_of_step")
                self.at_end_of_step = weights if isinstance(weights, int) else None
            case "sample" if isinstance(record.get("text"), str):
                self._add_sample(step, record["text"])
            case "layers":
                self.layers.add(record)
            case "resumed":
                self.ending_spent_s = {}
                self._tell(Event(step, f"resumed after step {step:,}", "resumed"))
            case "event" if isinstance(record.get("what"), str):
                self.ending_spent_s = _added({}, record)
                self._tell(Event(step, record["what"][:_LONGEST_EVENT]))

    def _add_train(self, step: int, record: Record) -> None:
        for name, value in record.items():
            if name in _DRAWN:
                if _is_number(value):
                    self._add(self.train, name, step, value)
            elif name not in OWN and _is_number(value):
                self._add(self.users, name, step, value)
        applied = record.get("loss_of_applied")
        if _is_number(applied) and applied and not math.isfinite(record.get("loss") or 0.0):
            self._add(self.train, "loss", step, applied)  # 0 where no step was
        _added(self.trained_spent_s, record)
        if _is_number(record.get("targets")):
            self.targets += record["targets"]
        if _is_number(record.get("starting_targets")):
            self.starting_targets += record["starting_targets"]
        self.left_s = record["left_s"] if _is_number(record.get("left_s")) else None
        skipped = record.get("skipped")
        if isinstance(skipped, int) and skipped > 0:
            self.skipped += skipped
            steps = record.get("skipped_steps")
            which = f": {', '.join(str(index) for index in steps[:5])}" if isinstance(steps, list) and steps else ""
            more = ", ..." if which and skipped > 5 else ""
            counted = "1 step was" if skipped == 1 else f"{skipped:,} steps were"
            self._tell(
                Event(step, f"{counted} skipped, for a gradient or loss that was not finite{which}{more}", "skipped")
            )

    def _add(self, curves: dict[str, Curve], name: str, step: int, value: float) -> None:
        if name not in curves:
            if len(curves) >= _MOST_CURVES:
                self.left_out += 1
                return
            curves[name] = Curve()
        curves[name].add(step, value)

    def _add_sample(self, step: int, text: str) -> None:
        """Samples at even distances; where there are too many, every second one is dropped."""
        cut = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} \u2026"
        if self.sampled % self.sampled_every == 0:
            self.kept_samples.append((step, cut))
        self.sampled += 1
        self.last_sample = (step, cut)
        if len(self.kept_samples) > _MOST_SAMPLES:
            self.kept_samples = self.kept_samples[::2]
            self.sampled_every *= 2

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds of all sessions by phase, as the clock of the run counts them (`train/timer.py`)."""
        parts = (self.trained_spent_s, self.ending_spent_s)
        return {phase: sum(spent.get(phase, 0.0) for spent in parts) for phase in PHASES}

    @property
    def samples(self) -> list[tuple[int, str]]:
        """Steps and texts of samples, some of them where there were many; the last is always there."""
        last = [] if self.last_sample is None or self.last_sample in self.kept_samples[-1:] else [self.last_sample]
        return self.kept_samples + last

    def _tell(self, event: Event) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        else:
            self.more_events += 1


@dataclass(frozen=True)
class ReportedRun:
    """A run's directory as a report shows it; `data` is the last record of the look at the data."""

    files: RunFiles
    recorded: Recorded
    data: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def watch(self) -> Watched | None:
        """The score that the run watches, as the newest checkpoint has it."""
        return None if self.files.state is None else self.files.state.watch


def read_reported_run(path: Path, *, also: Callable[[Record], object] = lambda record: None) -> ReportedRun:  # noqa: ARG005
    """Read all that a report shows of a run's directory but findings and panels; `ConfigError` if there is none.

    `also` is given every record too, so that the file is read once for all who need it.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory of a run")
    files, recorded, data = read_run(path), Recorded(), dict[str, Any]()
    problems = list(files.problems)
    try:
        for record in read_records(path):
            if record["kind"] == "data":
                data = record
            recorded.add(record)
            also(record)
    except OSError as problem:
        problems.insert(0, f"metrics.jsonl cannot be read: {problem.strerror or problem}")
    return ReportedRun(files, recorded, data, tuple(problems))


def _added(spent_s: dict[str, float], record: Record) -> dict[str, float]:
    """Add the seconds of a record to those by phase."""
    for phase, key in _SPENT.items():
        seconds = record.get(key)
        if _is_number(seconds) and math.isfinite(seconds):
            spent_s[phase] = spent_s.get(phase, 0.0) + seconds
    return spent_s


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
