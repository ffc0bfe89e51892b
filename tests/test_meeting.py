"""Ranks that find each other, or do not: waited for at the start for minutes, and afterwards for as long as it takes. (about 8 s)"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from surefoot import meeting, world
from surefoot.errors import ConfigError
from waiting import HANG_S

START_S = 5  # who has not met for so long is given up
STEP = {
    "SLURM_JOB_ID": str(os.getpid()),
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "here",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], list[int]]:
    """Do something as two tasks of a step; returns how each has ended."""
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(meeting, "_START", timedelta(seconds=START_S))

    def both(call: Callable[[int], None]) -> list[int]:
        pids = []
        for rank in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.environ.update(STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
                signal.alarm(int(HANG_S))  # who waits for ever ends all the same
                status = 1
                try:
                    call(rank)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

    return both


@pytest.mark.slow
def test_who_has_met_is_waited_for_longer_than_who_has_not(ranks) -> None:
    def call(rank: int) -> None:
        joined = world.joined("cpu")
        if rank == 1:
            time.sleep(START_S + 1)
        joined.barrier()
        if rank == 0:
            time.sleep(START_S + 1)
        sum_of_ranks = torch.tensor([rank + 1.0])
        joined.add_up(sum_of_ranks)
        assert sum_of_ranks.tolist() == [3.0]

    assert ranks(call) == [0, 0]


@pytest.mark.parametrize("comes", ["and leaves again", pytest.param("never", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_told_in_time(ranks, comes: str) -> None:
    def call(rank: int) -> None:
        if rank == 1:
            if comes == "and leaves again":
                next(meeting.rendezvous(world.placed(os.environ).meeting, rank=1, world_size=2, timeout=meeting._START))
            return
        with pytest.raises(ConfigError, match="rank 0 of 2 does not find the others"):
            world.joined("cpu")

    assert ranks(call) == [0, 0]
