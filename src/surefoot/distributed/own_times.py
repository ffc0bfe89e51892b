"""The time that a rank works by itself in its steps, by kind of work. Heartbeats report it, and
`run/rank_checks.py` compares ranks.

A slow rank makes all others wait within collectives, so the time of a complete step is the same on
all ranks.
"""

from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

Work = Literal["data_wait", "forward", "backward", "other"]
_BETWEEN_S = 0.05  # between two measured steps on a device: an event takes microseconds


class OwnTimes(Protocol):
    """The seconds of own work in all steps that were measured since the run opened.

    "backward" ends where the sum over ranks begins. A pass whose gradients DDP itself reduces is
    "other", as is all the rest.
    """

    sums: dict[str, float]  # by `Work`

    def start(self, step: int) -> dict[str, float]:
        """Begin a step with "data_wait". Returns the sums over earlier steps, their number, and the
        present time.
        """

    def enter(self, work: Work) -> None:
        """Assign the time from now on to a kind of work."""


class HostTimes:
    """Times of a CPU, whose operations the host waits for. All steps are measured. A call takes 0.2
    us.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {
            "data_wait": 0.0,
            "forward": 0.0,
            "backward": 0.0,
            "other": 0.0,
        }
        self.work: Work = "other"
        self.measured = 0
        self.since = perf_counter()

    def start(self, step: int) -> dict[str, float]:
        self.enter("data_wait")
        self.measured += 1
        return {"step": step, "measured": self.measured, "at_s": self.since, **self.sums}

    def enter(self, work: Work) -> None:
        now = perf_counter()
        self.sums[self.work] += now - self.since
        self.work = work
        self.since = now


class DeviceTimes:
    """Times of a CUDA device between events in its stream, because the host runs ahead. Nothing
    waits for an event.

    "data_wait" is the time in which the device has no work, and copies the batch.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {
            "data_wait": 0.0,
            "forward": 0.0,
            "backward": 0.0,
            "other": 0.0,
        }
        self.measured = 0
        self.next_s = 0.0
        self.is_measuring = False
        self.events: list[tuple[Work, Any]] = []  # of the last measured step

    def start(self, step: int) -> dict[str, float]:
        now = perf_counter()
        if self.events and all(event.query() for _, event in self.events):
            for (work, start), (_, end) in pairwise(self.events):
                self.sums[work] += start.elapsed_time(end) / 1e3
            self.events = []
            self.measured += 1
        self.is_measuring = not self.events and now >= self.next_s
        if self.is_measuring:
            self.next_s = now + _BETWEEN_S
        self.enter("data_wait")
        return {"step": step, "measured": self.measured, "at_s": now, **self.sums}

    def enter(self, work: Work) -> None:
        if self.is_measuring and not (work == "other" and self.events[-1][0] == "other"):
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.events.append((work, event))
