"""Ranks of a real run that die, stop, fail and are told to stop: what is said, how it ends, and
that nothing is left. (30 s)

Where a rank is stopped, silence is noticed after 4 seconds and not after 20: a run that waits is a
test that waits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from forked_ranks import PROGRAM, Launched, bits, steps_made, surefoot
from stated import numbers_by_line, numbers_in
from waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
SILENT_S = 4.0
SLOW = ["--pause-s", "0.02", "--nproc", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    command = ["train", PROGRAM, "--nproc", "2", "--run-dir", str(run_dir)]
    with surefoot(run_dir.parent / "p", *command) as group:
        assert group.wait() == 0, group.said
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error: ")]


def train_slowly(
    run_dir: Path, *flags: str, silent_s: float = HANG_S
) -> AbstractContextManager[Launched]:
    """`surefoot train` on two ranks, slow enough for something to happen in its midst."""
    command = ["train", PROGRAM, *SLOW, *flags, "--run-dir", str(run_dir)]
    return surefoot(run_dir.parent / "p", *command, silent_s=silent_s)


def test_a_killed_rank_is_named_in_one_message(run_dir: Path, tmp_path: Path) -> None:
    with train_slowly(run_dir) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        os.kill(group.pid(1), signal.SIGKILL)
        assert group.wait() == 128 + signal.SIGKILL
    (error,) = errors(group.said)
    killed = f"process {group.pid(1)}) was killed by SIGKILL"
    before_the_error, _, _ = group.said.partition("error: ")
    assert killed in before_the_error  # at once
    _, separator, end_of_error = error.partition(killed)
    assert separator == killed
    last_step, *_ = numbers_in(end_of_error)
    assert last_step >= steps_made(run_dir)  # the last that was heard of
    assert "rank-1.stderr" not in group.said


@pytest.mark.slow
def test_a_stopped_rank_is_named_in_one_message_and_killed(run_dir: Path, tmp_path: Path) -> None:
    with train_slowly(run_dir, silent_s=SILENT_S) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        os.kill(group.pid(1), signal.SIGSTOP)
        assert group.wait() == 7
    (error,) = errors(group.said)
    # by the other rank, or the launcher
    reason = r"has been (silent|stopped) for 4 s, last heard from at step \d+"
    assert re.search(rf"process {group.pid(1)}\) {reason}", error)


@pytest.mark.slow
def test_rank_0_that_is_stopped_is_named_too(run_dir: Path, tmp_path: Path) -> None:
    with train_slowly(run_dir, silent_s=SILENT_S) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        os.kill(group.pid(0), signal.SIGSTOP)
        assert group.wait() == 7
    first_error, *_ = errors(group.said)
    assert "rank 0 (" in first_error


@pytest.mark.slow
def test_an_error_in_the_data_of_one_rank_is_named_and_its_status_kept(
    run_dir: Path, tmp_path: Path
) -> None:
    with train_slowly(run_dir, "--wrong", "raise") as group:
        assert group.wait() == 3
    (error,) = errors(group.said)
    assert "rank 1 (" in error
    assert "OSError: the disk of sample 7 is gone" in error
    _, _, below = group.said.partition(f"{error}\n")
    where, code, traceback, how_to_resume = below.splitlines()
    sample = re.fullmatch(r"  .*: dataset\[(\d+)\]", where)
    assert sample is not None
    assert code == "  [sample-unreadable]"
    assert traceback.endswith(f" {run_dir / 'crash'}")
    assert how_to_resume.startswith("  ")

    (file,) = (run_dir / "crash").glob("step-*-rank-1.json")
    first, second = json.loads(file.read_text())["samples"]  # this rank's micro-batches
    assert len(first) == len(second) == 2
    assert int(sample[1]) in first + second


@pytest.mark.slow
def test_a_rank_that_ends_with_a_status_of_its_own_is_named_once(
    run_dir: Path, tmp_path: Path
) -> None:
    with train_slowly(run_dir, "--wrong", "exit") as group:
        assert group.wait() == 9
    (error,) = errors(group.said)
    assert "status 9, " in error


def test_ctrl_c_while_starting_says_that_nothing_was_started(run_dir: Path, tmp_path: Path) -> None:
    with train_slowly(run_dir, "--slow-start-s", "30") as group:
        assert group.pid(1) > 0
        time.sleep(1)
        group.process.send_signal(signal.SIGINT)
        assert group.wait() == 130
    assert group.said.split() == ["nothing", "was", "started"]


@pytest.mark.slow
def test_a_rank_that_left_its_loop_alone_is_named_with_the_cure(tmp_path: Path) -> None:
    with surefoot(tmp_path / "p", "script") as group:
        assert group.wait() == 7
    assert "rank 1 (" in group.said
    last_numbers = [numbers[-2:] for numbers in numbers_by_line(group.said)]
    assert [5, 6] in last_numbers
    assert "run.stop()" in group.said


@pytest.mark.slow
@pytest.mark.parametrize("whom", [pytest.param("launcher", marks=pytest.mark.slow), "rank"])
def test_sigterm_to_one_of_them_saves_one_step_and_goes_on_to_the_same_bits(
    run_dir: Path, tmp_path: Path, undisturbed: Path, whom: str
) -> None:
    with train_slowly(run_dir) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        pid = group.pid(1) if whom == "rank" else group.process.pid
        os.kill(pid, signal.SIGTERM)
        assert group.wait() == 143
    assert errors(group.said) == []
    assert 4 < steps_made(run_dir) < 40
    with surefoot(
        tmp_path / "q", "resume", str(run_dir), "--pause-s", "0", "--nproc", "2"
    ) as group:
        assert group.wait() == 0
    assert bits(run_dir) == bits(undisturbed)


def test_a_killed_launcher_leaves_nothing_behind(run_dir: Path, tmp_path: Path) -> None:
    with train_slowly(run_dir, "--workers", "1") as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        group.process.kill()
        assert group.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_run_that_is_started_again_ends_with_the_same_bits(
    run_dir: Path, tmp_path: Path, undisturbed: Path, number: int
) -> None:
    with train_slowly(run_dir, "--max-restarts", "1", silent_s=SILENT_S) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 8)
        os.kill(group.pid(1), number)
        assert group.wait() == 0
    assert "restarting with 2 processes (restart 1 of 1)" in group.said
    assert bits(run_dir) == bits(undisturbed)


@pytest.mark.slow
def test_the_ranks_that_are_left_go_on_where_a_range_was_asked_for(
    run_dir: Path, undisturbed: Path, tmp_path: Path
) -> None:
    flags = [
        "--pause-s",
        "0.02",
        "--nproc",
        "1:4",
        "--max-restarts",
        "1",
        "--run-dir",
        str(run_dir),
    ]
    with surefoot(tmp_path / "p", "train", PROGRAM, *flags) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4)
        os.kill(group.pid(3), signal.SIGKILL)
        assert group.wait() == 0
    assert "restarting with 3 processes" in group.said, (
        "4 micro-batches a step, and three ranks left"
    )
    assert steps_made(run_dir) == 40
    # the states name other numbers of ranks
    ended = bits(run_dir)
    expected = bits(undisturbed)
    for part in ("step", "tensors", "records"):
        assert ended[part] == expected[part]
