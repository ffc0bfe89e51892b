"""IDX files: what was written is read, and what is damaged is named; 1 second."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_sets import DATA, needs
from refused import refused
from surefoot.errors import DataError
from surefoot.recipes.readers.images.arrays import read_idx


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    return header + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 4, 5), (0,)])
def test_what_was_written_is_read(shape: tuple[int, ...], compressed: bool, tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(256, size=shape)
    for name in ("file", "file.gz"):  # a browser may have unpacked it
        (tmp_path / name).write_bytes(gzip.compress(idx(array)) if compressed else idx(array))
        assert read_idx(tmp_path / name, dimensions=len(shape)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("content", "code", "fields"),
    [
        (idx(np.zeros((2, 3, 3)))[:-1], "file-truncated", {}),
        (idx(np.zeros((2, 3, 3))) + b"x", "file-truncated", {}),
        (idx(np.zeros((2, 3, 3)))[:9], "file-truncated", {}),
        (gzip.compress(idx(np.zeros((2, 3, 3))), mtime=0)[:-9], "file-truncated", {}),
        (b"", "idx-of-another-kind", {"magic": None}),
        (idx(np.zeros(18)), "idx-of-another-kind", {"magic": 2049, "expected": 2051}),
        (b"\x89PNG\r\n\x1a\n", "idx-of-another-kind", {"magic": 2303741511}),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "file-truncated", {}),
    ],
)
def test_what_is_no_such_file_or_damaged_is_told(
    content: bytes, code: str, fields: dict[str, int | None], tmp_path: Path
) -> None:
    (tmp_path / "images").write_bytes(content)
    with refused(code, DataError, path=tmp_path / "images", **fields):
        read_idx(tmp_path / "images", dimensions=3)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with refused("file-unreadable", DataError, path=tmp_path / "nowhere"):
        read_idx(tmp_path / "nowhere", dimensions=1)


@needs("fashion-mnist", "mnist")
def test_real_files_have_a_tenth_of_each_class() -> None:
    labels = read_idx(DATA / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz", dimensions=1)
    assert np.bincount(labels).tolist() == [1000] * 10
    images = read_idx(DATA / "mnist" / "t10k-images-idx3-ubyte.gz", dimensions=3)
    assert images.shape == (10_000, 28, 28)


def test_no_more_is_unpacked_than_the_header_says(tmp_path: Path) -> None:
    """A hundred MB of zeros, compressed to a thousandth, behind a header of 2 x 3 x 3."""
    (tmp_path / "images").write_bytes(
        gzip.compress(idx(np.zeros((2, 3, 3))) + bytes(100_000_000), compresslevel=1)
    )
    tracemalloc.start()
    try:
        with refused("file-truncated", DataError):
            read_idx(tmp_path / "images", dimensions=3)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
