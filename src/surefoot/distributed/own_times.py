"""The time that a rank works by itself in its steps, by kind of work. Heartbeats report it, and `run/rank_checks.py` compares ranks.

A slow rank makes all others wait within collectives, so the time of a complete step is the same on all ranks.
"""

import time
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

Work = Literal["data_wait", "forward", "backward"]
_BETWEEN_S = 0.05  # between two measured steps on a device: an event takes 2 us


class OwnTimes(Protocol):
    """The seconds of own work in all steps that were measured since the run opened.

    "backward" ends where the sum over ranks begins. A pass whose gradients DDP itself reduces does not count.
    """

    sums: dict[str, float]  # by `Work`
    measured: int  # number of steps in `sums`
    since: float  # when the step or the latest work began

    def enter(self, work: Work | None) -> None:
        """Assign the time from now on to a kind of work, or to none. Each step begins with "data_wait"."""


class HostTimes:
    """Times of a CPU, whose operations the host waits for. All steps are measured; a call takes 0.2 us."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"data_wait": 0.0, "forward": 0.0, "backward": 0.0}
        self.measured, self.since = 0, 0.0
        self.work: Work | None = None

    def enter(self, work: Work | None) -> None:
        now = time.perf_counter()
        if self.work is not None:
            self.sums[self.work] += now - self.since
        if work == "data_wait":
            self.measured += 1
        self.work, self.since = work, now


class DeviceTimes:
    """Times between events in the stream of a CUDA device, since the host runs ahead of it. Nothing waits for an event.

    "data_wait" is the time in which the device has no work, and copies the batch.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {"data_wait": 0.0, "forward": 0.0, "backward": 0.0}
        self.measured, self.since = 0, time.perf_counter()
        self.events: list[tuple[Work | None, Any]] = []  # of the last measured step
        self.is_measuring, self.next_s = False, 0.0

    def enter(self, work: Work | None) -> None:
        if work == "data_wait":
            self.since = time.perf_counter()
            if self.events and all(event.query() for _, event in self.events):
                for (kind, start), (_, end) in pairwise(self.events):
                    if kind is not None:
                        self.sums[kind] += start.elapsed_time(end) / 1e3
                self.events, self.measured = [], self.measured + 1
            self.is_measuring = not self.events and self.since >= self.next_s
            if self.is_measuring:
                self.next_s = self.since + _BETWEEN_S
        if self.is_measuring and not (work is None and self.events[-1][0] is None):
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.events.append((work, event))
