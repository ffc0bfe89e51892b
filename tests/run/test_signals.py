"""What a run does when it is told something from outside: save and go on, end at once, end before
its time is over. (about 15 s)
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rank_processes import Outcome, Ranks
from small_runs import build, loss, train
from stated import lines_naming, numbers_in
from surefoot.run.signals import Signals
from waiting import wait_until


def slow_run(run_dir: str, changes: dict[str, Any]) -> None:
    """Steps of a tenth of a second, of which only the first is saved unasked."""

    def slow(model, batch):
        time.sleep(0.05)
        return loss(model, batch)

    settings = {
        "length": "400 steps",
        "save_every": "100000 steps",
        "log_every": "2 steps",
        "splits": None,
    }
    train(build(run_dir, loss=slow, console=True, early_stopping=None, **settings, **changes))


class Process:
    """A run in a process of its own that `ranks` forks."""

    def __init__(self, ranks: Ranks, place: Path) -> None:
        self.ranks = ranks
        self.place = place
        self.pid = int((place / "pid-0").read_text())

    @property
    def is_over(self) -> bool:
        return (self.place / "status-0").exists()

    @property
    def text(self) -> str:
        file = self.place / "text-0"
        return file.read_text() if file.exists() else ""

    def end(self) -> Outcome:
        (outcome,) = self.ranks.outcomes(self.place)
        return outcome


@pytest.fixture
def started(tmp_path: Path, ranks: Ranks):
    processes: list[Process] = []

    def start(**changes: Any) -> Process:
        place = ranks.start(1, slow_run, run_dir=str(tmp_path / "run"), changes=changes)
        process = Process(ranks, place)
        processes.append(process)
        assert wait_until(lambda: process.is_over or "\nstep=2/" in process.text)
        return process

    yield start
    for process in processes:
        if not process.is_over:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.end()


def saved_steps(tmp_path: Path) -> list[int]:
    checkpoints = (tmp_path / "run" / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints)


@pytest.mark.slow
def test_sigusr1_saves_and_the_run_goes_on(started, tmp_path):
    process = started()
    os.kill(process.pid, signal.SIGUSR1)
    assert wait_until(lambda: len(saved_steps(tmp_path)) == 2)
    assert not process.is_over
    records = tmp_path / "run" / "metrics.jsonl"
    size = records.stat().st_size
    assert wait_until(lambda: records.stat().st_size > size)


def test_a_second_signal_ends_at_once_and_says_which_checkpoint_stands(started, tmp_path):
    process = started(ema=None)
    os.kill(process.pid, signal.SIGSTOP)  # both signals are waiting before it can answer the first
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    ended = process.end()
    assert ended.status in (130, 143)
    (line,) = lines_naming(ended.text, " newest checkpoint ")
    sentence, _, _command = line.partition(" with: ")
    assert numbers_in(sentence) == [0]  # its step
    assert saved_steps(tmp_path) == [0]


@pytest.mark.timing
def test_a_time_limit_saves_before_it_is_over_and_ends_with_0(started, tmp_path):
    ended = started(time_limit="3 s").end()
    assert ended.status == 0, ended.text
    assert "stopped by time_limit at step" in ended.text
    assert saved_steps(tmp_path)[-1] > 2


@pytest.mark.timing
def test_a_time_limit_leaves_room_for_the_longest_step(tmp_path: Path) -> None:
    """Steps of 0.7 s under a limit of 6 s: one that would end after it is not begun. What looks at
    the loss first takes 2 s.
    """

    def slow(model, batch):
        time.sleep(0.35)  # two micro-batches a step
        return loss(model, batch)

    run = build(
        tmp_path / "run",
        loss=slow,
        time_limit="6 s",
        splits=None,
        early_stopping=None,
        check_state=False,
    )
    begun = time.monotonic()  # as the limit counts
    run.train()
    assert time.monotonic() - begun < 6
    assert 2 <= run.state.step <= 6


def test_a_process_that_the_user_forked_does_not_hold_up_the_end_of_a_run() -> None:
    """Workers of the user's own loader outlive the run, and have a copy of every socket."""
    signals = Signals(lambda: "", say=print)
    signals.install()
    forked = os.fork()
    if forked == 0:
        signal.alarm(20)
        signal.pause()
    signals.restore()
    still_runs = os.waitpid(forked, os.WNOHANG) == (0, 0)
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    assert still_runs


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1)])
def test_runs_that_overlap_leave_the_handlers_of_before_in_any_order(
    order: tuple[int, ...],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    runs = [Signals(lambda: "", say=lambda text: None) for _ in range(3)]
    for run in runs:
        run.install()
    still_open = list(runs)
    for index in order:
        runs[index].restore()
        still_open.remove(runs[index])
        if still_open:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_until(lambda: still_open[-1].stop == signal.SIGTERM)
            still_open[-1].stop = None
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_of_the_user_between_two_runs_stays() -> None:
    def handler(number: int, frame: Any) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    first = Signals(lambda: "", say=lambda text: None)
    second = Signals(lambda: "", say=lambda text: None)
    first.install()
    signal.signal(signal.SIGTERM, handler)
    second.install()
    first.restore()
    second.restore()
    try:
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
