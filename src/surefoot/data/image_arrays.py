"""Images that fit into memory, as arrays with their labels: scikit-learn's digits, IDX files, CIFAR-10, and a made-up set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.data import cifar
from surefoot.data.idx import read_idx
from surefoot.data.plan import permutation
from surefoot.errors import DataError
from surefoot.seeding import stream_key

_DIGITS_TEST = 360  # of 1,797
_IDX_PARTS = {"training": "train", "test": "t10k"}


@dataclass(frozen=True)
class Arrays:
    """Images (N, H, W, C) as bytes and labels (N,) of a training and a test part, and the names of the classes."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]


def digits() -> Arrays:
    """The 1,797 real handwritten digits of 8 x 8 pixels that come with scikit-learn; 360 of them, always the same, to test.

    They are the test part of Alpaydin and Kaynak 1998: https://doi.org/10.24432/C50P49

    >>> digits().test_images.shape
    (360, 8, 8, 1)
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = found.target.astype(np.int64)
    order = permutation(stream_key(0, "digits to test"), len(images), np.arange(len(images)))
    test, training = order[:_DIGITS_TEST], np.sort(order[_DIGITS_TEST:])
    return Arrays(images[training], labels[training], images[test], labels[test], tuple("0123456789"))


def idx_arrays(folder: Path, *, numbered: bool = True) -> Arrays:
    """The four IDX files of a directory, each plain or with .gz; classes are called by their numbers.

    numbered: nothing else says how many classes there are, so that each must have an image to train on, or is taken for damage.
    """
    parts, sources = [], []
    for part, prefix in _IDX_PARTS.items():
        images, labels = (_idx_file(folder, prefix, kind) for kind in ("images-idx3", "labels-idx1"))
        missing = " and ".join(
            f"{prefix}-{kind}-ubyte"
            for kind, path in (("images-idx3", images), ("labels-idx1", labels))
            if path is None
        )
        if images is None or labels is None:
            raise DataError(
                f"{folder} has no {missing} (nor with .gz): the {part} part is missing\n"
                "  MNIST and Fashion-MNIST are four files; put all of them into one directory"
            )
        pixels, numbers = read_idx(images, dimensions=3), read_idx(labels, dimensions=1)
        if len(pixels) != len(numbers):
            raise DataError(f"{images} holds {len(pixels)} images, {labels} {len(numbers)} labels\n  fetch both again")
        sources.append(labels)
        parts.append((pixels[..., None], numbers.astype(np.int64)))
    (training, training_labels), (test, test_labels) = parts
    images_of = np.bincount(training_labels)
    if numbered and not images_of.all():
        raise DataError(
            f"{sources[0]}: row {training_labels.argmax()} has the label {training_labels.max()}, and no image has the label "
            f"{images_of.argmin()}: is the file damaged?\n  if there are so many classes, name them: --data.classes"
        )
    number = max(1, len(images_of))
    return Arrays(training, training_labels, test, test_labels, tuple(str(label) for label in range(number)))


def cifar_arrays(folder: Path) -> Arrays:
    """CIFAR-10's binary version."""
    (images, labels), (test_images, test_labels) = cifar.read_all(folder)
    return Arrays(images, labels.astype(np.int64), test_images, test_labels.astype(np.int64), cifar.CLASSES)


def synthetic(*, images: int = 10_000, size: int = 32, channels: int = 3, classes: int = 10) -> Arrays:
    """A pattern for each class under much noise, for measuring speed without data; a fifth as many to test.

    >>> made = synthetic(images=20, size=8, channels=1, classes=2)
    >>> made.images.shape, made.test_images.shape, sorted(set(made.labels.tolist()))
    ((20, 8, 8, 1), (4, 8, 8, 1), [0, 1])
    """
    generator = np.random.default_rng(0)
    patterns = generator.integers(64, 192, (classes, size, size, channels))
    number = images + images // 5
    labels = np.arange(number, dtype=np.int64) % classes
    made = np.empty((number, size, size, channels), dtype=np.uint8)
    for first in range(0, number, 1000):  # not all of the noise at once
        chosen = slice(first, first + 1000)
        noise = generator.integers(-64, 64, made[chosen].shape)
        made[chosen] = patterns[labels[chosen]] + noise
    names = tuple(str(label) for label in range(classes))
    return Arrays(made[:images], labels[:images], made[images:], labels[images:], names)


def found_in(folder: Path, *, numbered: bool = True) -> Arrays | None:
    """The arrays that a directory holds; None where it holds none, and may be one of pictures. numbered: see `idx_arrays`."""
    for place in (folder, folder / "cifar-10-batches-bin"):
        if any((place / name).is_file() for name in (*cifar.TRAINING_FILES, cifar.TEST_FILE)):
            return cifar_arrays(place)
    cifar.refuse_pickled(folder)
    cifar.refuse_pickled(folder / "cifar-10-batches-py")
    named = [
        _idx_file(folder, prefix, kind) for prefix in _IDX_PARTS.values() for kind in ("images-idx3", "labels-idx1")
    ]
    return None if not any(named) else idx_arrays(folder, numbered=numbered)


def _idx_file(folder: Path, prefix: str, kind: str) -> Path | None:
    dotted = kind.replace("-", ".")  # as some programs unpack them
    names = [f"{prefix}-{written}-ubyte{end}" for written in (kind, dotted) for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)
