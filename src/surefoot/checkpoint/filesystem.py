"""Every operation on files that saving or reading a checkpoint performs, one method each, so that a test can let it fail."""

import os
import shutil
import stat
import sys
from pathlib import Path


class Disk:
    """The real file system; a method fails with `OSError`. Only what is flushed is safe from a power cut.

    Windows cannot flush a directory: there a power cut (not a kill) may take back the newest checkpoint.
    """

    make_directory = staticmethod(os.mkdir)  # make one directory, which must not exist yet, in one that does
    close = staticmethod(os.close)  # give the handle back, also where this fails
    rename = staticmethod(os.rename)  # on the same file system, at once or not at all
    remove = staticmethod(os.remove)  # remove a file
    remove_directory = staticmethod(os.rmdir)  # remove an empty directory
    is_directory = staticmethod(os.path.isdir)  # whether there is a directory of this name
    is_link = staticmethod(os.path.islink)  # whether there is a link of this name, wherever it leads
    names = staticmethod(os.listdir)  # what lies in a directory

    def create(self, path: Path) -> int:
        """Make a file, which must not exist yet, and return a handle to it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        """Write all of `data` at the end."""
        while data:
            data = data[os.write(handle, data) :]  # a full disk or a signal can cut a write short

    def flush(self, handle: int) -> None:
        """Return when the file's bytes are on the medium. That its name is there needs `flush_directory`."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)

    def flush_directory(self, path: Path) -> None:
        """Return when the names in a directory are on the medium: files made in it, renamed and removed."""
        if sys.platform != "win32":
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def size(self, path: Path) -> int:
        """Length in bytes of a regular file; anything else under that name (a pipe, say) is an `OSError`."""
        if not stat.S_ISREG((status := os.stat(path)).st_mode):
            raise OSError("not a regular file")
        return status.st_size

    def read(self, path: Path, *, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on; fewer only where the file ends."""
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)

    def free_bytes(self, path: Path) -> int:
        """Room left for this user on the file system of a directory."""
        return shutil.disk_usage(path).free


DISK = Disk()
