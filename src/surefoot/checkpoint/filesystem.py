"""Every operation on files that saving or reading a checkpoint performs, one method each.

Nothing else in this package touches the file system. So a test can let each single operation fail, be the last
before a kill, or be lost in a power cut, by giving another object with these methods.
"""

import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Protocol, final


class Files(Protocol):
    """What `Disk` does; a method fails with `OSError`. Only what is flushed is safe from a power cut."""

    def make_directory(self, path: Path, /) -> None:
        """Make one directory, which must not exist yet, in one that does."""

    def create(self, path: Path) -> int:
        """Make a file, which must not exist yet, and return a handle to it."""

    def append(self, handle: int, data: memoryview) -> None:
        """Write all of `data` at the end."""

    def flush(self, handle: int) -> None:
        """Return when the file's bytes are on the medium. That its name is there needs `flush_directory`."""

    def close(self, handle: int, /) -> None:
        """Give the handle back, also where this fails."""

    def flush_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the medium: files made in it, renamed and removed."""

    def rename(self, source: Path, target: Path, /) -> None:
        """Give a file or directory another name on the same file system, at once or not at all."""

    def remove(self, path: Path, /) -> None:
        """Remove a file."""

    def remove_directory(self, path: Path, /) -> None:
        """Remove an empty directory."""

    def is_directory(self, path: Path, /) -> bool:
        """Whether there is a directory of this name."""

    def is_link(self, path: Path, /) -> bool:
        """Whether there is a link of this name, wherever it leads."""

    def names(self, path: Path, /) -> list[str]:
        """What lies in a directory."""

    def size(self, path: Path) -> int:
        """Length in bytes of a regular file; anything else under that name (a pipe, say) is an `OSError`."""

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on; fewer only where the file ends."""

    def free_bytes(self, path: Path) -> int:
        """Room left for this user on the file system of a directory."""


@final
class Disk:
    """The real file system.

    On macOS a flush asks the drive too (`F_FULLFSYNC`). Windows cannot flush a directory: there a power cut
    (not a kill) may take back the newest checkpoint.
    """

    make_directory = staticmethod(os.mkdir)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    remove = staticmethod(os.remove)
    remove_directory = staticmethod(os.rmdir)
    is_directory = staticmethod(os.path.isdir)
    is_link = staticmethod(os.path.islink)
    names = staticmethod(os.listdir)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        while data:
            data = data[os.write(handle, data) :]  # a full disk or a signal can cut a write short

    def flush(self, handle: int) -> None:
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def flush_directory(self, path: Path) -> None:
        if sys.platform == "win32":
            return
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def size(self, path: Path) -> int:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        return found.st_size

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


DISK = Disk()
