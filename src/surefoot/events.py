"""What ended a sitting, in a few words for the records."""

from __future__ import annotations

import signal

from surefoot.errors import DivergedError, first_line
from surefoot.parts import Parts
from surefoot.wishes import Wishes


def ended(parts: Parts, wishes: Wishes) -> str:
    """How a sitting ended that did not fail."""
    if wishes.ended_by is not None:
        where = f" on rank {wishes.told_rank}" if wishes.told_rank else ""
        return f"stopped by {signal.Signals(wishes.ended_by).name}{where}"
    if parts.state.step >= parts.length.steps:
        return "finished"
    if parts.out_of_patience:
        return "stopped early"
    if parts.state.step >= parts.timetable.stop_step:
        return "stopped by stop_after"
    if wishes.out_of_time:
        return "stopped by time_limit"
    if wishes.asked_to_stop:
        return "stopped by run.stop()"
    return "stopped by another rank" if wishes.stop_agreed else "stopped by break"


def failed(problem: BaseException) -> str:
    """What a sitting failed of.

    >>> failed(ValueError("no such thing\\nat all")), failed(DivergedError("loss became non-finite"))
    ('failed: ValueError: no such thing', 'diverged')
    """
    if isinstance(problem, DivergedError):
        return "diverged"
    if isinstance(problem, Exception):
        return f"failed: {type(problem).__name__}: {first_line(problem)}"
    return f"left by {type(problem).__name__}"
