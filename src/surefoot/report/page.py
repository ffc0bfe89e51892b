"""The page of one run, and of several: one file of HTML that asks for nothing else, of at most a megabyte."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from surefoot.diagnose.finding import Finding
from surefoot.report import tables
from surefoot.report.charts import Chart, Line, written
from surefoot.report.headline import State, state_of, verdict
from surefoot.report.heatmap import CIVIDIS
from surefoot.report.run_charts import charts
from surefoot.report.series import ReportedRun
from surefoot.report.several_runs import overlaid
from surefoot.report.svg import svg
from surefoot.tracking.commands import commands
from surefoot.tracking.format import visible
from surefoot.tracking.panels import ConfusionMatrix, Curves, Panels, TintedText

if TYPE_CHECKING:
    from jinja2 import Environment


_FULL_NATS = 6.0  # of loss: as strong as it gets

_DARKEST = 78  # percent, so that letters can be read


def tinted(text: TintedText) -> list[tuple[str, int | None, str]]:
    """Each piece with the strength of its tint in percent, None for none, and its number in words; equal neighbours as one.

    >>> panel = TintedText(title="a", legend="b", unit="fraction", pieces=(("so", None), (" it", 0.5), (" goes", 0.0)))
    >>> tinted(panel)
    [('so', None, ''), (' it', 39, '50 %'), (' goes', 0, '0 %')]
    """
    full = _FULL_NATS if text.unit == "nats" else 1.0
    found: list[tuple[str, int | None, str]] = []
    for piece, value in text.pieces:
        if value is None:
            found.append((piece, None, ""))
            continue
        words = f"{value:.2f} nats" if text.unit == "nats" else written(value, "fraction")
        found.append((piece, round(_DARKEST * min(1.0, value / full)), words))
    return found


def shaded(matrix: ConfusionMatrix) -> list[tuple[str, list[tuple[int, int, bool]]]]:
    """Each row of a confusion matrix: its class, and of each cell the count, how dark it is, and whether it is right.

    How dark is relative to the samples of the row, by the root, so that few that are wrong are seen.

    >>> shaded(ConfusionMatrix(title="a", classes=("cat", "dog"), counts=((4, 0), (1, 3))))[1]
    ('dog', [(1, 39, False), (3, 68, True)])
    """
    rows = []
    for place, (name, counts) in enumerate(zip(matrix.classes, matrix.counts, strict=True)):
        total = sum(counts) or 1
        rows.append(
            (
                name,
                [
                    (count, round(_DARKEST * (count / total) ** 0.5), place == other)
                    for other, count in enumerate(counts)
                ],
            )
        )
    return rows


def chart_of(panel: Curves) -> Chart:
    """A panel of curves as a chart; a point without a value is left out."""
    lines = tuple(
        Line(
            name,
            tuple((float(step), value) for step, value in points if value is not None),
            place,
            place // 7,
            dots=len(points) < 60,
        )
        for place, (name, points) in enumerate(panel.curves.items())
    )
    return Chart("panel", panel.title, lines, note=panel.legend, wide=True)


MOST_BYTES = 1_000_000

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_TURNING = re.compile(r"[\u202a-\u202e\u2066-\u2069]")  # the words that follow, too

_FILES = ("page.html", "parts.html", "run.html", "runs.html", "page.css")

_STATES: dict[State, str] = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped",
    "diverged": "diverged",
    "failed": "failed",
    "silent": "not running",
}


@dataclass(frozen=True)
class Room:
    """How much of a run a page shows, and what it says of what it leaves out."""

    stretches: int | None
    samples: int
    panels: bool
    rows: int  # of settings, and of events
    letters: int  # of a setting
    left_out: str = ""


# tried one after the other until the page is small enough
_ROOMS = (
    Room(None, 9, True, 300, 400),
    Room(75, 3, True, 200, 200, "Curves are thinned further, and samples left out, to keep the page small."),
    Room(40, 1, False, 80, 80, "Curves are thinned further, and much is left out, to keep the page small."),
)


def run_page(
    run: ReportedRun,
    *,
    findings: Sequence[Finding] = (),
    panels: Panels | None = None,
    running: bool = False,
    script: str = "",
    policy: str = POLICY,
) -> str:
    """The page of one run. `script` runs in it and must be allowed by `policy`, its Content-Security-Policy."""
    state = state_of(run, running=running)
    held = _of_run(run, state) | {"findings": findings, "script": script, "policy": policy}
    held |= {"panels_step": 0 if panels is None else panels.step}
    page = ""
    for room in _ROOMS:
        page = _rendered("run.html", held | _in_room(run, room, panels))
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def runs_page(runs: Sequence[ReportedRun], *, running: Sequence[bool], script: str = "", policy: str = POLICY) -> str:
    """The page of several runs: what differs between them, their scores, and their curves over each other."""
    states = [state_of(run, running=one) for run, one in zip(runs, running, strict=True)]
    page = ""
    for stretches in (max(20, 300 // len(runs)), 40, 20):
        held = overlaid(runs, states, stretches=stretches)
        page = _rendered("runs.html", vars(held) | {"script": script, "policy": policy, "state": "", "left_out": ""})
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def _of_run(run: ReportedRun, state: State) -> dict[str, Any]:
    """What of a page does not depend on how much room there is."""
    recorded = run.recorded
    shares = tables.shares(run)
    return {
        "run": run,
        "title": run.files.name,
        "state": state,
        "state_words": _STATES[state],
        "began": next((value for name, value in tables.surroundings(run) if name == "began"), ""),
        "verdict": verdict(run, state),
        "tiles": tables.tiles(run, state),
        "shares": shares,
        "total": written(sum(recorded.spent_s.values()), "seconds"),
        "heats": recorded.layers.maps(),
        "never_updated": recorded.layers.never_updated[:40],
        "crash": _crash(run, state),
        "surroundings": tables.surroundings(run),
        "commands": commands(run.files, finished=state == "finished"),
        "records": recorded.count,
    }


def _in_room(run: ReportedRun, room: Room, panels: Panels | None) -> dict[str, Any]:
    """The parts of a page that are cut where it would be too large."""
    drawn = charts(run, stretches=room.stretches)
    kinds: dict[str, list[Chart]] = {"loss": [], "scores": [], "optimizer": [], "machine": [], "users": []}
    for chart in drawn:
        kinds[_KINDS.get(chart.name.partition("-")[0], "optimizer")].append(chart)
    chosen, left_alone = tables.settings(run, most=room.rows, longest=room.letters)
    events = run.recorded.events
    return {
        **kinds,
        "panels": panels.panels if panels is not None and room.panels else (),
        "samples": run.recorded.samples[-room.samples :],
        "chosen": chosen,
        "left_alone": left_alone,
        "has_origins": any(row.origin for row in chosen),
        "events": events[: room.rows],
        "more_events": run.recorded.more_events + len(events[room.rows :]),
        "left_out": room.left_out,
    }


_KINDS = {"loss": "loss", "score": "scores", "throughput": "machine", "memory": "machine", "value": "users"}


def _crash(run: ReportedRun, state: State) -> dict[str, str] | None:
    """The newest error that was kept, where the run did not get further since."""
    if not run.files.crashes or state in ("finished", "running"):
        return None
    newest = run.files.crashes[0]
    step = newest.get("step")
    if state not in ("failed", "diverged") and not (isinstance(step, int) and step >= run.recorded.last_step):
        return None
    trace = newest.get("traceback")
    text = "".join(str(line) for line in trace) if isinstance(trace, list) else ""
    words = newest.get("words") or newest.get("error", "")
    return {"error": str(words)[:12000], "trace": text[-8000:]}


def _rendered(name: str, held: dict[str, Any]) -> str:
    page = _environment().get_template(name).render(**held, made=time.strftime("%Y-%m-%d %H:%M:%S %z"))
    return _TURNING.sub("�", visible(page)).encode(errors="replace").decode()  # a model may write anything


@cache
def _environment() -> Environment:
    """Templates beside this file; what is put into them is escaped. Imported here: a run that writes no page needs none."""
    from jinja2 import DictLoader, Environment, StrictUndefined
    from markupsafe import Markup

    here = resources.files("surefoot.report")
    texts = {name: (here / name).read_text(encoding="utf-8") for name in _FILES}
    made = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.globals |= {
        "css": Markup(texts["page.css"]),
        "svg": lambda chart: Markup(svg(chart)),
        "cividis": ",".join(CIVIDIS),
        "written": written,
        "tinted": tinted,
        "shaded": shaded,
        "panel_chart": chart_of,
        "version": _version(),
    }
    return made


def _version() -> str:
    try:
        return version("surefoot")
    except PackageNotFoundError:
        return "unknown"
