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

from surefoot.diagnosis import Finding
from surefoot.panels import Panels
from surefoot.reporting import tables
from surefoot.reporting.charts import Chart
from surefoot.reporting.commands import commands
from surefoot.reporting.heat import CIVIDIS
from surefoot.reporting.overlay import overlaid
from surefoot.reporting.panels import chart_of, shaded, tinted
from surefoot.reporting.recorded import ReportedRun
from surefoot.reporting.run_charts import charts
from surefoot.reporting.svg import svg
from surefoot.reporting.ticks import written
from surefoot.reporting.verdict import State, state_of, verdict
from surefoot.tracking.format import visible

if TYPE_CHECKING:
    from jinja2 import Environment

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
        "commands": commands(run, state),
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

    here = resources.files("surefoot.reporting")
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
