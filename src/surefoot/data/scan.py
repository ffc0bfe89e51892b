"""The scanner of directories: which files below a path a reader takes, and what it leaves out, with
a reason for each. Imports no torch.

All readers of text, documents, pictures, pairs and tables list files here. What was there and is
not trained on is said in one line (`Scan.line`), which stands in the header of the run.
"""

import errno
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from surefoot.config.paths import look_at, unusable_path
from surefoot.errors import DataError, SurefootError

TEXT = (".txt", ".text", ".md", ".rst", ".py")
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq", ".parq")
ARROW = (".arrow", ".feather")
TABLES = (*PARQUET, *ARROW)
# All raster formats that Pillow opens by itself. Left out are EPS, for which it starts Ghostscript,
# and the formats that it recognizes but cannot decode: WMF, MPEG, HDF5, GRIB, BUFR.
PICTURES = (
    ".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".bmp", ".dib", ".gif", ".webp",
    ".avif", ".avifs", ".tif", ".tiff", ".jp2", ".j2k", ".jpc", ".jpf", ".jpx", ".j2c",
    ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga", ".icb", ".vda", ".vst", ".ico",
    ".cur", ".icns", ".dds", ".pcx", ".dcx", ".psd", ".qoi", ".sgi", ".rgb", ".rgba",
    ".bw", ".ras", ".im", ".iim", ".msp", ".xbm", ".xpm", ".blp", ".fit", ".fits",
    ".fli", ".flc", ".ftc", ".ftu", ".gbr", ".pcd", ".pxr",
)  # fmt: skip
COMPRESSED = (".gz", ".zst")
DOCUMENTATION = (".md", ".py")  # where records stand beside them

HIDDEN = "its name begins with . or _, as names of programs do"
OF_SYSTEM = "a folder of the file system, not of the data"
OTHER_KIND = "files of this kind are not read here"
PACKED = "this kind of file is compressed already, and is not read inside another compression"
ABOUT_DATA = "it tells of the data files beside it"
CACHE = "a result that the package datasets stored beside the data it was made from"
EMPTY = "a file of 0 bytes has no text"
READ_ALREADY = "a link to a folder that is read already"
NO_FILE = "a pipe, a socket or a device"

