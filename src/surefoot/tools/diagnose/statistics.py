"""Robust statistics of short series: levels, noise, slopes and trends.

Hampel 1974 (median and median absolute deviation), Theil 1950 and Sen 1968 (slope), Mann 1945 and
Kendall 1975 (trend).
"""

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
FEWEST = 12
"""Minimum number of loss records."""
_MOST = 200  # values; their 20,000 pairs take less than a millisecond
# ratio of standard deviation to median absolute deviation of a normal distribution
_OF_NORMAL = 1.4826
_AT_ONCE = 100_000  # values of windows that are sorted at once, for little memory


def level(values: Numbers) -> float:
    """Return the median of the finite values, or NaN without finite values.

    >>> level(np.array([1.0, 2.0, np.nan, 900.0]))
    2.0
    """
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def levels(values: Numbers, width: int) -> Numbers:
    """Return the medians of sliding windows of `width` values.

    >>> levels(np.array([1.0, 2.0, 9.0, 4.0]), 3)
    array([2., 4.])
    """
    if len(values) < width or not np.isfinite(values).all():
        firsts = range(len(values) - width + 1)
        return np.array([level(values[first : first + width]) for first in firsts])
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    middle = slice((width - 1) // 2, width // 2 + 1)
    count = max(1, _AT_ONCE // width)
    medians = []
    for first in range(0, len(windows), count):
        ordered = np.sort(windows[first : first + count], axis=1)  # faster than np.median
        medians.append(ordered[:, middle].mean(axis=1))
    return np.concatenate(medians)


def first_and_last_third(values: Numbers) -> tuple[float, float]:
    """Return the medians of the first and the last third.

    >>> first_and_last_third(np.array([1.0, 5.0, 2.0]))
    (1.0, 2.0)
    """
    third = len(values) // 3
    return level(values[:third]), level(values[-third:])


def spread(values: Numbers) -> float:
    """Estimate the standard deviation from the median absolute deviation.

    >>> round(spread(np.array([1.0, 2.0, 3.0, 4.0, 900.0])), 4)
    1.4826
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.nan
    distances = np.abs(finite - np.median(finite))
    return _OF_NORMAL * float(np.median(distances))


def noise(values: Numbers) -> float:
    """Estimate the standard deviation around a slowly varying mean, from second differences.

    >>> noise(np.arange(10.0)), round(noise(np.array([1.0, -1.0] * 50)), 2)
    (0.0, 2.42)
    """
    bends = np.diff(values[np.isfinite(values)], n=2)
    if not bends.size:
        return math.nan
    # of pure noise, a bend has sqrt(1 + 4 + 1) times the deviation
    return _OF_NORMAL * float(np.median(np.abs(bends))) / math.sqrt(6)


def slope(steps: Numbers, values: Numbers) -> float:
    """Return the median slope of all pairs (Sen 1968), or NaN for fewer than two values.

    >>> slope(np.arange(5.0), np.array([0.0, 2.0, 4.0, 900.0, 8.0]))
    2.0
    """
    x, y = _thinned(steps, values)
    if x.size < 2:
        return math.nan
    first, second = np.triu_indices(x.size, 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def trend(values: Numbers) -> float:
    """Return the Mann-Kendall significance of a rise (positive) or fall (negative) in standard
    deviations, ignoring ties.

    Values between -2 and 2 may be chance. Returns 0 for fewer than four values.

    >>> round(trend(np.arange(10.0)), 2), trend(np.array([1.0, 3.0, 2.0]))
    (4.02, 0.0)
    """
    _, y = _thinned(np.arange(values.size, dtype=np.float64), values)
    count = y.size
    if count < 4:
        return 0.0
    first, second = np.triu_indices(count, 1)
    sum_of_signs = float(np.sign(y[second] - y[first]).sum())
    return sum_of_signs / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def _thinned(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    finite = np.isfinite(values)
    x = steps[finite].astype(np.float64)
    y = values[finite]
    if x.size <= _MOST:
        return x, y
    places = np.linspace(0, x.size - 1, _MOST).round().astype(np.int64)
    return x[places], y[places]
