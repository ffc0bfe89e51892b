"""Lists, sizes and shares in sentences."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 4


def listed(names: Sequence[object], *, most: int = _SHOWN) -> str:
    """Names in a line, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(str(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def rate(number: float) -> str:
    """How many a second, as people write them.

    >>> rate(83_541.9), rate(12.345)
    ('83,500', '12.3')
    """
    return f"{float(f'{number:.3g}'):,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def size(number: float) -> str:
    """Bytes as people write them.

    >>> size(1.5e9), size(2_300_000), size(12)
    ('1.5 GB', '2.3 MB', '12 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g} B"
