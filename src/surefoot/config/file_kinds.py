"""What a file is, by its first bytes, and what to do if text was expected. Imports no torch."""

import shlex
from typing import NamedTuple

from surefoot.errors import Command, Remedy


class FileKind(NamedTuple):
    """The first bytes of a kind of file, its name, and a command that makes text of it, or a
    phrase. FILE in it is the file.
    """

    start: bytes
    name: str
    cure: str
    is_command: bool = True


_UTF_32 = ("UTF-32 text", "iconv -f utf-32 -t utf-8 FILE > utf-8.txt")
_UTF_16 = ("UTF-16 text", "iconv -f utf-16 -t utf-8 FILE > utf-8.txt")
_PICTURE = ("a picture", "pictures are for the recipe images", False)
_TABLE = "rename it, so that its name ends in "
# the mark of UTF-32 begins with that of UTF-16
KINDS = (
    FileKind(b"\xff\xfe\0\0", *_UTF_32),
    FileKind(b"\0\0\xfe\xff", *_UTF_32),
    FileKind(b"\xff\xfe", *_UTF_16),
    FileKind(b"\xfe\xff", *_UTF_16),
    FileKind(b"\x1f\x8b", "compressed by gzip", "gunzip -k FILE"),
    FileKind(b"\x28\xb5\x2f\xfd", "compressed by zstd", "unzstd FILE"),
    FileKind(b"\xfd7zXZ\0", "compressed by xz", "unxz -k FILE"),
    FileKind(b"BZh", "compressed by bzip2", "bunzip2 -k FILE"),
    FileKind(b"\x04\x22\x4d\x18", "compressed by lz4", "unlz4 FILE"),
    FileKind(b"PK\x03\x04", "a zip archive or an office document", "unzip FILE"),
    FileKind(b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x FILE"),
    FileKind(b"Rar!\x1a\x07", "a rar archive", "unrar x FILE"),
    FileKind(b"%PDF-", "a PDF", "pdftotext FILE"),
    FileKind(b"PAR1", "a Parquet table", f"{_TABLE}.parquet", False),
    FileKind(b"ARROW1", "an Arrow table", f"{_TABLE}.arrow", False),
    FileKind(b"SQLite format 3\0", "a database of SQLite", "write its text into a file", False),
    FileKind(b"\x89HDF\r\n", "an HDF5 file", "write its text into a file", False),
    FileKind(b"\x93NUMPY", "an array of NumPy", "write its text into a file", False),
    FileKind(b"\x89PNG\r\n", *_PICTURE),
    FileKind(b"\xff\xd8\xff", *_PICTURE),
    FileKind(b"GIF8", *_PICTURE),
)


def kind_of_bytes(data: bytes) -> FileKind | None:
    """Return the kind of a file that is no UTF-8 text, or None if its first bytes are unknown.

    >>> kind_of_bytes(b"%PDF-1.7").name, kind_of_bytes(b"plain") is None
    ('a PDF', True)
    """
    for kind in KINDS:
        if data.startswith(kind.start):
            return kind
    return None


def cure_of(kind: FileKind, file: str) -> Remedy:
    """Return what makes text of a file of this kind.

    >>> cure_of(kind_of_bytes(b"%PDF-1.7"), "a b.pdf").line
    "pdftotext 'a b.pdf'"
    """
    if kind.is_command:
        return Command(kind.cure.replace("FILE", shlex.quote(file)))
    return kind.cure
