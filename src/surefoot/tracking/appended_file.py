"""A file that only grows, such as metrics.jsonl: nothing is lost if a write fails or the file is
deleted meanwhile.
"""

import os
from io import FileIO
from pathlib import Path
from typing import IO

from surefoot.config.paths import open_no_follow

READ_BYTES = 1 << 20  # read at once


class AppendedFile:
    """A file opened for appending; bytes that cannot be written stay in memory until the next
    call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""
        self.file = self._open()

    def read(self, start: int, length: int) -> bytes:
        self.file.seek(start)
        return self.file.read(length)

    def append(self, content: bytes) -> None:
        """Append bytes without buffering; if `append` raises `OSError`, unwritten bytes stay in
        memory.
        """
        self.waiting += content
        while self.waiting:  # one write may accept only a part
            self.waiting = self.waiting[self.file.write(self.waiting) :]

    def was_deleted(self) -> bool:
        return not is_named(self.path, self.file)

    def make_again(self) -> None:
        """Create the deleted file again, with its content."""
        deleted = self.file  # an open file stays readable after its deletion
        self.file = self._open()
        self.file.truncate(0)
        deleted.seek(0)
        while chunk := deleted.read(READ_BYTES):
            while chunk:  # one write may accept only a part
                chunk = chunk[self.file.write(chunk) :]
        deleted.close()

    def close(self) -> None:
        """Close the file; raise `OSError` if bytes are lost."""
        try:
            self.append(b"")
        finally:
            self.file.close()

    def _open(self) -> FileIO:
        handle = open_no_follow(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return os.fdopen(handle, "a+b", buffering=0)


def is_named(path: Path, file: IO[bytes]) -> bool:
    """Return True if an open file is still the one at `path`."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
