"""Pictures of charts, drawn with matplotlib for the report and other subcommands."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from surefoot.config.extras import is_installed, needed_for
from surefoot.config.paths import write_whole
from surefoot.errors import ConfigError, visible
from surefoot.report.charts import Axis, Chart, axes, format_tick, ticks

# Okabe and Ito 2008, distinguishable with every color vision: https://jfly.uni-koeln.de/color/
# (yellow is too pale for lines)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (10, 3)))

_SETTINGS: Any = {
    "svg.hashsalt": "surefoot",  # the same figure produces the same file
    "svg.fonttype": "none",  # searchable text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # included with matplotlib
    "font.size": 9.0,
}

_WITHOUT_DATE: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib's options inside the block. matplotlib is imported here because its import
    creates loggers.
    """
    with needed_for("a picture", "matplotlib"):
        import matplotlib as mpl
        import matplotlib.figure  # the part that draws

    with mpl.rc_context(_SETTINGS):
        yield


def make_directory(directory: Path) -> Path:
    """Create a directory for pictures if necessary. Raises `ConfigError` if the creation fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(
            f"cannot write to {directory}: {problem.strerror}\n  choose another path: --out PATH"
        ) from problem
    return directory


def write(figure: Any, path: Path) -> list[Path]:
    """Write a figure to PATH.png and PATH.svg atomically and return both paths. Raises
    `ConfigError` if a write fails.
    """
    if not path.name:
        raise ConfigError(
            f"cannot write to {path}: the path has no file name\n  choose another path: --out PATH"
        )
    pictures = {}
    for kind, metadata in _WITHOUT_DATE.items():
        rendered = BytesIO()
        figure.savefig(rendered, format=kind, dpi=_DPI, metadata=metadata)
        pictures[kind] = rendered.getvalue()
    return [
        write_file(path.with_name(f"{path.name}.{kind}"), picture)
        for kind, picture in pictures.items()
    ]


def draw_beside(draw: Callable[[], list[Path]], path: Path) -> list[Path]:
    """Call `draw`, which writes PATH.png and PATH.svg beside the result of a long command, and
    return the pictures.

    Without matplotlib, older pictures are removed. If the drawing fails, a note is printed too.
    """
    if is_installed("matplotlib"):
        try:
            return draw()
        except ConfigError as problem:
            print(visible(f"note: no pictures: {problem}"), file=sys.stderr)
    return remove_pictures(path)


def remove_pictures(path: Path) -> list[Path]:
    """Remove PATH.png and PATH.svg, which an earlier command drew of other numbers. Returns an
    empty list: no picture exists.
    """
    for kind in _WITHOUT_DATE:
        path.with_name(f"{path.name}.{kind}").unlink(missing_ok=True)
    return []


def write_file(path: Path, content: bytes) -> Path:
    """Write a file atomically and return its path. Raises `ConfigError` if the write fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(
            f"cannot write to {path}: {why}\n  choose another path: --out PATH"
        ) from problem
    return path


_WIDTH, _DPI = 10.0, 100  # inches: 1,000 pixels
_INSIDE, _SHORT = 4, 60  # maximum names, and characters per name, of a legend inside the plot


def draw(charts: Sequence[Chart], path: Path, *, title: str) -> list[Path]:
    """Draw charts as PATH.png and PATH.svg and return both paths. A row has two charts, or one wide
    chart.

    Equal charts give equal bytes. Raises `ConfigError` if the list is empty or a file cannot be
    written.
    """
    if not charts:
        raise ConfigError(f"nothing to draw: {title} has no training or evaluation records")
    with drawing():
        from matplotlib.figure import Figure

        rows = _rows(charts)
        heights = [max(map(_height, row)) for row in rows]
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
        for index, row in enumerate(rows):
            for column, chart in enumerate(row):
                _draw(figure.add_subplot(grid[index, slice(None) if chart.wide else column]), chart)
        return write(figure, path)


def _height(chart: Chart) -> float:
    columns, names = _legend(chart)  # 0 columns: the legend is inside the plot
    return (3.4 if chart.wide else 2.5) + (0.17 * -(-names // columns) if columns else 0.0)


def _legend(chart: Chart) -> tuple[int, int]:
    names = [line.name for line in chart.lines if line.named]
    longest = max(map(len, names), default=0)
    return 0 if len(names) <= _INSIDE and longest <= _SHORT else 1 if longest > 48 else 2, len(
        names
    )


def _rows(charts: Sequence[Chart]) -> list[list[Chart]]:
    rows: list[list[Chart]] = []
    for chart in charts:
        if rows and not chart.wide and len(rows[-1]) == 1 and not rows[-1][0].wide:
            rows[-1].append(chart)
        else:
            rows.append([chart])
    return rows


def _draw(field: Any, chart: Chart) -> None:
    if both := axes(chart):
        _scale(field.set_xscale, field.set_xlim, field.set_xticks, both[0], 6)
        _scale(field.set_yscale, field.set_ylim, field.set_yticks, both[1], 5)
    for line in chart.lines:
        field.plot(
            [x for x, _ in line.points],
            [y for _, y in line.points],
            color=COLORS[line.series % len(COLORS)],
            linestyle=DASHES[line.series // len(COLORS) % len(DASHES)],
            linewidth=0.8 if line.faint else 1.4,
            alpha=0.35 if line.faint else 1.0,
            marker="o" if line.dots else None,
            markersize=3,
            label=line.name if line.named else None,
        )
    for mark in chart.marks:
        color, across = (
            COLORS[mark.series % len(COLORS)],
            field.get_xaxis_transform(),
        )  # a height of 1 is the top
        match mark.kind:
            case "event":
                field.axvline(mark.x, color="0.6", linestyle=":", linewidth=0.9)
                if sum(other.kind == "event" for other in chart.marks) == 1:
                    field.text(
                        mark.x,
                        0.02,
                        mark.title,
                        transform=across,
                        rotation=90,
                        ha="right",
                        fontsize=7,
                        color="0.4",
                    )
            case "best" if mark.y is not None:
                ring = {"markeredgecolor": color, "markeredgewidth": 1.5, "markersize": 7}
                field.plot(mark.x, mark.y, "o", color="white", clip_on=False, zorder=3, **ring)
                field.annotate(
                    mark.title,
                    (mark.x, mark.y),
                    (0, 9),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                )
            case "strange":
                field.plot(
                    mark.x, 1.0, "x", color=COLORS[1], markersize=6, clip_on=False, transform=across
                )
    field.set_title(
        chart.title, fontsize=9.5, loc="left", pad=6 + 11 * len(chart.note.splitlines())
    )
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
    field.annotate(chart.note, (0, 1), xytext=(0, 4), fontsize=8, color="0.25", **above)
    field.set_xlabel(chart.x_name, fontsize=8)
    field.grid(visible=True, axis="y", color="0.92")
    field.spines[["top", "right"]].set_visible(False)
    columns, names = _legend(chart)
    if columns:
        field.legend(
            frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=columns
        )
    elif names > 1 or (names and chart.wide):
        field.legend(frameon=False, fontsize=8)


def _scale(set_scale: Any, set_limits: Any, set_ticks: Any, axis: Axis, limit: int) -> None:
    set_scale("log" if axis.logarithmic else "linear")
    set_limits(axis.low, axis.high)
    values = ticks(axis, limit=limit)
    set_ticks(values, labels=[format_tick(value, axis.unit) for value in values])
    set_ticks([], minor=True)
