"""Ranks that torchrun starts: what is said where one dies, how soon the others end, and that it can
start them again. (90 s)

The real torchrun, and processes that import torch. Silence is noticed after 4 seconds, and not
after 20.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from forked_ranks import PROGRAM, bits, steps_made, surefoot
from stated import lines_naming, numbers_in
from under_torchrun import torchrun
from waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="what became of a process is read from /proc"
    ),
]
SLOW = ["--pause-s", "0.02"]


def test_a_killed_rank_ends_the_others_by_its_closed_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with torchrun(
        tmp_path / "p", "train", PROGRAM, *SLOW, "--run-dir", str(run_dir), silent_s=300
    ) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4, limit_s=HANG_S), group.said
        os.kill(group.pid(1), signal.SIGKILL)
        assert group.wait(seconds=150) == 1, "before silence would have told it"
    (error,) = group.errors
    assert re.search(rf"process {group.pid(1)}\) .* at step \d+", error)
    assert not re.search(r"\d s\b", error), "it was not silent"
    assert "exitcode  : 7" in group.said
    assert group.said.count("Traceback (most recent call last)") == 1, "torchrun's own"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_ends_without_being_killed(tmp_path: Path, rank: int) -> None:
    run_dir = tmp_path / "run"
    with torchrun(tmp_path / "p", "train", PROGRAM, *SLOW, "--run-dir", str(run_dir)) as group:
        assert wait_until(lambda: steps_made(run_dir) >= 4, limit_s=HANG_S), group.said
        os.kill(group.pid(rank), signal.SIGSTOP)
        assert group.wait() == 1
    (error,) = group.errors
    assert re.search(rf"process {group.pid(rank)}\) .*\b4 s, .* at step \d+", error)
    assert "SIGKILL" not in group.said, "torchrun has not waited half a minute for it"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_that_torchrun_starts_again_ends_with_the_same_bits(
    tmp_path: Path, number: int
) -> None:
    undisturbed = tmp_path / "undisturbed"
    run_dir = tmp_path / "run"
    with surefoot(
        tmp_path / "q", "train", PROGRAM, "--nproc", "2", "--run-dir", str(undisturbed)
    ) as group:
        assert group.wait() == 0, group.said
    with torchrun(
        tmp_path / "p", "train", PROGRAM, *SLOW, "--run-dir", str(run_dir), max_restarts=2
    ) as started:
        for attempt, rank in enumerate((1, 0)):
            pid = started.pid(rank, attempt)
            before = steps_made(run_dir)
            assert wait_until(
                lambda before=before: steps_made(run_dir) >= before + 4, limit_s=HANG_S
            ), started.said
            os.kill(pid, number)
        assert started.wait() == 0, started.said
    assert len(started.errors) == 2
    assert bits(run_dir) == bits(undisturbed)


def test_a_refusal_of_a_script_that_all_ranks_meet_is_said_once_and_without_frames(
    tmp_path: Path,
) -> None:
    with torchrun(tmp_path / "p", "unused-parameter") as group:
        assert group.wait() == 1
    (error,) = group.errors
    assert "[unused-parameters]" in group.said
    (problem,) = lines_naming(error, ": unused.weight, unused.bias")
    assert 2 in numbers_in(problem)
    assert group.said.count("Traceback (most recent call last)") == 1, "torchrun's own"


def test_an_error_in_a_scripts_own_data_set_keeps_its_frames_and_is_said_once(
    tmp_path: Path,
) -> None:
    with torchrun(tmp_path / "p", "broken-data") as group:
        assert group.wait() == 1
    assert group.said.count("]: KeyError: 'my own bug'\n") == 1
    assert "in __getitem__" in group.said


def test_a_refusal_of_a_script_before_ranks_meet_is_said_once(tmp_path: Path) -> None:
    with torchrun(tmp_path / "p", "negative-batch") as group:
        assert group.wait() == 1
    (error,) = group.errors
    assert "batch_size = -1" in error


def test_a_refusal_before_ranks_meet_is_said_once(tmp_path: Path) -> None:
    with torchrun(tmp_path / "p", "train", PROGRAM, "--batch-size", "7x") as group:
        assert group.wait() == 1
    assert len(group.errors) == 1
    assert re.search("exitcode  : 2", group.said)


def test_ranks_whose_torchrun_is_killed_while_they_meet_end(tmp_path: Path) -> None:
    with torchrun(tmp_path / "p", "late-on-rank-1", silent_s=300, first_rank_s=1) as group:
        pids = [group.pid(0), group.pid(1)]
        assert wait_until(lambda: _is_waiting(pids[0]), limit_s=HANG_S), group.said
        group.process.kill()
        assert group.wait() == -signal.SIGKILL
    assert group.left() == []


def _is_waiting(pid: int) -> bool:
    """Whether a rank has met nobody yet, and waits for that: it has a connection to the store."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed since it was listed.
            if os.readlink(link).startswith("socket:"):
                return True
    return False
