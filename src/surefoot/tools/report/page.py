"""The page of one run or several: one HTML file of at most a megabyte, without scripts and network
requests.

`plot` in parts.html draws inline SVG. Lines stretch to the available width; text keeps its size.
"""

import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.errors import visible
from surefoot.tools.diagnose.finding import Finding
from surefoot.tools.report import tables
from surefoot.tools.report.charts import (
    Axis,
    Chart,
    Line,
    Unit,
    axes,
    format_tick,
    format_value,
    ticks,
)
from surefoot.tools.report.headline import State, state_of, verdict
from surefoot.tools.report.heatmap import CIVIDIS, layer_maps
from surefoot.tools.report.run_charts import charts
from surefoot.tools.report.series import ReportedRun
from surefoot.tools.report.several_runs import page_values
from surefoot.tracking.commands import commands
from surefoot.tracking.panels import ConfusionMatrix, Curves, TextHeatmap
from surefoot.tracking.panels_file import Panels
from surefoot.tracking.run_reader import surefoot_version

if TYPE_CHECKING:
    from jinja2 import Environment


MOST_BYTES = 1_000_000
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# text-direction controls also affect later text; the last two are not allowed in SVG
_TURNING = re.compile(r"[\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_BANDS = 60  # stripes in which the pointer shows values
_FULL_NATS = 6.0  # loss of the strongest tint
_DARKEST = 78  # percent, so that text stays readable


def tint_tokens(text: TextHeatmap) -> list[tuple[str, int | None, str]]:
    """Return each piece of text with its tint in percent (None: no tint) and its value as text.

    >>> panel = TextHeatmap(
    ...     title="a",
    ...     legend="b",
    ...     unit="fraction",
    ...     pieces=(("so", None), (" it", 0.5), (" goes", 0.0)),
    ... )
    >>> tint_tokens(panel)
    [('so', None, ''), (' it', 39, '50%'), (' goes', 0, '0%')]
    """
    tints: list[tuple[str, int | None, str]] = []
    for piece, value in text.pieces:
        if value is None:
            tints.append((piece, None, ""))
        elif text.unit == "nats":
            tints.append((piece, _tint(value / _FULL_NATS), f"{value:.2f} nats"))
        else:
            tints.append((piece, _tint(value), format_value(value, "fraction")))
    return tints


def _tint(fraction: float) -> int:
    return round(_DARKEST * min(1.0, fraction))


def shade_cells(matrix: ConfusionMatrix) -> list[tuple[str, list[tuple[int, int, bool]]]]:
    """Return the class of each row, and each cell's count, shade (percent, by the root of the row's
    fraction) and correctness.

    >>> shade_cells(ConfusionMatrix(title="a", classes=("cat", "dog"), counts=((4, 0), (1, 3))))[1]
    ('dog', [(1, 39, False), (3, 68, True)])
    """
    rows = []
    for row, (name, counts) in enumerate(zip(matrix.classes, matrix.counts, strict=True)):
        total = sum(counts) or 1
        cells = []
        for column, count in enumerate(counts):
            cells.append((count, _tint((count / total) ** 0.5), row == column))
        rows.append((name, cells))
    return rows


def chart_of(panel: Curves) -> Chart:
    """Convert a panel of curves to a chart. Points without a value are omitted."""
    lines = []
    for index, (name, curve) in enumerate(panel.curves.items()):
        points = tuple((float(step), value) for step, value in curve if value is not None)
        lines.append(Line(name, points, index, dots=len(curve) < 60))
    return Chart(f"panel-{panel.title}", panel.title, tuple(lines), note=panel.legend, wide=True)


def summary(chart: Chart) -> str:
    """Describe a chart as text for screen readers.

    >>> summary(Chart("loss", "Loss", (Line("training", ((10, 3.0), (20, 2.5))),)))
    'Loss. training: 3 at step 10, 2.5 at step 20, between 2.5 and 3'
    """
    sentences = []
    for line in chart.lines:
        if not line.points or not line.named:
            continue
        ends = []
        for x, y in (line.points[0], line.points[-1]):
            ends.append(f"{format_value(y, chart.unit)} at {chart.x_name} {format_value(x)}")
        values = [y for _, y in line.points]
        low = format_value(min(values), chart.unit)
        high = format_value(max(values), chart.unit)
        sentences.append(f"{line.name}: {', '.join(ends)}, between {low} and {high}")
    return f"{chart.title}. {'; '.join(sentences)}"


def coordinates(
    line: Line, horizontal: Axis, vertical: Axis, size: tuple[int, int] | None = None
) -> list[tuple[float, float]]:
    """Return a line's coordinates without repeated points, in a plot of this size in pixels, or
    in the stretched one of a page.
    """
    width, height = size or (2000, 1000)
    digits = 1 if size else None
    pixels: list[tuple[float, float]] = []
    for x, y in horizontal.visible(line.points):
        pixel = (
            round(width * horizontal.position(x), digits),
            round(height * (1 - vertical.position(y)), digits),
        )
        if not pixels or pixel != pixels[-1]:
            pixels.append(pixel)
    return pixels


class Band(NamedTuple):
    """A vertical stripe of a chart. The page shows the stripe's values at the pointer or the
    focus.
    """

    width: int  # in 1/10,000 of the chart
    center: int  # position of the step within the stripe, in percent
    is_right: bool  # the first stripe of the right half
    step: str
    values: list[tuple[int | None, str]]  # series and value of each line; title of each mark


def bands(chart: Chart, horizontal: Axis) -> list[Band]:
    """Divide a chart into stripes that cover it from left to right.

    >>> from surefoot.tools.report.charts import Mark
    >>> chart = Chart(
    ...     "a", "a", (Line("loss", ((0, 2.0), (10, 1.0))),), (Mark("event", 10, None, "finished"),)
    ... )
    >>> [(band.width, band.step, band.values) for band in bands(chart, Axis(0.0, 10.0))]
    [(5000, 'step 0', [(0, 'loss 2')]), (5000, 'step 10', [(0, 'loss 1'), (None, 'finished')])]
    """
    lines = []
    all_steps: set[float] = set()
    for line in chart.lines:
        points = horizontal.visible(line.points)
        lines.append((line, points, [horizontal.position(x) for x, _ in points]))
        all_steps.update(x for x, _ in points)
    steps = sorted(all_steps)
    if len(steps) > _BANDS:
        steps = [steps[round(n * (len(steps) - 1) / (_BANDS - 1))] for n in range(_BANDS)]
    positions = [horizontal.position(step) for step in steps]
    middles = [(a + b) / 2 for a, b in pairwise(positions)]
    edges = [0.0, *middles, 1.0]
    titles: list[list[tuple[int | None, str]]] = [[] for _ in edges]  # of the marks in each stripe
    for mark in chart.marks:
        index = bisect_right(edges, horizontal.position(mark.x), 1, len(edges) - 1) - 1
        titles[index].append((mark.series if mark.kind == "best" else None, mark.title))
    stripes = []
    half_was_reached = False
    for index, (step, position) in enumerate(zip(steps, positions, strict=True)):
        left = edges[index]
        right = edges[index + 1]
        values: list[tuple[int | None, str]] = []
        for line, points, line_positions in lines:
            near = points[bisect_left(line_positions, left) : bisect_right(line_positions, right)]
            if near:
                text = _hover_text(near, step, chart.unit, faint=line.faint)
                values.append((line.series, f"{line.name} {text}"))
        stripes.append(
            Band(
                width=round(10_000 * (right - left)),
                center=round(100 * (position - left) / (right - left)) if right > left else 50,
                is_right=position >= 0.5 and not half_was_reached,
                step=f"step {format_value(step)}",
                values=values + titles[index],
            )
        )
        half_was_reached = position >= 0.5
    return stripes


def _hover_text(
    near: Sequence[tuple[float, float]], center: float, unit: Unit, *, faint: bool
) -> str:
    low = min(y for _, y in near)
    high = max(y for _, y in near)
    if faint and low != high:
        return f"{format_value(low, unit)} \u2013 {format_value(high, unit)}"
    _, value = min(near, key=lambda point: abs(point[0] - center))
    return format_value(value, unit)


class Room(NamedTuple):
    """What a page has room for."""

    stretches: int | None  # of a curve; None: all
    samples: int
    rows: int  # of settings, and of events
    letters: int  # of a setting
    note: str  # on what is left out


# tried in order until the page is small enough
_ROOMS = (
    Room(stretches=None, samples=9, rows=300, letters=400, note=""),
    Room(
        stretches=75,
        samples=3,
        rows=200,
        letters=200,
        note="Curves have fewer points, and samples are omitted, to keep the page small.",
    ),
    Room(
        stretches=40,
        samples=1,
        rows=80,
        letters=80,
        note="Curves have fewer points, and samples and table rows are omitted, to keep the page"
        " small.",
    ),
)
_KINDS = {
    "loss": "loss",
    "metric": "metrics",
    "throughput": "machine",
    "memory": "machine",
    "value": "users",
}


def run_page(
    run: ReportedRun,
    *,
    findings: Sequence[Finding] = (),
    panels: Panels | None = None,
    script: str = "",
    policy: str = POLICY,
) -> str:
    """Render the page of one run. `policy`, the page's Content-Security-Policy, must allow the
    `script`.
    """
    records = run.records
    state = state_of(run)
    surroundings = tables.surroundings(run)
    common = {
        "run": run,
        "title": run.files.name,
        "state": state,
        "began": dict(surroundings).get("began", ""),
        "verdict": verdict(run, state),
        "tiles": tables.tiles(run, state),
        "shares": tables.shares(run),
        "heats": layer_maps(records.layers),
        "crash": _crash(run, state),
        "surroundings": surroundings,
        "commands": commands(run.files, finished=state == "finished"),
        "records": records.count,
        "findings": findings,
        "panels_step": 0 if panels is None else panels.step,
        "script": script,
        "policy": policy,
    }

    def fitted(room: Room) -> dict[str, Any]:
        kinds: dict[str, list[Chart]] = {
            "loss": [],
            "metrics": [],
            "optimizer": [],
            "machine": [],
            "users": [],
        }
        for chart in charts(run, stretches=room.stretches):
            kind = chart.name.partition("-")[0]
            kinds[_KINDS.get(kind, "optimizer")].append(chart)
        return {
            **kinds,
            "panels": panels.panels if panels is not None and room.samples > 1 else (),
            "samples": records.samples[-room.samples :],
            "settings": tables.settings(run, limit=room.rows, max_length=room.letters),
            "events": run.events[: room.rows],
            "more_events": records.more_events + len(run.events[room.rows :]),
            "left_out": room.note,
        }

    return render("run.html", common, (fitted(room) for room in _ROOMS))


def runs_page(runs: Sequence[ReportedRun], *, script: str = "", policy: str = POLICY) -> str:
    """Render the page of several runs: differing settings, metrics, and overlaid curves."""
    states = [state_of(run) for run in runs]
    common = {"states": states, "script": script, "policy": policy, "state": "", "left_out": ""}
    all_stretches = (max(20, 300 // len(runs)), 40, 20)
    fitted = (page_values(runs, stretches=stretches) for stretches in all_stretches)
    return render("runs.html", common, fitted)


def _crash(run: ReportedRun, state: State) -> dict[str, str] | None:
    """Return the error and the traceback of the crash that ended the run, or None."""
    if not run.files.crashes or state in ("finished", "running"):
        return None
    newest = run.files.crashes[0]
    step = newest.get("step")
    is_at_end = isinstance(step, int) and step >= run.last_step
    if state not in ("failed", "diverged") and not is_at_end:
        return None
    trace = newest.get("traceback")
    text = "".join(str(line) for line in trace) if isinstance(trace, list) else ""
    return {
        "error": str(newest.get("words") or newest.get("error", ""))[:12000],
        "trace": text[-8000:],
    }


def render(name: str, common: dict[str, Any], sizes: Iterable[dict[str, Any]]) -> str:
    """Render a template with the first of the `sizes`, the largest one first, that fits into a
    page. Control characters are replaced.
    """
    page = b""
    written_at = time.strftime("%Y-%m-%d %H:%M:%S %z")
    template = environment().get_template(name)
    for values in sizes:
        text = template.render(**common, **values, written_at=written_at)
        text = _TURNING.sub("�", visible(text))
        page = text.encode(errors="replace")  # a model may generate any text
        if len(page) <= MOST_BYTES:
            break
    return page.decode()


@cache
def environment() -> "Environment":
    """Load the templates beside this file with HTML escaping. jinja2 is imported here because only
    reports need jinja2.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    env = Environment(
        loader=PackageLoader("surefoot", "tools/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (
        axes,
        bands,
        chart_of,
        coordinates,
        format_tick,
        format_value,
        shade_cells,
        summary,
        ticks,
        tint_tokens,
    )
    env.globals |= {function.__name__: function for function in functions}
    css = (resources.files("surefoot.tools.report") / "page.css").read_text(encoding="utf-8")
    env.globals |= {"css": Markup(css), "cividis": ",".join(CIVIDIS), "version": surefoot_version()}
    return env
