"""Two processes as workers of Ray Train:  python examples/launch/ray_job.py runs/launched

If a worker dies, Ray starts both again, up to three times, and the run resumes from its newest
checkpoint. The directory of
the run must be on storage that all machines share. Install Ray with  pip install "ray[train]".
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

HERE = Path(__file__).resolve().parent


def train_worker(settings: dict[str, str]) -> None:
    """Train as one of the workers. Ray sets the variables that torchrun sets, and surefoot reads
    them.
    """
    sys.path.insert(
        0, str(HERE)
    )  # for the program beside this file; a worker starts in another directory
    import train

    train.build(train.Config(run_dir=settings["run_dir"])).train()


if __name__ == "__main__":
    run_dir = Path(sys.argv[1]).resolve()
    TorchTrainer(
        train_worker,
        train_loop_config={"run_dir": str(run_dir)},
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=False
        ),  # use_gpu=True: one GPU for each worker
        run_config=RunConfig(
            name=run_dir.name,
            storage_path=str(run_dir.parent / "ray"),  # Ray's own records
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
