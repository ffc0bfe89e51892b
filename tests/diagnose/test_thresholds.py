"""Every threshold of a finding: its number as it is published, and that it decides at 0.9 and 1.1
times itself; 1 second.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot.tools.diagnose
from diagnose.histories import (
    RECORDS,
    begun_at,
    falling,
    found,
    history,
    layers,
    scores,
    targets,
    train,
    verdict,
)
from in_one import in_one
from surefoot.tools.diagnose.finding import Unknown
from surefoot.tracking.record import Record

LAST = RECORDS - 1
LN_10 = math.log(10)
OF_THREE = 1.4826 * 3 / math.sqrt(6)  # the noise of a series that goes +1, 0, -1 and again


@dataclass(frozen=True)
class Threshold:
    """A constant `MODULE.NAME` with its published number; `decides(x)` is true from it on, or up to
    it (`above=False`).

    `x` is the quantity that is compared with it. A count (`counted`) is tested one below and at
    itself.
    """

    name: str
    published: float
    decides: Callable[[Any], bool]
    above: bool = True
    counted: bool = False
    entry: int | None = None  # of a tuple

    @property
    def constant(self) -> float:
        """The number in the source."""
        module, _, name = self.name.partition(".")
        constant = getattr(importlib.import_module(f"surefoot.tools.diagnose.{module}"), name)
        return float(constant if self.entry is None else constant[self.entry])


def is_told(name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    return found(name, history(*parts, **changes)) is not None


def is_clear(name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    return not isinstance(verdict(name, history(*parts, **changes)), Unknown)


def is_as_bad_as(severity: str, name: str, *parts: Sequence[Record], **changes: Any) -> bool:
    finding = found(name, history(*parts, **changes))
    assert finding is not None
    return finding.severity == severity


def then(first: float, after: float, *, at: int = RECORDS // 4) -> Callable[[int], float]:
    """One level, and from a record on another."""
    return lambda place: first if place < at else after


def with_spike(height: float, *, at: int = 30, around: float = 1.0) -> list[Record]:
    return train(lambda place: height if place == at else around)


def cycle(place: int) -> float:
    """+1, 0, -1 and again: any three in a row, and whole quarters, have the median 0."""
    return 1.0 - place % 3


def data(**fields: Any) -> list[Record]:
    return [{"kind": "data_check", "step": 0, **fields}]


def overlap(count: int, **fields: Any) -> list[Record]:
    return data(overlap={"val": {"checked": 1000, "overlapping": count, **fields}})


def guessing(loss: float, *, first: float | None = None, **columns: Any) -> list[Record]:
    """Targets of ten equal kinds, and a loss that stays where it is."""
    records = train(lambda _: loss, **columns)
    return targets(10) + (records if first is None else begun_at(first, records))


def of_steps(count: int) -> list[Record]:
    """Records of the last steps of a run that guesses."""
    records = guessing(LN_10, count=13)
    for place, record in enumerate(records[1:]):
        record["step"] = count - 12 + place
    return records


def exploded_to(level: float, *, targets: int = 80) -> list[Record]:
    """A loss of 1 at step 0, and from then on at a level, as noisy as it is high."""
    losses = train(lambda place: level * (1 + 0.3 * cycle(place)), targets=lambda _: targets)
    return begun_at(1.0, losses)


def noisy(scale: float, *, batch: int = 8) -> list[Record]:
    """Watched steps of two micro-batches, whose squared norms are those of gradient 1 and a noise
    of `scale`, exactly.
    """
    half = batch // 2
    norms = {
        "small_count": half,
        "small_squared": 1 + scale / half,
        "big_count": batch,
        "big_squared": 1 + scale / batch,
    }
    return layers(watched=8, grad_noise=lambda _: norms)


def with_trend(deviations: float) -> list[float]:
    """60 levels that go from 1 to 11, with a trend (Mann-Kendall) as near to so many deviations as
    it can be.

    Of the middle third the first `ups` are 11 and the others 20: concordant less discordant pairs
    are 400 + 40 ups - ups^2.
    """
    one_deviation = math.sqrt(60 * 59 * 125 / 18)
    ups = min(range(21), key=lambda ups: abs(400 + 40 * ups - ups**2 - deviations * one_deviation))
    return [1.0] * 20 + [11.0] * ups + [20.0] * (20 - ups) + [11.0] * 20


def memory(values: Sequence[float]) -> list[Record]:
    """Records of which the last have these bytes; the others have none."""
    first = RECORDS - len(values)
    return train(host_memory_bytes=lambda place: values[place - first] if place >= first else None)


def rising_memory(deviations: float) -> list[float]:
    """12 sizes that rise, of which neighbours are swapped (first ones first) until the trend is as
    low as that.
    """
    swaps = min(5, round((66 - deviations * math.sqrt(12 * 11 * 29 / 18)) / 2))
    sizes = [100e6 * place for place in range(1, 13)]
    for swap in range(swaps):
        sizes[2 * swap], sizes[2 * swap + 1] = sizes[2 * swap + 1], sizes[2 * swap]
    return sizes


def stretched(levels: Sequence[float]) -> list[float]:
    """45 sizes in as many equal stretches as there are levels."""
    parts = np.array_split(np.arange(45), len(levels))
    return [100e6 + 100e6 * level for level, part in zip(levels, parts, strict=True) for _ in part]


def spent(**seconds: float) -> list[Record]:
    """Records of nothing but these seconds each."""
    none = dict.fromkeys(("training_s", "data_wait_s", "evaluating_s", "saving_s"), 0.0)
    return train(
        **{name: (lambda _, amount=amount: amount) for name, amount in (none | seconds).items()}
    )


def noisy_splits(count: int) -> list[Record]:
    """Scores that go up and down by a tenth, the lowest in the middle, the last two between
    them.
    """
    losses = [1.0 + 0.1 * (-1) ** place for place in range(count)]
    losses[count // 2] = 0.85
    losses[-2:] = [1.0, 1.0]
    return scores(losses)


def risen_by(deviations: float) -> list[Record]:
    """20 noisy scores, the last two worse than the best by so many deviations of the noise."""
    losses = [1.0 + 0.1 * (-1) ** place for place in range(20)]
    losses[5] = 0.85
    losses[-2:] = [0.85 + deviations * 1.4826 * 0.4 / math.sqrt(6)] * 2
    return scores(losses)


def share_after_the_tip(limit: float) -> bool:
    """Whether evaluating as seldom as is proposed takes at most this share of the time; half of it
    is taken before.
    """
    finding = found(
        "evaluating-too-long",
        history(
            spent(training_s=1.0, evaluating_s=1.0), scores([1.0] * 10), length="1000000 steps"
        ),
    )
    assert finding is not None
    proposed = re.search(
        r"evaluate_every='(\d+) steps'|--evaluate-every \"(\d+) steps\"", finding.try_[0]
    )
    assert proposed is not None
    as_seldom = int(proposed[1] or proposed[2]) / 60  # against the steps between two evaluations
    return 1 / (1 + as_seldom) <= limit


def diverging(place: int) -> float:
    return falling(place) if place < 40 else 9.0


def half_as_fast(second: float) -> list[Record]:
    """Two straight lines at a constant rate: the loss gains 0.1 in the first half of the run, and
    `second` times it then.
    """
    middle = LAST / 2
    return train(
        lambda place: 2.3 - 0.1 * (min(place, middle) + second * max(place - middle, 0)) / middle,
        lr=lambda _: 1e-5,
    )


CONSTANT_RATE: dict[str, Any] = {"lr": lambda _: 1e-5}
NO_WARMUP: dict[str, Any] = {"schedule": {"shape": "linear", "warmup": 0}}

PUBLISHED = [
    Threshold(
        "statistics.FEWEST",
        12,
        lambda count: is_clear("diverged", train(count=count)),
        counted=True,
    ),
    Threshold(
        "divergence.LOST",
        0.5,
        lambda x: is_told(
            "diverged", train(lambda p: 4.0 if p < 9 else 1.0 if p < 40 else 1 + 3 * x)
        ),
    ),
    Threshold("divergence.RISEN", 1.2, lambda x: is_told("diverged", train(then(2.0, 2 * x)))),
    Threshold(
        "divergence.GREW",
        5.0,
        lambda x: (
            "first to grow"
            in str(
                found(
                    "diverged",
                    history(
                        train(diverging),
                        layers(gradient=lambda name, place: x if place > 3 else 1.0),
                    ),
                )
            )
        ),
    ),
    Threshold(
        "divergence.MANY",
        0.05,
        lambda x: is_as_bad_as(
            "error", "non-finite-steps", train(skipped=lambda p: round(600 * x) * (p == 7))
        ),
    ),
    Threshold(
        "divergence.FP16",
        0.01,
        lambda x: is_as_bad_as(
            "note",
            "non-finite-steps",
            train(count=600, skipped=lambda p: round(6000 * x) * (p == 7)),
            precision="fp16",
        ),
        above=False,
    ),
    Threshold(
        "divergence.NEIGHBOURS",
        10,  # a level before it that is higher hides it up to this distance
        lambda count: (
            not is_told("loss-spikes", train(lambda p: {2: 9.0, 2 + count: 8.9}.get(p, 1.0)))
        ),
        above=False,
        counted=True,
    ),
    Threshold(
        "divergence.SIGMAS",
        8.0,
        lambda x: is_told(
            "loss-spikes",
            train(lambda p: 1 + 0.1 * (x * 1.4826 if p == 30 else (-1) ** (p + (p > 30)))),
        ),
    ),
    Threshold(
        "divergence.NOTHING",
        0.01,
        lambda x: is_told(
            "loss-spikes", train(lambda p: 100.0 if p == 0 else 1.0 + 100 * x * (p == 30))
        ),
    ),
    Threshold("divergence.ABOVE", 0.25, lambda x: is_told("loss-spikes", with_spike(1 + x))),
    Threshold(
        "chance.FEWEST_STEPS",
        50,
        lambda count: is_clear(
            "no-better-than-chance", of_steps(count), length=f"{count} steps", schedule=None
        ),
        counted=True,
    ),
    Threshold(
        "chance.TIMES_SEEN",
        20,
        lambda x: is_clear(
            "no-better-than-chance", guessing(LN_10, targets=lambda _: 10 * x / RECORDS)
        ),
    ),
    Threshold(
        "chance.PART_OF_RUN",
        0.5,
        lambda x: is_clear(
            "no-better-than-chance",
            guessing(LN_10, count=round(RECORDS * x)),
            standing="running",
        ),
    ),
    Threshold(
        "chance.NEAR",
        0.02,
        lambda x: is_told("no-better-than-chance", guessing(LN_10 * (1 + x))),
        above=False,
    ),
    Threshold(
        "chance.CLEARLY",
        0.1,
        lambda x: is_told(
            "no-better-than-chance", guessing(LN_10), scores([3.0, LN_10 * (1 - x), 3.0])
        ),
        above=False,
    ),
    Threshold(
        "chance.EVALUATIONS",
        2,
        lambda count: is_told("no-better-than-chance", targets(10), train(), scores([3.0] * count)),
        counted=True,
    ),
    Threshold(  # a fall by so many standard errors of the difference of two quarters
        "chance.SURE",
        3.0,
        lambda x: is_told(
            "no-better-than-chance",
            targets(10),
            train(
                lambda p: (
                    LN_10
                    + 0.01 * cycle(p)
                    - x * (p >= 45) * math.sqrt(2 / 15) * 1.2533 * 0.01 * OF_THREE
                )
            ),
        ),
        above=False,
    ),
    Threshold(
        "chance.USUAL_START",
        1.5,
        lambda x: is_told(
            "no-better-than-chance", guessing(LN_10 * x + 0.5, first=LN_10 * x + 0.5)
        ),
        above=False,
        entry=0,
    ),
    Threshold(
        "chance.USUAL_START",
        0.5,
        lambda x: is_told(
            "no-better-than-chance", guessing(LN_10 * 1.5 + x, first=LN_10 * 1.5 + x)
        ),
        above=False,
        entry=1,
    ),
    Threshold(
        "generalization.EVALUATIONS",
        4,
        lambda count: is_clear("overfitting", train(), scores([1.0] * count)),
        counted=True,
    ),
    Threshold(
        "generalization.WORSE",
        0.02,
        lambda x: is_told(
            "overfitting", train(), scores([1.6, 1.55, 1.5, 1.5 * (1 + x), 1.5 * (1 + x)])
        ),
    ),
    Threshold(
        "generalization.MANY_EVALUATIONS",
        12,
        lambda count: not is_told("overfitting", train(), noisy_splits(count)),
        counted=True,
    ),
    Threshold(
        "generalization.BY_CHANCE", 3.0, lambda x: is_told("overfitting", train(), risen_by(x))
    ),
    Threshold(
        "generalization.NOTHING",
        0.01,
        lambda x: is_told(
            "overfitting", train(), scores([100.0, 10.0, 1.0, 1 + 100 * x, 1 + 100 * x])
        ),
    ),
    Threshold(
        "generalization.NEARLY_ALL",
        0.95,
        lambda x: is_told(
            "constant-targets",
            train(),
            data(targets={"distinct": 9, "most_common_fraction": min(x, 1.0)}),
        ),
    ),
    Threshold(
        "generalization.SHARED",
        0.01,
        lambda x: is_as_bad_as("warning", "train-validation-overlap", overlap(round(1000 * x))),
    ),
    Threshold(
        "generalization.PASSAGES_SHARED",
        0.1,
        lambda x: is_as_bad_as(
            "warning", "train-validation-overlap", overlap(round(1000 * x), passages=True)
        ),
    ),
    Threshold(
        "generalization.MOSTLY_SHARED",
        0.5,
        lambda x: is_as_bad_as("error", "train-validation-overlap", overlap(round(1000 * x))),
    ),
    Threshold(
        "gradients.FEWEST",
        12,
        lambda count: is_clear("growing-gradient", train(count=count), **NO_WARMUP),
        counted=True,
    ),
    Threshold(
        "gradients.OFTEN",
        0.9,
        lambda x: is_told(
            "often-clipped", train(clip_fraction=lambda _: x, grad_norm=lambda _: 2.5)
        ),
    ),
    Threshold(
        "gradients.FAR_BELOW",
        2.0,
        lambda x: is_told(
            "often-clipped", train(clip_fraction=lambda _: 1.0, grad_norm=lambda _: x)
        ),
    ),
    Threshold(
        "gradients.FAR_ABOVE",
        10.0,
        lambda x: is_as_bad_as(
            "warning", "often-clipped", train(clip_fraction=lambda _: 1.0, grad_norm=lambda _: x)
        ),
    ),
    Threshold(
        "gradients.GREW",
        10.0,
        lambda x: is_told("growing-gradient", train(grad_norm=then(1.0, x, at=30))),
    ),
    Threshold(
        "gradients.GREW",
        10.0,
        lambda x: (
            "most in 0.weight"
            in str(
                found(
                    "growing-gradient",
                    history(
                        train(grad_norm=then(1.0, 90.0, at=30)),
                        layers(watched=9, gradient=lambda name, p: x if p > 5 else 1.0),
                    ),
                )
            )
        ),
    ),
    Threshold(
        "gradients.SURE",
        3.0,
        lambda x: is_told(
            "growing-gradient", train(grad_norm=lambda p: with_trend(x)[p]), **NO_WARMUP
        ),
    ),
    Threshold(
        "gradients.GONE",
        1e-4,
        lambda x: is_told(
            "vanishing-gradient",
            train(),
            layers(gradient=lambda name, _: x if name[0] == "0" else 1.0),
        ),
        above=False,
    ),
    Threshold("gradients.NOISY", 10.0, lambda x: is_told("batch-too-small", train(), noisy(8 * x))),
    Threshold(
        "gradients.NOISY",
        10.0,
        lambda x: is_as_bad_as("warning", "batch-too-small", train(), noisy(8 * x**2)),
    ),
    Threshold(
        "learning_rate.FEWEST",
        12,
        lambda count: is_clear("loss-not-falling", train(count=count)),
        counted=True,
    ),
    Threshold(
        "learning_rate.SMALLEST_FALL",
        0.01,
        lambda x: not is_told("loss-not-falling", train(then(2.0, 2 * (1 - x)))),
    ),
    Threshold(
        "learning_rate.UNCLEAR_FALL",
        0.03,
        lambda x: (
            not is_as_bad_as(
                "error",
                "loss-not-falling",
                train(lambda p: (2.0 + 0.4 * cycle(p)) * (1 - x * (p >= 15))),
            )
        ),
    ),
    Threshold(  # a fall by so many standard errors of the difference of two quarters
        "learning_rate.CERTAIN",
        2.0,
        lambda x: (
            not is_told(
                "loss-not-falling",
                train(
                    lambda p: (
                        2.0
                        + 0.1 * cycle(p)
                        - x * (p >= 15) * math.sqrt(2 / 15) * 1.2533 * 0.1 * OF_THREE
                    ),
                ),
            )
        ),
    ),
    Threshold(
        "learning_rate.FAR_ABOVE_START",
        100,
        lambda x: is_told("rate-too-high", exploded_to(x)),
    ),
    Threshold(
        "learning_rate.SOME_TARGETS",
        8,
        lambda count: is_told("rate-too-high", exploded_to(200, targets=10 * count)),
        counted=True,
    ),
    Threshold(
        "learning_rate.LITTLE",
        0.25,
        lambda x: is_told(
            "rate-too-low", train(lambda p: 2.0 * (1 - x * p / LAST), **CONSTANT_RATE)
        ),
        above=False,
    ),
    Threshold(
        "learning_rate.LITTLE",
        0.25,
        lambda x: is_told(
            "rate-too-low",
            train(lambda p: 2.0 * (1 - x * (1 - math.exp(-p / 12))), **CONSTANT_RATE),
            layers(update=lambda name, _: 1.6e-3),
        ),
        above=False,
    ),
    Threshold("learning_rate.STRAIGHT", 0.6, lambda x: is_told("rate-too-low", half_as_fast(x))),
    Threshold(
        "learning_rate.WILD",
        0.1,
        lambda x: is_told("rate-too-high", train(), layers(update=lambda name, _: 10 * x)),
    ),
    Threshold(
        "learning_rate.TIMID",
        1e-5,
        lambda x: is_told("rate-too-low", train(), layers(update=lambda name, _: 10 * x)),
        above=False,
    ),
    Threshold(
        "learning_rate.MOVED",
        0.1,
        lambda x: is_told(
            "rate-too-low", train(lambda _: 2.3), layers(update=lambda name, _: 10 * x / 600)
        ),
        above=False,
    ),
    Threshold(
        "learning_rate.REBOUND",
        0.03,
        lambda x: is_told(
            "rate-too-high", train(lambda p: 4.0 - 0.1 * min(p, 10) + 3.0 * x * (p > 17))
        ),
    ),
    Threshold(
        "learning_rate.ABOVE_START",
        1.05,
        lambda x: is_told("rate-too-high", train(then(2.0, 2 * x))),
    ),
    Threshold(
        "schedule.LONG_WARMUP",
        0.25,
        lambda x: is_told(
            "long-warm-up", train(), schedule={"shape": "cosine", "warmup": round(600 * x)}
        ),
    ),
    Threshold(
        "schedule.HIGH",
        0.5,
        lambda x: is_told("high-rate-at-end", train(lr=lambda p: 1e-3 * (x if p == LAST else 1))),
    ),
    Threshold(
        "schedule.LEAST_STEPS",
        50,
        lambda count: is_clear(
            "high-rate-at-end",
            train(count=4),
            [{"kind": "event", "step": count, "event": "finished"}],
            length=f"{count} steps",
        ),
        counted=True,
    ),
    Threshold(
        "schedule.STILL",
        0.02,
        lambda x: is_told("still-improving", train(), scores([2.0] * 8 + [2 * (1 - x)] * 2)),
    ),
    Threshold(
        "schedule.EVALUATIONS",
        4,
        lambda count: is_clear("still-improving", train(), scores([1.0] * count)),
        counted=True,
    ),
    Threshold(
        "memory.FEWEST",
        12,
        lambda count: is_clear("growing-memory", memory([1e8] * count)),
        counted=True,
    ),
    Threshold(
        "memory.STRETCHES",
        6,  # stairs: as many as there are stretches rise in each of them, one fewer do not
        lambda count: is_told("growing-memory", memory(stretched(range(count)))),
        counted=True,
    ),
    Threshold(  # of five rises one is x times their mean
        "memory.STEADY",
        0.3,
        lambda x: is_told(
            "growing-memory",
            memory(stretched(np.cumsum([0, 4 * x / (5 - x), 1, 1, 1, 1]).tolist())),
        ),
    ),
    Threshold("memory.SURE", 4.0, lambda x: is_told("growing-memory", memory(rising_memory(x)))),
    Threshold(  # the middles of the first and the last third of 45 records are 30 apart
        "memory.LEAST_BYTES",
        16e6,
        lambda x: is_told(
            "growing-memory", memory([100e6 + x / 30 * place for place in range(45)])
        ),
    ),
    Threshold(
        "memory.LEAST_SHARE",
        0.02,
        lambda x: is_told(
            "growing-memory", memory([10e9 * (1 + x / 30 * (place - 7)) for place in range(45)])
        ),
    ),
    Threshold(
        "throughput.FEWEST",
        12,
        lambda count: is_clear("falling-throughput", train(count=count + 1)),
        counted=True,
    ),
    Threshold(
        "throughput.FEWEST",
        12,
        lambda count: is_clear("jittering-throughput", train(count=count + 1)),
        counted=True,
    ),
    Threshold(
        "throughput.LEAST_S",
        1.0,
        lambda x: is_clear("evaluating-too-long", spent(training_s=x / 60)),
    ),
    Threshold(
        "throughput.LEAST_S", 1.0, lambda x: is_clear("data-bound", spent(training_s=x / 59))
    ),
    Threshold(
        "throughput.WORTH_S",
        60.0,
        lambda x: is_as_bad_as(
            "warning", "evaluating-too-long", spent(evaluating_s=x / 120, training_s=x / 120)
        ),
    ),
    Threshold(
        "throughput.LONG_ENOUGH_S",
        3.0,
        lambda x: is_clear("falling-throughput", spent(training_s=x / 60)),
    ),
    Threshold(
        "throughput.LONG_ENOUGH_S",
        3.0,
        lambda x: is_clear("jittering-throughput", spent(data_wait_s=x / 60)),
    ),
    Threshold(
        "throughput.WAITING",
        0.1,
        lambda x: is_told("data-bound", spent(data_wait_s=x, training_s=1 - x)),
    ),
    Threshold(
        "throughput.MUCH_WAITING",
        0.3,
        lambda x: is_as_bad_as("warning", "data-bound", spent(data_wait_s=x, training_s=1 - x)),
    ),
    Threshold(
        "throughput.EVALUATING",
        0.25,
        lambda x: is_told("evaluating-too-long", spent(evaluating_s=x, training_s=1 - x)),
    ),
    Threshold(
        "throughput.SAVING",
        0.1,
        lambda x: is_told("saving-too-long", spent(saving_s=x, training_s=1 - x)),
    ),
    Threshold("throughput.WANTED", 0.05, share_after_the_tip),
    Threshold(
        "throughput.FELL",
        0.8,
        lambda x: is_told("falling-throughput", train(targets_per_s=then(100, 100 * x, at=30))),
        above=False,
    ),
    Threshold(
        "throughput.SURE",
        3.0,
        lambda x: is_told(
            "falling-throughput",
            train(count=61, targets_per_s=lambda p: 100 - 4 * with_trend(x)[max(p - 1, 0)]),
        ),
    ),
    Threshold(
        "throughput.UNEVEN",
        0.25,
        lambda x: is_told(
            "jittering-throughput",
            train(targets_per_s=lambda p: 100 * (1 + x / OF_THREE * cycle(p))),
        ),
    ),
    Threshold(
        "layers.DEAD",
        0.5,
        lambda x: is_told(
            "dead-units", train(), layers(zero_grad_row_fraction=lambda _: {"2.weight": x})
        ),
    ),
    Threshold(
        "layers.ALIVE",
        0.1,
        lambda x: (
            "units that were alive"
            in str(
                found(
                    "rate-too-high",
                    history(
                        train(),
                        layers(
                            update=lambda name, _: 1.01,
                            zero_grad_row_fraction=lambda p: {"2.weight": x if p == 1 else 0.5},
                        ),
                    ),
                )
            )
        ),
        above=False,
    ),
    Threshold(
        "layers.ALL_FLAT",
        0.99,
        lambda x: is_told(
            "dead-units", train(), layers(saturated_fraction=lambda _: {"1": min(x, 1.0)})
        ),
    ),
    Threshold(
        "layers.FLAT",
        0.5,
        lambda x: is_told(
            "saturated-units", train(), layers(saturated_fraction=lambda _: {"3": x})
        ),
    ),
    Threshold(
        "layers.USUAL",
        1e-4,
        lambda x: is_told(
            "unusual-updates", train(), layers(update=lambda name, _: x if name[0] == "2" else 0.01)
        ),
        above=False,
        entry=0,
    ),
    Threshold(
        "layers.USUAL",
        1e-2,
        lambda x: is_told(
            "unusual-updates",
            train(),
            layers(update=lambda name, _: 100 * x if name[0] == "2" else 0.01),
        ),
        entry=1,
    ),
    Threshold(
        "layers.FAR",
        10.0,
        lambda x: is_told(
            "unusual-updates",
            train(),
            layers(update=lambda name, _: 0.1 * x if name[0] == "2" else 0.01),
        ),
    ),
    Threshold(
        "layers.WATCHED",
        3,
        lambda count: is_clear("never-updated", train(), layers(watched=count)),
        counted=True,
    ),
]


@in_one
@pytest.mark.parametrize("threshold", PUBLISHED, ids=lambda threshold: threshold.name)
def test_a_threshold_is_the_published_number_and_decides_within_a_tenth_of_it(
    threshold: Threshold,
) -> None:
    assert threshold.constant == threshold.published
    if threshold.counted:
        first = int(threshold.published) + (not threshold.above)
        below = first - 1
        above = first
    else:
        below = 0.9 * threshold.constant
        above = 1.1 * threshold.constant
    assert (threshold.decides(below), threshold.decides(above)) == (
        not threshold.above,
        threshold.above,
    )


def test_every_number_by_which_a_finding_decides_is_in_the_table() -> None:
    numbers = set()
    for file in Path(surefoot.tools.diagnose.__file__).parent.glob("*.py"):
        for line in ast.parse(file.read_text()).body:
            names = (
                [target.id for target in line.targets if isinstance(target, ast.Name)]
                if isinstance(line, ast.Assign)
                else []
            )
            for name in names:
                constant = getattr(
                    importlib.import_module(f"surefoot.tools.diagnose.{file.stem}"), name
                )
                first = constant[0] if isinstance(constant, tuple) and constant else constant
                if name.isupper() and not name.startswith("_") and isinstance(first, int | float):
                    numbers.add(f"{file.stem}.{name}")
    assert numbers == {threshold.name for threshold in PUBLISHED}
