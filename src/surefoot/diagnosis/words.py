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
