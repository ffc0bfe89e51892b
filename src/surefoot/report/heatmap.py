"""Heat maps: one row for each layer, one column for each watched step, as a picture of a few kilobytes.

Rectangles for tens of thousands of values would be megabytes; one picture element each, drawn without smoothing, is the same.
"""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.report.charts import Unit, on_axis, written

ROWS = 48
# the colour map cividis, told apart alike with every colour vision: Nunez, Anderton and Renslow 2018, doi:10.1371/journal.pone.0199239
CIVIDIS = ("#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838")
_COLOURS = 100  # of the palette; one more is for what is not there, and one for what is not finite
_MISSING, _STRANGE = _COLOURS, _COLOURS + 1


@dataclass(frozen=True)
class Row:
    """One layer: its name, its last value, and all of them in words."""

    name: str
    last: str
    title: str


@dataclass(frozen=True)
class HeatMap:
    """What the page shows: rows, the picture as a data address, steps below it, and the scale of its colours."""

    name: str
    title: str
    note: str
    rows: tuple[Row, ...]
    picture: str
    steps: tuple[str, ...]
    scale: tuple[str, ...]  # values at even distances along the colours
    summary: str


def heat_map(
    name: str,
    title: str,
    table: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    *,
    logarithmic: bool = True,
    unit: Unit = "number",
    note: str = "",
) -> HeatMap | None:
    """A heat map of values by row, with one for each step; None where none of them can be shown.

    A value that is absent is left empty, one that is not finite is red. On a logarithmic scale a 0 has the lowest colour.
    """
    known = [
        value
        for row in table.values()
        for value in row
        if value is not None and math.isfinite(value) and (value > 0 or not logarithmic)
    ]
    if not known or not steps:
        return None
    low, high = (min(known), max(known)) if logarithmic else (0.0, max(known) or 1.0)
    if logarithmic and high < 1.01 * low:
        low, high = low / 2, high * 2
    cells = [[_cell(value, low, high, logarithmic) for value in row] for row in table.values()]
    between = [place / 4 for place in range(5)]
    scale = [low * (high / low) ** part if logarithmic else low + (high - low) * part for part in between]
    places = sorted({0, len(steps) // 2, len(steps) - 1})
    return HeatMap(
        name=name,
        title=title,
        note=note,
        rows=tuple(_row(name, row, steps, unit) for name, row in table.items()),
        picture=f"data:image/png;base64,{b64encode(png(cells, _palette())).decode()}",
        steps=tuple(f"{steps[place]:,}" for place in places),
        scale=tuple(written(value, unit) if unit != "number" else on_axis(_rounded(value)) for value in scale),
        summary=f"{title}: {len(table)} rows over steps {steps[0]:,} to {steps[-1]:,}, from {written(low, unit)} to {written(high, unit)}",
    )


def png(cells: Sequence[Sequence[int]], palette: Sequence[tuple[int, int, int, int]]) -> bytes:
    """A picture of palette entries as PNG (8 bits, colour type 3): https://www.w3.org/TR/png-3/

    >>> png([[0, 1]], [(0, 0, 0, 255), (255, 255, 255, 0)])[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(cells[0]), len(cells), 8, 3, 0, 0, 0)
    colours = b"".join(bytes(entry[:3]) for entry in palette)
    rows = b"".join(b"\0" + bytes(row) for row in cells)  # each begins with its filter: none
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"PLTE", colours),
            chunk(b"tRNS", bytes(entry[3] for entry in palette)),
            chunk(b"IDAT", zlib.compress(rows, 9)),
            chunk(b"IEND", b""),
        ]
    )


def grouped(names: Sequence[str], *, most: int = ROWS) -> dict[str, list[str]]:
    """Names of parameters in at most `most` groups by their modules, as deep as that allows, in their order.

    >>> grouped(["a.0.weight", "a.0.bias", "a.1.weight", "head"], most=3)
    {'a.0': ['a.0.weight', 'a.0.bias'], 'a.1': ['a.1.weight'], 'head': ['head']}
    """
    deepest = max((name.count(".") for name in names), default=0) + 1
    groups: dict[str, list[str]] = {}
    for depth in range(deepest, 0, -1):
        groups = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= most:
            return groups
    return dict(list(groups.items())[:most])


def _row(name: str, values: Sequence[float | None], steps: Sequence[int], unit: Unit) -> Row:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return Row(name, "", name)
    finite = [value for _, value in known if math.isfinite(value)]
    last = written(known[-1][1], unit) if unit != "number" else f"{known[-1][1]:.2g}".replace("e-0", "e-")
    between = f", between {written(min(finite), unit)} and {written(max(finite), unit)}" if finite else ""
    return Row(name, last, f"{name}: {written(known[-1][1], unit)} at step {known[-1][0]:,}{between}")


def _cell(value: float | None, low: float, high: float, logarithmic: bool) -> int:
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return _STRANGE
    if logarithmic and value <= 0:
        return 0
    part = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
    return min(_COLOURS - 1, max(0, round(part * (_COLOURS - 1))))


def _palette() -> list[tuple[int, int, int, int]]:
    anchors = [tuple(int(text[place : place + 2], 16) for place in (1, 3, 5)) for text in CIVIDIS]
    found = []
    for index in range(_COLOURS):
        place = index / (_COLOURS - 1) * (len(anchors) - 1)
        first = min(int(place), len(anchors) - 2)
        part = place - first
        red, green, blue = (
            round(one + part * (other - one)) for one, other in zip(anchors[first], anchors[first + 1], strict=True)
        )
        found.append((red, green, blue, 255))
    return [*found, (0, 0, 0, 0), (213, 94, 0, 255)]


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
