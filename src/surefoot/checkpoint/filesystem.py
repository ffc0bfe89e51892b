"""File operations of checkpoints. Each operation is a separate method, so that a test can make the
method fail.
"""

import os
import shutil
import stat
import sys
from pathlib import Path


class Disk:
    """The real file system. Each method raises `OSError` on failure. Only flushed bytes survive a
    power failure.

    Windows cannot flush directories, so a power failure (not a kill) may remove the newest
    checkpoint.
    """

    def __repr__(self) -> str:
        return "Disk()"

    make_directory = staticmethod(os.mkdir)  # the parent directory must exist
    close = staticmethod(os.close)  # releases the handle even on failure
    rename = staticmethod(os.rename)  # atomic within one file system
    remove = staticmethod(os.remove)
    remove_directory = staticmethod(os.rmdir)
    is_directory = staticmethod(os.path.isdir)
    is_link = staticmethod(os.path.islink)  # also True for a broken link
    names = staticmethod(os.listdir)

    def create(self, path: Path) -> int:
        as_bytes = getattr(os, "O_BINARY", 0)  # Windows would write other line ends
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | as_bytes, 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        while data:
            data = data[os.write(handle, data) :]  # a full disk or a signal can interrupt a write

    def flush(self, handle: int) -> None:
        """Flush the bytes of a file to the disk; `flush_directory` flushes the file name."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def flush_directory(self, path: Path) -> None:
        """Flush a directory's entries to the disk. No effect on Windows. Raises `OSError` if the
        disk cannot.
        """
        if sys.platform != "win32":
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def size(self, path: Path) -> int:
        """Return the size of a regular file in bytes; raise `OSError` for any other file, such as a
        pipe.
        """
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        return status.st_size

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start`, or fewer bytes at the end of the file."""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


DISK = Disk()