_ABOUT_DATA = re.compile(
    r"""(readme|licen[cs]e|copying|citation|data(set)?[-_ ]?card|datasheet)
    ([-._](
        [a-z]{2}([-_][a-z]{2,4})?  # a language
        | v\d+([.]\d+)* | \d+([.]\d+)+  # a version
        | (mit|isc|apache|bsd|[al]?gpl|mpl|cc|odc|odbl|ofl)(v?\d[\w.-]*|[-_.][\w.-]+)?  # a license
        | md | rst | text | txt
    ))?""",
    re.VERBOSE,
)
# what `map`, `filter` and `sort` of datasets leave in a folder of `save_to_disk`
_CACHE = re.compile(r"cache-[0-9a-f]{8,}(_[0-9]+_of_[0-9]+)?\.arrow")
_DATA = {".txt", ".text", *JSON_LINES, *TABLES, *PICTURES, ".csv", ".tsv", ".json"}
_OF_SYSTEM = {"lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}
_KINDS_SHOWN = 6
_NAMED = 5  # entries in a line about a reason


class LeftOut(NamedTuple):
    """A file or a folder that is not read, and why."""

    path: Path
    reason: str
    is_folder: bool = False


class Level(NamedTuple):
    """What stands in a folder itself, and what of it no reader takes."""

    folders: list[Path]
    links: list[Path]
    """Links to folders."""
    files: list[Path]
    left_out: list[LeftOut]


@dataclass(frozen=True)
class Scan:
    """The files that a reader takes from a path, sorted by path, and what it leaves out."""

    path: Path
    files: list[Path]
    left_out: list[LeftOut]
    folders: list[Path] = field(default_factory=list)
    """The folders that were read, `path` among them."""

    def line(self) -> str:
        """Return one line about what is not read, or "" if everything is.

        >>> here = Path("data")
        >>> Scan(here, [here / "a.txt"], [LeftOut(here / "b.PDF", OTHER_KIND)]).line()
        'read 1 of 2 files; not read: 1 .PDF; surefoot data look data says why'
        """
        if not self.left_out:
            return ""
        reported = _REPORTED.get()
        if reported is None:
            where = f"; surefoot data look {shlex.quote(printable(self.path))} says why"
        else:
            where = ""  # who collects the scans says why itself
            reported.append(self)
        files = [entry for entry in self.left_out if not entry.is_folder]
        count = len(self.files) + len(files)
        kinds = Counter(map(_label, self.left_out)).most_common()
        shown = [f"{number:,} {label}" for label, number in kinds[:_KINDS_SHOWN]]
        others = sum(number for _, number in kinds[_KINDS_SHOWN:])
        if others:
            shown.append(f"{others:,} others")
        return (
            f"read {len(self.files):,} of {count:,} file{'s' * (count != 1)};"
            f" not read: {', '.join(shown)}{where}"
        )

    def reasons(self) -> list[str]:
        """Return a line for each reason, with the first names that it holds for.

        >>> here = Path("data")
        >>> Scan(here, [], [LeftOut(here / "b.PDF", OTHER_KIND)]).reasons()
        ['b.PDF: files of this kind are not read here']
        """
        names: dict[str, list[str]] = {}
        for entry in self.left_out:
            name = printable(os.path.relpath(entry.path, self.path))
            names.setdefault(entry.reason, []).append(f"{name}/" if entry.is_folder else name)
        lines = []
        for reason, of_reason in names.items():
            more = f" ... ({len(of_reason):,})" if len(of_reason) > _NAMED else ""
            lines.append(f"{', '.join(of_reason[:_NAMED])}{more}: {reason}")
        return lines


_REPORTED: ContextVar[list[Scan] | None] = ContextVar("_REPORTED", default=None)


@contextmanager
def reported_scans() -> Iterator[list[Scan]]:
    """Collect the scans whose `line` is asked for inside the block, since that line promises
    reasons.
    """
    reported = list[Scan]()
    token = _REPORTED.set(reported)
    try:
        yield reported
    finally:
        _REPORTED.reset(token)


def kind_of(path: Path) -> str:
    """Return the suffix that says what a file holds, in small letters, without `.gz` or `.zst`.

    >>> kind_of(Path("a.JSONL.gz")), kind_of(Path("LICENSE"))
    ('.jsonl', '')
    """
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def is_packed_again(path: Path) -> bool:
    """Return True for a compressed picture or table, which no reader takes.

    >>> is_packed_again(Path("a.parquet.gz")), is_packed_again(Path("a.jsonl.gz"))
    (True, False)
    """
    return path.suffix.lower() in COMPRESSED and kind_of(path) in (*PICTURES, *TABLES)


def printable(name: object) -> str:
    """Return a name with escapes for bytes that are not UTF-8, which no terminal or JSON takes.

    >>> printable(os.fsdecode(b"caf" + bytes([0xE9])))
    'caf\\\\xe9'
    """
    return os.fsencode(str(name)).decode(errors="backslashreplace")


def no_such(path: Path, *, kind: str = "file or directory") -> DataError:
    """Return the error for a missing path."""
    return DataError(
        "path-missing",
        problem=f"no {kind} {printable(path)} (looked in {Path.cwd()})",
        remedy="check the spelling; a relative path starts at the current directory",
        path=path,
    )


def unreadable(path: Path, problem: OSError) -> DataError:
    """Return the error for a file that the system does not read."""
    return DataError(
        "file-unreadable",
        problem=f"{printable(path)} cannot be read: {problem.strerror or problem}",
        remedy="check its permissions, and that it was copied completely",
        path=path,
    )


def scan(
    path: Path,
    suffixes: Sequence[str],
    *,
    documentation: Sequence[str] = DOCUMENTATION,
    out: Path | None = None,
) -> Scan:
    """List the files below a directory whose kind is one of `suffixes`. A file is taken as it is.

    Suffixes are compared without case, and looked for below `.gz` and `.zst`. Links are followed,
    and no folder is read twice. Names below `path` that begin with "." or "_" are left out, and so
    is everything below `out`. If data files are there, README, LICENSE and dataset cards are left
    out; beside JSON lines and tables also all files of the kinds in `documentation`. Text and JSON
    lines of 0 bytes are left out, and the results that `datasets` stores beside its tables. Raises
    `DataError` for a missing path, a pipe, a folder that cannot be read, and a link to nothing, and
    `ConfigError` for a path that the system does not let us look at.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> for name in ("a.TXT", "b.csv", "README.md", ".c.txt"):
    ...     _ = (root / name).write_text("one")
    >>> [file.name for file in scan(root, TEXT).files]
    ['a.TXT']
    """
    status = _status(path)
    if stat.S_ISREG(status.st_mode):
        return Scan(path, [path], [])
    if not stat.S_ISDIR(status.st_mode):
        raise DataError(
            "path-no-file",
            problem=f"{printable(path)} is {NO_FILE}, not a file",
            reason="data are read several times",
            remedy="write what comes out of it into a file",
            path=path,
        )
    candidates = list[Path]()
    left_out = list[LeftOut]()
    folders = list[Path]()
    for folder, level in _levels(path, out=out, left_out=left_out):
        folders.append(folder)
        left_out += level.left_out
        for file in level.files:
            kind = kind_of(file)
            if kind not in suffixes:
                left_out.append(LeftOut(file, OTHER_KIND))
            elif is_packed_again(file):
                left_out.append(LeftOut(file, PACKED))
            elif kind in (*TEXT, *JSON_LINES) and file.stat().st_size == 0:
                left_out.append(LeftOut(file, EMPTY))
            else:
                candidates.append(file)
    about_data = _about_data(candidates, left_out, documentation)
    left_out += [LeftOut(file, ABOUT_DATA) for file in candidates if file in about_data]
    caches = _caches(candidates)
    left_out += [LeftOut(file, CACHE) for file in candidates if file in caches]
    files = [file for file in candidates if file not in about_data | caches]
    return Scan(
        path,
        sorted(files, key=lambda file: file.parts),
        sorted(left_out, key=lambda entry: entry.path.parts),
        sorted(folders, key=lambda folder: folder.parts),
    )


def scan_as_before(path: Path, suffixes: Sequence[str], *, ignore_case: bool = False) -> Scan:
    """List the files below a directory as runs did that began before behavior 10: suffixes with
    their case, no links to folders, hidden names too.
    """
    files = []
    for file in path.rglob("*"):
        suffix = file.suffix.lower() if ignore_case else file.suffix
        if suffix in suffixes and file.is_file():
            files.append(file)
    return Scan(path, sorted(files, key=lambda file: file.parts), [])


def level_of(folder: Path) -> Level:
    """Return what stands in a folder, sorted by name, without what is below it."""
    level = Level([], [], [], [])
    for entry in _listed(folder):
        path = Path(entry.path)
        if entry.name.startswith((".", "_")):
            is_folder = entry.is_dir(follow_symlinks=False)
            level.left_out.append(LeftOut(path, HIDDEN, is_folder=is_folder))
        elif entry.name in _OF_SYSTEM:
            level.left_out.append(LeftOut(path, OF_SYSTEM, is_folder=True))
        else:
            mode = _mode(path)
            if stat.S_ISDIR(mode):
                (level.links if entry.is_symlink() else level.folders).append(path)
            elif stat.S_ISREG(mode):
                level.files.append(path)
            else:
                level.left_out.append(LeftOut(path, NO_FILE))
    return level


def _levels(
    root: Path, *, out: Path | None, left_out: list[LeftOut]
) -> Iterator[tuple[Path, Level]]:
    """Yield each folder with what stands in it; add those that were read before to `left_out`.
    Folders are visited before the links to folders, so that a folder is read under its own name.
    """
    output = None if out is None else out.resolve()
    visited = set[tuple[int, int]]()
    folders = [root]
    links = list[Path]()
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        identity = _identity(folder)
        if identity in visited:
            left_out.append(LeftOut(folder, READ_ALREADY, is_folder=True))
            continue
        visited.add(identity)
        if output is not None and folder.resolve() == output:
            continue
        level = level_of(folder)
        folders += level.folders
        links += level.links
        yield folder, level


def _status(path: Path) -> os.stat_result:
    status = look_at(path)
    if status is not None:
        return status
    if os.path.islink(path):
        problem = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise _unreachable(path, problem)
    raise no_such(path)


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as problem:
        raise DataError(
            "folder-unreadable",
            problem=f"the folder {printable(folder)} cannot be read: {problem.strerror}",
            reason="what is in it would be left out in silence",
            remedy="give yourself permission to read it, or move it out of the data",
            path=folder,
        ) from problem


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as problem:
        raise _unreachable(folder, problem) from problem
    return status.st_dev, status.st_ino


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as problem:
        raise _unreachable(path, problem) from problem


def _unreachable(path: Path, problem: OSError) -> SurefootError:
    if os.path.islink(path):
        target = printable(os.readlink(path))
        return DataError(
            "link-to-nothing",
            problem=f"{printable(path)} is a link to {target}, which cannot be reached:"
            f" {problem.strerror}",
            reason="the file that it stands for would be left out in silence",
            remedy="mend the link, or remove it",
            path=path,
            target=target,
        )
    return unusable_path(path, problem)


def _about_data(
    candidates: Sequence[Path], left_out: Sequence[LeftOut], documentation: Sequence[str]
) -> set[Path]:
    """Return the files that tell of the data beside them, and are no data."""
    by_name = {file for file in candidates if _tells_of_data(file)}
    others = [entry.path for entry in left_out if entry.reason in (OTHER_KIND, PACKED)]
    data = {kind_of(file) for file in [*candidates, *others] if file not in by_name} & _DATA
    if not data:
        return set()
    by_kind = set[Path]()
    if any(kind_of(file) in (*JSON_LINES, *TABLES) for file in candidates):
        by_kind = {file for file in candidates if kind_of(file) in documentation}
    return by_name | by_kind


def _caches(candidates: Sequence[Path]) -> set[Path]:
    """Return the results that `datasets` has stored in the folder of another table."""
    tables = [file for file in candidates if kind_of(file) in TABLES]
    caches = {file for file in tables if _CACHE.fullmatch(file.name) is not None}
    folders = {file.parent for file in tables if file not in caches}
    return {file for file in caches if file.parent in folders}


def _tells_of_data(file: Path) -> bool:
    stem = file.name.removesuffix(file.suffix).lower()
    return kind_of(file) in TEXT and _ABOUT_DATA.fullmatch(stem) is not None


def _label(entry: LeftOut) -> str:
    """Return how a line counts an entry: a kind of file, or the name of a file without one."""
    if entry.is_folder:
        hidden = "hidden folder" if entry.reason == HIDDEN else "folder"
        return f"{hidden} ({printable(entry.path.name)})"
    if entry.reason == HIDDEN:
        return "hidden"
    if entry.reason == CACHE:
        return "cached"
    if entry.reason == ABOUT_DATA:
        return printable(entry.path.name)
    suffix = entry.path.suffix
    if suffix.lower() in COMPRESSED:
        suffix = entry.path.with_suffix("").suffix + suffix
    label = printable(suffix or entry.path.name)
    return f"empty {label}" if entry.reason == EMPTY else label
