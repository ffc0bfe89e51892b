"""Signals to the process that trains a run, from another process of this machine: save, or save and
stop.

The kernel names the process that holds the run's lock. A pidfd refers to this process and to no
later one with its number.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

from surefoot.errors import ConfigError
from surefoot.tracking.run_reader import lock_holder

Request = Literal["save", "stop"]
_BY_HAND = "type Ctrl-C where it was started"


def signal_run(run: Path, request: Request) -> int:
    """Signal the process that trains a run, and return its number. Raises `ConfigError` if no such
    process can be signaled safely.

    SIGUSR1 saves. SIGINT saves and stops; a second SIGINT would end the process at once, so the
    caller sends it once.
    """
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(f"only Linux tells which process trains a run: {_BY_HAND}")
    number = lock_holder(run)
    if not number:
        raise ConfigError(f"no process trains {run}")
    if number < 0:
        raise ConfigError(
            f"the process that trains {run} is in another container or on another machine: {_BY_HAND}"
        )
    try:
        handle = os.pidfd_open(number)
    except OSError as problem:
        raise ConfigError(
            f"process {number}, which trains {run}, cannot be reached: {problem.strerror}"
        ) from problem
    try:
        # a process of another machine may hold the lock under this number, and the number may have
        # been given away
        if lock_holder(run) != number or not _has_open(number, run / ".lock"):
            raise ConfigError(f"process {number} of this machine does not train {run}: {_BY_HAND}")
        if not _handles_signals(number):
            raise ConfigError(f"{run} is starting or ending, and handles no signals now: try again")
        signal.pidfd_send_signal(handle, signal.SIGUSR1 if request == "save" else signal.SIGINT)
    except OSError as problem:
        raise ConfigError(
            f"process {number}, which trains {run}, cannot be signaled: {problem.strerror}"
        ) from problem
    finally:
        os.close(handle)
    return number


def _has_open(number: int, file: Path) -> bool:
    with (
        suppress(FileNotFoundError, ProcessLookupError),
        os.scandir(f"/proc/{number}/fd") as handles,
    ):
        status = file.stat()
        for handle in handles:
            with suppress(OSError):
                if os.path.samestat(handle.stat(), status):
                    return True
    return False


def _handles_signals(number: int) -> bool:
    # Python itself handles neither of the two, and each would end the process
    with suppress(OSError, ValueError), open(f"/proc/{number}/status") as file:
        caught = next((int(text.split()[1], 16) for text in file if text.startswith("SigCgt:")), 0)
        return all(caught >> (each - 1) & 1 for each in (signal.SIGUSR1, signal.SIGTERM))
    return False
