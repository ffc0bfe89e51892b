"""Pictures of charts as files: what stands where, hostile names, numbers that are not finite, the
same bytes, and the PNG where its rasterizer is installed; 2 seconds.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from functools import partial
from importlib import resources
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
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


def falling_line(name: str = "loss", series: int = 0, **settings: Any) -> Line:
    return Line(name, tuple((float(x), 3.0 - x / 10) for x in range(20)), series, **settings)


def chart(*lines: Line, title: str = "Title", **settings: Any) -> Chart:
    return Chart("name", title, lines or (falling_line(),), **settings)


def parse(*charts: Chart, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(picture(charts, title=title))


def charts_of(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f"{SVG}g")


def plots(root: ElementTree.Element) -> list[ElementTree.Element]:
    return root.findall(f".//{SVG}svg[@class='plot']")


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def offset(group: ElementTree.Element) -> tuple[int, int]:
    place = re.fullmatch(r"translate\((\d+) (\d+)\)", group.attrib["transform"])
    assert place is not None
    return int(place[1]), int(place[2])


class Edges(NamedTuple):
    """Those of a plot, in a picture whose rows count downwards."""

    left: int
    top: int
    right: int
    bottom: int


def plot_edges(root: ElementTree.Element) -> list[Edges]:
    edges = []
    for group in charts_of(root):
        x, y = offset(group)
        for plot in group.findall(f"{SVG}svg"):
            right = x + int(plot.attrib["width"])
            bottom = y + int(plot.attrib["height"])
            edges.append(Edges(left=x, top=y, right=right, bottom=bottom))
    return edges


class Span(NamedTuple):
    """Where a text begins and where it ends at the latest, in its row."""

    begin: float
    end: float


def text_span(text: ElementTree.Element) -> Span:
    letter_width = figures._LETTER
    if "class" in text.attrib:  # a title
        letter_width = 9.0
    begin = int(text.attrib.get("x", 0))
    return Span(begin, begin + letter_width * cells("".join(text.itertext())))


def test_a_row_has_two_charts_or_a_wide_one_and_no_plot_covers_another() -> None:
    wide = chart(wide=True)
    narrow = chart(note="one\ntwo")
    root = parse(wide, narrow, narrow, narrow, wide)

    first, left, right, alone, last = edges = plot_edges(root)

    assert [plot.right - plot.left for plot in edges] == [905, 420, 420, 905, 905]
    assert left.top == right.top
    assert left.right < right.left
    for upper, lower in pairwise([first, left, alone, last]):
        assert upper.bottom < lower.top
    assert last.bottom < int(root.attrib["height"])
    assert max(plot.right for plot in edges) < int(root.attrib["width"])


def test_a_picture_stands_alone() -> None:
    text = picture([chart()], title="a title")
    root = ElementTree.fromstring(text)
    assert root.attrib["viewBox"] == f"0 0 1000 {root.attrib['height']}"
    assert root.findtext(f"{SVG}title") == "a title"
    assert root.find(f"{SVG}style") is not None
    assert "@media (prefers-color-scheme:dark)" in text
    assert re.findall("<script|href=|url\\(|@import|@font-face", text) == []


def test_titles_notes_names_and_the_name_of_the_axis_are_shown_once() -> None:
    loss = chart(
        falling_line("one"),
        falling_line("two", 1),
        falling_line("not named", named=False),
        title="The loss",
        note="first\nsecond",
        x_name="learning rate",
    )
    counts = Counter(texts(parse(loss)))
    expected = ["a title", "The loss", "first", "second", "one", "two", "learning rate"]
    assert {text: counts[text] for text in expected} == dict.fromkeys(expected, 1)
    assert "not named" not in counts


@pytest.mark.parametrize("wide", [True, False])
def test_names_above_a_plot_are_in_rows_beside_each_other_and_inside_the_picture(
    wide: bool,
) -> None:
    lines = [falling_line(name, series) for series, name in enumerate(NAMES * 3)]
    root = parse(chart(*lines, title=NAMES[1], note=NAMES[2], wide=wide), chart(wide=wide))
    width = 905 if wide else 425
    for group in charts_of(root):
        rows: dict[int, list[Span]] = {}
        for text in group.findall(f"{SVG}text"):
            if text.attrib.get("class", "title") != "title":
                continue  # the name of the axis
            rows.setdefault(int(text.attrib["y"]), []).append(text_span(text))
        for row in rows.values():
            assert max(span.end for span in row) <= width
            for left, right in pairwise(row):
                assert left.end < right.begin
        for upper, lower in pairwise(sorted(rows)):
            assert lower - upper >= 18


def test_short_names_share_a_row_and_none_covers_another() -> None:
    lines = [falling_line(name, series) for series, name in enumerate(["a", "bb", "ccc", "a"])]
    (group,) = charts_of(parse(chart(*lines, wide=True)))
    names = [text for text in group.findall(f"{SVG}text") if "class" not in text.attrib]
    assert [text.text for text in names] == ["a", "bb", "ccc", "a"]
    assert len({text.attrib["y"] for text in names}) == 1
    for left, right in pairwise(text_span(name) for name in names):
        assert left.end < right.begin


def test_the_texts_of_both_charts_of_a_row_are_below_what_stands_above() -> None:
    root = parse(chart(wide=True), chart(title="", note="one\ntwo\nthree"), chart(title=""))
    above = plot_edges(root)[0].bottom
    for group in charts_of(root)[1:]:
        _, top = offset(group)
        rows = [top + float(text.attrib["y"]) for text in group.findall(f"{SVG}text")]
        assert min(rows) - figures._ROW > above


def test_hostile_texts_are_texts() -> None:
    marks = (Mark("best", 3, 2.0, HOSTILE), Mark("event", 4, None, HOSTILE))
    hostile = chart(
        falling_line(HOSTILE),
        falling_line("b", 1),
        title=HOSTILE,
        note=HOSTILE,
        x_name=HOSTILE,
        marks=marks,
    )
    root = parse(hostile, title=HOSTILE)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "style", "title", "rect", "text", "g", "path", "line", "circle"}
    hostile_texts = [text for text in texts(root) if "script" in text]
    assert len(hostile_texts) == 7
    whole_texts = [text for text in hostile_texts if "..." not in text]
    assert all("{{ 7 * 7 }}" in text for text in whole_texts)
    assert not re.search("[\x00\x1b\ud800\uffff\u202e]", "".join(hostile_texts))


ODD = [math.nan, math.inf, -math.inf, 1e308, -1e308]


@pytest.mark.parametrize("scale", ["auto", "linear", "log"])
@pytest.mark.parametrize("x_scale", ["linear", "log"])
def test_numbers_that_are_not_finite_are_left_out(scale: str, x_scale: str) -> None:
    odd_points = [*((2.0, odd) for odd in ODD), *((odd, 1.0) for odd in ODD)]
    points = ((1.0, 2.0), *odd_points, (5.0, 0.5))
    best_marks = [Mark("best", 2.0, odd, "best") for odd in ODD]
    event_marks = [Mark("event", odd, None, "event") for odd in ODD]
    odd_chart = chart(
        Line("a", points), marks=(*best_marks, *event_marks), scale=scale, x_scale=x_scale
    )

    (plot,) = plots(parse(odd_chart))

    (path,) = plot.iter(f"{SVG}path")
    numbers = path_numbers(path)
    assert len(numbers) == 4
    assert all(math.isfinite(number) for number in numbers)
    assert "nan" not in ElementTree.tostring(plot, "unicode")
    assert [mark.y for mark in best_marks] == [None] * 5


def path_numbers(path: ElementTree.Element) -> list[float]:
    """The coordinates of a path of lines, x and y in turn."""
    words = path.attrib["d"].removeprefix("M").replace("L", " ").split()
    return [float(word) for word in words]


@pytest.mark.parametrize("points", [(), ((math.nan, 1.0),), ((0.0, math.inf),)])
def test_a_chart_without_a_point_has_its_texts_alone(points: tuple[Any, ...]) -> None:
    root = parse(chart(Line("a", points)))
    assert plots(root) == []
    assert {"a title", "Title"} <= set(texts(root))


def test_lines_areas_and_dots_are_inside_their_plot() -> None:
    area = falling_line("area", 3, area=True)
    dotted = falling_line(dots=True)
    (plot,) = plots(parse(chart(area, dotted, marks=(Mark("best", 3, 2.0, "best"),))))
    inner = plot.find(f"{SVG}svg")
    assert inner is not None
    assert inner.attrib["viewBox"] == f"0 0 {plot.attrib['width']} {plot.attrib['height']}"

    filled, line, dots = inner.findall(f"{SVG}path")
    assert [path.attrib["class"] for path in (filled, line, dots)] == ["s3 area", "s0", "s0 dots"]
    assert re.fullmatch(r"M[\d.]+ [\d.]+(H[\d.]+V[\d.]+){19}V290H0.0Z", filled.attrib["d"])
    numbers = path_numbers(line)
    xs = numbers[::2]
    ys = numbers[1::2]
    assert len(xs) == len(ys) == 20
    assert (xs[0], xs[-1]) == (0.0, 905.0)
    assert 0 <= min(ys) <= max(ys) <= 290


def test_marks_are_named_beside_each_other() -> None:
    marks = (
        Mark("best", 9, 2.1, "minimum"),
        Mark("best", 8, 2.2, "suggested"),
        Mark("event", 17, None, "diverged"),
    )
    (plot,) = plots(parse(chart(marks=marks)))
    names = {"".join(text.itertext()): text for text in plot.iter(f"{SVG}text")}
    assert names["suggested"].attrib["text-anchor"] == "end"
    assert names["minimum"].attrib["text-anchor"] == "start"
    assert names["diverged"].attrib["text-anchor"] == "end"


def test_the_next_line_looks_different_35_times() -> None:
    lines = [falling_line(str(series), series) for series in range(36)]
    text = picture([chart(*lines)], title="")
    (plot,) = plots(ElementTree.fromstring(text))
    classes = [path.attrib["class"] for path in plot.iter(f"{SVG}path")]
    assert len(set(classes)) == 35
    assert classes[35] == classes[0]
    for series, name in enumerate(classes[:35]):
        assert name == f"s{series}"
        rules = re.findall(rf"\.{name}[,{{][^}}]*}}", text)
        # a color, and from the second round of colors on also dashes
        assert len(rules) == (1 if series < 7 else 2)


def colors(block: int) -> list[str]:
    """The colors of lines on light (0) or dark (1) ground."""
    style = (resources.files("surefoot.tools.report") / "chart.css").read_text()
    return re.findall(r"--k\d:(#\w+)", style)[7 * block :][:7]


def rgb(color: str) -> np.ndarray:
    """The three bytes of a color such as #1c2025."""
    return np.array(list(bytes.fromhex(color.removeprefix("#"))))


