"""The user's paths, files written without following links, and files opened without blocking.
Imports no torch.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from surefoot.errors import ConfigError

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks
_URL = re.compile(
    r"\s*[A-Za-z][A-Za-z0-9+.-]+:/{1,2}"
)  # `Path` merges two slashes; `C:/` is a drive
_FOLLOWS_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # absent on Windows
_WAITS_FOR_NOBODY: int = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would block
_BINARY: int = getattr(os, "O_BINARY", 0)
_SMALL_BYTES = 20_000_000  # no small file of a run is larger
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def local_path(path: str | os.PathLike[str], *, setting: str) -> Path:
    """Convert to a local `Path`. Raises `ConfigError` with `setting` for a URL, which `Path` would
    turn into a directory called "s3:".

    >>> local_path("runs/first", setting="run_dir").parts
    ('runs', 'first')
    """
    text = os.fsdecode(path)
    if scheme := _URL.match(text):
        raise ConfigError(
            f"{setting} {text!r} is a URL, and surefoot reads and writes local files only\n"
            f"  as a path it would name a directory called {scheme[0].strip().rstrip('/')!r}\n"
            "  give a local path: mount the remote storage, or copy the files before or after the run"
        )
    return Path(text)


def user_cache(name: str) -> Path:
    """Return surefoot's directory `name` among the user's caches. The directory may be absent.

    The directory of all programs is $XDG_CACHE_HOME. Default: ~/Library/Caches on macOS,
    %LOCALAPPDATA% on Windows, ~/.cache elsewhere.
    """
    usual = {
        "darwin": "~/Library/Caches",
        "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"),
    }
    named = os.environ.get("XDG_CACHE_HOME", "")
    directory = (
        named if os.path.isabs(named) else os.path.expanduser(usual.get(sys.platform, "~/.cache"))
    )
    return Path(directory, "surefoot", name)


def open_no_follow(path: Path, flags: int) -> int:
    """Open a regular file as `os.open` does, without following a link. Raises `OSError` for a link,
    pipe or device. `flags` must not truncate, because some systems detect a link only after opening
    it."""
    try:
        handle = os.open(path, flags | _FOLLOWS_NO_LINK | _WAITS_FOR_NOBODY | _BINARY, 0o666)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, "a link, and surefoot does not write through links", str(path)
        ) from problem
    return _checked(handle, path, link_allowed=_FOLLOWS_NO_LINK != 0)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises `OSError` for pipes and devices,
    which may never end.
    """
    # Python makes the handle non-inheritable
    return open(
        _checked(os.open(path, os.O_RDONLY | _WAITS_FOR_NOBODY | _BINARY), path, link_allowed=True),
        "rb",
    )


def read_regular(path: Path, *, limit: int = _SMALL_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises `OSError` for a larger file, a pipe or a
    device.
    """
    with open_regular(path) as file:
        # `read` allocates its whole argument
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1) or b""
    if len(data) > limit:
        raise OSError(
            errno.EFBIG,
            f"larger than {limit:,} bytes, and surefoot never writes such a file",
            str(path),
        )
    return data


def is_of_script(run: Path) -> bool:
    """Return True if the config.toml of a run can be read and says that a script built the run."""
    import tomllib

    with suppress(OSError, ValueError, RecursionError):
        match tomllib.loads(read_regular(run / "config.toml").decode()):
            case {"program": {"kind": "script"}}:
                return True
    return False


def file_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises `ConfigError` if the file cannot be read."""
    try:
        return (
            read_regular(path) if path.is_file() else path.read_bytes()
        ).decode()  # --config <(...) is a pipe
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigError(f"cannot read {path}: {why}") from problem


def _checked(handle: int, path: Path, *, link_allowed: bool) -> int:
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
        if not (link_allowed or os.path.samestat(os.lstat(path), status)):
            raise OSError(
                errno.ELOOP, "a link, and surefoot does not write through links", str(path)
            )
    except OSError:
        os.close(handle)
        raise
    return handle


def make_no_follow(directory: Path) -> None:
    """Create a directory and its missing parents. Raises `OSError` if the directory is a link."""
    directory.mkdir(parents=True, exist_ok=True)
    if directory.is_symlink():
        raise OSError(
            errno.ELOOP, "a link, and surefoot does not write through links", str(directory)
        )


def write_whole(path: Path, pieces: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file from pieces, atomically. A link with the file's name is replaced, not
    followed.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a kill, or planted
    try:
        with open(open_no_follow(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            for piece in (pieces,) if isinstance(pieces, bytes) else pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
