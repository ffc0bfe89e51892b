"""CIFAR-10 in its binary version: rows of a label and 3,072 bytes of pixels, red before green before blue.

The Python version of the same data is pickled, and loading it would run whatever code is in it: it is refused. The format is
described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.config.paths import local_path
from surefoot.errors import DataError

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"

_ROW = 1 + 3 * SIDE * SIDE


def read_cifar(path: Path | str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (N, 32, 32, 3) and labels (N,) of one file of the binary version.

    Raises `DataError` for what is missing, does not end with a row, or has a label that is no class (naming the row).

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([3]) + bytes(3072)), file.flush()
    ...     images, labels = read_cifar(file.name)
    >>> images.shape, labels.tolist()
    ((1, 32, 32, 3), [3])
    """
    path = local_path(path, setting="path")
    try:
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
    if len(content) == 0 or len(content) % _ROW:
        raise DataError(
            f"{path} is truncated, or no file of CIFAR-10's binary version: its {len(content)} bytes are not rows of {_ROW}\n"
            "  was a download or a copy interrupted? Fetch it again"
        )
    rows = content.reshape(-1, _ROW)
    labels = rows[:, 0]
    outside = np.flatnonzero(labels >= len(CLASSES))
    if outside.size:
        raise DataError(
            f"{path}: row {outside[0]} has the label {labels[outside[0]]}, and there are {len(CLASSES)} classes\n"
            "  is it CIFAR-100, or another kind of file?"
        )
    return np.ascontiguousarray(rows[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)), labels


def read_all(path: Path) -> tuple[tuple[NDArray[np.uint8], NDArray[np.uint8]], ...]:
    """Training and test images with their labels, of a directory that holds the six files."""
    missing = [name for name in (*TRAINING_FILES, TEST_FILE) if not (path / name).is_file()]
    if missing:
        raise DataError(f"{path} holds CIFAR-10 without {', '.join(missing)}\n  unpack cifar-10-binary.tar.gz again")
    parts = [read_cifar(path / name) for name in TRAINING_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (images, labels), read_cifar(path / TEST_FILE)


def refuse_pickled(path: Path) -> None:
    """Raise `DataError` where a directory holds the Python version."""
    if (path / "data_batch_1").is_file():
        raise DataError(
            f"{path} holds the Python version of CIFAR-10, which is pickled: loading it could run any code\n"
            "  give the directory of the binary version (cifar-10-binary.tar.gz, unpacked)"
        )
