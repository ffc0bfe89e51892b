"""CIFAR-10's binary version: pixels in their places, damaged files named, the pickled version
refused; 1 second.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from refused import refused
from surefoot.errors import DataError
from surefoot.recipes.readers.images import arrays
from surefoot.recipes.readers.images.arrays import arrays_in, cifar_arrays, read_cifar


def rows(labels: list[int], seed: int = 0) -> tuple[bytes, np.ndarray]:
    """The file, and the images as (N, 3, 32, 32)."""
    planes = np.random.default_rng(seed).integers(
        256, size=(len(labels), 3, 32, 32), dtype=np.uint8
    )
    return b"".join(
        bytes([label]) + plane.tobytes() for label, plane in zip(labels, planes, strict=True)
    ), planes


def test_pixels_and_labels_are_where_they_belong(tmp_path: Path) -> None:
    content, planes = rows([3, 9, 0])
    (tmp_path / "file.bin").write_bytes(content)
    images, labels = read_cifar(tmp_path / "file.bin")
    assert labels.tolist() == [3, 9, 0]
    assert images[2, 5, 7].tolist() == [planes[2, channel, 5, 7] for channel in range(3)]
    assert np.array_equal(images.transpose(0, 3, 1, 2), planes)


def test_all_six_files_are_read_in_order(tmp_path: Path) -> None:
    for place, name in enumerate((*arrays.TRAINING_FILES, arrays.TEST_FILE)):
        (tmp_path / name).write_bytes(rows([place, place])[0])
    found = cifar_arrays(tmp_path)
    assert (found.labels.tolist(), found.test_labels.tolist()) == (
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
        [5, 5],
    )
    assert (found.images.shape, found.test_images.shape) == ((10, 32, 32, 3), (2, 32, 32, 3))


@pytest.mark.parametrize(
    ("content", "code", "fields"),
    [
        (rows([1])[0][:-1], "file-truncated", {}),
        (b"", "file-truncated", {}),
        (rows([1, 10])[0], "cifar-label-unknown", {"row": 1, "label": 10}),
    ],
)
def test_damaged_files_are_named(
    content: bytes, code: str, fields: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "file.bin").write_bytes(content)
    with refused(code, DataError, path=tmp_path / "file.bin", **fields):
        read_cifar(tmp_path / "file.bin")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / arrays.TEST_FILE).write_bytes(rows([1])[0])
    missing = [*arrays.TRAINING_FILES]
    with refused("image-files-missing", DataError, path=tmp_path, missing=missing):
        cifar_arrays(tmp_path)


def test_the_pickled_version_is_refused_and_never_opened(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with refused("cifar-pickled", DataError, path=tmp_path):
        arrays_in(tmp_path)
