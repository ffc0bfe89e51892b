"""Checks for divergence, nonfinite steps, and loss spikes."""

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from surefoot.tools.diagnose.finding import (
    NOT_FINITE,
    Finding,
    Severity,
    Verdict,
    check,
    join_names,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tools.diagnose.statistics import FEWEST, level, levels, noise, spread

LOST = 0.5
"""Fraction of the loss reduction that a diverged run has lost again. A restart of a schedule costs
about a tenth.
"""
RISEN = 1.2
"""Minimum ratio of the last to the first loss in a diverged run whose loss never fell. Noise adds
less than a fifth.
"""
GREW = 5.0
"""Ratio of a layer's gradient to its median that indicates a fault. Noisy gradients reach about
twice their median.
"""
MANY = 0.05
"""Fraction of skipped steps that affects the result. Fewer are single samples or, in fp16, the
search for a loss scale.
"""
FP16 = 0.01
"""Fraction of skipped steps that is normal in fp16. The loss scale doubles every 2,000 steps, and
each time overflows (Micikevicius et al. 2018, section 3.2, https://arxiv.org/abs/1710.03740). Some
more steps overflow at the start."""
NEIGHBOURS = 10
"""Neighboring records on each side: enough for a median and its deviation, few enough for a
constant loss level.
"""
SIGMAS = 8.0
"""Minimum height of a spike in standard deviations. With 6, heavy tails cause one false spike in
thousands of records.
"""
NOTHING = 0.01
"""Minimum height of a spike as a fraction of the first loss."""
ABOVE = 0.25
"""Minimum height of a spike as a fraction of the median of the neighboring records."""
_CAUSES = (
    "a learning rate that is too high, or is reached too soon",
    "values that overflow: attention or logits without normalization, fp16, a log or division in the loss",
)


@check("diverged")
def diverged(history: History) -> Verdict:
    """Check for a loss that rose permanently by half of its earlier fall, and for a run that ended
    in nonfinite steps.
    """
    was_stopped = (history.ended_by or "").startswith("diverged")
    if was_stopped or _bad_at_the_end(history) > history.described.max_bad_steps:
        return _ended_in_bad_steps(history)
    loss = history.loss
    need(len(loss) >= FEWEST, f"{len(loss)} loss records are too few (at least {FEWEST})")
    need(history.loss_is_finite, NOT_FINITE)
    width = max(3, len(loss) // 10)
    course = levels(loss.value, width)
    start = max(float(course[0]), float(loss.value[0]))
    lowest = int(np.argmin(course))
    best = float(course[lowest])
    last = level(loss.value[-width:])
    wobble = noise(loss.value)
    before_divergence = noise(loss.value[: lowest + width])
    if 0 < before_divergence < wobble:
        wobble = before_divergence
    gained = start - best
    if gained > 4 * wobble:
        has_risen = last > best + LOST * gained + 4 * wobble
    else:
        has_risen = last > RISEN * start + 4 * wobble and start > 0
    well(
        not has_risen or lowest + 2 * width > len(loss),
        f"the latest loss level, {last:.4g}, is near the lowest, {best:.4g}",
    )
    described = history.described
    middle = int(loss.step[lowest + width // 2])
    return wrong(
        "error",
        f"The loss diverged: it rose from {best:.4g} near step {middle:,} to {last:.4g}.",
        (
            f"loss level: {start:.4g} at the start, {best:.4g} at its lowest, {last:.4g} now",
            _first_to_grow(history, middle),
        ),
        causes=(
            *_CAUSES,
            "a loss that is not meant to fall, such as a policy loss: judge such a run by its metrics",
        ),
        try_=(*_smaller_steps(described), described.replay(middle)),
        step=middle,
        numbers={"begun": middle},
    )


def _ended_in_bad_steps(history: History) -> Finding:
    described = history.described
    loss = history.loss
    if len(loss):
        last_loss = f"last finite loss: {loss.value[-1]:.4g} (record of step {loss.step[-1]:,})"
    else:
        last_loss = "no finite loss is recorded"
    # the first of the skipped steps in a row at the end
    skipped = set(history.records.skipped_steps)
    first_bad = max(skipped, default=history.step)
    while first_bad - 1 in skipped:
        first_bad -= 1
    if first_bad == 0:  # no update was applied, so the learning rate is not the cause
        causes = ["inputs, initial weights or a loss that are not finite before the first update"]
        remedies = []
    else:
        causes = [*_CAUSES]
        remedies = _smaller_steps(described)
    return wrong(
        "error",
        f"The run diverged: from step {first_bad:,} on, no step had a finite loss and a finite gradient.",
        (last_loss, _first_to_grow(history, first_bad)),
        causes=causes,
        try_=(*remedies, described.replay(first_bad)),
        step=first_bad,
        numbers={"begun": first_bad},
    )


def _smaller_steps(described: RunDescription) -> list[str]:
    """Return the settings with which steps are smaller."""
    remedies = [described.lr_divided(10)]
    if described.warmup < 0.05 * (described.schedule_steps or 0):
        remedies.append(described.typed("schedule.warmup", "5%"))
    if described.clip is not None and described.clip[0] == "off":
        remedies.append(described.typed("clip", "norm 1.0"))
    return remedies


@check(
    "non-finite-steps", needs=lambda history: need(history.train_count, "no step is recorded yet")
)
def non_finite_steps(history: History) -> Verdict:
    """Check for steps skipped because of a nonfinite loss or gradient."""
    described = history.described
    skipped = int(history.total("skipped"))
    well(not skipped, f"all {history.step:,} steps were finite")
    fraction = skipped / max(history.step, 1)
    is_fp16 = "fp16" in described.precisions
    severity: Severity = "error" if fraction >= MANY else "warning"
    if is_fp16 and fraction <= FP16:
        severity = "note"
    evidence = [f"{skipped:,} of {history.step:,} steps ({100 * fraction:.2g}%) were not applied"]
    indexes = sorted(set(history.records.skipped_steps))
    step = indexes[0] if indexes else None
    if indexes:
        evidence.append(f"skipped steps: {join_names(indexes, limit=8)}")
    causes = []
    if is_fp16:
        causes.append(
            "the search for the fp16 loss scale: some skipped steps at the start, and one now and then"
        )
    causes.append(
        "a sample that contains NaN or infinity, or whose loss is not finite (log of 0, division by 0)"
    )
    replay = described.replay("N" if step is None else step)
    remedies = [f"{replay}  # names samples, module and tensor"]
    samples = described.samples
    if samples is not None and _are_once_an_epoch(history, indexes, samples):
        evidence.append(
            f"one in each epoch of {samples:,} samples: the same sample causes them all"
        )
    else:
        causes.append("a learning rate at which the loss overflows")
        remedies.append(described.lr_divided(10))
    steps_were = "step was" if skipped == 1 else "steps were"
    return wrong(
        severity,
        f"{skipped:,} {steps_were} skipped because the loss or gradient was not finite.",
        evidence,
        causes=causes,
        try_=remedies,
        step=step,
        numbers={"skipped": skipped, "fraction": fraction},
    )


@check("loss-spikes")
def loss_spikes(history: History) -> Verdict:
    """Compare the largest step loss in each record with neighboring records."""
    series = history.column("loss_max").finite
    has_own_steps = False  # True if the steps are those of the losses, not those of the records
    if len(series) >= FEWEST:
        has_own_steps = len(history.column("loss_max_step")) > 0
    else:
        series = history.loss
    need(len(series) >= FEWEST, f"{len(series)} loss records are too few (at least {FEWEST})")
    spikes = _spikes_between_changes(series, history.described)
    well(not spikes, "no loss stands out from its neighbors")
    largest = max(spikes, key=lambda spike: spike.loss - spike.around)
    # the step with the spike, counted from 0
    replayed = largest.step if has_own_steps else largest.step - 1
    described = history.described
    jumps = [
        f"{spike.loss:.4g} at step {spike.step:,} (its neighbors: {spike.around:.4g})"
        for spike in spikes
    ]
    remedies = [f"{described.replay(replayed)}  # shows the step's samples"]
    if described.clip is None or described.clip[0] == "off":
        remedies.append(described.typed("clip", "norm 1.0"))
    remedies.append(described.lr_divided(3, digits=2))
    return wrong(
        "warning",
        "The loss jumped once." if len(spikes) == 1 else f"The loss jumped {len(spikes)} times.",
        (
            join_names(jumps),
            f"a jump is {SIGMAS:g} standard deviations, and {ABOVE:.0%}, above the median of its neighbors",
        ),
        causes=(
            "unusual samples: corrupt ones, or a file of another kind",
            "a learning rate near the stability limit; Adam with a large beta2 after the data changed",
        ),
        try_=remedies,
        step=largest.step,
        numbers={"spikes": len(spikes), "largest": largest.loss, "around": largest.around},
    )


class _Spike(NamedTuple):
    step: int
    loss: float
    around: float  # the median of the neighboring records


def _spikes_between_changes(series: Series, described: RunDescription) -> list[_Spike]:
    """Return the spikes of a loss. A change of settings explains those in the records after it."""
    begins = sorted({0, *(change.from_step for change in described.changes)})
    spikes = []
    for begin, end in pairwise([*begins, math.inf]):
        settled = 3 if begin == 0 else NEIGHBOURS
        of_settings = series.where((series.step > begin) & (series.step <= end))
        spikes += _spikes_in(of_settings, settled=settled, first=float(series.value[0]))
    return spikes


def _spikes_in(series: Series, *, settled: int, first: float) -> list[_Spike]:
    """Return the spikes after `settled` values. `first` is the first loss of the run."""
    spikes = []
    for row in range(settled, len(series)):
        here = series.value[row]
        before = series.value[max(0, row - NEIGHBOURS) : row]
        if here <= before.max():  # most records stop here without computing medians
            continue
        around = np.concatenate([before, series.value[row + 1 : row + 1 + NEIGHBOURS]])
        middle = level(around)
        matters = here - middle >= NOTHING * first
        stands_out = here > middle + SIGMAS * spread(around) and here > middle + ABOVE * abs(middle)
        if matters and stands_out:
            spikes.append(_Spike(int(series.step[row]), float(here), middle))
    return spikes


class _Growth(NamedTuple):
    step: int
    times: float  # the earlier median
    of_what: str


def _first_to_grow(history: History, first_bad: int) -> str:
    """Name the layer whose gradient, update or output was large first, and of those the one that
    grew most.
    """
    quantities = {"grad_norm": "gradient", "update_norm": "update", "activation_rms": "output"}
    growths = []
    for kind, quantity in quantities.items():
        for name, series in history.watched(kind).items():
            before = series.value[series.step < first_bad]
            usual = level(before)
            if len(before) < 3 or not usual > 0:
                continue
            later = series.since(first_bad - 2)
            large = later.where(~np.isfinite(later.value) | (later.value > GREW * usual))
            if not len(large):
                continue
            value = large.value[0]
            times = float(value / usual) if math.isfinite(value) else math.inf
            growths.append(_Growth(int(large.step[0]), times, f"the {quantity} of {name}"))
    if not growths:
        return ""
    first = min(growths, key=lambda growth: (growth.step, -growth.times))
    how_much = "not finite"
    if math.isfinite(first.times):
        how_much = f"{first.times:.3g}x its earlier median"
    text = f"first to grow: {first.of_what} ({how_much}) at step {first.step:,}"
    others = sum(growth.step == first.step for growth in growths) - 1
    return f"{text}; {others} more grew at that step" if others else text


def _bad_at_the_end(history: History) -> int:
    """Return the number of skipped steps in the last records, up to one that has an applied
    step.
    """
    windows = history.windows
    finite = history.column("skipped").finite
    skipped_in = dict(zip(finite.step, finite.value, strict=True))
    count = 0
    for step, window in zip(windows.step[::-1], windows.value[::-1], strict=True):
        skipped = skipped_in.get(step, 0)
        count += int(skipped)
        if skipped < window:
            break
    return count


def _are_once_an_epoch(history: History, indexes: list[int], samples: int) -> bool:
    """Return True if at most one epoch among those of these steps has none, and no epoch has
    two.
    """
    batch = history.described.batch_size
    if history.described.changed_at("batch_size"):
        return False
    of_tokens = "tokens" in str(history.described.identity.get("batch_size"))
    if batch is None or len(indexes) < 2 or of_tokens:
        return False
    epochs = [int(index * batch // samples) for index in indexes]
    is_once_each = len(set(epochs)) == len(epochs)
    return is_once_each and epochs[-1] - epochs[0] + 1 <= len(epochs) + 1
