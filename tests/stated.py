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


def lines_naming(text: str, *names: str) -> list[str]:
    """The lines of a text that have all of these names.

    >>> lines_naming("note: val has 3 rows" + chr(10) + "val/loss=2", "val", "note: ")
    ['note: val has 3 rows']
    """
    return [line for line in text.splitlines() if all(name in line for name in names)]


def numbers_by_line(text: str) -> list[list[float]]:
    r"""The numbers of each line, without the lines that state none.

    >>> numbers_by_line("at step 3" + chr(10) + "nothing" + chr(10) + "2 of 4 rows")
    [[3.0], [2.0, 4.0]]
    """
    stated = [numbers_in(line) for line in text.splitlines()]
    return [numbers for numbers in stated if numbers]
