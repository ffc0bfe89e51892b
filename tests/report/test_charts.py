"""Axes, ticks, SVG and heat maps: places, round numbers, well-formed pictures; 1 second."""

from __future__ import annotations

import math
from base64 import b64decode
from io import BytesIO
from itertools import pairwise
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
    return str(environment().get_template("parts.html").module.plot(chart)).strip()  # type: ignore[attr-defined]


def stripes(chart: Chart) -> list[ElementTree.Element]:
    """The hit areas of a chart, from left to right, as they stand on a page."""
    text = str(environment().get_template("parts.html").module.values(chart)).strip()  # type: ignore[attr-defined]
    return list(ElementTree.fromstring(text))


def chart(*lines: Line, marks: tuple[Mark, ...] = (), **settings: object) -> Chart:
    return Chart("name", "Title", lines, marks, **settings)  # type: ignore[arg-type]


@in_one
@pytest.mark.parametrize("low", [0.0, -3.0, 1e-7, 12345.0])
@pytest.mark.parametrize("wide", [1e-6, 0.37, 1.0, 42.0, 9e9])
def test_ticks_are_inside_evenly_spaced_few_and_at_least_two(low: float, wide: float) -> None:
    axis = Axis(low, low + wide)
    found = ticks(axis)
    assert 2 <= len(found) <= 8
    room = 1e-6 * wide + 1e-3 * wide
    assert all(axis.low - room <= value <= axis.high + room for value in found)
    distances = [other - one for one, other in pairwise(found)]
    assert max(distances) == pytest.approx(min(distances), rel=1e-3)


@pytest.mark.parametrize(("low", "high"), [(1e-8, 1.0), (0.5, 3.0), (1.01, 1.02), (1.0, 1e30)])
def test_logarithmic_ticks_are_inside_and_round(low: float, high: float) -> None:
    found = ticks(Axis(low, high, logarithmic=True))
    assert 2 <= len(found) <= 8
    assert all(low * (1 - 1e-9) <= value <= high * (1 + 1e-9) for value in found)
    assert len({format_tick(value) for value in found}) == len(found)


def test_bytes_have_powers_of_two() -> None:
    assert [
        format_tick(value, "bytes") for value in ticks(Axis(0.0, 3 * 2**30, unit="bytes"), limit=4)
    ] == [
        "0 B",
        "1 GiB",
        "2 GiB",
        "3 GiB",
    ]


def test_numbers_that_are_not_finite_can_be_written() -> None:
    assert (format_value(math.nan), format_value(math.inf), format_value(-math.inf, "bytes")) == (
        "nan",
        "inf",
        "-inf",
    )


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
    found = axes(chart(Line("a", points)))
    assert found is not None
    horizontal, vertical = found
    assert (
        horizontal.low <= min(x for x, _ in points) <= max(x for x, _ in points) <= horizontal.high
    )
    assert vertical.low <= min(y for _, y in points) <= max(y for _, y in points) <= vertical.high
    assert horizontal.low < horizontal.high
    assert vertical.low < vertical.high
    assert [0 <= vertical.position(y) <= 1 for _, y in points] == [True] * len(points)
    assert svg(chart(Line("a", points))) != ""


def test_what_is_marked_beyond_the_last_point_stands_where_it_happened() -> None:
    marks = (Mark("strange", 20, None, "not finite"), Mark("event", 15, None, "stopped"))
    root = ElementTree.fromstring(svg(chart(Line("a", ((0.0, 1.0), (10.0, 2.0))), marks=marks)))
    (cross,) = [text for text in root.iter("text") if text.attrib.get("class") == "strange"]
    (event,) = [line for line in root.iter("line") if line.attrib.get("class") == "event"]
    assert (cross.attrib["x"], event.attrib["x1"]) == ("100.00%", "75.00%")


def test_an_axis_is_logarithmic_where_one_value_would_flatten_all_others() -> None:
    def logarithmic(last: float) -> bool:
        found = axes(chart(Line("a", (*((float(x), 1.0) for x in range(9)), (9.0, last)))))
        assert found is not None
        return found[1].logarithmic

    assert (logarithmic(2.0), logarithmic(1000.0), logarithmic(-1000.0)) == (False, True, False)


def test_a_chart_without_a_point_is_no_picture() -> None:
    assert svg(chart()) == svg(chart(Line("a", ()))) == ""


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
    root = ElementTree.fromstring(svg(chart(*lines, marks=marks, x_scale=x_scale)))
    inner = root.find("svg")
    assert inner is not None
    for path in inner.iter("path"):
        numbers = [
            float(word)
            for word in path.attrib["d"]
            .replace("M", " ")
            .replace("L", " ")
            .replace("h0", "")
            .split()
        ]
        assert all(0 <= x <= 2000 for x in numbers[::2])
        assert all(0 <= y <= 1000 for y in numbers[1::2])
    values = [
        text
        for stripe in stripes(chart(*lines, marks=marks, x_scale=x_scale))
        for text in stripe.itertext()
    ]
    assert {"best <0.1>", "resumed & so on", "not finite"} <= {text.strip() for text in values}
    assert "raw & <b>" in root.attrib["aria-label"]


