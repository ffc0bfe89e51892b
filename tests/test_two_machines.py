"""Ranks on two machines find each other, whoever started them. (about 10 s; skipped where namespaces are not permitted)"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from two_machines import ADDRESSES, Machines, two_machines

PROGRAM = """
import json, torch
from surefoot.world import joined
world = joined("cpu")
sum_of_ranks = torch.tensor([world.rank + 1.0])
world.add_up(sum_of_ranks)
print(json.dumps([world.rank, world.size, world.local_rank, world.gathered(world.host), float(sum_of_ranks)]))
"""
EACH = [[rank, 2, 0, ["machine0", "machine1"], 3.0] for rank in range(2)]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as both:
        yield both


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def in_step(place: int) -> dict[str, str]:
    """What srun says to the only task of a machine; the machines are called by their addresses, since there are no names to look up."""
    return {
        "SLURM_JOB_ID": "901593",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "10.77.0.[1-2]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(place),
        "SLURM_PROCID": str(place),
        "SLURM_LOCALID": "0",
    }


def told(processes: list[subprocess.Popen[str]]) -> list[Any]:
    """What each says last, all having ended well."""
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_srun_alone(machines: Machines, program: str) -> None:
    started = [machines.start(place, [sys.executable, program], in_step(place)) for place in range(2)]
    assert told(started) == EACH


@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_each(machines: Machines, program: str, kind: str) -> None:
    started = []
    for place in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        if kind == "static":
            command += [f"--node-rank={place}", f"--master-addr={ADDRESSES[0]}", "--master-port=29511"]
        else:
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29512", "--rdzv-id=7"]
            command += [f"--local-addr={ADDRESSES[place]}", f"--rdzv-conf=is_host={1 - place}"]  # no names to look up
        started.append(machines.start(place, [*command, program], {}))
    assert sorted(told(started)) == EACH
