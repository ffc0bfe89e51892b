"""Checks for divergence, nonfinite steps, and loss spikes."""

import math

import numpy as np

from surefoot.tools.diagnose.finding import (
    NOT_FINITE,
    Finding,
    Verdict,
    check,
    join_names,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History
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


@check("diverged")
def diverged(history: History) -> Verdict:
    """Check for a loss that rose permanently by half of its earlier fall, and for a run that ended
    in nonfinite steps.
    """
    loss = history.loss
    if (history.ended_by or "").startswith("diverged") or _bad_at_the_end(
        history
    ) > history.described.max_bad_steps:
        skipped = sorted(set(history.records.skipped_steps))
        first_bad = next(
            (step for step in reversed(skipped) if step - 1 not in skipped), history.step
        )
        last_loss = (
            f"last finite loss: {loss.value[-1]:.4g} (record of step {loss.step[-1]:,})"
            if len(loss)
            else ""
        )
        message = f"The run diverged: from step {first_bad:,} on, no step had a finite loss and a finite gradient."
        return _divergence(
            history, first_bad, message, last_loss or "no finite loss is recorded", bad=True
        )
    need(len(loss) >= FEWEST, f"{len(loss)} loss records are too few (at least {FEWEST})")
    need(history.loss_is_finite, NOT_FINITE)
    width = max(3, len(loss) // 10)
    course = levels(loss.value, width)
    start = max(float(course[0]), float(loss.value[0]))
    lowest = int(np.argmin(course))
    best, last, wobble = float(course[lowest]), level(loss.value[-width:]), noise(loss.value)
    wobble = min(wobble, noise(loss.value[: lowest + width]) or wobble)  # before the divergence
    gained = start - best
    lost_half = gained > 4 * wobble and last > best + LOST * gained + 4 * wobble
    rose = gained <= 4 * wobble and last > RISEN * start + 4 * wobble and start > 0
    well(
        not (lost_half or rose) or lowest + 2 * width > len(loss),
        f"the latest loss level, {last:.4g}, is near the lowest, {best:.4g}",
    )
    middle = int(loss.step[lowest + width // 2])
    message = f"The loss diverged: it rose from {best:.4g} near step {middle:,} to {last:.4g}."
    levels_of_all = (
        f"loss level: {start:.4g} at the start, {best:.4g} at its lowest, {last:.4g} now"
    )
    return _divergence(history, middle, message, levels_of_all, bad=False)


@check(
    "non-finite-steps", needs=lambda history: need(history.train_count, "no step is recorded yet")
)
def non_finite_steps(history: History) -> Verdict:
    """Check for steps skipped because of a nonfinite loss or gradient."""
    described, skipped = history.described, int(history.total("skipped"))
    well(not skipped, f"all {history.step:,} steps were finite")
    indexes = sorted(set(history.records.skipped_steps))
    fraction = skipped / max(history.step, 1)
    fp16 = described.identity.get("precision") == "fp16"
    step = indexes[0] if indexes else None
    one_sample = _passes(history, indexes)
    return wrong(
        "note" if fp16 and fraction <= FP16 else "error" if fraction >= MANY else "warning",
        f"{skipped:,} {'step was' if skipped == 1 else 'steps were'} skipped because the loss or gradient was not finite.",
        (
            f"{skipped:,} of {history.step:,} steps ({100 * fraction:.2g}%) were not applied",
            f"skipped steps: {join_names(indexes, limit=8)}" if indexes else "",
            one_sample,
        ),
        causes=(
            "the search for the fp16 loss scale: some skipped steps at the start, and one now and then"
            if fp16
            else "",
            "a sample that contains NaN or infinity, or whose loss is not finite (log of 0, division by 0)",
            "" if one_sample else "a learning rate at which the loss overflows",
        ),
        try_=(
            f"{described.replay('N' if step is None else step)}  # names samples, module and tensor",
            "" if one_sample else described.lr_divided(10),
        ),
        step=step,
        numbers={"skipped": skipped, "fraction": fraction},
    )


@check("loss-spikes")
def loss_spikes(history: History) -> Verdict:
    """Compare the largest step loss in each record with neighboring records."""
    series = history.column("loss_max").finite  # at their own steps, if these are recorded
    has_own_steps = len(series) >= FEWEST and len(history.column("loss_max_step")) > 0
    if len(series) < FEWEST:
        series = history.loss
    need(len(series) >= FEWEST, f"{len(series)} loss records are too few (at least {FEWEST})")
    spikes = []
    for row in range(3, len(series)):
        here, before = series.value[row], series.value[max(0, row - NEIGHBOURS) : row]
        if here <= before.max():  # most records stop here without computing medians
            continue
        around = np.concatenate([before, series.value[row + 1 : row + 1 + NEIGHBOURS]])
        middle = level(around)
        matters = here - middle >= NOTHING * series.value[0]
        if matters and here > max(middle + SIGMAS * spread(around), middle + ABOVE * abs(middle)):
            spikes.append((int(series.step[row]), float(here), middle))
    well(not spikes, "no loss stands out from its neighbors")
    step, largest, around_it = max(spikes, key=lambda spike: spike[1] - spike[2])
    index = step if has_own_steps else step - 1  # of the step, among those from 0 on
    described = history.described
    jumps = [
        f"{value:.4g} at step {at:,} (its neighbors: {middle:.4g})" for at, value, middle in spikes
    ]
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
        try_=(
            f"{described.replay(index)}  # shows the step's samples",
            described.typed("clip", "norm 1.0")
            if described.clip is None or described.clip[0] == "off"
            else "",
            described.lr_divided(3, digits=2),
        ),
        step=step,
        numbers={"spikes": len(spikes), "largest": largest, "around": around_it},
    )


def _divergence(
    history: History, first_bad: int, message: str, evidence: str, *, bad: bool
) -> Finding:
    described = history.described
    causes: tuple[str, ...] = (
        "a learning rate that is too high, or is reached too soon",
        "values that overflow: attention or logits without normalization, fp16, a log or division in the loss",
        ""
        if bad
        else "a loss that is not meant to fall, such as a policy loss: judge such a run by its metrics",
    )
    tries: tuple[str, ...] = (
        described.lr_divided(10),
        described.typed("schedule.warmup", "5%")
        if described.warmup < 0.05 * (described.schedule_steps or 0)
        else "",
        described.typed("clip", "norm 1.0")
        if described.clip is not None and described.clip[0] == "off"
        else "",
    )
    if bad and first_bad == 0:  # no update was applied, so the learning rate is not the cause
        causes, tries = (
            ("inputs, initial weights or a loss that are not finite before the first update",),
            (),
        )
    return wrong(
        "error",
        message,
        (evidence, _first_to_grow(history, first_bad)),
        causes=causes,
        try_=(*tries, described.replay(first_bad)),
        step=first_bad,
        numbers={"begun": first_bad},
    )


def _first_to_grow(history: History, first_bad: int) -> str:
    grown: list[tuple[int, float, str]] = []  # the step, the growth factor, and a sentence
    for kind, quantity in (
        ("grad_norm", "gradient"),
        ("update_norm", "update"),
        ("activation_rms", "output"),
    ):
        for name, series in history.watched(kind).items():
            before, later = series.value[series.step < first_bad], series.since(first_bad - 2)
            usual = level(before)
            large = later.where(~np.isfinite(later.value) | (later.value > GREW * usual))
            if len(before) < 3 or not usual > 0 or not len(large):
                continue
            times = float(large.value[0] / usual) if math.isfinite(large.value[0]) else math.inf
            words = f"{times:.3g}x its earlier median" if math.isfinite(times) else "not finite"
            grown.append(
                (
                    int(large.step[0]),
                    times,
                    f"the {quantity} of {name} ({words}) at step {large.step[0]:,}",
                )
            )
    if not grown:
        return ""
    first, _, words = min(grown, key=lambda each: (each[0], -each[1]))
    others = len({words for step, _, words in grown if step == first}) - 1
    return f"first to grow: {words}" + (f"; {others} more grew at that step" if others else "")


def _bad_at_the_end(history: History) -> int:
    windows = history.windows
    finite = history.column("skipped").finite
    skipped = dict(zip(finite.step, finite.value, strict=True))
    count = 0
    for step, window in zip(windows.step[::-1], windows.value[::-1], strict=True):
        count += int(skipped.get(step, 0))
        if skipped.get(step, 0) < window:
            break
    return count


def _passes(history: History, indexes: list[int]) -> str:
    samples, batch = history.described.samples, history.described.batch_size
    of_tokens = "tokens" in str(history.described.identity.get("batch_size"))
    if samples is None or batch is None or len(indexes) < 2 or of_tokens:
        return ""
    passes = [int(index * batch // samples) for index in indexes]
    if len(set(passes)) < len(passes) or passes[-1] - passes[0] + 1 > len(passes) + 1:
        return ""
    return f"one in each epoch of {samples:,} samples: the same sample causes them all"
