"""Statistics of score differences between variants: standard errors, t tests, and Holm's
correction.

Data that are hard for one model are hard for another, so differences are paired by evaluation
batch, and by seed if the variants share enough seeds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

LEVEL = 0.05


@dataclass(frozen=True)
class ScoreDifference:
    """A mean difference (first minus second), its standard error, the number of pairs (of the
    smaller set of seeds if they are not paired), and the degrees of freedom of the error.

    >>> difference = paired_difference([1.0, 2.0, 3.0], [1.5, 2.5, 4.1], counts=[1, 1, 1])
    >>> round(difference.mean, 3), round(difference.standard_error, 3), difference.pairs
    (-0.7, 0.2, 3)
    """

    mean: float
    standard_error: float
    pairs: int
    freedom: int

    @property
    def p_value(self) -> float:
        """The p value of a two-sided t test: 1 if the mean is 0; NaN if there is nothing to measure
        the error by, such as equal scores of all seeds, or if a score is not finite.
        """
        if self.freedom < 1 or not math.isfinite(self.mean + self.standard_error):
            return math.nan
        if self.mean == 0.0:
            return 1.0
        if self.standard_error == 0.0:
            return math.nan
        return t_tail(self.mean / self.standard_error, freedom=self.freedom)


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, counts: Sequence[float]
) -> ScoreDifference:
    """Compute `first` minus `second` over the same batches, weighted by `counts`, the number of
    targets per batch.

    The mean is exactly the difference of the two scores over all targets. The mean is a ratio of
    sums, with standard error sqrt(n / (n - 1) * sum(c_i^2 (d_i - d)^2)) / sum(c_i): Cochran 1977,
    Sampling Techniques, section 6.4, without the correction for a finite population. With equal
    counts the standard error is s / sqrt(n).

    >>> paired_difference([0.5, 0.75], [0.25, 0.25], counts=[3, 1]).mean
    0.3125
    """
    differences = []
    weights = []
    for one, other, count in zip(first, second, counts, strict=True):
        if count > 0:
            differences.append(one - other)
            weights.append(count)
    pairs = len(differences)
    if pairs == 0:
        return ScoreDifference(math.nan, math.nan, 0, -1)
    mean = fmean(differences, weights)
    if pairs < 2:
        return ScoreDifference(mean, math.nan, pairs, pairs - 1)
    squares = math.fsum(
        (weight * (difference - mean)) ** 2
        for weight, difference in zip(weights, differences, strict=True)
    )
    standard_error = math.sqrt(pairs / (pairs - 1) * squares) / math.fsum(weights)
    return ScoreDifference(mean, standard_error, pairs, pairs - 1)


def unpaired_difference(first: Sequence[float], second: Sequence[float]) -> ScoreDifference:
    """Compute the mean of `first` minus the mean of `second`, of two or more scores each, which
    share nothing.

    Welch 1947, The generalization of Student's problem: the variances may differ. The degrees of
    freedom are rounded down.

    >>> unpaired_difference([1.0, 2.0, 3.0], [4.0, 5.0, 9.0])
    ScoreDifference(mean=-4.0, standard_error=1.632993161855452, pairs=3, freedom=2)
    """
    mean = fmean(first) - fmean(second)
    pairs = min(len(first), len(second))
    if not all(map(math.isfinite, [*first, *second])):
        return ScoreDifference(mean, math.nan, pairs, pairs - 1)
    squares = [(variance(scores) / len(scores), len(scores) - 1) for scores in (first, second)]
    standard_error, freedom = _added(squares)
    return ScoreDifference(mean, standard_error, pairs, freedom)


def with_split(seeds: ScoreDifference, split: ScoreDifference) -> ScoreDifference:
    """Return a difference over seeds whose error also covers the evaluation data, measured by the
    difference `split` over the same data.

    The two variances add, as in the pigeonhole bootstrap of Owen 2007, which resamples rows and
    columns of a table independently. It is conservative: the chance of seeds also contains some of
    the chance of the data.

    >>> with_split(ScoreDifference(-4.0, 3.0, 3, 2), ScoreDifference(-4.1, 4.0, 100, 99))
    ScoreDifference(mean=-4.0, standard_error=5.0, pairs=3, freedom=14)
    """
    squares = [(each.standard_error**2, each.freedom) for each in (seeds, split)]
    standard_error, freedom = _added(squares)
    return ScoreDifference(seeds.mean, standard_error, seeds.pairs, freedom)


def _added(squares: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return the standard error and the degrees of freedom (Satterthwaite 1946, rounded down) of a
    sum of independent terms with these squared errors and degrees of freedom.
    """
    total = math.fsum(square for square, _ in squares)
    if not total > 0.0:
        return math.sqrt(total), min(freedom for _, freedom in squares)
    uncertainty = math.fsum(square**2 / freedom for square, freedom in squares)
    # rounding must not turn 2 degrees into 1.9999999
    return math.sqrt(total), math.floor(total**2 / uncertainty * (1 + 1e-12))


def mean_and_error(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return mean and standard error s / sqrt(n) of the values that are not None; an undefined mean
    or error is None.

    >>> mean_and_error([1.0, None, 3.0]), mean_and_error([1.0])
    ((2.0, 1.0), (1.0, None))
    """
    known = [float(value) for value in values if value is not None]
    mean = fmean(known) if known else None
    if mean is None or len(known) < 2:
        return mean, None
    # statistics.stdev raises if a value is not finite
    squares = math.fsum((value - mean) ** 2 for value in known)
    if math.isnan(squares):
        return mean, None
    return mean, math.sqrt(squares / (len(known) - 1) / len(known))


def t_tail(t: float, *, freedom: int) -> float:
    """Return the two-sided tail probability of Student's t distribution for integer degrees of
    freedom.

    Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: finite sums, exact except for cancellation. Tails
    below 1e-14 are returned as 0.

    >>> round(t_tail(12.706, freedom=1), 4), round(t_tail(4.303, freedom=2), 4)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    for k in range(3 if is_odd else 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    within = 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1.0 - within)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for multiple comparisons, in the same order. NaN stays NaN and is
    not counted.

    Holm 1979, A simple sequentially rejective multiple test procedure, bounds the chance of any
    false positive by the significance level.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted
