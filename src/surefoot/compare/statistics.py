"""Is one variant better than another, or is it the noise? Statistics of differences on shared data; nothing but numbers.

Data that are hard for one model are hard for the other, so differences and their error are computed for each piece of the data.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """A mean difference (first minus second), its standard error, and how many pairs it was taken over.

    >>> difference = paired_difference([1.0, 2.0, 3.0], [1.5, 2.5, 4.1], counts=[1, 1, 1])
    >>> round(difference.mean, 3), round(difference.standard_error, 3), difference.pairs
    (-0.7, 0.2, 3)
    """

    mean: float
    standard_error: float
    pairs: int

    @property
    def p_value(self) -> float:
        """How often chance alone would make a difference this large, by a two-sided t test; 1 for no difference at all.

        Not a number where nothing is known of the noise: there is but one pair, or a score is not finite.
        """
        if self.pairs < 2 or not math.isfinite(self.mean + self.standard_error):
            return math.nan
        if self.standard_error == 0.0:
            return 1.0 if self.mean == 0.0 else 0.0
        return t_tail(self.mean / self.standard_error, freedom=self.pairs - 1)


def paired_difference(first: Sequence[float], second: Sequence[float], *, counts: Sequence[float]) -> Difference:
    """The difference of two scores over the same batches, `first` minus `second`; each batch weighs as much as it counts.

    The mean is that of all targets, so it is exactly the difference of the two scores. It is a ratio of sums, with the standard error
    sqrt(n / (n - 1) * sum(c_i^2 (d_i - d)^2)) / sum(c_i): Cochran 1977, Sampling Techniques, section
    6.4, without the correction for a finite population. With equal counts it is the usual s / sqrt(n).

    >>> paired_difference([0.5, 0.75], [0.25, 0.25], counts=[3, 1]).mean
    0.3125
    """
    counted = [row for row in zip(first, second, counts, strict=True) if row[2] > 0]  # others tell nothing
    differences, weights = [a - b for a, b, _ in counted], [count for _, _, count in counted]
    if not counted:
        return Difference(math.nan, math.nan, 0)
    mean, pairs = fmean(differences, weights), len(differences)
    if pairs < 2:
        return Difference(mean, math.nan, pairs)
    squares = math.fsum((weight * (each - mean)) ** 2 for weight, each in zip(weights, differences, strict=True))
    return Difference(mean, math.sqrt(pairs / (pairs - 1) * squares) / math.fsum(weights), pairs)


def mean_and_error(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The mean over the repeats that have a value and its standard error, s / sqrt(n); None for an unknown one.

    >>> mean_and_error([1.0, None, 3.0]), mean_and_error([1.0])
    ((2.0, 1.0), (1.0, None))
    """
    known = [float(value) for value in values if value is not None]
    mean = fmean(known) if known else None
    if mean is None or len(known) < 2:
        return mean, None
    squares = math.fsum((value - mean) ** 2 for value in known)  # statistics.stdev raises where a value is not finite
    return mean, None if math.isnan(squares) else math.sqrt(squares / (len(known) - 1) / len(known))


def t_tail(t: float, *, freedom: int) -> float:
    """The two-sided tail of Student's t distribution, by its finite sums for whole degrees of freedom.

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4. Exact but for cancellation: tails below 1e-14 come out as 0.

    >>> round(t_tail(12.706, freedom=1), 4), round(t_tail(4.303, freedom=2), 4), round(t_tail(1.98, freedom=120), 3)
    (0.05, 0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(3 if odd else 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return max(0.0, 1.0 - (2.0 / math.pi * (angle + sine * total) if odd else sine * total))


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p values as they are where several differences are looked at together, in the order given.

    Holm 1979, A simple sequentially rejective multiple test procedure: the chance of any false
    positive stays below the level. NaN stays NaN, and is not counted.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted, highest = [math.nan] * len(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted
