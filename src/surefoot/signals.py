"""What a run does when it is told to stop or to save: a flag for the loop, never work inside the handler."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_STOP = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Signals:
    """Handlers for SIGINT, SIGTERM and SIGUSR1 between `install` and `restore`.

    The first SIGINT or SIGTERM sets `stop` to its number, a SIGUSR1 sets `save`; the loop looks at both after each step.
    A second one ends the process at once. Outside the main thread Python has no handlers: then nothing is installed.
    """

    def __init__(self, standing: Callable[[], str], *, fresh_line: str = "\n") -> None:
        self.stop: int | None = None
        self.save = False
        self.standing, self.fresh_line = standing, fresh_line
        self.previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._on_stop)
        if hasattr(signal, "SIGUSR1"):  # not on Windows
            self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)

    def restore(self) -> None:
        """Give them back to whoever had them."""
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = _STOP[signal.Signals(number)]
        if self.stop is not None:
            self._say(f"{name} again: ending at once; {self.standing()}")
            os._exit(128 + number)
        self.stop = number
        self._say(f"{name}: finishing this step, then saving; once more ends at once")

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.save = True

    def _say(self, text: str) -> None:
        """Past Python's buffers: a handler may have interrupted a `print`."""
        os.write(2, f"{self.fresh_line}{text}\n".encode())
