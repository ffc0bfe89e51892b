"""What a run does when it is told something from outside: save and go on, end at once, end before its time is over. (about 15 s)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from waiting import HANG_S, wait_until

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
import torch
from small_runs import build, loss, train

def slow(model, batch):
    time.sleep(0.05)
    return loss(model, batch)

train(build(sys.argv[1], loss=slow, length="400 steps", save_every="100000 steps", console=True, log_every="2 steps", evaluate=None,
            early_stopping=None, {settings}))
"""


@pytest.fixture
def started(tmp_path: Path):
    processes = []

    def start(settings: str = "") -> subprocess.Popen[str]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(tests=str(Path(__file__).parents[1]), settings=settings))
        process = subprocess.Popen(
            [sys.executable, str(program), str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        for line in process.stdout:
            if line.startswith("step=2/"):
                break
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def saved_steps(tmp_path: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_sigusr1_saves_and_the_run_goes_on(started, tmp_path):
    process = started()
    os.kill(process.pid, signal.SIGUSR1)
    assert wait_until(lambda: len(saved_steps(tmp_path)) == 2)
    assert process.poll() is None
    records = tmp_path / "run" / "metrics.jsonl"
    size = records.stat().st_size
    assert wait_until(lambda: records.stat().st_size > size)


def test_a_second_signal_ends_at_once_and_says_which_checkpoint_stands(started, tmp_path):
    process = started("optimizer=__import__('surefoot').sgd(lr=1e-3), ema=None")
    os.kill(process.pid, signal.SIGSTOP)  # both signals are waiting before it can answer the first
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode in (130, 143)
    assert "ending at once; the newest checkpoint is of step 0" in errors
    assert saved_steps(tmp_path) == [0]


@pytest.mark.timing
def test_a_time_limit_saves_before_it_is_over_and_ends_with_0(started, tmp_path):
    process = started("time_limit='3 s'")
    output, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, errors
    assert "stopped at step" in output
    assert saved_steps(tmp_path)[-1] > 2


@pytest.mark.timing
def test_a_time_limit_leaves_room_for_the_longest_step(tmp_path: Path) -> None:
    """Steps of 0.7 s under a limit of 6 s: one that would end after it is not begun. What looks at the loss first takes 2 s."""
    from small_runs import build, loss

    def slow(model, batch):
        time.sleep(0.35)  # two micro-batches a step
        return loss(model, batch)

    run = build(tmp_path / "run", loss=slow, time_limit="6 s", evaluate=None, early_stopping=None, check_state=False)
    begun = time.monotonic()  # as the limit counts
    run.train()
    assert time.monotonic() - begun < 6
    assert 2 <= run.state.step <= 6
