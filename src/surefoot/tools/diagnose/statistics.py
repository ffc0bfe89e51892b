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
_OF_NORMAL = (
    1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution
)


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
        return np.array(
            [level(values[first : first + width]) for first in range(len(values) - width + 1)]
        )
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    many, middle = (
        max(1, 100_000 // width),
        slice((width - 1) // 2, width // 2 + 1),
    )  # many: at once
    parts = [windows[first : first + many] for first in range(0, len(windows), many)]
    return np.concatenate(
        [np.sort(part, axis=1)[:, middle].mean(axis=1) for part in parts]
    )  # faster than np.median


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
    return (
        _OF_NORMAL * float(np.median(np.abs(finite - np.median(finite))))
        if finite.size
        else math.nan
    )


def noise(values: Numbers) -> float:
    """Estimate the standard deviation around a slowly varying mean, from second differences.

    >>> noise(np.arange(10.0)), round(noise(np.array([1.0, -1.0] * 50)), 2)
    (0.0, 2.42)
    """
    bends = np.diff(
        values[np.isfinite(values)], n=2
    )  # sqrt(1 + 4 + 1) times the deviation for pure noise
    return _OF_NORMAL * float(np.median(np.abs(bends))) / math.sqrt(6) if bends.size else math.nan


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
    x, y = steps[finite].astype(np.float64), values[finite]
    if x.size > _MOST:
        places = np.linspace(0, x.size - 1, _MOST).round().astype(np.int64)
        x, y = x[places], y[places]
    return x, y
