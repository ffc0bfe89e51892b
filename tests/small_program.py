"""A small run for `surefoot train FILE.py:build --nproc 2`, slow enough to be killed in its midst,
that can go wrong on one rank.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import surefoot as sf

sys.path.insert(0, str(Path(__file__).parent))

import small_runs


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings. `wrong` happens on rank `where`, when so many samples are read as `when` steps
    have.
    """

    run_dir: str | None = None
    batch_size: int = 8
    micro_batch_size: int = 2
    length: str = "40 steps"
    pause_s: float = 0.0
    """How long each sample takes."""
    workers: int = 0
    save_every: str = "4 steps"
    slow_start_s: float = 0.0
    wrong: str | None = None
    where: int = 1
    when: int = 24  # the checks of a start read as many as twelve


class Samples(small_runs.Augmented):
    """The samples, which take their time, and one of which may be wrong."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.read = 0

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        config = self.config
        time.sleep(config.pause_s)
        self.read += 1
        here = os.environ.get("RANK", "0") == str(config.where)
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if here and first and config.wrong is not None and self.read == 4 * config.when:
            if config.wrong == "raise":
                raise OSError("the disk of sample 7 is gone")
            if config.wrong == "exit":
                os._exit(9)
            os.kill(os.getpid(), int(config.wrong))
        return super().__getitem__(sample)


def leave_early() -> None:
    """A script whose loop has a `break` on rank 1 alone."""
    with build(Config(micro_batch_size=4)) as run:
        for step in run:
            if step.index == 5 and os.environ["RANK"] == "1":
                break


def build(config: Config) -> sf.Run:
    """The run."""
    time.sleep(config.slow_start_s)
    changes: dict[str, Any] = {
        name: getattr(config, name) for name in ("batch_size", "micro_batch_size", "length")
    }
    return small_runs.build(
        config.run_dir,
        train_data=Samples(config),
        workers=config.workers,
        save_every=config.save_every,
        **changes,
    )
