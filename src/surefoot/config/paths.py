"""The user's paths, files written without following links, and files opened without blocking.
Imports no torch.
"""

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path

from surefoot.config.file_kinds import cure_of, kind_of_bytes
from surefoot.errors import Command, ConfigError, Remedy, comes_of_user

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks
# `Path` merges two slashes; `C:/` is a drive
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/{1,2}")
_NOT_PRINTABLE = re.compile("[\x01-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_FOLLOWS_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # absent on Windows
_WAITS_FOR_NOBODY: int = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would block
_BINARY: int = getattr(os, "O_BINARY", 0)
# what to do about a path that the system does not let us use, by the number of its error
_CURES: dict[int | None, str] = {
    errno.EACCES: "ask its owner for the permission, or choose another path",
    errno.EPERM: "ask its owner for the permission, or choose another path",
    errno.ENAMETOOLONG: "each name of a path has at most 255 bytes: shorten it",
    errno.ELOOP: "its links lead to each other: remove one of them",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EISDIR: "it is a directory: give the path of a file",
    errno.EROFS: "its file system cannot be written: choose another path",
    errno.ENOSPC: "make room, or choose a path on another disk",
    errno.EDQUOT: "make room, or choose a path on another disk",
    errno.EIO: "the disk or the network failed: check the device",
    errno.ESTALE: "the network file system lost it: mount it again",
}
_IS_LINK = "a link, and surefoot does not write through links"
_SMALL_BYTES = 20_000_000  # no small file of a run is larger
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def local_path(path: str | os.PathLike[str], *, setting: str) -> Path:
    """Convert a path of the user to a local `Path`, and look at it once. `~` is the home directory.

    Raises `ConfigError` with `setting` for an empty path, a URL, and a path that the system does
    not let us look at. A path may be absent: its reader or writer decides what that means.

    >>> local_path("runs/first", setting="run_dir").parts
    ('runs', 'first')
    """
    named = named_path(path, setting=setting)
    look_at(named, setting=setting)
    return named


def run_path(path: str | os.PathLike[str], *, setting: str) -> Path:
    """Convert a path of the user as `local_path` does, for the directory or file of a run.

    Raises `ConfigError` too for a name that cannot be printed in a line and written to a file.
    """
    text = os.fsdecode(path)
    if printable(text) != text:
        raise ConfigError(
            "path-not-printable",
            problem=f"{setting}: {_shortened(printable(text))} has a character that cannot be"
            " printed in a line",
            reason="names of runs are printed and written to files: UTF-8 without control characters",
            remedy="choose another name, or rename the directory",
            setting=setting,
            path=printable(text),
        )
    return local_path(path, setting=setting)


def printable(name: str) -> str:
    """Return a name with escapes for control characters and for bytes that are not UTF-8.

    >>> printable("été\\x1b[31m\\n"), printable("\\udcff")
    ('été\\\\x1b[31m\\\\n', '\\\\udcff')
    """
    return _NOT_PRINTABLE.sub(lambda match: ascii(match[0])[1:-1], name)


def named_path(path: str | os.PathLike[str], *, setting: str) -> Path:
    """Convert a path as `local_path` does, without looking at the file system.

    >>> named_path("~/runs", setting="run_dir").is_absolute()
    True
    """
    return Path(path_text(os.fsdecode(path), setting=setting))


def path_text(text: str, *, setting: str) -> str:
    """Replace `~` at the start of a path by the home directory. Raises `ConfigError` for an empty
    path, and for a URL.

    >>> path_text("./runs", setting="run_dir")
    './runs'
    """
    if not text.strip():
        raise ConfigError(
            "path-empty",
            problem=f"{setting} = {text!r} is an empty path",
            reason="it would mean the current directory; is a variable of the shell not set?",
            remedy="give a path, or . for the current directory",
            setting=setting,
            value=text,
        )
    scheme = _URL.match(text)
    if scheme is not None:
        directory = scheme[0].strip().rstrip("/")
        raise ConfigError(
            "path-is-url",
            problem=f"{setting} {text!r} is a URL, and surefoot reads and writes local files only",
            reason=f"as a path it would name a directory called {directory!r}",
            remedy="give a local path: mount the remote storage, or copy the files before or after"
            " the run",
            setting=setting,
            value=text,
        )
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError("it contains a zero byte")
    except ValueError as problem:  # or a character that the file system's encoding does not have
        raise unusable_path(text, problem, setting=setting) from problem
    expanded = os.path.expanduser(text)
    if re.match(r"~(?:[/\\]|$)", expanded):
        raise ConfigError(
            "home-directory-unknown",
            problem=f"{setting} = {text!r}: the home directory of this user is not known",
            reason="HOME is not set, and the system has no entry for the user",
            remedy=["set HOME", "give an absolute path", "write ./~ for a directory of that name"],
            setting=setting,
            value=text,
        )
    return expanded


def look_at(path: Path, *, setting: str | None = None) -> os.stat_result | None:
    """Return the status of a file or directory, or None if it is absent. Raises `ConfigError` if
    the system does not let us look at it, or at what a directory holds.
    """
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            os.stat(os.path.join(path, "."))  # permitted only if entries can be looked at
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as problem:
        raise unusable_path(path, problem, setting=setting) from problem
    return status


def absolute_path(path: Path) -> Path:
    """Return a path from the root, so that a later `os.chdir` does not change what it means. Raises
    `ConfigError` if the path is relative and the current directory was deleted.
    """
    try:
        return path.absolute()
    except OSError as problem:
        raise ConfigError(
            "current-directory-missing",
            problem=f"{path} is relative to the current directory, which was deleted",
            remedy="change to a directory that exists, or give an absolute path",
            path=str(path),
        ) from problem


def unusable_path(
    path: Path | str, problem: OSError | ValueError, *, setting: str | None = None
) -> ConfigError:
    """Return the error for a path that the system does not let us use."""
    shown = _shortened(path) if setting is None else f"{setting}: {_shortened(path)}"
    why = str(problem)  # ours, if the path never got to the system
    if isinstance(problem, OSError):
        why = problem.strerror or type(problem).__name__
    return ConfigError(
        "path-not-usable",
        problem=f"{shown} cannot be used: {why}",
        remedy=_cure(path, problem),
        setting=setting,
        path=str(path),
    )


def unusable_path_of(problem: BaseException) -> ConfigError | None:
    """Return the error to show for an `OSError` about a path that only the user can cure, such as a
    missing permission. Returns None for other exceptions, and for one of the user's own code.
    """
    if not isinstance(problem, OSError) or problem.errno not in _CURES:
        return None
    if not isinstance(problem.filename, str | bytes) or comes_of_user(problem):
        return None
    error = unusable_path(os.fsdecode(problem.filename), problem)
    error.__cause__ = problem
    return error


def _cure(path: Path | str, problem: OSError | ValueError) -> list[Remedy]:
    number = problem.errno if isinstance(problem, OSError) else None
    cure = _CURES.get(number, "check its spelling")
    if number != errno.EACCES:
        return [cure]
    return [cure, Command(f"ls -ld {shlex.quote(str(_closed_part(Path(path))))}")]


def _closed_part(path: Path) -> Path:
    """Return the first directory of a path that does not let us look into it, or the path."""
    for directory in reversed(path.parents):
        try:
            os.stat(os.path.join(directory, "."))
        except OSError:
            return directory
    return path


def _shortened(path: Path | str) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:60]}...{text[-20:]} ({len(text)} characters)"


