"""The panels of a run: made of its model by the run's own function, within limits, and written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, get_args

from surefoot.errors import ConfigError, first_line
from surefoot.panels import MOST_BYTES, Panel, fitting

LONGEST_S = 60.0  # after which no further panel is begun
Makes = Callable[[Any], Iterable[Panel]]


@dataclass(frozen=True)
class Gallery:
    """The panels that were made, and a line for each reason why there are not more."""

    panels: tuple[Panel, ...]
    told: tuple[str, ...] = ()


def made(
    function: Makes,
    model: Any,
    *,
    stop: Callable[[], bool] = lambda: False,
    longest_s: float = LONGEST_S,
    now: Callable[[], float] = perf_counter,
) -> Gallery:
    """The panels of a model, one after the other, until `stop` says so or `longest_s` are over; raises nothing.

    What the function has yielded before it failed is kept.

    >>> made(lambda model: 1 / 0, None).told
    ('no panels: ZeroDivisionError: division by zero',)
    """
    found: list[Panel] = []
    told: list[str] = []
    begun = now()
    try:
        for panel in function(model):
            if not isinstance(panel, get_args(Panel)):
                kinds = ", ".join(kind.__name__ for kind in get_args(Panel))
                raise ConfigError(f"the run's panels hold a {type(panel).__name__}: give a list of {kinds}")
            found.append(panel)
            if stop():
                told.append(f"no more panels than {len(found)}: told to stop")
                break
            if now() - begun > longest_s:
                told.append(f"no more panels than {len(found)}: they took more than {longest_s:.0f} seconds")
                break
    except Exception as problem:  # whatever a user's function raises ends no run
        kind = "" if isinstance(problem, ConfigError) else f"{type(problem).__name__}: "
        which = f"after panel {len(found)} none" if found else "no panels"
        told.append(f"{which}: {kind}{first_line(problem)}")
    kept, left_out = fitting(found)
    told += [f"the panel {panel.title!r} is left out: all together may have {MOST_BYTES:,} bytes" for panel in left_out]
    return Gallery(tuple(kept), tuple(told))
