"""examples/launch/slurm.sh under a Slurm of one machine: pre-empted, requeued, and the same bits in
the end. (about 12 s)
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_slurm import PROGRAM, Job, installed, submitted, weights
from waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "examples" / "launch" / "slurm.sh"


class Cluster:
    """Jobs of the example's script, with its sizes made small and the rest as it is."""

    def __init__(self, place: Path) -> None:
        self.place = place / "slurm"
        self.environment = installed(place / "slurm")
        (place / "program.py").write_text(PROGRAM)
        text = (
            SCRIPT.read_text()
            .replace("--ntasks-per-node=8", "--ntasks-per-node=1")
            .replace("gpus-per-node=8", "gpus-per-node=0")
        )
        (place / "job.sh").write_text(text)
        self.jobs: list[Job] = []

    def submit(self, *arguments: str) -> Job:
        done = subprocess.run(
            ["sbatch", "job.sh", *arguments],
            env=self.environment,
            cwd=self.place.parent,
            check=True,
            capture_output=True,
            text=True,
        )
        self.jobs.append(submitted(self.place, done.stdout))
        return self.jobs[-1]

    def log(self, job: Job) -> str:
        return (self.place.parent / f"surefoot-{job.number}.log").read_text()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    for job in found.jobs:
        job.signal_tasks(signal.SIGKILL)


@pytest.mark.slow
def test_a_pre_empted_job_is_requeued_and_ends_with_the_bits_of_one_that_was_left_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = cluster.submit("program.py:build", "--run-dir", "preempted", "--pause-s", "0.03")
    left_alone = cluster.submit(
        "program.py:build", "--run-dir", "left-alone"
    )  # at the same time, on the same machine
    records = tmp_path / "preempted" / "metrics.jsonl"
    assert wait_until(lambda: records.exists() and '"step": 3,' in records.read_text())
    job.signal_tasks(signal.SIGTERM)
    job.wait()
    left_alone.wait()
    assert job.statuses == [143, 0], cluster.log(job)
    assert left_alone.statuses == [0]
    assert weights(tmp_path / "preempted") == weights(tmp_path / "left-alone")


def test_a_job_that_is_refused_is_not_requeued(cluster: Cluster) -> None:
    job = cluster.submit("gpt", "--outt", "x")
    job.wait()
    assert job.statuses == [2]
    assert "outt" in cluster.log(job)
