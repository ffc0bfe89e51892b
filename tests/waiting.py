"""How tests wait: for a fact, never for a time.

No test asserts how long something took: a busy machine would fail it. Limits here only end what
hangs, so they are long. A test that measures time is marked `timing`, and `make test-timing` runs
those alone. tests/test_busy_machine.py checks both.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600.0


class HangLimit:
    """Says when a wait has lasted so long that it is a hang."""

    def __init__(self, limit_s: float = HANG_S) -> None:
        self.end = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end


def wait_until(fact: Callable[[], bool], *, limit_s: float = HANG_S) -> bool:
    """Wait until `fact()` is true; return False if that hangs."""
    limit = HangLimit(limit_s)
    while not fact():
        if limit.is_over:
            return fact()
        time.sleep(0.01)
    return True


class LogicalClock:
    """A clock that only a test moves: what takes its time calls `advance`, and all else takes
    none.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
