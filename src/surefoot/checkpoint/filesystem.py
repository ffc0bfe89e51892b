"""The file operations that save or read a checkpoint. Each operation is one method, so that a test can make it fail."""

import os
import shutil
import stat
import sys
from pathlib import Path


class Disk:
    """The real file system. Each method raises `OSError` on failure. Only flushed data survive a power cut.

    Windows cannot flush a directory: on Windows a power cut (not a kill) may remove the newest checkpoint.
    """

    make_directory = staticmethod(os.mkdir)  # make one new directory in an existing directory
    close = staticmethod(os.close)  # release the handle, even if closing fails
    rename = staticmethod(os.rename)  # rename atomically within one file system
    remove = staticmethod(os.remove)  # remove a file
    remove_directory = staticmethod(os.rmdir)  # remove an empty directory
    is_directory = staticmethod(os.path.isdir)  # return True if the path is a directory
    is_link = staticmethod(os.path.islink)  # return True if the path is a link, valid or not
    names = staticmethod(os.listdir)  # list the names in a directory

    def create(self, path: Path) -> int:
        """Create a file that does not exist yet, and return a handle to the file."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        """Append all of `data` to the file."""
        while data:
            data = data[os.write(handle, data) :]  # a full disk or a signal can interrupt a write

    def flush(self, handle: int) -> None:
        """Flush the bytes of a file to the disk. The name of the file is flushed by `flush_directory`."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def flush_directory(self, path: Path) -> None:
        """Flush the names in a directory to the disk, after files were created, renamed or removed."""
        if sys.platform != "win32":
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def size(self, path: Path) -> int:
        """Return the length of a regular file in bytes; raise `OSError` for anything else, such as a pipe."""
        if not stat.S_ISREG((status := os.stat(path)).st_mode):
            raise OSError("not a regular file")
        return status.st_size

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        """Return at most `length` bytes from position `start`; fewer bytes only at the end of the file."""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes for this user on the file system of a directory."""
        return shutil.disk_usage(path).free


DISK = Disk()
