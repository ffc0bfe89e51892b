"""Pictures of charts as files: the SVG of the page with its style inside, and a PNG of it."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from surefoot.config.extras import is_installed, needed_for
from surefoot.config.paths import write_whole
from surefoot.errors import ConfigError, Setting, visible
from surefoot.tools.report.charts import Chart, Line
from surefoot.tools.report.page import render
from surefoot.tracking.format import cells, shortened

RASTERIZER = "resvg_py"  # of the extra `plots`

# pixels
_WIDTH = 1000  # of a picture
_LEFT = 66  # from its edge to its plots
_COLUMN = 485  # from a plot to the one beside it
_WIDE = (905, 290)  # width and height of a plot
_NARROW = (420, 190)
_ROW = 18  # height of a row of text
_LETTER = 6.8  # width of a letter in wide system fonts


@dataclass
class Field:
    """The place of a chart in a picture, in pixels: its plot, and the rows of text above.

    Each name of the legend has its horizontal place and the line.
    """

    chart: Chart
    x: int
    width: int
    height: int
    title: str
    notes: list[str]
    legend: list[list[tuple[int, str, Line]]]
    y: int = 0

    @property
    def rows(self) -> int:
        return bool(self.title) + len(self.notes) + len(self.legend)


def draw(charts: Sequence[Chart], path: Path, *, title: str) -> list[Path]:
    """Draw charts as PATH.svg, and as PATH.png if the rasterizer is installed. Returns the paths.

    Without the rasterizer, an older PATH.png is removed. Equal charts give equal bytes. Raises
    `ConfigError` if there is no chart, or a file cannot be written.
    """
    if not charts:
        raise ConfigError(
            "nothing-to-draw",
            problem=f"nothing to draw: {title} has no training or evaluation records",
        )
    svg = picture(charts, title=title)
    with writing_to(path):
        vector = path.with_name(f"{path.name}.svg")
        raster = path.with_name(f"{path.name}.png")
    write_file(vector, svg.encode())
    with suppress(OSError):
        raster.unlink()  # it may show other numbers
    if not is_installed(RASTERIZER):
        return [vector]
    return [write_file(raster, _png(svg)), vector]


def drawn_line(files: Sequence[Path]) -> str:
    """Return a line about the files of a picture. It says how to get the PNG if that is missing."""
    line = f"drawn in {' and '.join(map(str, files))}"
    if len(files) > 1:
        return line
    return f'{line}; for a PNG, type: pip install "surefoot[plots]"'


def draw_beside(charts: Sequence[Chart], path: Path, *, title: str) -> list[Path]:
    """Draw charts beside the results of a long command, which a failure does not end: it is printed
    as a note.
    """
    try:
        return draw(charts, path, title=title)
    except ConfigError as problem:
        print(visible(f"note: no pictures: {problem}"), file=sys.stderr)
        return []


def picture(charts: Sequence[Chart], *, title: str) -> str:
    """Return charts as one SVG, legible on light and dark ground. A row has two charts, or one."""
    fields: list[Field] = []
    bottom = 40 if title else 8
    for row in _rows(charts):
        width, height = _WIDE if len(row) == 1 else _NARROW
        fields_of_row = []
        for column, chart in enumerate(row):
            fields_of_row.append(
                Field(
                    chart,
                    x=_LEFT + _COLUMN * column,
                    width=width,
                    height=height,
                    title=_fitted(chart.title, width * 3 // 4),
                    notes=[_fitted(note, width) for note in chart.note.splitlines()],
                    legend=_legend(chart, width),
                )
            )
        top = bottom + _ROW * max(field.rows for field in fields_of_row) + 26
        for field in fields_of_row:
            field.y = top
        fields += fields_of_row
        bottom = top + height + 48
    heading = _fitted(title, _WIDTH * 2 // 3)
    values = {"title": title, "heading": heading, "fields": fields, "left": _LEFT}
    return render("picture.svg", {**values, "width": _WIDTH, "height": bottom}, [{}])


def _rows(charts: Sequence[Chart]) -> list[list[Chart]]:
    rows: list[list[Chart]] = []
    for chart in charts:
        if rows and not chart.wide and len(rows[-1]) == 1 and not rows[-1][0].wide:
            rows[-1].append(chart)
        else:
            rows.append([chart])
    return rows


def _legend(chart: Chart, width: int) -> list[list[tuple[int, str, Line]]]:
    named = [line for line in chart.lines if line.named]
    if len(named) == 1 and not chart.wide:
        return []
    rows: list[list[tuple[int, str, Line]]] = []
    x = width  # the first name begins a row
    for line in named:
        name = _fitted(line.name, width - 48)
        needed = 48 + round(_LETTER * cells(name))
        if x + needed > width + 24:  # no room is needed behind the last name
            rows.append([])
            x = 0
        rows[-1].append((x, name, line))
        x += needed
    return rows


def _fitted(text: str, width: int) -> str:
    """Shorten a text to a width in pixels."""
    return shortened(text, int(width / _LETTER * len(text) / max(1, cells(text))))


def _png(svg: str) -> bytes:
    """Rasterize a picture in its light colors."""
    style, end, drawing = svg.partition("</style>")
    # the rasterizer knows no variables; the light colors come first
    colors = dict(reversed(re.findall(r"--(\w+):(#\w+)", style)))
    style = re.sub(r"--\w+:[^;}]+;?", "", style)
    style = re.sub(r"var\(--(\w+)\)", lambda variable: colors[variable[1]], style)
    with needed_for("a PNG", RASTERIZER), TemporaryDirectory() as directory:
        import resvg_py
        from PIL import ImageFont

        included = ImageFont.load_default(10)  # for a machine without fonts
        assert isinstance(included, ImageFont.FreeTypeFont)
        font = Path(directory, "font.ttf")
        font.write_bytes(included.font_bytes)
        family = included.getname()[0]
        return bytes(
            resvg_py.svg_to_bytes(
                svg_string=style + end + drawing,
                font_files=[str(font)],
                sans_serif_family=family,
            )
        )


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path. Raises `ConfigError` if the write fails."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return path


def make_directory(directory: Path) -> None:
    """Create a directory for pictures if necessary. Raises `ConfigError` if the creation fails."""
    with writing_to(directory):
        directory.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise `ConfigError` if a write in the body fails."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as problem:  # torch raises RuntimeError
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(
            "file-not-writable",
            problem=f"cannot write to {path}: {why}",
            remedy=("another", Setting("out")),
            path=path,
        ) from problem
