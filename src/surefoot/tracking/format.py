"""Formatting of values, times, sizes and names as text."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from surefoot.errors import visible

_LETTERS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BLOCKS = "▁▂▃▄▅▆▇█"


def in_line(name: str) -> str:
    """Return a name without line breaks.

    >>> in_line("two\\nlines")
    'two lines'
    """
    return " ".join(visible(name).split())


def cells(text: str) -> int:
    """Return the columns that a text takes in a terminal.

    >>> cells("loss"), cells("\u5bbd")
    (4, 2)
    """
    if text.replace("\N{NO-BREAK SPACE}", " ").isascii():
        return len(text)
    from rich.cells import cell_len  # a plain run prints nothing else, and needs no rich

    return cell_len(text)


def wrapped(line: str, *, indent: int = 2, width: int = 80) -> str:
    """Wrap a line at spaces and indent the continuation lines, less before a word that would not
    fit otherwise. A word longer than the width stays unbroken.

    >>> print(wrapped("device  cpu, 1 thread, no accelerator", indent=8, width=20))
    device  cpu, 1
            thread, no
            accelerator
    """
    if cells(line) <= width:
        return line
    lines = []
    current = ""
    for word in re.findall(" *[^ ]+", line):
        if current and cells(current + word) > width:
            lines.append(current)
            word = word.lstrip(" ")  # noqa: PLW2901
            room = width - cells(word)
            current = " " * (min(indent, room) if room >= 0 else indent)
        current += word
    return "\n".join([*lines, current])


def shortened(text: str, limit: int, *, keep: Literal["start", "end", "both"] = "start") -> str:
    """Shorten a text to at most `limit` characters; `keep` selects the part to keep.

    >>> shortened("aten::convolution", 12), shortened("blocks.3.mlp.up", 12, keep="end")
    ('aten::con...', '...3.mlp.up')
    >>> shortened("name=sgd,momentum=0.9,lr=0.001", 20, keep="both")
    'name=...0.9,lr=0.001'
    """
    if len(text) <= limit:
        return text
    front = {"start": limit - 3, "end": 0, "both": (limit - 3) // 3}[keep]
    return f"{text[:front]}...{text[len(text) - (limit - 3 - front) :]}"


def number(value: float) -> str:
    """Format a value with five significant digits; exact integers and values above 10,000 have no
    decimals.

    >>> number(0.00003), number(2.34567), number(51234.0), number(1e30), number(float("nan"))
    ('3e-05', '2.3457', '51234', '1e+30', 'nan')
    """
    if abs(value) < 1e9 and (isinstance(value, int) or abs(value) >= 10000):
        return f"{value:.0f}"
    return f"{value:.5g}"


def three_digits(value: float) -> str:
    """Format a speed or a count with three significant digits.

    >>> three_digits(83_541.9), three_digits(12.345)
    ('83,500', '12.3')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def compact(value: float) -> str:
    """Format a value in at most six characters.

    >>> compact(3.14159), compact(987.6), compact(15400.0), compact(2.5e6)
    ('3.1', '988', '15.4k', '2.5M')
    """
    for size, letter in _LETTERS:
        if value >= size:
            has_three_digits = value < 999.5 * size
            text = f"{value / size:.3g}" if has_three_digits else f"{value / size:.0f}"
            return f"{text}{letter}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def with_unit(value: float, unit: str) -> str:
    """Format a large value with three significant digits and an SI prefix of the unit.

    >>> with_unit(3.2e9, "FLOP"), with_unit(950, "B"), with_unit(1.25e13, "FLOP/s")
    ('3.2 GFLOP', '950 B', '12.5 TFLOP/s')
    """
    for size, letter in _LETTERS:
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}"


def counted(number: int, what: str) -> str:
    """Format a count with its noun, in the singular or plural.

    >>> counted(1, "record"), counted(1200, "record")
    ('1 record', '1,200 records')
    """
    plural = "" if number == 1 else "s"
    return f"{number:,} {what}{plural}"


def drawn_in_line(values: Iterable[float], *, top: float) -> str:
    """Draw values from 0 to `top` as blocks, one letter each.

    >>> drawn_in_line([0.0, 0.25, 0.5, 1.0], top=1.0)
    '▁▃▅█'
    """
    letters = ""
    for value in values:
        height = int(len(_BLOCKS) * value / top) if top > 0 else 0
        letters += _BLOCKS[max(0, min(height, len(_BLOCKS) - 1))]
    return letters


def sample_block(record: Mapping[str, Any]) -> str:
    """Format a sample with its step, and with how it was drawn if that is recorded.

    >>> print(sample_block({"step": 3, "text": "once", "drawn": "temperature 0.7"}))
    --- sample at step 3 (temperature 0.7) ---
    once
    ---
    """
    drawn = f" ({record['drawn']})" if "drawn" in record else ""
    return f"--- sample at step {record['step']}{drawn} ---\n{record['text']}\n---"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> duration(42), duration(192), duration(7260)
    ('42s', '3m12s', '2h01m')
    """
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m{total_s % 60:02d}s"
    return f"{total_s // 3600}h{total_s % 3600 // 60:02d}m"


def measured_time(seconds: float) -> str:
    """Format a time with three significant digits in a suitable unit, from nanoseconds to hours.

    >>> measured_time(0.0571), measured_time(2.5e-6), measured_time(1.234), measured_time(75.0)
    ('57.1 ms', '2.5 us', '1.23 s', '1m15s')
    """
    if seconds >= 59.95:
        return duration(seconds)
    for unit, one in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= one:
            return f"{seconds / one:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds * 1e9:.3g} ns"


def as_typed(value: Any, *, digits: int | None = None) -> str:
    """Format a setting as command-line text: exact floats (or with `digits` digits), and lists
    separated by spaces.

    >>> (
    ...     as_typed(0.0001),
    ...     as_typed((0.9, 0.95)),
    ...     as_typed(None),
    ...     as_typed("5%"),
    ...     as_typed(True),
    ...     as_typed(0.123456, digits=3),
    ... )
    ('0.0001', '0.9 0.95', 'None', '5%', 'True', '0.123')
    """
    if isinstance(value, float):
        short = f"{value:.{digits or 6}g}"
        return short if digits is not None or float(short) == value else repr(value)
    if isinstance(value, list | tuple):
        return " ".join(as_typed(part, digits=digits) for part in value)
    return str(value)


def text_table(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), indent: str = ""
) -> list[str]:
    """Format rows as aligned lines; columns in `left` are left-aligned, all others right-aligned.

    >>> for line in text_table([("phase", "ms", "share"), ("forward", "12.5", "40%")]):
    ...     print(line)
    phase      ms  share
    forward  12.5    40%
    """
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        aligned = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            aligned.append(cell.ljust(width) if column in left else cell.rjust(width))
        lines.append(indent + "  ".join(aligned).rstrip())
    return lines
