"""Panels as `panels.json` in a run's directory: make, limit, write and read them."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from surefoot.config.paths import local_path, open_regular
from surefoot.errors import ConfigError, DataError, first_line
from surefoot.tracking.panel_checks import check, is_count
from surefoot.tracking.panels import Example, Image, Panel

FILE = "panels.json"
VERSION = 2  # of the format
MOST_BYTES = 300_000  # it becomes a part of one page
LONGEST_S = 60.0  # after which no further panel is begun

PANELS: dict[str, type[Panel]] = {panel.kind: panel for panel in get_args(Panel)}


@dataclass(frozen=True, kw_only=True)
class Panels:
    """The panels of the weights after `step` steps."""

    step: int
    panels: tuple[Panel, ...]

    def __str__(self) -> str:
        """Name the step, and each panel with its kind."""
        return "\n".join(
            [f"panels of step {self.step:,}", *(f"  {panel.kind:<16} {panel.title}" for panel in self.panels)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON values, as `panels.json` holds it.

        >>> Panels(step=3, panels=()).to_dict()
        {'format_version': 2, 'step': 3, 'panels': []}
        """
        return {"format_version": VERSION, "step": self.step, "panels": [panel_to_dict(panel) for panel in self.panels]}

    def to_json(self) -> str:
        """Write `to_dict()` as the text of `panels.json`."""
        return json.dumps(self.to_dict(), allow_nan=False) + "\n"


def panel_to_dict(panel: Panel) -> dict[str, Any]:
    """A panel as JSON has it, its `kind` first.

    >>> from surefoot.tracking.panels import ConfusionMatrix
    >>> panel_to_dict(ConfusionMatrix(title="val", classes=("cat",), counts=((4,),)))
    {'kind': 'confusion-matrix', 'title': 'val', 'classes': ('cat',), 'counts': ((4,),)}
    """
    return {"kind": panel.kind, **asdict(panel)}


def fitting(panels: Iterable[Panel]) -> tuple[list[Panel], list[Panel]]:
    """The panels that fit on a page, in their order, and the rest.

    >>> from surefoot.tracking.panels import ConfusionMatrix
    >>> fitting([ConfusionMatrix(title="val", classes=(), counts=())])[1]
    []
    """
    fits, left_out = list[Panel](), list[Panel]()
    room = MOST_BYTES - len(Panels(step=2**63, panels=()).to_json())
    for panel in panels:
        size = len(json.dumps(panel_to_dict(panel))) + 2
        (fits if size <= room else left_out).append(panel)
        room -= size if size <= room else 0
    return fits, left_out


def build_panels(
    function: Callable[[Any], Iterable[Panel]],
    model: Any,
    *,
    stop: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = perf_counter,
) -> tuple[list[Panel], list[str]]:
    """The panels of a model, until `stop` is true or a minute has passed, and the reason if some are missing; never raises.

    Panels that the function yielded before it failed stay.

    >>> build_panels(lambda model: 1 / 0, None)
    ([], ['no panels: ZeroDivisionError: division by zero'])
    """
    panels, notes, start_s = list[Panel](), list[str](), now()
    try:
        for panel in function(model):
            if not isinstance(panel, get_args(Panel)):
                kinds = ", ".join(kind.__name__ for kind in get_args(Panel))
                raise ConfigError(f"the run's panels hold a {type(panel).__name__}: give a list of {kinds}")
            panels.append(panel)
            if stop():
                notes.append(f"no more panels than {len(panels)}: told to stop")
                break
            if now() - start_s > LONGEST_S:
                notes.append(f"no more panels than {len(panels)}: they took more than {LONGEST_S:.0f} seconds")
                break
    except Exception as problem:  # whatever a user's function raises ends no run
        which = f"after panel {len(panels)} none" if panels else "no panels"
        kind = "" if isinstance(problem, ConfigError) else f"{type(problem).__name__}: "
        notes.append(f"{which}: {kind}{first_line(problem)}")
    fits, left_out = fitting(panels)
    notes += [
        f"the panel {panel.title!r} is left out: all together may have {MOST_BYTES:,} bytes" for panel in left_out
    ]
    return fits, notes


def read_panels(run: Path | str) -> Panels | None:
    """The panels of a run's directory; None without a file. `DataError` for a file that surefoot did not write."""
    path = local_path(run, setting="run") / FILE
    try:
        with open_regular(path) as file:
            text = file.read(MOST_BYTES + 1)
        check(len(text) <= MOST_BYTES, f"it has more than {MOST_BYTES:,} bytes")
        return panels_from_json(text.decode())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except (ConfigError, UnicodeDecodeError) as problem:
        raise DataError(
            f"{path} holds no panels of a run: {problem}\n  remove it; `surefoot report` makes them anew"
        ) from problem


def panels_from_json(text: str) -> Panels:
    """Read the text that `Panels.to_json` wrote; `ConfigError` for any other.

    >>> panels_from_json(Panels(step=3, panels=()).to_json())
    Panels(step=3, panels=())
    """
    try:
        panels = json.loads(text)
        check(
            isinstance(panels, dict) and panels.keys() == {"format_version", "step", "panels"}, "it is no such object"
        )
        check(panels["format_version"] == VERSION, f"format_version {panels['format_version']!r} is not {VERSION}")
        check(is_count(panels["step"]), f"step is {panels['step']!r}")
        return Panels(step=panels["step"], panels=tuple(_panel(panel.pop("kind"), panel) for panel in panels["panels"]))
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as problem:
        raise ConfigError(f"{type(problem).__name__}: {str(problem)[:100]}") from problem


def _panel(kind: str, values: dict[str, Any]) -> Panel:
    """A panel from its JSON, whose lists become tuples; the panel checks its values itself."""
    for name, part in (("examples", Example), ("images", Image)):
        if name in values:
            values[name] = [part(**one) for one in values[name]]
    return PANELS[kind](**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
