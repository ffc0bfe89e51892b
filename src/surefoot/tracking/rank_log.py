"""What a rank above 0 has to say: a file of its own in the run's directory, as soon as there is one."""

import os
from contextlib import suppress
from datetime import datetime
from io import StringIO
from pathlib import Path

from surefoot.config.paths import make_no_follow, open_no_follow

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_MOST = 1 << 16  # characters that wait for a place


class RankLog(StringIO):
    """A stream that keeps what it is given until it is told where to append it; without a place nothing is kept for long."""

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Append the time, what was said so far, and what is said from now on, to a file; its directory is made."""
        make_no_follow(path.parent)
        self.path = path
        self.at_once(f"--- {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} ---")
        self.flush()

    def flush(self) -> None:
        """Bring what was written to the file, where there is one."""
        if self.path is None:
            if self.tell() > _MOST:
                self._taken()
            return
        text = self._taken()
        make_no_follow(self.path.parent)  # the run's directory may have been deleted
        with open(open_no_follow(self.path, _APPEND), "a", encoding="utf-8") as file:
            file.write(text)

    def at_once(self, text: str) -> None:
        """Append a line to the file, where there is one, past all buffers: for handlers of signals and other threads."""
        if self.path is None:
            return
        with suppress(OSError):
            make_no_follow(self.path.parent)
            with os.fdopen(open_no_follow(self.path, _APPEND), "ab", buffering=0) as file:
                file.write(f"{text}\n".encode())

    def _taken(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text
