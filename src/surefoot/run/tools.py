"""The tools that a run uses, each imported when it is needed: findings while it trains, the look at a diverged step, the page.

Diagnose, replay and report are imported by this file, `live_findings.py` and `divergence.py` alone, so the core runs without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from surefoot.checkpoint.format import Contents
from surefoot.errors import DivergedError
from surefoot.run.components import RunComponents

if TYPE_CHECKING:
    from surefoot.run.live_findings import Remarks


def remarks_of(parts: RunComponents, *, resumed: bool) -> list[Remarks]:
    """Return the sink that says findings while the run trains; none on ranks that do not speak, and without a console."""
    if parts.console is None or not parts.world.is_main:
        return []
    from surefoot.run.live_findings import remarks

    return [remarks(parts, resumed=resumed)]


def diverged(parts: RunComponents, packed: Callable[[], Contents], *, protected: tuple[int, ...]) -> DivergedError:
    """Save the last good state, look at the first bad step, and return the error that ends the run. Collective."""
    from surefoot.run.divergence import ended

    return ended(parts, packed, protected=protected)


def write_report(parts: RunComponents) -> None:
    """Write the page on the run, once all else is on disk; it never breaks what it tells of."""
    if parts.settings.report and parts.directory is not None and parts.world.is_main:
        from surefoot.report.write import report_at_end

        report_at_end(parts.directory.path, warn=parts.say)
