"""A process that a launcher started: it ends with the launcher, and has the terminal only as rank 0. Torch-free."""

from __future__ import annotations

import os
import sys
import threading

from surefoot.distributed.environment import TORCHRUN, end_with_parent

LAUNCHER = "SUREFOOT_LAUNCHER"  # in the environment of a rank: the process that started it


def started_by_launcher() -> bool:
    return LAUNCHER in os.environ


def tie_to_launcher() -> None:
    """End this process when the launcher that started it is gone, if one did; keep ranks above 0 from what is typed."""
    if TORCHRUN in os.environ:
        end_with_parent(os.getppid())
    if not started_by_launcher():
        return
    end_with_parent(int(os.environ[LAUNCHER]))
    if os.environ.get("RANK") != "0":
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def die_with(parent: int) -> None:
    """End this process when `parent`, which started it, is gone.

    Elsewhere than on Linux a thread waits for the end of standard input too, a pipe whose other end only the parent holds.
    What is lost is what a checkpoint does not hold: the run goes on from it.
    """
    if sys.platform != "linux":
        threading.Thread(target=_end_with_input, name="surefoot ends with its parent", daemon=True).start()
    end_with_parent(parent)


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