def test_a_hit_area_has_the_step_the_value_of_each_line_and_the_events_there() -> None:
    lines = (Line("a", ((0.0, 1.0), (10.0, 3.0))), Line("b", ((10.0, 7.5),), 8))
    marks = (Mark("event", 4, None, "resumed"), Mark("best", 10, 7.5, "best 7.5", 8))
    found = stripes(chart(*lines, marks=marks))
    assert [" ".join("".join(stripe.itertext()).split()) for stripe in found] == [
        "step 0 a 1 resumed",
        "step 10 a 3 b 7.5 best 7.5",
    ]
    assert [value.attrib.get("class") for stripe in found for value in stripe.iter("b")] == [
        "s0",
        None,
        "s0",
        "s8",
        "s8",
    ]


@pytest.mark.parametrize(
    ("x_scale", "steps"),
    [("linear", (0, 1, 7, 100)), ("log", (1, 2, 50, 900)), ("linear", range(500))],
)
def test_hit_areas_cover_a_chart_and_the_line_of_each_stands_at_its_step(
    x_scale: str, steps: range
) -> None:
    shown = chart(Line("a", tuple((float(step), 1.0) for step in steps)), x_scale=x_scale)
    found = stripes(shown)
    both = axes(shown)
    assert both is not None
    assert len(found) == min(60, len(steps))
    left = 0.0
    for stripe in found:
        width, _, center = stripe.attrib["style"].removeprefix("flex:").partition(";--c:")
        step = float("".join(stripe.itertext()).split()[1].replace(",", ""))
        place = (left + int(width) * (int(center.rstrip("%")) / 100 if center else 0.5)) / 10_000
        assert place == pytest.approx(both[0].position(step), abs=0.01)
        left += int(width)
    assert left == pytest.approx(10_000, abs=len(found))
    assert [stripe.attrib.get("class") for stripe in found].count("r") == 1


def test_the_stripes_of_a_chart_are_one_stop_of_the_keyboard() -> None:
    inputs = [
        stripe.find("input") for stripe in stripes(chart(Line("a", ((0.0, 1.0), (10.0, 3.0)))))
    ]
    assert [one.attrib if one is not None else None for one in inputs] == [
        {"type": "radio", "name": "name"}
    ] * 2


def test_a_heat_map_is_a_png_in_which_what_is_absent_is_clear_and_what_is_not_finite_red() -> None:
    found = heat_map("a", "A", {"up": [1.0, 100.0], "down": [None, math.inf]}, [0, 1])
    assert found is not None
    with opened(found.picture) as picture:
        pixels = picture.convert("RGBA")
    colours = [pixels.getpixel((column, row)) for row in range(2) for column in range(2)]
    assert colours == [(0, 34, 78, 255), (254, 232, 56, 255), (0, 0, 0, 0), (213, 94, 0, 255)]


def test_colours_of_a_heat_map_rise_with_the_logarithm() -> None:
    found = heat_map("a", "A", {"row": [1.0, 10.0, 100.0, None, math.nan, 0.0]}, [0, 1, 2, 3, 4, 5])
    assert found is not None
    assert cells_of(found.picture) == [[0, 50, 99, 100, 101, 0]]
    assert found.scale == ("1", "3.2", "10", "32", "100")
    assert found.rows[0][2] == "row: 0 at step 5, between 0 and 100"


def opened(picture: str) -> Image.Image:
    return Image.open(BytesIO(b64decode(picture.partition(",")[2])), formats=["PNG"])


def cells_of(picture: str) -> list[list[int]]:
    with opened(picture) as image:
        return np.asarray(image).tolist()  # type: ignore[no-any-return]


def test_there_is_no_heat_map_of_nothing() -> None:
    assert heat_map("a", "A", {"row": [None, math.nan, 0.0]}, [1, 2, 3]) is None


def test_many_parameters_are_grouped_by_their_modules() -> None:
    names = [
        f"blocks.{block}.{part}.{kind}"
        for block in range(24)
        for part in ("up", "down")
        for kind in ("weight", "bias")
    ]
    assert list(group_names(names)) == [
        f"blocks.{block}.{part}" for block in range(24) for part in ("up", "down")
    ]
    assert list(group_names(names, limit=30)) == [f"blocks.{block}" for block in range(24)]
    assert len(group_names([f"p{n}" for n in range(500)])) == 48
