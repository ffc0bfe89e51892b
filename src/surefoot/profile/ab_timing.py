"""How much a variant gains: steps of it and of the run as it is in turn, and the ratio of each pair with its spread."""

import math
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from surefoot.errors import first_line
from surefoot.optim.clipping import clear
from surefoot.profile.timed_step import Stepping
from surefoot.profile.variants import Variant

_PAIRS = (4, 25)  # at least, whatever the time, and at most
_LITTLE = 0.02  # a gain below this is none


@dataclass(frozen=True)
class Tried:
    """What a variant gained: `speedup` times as fast, between `low` and `high` (see `interval`); or why it could not be tried."""

    name: str
    flag: str
    changes: str = ""
    speedup: float = math.nan
    low: float = math.nan
    high: float = math.nan
    pairs: int = 0
    first_s: float = 0.0  # its first step, in which compiling happens
    problem: str | None = None

    @property
    def in_noise(self) -> bool:
        """Whether it may as well be no gain and no loss."""
        return self.low <= 1.0 <= self.high or abs(self.speedup - 1.0) < _LITTLE


def tried(variant: Variant, base: Stepping, *, limit_s: float) -> Tried:
    """Try one for about `limit_s` seconds. What fails is told and ends nothing."""
    try:
        ratios, first_s = (_together if variant.workers is None else _apart)(variant, base, limit_s)
    except Exception as problem:
        clear(base.plain_state.parameters)
        base.plain_state.buffers.undo()
        return Tried(variant.name, variant.flag, variant.changes, problem=first_line(problem) or type(problem).__name__)
    low, high = interval(ratios)
    return Tried(variant.name, variant.flag, variant.changes, median(ratios), low, high, len(ratios), first_s)


def ranked(found: Sequence[Tried]) -> list[Tried]:
    """Gains first, the largest before; then what is inside the noise, what is slower, and what could not be tried."""
    measured = [one for one in found if one.problem is None]
    failed = [one for one in found if one.problem is not None]
    return sorted(measured, key=lambda one: (1 if one.in_noise else 0 if one.speedup > 1 else 2, -one.speedup)) + failed


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values between which the median lies with 19 chances in 20 or more, whatever their distribution.

    As many are left out on each side as may be with that (Conover 1999, Practical Nonparametric Statistics, section 3.2). Of
    fewer than six it is the lowest and the highest, with fewer chances: 7 in 8 for four.

    >>> interval([1.0, 2.0, 3.0]), interval(list(range(100)))
    ((1.0, 3.0), (39, 60))
    """
    ordered, number = sorted(values), len(values)
    spared, beyond = 0, 1  # how many of all 2^number ways to lie below and above leave the median beyond one side
    while 20 * 2 * (beyond + math.comb(number, spared + 1)) <= 2**number:
        spared += 1
        beyond += math.comb(number, spared)
    return ordered[spared], ordered[number - 1 - spared]


def _together(variant: Variant, base: Stepping, limit_s: float) -> tuple[list[float], float]:
    """Step by step in turn, each first every other time."""
    ratios: list[float] = []
    with variant.entered():
        steps = variant.make()
        first_s = steps.seconds()
        steps.seconds()
    base.seconds()
    steps.begin(base.next)  # a pair is made with the same samples
    begun = perf_counter()
    while len(ratios) < _PAIRS[0] or (len(ratios) < _PAIRS[1] and perf_counter() - begun < limit_s):
        took_s: dict[bool, float] = {}
        for changed in (True, False) if len(ratios) % 2 else (False, True):
            with variant.entered() if changed else nullcontext():
                took_s[changed] = (steps if changed else base).seconds()
        ratios.append(took_s[False] / took_s[True])
    steps.feed.close()
    return ratios, first_s


def _apart(variant: Variant, base: Stepping, limit_s: float) -> tuple[list[float], float]:
    """In stretches: workers read ahead, and would do so while the run as it is makes its steps.

    They are ended after each stretch, and the steps for which they had read ahead are not counted.
    """
    assert variant.workers is not None
    usual_s, own_s, first_s, begun = list[float](), list[float](), 0.0, perf_counter()
    while len(own_s) < 2 * _PAIRS[0] or (len(own_s) < _PAIRS[1] and perf_counter() - begun < limit_s):
        usual_s += _stretch(base, base.feed.workers)[1]
        steps = variant.make()
        with closing(steps.feed):
            begin_s, stretch_s = _stretch(steps, variant.workers)
        own_s += stretch_s
        first_s = first_s or begin_s
    return [median(usual_s) / each_s for each_s in own_s], first_s


def _stretch(steps: Stepping, workers: int) -> tuple[float, list[float]]:
    """The first step, and four after what was read ahead is used up."""
    steps.begin(steps.next)
    first_s = steps.seconds()
    for _ in range(2 * workers):
        steps.seconds()
    return first_s, [steps.seconds() for _ in range(_PAIRS[0])]
