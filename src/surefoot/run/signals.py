"""Signal handlers that only set flags for the training loop.

Python runs a handler only between bytecode instructions, and a backward pass can be one call of
many seconds. Therefore a thread answers the first Ctrl-C: it waits for the signal number, which
Python writes to a socket immediately.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

from surefoot.tracking.console import in_cell

STOP: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}  # names in messages


class Signals:
    """Handlers for SIGINT, SIGTERM and SIGUSR1 between `install` and `restore`, only in the main
    thread.

    The first SIGINT or SIGTERM sets `stop` to its number, and SIGUSR1 sets `save`. The loop reads
    `stop` and `save` after each step. A second SIGINT or SIGTERM ends the process at once, or in a
    notebook the cell. A thread and the handlers call `say`; see `to_terminal`.
    """

    def __init__(self, standing: Callable[[], str], *, say: Callable[[str], None]) -> None:
        self.stop: int | None = None
        self.save = False
        self.standing = standing
        self.say = say
        self.previous: dict[int, Any] = {}
        self.answering: _Answering | None = None

    def install(self) -> None:
        """Install handlers of stop signals and SIGUSR1. No effect outside the main thread, where
        Python permits none.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.answering = _Answering(
            lambda name: self.say(
                f"{name}: finishing this step, then saving; a second signal ends the run at once"
            )
        )
        for number in STOP:
            self.previous[number] = signal.signal(number, self._on_stop)
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        _installed.append(self)

    def restore(self) -> None:
        """Put back the handlers that `install` replaced."""
        if self.answering is None:
            return
        later = _installed[_installed.index(self) + 1 :]
        if not later:
            for number, handler in self.previous.items():
                signal.signal(number, handler)
        else:
            # a run that began during this one has its handlers on top, and puts back those that
            # were there before this one
            next_run = later[0]
            for number, handler in self.previous.items():
                if next_run.previous[number] in (self._on_stop, self._on_save):
                    next_run.previous[number] = handler
            assert next_run.answering is not None
            next_run.answering.previous = self.answering.previous
            self.answering.previous = None
        _installed.remove(self)
        self.previous = {}
        self.answering.close()
        self.answering = None

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        if self.stop is not None:
            self.say(f"{STOP[number]} again: ending at once; {self.standing()}")
            if number == signal.SIGINT and is_interactive():
                from surefoot.tracking.notebook import interrupt

                raise interrupt()
            os._exit(128 + number)
        self.stop = number

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        self.save = True


def to_terminal(fresh_line: str) -> Callable[[str], None]:
    """Return a function that prints `fresh_line` and a text unbuffered, because a signal handler
    may interrupt a `print`.
    """

    def say(text: str) -> None:
        if in_cell():  # where standard error looks like a failure
            print(text)
            return
        with suppress(OSError):  # in `train.py | tee log` Ctrl-C also ends tee
            os.write(2, f"{fresh_line}{text}\n".encode())

    return say


def is_interactive() -> bool:
    """Return True in a notebook, in IPython and at Python's prompt, where no signal may end the
    interpreter.
    """
    shell = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (shell is not None and shell.get_ipython() is not None)


class _Answering:
    def __init__(self, answer: Callable[[str], None]) -> None:
        self.answer = answer
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.previous: int | None = signal.set_wakeup_fd(
            self.sender.fileno(), warn_on_full_buffer=False
        )
        _wakeup_fds.add(self.sender.fileno())
        _leave_children_out()
        self.thread = threading.Thread(
            target=self._listen, name="surefoot answers signals", daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        if self.previous is not None:
            signal.set_wakeup_fd(self.previous)
        _wakeup_fds.discard(self.sender.fileno())
        # closing does not end the thread while a forked process has the socket
        self.sender.shutdown(socket.SHUT_RDWR)
        self.sender.close()
        self.thread.join()
        self.receiver.close()

    def _listen(self) -> None:
        if hasattr(signal, "pthread_sigmask"):  # signals must wake the main thread
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
        is_answered = False
        while True:
            numbers = self.receiver.recv(64)
            if not numbers:
                return
            for number in numbers:
                if number in STOP and not is_answered:
                    is_answered = True
                    self.answer(STOP[number])


_installed: list[Signals] = []  # of open runs, in the order of their starts
_wakeup_fds: set[int] = set()  # the sockets that Python writes to


@cache
def _leave_children_out() -> None:
    # a forked process shares the socket of its parent
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_be_left_out)


def _be_left_out() -> None:
    before = signal.set_wakeup_fd(-1)
    if before not in _wakeup_fds:
        signal.set_wakeup_fd(before)
