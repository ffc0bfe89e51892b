"""The outcome of a run: its state, its main metric, and a sentence."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from surefoot.tools.diagnose.statistics import noise
from surefoot.tools.report.charts import format_value
from surefoot.tools.report.curves import Curve, smooth
from surefoot.tools.report.series import ReportedRun
from surefoot.tracking.format import counted

State = Literal["running", "finished", "stopped", "diverged", "failed", "dead"]
# a metric is better when larger if its name contains one of these
_RISES = ("accuracy", "bleu", "chrf", "f1", "top", "acc", "correct", "rate", "score")
# by the first word of the event
_ENDS: dict[str, State] = {
    "left": "stopped",
    "stopped": "stopped",
    "finished": "finished",
    "diverged": "diverged",
    "failed": "failed",
}
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
    is dead. One that went back to an earlier step is stopped there.
    """
    if run.went_back:
        return "stopped"
    records = run.records
    words = (records.ended_by or "").split()
    outcome = words[0].rstrip(":") if words else ""
    is_built_again = run.running and records.is_at_change
    if outcome in _ENDS and not is_built_again:
        return _ENDS[outcome]
    if run.running:
        return "running"
    planned = run.files.planned_steps
    if planned is not None and records.last_step >= planned:
        return "finished"
    if run.files.crashes:
        newest = run.files.crashes[0]
        step = newest.get("step")
        if isinstance(step, int) and step >= run.last_step:
            has_diverged = str(newest.get("error", "")).startswith("DivergedError")
            return "diverged" if has_diverged else "failed"
    return "dead"


def headline(run: ReportedRun) -> Headline | None:
    """Return the monitored metric, else the first loss, the first metric, or the training loss.
    Returns None without records.
    """
    scores = {name: curve for name, curve in run.scores.items() if curve.last is not None}
    monitored = None if run.files.state is None else run.files.state.watched
    if monitored is not None and monitored["score"] in scores:
        name = monitored["score"]
        return _headline(name, scores[name], monitored["direction"])
    if scores:
        losses = [name for name in scores if name.endswith("loss")]
        first = [*losses, *scores][0]
        return _headline(first, scores[first], direction_of(first))
    loss = run.train.get("loss")
    if loss is None or loss.last is None:
        return None
    return _headline("training loss", loss, "min")


def direction_of(name: str) -> str:
    """Return the direction of improvement of a metric, "min" or "max", from its name.

    >>> direction_of("val/loss"), direction_of("cloze/accuracy")
    ('min', 'max')
    """
    score = name.rpartition("/")[2].lower()
    if "error" in score:
        return "min"
    return "max" if any(word in score for word in _RISES) else "min"


def verdict(run: ReportedRun, state: State) -> str:
    """Return a sentence on the end of the run, the change of its main metric, and the metric's
    final trend.
    """
    records = run.records
    clauses = [_how_it_ended(run, state)]
    main = headline(run)
    if main is not None:
        clauses += _describe_change(main, main_curve(run, main), running=state == "running")
    if records.skipped:
        clauses.append(f"{counted(records.skipped, 'step')} skipped")
    if not records.count:
        clauses.append("nothing is recorded yet" if state == "running" else "nothing was recorded")
    return "; ".join(clauses)


def main_curve(run: ReportedRun, main: Headline) -> Curve:
    """Return the curve of a run's main metric."""
    return run.scores.get(main.name) or run.train["loss"]


def _how_it_ended(run: ReportedRun, state: State) -> str:
    planned = run.files.planned_steps
    event = run.records.ended_by
    left_s = run.records.eta_s
    step = f"step {run.last_step:,}"
    if planned is not None:
        step += f" of {planned:,}"
    match state:
        case "finished":
            return f"finished: {run.last_step:,} steps"
        case "running":
            left = f", {format_value(left_s, 'seconds')} left" if left_s else ""
            return f"running: {step}{left}"
        case "stopped":
            if run.went_back:
                return f"went back to {step}"
            if event and " at step " in event:
                return event
            return f"{event or 'stopped'} at {step}"
        case "diverged":
            return f"diverged at {step}"
        case "failed":
            error = (event or "").partition(":")[2].strip()
            if event is None and run.files.crashes:
                error = str(run.files.crashes[0].get("error", "")).partition("\n")[0]
            return f"failed at {step}: {error[:200]}" if error else f"failed at {step}"
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
    change = f"{main.name} {moved} from {format_value(first)} to {format_value(main.last)}"
    if not main.best_is_last and main.name != "training loss":
        change += f" (best {format_value(main.best)} at step {main.best_step:,})"
    trend = _trend(main, curve)
    if not trend:
        return [change]
    return [change, f"{trend} now" if running else f"{trend} at the end"]


def _trend(main: Headline, curve: Curve) -> str:
    points = smooth(curve, width=0.03)
    if len(points) < 4:
        return ""
    values = [value for _, value in points]
    moved = max(values) - min(values)
    first_step = points[0][0]
    end_section = first_step + _LATE * (points[-1][0] - first_step)
    late = [value for step, value in points if step <= end_section][-1]
    change = values[-1] - late
    is_small = abs(change) <= _MOVED * moved and abs(change) <= 0.5 * _MOVED * abs(late)
    if is_small or abs(change) <= noise(np.array(values)):
        return "level"
    if change < 0:
        return "still falling" if main.direction == "min" else "falling"
    return "still rising" if main.direction == "max" else "rising"
