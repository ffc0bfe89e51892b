"""Pictures of charts as files: what stands where, hostile names, numbers that are not finite, the
same bytes, and the PNG where its rasterizer is installed; 2 seconds.
"""

from __future__ import annotations

import math
import re
import sys
from functools import partial
from importlib import resources
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import surefoot as sf
from refused import refused
from stated import lines_naming
from surefoot.tools.report import figures
from surefoot.tools.report.charts import Chart, Line, Mark
from surefoot.tools.report.figures import draw, draw_beside, drawn_line, picture
from surefoot.tracking.format import cells

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text><script>alert(1)</script>&\"'{{ 7 * 7 }}\x1b[2J\x00\ud800\uffff\u202e]]>"
NAMES = ["loss", "a name that is very long, " * 20, "损失" * 60, HOSTILE, "", "W" * 300]


def falling(name: str = "loss", series: int = 0, **settings: Any) -> Line:
    return Line(name, tuple((float(x), 3.0 - x / 10) for x in range(20)), series, **settings)


def chart(*lines: Line, **settings: Any) -> Chart:
    return Chart("name", settings.pop("title", "Title"), lines or (falling(),), **settings)


def parsed(*charts: Chart, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(picture(charts, title=title))


def plots(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f".//{SVG}svg[@class='plot']")


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def offset(field: ElementTree.Element) -> tuple[int, int]:
    place = re.fullmatch(r"translate\((\d+) (\d+)\)", field.attrib["transform"])
    assert place is not None
    return int(place[1]), int(place[2])


def fields(root: ElementTree.Element) -> list[tuple[int, int, int, int]]:
    """The left, upper, right and lower edge of each plot."""
    edges = []
    for group in root.findall(f"{SVG}g"):
        x, y = offset(group)
        for plot in group.findall(f"{SVG}svg"):
            edges.append((x, y, x + int(plot.attrib["width"]), y + int(plot.attrib["height"])))
    return edges


def test_a_row_has_two_charts_or_a_wide_one_and_no_plot_covers_another() -> None:
    wide, narrow = chart(wide=True), chart(note="one\ntwo")
    root = parsed(wide, narrow, narrow, narrow, wide)
    places = fields(root)
    assert [right - left for left, _, right, _ in places] == [905, 420, 420, 905, 905]
    assert places[1][1] == places[2][1]
    assert places[1][2] < places[2][0]
    rows = [places[0], places[1], places[3], places[4]]
    assert all(upper[3] < lower[1] for upper, lower in pairwise(rows))
    assert rows[-1][3] < int(root.attrib["height"])
    assert all(right < int(root.attrib["width"]) for _, _, right, _ in places)


def test_a_picture_stands_alone() -> None:
    text = picture([chart()], title="a title")
    root = ElementTree.fromstring(text)
    assert root.attrib["viewBox"] == f"0 0 1000 {root.attrib['height']}"
    assert root.findtext(f"{SVG}title") == "a title"
    assert root.find(f"{SVG}style") is not None
    assert "@media (prefers-color-scheme:dark)" in text
    assert re.findall("<script|href=|url\\(|@import|@font-face", text) == []


def test_titles_notes_names_and_the_name_of_the_axis_are_told() -> None:
    told = texts(
        parsed(
            chart(
                falling("one"),
                falling("two", 1),
                falling("not named", named=False),
                title="The loss",
                note="first\nsecond",
                x_name="learning rate",
            )
        )
    )
    once = ["a title", "The loss", "first", "second", "one", "two", "learning rate"]
    assert [told.count(text) for text in once] == [1] * len(once)
    assert "not named" not in told


@pytest.mark.parametrize("wide", [True, False])
def test_names_above_a_plot_are_in_rows_beside_each_other_and_inside_the_picture(
    wide: bool,
) -> None:
    lines = [falling(name, series) for series, name in enumerate(NAMES * 3)]
    root = parsed(chart(*lines, title=NAMES[1], note=NAMES[2], wide=wide), chart(wide=wide))
    for group in root.findall(f"{SVG}g"):
        rows: dict[int, list[tuple[float, float]]] = {}
        for text in group.findall(f"{SVG}text"):
            if "class" in text.attrib and text.attrib["class"] != "title":
                continue  # the name of the axis
            letter = 9.0 if "class" in text.attrib else figures._LETTER
            x = int(text.attrib.get("x", 0))
            place = (x, x + letter * cells("".join(text.itertext())))
            rows.setdefault(int(text.attrib["y"]), []).append(place)
        left, _ = offset(group)
        assert all(end <= 905 if wide else 425 for row in rows.values() for _, end in row), left
        assert all(a[1] < b[0] for row in rows.values() for a, b in pairwise(row))
        assert all(upper - lower >= 18 for lower, upper in pairwise(sorted(rows)))


def test_short_names_share_a_row_and_none_covers_another() -> None:
    lines = [falling(name, series) for series, name in enumerate(["a", "bb", "ccc", "a"])]
    (group,) = parsed(chart(*lines, wide=True)).findall(f"{SVG}g")
    names = [text for text in group.findall(f"{SVG}text") if "class" not in text.attrib]
    ends = [
        (int(text.attrib["x"]), int(text.attrib["x"]) + figures._LETTER * cells(text.text or ""))
        for text in names
    ]
    assert len({text.attrib["y"] for text in names}) == 1
    assert [text.text for text in names] == ["a", "bb", "ccc", "a"]
    assert all(left[1] < right[0] for left, right in pairwise(ends))


def test_the_texts_of_both_charts_of_a_row_are_below_what_stands_above() -> None:
    root = parsed(chart(wide=True), chart(title="", note="one\ntwo\nthree"), chart(title=""))
    above = fields(root)[0][3]
    for group in root.findall(f"{SVG}g")[1:]:
        _, top = offset(group)
        rows = [top + float(text.attrib["y"]) for text in group.findall(f"{SVG}text")]
        assert min(rows) - figures._ROW > above


def test_hostile_texts_are_texts() -> None:
    marks = (Mark("best", 3, 2.0, HOSTILE), Mark("event", 4, None, HOSTILE))
    hostile = chart(
        falling(HOSTILE), falling("b", 1), title=HOSTILE, note=HOSTILE, x_name=HOSTILE, marks=marks
    )
    root = parsed(hostile, title=HOSTILE)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    known = {"svg", "style", "title", "rect", "text", "g", "path", "line", "circle"}
    assert tags == known
    told = [text for text in texts(root) if "script" in text]
    assert len(told) == 7
    assert all("{{ 7 * 7 }}" in text for text in told if "..." not in text)
    assert not re.search("[\x00\x1b\ud800\uffff\u202e]", "".join(told))


ODD = [math.nan, math.inf, -math.inf, 1e308, -1e308]


@pytest.mark.parametrize("scale", ["auto", "linear", "log"])
@pytest.mark.parametrize("x_scale", ["linear", "log"])
def test_numbers_that_are_not_finite_are_left_out(scale: str, x_scale: str) -> None:
    points = [(1.0, 2.0), *((2.0, odd) for odd in ODD), *((odd, 1.0) for odd in ODD), (5.0, 0.5)]
    marks = [Mark("best", 2.0, odd, "best") for odd in ODD]
    marks += [Mark("event", odd, None, "event") for odd in ODD]
    odd = chart(Line("a", tuple(points)), marks=tuple(marks), scale=scale, x_scale=x_scale)
    (plot,) = plots(parsed(odd))
    (path,) = plot.iter(f"{SVG}path")
    numbers = [
        float(word) for word in re.findall(r"[\w.-]+", path.attrib["d"].replace("L", " ")[1:])
    ]
    assert len(numbers) == 4
    assert all(math.isfinite(number) for number in numbers)
    assert "nan" not in ElementTree.tostring(plot, "unicode")
    assert [mark.y for mark in marks[:5]] == [None] * 5


@pytest.mark.parametrize("points", [(), ((math.nan, 1.0),), ((0.0, math.inf),)])
def test_a_chart_without_a_point_has_its_texts_alone(points: tuple[Any, ...]) -> None:
    root = parsed(chart(Line("a", points)))
    assert plots(root) == []
    assert {"a title", "Title"} <= set(texts(root))


def test_lines_areas_and_dots_are_inside_their_plot() -> None:
    area = falling("area", 3, area=True)
    (plot,) = plots(parsed(chart(area, falling(dots=True), marks=(Mark("best", 3, 2.0, "best"),))))
    inner = plot.find(f"{SVG}svg")
    assert inner is not None
    assert inner.attrib["viewBox"] == f"0 0 {plot.attrib['width']} {plot.attrib['height']}"
    filled, line, dots = inner.findall(f"{SVG}path")
    assert [path.attrib["class"] for path in (filled, line, dots)] == ["s3 area", "s0", "s0 dots"]
    assert re.fullmatch(r"M[\d.]+ [\d.]+(H[\d.]+V[\d.]+){19}V290H0.0Z", filled.attrib["d"])
    places = [tuple(map(float, pair.split())) for pair in line.attrib["d"][1:].split("L")]
    assert len(places) == 20
    assert places[0][0] == 0.0
    assert places[-1][0] == 905.0
    assert all(0 <= y <= 290 for _, y in places)


def test_marks_are_named_beside_each_other() -> None:
    marks = (Mark("best", 9, 2.1, "minimum"), Mark("best", 8, 2.2, "suggested"))
    (plot,) = plots(parsed(chart(marks=(*marks, Mark("event", 17, None, "diverged")))))
    named = {"".join(text.itertext()): text for text in plot.iter(f"{SVG}text")}
    assert named["suggested"].attrib["text-anchor"] == "end"
    assert named["minimum"].attrib["text-anchor"] == "start"
    assert named["diverged"].attrib["text-anchor"] == "end"


def test_the_next_line_looks_different_35_times() -> None:
    text = picture([chart(*(falling(str(n), n) for n in range(36)))], title="")
    (plot,) = plots(ElementTree.fromstring(text))
    kinds = [path.attrib["class"] for path in plot.iter(f"{SVG}path")]
    assert len(set(kinds)) == 35
    assert kinds[35] == kinds[0]
    looks = {kind: re.findall(rf"\.{kind}[,{{][^}}]*}}", text) for kind in kinds}
    assert all(len(rules) == 1 + (int(kind[1:]) >= 7) for kind, rules in looks.items())


def colors(block: int) -> list[str]:
    """The colors of lines on light (0) or dark (1) ground."""
    style = (resources.files("surefoot.tools.report") / "chart.css").read_text()
    return re.findall(r"--k\d:(#\w+)", style)[7 * block :][:7]


def linear_light(color: str) -> np.ndarray:
    """sRGB to linear light: IEC 61966-2-1."""
    channels = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# what someone without cones of one kind sees: Machado et al. 2009, table 1, severity 1
BLIND = {
    "none": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize(("block", "ground"), [(0, "#ffffff"), (1, "#1c2025")])
def test_colors_next_to_each_other_are_told_apart_without_one_kind_of_cones(
    kind: str, block: int, ground: str
) -> None:
    seen = [BLIND[kind] @ linear_light(color) for color in colors(block)]
    assert len(seen) == 7
    assert min(np.linalg.norm(one - other) for one, other in pairwise(seen)) > 0.1
    below = BLIND[kind] @ linear_light(ground)
    assert min(np.linalg.norm(below - one) for one in seen) > 0.4


def test_the_same_charts_give_the_same_bytes(tmp_path: Path) -> None:
    charts = [chart(falling(name, n)) for n, name in enumerate(NAMES)]
    first, second = (draw(charts, tmp_path / name, title="it") for name in ("a.b", "c"))
    assert [path.suffix for path in first] == [path.suffix for path in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[-1].name == "a.b.svg"


def png(svg: str) -> np.ndarray:
    with Image.open(BytesIO(figures._png(svg)), formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_the_png_is_the_svg_in_its_light_colors(tmp_path: Path) -> None:
    pytest.importorskip(figures.RASTERIZER)
    drawn = chart(
        falling("a", 0),
        falling("dashed", 8),
        falling("area", 3, area=True),
        marks=(Mark("best", 3, 2.0, "best", 2), Mark("strange", 9, None, "not finite")),
        note=HOSTILE,
    )
    raster, vector = draw([drawn], tmp_path / "it", title="var(--k0)")
    assert [raster.name, vector.name] == ["it.png", "it.svg"]
    text = vector.read_text()
    with Image.open(raster) as image:
        assert image.size == (1000, int(ElementTree.fromstring(text).attrib["height"]))
    pixels = png(text)
    for color in (colors(0)[series] for series in range(4)):
        wanted = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
        assert (np.abs(pixels - wanted).sum(axis=2) < 12).any(), color
    assert (pixels[0] == 255).all()


def test_a_png_has_texts_on_a_machine_without_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg_py = pytest.importorskip(figures.RASTERIZER)

    rasterize = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg_py, "svg_to_bytes", rasterize)
    said = (png(picture([], title=title)) for title in ("", "a title"))
    empty, titled = ((pixels < 128).sum() for pixels in said)
    assert empty == 0
    assert titled > 200


def test_without_the_rasterizer_the_svg_is_written_and_an_older_png_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "is_installed", lambda module: False)
    (tmp_path / "it.png").touch()
    files = draw([chart()], tmp_path / "it", title="")
    assert files == [tmp_path / "it.svg"] == list(tmp_path.iterdir())
    assert "surefoot[plots]" in drawn_line(files)
    assert "surefoot[plots]" not in drawn_line([*files, *files])


def test_a_rasterizer_that_cannot_be_imported_ends_no_long_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "is_installed", lambda module: True)
    monkeypatch.setattr("surefoot.config.extras.is_installed", lambda module: True)
    monkeypatch.setitem(sys.modules, figures.RASTERIZER, None)
    assert draw_beside([chart()], tmp_path / "it", title="") == []
    assert len(lines_naming(capsys.readouterr().err, "note: ", figures.RASTERIZER)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["it.svg"]


def test_nothing_is_no_picture(tmp_path: Path) -> None:
    with refused("nothing-to-draw"):
        draw([], tmp_path / "it", title="it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/it", "\x00"])
def test_a_place_that_cannot_be_written_to_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("file-not-writable", sf.ConfigError, path=Path(f"{tmp_path / name}.svg")):
        draw([chart()], tmp_path / name, title="")