def linear_light(color: str) -> np.ndarray:
    """sRGB to linear light: IEC 61966-2-1."""
    channels = rgb(color) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


# what someone without cones of one kind sees: Machado et al. 2009, table 1, severity 1
CONES = {
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


@pytest.mark.parametrize("kind", CONES)
@pytest.mark.parametrize(("block", "ground"), [(0, "#ffffff"), (1, "#1c2025")])
def test_colors_next_to_each_other_are_told_apart_without_one_kind_of_cones(
    kind: str, block: int, ground: str
) -> None:
    light_of_lines = [CONES[kind] @ linear_light(color) for color in colors(block)]
    light_of_ground = CONES[kind] @ linear_light(ground)
    assert len(light_of_lines) == 7
    for one, following in pairwise(light_of_lines):
        assert np.linalg.norm(one - following) > 0.1
    for light in light_of_lines:
        assert np.linalg.norm(light_of_ground - light) > 0.4


def test_the_same_charts_give_the_same_bytes(tmp_path: Path) -> None:
    charts = [chart(falling_line(name, series)) for series, name in enumerate(NAMES)]
    files = draw(charts, tmp_path / "a.b", title="it")
    files_again = draw(charts, tmp_path / "c", title="it")
    assert files[-1].name == "a.b.svg"
    for file, file_again in zip(files, files_again, strict=True):
        assert file.suffix == file_again.suffix
        assert file.read_bytes() == file_again.read_bytes()


def rasterize(svg: str) -> np.ndarray:
    with Image.open(BytesIO(figures._png(svg)), formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_the_png_is_the_svg_in_its_light_colors(tmp_path: Path) -> None:
    pytest.importorskip(figures.RASTERIZER)
    lines = chart(
        falling_line("a", 0),
        falling_line("dashed", 8),
        falling_line("area", 3, area=True),
        marks=(Mark("best", 3, 2.0, "best", 2), Mark("strange", 9, None, "not finite")),
        note=HOSTILE,
    )

    raster, vector = draw([lines], tmp_path / "it", title="var(--k0)")

    assert [raster.name, vector.name] == ["it.png", "it.svg"]
    text = vector.read_text()
    with Image.open(raster) as image:
        assert image.size == (1000, int(ElementTree.fromstring(text).attrib["height"]))
    pixels = rasterize(text)
    for color in colors(0)[:4]:
        distances = np.abs(pixels - rgb(color)).sum(axis=2)
        assert distances.min() < 12, color
    assert (pixels[0] == 255).all()


def test_a_png_has_texts_on_a_machine_without_fonts(monkeypatch: pytest.MonkeyPatch) -> None:
    resvg_py = pytest.importorskip(figures.RASTERIZER)
    without_fonts = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)
    monkeypatch.setattr(resvg_py, "svg_to_bytes", without_fonts)

    untitled = rasterize(picture([], title=""))
    titled = rasterize(picture([], title="a title"))

    assert (untitled < 128).sum() == 0
    assert (titled < 128).sum() > 200


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
