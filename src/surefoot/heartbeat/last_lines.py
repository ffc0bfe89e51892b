"""What a process wrote last, for a message about its end."""

from __future__ import annotations

from collections import deque
from pathlib import Path

_LINES = 3
_WIDE = 200  # characters


def last_lines(path: Path) -> list[str]:
    """The last lines of a file that are not empty, cut where they are very long; none where it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip()[:_WIDE] for line in file if line.strip()), maxlen=_LINES))
    except OSError:
        return []
