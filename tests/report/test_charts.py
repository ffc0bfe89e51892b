"""Axes, ticks, SVG and heat maps: places, round numbers, well-formed pictures; 1 second."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from io import BytesIO
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from in_one import in_one
from surefoot.tools.report.charts import (
    Axis,
    Chart,
    Line,
    Mark,
    axes,
    format_tick,
    format_value,
    ticks,
)
from surefoot.tools.report.heatmap import group_names, heat_map
from surefoot.tools.report.page import environment


def svg(chart: Chart) -> str:
    """The picture of a chart, as it stands on a page."""
    parts: Any = environment().get_template("parts.html").module
    return str(parts.plot(chart)).strip()


def stripes(chart: Chart) -> list[ElementTree.Element]:
    """The hit areas of a chart, from left to right, as they stand on a page."""
    parts: Any = environment().get_template("parts.html").module
    return list(ElementTree.fromstring(str(parts.values(chart)).strip()))


def words(stripe: ElementTree.Element) -> list[str]:
    return "".join(stripe.itertext()).split()


def line(name: str, *ys: float) -> Line:
    """A line with these values at steps 0, 1, 2 and so on."""
    return Line(name, tuple((float(x), y) for x, y in enumerate(ys)))


def chart(*lines: Line, marks: tuple[Mark, ...] = (), **settings: object) -> Chart:
    return Chart("name", "Title", lines, marks, **settings)  # type: ignore[arg-type]


@in_one
@pytest.mark.parametrize("low", [0.0, -3.0, 1e-7, 12345.0])
@pytest.mark.parametrize("wide", [1e-6, 0.37, 1.0, 42.0, 9e9])
def test_ticks_are_inside_evenly_spaced_few_and_at_least_two(low: float, wide: float) -> None:
    axis = Axis(low, low + wide)
    values = ticks(axis)
    assert 2 <= len(values) <= 8
    room = 1e-6 * wide + 1e-3 * wide
    assert axis.low - room <= min(values) <= max(values) <= axis.high + room
    distances = [following - value for value, following in pairwise(values)]
    assert max(distances) == pytest.approx(min(distances), rel=1e-3)


@pytest.mark.parametrize(("low", "high"), [(1e-8, 1.0), (0.5, 3.0), (1.01, 1.02), (1.0, 1e30)])
def test_logarithmic_ticks_are_inside_and_round(low: float, high: float) -> None:
    values = ticks(Axis(low, high, logarithmic=True))
    assert 2 <= len(values) <= 8
    assert low * (1 - 1e-9) <= min(values) <= max(values) <= high * (1 + 1e-9)
    assert len({format_tick(value) for value in values}) == len(values)


def test_bytes_have_powers_of_two() -> None:
    values = ticks(Axis(0.0, 3 * 2**30, unit="bytes"), limit=4)
    assert [format_tick(value, "bytes") for value in values] == ["0 B", "1 GiB", "2 GiB", "3 GiB"]


def test_numbers_that_are_not_finite_can_be_written() -> None:
    assert format_value(math.nan) == "nan"
    assert format_value(math.inf) == "inf"
    assert format_value(-math.inf, "bytes") == "-inf"


@pytest.mark.parametrize(
    "points",
    [
        ((5.0, 2.0),),
        ((0.0, 0.0), (9.0, 0.0)),
        ((1.0, 1e-300), (2.0, 1e300)),
        ((1.0, 5e-324), (2.0, 1e300)),
    ],
)
def test_axes_hold_every_point(points: tuple[tuple[float, float], ...]) -> None:
    shown = chart(Line("a", points))
    xs, ys = zip(*points, strict=True)

    both_axes = axes(shown)

    assert both_axes is not None
    horizontal, vertical = both_axes
    assert horizontal.low <= min(xs) <= max(xs) <= horizontal.high
    assert vertical.low <= min(ys) <= max(ys) <= vertical.high
    assert horizontal.low < horizontal.high
    assert vertical.low < vertical.high
    assert all(0 <= vertical.position(y) <= 1 for y in ys)
    assert svg(shown) != ""


def test_what_is_marked_beyond_the_last_point_stands_where_it_happened() -> None:
    marks = (Mark("strange", 20, None, "not finite"), Mark("event", 15, None, "stopped"))
    root = ElementTree.fromstring(svg(chart(Line("a", ((0.0, 1.0), (10.0, 2.0))), marks=marks)))
    cross = root.find(".//text[@class='strange']")
    event = root.find(".//line[@class='event']")
    assert cross is not None
    assert event is not None
    assert cross.attrib["x"] == "100.00%"
    assert event.attrib["x1"] == "75.00%"


@pytest.mark.parametrize(
    ("last", "is_logarithmic"), [(2.0, False), (1000.0, True), (-1000.0, False)]
)
def test_an_axis_is_logarithmic_where_one_value_would_flatten_all_others(
    last: float, is_logarithmic: bool
) -> None:
    both_axes = axes(chart(line("a", *[1.0] * 9, last)))
    assert both_axes is not None
    _, vertical = both_axes
    assert vertical.logarithmic == is_logarithmic


@pytest.mark.parametrize("lines", [(), (Line("a", ()),)])
def test_a_chart_without_a_point_is_no_picture(lines: tuple[Line, ...]) -> None:
    assert svg(chart(*lines)) == ""


@pytest.mark.parametrize("x_scale", ["linear", "log"])
@pytest.mark.parametrize("count", [1, 2, 500])
def test_a_picture_is_well_formed_and_its_lines_stay_inside(count: int, x_scale: str) -> None:
    lines = (
        Line("raw & <b>", tuple((float(x), math.sin(x)) for x in range(count)), faint=True),
        Line("smooth", tuple((float(x), 0.1) for x in range(1, count + 1)), 8, dots=True),
    )
    marks = (
        Mark("best", 1, 0.1, "best <0.1>"),
        Mark("event", 1, None, "resumed & so on"),
        Mark("strange", 1, None, "not finite"),
    )
    shown = chart(*lines, marks=marks, x_scale=x_scale)

    root = ElementTree.fromstring(svg(shown))

    inner = root.find("svg")
    assert inner is not None
    for path in inner.iter("path"):
        numbers = [float(word) for word in re.sub("M|L|h0", " ", path.attrib["d"]).split()]
        assert all(0 <= x <= 2000 for x in numbers[::2])
        assert all(0 <= y <= 1000 for y in numbers[1::2])
    assert "raw & <b>" in root.attrib["aria-label"]
    texts: set[str] = set()
    for stripe in stripes(shown):
        texts.update(text.strip() for text in stripe.itertext())
    assert {"best <0.1>", "resumed & so on", "not finite"} <= texts


def test_a_hit_area_has_the_step_the_value_of_each_line_and_the_events_there() -> None:
    lines = (Line("a", ((0.0, 1.0), (10.0, 3.0))), Line("b", ((10.0, 7.5),), 8))
    marks = (Mark("event", 4, None, "resumed"), Mark("best", 10, 7.5, "best 7.5", 8))

    first, second = stripes(chart(*lines, marks=marks))

    assert " ".join(words(first)) == "step 0 a 1 resumed"
    assert " ".join(words(second)) == "step 10 a 3 b 7.5 best 7.5"
    # those of lines have their colors
    assert [value.attrib.get("class") for value in first.iter("b")] == ["s0", None]
    assert [value.attrib.get("class") for value in second.iter("b")] == ["s0", "s8", "s8"]


@pytest.mark.parametrize(
    ("x_scale", "steps"),
    [("linear", (0, 1, 7, 100)), ("log", (1, 2, 50, 900)), ("linear", range(500))],
)
def test_hit_areas_cover_a_chart_and_the_line_of_each_stands_at_its_step(
    x_scale: str, steps: range
) -> None:
    shown = chart(Line("a", tuple((float(step), 1.0) for step in steps)), x_scale=x_scale)
    both_axes = axes(shown)
    assert both_axes is not None
    horizontal, _ = both_axes

    areas = stripes(shown)

    assert len(areas) == min(60, len(steps))
    left = 0
    for area in areas:
        width, center = width_and_center(area)
        _, step, *_ = words(area)
        position = horizontal.position(float(step.replace(",", "")))
        assert (left + width * center) / 10_000 == pytest.approx(position, abs=0.01)
        left += width
    assert left == pytest.approx(10_000, abs=len(areas))
    assert [area.attrib.get("class") for area in areas].count("r") == 1


def width_and_center(stripe: ElementTree.Element) -> tuple[int, float]:
    """A stripe's width, in ten thousandths of the chart, and the fraction of it where its line
    stands.
    """
    width, _, center = stripe.attrib["style"].removeprefix("flex:").partition(";--c:")
    if not center:
        return int(width), 0.5
    return int(width), int(center.rstrip("%")) / 100


def test_the_stripes_of_a_chart_are_one_stop_of_the_keyboard() -> None:
    first, second = stripes(chart(Line("a", ((0.0, 1.0), (10.0, 3.0)))))
    for stripe in (first, second):
        control = stripe.find("input")
        assert control is not None
        assert control.attrib == {"type": "radio", "name": "name"}


def test_a_heat_map_is_a_png_in_which_what_is_absent_is_clear_and_what_is_not_finite_red() -> None:
    heat = heat_map("a", "A", {"up": [1.0, 100.0], "down": [None, math.inf]}, [0, 1])
    assert heat is not None
    with open_picture(heat.picture) as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    low = (0, 34, 78, 255)
    high = (254, 232, 56, 255)
    absent = (0, 0, 0, 0)
    not_finite = (213, 94, 0, 255)
    assert (pixels == [[low, high], [absent, not_finite]]).all()


def test_colors_of_a_heat_map_rise_with_the_logarithm() -> None:
    values = [1.0, 10.0, 100.0, None, math.nan, 0.0]
    heat = heat_map("a", "A", {"row": values}, [0, 1, 2, 3, 4, 5])
    assert heat is not None
    with open_picture(heat.picture) as picture:
        palette_places = np.asarray(picture).tolist()
    assert palette_places == [[0, 50, 99, 100, 101, 0]]
    assert heat.scale == ("1", "3.2", "10", "32", "100")
    assert heat.rows[0][2] == "row: 0 at step 5, between 0 and 100"


def open_picture(data_url: str) -> Image.Image:
    _, _, data = data_url.partition(",")
    return Image.open(BytesIO(b64decode(data)), formats=["PNG"])


def test_there_is_no_heat_map_of_nothing() -> None:
    assert heat_map("a", "A", {"row": [None, math.nan, 0.0]}, [1, 2, 3]) is None


def test_many_parameters_are_grouped_by_their_modules() -> None:
    blocks = [f"blocks.{block}" for block in range(24)]
    linears = []
    for block in blocks:
        linears += [f"{block}.up", f"{block}.down"]
    names = []
    for linear in linears:
        names += [f"{linear}.weight", f"{linear}.bias"]

    assert list(group_names(names)) == linears
    assert list(group_names(names, limit=30)) == blocks


def test_parameters_without_modules_have_48_groups() -> None:
    assert len(group_names([f"p{number}" for number in range(500)])) == 48
