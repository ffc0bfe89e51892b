"""Building of panels, and their storage in `panels.json` of a run's directory."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from surefoot.config.paths import open_regular, run_path
from surefoot.errors import ConfigError, DataError, error_as_json, first_line
from surefoot.tracking.panel_checks import check_size, is_count, wrong_type, wrong_value
from surefoot.tracking.panels import Example, Image, Panel

FILE = "panels.json"
VERSION = 2  # of the file format
MOST_BYTES = 300_000  # the file is embedded in a page
LONGEST_S = 60.0  # no panel is started after this time

PANELS: dict[str, type[Panel]] = {panel.kind: panel for panel in get_args(Panel)}


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The panels computed from the weights after `step` steps."""

    step: int
    panels: tuple[Panel, ...]

    def __str__(self) -> str:
        lines = [f"panels of step {self.step:,}"]
        lines += [f"  {panel.kind:<16} {panel.title}" for panel in self.panels]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the panels as JSON values, in the format of `panels.json`.

        >>> Panels(step=3, panels=()).to_dict()
        {'format_version': 2, 'step': 3, 'panels': []}
        """
        return {
            "format_version": VERSION,
            "step": self.step,
            "panels": [panel_to_dict(panel) for panel in self.panels],
        }

    def to_json(self) -> str:
        """Return the text of `panels.json`."""
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"


def panel_to_dict(panel: Panel) -> dict[str, Any]:
    """Return a panel as a JSON dictionary, with `kind` as its first key.

    >>> from surefoot.tracking.panels import ConfusionMatrix
    >>> panel_to_dict(ConfusionMatrix(title="val", classes=("cat",), counts=((4,),)))
    {'kind': 'confusion-matrix', 'title': 'val', 'classes': ('cat',), 'counts': ((4,),)}
    """
    return {"kind": panel.kind, **asdict(panel)}


def fitting(panels: Iterable[Panel]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels that fit on a page, and the panels that do not fit, both in order."""
    fits: list[Panel] = []
    left_out: list[Panel] = []
    room = MOST_BYTES - len(Panels(step=2**63, panels=()).to_json())
    for panel in panels:
        size = len(json.dumps(panel_to_dict(panel))) + 2
        if size <= room:
            fits.append(panel)
            room -= size
        else:
            left_out.append(panel)
    return fits, left_out


def build_panels(
    function: Callable[[Any], Iterable[Panel]],
    model: Any,
    *,
    stop: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = perf_counter,
) -> tuple[list[Panel], list[str]]:
    """Return the panels of a model and warnings, built until `stop` returns True or a minute has
    passed; raise no error.

    Panels yielded before an exception are kept.

    >>> build_panels(lambda model: 1 / 0, None)
    ([], ['no panels: ZeroDivisionError: division by zero'])
    """
    panels: list[Panel] = []
    notes: list[str] = []
    start_s = now()
    try:
        for panel in function(model):
            if not isinstance(panel, get_args(Panel)):
                kinds = ", ".join(kind.__name__ for kind in get_args(Panel))
                raise wrong_type("it", panel, f"one of {kinds}")
            panels.append(panel)
            if stop():
                notes.append(f"panels after number {len(panels)} are missing: a stop was requested")
                break
            if now() - start_s > LONGEST_S:
                notes.append(
                    f"panels after number {len(panels)} are missing: building took over {LONGEST_S:.0f} s"
                )
                break
    except Exception as problem:  # an exception in a user's function does not end the run
        which = f"panels after number {len(panels)} are missing" if panels else "no panels"
        kind = "" if isinstance(problem, ConfigError) else f"{type(problem).__name__}: "
        notes.append(f"{which}: {kind}{first_line(problem)}")
    fits, left_out = fitting(panels)
    for panel in left_out:
        notes.append(
            f"the panel {panel.title!r} is left out: all panels may have {MOST_BYTES:,} bytes together"
        )
    return fits, notes


def read_panels(run: Path | str) -> Panels | None:
    """Read the panels of a run's directory, or return None without a file; raise `DataError` if
    surefoot did not write the file.
    """
    path = run_path(run, setting="run") / FILE
    try:
        with open_regular(path) as file:
            text = file.read(MOST_BYTES + 1)
        check_size(len(text), "bytes in its file", most=MOST_BYTES)
        return panels_from_json(text.decode())
    except FileNotFoundError:
        return None
    except (ConfigError, OSError, UnicodeDecodeError) as problem:
        raise DataError(
            "panels-unreadable",
            problem=f"{path} is not a file of panels",
            reason=first_line(problem),
            remedy="remove it; `surefoot report` builds it again",
            path=path,
            cause=error_as_json(problem),
        ) from problem


def panels_from_json(text: str) -> Panels:
    """Parse the result of `Panels.to_json`; raise `ConfigError` for any other text.

    >>> panels_from_json(Panels(step=3, panels=()).to_json())
    Panels(step=3, panels=())
    """
    try:
        panels = json.loads(text)
        if panels.keys() != {"format_version", "step", "panels"}:
            raise KeyError(*panels)
        if panels["format_version"] != VERSION:
            raise wrong_value("format_version", panels["format_version"], f"{VERSION}")
        if not is_count(panels["step"]):
            raise wrong_value("step", panels["step"], "an integer, 0 or more")
        return Panels(
            step=panels["step"],
            panels=tuple(_panel(panel.pop("kind"), panel) for panel in panels["panels"]),
        )
    except (
        ValueError,
        TypeError,
        ArithmeticError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as problem:
        raise ConfigError(
            "panels-malformed",
            problem="a panel cannot be shown: its JSON is not what surefoot writes",
            reason=f"{type(problem).__name__}: {str(problem)[:100]}",
        ) from problem


def _panel(kind: str, values: dict[str, Any]) -> Panel:
    for name, part in (("examples", Example), ("images", Image)):
        if name in values:
            values[name] = [part(**one) for one in values[name]]
    return PANELS[kind](**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(part) for part in value)
    return value
