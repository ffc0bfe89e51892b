"""Findings on runs that break: divergence and how it began, steps that were not finite, losses that jump."""

from __future__ import annotations

import math

import numpy as np

from surefoot.diagnose.finding import Finding, Unclear, Verdict, Well
from surefoot.diagnose.history import History, Table
from surefoot.diagnose.statistics import FEWEST, level, noise, spread
from surefoot.diagnose.text import listed

"""Records of a loss, of which a fifth or more make a level."""

LOST = 0.5

"""Of what was gained: half of it lost is no fluctuation, and no restart of a schedule either, which costs a tenth or so."""

RISEN = 1.2

"""Times the first loss, for a run that had gained nothing: above chance by a fifth is no noise of a level."""

GREW = 5.0

"""Times its own median: what tells a layer that breaks from one whose gradient is noisy (their largest are about twice the median)."""

MANY = 0.05

"""Of all steps: one in twenty lost shows in the result; fewer are single samples or, in fp16, the search for a loss scale."""

FP16 = 0.01

"""Of all steps: a loss scale doubles every 2,000 steps and is found too large each time (Micikevicius et al. 2018, section 3.2,
https://arxiv.org/abs/1710.03740), with some at the start."""

NEIGHBOURS = 10

"""Records to each side: enough for a median and its deviation, few enough for the loss to have stayed where it was."""

SIGMAS = 8.0

"""Of the neighbours' deviation. Losses have heavy tails: with six, one record in thousands would be a spike of nothing."""

NOTHING = 0.01

"""Of the loss at the start: jumps among the last hundredth of it, where all is learnt, matter to nobody."""

ABOVE = 0.25

"""Of the neighbours' median, at least: a jump by less is none, however quiet they are."""


