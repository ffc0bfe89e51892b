"""Where an axis has its marks, and how its numbers are written."""

from __future__ import annotations

import math

from surefoot.reporting.charts import Axis, Unit
from surefoot.tracking.format import duration, number

_POWERS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def ticks(axis: Axis, *, most: int = 6) -> list[float]:
    """About `most` round values inside an axis, evenly spaced on it.

    >>> ticks(Axis(0.0, 600.0)), ticks(Axis(0.0, 1.0)), ticks(Axis(1e-5, 2e-2, logarithmic=True))
    ([0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1e-05, 0.0001, 0.001, 0.01])
    """
    if axis.logarithmic:
        found = _of_powers(axis, most)
        if len(found) > 1:
            return found
    base = 2.0 if axis.unit == "bytes" else 10.0
    rough = (axis.high - axis.low) / most
    size = base ** math.floor(math.log(rough, base) + 1e-9)
    factors = (1.0, 2.0) if base == 2.0 else (1.0, 2.0, 2.5, 5.0, 10.0)
    step = next(factor * size for factor in factors if factor * size >= rough * (1 - 1e-9))
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    digits = max(0, 3 - math.floor(math.log10(step)))
    return [round(place * step, digits) + 0.0 for place in range(first, last + 1)]


def _of_powers(axis: Axis, most: int) -> list[float]:
    """Powers of ten, or where there are few, twice and five times them too."""
    first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]
        found = [value for value in found if axis.low * (1 - 1e-9) <= value <= axis.high * (1 + 1e-9)]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def written(value: float, unit: Unit = "number") -> str:
    """A number as a person reads it, with its unit.

    >>> written(0.25, "fraction"), written(3 * 2**30, "bytes"), written(75.0, "seconds"), written(0.00012)
    ('25 %', '3 GiB', '1m15s', '0.00012')
    """
    if not math.isfinite(value):
        return repr(value)
    if unit == "fraction":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        size, name = next(((size, name) for size, name in _POWERS if abs(value) >= size), (1, "B"))
        return f"{value / size:.4g} {name}"
    if unit == "seconds":
        return duration(value) if value >= 10 else f"{value:.2g}s"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else number(value)


def on_axis(value: float, unit: Unit = "number") -> str:
    """A number as it stands beside a mark of an axis: short.

    >>> on_axis(0.0), on_axis(1500.0), on_axis(20000.0), on_axis(2500000.0), on_axis(0.0001), on_axis(0.25)
    ('0', '1,500', '20k', '2.5M', '1e-4', '0.25')
    """
    if unit != "number":
        return written(value, unit)
    size = abs(value)
    for power, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 10_000 <= size < 1e12 and size >= power:
            return f"{value / power:.4g}{letter}"
    if size >= 1e12 or 0 < size < 1e-3:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"
