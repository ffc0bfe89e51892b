"""Ranks that the real torchrun starts, each a process of its own; this file is also what they run.

They are what `torchrun -m surefoot ...` starts, and two things more: each leaves its process number
in a directory, and may notice silence sooner.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# variables of the environment
_PIDS = "PIDS"
_SILENT_S = "SILENT_S"
_FIRST_RANK_S = "FIRST_RANK_S"


@dataclass
class Torchrun:
    """A torchrun, and the directory of what it says and whom it has started."""

    process: subprocess.Popen[bytes]
    directory: Path

    def pid(self, rank: int, attempt: int = 0) -> int:
        """The process of a rank, as soon as it has started."""
        from waiting import HANG_S, wait_until

        path = self.directory / f"rank-{rank}-{attempt}"
        assert wait_until(lambda: path.exists() and path.read_text() != "", limit_s=HANG_S), (
            self.said
        )
        return int(path.read_text())

    def wait(self, *, seconds: float = 300.0) -> int:
        """Its exit status, when no rank is left."""
        from waiting import HANG_S, wait_until

        assert wait_until(lambda: self.process.poll() is not None, limit_s=seconds), self.said
        assert self.process.returncode is not None
        assert wait_until(lambda: not self.left(), limit_s=HANG_S), (
            f"orphans: {self.left()}\n{self.said}"
        )
        return self.process.returncode

    def left(self) -> list[int]:
        """Ranks that are there."""
        from forked_ranks import alive

        pids = [int(path.read_text() or 0) for path in self.directory.glob("rank-*-*")]
        return [pid for pid in pids if alive(pid)]

    @property
    def said(self) -> str:
        """All that it and its ranks have printed."""
        return (self.directory / "said").read_text()

    @property
    def errors(self) -> list[str]:
        """The errors that its ranks have printed."""
        return [line for line in self.said.splitlines() if line.startswith("error: ")]


@contextmanager
def torchrun(
    directory: Path,
    *arguments: str,
    size: int = 2,
    max_restarts: int = 0,
    file: Path | None = None,
    silent_s: float = 4,
    first_rank_s: float = 600,
) -> Iterator[Torchrun]:
    """torchrun, with ranks that run `surefoot` with some arguments, or a file; what it says is in
    `directory`.

    first_rank_s: how long rank 1 leaves its error to rank 0, which is slow on a busy machine.
    torchrun ends the wait.
    """
    from tied import tied

    directory.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={size}",
        f"--max-restarts={max_restarts}",
        str(file or __file__),
        *arguments,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        _PIDS: str(directory),
        _SILENT_S: str(silent_s),
        _FIRST_RANK_S: str(first_rank_s),
    }
    with (directory / "said").open("w") as output:
        process = subprocess.Popen(
            tied(command), stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    group = Torchrun(process, directory)
    try:
        yield group
    finally:
        process.kill()
        process.wait()
        for pid in group.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def be_a_rank() -> int:
    """Leave this process's number, and notice silence as soon as the test wants it. Returns the
    number of torchrun's process.
    """
    torchrun = os.getppid()  # before the test can know of this process, and kill torchrun
    rank = os.environ["RANK"]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(os.environ[_PIDS], f"rank-{rank}-{attempt}").write_text(str(os.getpid()))
    from surefoot import errors
    from surefoot.distributed import rendezvous
    from surefoot.distributed.heartbeat import Heartbeat

    errors.FIRST_RANK_S = float(os.environ[_FIRST_RANK_S])
    silent_s = float(os.environ[_SILENT_S])
    setattr(rendezvous, "Heartbeat", partial(Heartbeat, every_s=silent_s / 20, silent_s=silent_s))  # noqa: B010  # another type
    return torchrun


def unused_parameter() -> None:
    """A script whose model has a parameter that gets no gradient: every rank is refused."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.data import TensorDataset

    import surefoot as sf

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(4, 2)
            self.unused = torch.nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.used(inputs))

    run = sf.Run(
        model=Net,
        loss=lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
        train_data=TensorDataset(torch.ones(64, 4), torch.zeros(64, dtype=torch.long)),
        batch_size=8,
        length="9 steps",
        optimizer=sf.optim.sgd(lr=0.1),
    )
    run.train()


def script(*, batch_size: int) -> None:
    """A script whose data set has an error of its own, or whose batch size is refused before ranks
    meet.
    """
    import torch

    import surefoot as sf

    class Data:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, sample: int) -> Any:
            return dict[str, int]()["my own bug"]

    run = sf.Run(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda net, x: net(x).mean(),
        train_data=Data(),
        batch_size=batch_size,
        length="9 steps",
        optimizer=sf.optim.sgd(lr=0.1),
    )
    run.train()


def late_on_rank_1(torchrun: int) -> None:
    """A script whose rank 0 waits for the other one, which comes when torchrun is gone."""
    from surefoot.distributed.world import joined

    while os.environ["RANK"] == "1" and os.getppid() == torchrun:
        time.sleep(0.1)
    joined("cpu")


if __name__ == "__main__":
    sys.argv[0] = "surefoot"
    match sys.argv[1]:
        case "unused-parameter":
            be_a_rank()
            unused_parameter()
        case "broken-data" | "negative-batch":
            be_a_rank()
            script(batch_size=8 if sys.argv[1] == "broken-data" else -1)
        case "late-on-rank-1":
            late_on_rank_1(be_a_rank())
        case _:
            from surefoot.distributed.environment import tie_to_launcher

            tie_to_launcher()
            be_a_rank()
            from surefoot.cli.main import main

            main()