def user_cache(name: str) -> Path:
    """Return surefoot's directory `name` among the user's caches. The directory may be absent.

    The directory of all programs is $XDG_CACHE_HOME. Default: ~/Library/Caches on macOS,
    %LOCALAPPDATA% on Windows, ~/.cache elsewhere.
    """
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches, "surefoot", name)
    by_platform = {
        "darwin": "~/Library/Caches",
        "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"),
    }
    caches = by_platform.get(sys.platform, "~/.cache")
    return Path(os.path.expanduser(caches), "surefoot", name)


def open_no_follow(path: Path, flags: int) -> int:
    """Open a regular file as `os.open` does, without following a link. Raises `OSError` for a link,
    pipe or device. `flags` must not truncate, because some systems detect a link only after opening
    it."""
    try:
        handle = os.open(path, flags | _FOLLOWS_NO_LINK | _WAITS_FOR_NOBODY | _BINARY, 0o666)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, _IS_LINK, str(path)) from problem
    return _checked(handle, path, link_allowed=_FOLLOWS_NO_LINK != 0)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises `OSError` for pipes and devices,
    which may never end.
    """
    # Python makes the handle non-inheritable
    handle = os.open(path, os.O_RDONLY | _WAITS_FOR_NOBODY | _BINARY)
    return open(_checked(handle, path, link_allowed=True), "rb")


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


def file_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises `ConfigError` if the file cannot be read."""
    try:
        # --config <(...) is a pipe
        data = read_regular(path) if path.is_file() else path.read_bytes()
    except OSError as problem:
        raise unusable_path(path, problem) from problem
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        kind = kind_of_bytes(data)
        raise ConfigError(
            "file-not-utf-8",
            problem=f"{path} is not UTF-8 text: {problem}",
            remedy="write it as UTF-8" if kind is None else cure_of(kind, str(path)),
            path=path,
        ) from problem


def _checked(handle: int, path: Path, *, link_allowed: bool) -> int:
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
            raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))
        if not (link_allowed or os.path.samestat(os.lstat(path), status)):
            raise OSError(errno.ELOOP, _IS_LINK, str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def make_no_follow(directory: Path) -> None:
    """Create a directory and its missing parents. Raises `OSError` if the directory is a link."""
    directory.mkdir(parents=True, exist_ok=True)
    if directory.is_symlink():
        raise OSError(errno.ELOOP, _IS_LINK, str(directory))


def write_whole(path: Path, pieces: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file from pieces, atomically. A link with the file's name is replaced, not
    followed.
    """
    if isinstance(pieces, bytes):
        pieces = [pieces]
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # left by a kill, or planted
    try:
        handle = open_no_follow(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
