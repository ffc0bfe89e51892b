"""A launcher and its ranks by fork from this process, which has imported torch: that takes seconds
in each of them.

All else is as it is: processes and sessions of their own, signals, exit statuses, the store, gloo
between the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch._dynamo  # what every run imports when it begins: here it is once for all
import torch.utils.tensorboard  # noqa: F401

import small_program
from forked import Forked
from run_files import newest_checkpoint, newest_tensor_hashes, records_of, with_keys
from surefoot.cli.main import main, run_or_exit
from surefoot.distributed import launcher, process_group, rendezvous
from surefoot.distributed.environment import tie_to_launcher
from surefoot.distributed.heartbeat import Heartbeat
from surefoot.distributed.launcher import launch
from surefoot.distributed.process_count import Slots, parse_nproc
from waiting import HANG_S, wait_until

PROGRAM = f"{Path(__file__).with_name('small_program.py')}:build"


class ForkedRank:
    """In the place of torch's `SubprocessHandler`."""

    def __init__(
        self,
        entrypoint: str,
        args: tuple[str, ...],
        env: dict[str, str],
        stderr: str | None,
        **_: object,
    ) -> None:
        assert entrypoint == sys.executable
        assert args[:3] == ("-P", "-m", "surefoot")  # or would be, for a script

        def call() -> None:
            os.environ.update(env)
            attempt = env["TORCHELASTIC_RESTART_COUNT"]
            directory = Path(os.environ["PIDS"])
            (directory / f"rank-{env['RANK']}-{attempt}").write_text(str(os.getpid()))

            def all_are_forked() -> bool:
                return len([*directory.glob(f"rank-*-{attempt}")]) == int(env["LOCAL_WORLD_SIZE"])

            assert wait_until(all_are_forked)  # before the store is busy
            tie_to_launcher()
            try:
                if args[3:] == ("script",):
                    run_or_exit(small_program.leave_early, with_traceback=False)
                else:
                    main(list(args[3:]))
            finally:
                rendezvous._part()  # as at the end of a process that ends as it should

        errors = subprocess.STDOUT if stderr else None
        with open(stderr or os.devnull, "w") as output:
            self.proc = Forked(call, stdout=output, stderr=errors, session=True)

    def close(self, death_sig: signal.Signals) -> None:
        if self.proc.poll() is None:  # otherwise another group may have its number
            os.killpg(self.proc.pid, death_sig)


@dataclass
class Launched:
    """`surefoot` with --nproc, that runs."""

    process: Forked
    directory: Path

    def pid(self, rank: int, attempt: int = 0) -> int:
        """The process of a rank, as soon as it has started."""
        path = self.directory / f"rank-{rank}-{attempt}"
        assert wait_until(lambda: path.exists() and path.read_text() != "")
        return int(path.read_text())

    def wait(self) -> int:
        """Its exit status, when no process that it started is left."""
        assert wait_until(lambda: self.process.poll() is not None), self.said
        assert self.process.returncode is not None
        assert wait_until(lambda: not self.left()), f"orphans: {self.left()}"
        return self.process.returncode

    def left(self) -> list[int]:
        """Processes of ranks that are there, and no mere entries of what has ended."""
        pids = [int(path.read_text() or 0) for path in self.directory.glob("rank-*-*")]
        return [pid for pid in pids if alive(pid)]

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text()


def alive(pid: int) -> bool:
    """Whether a process is there, and more than an entry."""
    stat = Path(f"/proc/{pid}/stat")
    with suppress(OSError):
        os.kill(pid, 0)
        if not stat.exists():
            return True
        state, *_ = stat.read_text().rpartition(")")[2].split()
        return state not in "ZX"
    return False


@contextmanager
def surefoot(directory: Path, *arguments: str, silent_s: float = HANG_S) -> Iterator[Launched]:
    """A command in processes of its own; what it says, and which processes there are, is in
    `directory`.
    """
    directory.mkdir(exist_ok=True)
    # a loader's worker listens at a socket in it: a path of 107 characters at most
    short = Path(tempfile.mkdtemp()) / "p"
    short.symlink_to(directory)

    def call() -> None:
        os.environ["PIDS"] = str(directory)
        tempfile.tempdir = str(short)
        setattr(process_group, "SubprocessHandler", ForkedRank)  # noqa: B010  # another type
        setattr(rendezvous, "Heartbeat", partial(Heartbeat, every_s=0.2, silent_s=silent_s))  # noqa: B010
        setattr(launcher, "_STOPPED_S", silent_s)  # noqa: B010
        sys.argv = ["surefoot", *arguments]
        if arguments == ("script",):
            places = Slots(parse_nproc(2), sizes=lambda: None, gpus=None)
            sys.exit(launch(lambda _: ["-P", "-m", "surefoot", "script"], places=places))
        main(list(arguments))

    with (
        (directory / "said").open("w") as said,
        Forked(call, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield Launched(process, directory)
        finally:
            process.kill()
            shutil.rmtree(short.parent)


def bits(run_dir: Path) -> dict[str, Any]:
    """All of a run that must be equal to the bit: tensors, what else is saved, records."""
    newest = newest_checkpoint(run_dir)
    state = json.loads((newest / "state.json").read_text())
    del state["clock"], state["machine"]
    return {
        "step": newest.name,
        "tensors": newest_tensor_hashes(run_dir),
        "state": state,
        "records": with_keys(
            records_of(run_dir, "train", "eval"), ("step", "loss", "grad_norm", "val/loss")
        ),
    }


def steps_made(run_dir: Path) -> int:
    """The newest checkpoint's step; -1 where there is none."""
    steps = [int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")]
    return max(steps, default=-1)
