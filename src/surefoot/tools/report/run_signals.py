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
_BY_HAND = "type Ctrl-C where the run was started"


def signal_run(run: Path, request: Request) -> int:
    """Signal the process that trains a run, and return its number. Raises `ConfigError` if no such
    process can be signaled safely.

    SIGUSR1 saves. SIGINT saves and stops; a second SIGINT would end the process at once, so the
    caller sends it once.
    """
    if not hasattr(os, "pidfd_open"):
        raise ConfigError(
            "signal-only-on-linux",
            problem="only Linux tells which process trains a run",
            remedy=_BY_HAND,
        )
    number = lock_holder(run)
    if not number:
        raise run_not_training(run)
    if number < 0:
        raise _trained_elsewhere(run)
    try:
        handle = os.pidfd_open(number)
        try:
            _signal(handle, number, run, request)
        finally:
            os.close(handle)
    except OSError as problem:
        raise ConfigError(
            "run-not-signaled",
            problem=f"process {number}, which trains {run}, cannot be signaled: {problem.strerror}",
            path=run,
            pid=number,
        ) from problem
    return number


def run_not_training(run: Path) -> ConfigError:
    """Return the error of a request to a run that no process trains."""
    return ConfigError("run-not-training", problem=f"no process trains {run}", path=run)


def _signal(handle: int, number: int, run: Path, request: Request) -> None:
    is_holder = lock_holder(run) == number  # the run may have ended, and its number been given away
    # a process of another machine may hold the lock under this number
    if is_holder and not _has_open(number, run / ".lock"):
        raise _trained_elsewhere(run)
    if not is_holder or not _handles_signals(number):
        raise ConfigError(
            "run-starting-or-ending",
            problem=f"{run} is starting or ending, and handles no signals now",
            remedy="try again",
            path=run,
        )
    signal.pidfd_send_signal(handle, signal.SIGUSR1 if request == "save" else signal.SIGINT)


def _trained_elsewhere(run: Path) -> ConfigError:
    return ConfigError(
        "run-trained-elsewhere",
        problem=f"the process that trains {run} is in another container or on another machine",
        remedy=_BY_HAND,
        path=run,
    )


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
    caught = 0  # a bit for each signal that the process handles
    with suppress(OSError, ValueError), open(f"/proc/{number}/status") as file:
        for text in file:
            if text.startswith("SigCgt:"):
                caught = int(text.split()[1], 16)
    saves = caught >> (signal.SIGUSR1 - 1) & 1
    stops = caught >> (signal.SIGTERM - 1) & 1
    return bool(saves and stops)
