"""A run directory of behavior 1, as commit 9ef75382 wrote it: `scores_of_behavior_1/`.

Early stopping has a `min_delta` and chose the best checkpoint too, a metric is a mean of nothing,
and a split is evaluated at the end. The run was stopped in its middle.

    PYTHONPATH=CLONE_OF_9EF75382/src python tests/golden/scores_of_behavior_1.py OUT
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surefoot as sf

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from runs_of_behavior_1 import clear

import scored_runs

STORED = Path(__file__).with_suffix("")
SCORES = (0.0, 0.9, 0.905, 0.912, 0.919, 0.908, 0.9)  # after each number of steps


def nothing(outputs: Tensor, targets: Tensor) -> sf.Mean:
    del outputs, targets
    return sf.Mean(0.0, 0)


def build(run_dir: Path | str | None, **settings: Any) -> sf.Run:
    metrics = [scored_runs.scored(SCORES), nothing]
    fixed: dict[str, Any] = {
        "splits": {
            "val": sf.Split(scored_runs.rows(), metrics=metrics),
            "test": sf.Split(scored_runs.rows(), at_end=True),
        },
        "early_stopping": sf.EarlyStopping("max val/score", patience=6, min_delta=0.02),
    }
    return scored_runs.build(run_dir, **(fixed | settings))


def main(out: Path) -> None:
    out = out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    os.chdir(out.parent)
    torch.set_num_threads(1)
    build(out.name, stop_after="4 steps").train()
    clear(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
