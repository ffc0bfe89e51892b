"""A process that does not outlive the one that started it, even where that is killed with `kill -9`."""

from __future__ import annotations

import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """End this process, by SIGKILL, when `parent`, which started it, is gone.

    Linux does that itself, whatever this process is busy with. Elsewhere a thread waits for the end of standard input, a
    pipe whose other end only the parent holds. What is lost is what a checkpoint does not hold: the run goes on from it.
    """
    if sys.platform != "linux":
        threading.Thread(target=_end_with_input, name="surefoot ends with its parent", daemon=True).start()
    die_with_parent(parent)


def die_with_parent(parent: int) -> None:
    """The same where standard input is no such pipe: on Linux at any time, elsewhere only where `parent` is gone already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform != "win32" and os.getppid() != parent:  # it was gone before this was asked for
        os._exit(1)


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
