"""IDX files, the format of MNIST and Fashion-MNIST: a magic number, sizes, then bytes; plain or compressed with gzip.

The format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from surefoot.config.paths import local_path
from surefoot.errors import DataError

_BYTES = 0x08  # the type of the numbers; others are not written for images
_MOST_DIMENSIONS = 4
_LARGEST_BYTES = 1 << 34  # what a header may claim


def read_idx(path: Path | str, *, dimensions: int) -> NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes with so many dimensions: 3 for images (N, H, W), 1 for labels (N,).

    Raises `DataError` for what is missing, has another magic number, or is shorter or longer than its header says.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])), file.flush()
    ...     read_idx(file.name, dimensions=1).tolist()
    [7, 8, 9]
    """
    path = local_path(path, setting="path")
    try:
        with _opened(path) as file:
            return _read(file, path, dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise DataError(
            f"{path} is truncated or damaged: {problem}\n  was a download or a copy interrupted? Fetch it again"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return cast("BinaryIO", gzip.open(path)) if compressed else path.open("rb")


def _read(file: BinaryIO, path: Path, dimensions: int) -> NDArray[np.uint8]:
    header = file.read(4 + 4 * dimensions)
    magic = int.from_bytes(header[:4], "big")
    expected = _BYTES << 8 | dimensions
    if len(header) < 4 or magic != expected:
        found = f"{magic} (0x{magic:08x})" if len(header) >= 4 else f"only {len(header)} bytes"
        raise DataError(
            f"{path} is no IDX file of {_called(dimensions)}: its first four bytes should be {expected}, found {found}\n"
            f"  {_likely(magic, dimensions)}"
        )
    sizes = [int.from_bytes(header[place : place + 4], "big") for place in range(4, len(header), 4)]
    stated = int(np.prod(sizes, dtype=object))
    shown = f"its header says {' x '.join(str(size) for size in sizes)} = {stated} bytes"
    if stated > _LARGEST_BYTES:  # told before anything is unpacked
        raise DataError(f"{path} is damaged: {shown}, and more than {_LARGEST_BYTES} are not read")
    content = file.read(stated + 1)  # no more of what is compressed than that is unpacked
    if len(content) != stated or len(header) < 4 + 4 * dimensions:
        short = len(content) <= stated
        raise DataError(
            f"{path} is {'truncated' if short else 'too long'}: {shown}, it holds {len(content) if short else 'more'}\n"
            "  was a download or a copy interrupted? Fetch it again"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(sizes)


def _called(dimensions: int) -> str:
    return "labels" if dimensions == 1 else "images"


def _likely(magic: int, dimensions: int) -> str:
    other = magic & 0xFF
    if magic >> 8 == _BYTES and 0 < other <= _MOST_DIMENSIONS:
        return f"it holds {_called(other)}, of {other} dimension(s): were images and labels exchanged?"
    return f"is it another kind of file than its name says? {_called(dimensions).capitalize()} of MNIST are IDX"
