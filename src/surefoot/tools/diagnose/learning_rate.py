"""Checks for losses that do not fall, and for learning rates that are too high or too low."""

import math
from dataclasses import dataclass

import numpy as np

from surefoot.schedules.curves import SHAPES
from surefoot.tools.diagnose.finding import (
    IGNORED_LABELS,
    NOT_FINITE,
    Severity,
    Verdict,
    check,
    join_names,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.layers import died, ratio_at_full_rate, unmoved
from surefoot.tools.diagnose.statistics import level, levels, noise

FEWEST = 12
"""Minimum number of loss records: quarters of three, the fewest with a robust median."""
SMALLEST_FALL = 0.01
"""Relative fall of the loss when a model has learned only the frequencies of the targets."""
UNCLEAR_FALL = 0.03
"""Relative fall that is no error, even if noise may explain it. Levels of a loss that does not fall
vary by about 1%.
"""
CERTAIN = 2.0
"""Minimum significance of a fall in standard errors. One run in twenty exceeds 2 by chance (5%)."""
LITTLE = 0.25
"""Maximum relative fall of the loss with a learning rate that is too low."""
STRAIGHT = 0.6
"""Ratio of the loss falls in the second and the first half of the summed learning rate. A linear
fall has 1. A power law or an exponential (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361) is
far below 0.5."""
WILD = 0.1
"""Update-to-weight ratio of one step: ten times the upper end of the usual range (`layers.USUAL`).
"""
TIMID = 1e-5
"""Update-to-weight ratio of one step: a tenth of the lower end of the usual range. 10,000 steps
move a weight by 10%.
"""
MOVED = 0.1
"""Ratio of summed update norms to weight norm in a model that is almost unchanged. The sum is an
upper bound of the distance (triangle inequality), so this finding is certain."""
REBOUND = 0.03
"""Relative rise above the lowest loss of the first third at high learning rates. Levels vary by
about 1% by chance.
"""
ABOVE_START = 1.05
"""Ratio of the loss to the first loss. Only updates that are too large raise the loss above chance
level.
"""
FAR_ABOVE_START = 100.0
"""Ratio of a level to the loss of step 0 that a single step does not have by chance, whatever the
later noise is. The noise of an exploding loss is as large as the loss.
"""
SOME_TARGETS = 8
"""Minimum number of targets of a step for this ratio: the loss of a few targets may be near 0."""


@dataclass(frozen=True)
class Course:
    """Median losses in quarters of the records, and the standard error of a median."""

    start: float
    quarters: tuple[float, ...]
    error: float

    @property
    def best(self) -> float:
        return min(self.quarters[1:])

    @property
    def fallen(self) -> bool:
        """True if the loss ever fell below its start by more than the noise."""
        return self.start - self.best > max(
            CERTAIN * math.sqrt(2) * self.error, SMALLEST_FALL * abs(self.start)
        )

    @property
    def is_around_zero(self) -> bool:
        """True if the loss begins at 0, up to the noise, as a policy loss with normalized returns
        does. Its fall shows nothing.
        """
        return max(abs(self.start), abs(self.quarters[0])) < CERTAIN * self.error


def course(history: History, *, since: int = 0) -> Course:
    """Summarize a loss of at least `FEWEST` records after step `since`. The start is the first
    quarter's median, or a much higher first value; or the loss of step 0, if both are above it by
    more than chance.
    """
    loss = history.loss.since(since)
    quarters = np.array_split(loss.value, 4)
    wobble = noise(loss.value)
    first = float(loss.value[0])
    start = level(quarters[0])
    if first - start > 6 * wobble:  # a fall within the first quarter; 6: not chance
        start = first
    if rose_at_once(history, start):
        start = history.first_step_loss
    fewest = min(len(quarter) for quarter in quarters)
    return Course(start, tuple(level(quarter) for quarter in quarters), _error(wobble, fewest))


def rose_at_once(history: History, early: float) -> bool:
    """Return True if an early level of the loss is above the loss of step 0 by more than the noise
    of one step.
    """
    first = history.first_step_loss
    if not early > first:  # or the loss of step 0 is not recorded
        return False
    steps = level(history.windows.value)
    of_one_step = noise(history.loss.value) * math.sqrt(steps)
    if early - first > 6 * of_one_step:  # 6: not chance
        return True
    targets = level(history.column("targets").value) / steps
    return targets >= SOME_TARGETS and first > 0 and early > FAR_ABOVE_START * first


def _error(wobble: float, count: int) -> float:
    """Return the standard error of the median of `count` values: sqrt(pi / 2) times the standard
    error of the mean.
    """
    return 1.2533 * wobble / math.sqrt(count)


def _too_few(history: History) -> str:
    if not history.loss_is_finite:
        return NOT_FINITE
    return f"{len(history.loss)} loss records in {history.step:,} steps are too few (at least {FEWEST}, and twice the warm-up steps)"


@check("loss-not-falling")
def loss_not_falling(history: History) -> Verdict:
    """Compare the loss in later quarters of the run with its start, and find steps without any
    target.
    """
    counted = history.column("targets").value
    if len(counted) >= FEWEST and not counted.any():
        return wrong(
            "error",
            f"The training loss is a mean of nothing: no target was counted in {history.step:,} steps.",
            (f"targets is 0 in all {len(counted)} records",),
            causes=(IGNORED_LABELS, "a count_fn that returns 0"),
            try_=("look at the labels of one batch",),
            numbers={"targets": 0.0},
        )
    need(
        is_judged(history) and history.step > 2 * history.described.warmup,
        _too_few(history),
    )
    need(not has_opposed_losses(history), OPPOSED)
    changed_at = history.described.loss_changed_at
    need(not changed_at, f"the loss is another quantity since the change at step {changed_at:,}")
    loss = course(history)
    well(loss.fallen, f"the loss fell from {loss.start:.4g} to {loss.best:.4g}")
    need(not loss.is_around_zero, _AROUND_ZERO)
    is_pretrained = history.described.identity.get("init_from") is not None or _knows_already(
        history, loss
    )
    is_unclear = loss.start - loss.best > UNCLEAR_FALL * abs(loss.start)
    fallen = "clearly fallen" if is_unclear else "fallen"
    later = ", ".join(f"{quarter:.4g}" for quarter in loss.quarters[1:])
    causes = [
        "targets that do not match their inputs (shuffled, or off by one), or are the same for all inputs",
        IGNORED_LABELS,
        "a learning rate that is far too high or far too low",
        "a loss that does not depend on the trained weights, or units that are all dead",
    ]
    if is_pretrained:
        causes.append("pretrained weights with little left to learn")
    causes.append(
        "a loss that is not meant to fall, such as a GAN or policy loss: judge such a run by its metrics"
    )
    return wrong(
        "warning" if is_pretrained or is_unclear else "error",
        f"The training loss has not {fallen} in {history.step:,} steps.",
        (
            f"loss level {loss.start:.4g} at the start; {later} in the later quarters;"
            f" standard error {loss.error:.2g}",
        ),
        causes=causes,
        try_=(
            "check whether the model can overfit 100 samples: if not, the fault is in the data, model or loss",
            history.described.rate_test,
        ),
        numbers={"start": loss.start, "best": loss.best, "noise": loss.error},
    )


def _knows_already(history: History, loss: Course) -> bool:
    """Return True if the loss starts below half the cross-entropy of guessing without inputs, which
    is at least -log of the commonest target's share.
    """
    share = history.targets.get("most_common_fraction")
    if not isinstance(share, float) or not 0 < share < 1:
        return False
    return 0 < loss.start < -0.5 * math.log(share)


@check("rate-too-high")
def rate_too_high(history: History) -> Verdict:
    """Check for updates of 10% of the weights or more, and for a loss above its first value. Steps
    before a change of the rate say nothing about the present one.
    """
    loss = history.loss
    described = history.described
    since = described.steps_changed_at
    ratio = ratio_at_full_rate(history, since=since)
    quarters = _meaningful_course(history, since=since)
    is_known = is_judged(history) and (not since or quarters is not None)
    need(is_known or not math.isnan(ratio), _too_few(history))
    severity: Severity = "warning"
    evidence = []
    healthy = []
    if ratio > WILD:
        evidence.append(_RATIO.format(ratio))
    elif not math.isnan(ratio):
        healthy.append(f"updates are {ratio:.2g} of the weights")
    if quarters is not None:
        began = level(loss.value[:3])
        early = max(began, quarters.quarters[0])
        if rose_at_once(history, early) or history.first_step_loss > began:
            began = history.first_step_loss
        elif early - loss.value[0] > 6 * noise(loss.value):  # rose at once; 6: not chance
            began = float(loss.value[0])
        healthy.insert(0, f"no quarter of the run has a loss above its start, {began:.4g}")
        worst = max(quarters.quarters)
        rebound = _rebound(history, since=since)
        if worst > ABOVE_START * began + CERTAIN * quarters.error and began > 0:
            evidence.append(
                f"the loss rose above its start: from {began:.4g} to a level of {worst:.4g}"
            )
            if quarters.quarters[-1] >= began:
                severity = "error"
        elif rebound:
            evidence.append(rebound)
        elif evidence and not quarters.fallen and not since:
            evidence.append(f"the loss has not fallen below its start, {quarters.start:.4g}")
            severity = "error"
    need(evidence or healthy, OPPOSED if has_opposed_losses(history) else _AROUND_ZERO)
    well(not evidence, ", ".join(healthy))

    # more evidence, which alone would not suffice: healthy large models have dead units too
    # (Voita et al. 2023, arXiv:2309.04827)
    dead = died(history)
    if dead:
        evidence.append(
            "units that were alive at first are dead now, as after steps that are too large:"
            f" {join_names(dead)}"
        )
    clipped = level(history.column("clip_fraction").value[-max(1, len(loss) // 2) :])
    if clipped >= 0.5:
        evidence.append(f"the gradient was clipped in {clipped:.0%} of the steps")

    remedies = [
        described.lr_divided(10, otherwise="a learning rate 10x lower"),
        described.rate_test,
    ]
    if described.warmup < 0.01 * (described.schedule_steps or 0):
        remedies.append(described.typed("schedule.warmup", "5%"))
    return wrong(
        severity,
        f"The learning rate{described.lr_in_text} seems too high.",
        evidence,
        causes=(
            "a base learning rate that is too high for this model and batch size",
            "no warm-up, so the first steps are as large as all others",
        ),
        try_=remedies,
        numbers={"update_to_weight": ratio},
    )


def _meaningful_course(history: History, *, since: int) -> Course | None:
    """Return the course of the loss after step `since`, or None if its fall says nothing about the
    learning rate.
    """
    if not is_judged(history) or has_opposed_losses(history):
        return None
    if len(history.loss.since(since)) < FEWEST:
        return None
    quarters = course(history, since=since)
    return None if quarters.is_around_zero else quarters


@check("rate-too-low")
def rate_too_low(history: History) -> Verdict:
    """Check for a loss that falls slowly and linearly in the summed learning rate, and for weights
    that hardly move.
    """
    described = history.described
    ratio = ratio_at_full_rate(history)
    curve = _halves(history) if is_judged(history) else None
    need(curve is not None or not math.isnan(ratio), _too_few(history))
    evidence = []
    if ratio < TIMID:
        evidence.append(_RATIO.format(ratio))
    healthy = f"updates are {ratio:.2g} of the weights"
    if curve is not None:
        healthy = "the loss fell faster at first than later"
        start, first, second, error = curve
        is_little = first + second < LITTLE * start
        moved = ratio * history.step
        if moved < MOVED and not unmoved(history) and is_little:
            evidence.append(
                f"in {history.step:,} steps the weights have moved by at most {moved:.2g} of their norm, and the loss has hardly fallen"
            )
        began_here = not described.loss_changed_at
        is_from_scratch = began_here and described.identity.get("init_from") is None
        is_certain = first + second > 2 * CERTAIN * math.sqrt(2) * error and min(first, second) > 0
        if is_from_scratch and is_certain and is_little and second >= STRAIGHT * first:
            evidence.append(
                f"the loss falls slowly and almost linearly: by {first:.3g} over the first half of the summed learning rate,"
                f" by {second:.3g} over the second half, from {start:.4g}"
            )
    well(not evidence, healthy)
    return wrong(
        "warning",
        f"The learning rate{described.lr_in_text} seems too low.",
        evidence,
        causes=(
            "a base learning rate that is too low for this model and batch size",
            "a run that is too short to judge",
            "with SGD, a clipping limit far below the gradient norm",
        ),
        try_=(
            described.lr_divided(0.1, otherwise="a learning rate 10x higher"),
            described.rate_test,
        ),
        numbers={"update_to_weight": ratio},
    )


_UNKNOWN_SHAPES = ("joined", "from_function", "from_scheduler")
_RATIO = "a step at high learning rates changes the weights by {:.2g} of their norm (usual: 1e-4 to 1e-2)"


OPPOSED = "the steps of this run have losses of several optimizers, which may oppose each other: judge it by its metrics"
_AROUND_ZERO = (
    "the loss varies around 0 from the start, as policy losses do: judge the run by its metrics"
)


def is_judged(history: History) -> bool:
    """Return True if the loss has enough records, and the last one is finite."""
    return len(history.loss) >= FEWEST and history.loss_is_finite


def has_opposed_losses(history: History) -> bool:
    """Return True if the user's loop has the losses of several optimizers."""
    return history.data.get("has_loss") is False and history.described.optimizer_count > 1


def _may_rise(shape: str | None) -> bool:
    """Return True if the learning rate of a schedule rises on purpose, or is not known to fall."""
    if shape in SHAPES:
        return SHAPES[shape].own_rise or SHAPES[shape].rises_again
    return shape in _UNKNOWN_SHAPES


def _rebound(history: History, *, since: int) -> str:
    """Say that the loss after step `since` rose above its lowest level of the first third at high
    learning rates and stayed there, or return "".
    """
    loss = history.loss.since(since)
    rates = history.column("lr").finite.since(since)
    width = max(3, len(loss) // 10)
    course = levels(loss.value, width)
    third = len(course) // 3
    if third < 2 or not len(rates) or _may_rise(history.described.shape):
        return ""
    lowest = int(np.argmin(course[:third]))
    early = float(course[lowest])
    error = _error(noise(loss.value), width)
    middles = loss.step[width // 2 :][: len(course)]
    rate = np.interp(middles, rates.step, rates.value)
    is_high_rate = rate >= 0.5 * rates.value.max()
    later = course[is_high_rate & (np.arange(len(course)) >= lowest + width)]
    if len(later) < width:
        return ""
    first = loss.value[0]
    has_fallen = first - early > max(SMALLEST_FALL * abs(first), 2 * CERTAIN * error)
    highest = float(later.max())
    has_risen = highest - early > REBOUND * abs(early) + 2 * CERTAIN * error
    fell_lower = float(later.min()) < early - CERTAIN * error
    if not has_fallen or not has_risen or fell_lower:
        return ""
    return (
        f"the loss fell to {early:.4g} by step {middles[lowest]:,}, rose to {highest:.4g},"
        " and did not fall lower while the learning rate was above half of its maximum"
    )


def _halves(history: History) -> tuple[float, float, float, float] | None:
    """Return the loss at the start, its falls over the first and the second half of the summed
    learning rate, and the standard error of a level; None if too little is recorded.
    """
    loss = history.loss
    rates = history.column("lr").finite
    if len(rates) < FEWEST:
        return None
    steps_of_record = np.interp(rates.step, history.windows.step, history.windows.value)
    summed_rate = np.cumsum(rates.value * steps_of_record)
    spent = np.interp(loss.step, rates.step, summed_rate)
    if spent[-1] <= spent[0]:
        return None
    part = (spent - spent[0]) / (spent[-1] - spent[0])
    at_start = loss.value[:3]
    in_middle = loss.value[(part >= 0.45) & (part <= 0.55)]
    at_end = loss.value[part >= 0.95]
    fewest = min(len(at_start), len(in_middle), len(at_end))
    if fewest < 2:
        return None
    start = level(at_start)
    middle = level(in_middle)
    error = _error(noise(loss.value), fewest)
    return start, start - middle, middle - level(at_end), error
