"""What a rank above 0 has to say: a file of its own in the run's directory, as soon as there is one."""

from __future__ import annotations

from io import StringIO
from pathlib import Path


class RankLog(StringIO):
    """A stream that keeps what it is given until it is told where to append it; without a place nothing is kept for long."""

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None

    def open(self, path: Path) -> None:
        """Append what was said so far, and from now on, to a file; its directory is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.flush()

    def flush(self) -> None:
        """Bring what was written to the file, where there is one."""
        if self.path is None:
            return
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
