"""Heat maps of layer statistics: one row per layer, one column per measured step or group of
adjacent steps.

A heat map is an image with one pixel per value, because rectangles for tens of thousands of values
would take megabytes.
"""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from surefoot.tools.report.charts import Axis, Unit, format_tick, format_value
from surefoot.tracking.run_records import RATIO
from surefoot.tracking.table import COUNT, FIRST, HIGH, STRANGE, Stretches, Table

ROWS = 48
# colormap cividis, for every color vision: Nunez, Anderton and Renslow 2018,
# doi:10.1371/journal.pone.0199239
CIVIDIS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
)
_COLORS = 100  # palette size; two more entries mark absent and non-finite values
_MISSING, _STRANGE = _COLORS, _COLORS + 1
COLUMNS = 120


@dataclass(frozen=True)
class HeatMap:
    """A heat map of the page. Each row has a name, its last value, and a text for screen
    readers.
    """

    name: str
    title: str
    note: str
    rows: tuple[tuple[str, str, str], ...]
    picture: str  # a data URL
    steps: tuple[str, ...]
    scale: tuple[str, ...]  # evenly spaced values of the color scale
    summary: str


def heat_map(
    name: str,
    title: str,
    table: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    *,
    unit: Unit = "number",
    note: str = "",
) -> HeatMap | None:
    """Build a heat map with one row per name. Absent values are empty; non-finite values are red.
    Returns None without finite values.

    The scale is linear for fractions and logarithmic otherwise. The value 0 has the lowest color.
    """
    logarithmic = unit != "fraction"
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
    cells = [
        [_cell(value, Axis(low, high, logarithmic)) for value in row] for row in table.values()
    ]
    scale = (np.geomspace if logarithmic else np.linspace)(low, high, 5).tolist()
    lowest, highest = format_value(low, unit), format_value(high, unit)
    return HeatMap(
        name=name,
        title=title,
        note=note,
        rows=tuple(_row(name, row, steps, unit) for name, row in table.items()),
        picture=f"data:image/png;base64,{b64encode(_png(cells)).decode()}",
        steps=tuple(f"{steps[index]:,}" for index in sorted({0, len(steps) // 2, len(steps) - 1})),
        scale=tuple(
            format_value(x, unit) if unit != "number" else format_tick(float(f"{x:.2g}"))
            for x in scale
        ),
        summary=f"{title}: {len(table)} rows over steps {steps[0]:,} to {steps[-1]:,}, from {lowest} to {highest}",
    )


def _png(cells: Sequence[Sequence[int]]) -> bytes:
    from PIL import Image

    palette, file = _palette(), BytesIO()
    picture = Image.new("P", (len(cells[0]), len(cells)))
    picture.putpalette([part for entry in palette for part in entry[:3]])
    picture.putdata([cell for row in cells for cell in row])
    picture.save(file, "png", optimize=True, transparency=bytes(entry[3] for entry in palette))
    return file.getvalue()


def group_names(names: Sequence[str], *, limit: int = ROWS) -> dict[str, list[str]]:
    """Group parameters by module at the largest depth that has at most `limit` groups. Preserves
    the order.

    >>> group_names(["a.0.weight", "a.0.bias", "a.1.weight", "head"], limit=3)
    {'a.0': ['a.0.weight', 'a.0.bias'], 'a.1': ['a.1.weight'], 'head': ['head']}
    """
    groups: dict[str, list[str]] = {}
    for depth in range(max((name.count(".") for name in names), default=0) + 1, 0, -1):
        groups = {}
        for name in names:
            groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
        if len(groups) <= limit:
            return groups
    return dict(list(groups.items())[:limit])


def _row(
    name: str, values: Sequence[float | None], steps: Sequence[int], unit: Unit
) -> tuple[str, str, str]:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if not known:
        return name, "", name
    finite = [value for _, value in known if math.isfinite(value)]
    last = (
        format_value(known[-1][1], unit)
        if unit != "number"
        else f"{known[-1][1]:.2g}".replace("e-0", "e-")
    )
    between = (
        f", between {format_value(min(finite), unit)} and {format_value(max(finite), unit)}"
        if finite
        else ""
    )
    return (
        name,
        last,
        f"{name}: {format_value(known[-1][1], unit)} at step {known[-1][0]:,}{between}",
    )


def _cell(value: float | None, axis: Axis) -> int:
    if value is None:
        return _MISSING
    return round(axis.position(value) * (_COLORS - 1)) if math.isfinite(value) else _STRANGE


def _palette() -> list[tuple[int, int, int, int]]:
    anchors = np.array(
        [[int(text[first : first + 2], 16) for first in (1, 3, 5)] for text in CIVIDIS]
    )
    places = np.linspace(0, len(anchors) - 1, _COLORS)
    channels = [
        np.interp(places, range(len(anchors)), channel).round().astype(int).tolist()
        for channel in anchors.T
    ]
    return [
        *((*color, 255) for color in zip(*channels, strict=True)),
        (0, 0, 0, 0),
        (213, 94, 0, 255),
    ]


def layer_maps(layers: Table) -> list[HeatMap]:
    """Return a heat map of each measured quantity, with layers as rows and steps as columns. A
    column is the maximum over adjacent measured steps.
    """
    most = 2 * COLUMNS
    size = 1
    while size * most < layers.count:
        size *= 2
    several = f" Each column is the maximum over {size} measured steps." if size > 1 else ""
    kinds: list[tuple[str, str, Unit, str]] = [
        (
            "grad_norm",
            "Gradient norm of each layer",
            "number",
            "Before clipping. Lighter is larger.",
        ),
        (
            RATIO,
            "Update-to-weight ratio",
            "number",
            "Norm of the update over the norm of the weight; about 0.001 is usual.",
        ),
        (
            "saturated_fraction",
            "Saturated outputs",
            "fraction",
            "Fraction of activation outputs whose slope is almost 0; at 100% no gradient passes.",
        ),
    ]
    stretches = layers.grid(most=most)
    steps = stretches[FIRST, layers.row_of["step"]].astype(int).tolist() if layers.count else []
    maps = []
    for kind, title, unit, note in kinds:
        rows = _rows_of(layers, stretches, kind)
        is_zero = not any(value for row in rows.values() for value in row)
        if rows and not (is_zero and kind == "saturated_fraction"):
            maps.append(heat_map(kind, title, rows, steps, unit=unit, note=note + several))
    return [one for one in maps if one is not None]


def _rows_of(layers: Table, stretches: Stretches, kind: str) -> dict[str, list[float | None]]:
    """Return the values of one quantity by group of layers, one for each column."""
    values = np.where(stretches[STRANGE] > 0, np.inf, stretches[HIGH])
    is_missing = stretches[COUNT] + stretches[STRANGE] == 0
    by_name = {}
    for name in layers.names:
        if name.startswith(f"{kind}/"):
            row = layers.row_of[name]
            by_name[name.removeprefix(f"{kind}/")] = [
                None if missing else value
                for value, missing in zip(
                    values[row].tolist(), is_missing[row].tolist(), strict=True
                )
            ]
    rows: dict[str, list[float | None]] = {}
    for group, members in group_names([*by_name]).items():
        rows[group] = []
        for column in zip(*(by_name[name] for name in members), strict=True):
            known = [value for value in column if value is not None]
            if not known:
                rows[group].append(None)
            else:
                rows[group].append(math.hypot(*known) if kind == "grad_norm" else max(known))
    return rows
