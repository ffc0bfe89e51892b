"""A process that a launcher started: it ends with the launcher, and has the terminal only as rank 0 of ours. Torch-free."""

from __future__ import annotations

import os

from surefoot.placement import end_with_parent, end_with_torchrun

LAUNCHER = "SUREFOOT_LAUNCHER"  # in the environment of a rank: the process that started it


def started_by_launcher() -> bool:
    """Whether this process is a rank that `--nproc` started."""
    return LAUNCHER in os.environ


def tie_to_launcher() -> None:
    """End this process when the launcher that started it is gone, if one did; keep ranks above 0 of ours from what is typed."""
    if not started_by_launcher():
        end_with_torchrun(os.environ)
        return
    end_with_parent(int(os.environ[LAUNCHER]))
    if os.environ.get("RANK") != "0":
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
