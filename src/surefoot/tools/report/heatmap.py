"""Heat maps of layer statistics: one row per layer, one column per measured step or group of
adjacent steps.

A heat map is an image with one pixel per value, because rectangles for tens of thousands of values
would take megabytes.
"""

import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain

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
_MISSING = _COLORS
_STRANGE = _COLORS + 1
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
    known = _finite(chain.from_iterable(table.values()))
    if unit != "fraction":
        known = [value for value in known if value > 0]
    if not known or not steps:
        return None
    if unit == "fraction":
        axis = Axis(0.0, max(known) or 1.0)
        scale = np.linspace(axis.low, axis.high, 5).tolist()
    else:
        low = min(known)
        high = max(known)
        if high < 1.01 * low:
            low /= 2
            high *= 2
        axis = Axis(low, high, logarithmic=True)
        scale = np.geomspace(low, high, 5).tolist()
    if unit == "number":
        scale_texts = [format_tick(float(f"{value:.2g}")) for value in scale]
    else:
        scale_texts = [format_value(value, unit) for value in scale]
    cells = [[_cell(value, axis) for value in row] for row in table.values()]
    lowest = format_value(axis.low, unit)
    highest = format_value(axis.high, unit)
    columns = sorted({0, len(steps) // 2, len(steps) - 1})  # with a step below them
    return HeatMap(
        name=name,
        title=title,
        note=note,
        rows=tuple(_row(name, row, steps, unit) for name, row in table.items()),
        picture=f"data:image/png;base64,{b64encode(_png(cells)).decode()}",
        steps=tuple(f"{steps[column]:,}" for column in columns),
        scale=tuple(scale_texts),
        summary=f"{title}: {len(table)} rows over steps {steps[0]:,} to {steps[-1]:,}, from {lowest} to {highest}",
    )


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _png(cells: Sequence[Sequence[int]]) -> bytes:
    from PIL import Image

    colors, opacities = _palette()
    file = BytesIO()
    picture = Image.new("P", (len(cells[0]), len(cells)))
    picture.putpalette([*chain.from_iterable(colors)])
    picture.putdata([*chain.from_iterable(cells)])
    picture.save(file, "png", optimize=True, transparency=bytes(opacities))
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
    last_step, last = known[-1]
    last_text = format_value(last, unit)
    summary = f"{name}: {last_text} at step {last_step:,}"
    finite = _finite(values)
    if finite:
        summary += (
            f", between {format_value(min(finite), unit)} and {format_value(max(finite), unit)}"
        )
    if unit == "number":
        last_text = f"{last:.2g}".replace("e-0", "e-")
    return name, last_text, summary


def _cell(value: float | None, axis: Axis) -> int:
    if value is None:
        return _MISSING
    if not math.isfinite(value):
        return _STRANGE
    return round(axis.position(value) * (_COLORS - 1))


def _palette() -> tuple[list[list[int]], list[int]]:
    """Return red, green and blue of each entry of the palette, and its opacity."""
    anchors = np.array([list(bytes.fromhex(color.removeprefix("#"))) for color in CIVIDIS])
    places = np.linspace(0, len(anchors) - 1, _COLORS)
    channels = [np.interp(places, range(len(anchors)), channel) for channel in anchors.T]
    colors = np.stack(channels, axis=1).round().astype(int).tolist()
    colors += [[0, 0, 0], [213, 94, 0]]  # _MISSING, _STRANGE
    opacities = [255] * len(colors)
    opacities[_MISSING] = 0
    return colors, opacities


def layer_maps(layers: Table) -> list[HeatMap]:
    """Return a heat map of each measured quantity, with layers as rows and steps as columns. A
    column is the maximum over adjacent measured steps.
    """
    most = 2 * COLUMNS
    size = 1
    while size * most < layers.count:
        size *= 2
    several = ""
    if size > 1:
        several = f" Each column is the maximum over {size} measured steps."
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
        if kind == "saturated_fraction" and not any(chain.from_iterable(rows.values())):
            continue
        drawn = heat_map(kind, title, rows, steps, unit=unit, note=note + several)
        if drawn is not None:
            maps.append(drawn)
    return maps


def _rows_of(layers: Table, stretches: Stretches, kind: str) -> dict[str, list[float | None]]:
    """Return the values of one quantity by group of layers, one for each column."""
    values = np.where(stretches[STRANGE] > 0, np.inf, stretches[HIGH])
    is_known = stretches[COUNT] + stretches[STRANGE] > 0
    prefix = f"{kind}/"
    row_of = {}  # by the layer's name
    for name in layers.names:
        if name.startswith(prefix):
            row_of[name.removeprefix(prefix)] = layers.row_of[name]
    rows: dict[str, list[float | None]] = {}
    for group, names in group_names([*row_of]).items():
        members = [row_of[name] for name in names]
        rows[group] = []
        for of_column, known in zip(values[members].T, is_known[members].T, strict=True):
            present = of_column[known].tolist()
            if not present:
                rows[group].append(None)
            elif kind == "grad_norm":
                rows[group].append(math.hypot(*present))
            else:
                rows[group].append(max(present))
    return rows
