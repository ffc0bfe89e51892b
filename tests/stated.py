"""The facts that a sentence states, whatever its words: its numbers."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)")


def numbers_in(text: str) -> list[float]:
    """The numbers of a text in their order, without those within names.

    >>> numbers_in("steps 6 to 1,200 of step-00000012: 0.5, -2 and 1e-3.")
    [6.0, 1200.0, 0.5, -2.0, 0.001]
    """
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
