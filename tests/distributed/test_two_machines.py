"""Ranks on two machines find each other, whoever started them. (about 6 s, slow ones 20; skipped
where namespaces are not permitted)"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from forked import Forked
from rank_processes import forks
from small_runs import build
from two_machines import ADDRESSES, Machines, two_machines
from waiting import HANG_S, wait_until

PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import small_runs
run = small_runs.build({out!r}, length="2 epochs", splits=None, early_stopping=None, optimizer=small_runs.sf.optim.sgd(lr=0.1), ema=None)
run.train()
world = run.parts.world
weight = next(run.state.models["model"].parameters()).detach().flatten()[:3].tolist()
print(json.dumps([world.rank, world.size, world.local_rank, world.gathered(world.host), run.state.step, weight]))
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as both:
        yield both


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path / "run")))
    return str(file)


def in_step(place: int) -> dict[str, str]:
    """What srun says to the only task of a machine; the machines are called by their addresses,
    since there are no names to look up.
    """
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
    """What each says last, all having ended well; torchrun may say something of itself after that,
    where the other was gone first.
    """
    outputs = [process.communicate(timeout=HANG_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [
        json.loads([line for line in output.splitlines() if line.startswith(("[0,", "[1,"))][-1])
        for output in outputs
    ]


def told_by_forked(processes: list[Forked], said: list[Path]) -> list[Any]:
    """As `told`, of processes that this one has forked."""
    assert wait_until(lambda: all(process.poll() is not None for process in processes))
    for process in processes:
        process.stdin.close()
    outputs = [path.read_text() for path in said]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def is_one_run_of_both(told_by_each: list[Any], program: str) -> None:
    """Both were there to the end of the run that rank 0 wrote, and have its weights: those of one
    process, to rounding.
    """
    (rank, size, local_rank, hosts, step, weight), other = sorted(told_by_each)
    assert [rank, size, local_rank, step] == [0, 2, 0, 13]
    assert other == [1, 2, 0, hosts, step, weight]
    assert sorted(hosts) == ["machine0", "machine1"]
    alone = build(
        None,
        length="2 epochs",
        splits=None,
        early_stopping=None,
        optimizer=sf.optim.sgd(lr=0.1),
        ema=None,
    )
    alone.train()
    expected = next(alone.state.models["model"].parameters()).detach().flatten()[:3]
    torch.testing.assert_close(
        torch.tensor(weight), expected, rtol=1e-5, atol=1e-5
    )  # law 2, SGD in float32
    assert (Path(program).parent / "run" / "checkpoints" / "step-00000013").is_dir()


@pytest.mark.slow
@forks
def test_srun_alone(machines: Machines, program: str, tmp_path: Path) -> None:
    said = [tmp_path / f"said-{place}" for place in range(2)]

    def run() -> None:
        exec(compile(Path(program).read_text(), program, "exec"), {})

    processes = [machines.fork(place, run, in_step(place), said=said[place]) for place in range(2)]
    is_one_run_of_both(told_by_forked(processes, said), program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "c10d"])
def test_torchrun_on_each(machines: Machines, program: str, kind: str) -> None:
    started = []
    for place in range(2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
        ]
        if kind == "static":
            command += [
                f"--node-rank={place}",
                f"--master-addr={ADDRESSES[0]}",
                "--master-port=29511",
            ]
        else:
            command += [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={ADDRESSES[0]}:29512",
                "--rdzv-id=7",
            ]
            command += [
                f"--local-addr={ADDRESSES[place]}",
                f"--rdzv-conf=is_host={1 - place}",
            ]  # no names to look up
        started.append(machines.start(place, [*command, program], {}))
    is_one_run_of_both(told(started), program)
