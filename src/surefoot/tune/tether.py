"""A process that does not outlive the one that started it, even where that is killed with `kill -9`."""

from __future__ import annotations

import os
import sys
import threading

from surefoot.placement import end_with_parent


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