def diverged(history: History) -> Verdict:
    """A loss that has lost half of what it had gained and stays there, or a run that ended in steps that are not finite."""
    name, loss = "diverged", history.loss
    ended = (history.ended_by or "").startswith("diverged") or _bad_at_the_end(
        history
    ) > history.described.max_bad_steps
    if ended:
        skipped = skipped_steps(history)
        begun = _first_in_a_row(skipped) if skipped else history.step
        return _divergence(
            history,
            begun,
            f"The run diverged: from step {begun:,} on no loss or gradient was finite.",
            (
                f"the last loss before: {loss.value[-1]:.4g} after step {loss.step[-1]:,}"
                if len(loss)
                else "no step was finite",
            ),
            bad=True,
        )
    if len(loss) < FEWEST:
        return Unclear(name, f"{len(loss)} records of the loss are too few (at least {FEWEST})")
    width = max(3, len(loss) // 10)
    levels = np.array([level(loss.value[place : place + width]) for place in range(len(loss) - width + 1)])
    start = max(float(levels[0]), float(loss.value[0]))
    place = int(np.argmin(levels))
    best, last, wobble = float(levels[place]), level(loss.value[-width:]), noise(loss.value)
    wobble = min(wobble, noise(loss.value[: place + width]) or wobble)  # before it broke
    gained = start - best
    lost_half = gained > 4 * wobble and last > best + LOST * gained + 4 * wobble
    rose = gained <= 4 * wobble and last > RISEN * start + 4 * wobble and start > 0
    if not (lost_half or rose) or place + 2 * width > len(loss):
        return Well(name, f"the loss, {last:.4g} at last, is near the lowest it was: {best:.4g}")
    middle = int(loss.step[place + width // 2])
    return _divergence(
        history,
        middle,
        f"The loss diverged: from {best:.4g} about step {middle:,} to {last:.4g}.",
        (f"level at the start {start:.4g}, lowest {best:.4g}, at last {last:.4g}",),
        bad=False,
    )


def non_finite_steps(history: History) -> Verdict:
    """Steps that were not applied, for a loss or gradient that was not finite."""
    name, described = "non-finite-steps", history.described
    if not history.train:
        return Unclear(name, "no step was recorded yet")
    skipped = int(history.total("skipped"))
    if not skipped:
        return Well(name, f"every one of {history.step:,} steps was finite")
    indexes = skipped_steps(history)
    fraction = skipped / max(history.step, 1)
    scaled = described.made.get("precision") == "fp16" and fraction <= FP16
    evidence = [f"{skipped:,} of {history.step:,} steps, {100 * fraction:.2g}% of them, were not applied"]
    if indexes:
        evidence.append(f"steps {listed(indexes, most=8)}")
    causes = [
        "a sample with NaN or infinity in it, or one on which the loss is (log of 0, division by 0)",
        "a learning rate at which the loss overflows",
    ]
    of_a_pass = _passes(history, indexes)
    if of_a_pass is not None:
        evidence.append(of_a_pass)
        causes = causes[:1]
    if described.made.get("precision") == "fp16":
        causes.insert(0, "the loss scale of fp16 being found: some at the start, and one now and then")
    step = indexes[0] if indexes else None
    look = f"{described.replay('N' if step is None else step)}  # names samples, module and tensor"
    rate = described.lr
    tries = [look] + ([] if rate is None or of_a_pass else [described.typed("optimizer.lr", float(f"{rate / 10:.3g}"))])
    return Finding(
        name,
        "note" if scaled else "error" if fraction >= MANY else "warning",
        f"{skipped:,} {'step was' if skipped == 1 else 'steps were'} skipped, for a loss or gradient that was not finite.",
        evidence=tuple(evidence),
        causes=tuple(causes),
        try_=tuple(tries),
        step=step,
        numbers={"skipped": skipped, "fraction": fraction},
    )


def loss_spikes(history: History) -> Verdict:
    """The largest loss of a step in each record against those of its neighbours."""
    name = "loss-spikes"
    series = history.column("loss_max").finite
    if len(series) < FEWEST:
        series = history.loss
    if len(series) < FEWEST:
        return Unclear(name, f"{len(series)} records of the loss are too few (at least {FEWEST})")
    spikes = []
    for place in range(3, len(series)):
        before = series.value[max(0, place - NEIGHBOURS) : place]
        if series.value[place] <= before.max():  # most are not: their medians need not be known
            continue
        around = np.concatenate([before, series.value[place + 1 : place + 1 + NEIGHBOURS]])
        middle, deviation = level(around), spread(around)
        here = series.value[place]
        if here - middle < NOTHING * series.value[0]:
            continue
        if here > max(middle + SIGMAS * deviation, middle + ABOVE * abs(middle)):
            spikes.append((int(series.step[place]), float(here), middle, deviation))
    if not spikes:
        return Well(name, "no loss stands out from those around it")
    where = {record["step"]: record.get("loss_max_step") for record in history.train}
    largest = max(spikes, key=lambda spike: spike[1] - spike[2])
    at = where.get(largest[0])
    rate, limit = history.described.lr, history.described.clip
    tries = [f"{history.described.replay(largest[0] - 1 if at is None else int(at))}  # shows its samples"]
    if limit is None or limit[0] == "off":
        tries.append(history.described.typed("clip", "norm 1.0"))
    if rate is not None:
        tries.append(history.described.typed("optimizer.lr", float(f"{rate / 3:.2g}")))
    shown = [
        f"{value:.4g} at step {step if where.get(step) is None else where[step]:,} (around it {middle:.4g})"
        for step, value, middle, _ in spikes
    ]
    return Finding(
        name,
        "warning",
        "The loss jumped once." if len(spikes) == 1 else f"The loss jumped {len(spikes)} times.",
        evidence=(
            listed(shown),
            f"a jump is {SIGMAS:g} deviations of its neighbours, and {ABOVE:.0%}, above their median",
        ),
        causes=(
            "strange samples: broken ones, or a file of another kind",
            "a learning rate near the highest that is stable; Adam with a large beta2 after a change of the data",
        ),
        try_=tuple(tries),
        step=largest[0] if at is None else int(at),
        numbers={"spikes": len(spikes), "largest": largest[1], "around": largest[2]},
    )


def skipped_steps(history: History) -> list[int]:
    """The indexes of skipped steps, as far as they are recorded."""
    return sorted({int(step) for record in history.train for step in record.get("skipped_steps") or ()})


def _divergence(history: History, begun: int, message: str, evidence: tuple[str, ...], *, bad: bool) -> Finding:
    described = history.described
    rate = described.lr
    tries = [] if rate is None else [described.typed("optimizer.lr", float(f"{rate / 10:.3g}"))]
    if described.warmup < 0.05 * (described.schedule_steps or 0):
        tries.append(described.typed("schedule.warmup", "5%"))
    if described.clip is not None and described.clip[0] == "off":
        tries.append(described.typed("clip", "norm 1.0"))
    causes = [
        "a learning rate that is too high, or reached too soon",
        "numbers that overflow: attention or logits that grow without a norm, fp16, a loss with log or division",
    ]
    if not bad:
        causes.append("a loss that is not meant to fall, as of a policy: judge such a run by its scores")
    elif begun == 0:  # no update was made, so no rate is the cause
        causes, tries = ["inputs, starting weights or a loss that are not finite before any update is made"], []
    return Finding(
        "diverged",
        "error",
        message,
        evidence=(*evidence, *_first_to_grow(history, begun)),
        causes=tuple(causes),
        try_=(*tries, described.replay(begun)),
        step=begun,
        numbers={"begun": begun},
    )


def _first_to_grow(history: History, begun: int) -> tuple[str, ...]:
    """Which layer's gradient or update was the first to be far above what it was, from shortly before the beginning on."""
    earliest: list[tuple[int, float, str]] = []
    for kind, said in (("gradient_norm", "gradient"), ("update_norm", "update"), ("activation_norm", "output")):
        earliest += _grown(history.watched(kind), begun, said)
    if not earliest:
        return ()
    step, _, words = min(earliest, key=lambda found: (found[0], -found[1]))
    others = len({words for at, _, words in earliest if at == step}) - 1
    return (f"first to grow: {words}" + (f"; so did {others} more then" if others else ""),)


def _grown(table: Table, begun: int, said: str) -> list[tuple[int, float, str]]:
    before = table.step < begun
    if before.sum() < 3:
        return []
    found = []
    for place, parameter in enumerate(table.names):
        usual = level(table.value[before, place])
        later = np.flatnonzero(table.step >= begun - 1)
        for row in later:
            value = table.value[row, place]
            if usual > 0 and (not math.isfinite(value) or value > GREW * usual):
                times = "not finite" if not math.isfinite(value) else f"{value / usual:.3g} times its median before"
                large = math.inf if not math.isfinite(value) else value / usual
                found.append(
                    (int(table.step[row]), large, f"the {said} of {parameter}, {times}, at step {table.step[row]:,}")
                )
                break
    return found


def _bad_at_the_end(history: History) -> int:
    """How many of the last steps were skipped in a row, as far as whole records tell."""
    count = 0
    for record, window in zip(reversed(history.train), reversed(history.windows.value), strict=True):
        skipped = int(record.get("skipped") or 0)
        count += skipped
        if skipped < window:
            break
    return count


def _first_in_a_row(skipped: list[int]) -> int:
    """The first of the last skipped steps that follow each other."""
    first = skipped[-1]
    for step in reversed(skipped[:-1]):
        if step != first - 1:
            break
        first = step
    return first


def _passes(history: History, indexes: list[int]) -> str | None:
    """A sentence where about one step was skipped in each pass over the data, as one bad sample makes it."""
    samples, batch = history.described.samples, history.described.batch_size
    if (
        samples is None
        or batch is None
        or len(indexes) < 2
        or "tokens" in str(history.described.made.get("batch_size"))
    ):
        return None
    passes = [int(index * batch // samples) for index in indexes]
    if len(set(passes)) < len(passes) or passes[-1] - passes[0] + 1 > len(passes) + 1:
        return None
    return f"one in each pass over the {samples:,} samples: it is one sample that comes again"
