"""What counts as a rank's own time, by clocks and events made up here."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from surefoot.distributed.heartbeat import Heartbeat
from surefoot.distributed.liveness import Beat
from surefoot.distributed.own_times import DeviceTimes, HostTimes

SUMS = {
    "data_wait": 6.0,
    "forward": 25.0,
    "backward": 14.0,
}  # of a step and of another with `slow=2`


class Ticking:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    clock = Ticking()
    monkeypatch.setattr("surefoot.distributed.own_times.perf_counter", lambda: clock.now_s)
    return clock


def step(times: HostTimes | DeviceTimes, clock: Ticking, *, slow: float = 1.0) -> None:
    """One step of two micro-batches: 3 s of data, 1 s of nothing, 2 x 5 s forward, 7 s backward,
    and a second that is shared.
    """
    times.start(0)
    clock.now_s += 3.0
    for work, seconds in (
        ("other", 1.0),
        ("forward", 5.0 * slow),
        ("backward", 7.0),
        ("forward", 5.0),
        ("other", 9.0),
        ("other", 1.0),
    ):
        times.enter(work)  # type: ignore[arg-type]
        clock.now_s += seconds


def test_each_second_of_a_step_counts_once_and_waits_for_other_ranks_do_not(clock: Ticking) -> None:
    times = HostTimes()
    step(times, clock)
    step(times, clock, slow=2)
    assert times.start(2) == {"step": 2, "measured": 3, "at_s": 167.0, "other": 22.0, **SUMS}


def test_a_beat_has_the_times_of_all_earlier_steps_and_a_new_run_begins_at_zero(
    clock: Ticking,
) -> None:
    heart = Heartbeat(HashStore(), rank=0, size=1, host="")
    heart.opened(logs=None, fresh_line="")
    for index, seconds in enumerate((2.0, 4.0, 8.0)):
        heart.at(index, "training")
        heart.times.enter("forward")
        clock.now_s += seconds
    assert heart.beat.spent["step"] == 2
    assert heart.beat.spent["forward"] == 6
    assert heart.beat.spent["at_s"] == 106
    assert Beat.read(heart.beat.written()) == heart.beat
    heart.opened(logs=None, fresh_line="")
    assert heart.beat.spent == {}
    assert heart.times.sums["forward"] == 0


@dataclass
class Event:
    """An event of a device that is `behind_s` behind the host."""

    enable_timing: bool
    behind_s = 0.0
    clock = Ticking()
    created = 0

    def record(self) -> None:
        type(self).created += 1
        self.at_s = self.clock.now_s

    def query(self) -> bool:
        return self.clock.now_s >= self.at_s + self.behind_s

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query(), "reading would wait"
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def events(clock: Ticking, monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    events = type("Events", (Event,), {"clock": clock})
    monkeypatch.setattr(torch.cuda, "Event", events)
    return events


def test_events_of_a_device_give_the_same_times(clock: Ticking, events: type[Event]) -> None:
    times = DeviceTimes()
    step(times, clock)
    step(times, clock, slow=2)
    assert times.start(2) == {"step": 2, "measured": 2, "at_s": 167.0, "other": 2.0, **SUMS}


def test_the_host_never_waits_for_an_event_and_measures_no_step_meanwhile(
    clock: Ticking, events: type[Event]
) -> None:
    events.behind_s = 2 * 31.0 + 8  # two steps and a half
    times = DeviceTimes()
    for _ in range(12):
        step(times, clock)
    assert times.measured == 3
    assert times.sums["forward"] == pytest.approx(3 * 10)


def test_of_short_steps_twenty_are_measured_in_a_second(
    clock: Ticking, events: type[Event]
) -> None:
    times = DeviceTimes()
    for _ in range(4000):
        times.start(0)
        for _ in range(9):
            times.enter("other")
        clock.now_s += 0.001
    assert 75 <= times.measured <= 80
    assert events.created == pytest.approx(2 * times.measured, abs=2)


def test_a_single_process_on_cuda_records_no_events() -> None:
    for size, kind in ((1, HostTimes), (2, DeviceTimes)):
        heart = Heartbeat(HashStore(), rank=0, size=size, host="")
        heart.opened(logs=None, fresh_line="", device="cuda")
        assert isinstance(heart.times, kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_time_of_a_device_is_measured_though_the_host_runs_ahead() -> None:
    times = DeviceTimes()
    for _ in range(3):
        times.start(0)
        time.sleep(0.02)  # the device is idle
        times.enter("forward")
        torch.cuda._sleep(100_000_000)  # tens of milliseconds
        times.enter("other")
        torch.cuda._sleep(400_000_000)
        torch.cuda.synchronize()
        time.sleep(0.05)
    times.start(3)
    assert times.measured == 3
    assert times.sums["data_wait"] >= 0.06
    assert times.sums["forward"] >= 0.06
