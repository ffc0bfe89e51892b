"""Labeled images in memory: scikit-learn's digits, IDX files, CIFAR-10, and synthetic images."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.config.extras import refuse_missing
from surefoot.config.paths import local_path
from surefoot.data.order import permutation
from surefoot.data.text_files import open_unpacked, truncated
from surefoot.errors import DataError, Setting
from surefoot.seeding import stream_key

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_ROW = 1 + 3 * SIDE * SIDE
_BYTES = 0x08  # the IDX type code of unsigned bytes, the usual dtype of images
_LARGEST_BYTES = 1 << 34  # the largest accepted size in a header
_IDX_PREFIXES = ("train", "t10k")  # of training and test
_IDX_IMAGES = "images-idx3"
_IDX_LABELS = "labels-idx1"
_DIGITS_TEST = 360  # test images of 1,797


@dataclass(frozen=True)
class Arrays:
    """Training and test images (N, H, W, C) as uint8, their labels (N,), and the class names."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    classes: tuple[str, ...]


def read_cifar(path: Path | str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images (N, 32, 32, 3) and labels (N,) from one file in CIFAR-10's binary format.

    Raises `DataError` for a missing file, an incomplete row, or an invalid label.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([3]) + bytes(3072)), file.flush()
    ...     images, labels = read_cifar(file.name)
    >>> images.shape, labels.tolist()
    ((1, 32, 32, 3), [3])
    """
    path = local_path(path, setting="path")
    with open_unpacked(path) as file:
        content = np.frombuffer(file.read(), dtype=np.uint8)
    if len(content) == 0 or len(content) % _ROW:
        raise truncated(
            path,
            f"its {len(content)} bytes are not rows of {_ROW} bytes, CIFAR-10's binary format",
        )
    rows = content.reshape(-1, _ROW)
    labels = rows[:, 0]
    outside = np.flatnonzero(labels >= len(CLASSES))
    if outside.size:
        row = int(outside[0])
        raise DataError(
            "cifar-label-unknown",
            problem=f"{path}: row {row} has the label {labels[row]}, and CIFAR-10 has"
            f" {len(CLASSES)} classes",
            reason="is it CIFAR-100, or another kind of file?",
            path=path,
            row=row,
            label=int(labels[row]),
        )
    images_NCHW = rows[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return np.ascontiguousarray(images_NCHW.transpose(0, 2, 3, 1)), labels


def cifar_arrays(path: Path) -> Arrays:
    """Read CIFAR-10's binary files as uint8 images and int64 labels. Raises `DataError` if a file
    is missing.
    """
    missing = [name for name in (*TRAINING_FILES, TEST_FILE) if not (path / name).is_file()]
    if missing:
        raise _incomplete(path, missing, cure="unpack cifar-10-binary.tar.gz again")
    images = []
    labels = []
    for name in TRAINING_FILES:
        images_of_file, labels_of_file = read_cifar(path / name)
        images.append(images_of_file)
        labels.append(labels_of_file)
    test_images, test_labels = read_cifar(path / TEST_FILE)
    return Arrays(
        np.concatenate(images),
        np.concatenate(labels).astype(np.int64),
        test_images,
        test_labels.astype(np.int64),
        CLASSES,
    )


def read_idx(path: Path | str, *, dimensions: int) -> NDArray[np.uint8]:
    """Return the uint8 array of an IDX file; `dimensions` is 3 for images (N, H, W) and 1 for
    labels (N,).

    Raises `DataError` for a missing file, a wrong magic number, or a size that contradicts the
    header.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9])), file.flush()
    ...     read_idx(file.name, dimensions=1).tolist()
    [7, 8, 9]
    """
    path = local_path(path, setting="path")
    with open_unpacked(path) as file:
        header = file.read(4 + 4 * dimensions)
        magic = int.from_bytes(header[:4], "big")
        expected = _BYTES << 8 | dimensions
        if len(header) < 4 or magic != expected:
            actual = f"{magic} (0x{magic:08x})" if len(header) >= 4 else f"only {len(header)} bytes"
            kind = _kind_name(dimensions).capitalize()
            likely = f"does its name match its content? {kind} of MNIST are IDX files"
            other = magic & 0xFF
            if magic >> 8 == _BYTES and 0 < other <= 4:
                likely = (
                    f"it holds {_kind_name(other)}, of {other} dimension(s): were images and labels"
                    " swapped?"
                )
            raise DataError(
                "idx-of-another-kind",
                problem=f"{path} is not an IDX file of {_kind_name(dimensions)}: its first four bytes"
                f" should be {expected}, found {actual}",
                reason=likely,
                path=path,
                magic=magic if len(header) >= 4 else None,
                expected=expected,
            )
        sizes = []
        for offset in range(4, len(header), 4):
            sizes.append(int.from_bytes(header[offset : offset + 4], "big"))
        stated = int(np.prod(sizes, dtype=object))
        stated_size = f"its header says {' x '.join(map(str, sizes))} = {stated} bytes"
        if stated > _LARGEST_BYTES:  # refused before decompression
            raise truncated(path, f"{stated_size}, but at most {_LARGEST_BYTES} are allowed")
        content = file.read(stated + 1)  # one byte more shows that a file is too long
    if len(content) != stated or len(header) < 4 + 4 * dimensions:
        actual = str(len(content)) if len(content) <= stated else "more"
        raise truncated(path, f"{stated_size}, but it holds {actual}")
    return np.frombuffer(content, dtype=np.uint8).reshape(sizes)


def _kind_name(dimensions: int) -> str:
    return "labels" if dimensions == 1 else "images"


def digits() -> Arrays:
    """Return scikit-learn's 1,797 handwritten digits (8 x 8 pixels); the test part is a fixed
    selection of 360 digits.

    Source: the test part of the data set of Alpaydin and Kaynak 1998,
    https://doi.org/10.24432/C50P49

    >>> digits().test_images.shape
    (360, 8, 8, 1)
    """
    refuse_missing("the data set of digits", "sklearn", instead=Setting("data.path", "synthetic"))
    # a gzipped table of 64 pixels, from 0 to 16, and the digit; importing scikit-learn would take
    # longer than the first step
    file = _package_directory("sklearn") / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.int64)
    images = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = rows[:, -1]
    order = permutation(stream_key(0, "digits to test"), len(images), np.arange(len(images)))
    test = order[:_DIGITS_TEST]
    training = np.sort(order[_DIGITS_TEST:])
    return Arrays(
        images[training], labels[training], images[test], labels[test], tuple("0123456789")
    )


def _package_directory(name: str) -> Path:
    package = find_spec(name)
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent


def idx_arrays(folder: Path, *, numbered: bool = True) -> Arrays:
    """Read four IDX files, plain or .gz; if `numbered` is true, raise `DataError` for a class
    without a training image.
    """
    parts = []
    for prefix in _IDX_PREFIXES:
        images = _idx_file(folder, prefix, _IDX_IMAGES)
        labels = _idx_file(folder, prefix, _IDX_LABELS)
        if images is None or labels is None:
            files = {_IDX_IMAGES: images, _IDX_LABELS: labels}
            missing = [f"{prefix}-{kind}-ubyte" for kind, file in files.items() if file is None]
            raise _incomplete(
                folder,
                missing,
                cure="MNIST and Fashion-MNIST have four files, plain or .gz; put all of them into"
                " one directory",
            )
        pixels = read_idx(images, dimensions=3)
        numbers = read_idx(labels, dimensions=1)
        if len(pixels) != len(numbers):
            raise DataError(
                "idx-labels-not-of-images",
                problem=f"{images} has {len(pixels)} images, and {labels} {len(numbers)} labels",
                remedy="fetch both again",
                images=len(pixels),
                labels=len(numbers),
            )
        parts.append((labels, pixels[..., None], numbers.astype(np.int64)))
    (source, training, training_labels), (_, test, test_labels) = parts
    images_of = np.bincount(training_labels)
    if numbered and not images_of.all():
        row = int(training_labels.argmax())
        absent = int(images_of.argmin())
        raise DataError(
            "idx-label-without-image",
            problem=f"{source}: row {row} has the label {training_labels[row]}, but no image has the"
            f" label {absent}: is the file damaged?",
            remedy=("if the number of classes is right, name them:", Setting("data.classes")),
            path=source,
            row=row,
            label=int(training_labels[row]),
            absent=absent,
        )
    classes = tuple(str(label) for label in range(max(1, len(images_of))))
    return Arrays(training, training_labels, test, test_labels, classes)


def synthetic(
    *, images: int = 10_000, size: int = 32, channels: int = 3, classes: int = 10
) -> Arrays:
    """Return synthetic images for speed measurements: one noisy pattern per class, and 20% as many
    test images.

    >>> arrays = synthetic(images=20, size=8, channels=1, classes=2)
    >>> arrays.images.shape, arrays.test_images.shape, sorted(set(arrays.labels.tolist()))
    ((20, 8, 8, 1), (4, 8, 8, 1), [0, 1])
    """
    generator = np.random.default_rng(0)
    patterns = generator.integers(64, 192, (classes, size, size, channels))
    number = images + images // 5
    labels = np.arange(number, dtype=np.int64) % classes
    pixels = np.empty((number, size, size, channels), dtype=np.uint8)
    for first in range(0, number, 1000):  # in blocks, to limit the memory for noise
        chosen = slice(first, first + 1000)
        noise = generator.integers(-64, 64, pixels[chosen].shape)
        pixels[chosen] = patterns[labels[chosen]] + noise
    return Arrays(
        pixels[:images],
        labels[:images],
        pixels[images:],
        labels[images:],
        tuple(map(str, range(classes))),
    )


def arrays_in(folder: Path, *, numbered: bool = True) -> Arrays | None:
    """Read CIFAR-10 or IDX files (see `idx_arrays`) from a directory; return None if neither
    exists.
    """
    for directory in (folder, folder / "cifar-10-batches-bin"):
        if any((directory / name).is_file() for name in (*TRAINING_FILES, TEST_FILE)):
            return cifar_arrays(directory)
    for directory in (folder, folder / "cifar-10-batches-py"):
        if (directory / "data_batch_1").is_file():
            raise DataError(
                "cifar-pickled",
                problem=f"{directory} holds the Python version of CIFAR-10, which is pickled",
                reason="loading it could run arbitrary code",
                remedy="give the directory of the binary version (cifar-10-binary.tar.gz, unpacked)",
                path=directory,
            )
    for prefix in _IDX_PREFIXES:
        for kind in (_IDX_IMAGES, _IDX_LABELS):
            if _idx_file(folder, prefix, kind) is not None:
                return idx_arrays(folder, numbered=numbered)
    return None


def _incomplete(folder: Path, missing: list[str], *, cure: str) -> DataError:
    return DataError(
        "image-files-missing",
        problem=f"{folder} lacks {', '.join(missing)}",
        remedy=cure,
        path=folder,
        missing=missing,
    )


def _idx_file(folder: Path, prefix: str, kind: str) -> Path | None:
    # some programs unpack files under the second name
    for name in (kind, kind.replace("-", ".")):
        for end in ("", ".gz"):
            file = folder / f"{prefix}-{name}-ubyte{end}"
            if file.is_file():
                return file
    return None
