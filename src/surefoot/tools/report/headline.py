"""The outcome of a run: its state, its main metric, and a sentence."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from surefoot.tools.diagnose.statistics import noise
from surefoot.tools.report.charts import format_value
from surefoot.tools.report.curves import Curve, smooth
from surefoot.tools.report.series import ReportedRun

State = Literal["running", "finished", "stopped", "diverged", "failed", "dead"]
# a metric is better when larger if its name contains one of these
_RISES = ("accuracy", "bleu", "chrf", "f1", "top", "acc", "correct", "rate", "score")
_ENDS: dict[str, State] = {
    "left": "stopped",
    "stopped": "stopped",
}  # by the first word of the event
_ENDS |= {"finished": "finished", "diverged": "diverged", "failed": "failed"}
_LATE = 0.8  # fraction of a run before its end section
# threshold of a trend, as a fraction of the metric's range; half of it as a relative change
_MOVED = 0.02


@dataclass(frozen=True)
class Headline:
    """The main metric of a run: its last value, best value and direction of improvement."""

    name: str
    last_step: int
    last: float
    best_step: int
    best: float
    direction: Literal["min", "max"]

    @property
    def best_is_last(self) -> bool:
        return self.best_step == self.last_step or self.best == self.last


def state_of(run: ReportedRun) -> State:
    """Return how a run ended, or that it is running. A run that recorded no end and has no process
    is dead.
    """
    records = run.records
    first = next(iter((records.over or "").split()), "")
    if (state := _ENDS.get(first.rstrip(":"))) is not None:
        return state
    if run.running:
        return "running"
    if run.files.planned_steps is not None and records.last_step >= run.files.planned_steps:
        return "finished"
    last = next(iter(run.files.crashes), None)
    if last is not None and isinstance(last.get("step"), int) and last["step"] >= run.last_step:
        return "diverged" if str(last.get("error", "")).startswith("DivergedError") else "failed"
    return "dead"


def headline(run: ReportedRun) -> Headline | None:
    """Return the monitored metric, else the first loss, the first metric, or the training loss.
    Returns None without records.
    """
    scores = {name: curve for name, curve in run.scores.items() if curve.last is not None}
    watch = None if run.files.state is None else run.files.state.watched
    if watch is not None and watch["score"] in scores:
        return _headline(watch["score"], scores[watch["score"]], watch["direction"])
    first = next((name for name in scores if name.endswith("loss")), next(iter(scores), None))
    if first is not None:
        return _headline(first, scores[first], direction_of(first))
    loss = run.train.get("loss")
    return None if loss is None or loss.last is None else _headline("training loss", loss, "min")


def direction_of(name: str) -> str:
    """Return the direction of improvement of a metric, "min" or "max", from its name.

    >>> direction_of("val/loss"), direction_of("cloze/accuracy")
    ('min', 'max')
    """
    score = name.rpartition("/")[2].lower()
    return "max" if any(word in score for word in _RISES) and "error" not in score else "min"


def verdict(run: ReportedRun, state: State) -> str:
    """Return a sentence on the end of the run, the change of its main metric, and the metric's
    final trend.
    """
    records, main = run.records, headline(run)
    parts = [_how_it_ended(run, state)]
    if main is not None:
        curve = run.scores.get(main.name) or run.train["loss"]
        parts += _describe_change(main, curve, running=state == "running")
    if records.skipped:
        parts.append(f"{records.skipped:,} step{'s' * (records.skipped != 1)} skipped")
    if not records.count:
        parts.append("nothing is recorded yet" if state == "running" else "nothing was recorded")
    return "; ".join(parts)


def _how_it_ended(run: ReportedRun, state: State) -> str:
    planned, event, left = run.files.planned_steps, run.records.over, run.records.eta_s
    step = f"step {run.last_step:,}" + ("" if planned is None else f" of {planned:,}")
    match state:
        case "finished":
            return f"finished: {run.last_step:,} steps"
        case "running":
            return f"running: {step}" + (f", {format_value(left, 'seconds')} left" if left else "")
        case "stopped":
            return event if event and " at step " in event else f"{event or 'stopped'} at {step}"
        case "diverged":
            return f"diverged at {step}"
        case "failed":
            error = (event or "").partition(":")[2].strip()
            if event is None and run.files.crashes:
                error = str(run.files.crashes[0].get("error", "")).partition("\n")[0]
            return f"failed at {step}" + (f": {error[:200]}" if error else "")
        case "dead":
            return f"ended at {step} without a final record: killed, or its machine stopped"


def _headline(name: str, curve: Curve, direction: str) -> Headline:
    best = curve.best(direction)
    assert best is not None
    assert curve.last is not None
    return Headline(name, *curve.last, *best, "max" if direction == "max" else "min")


def _describe_change(main: Headline, curve: Curve, *, running: bool) -> list[str]:
    assert curve.first is not None
    first_step, first = curve.first
    if first_step == main.last_step:
        return [f"{main.name} {format_value(main.last)}"]
    if first == main.last and main.best == main.last:
        return [f"{main.name} is {format_value(first)}, the same as at step {first_step:,}"]
    if first == main.last:
        reached = f"reached {format_value(main.best)} at step {main.best_step:,}"
        return [
            f"{main.name} {reached} and is {format_value(first)} again, as at step {first_step:,}"
        ]
    moved = "fell" if main.last < first else "rose"
    parts = [f"{main.name} {moved} from {format_value(first)} to {format_value(main.last)}"]
    if not main.best_is_last and main.name != "training loss":
        parts[0] += f" (best {format_value(main.best)} at step {main.best_step:,})"
    if trend := _trend(main, curve):
        parts.append(f"{trend} {'now' if running else 'at the end'}")
    return parts


def _trend(main: Headline, curve: Curve) -> str:
    points = smooth(curve, width=0.03)
    if len(points) < 4:
        return ""
    steps, values = zip(*points, strict=True)
    moved = max(values) - min(values)
    late_at = steps[0] + _LATE * (steps[-1] - steps[0])
    late = [value for step, value in points if step <= late_at][-1]
    change = values[-1] - late
    is_small = abs(change) <= _MOVED * moved and abs(change) <= 0.5 * _MOVED * abs(late)
    if is_small or abs(change) <= noise(np.array(values)):
        return "level"
    still = "still " if (change < 0) == (main.direction == "min") else ""
    return f"{still}{'falling' if change < 0 else 'rising'}"
