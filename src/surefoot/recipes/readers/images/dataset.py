"""Data sets of labeled images, in memory or in files.

A sample is a normalized float32 image (C, H, W) and a class index. Samples depend only on (seed,
epoch, sample id). Shape suffixes: N images, B batch, C channels, H height, W width.
"""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.fingerprints import hash_of
from surefoot.data.order import Ids, sample_bits
from surefoot.data.stored_samples import Batch, rows_as_bytes
from surefoot.errors import DataError
from surefoot.recipes.readers.images.augmentation import Augmentation, augment
from surefoot.recipes.readers.images.folder import LabeledFiles
from surefoot.recipes.readers.images.picture import Fitting, ValueRange, open_picture, read_picture
from surefoot.seeding import fold, seeded_bits, stream_key

Moments = tuple[tuple[float, ...], tuple[float, ...]]
Dataset = TypeVar("Dataset", bound="ImageArrays | ImageFiles")

_PIECE = 1000  # first draw number of random crops; augmentation uses lower numbers


class ImageArrays:
    """Data set of uint8 images (N, H, W, C) in memory with labels (N,); `gather` returns a whole
    batch.

    `seed` is the run's seed; `gather` draws the augmentation of an image from (seed, epoch, sample
    id).

    >>> images = ImageArrays(
    ...     np.zeros((5, 8, 8, 1), np.uint8), np.arange(5), mean=(0.5,), std=(0.25,)
    ... )
    >>> batch, labels = images.gather(np.array([3, 4]), np.array([0, 0]))
    >>> batch.shape, float(batch[0, 0, 0, 0]), labels.tolist()
    (torch.Size([2, 1, 8, 8]), -2.0, [3, 4])
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[Any],
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise DataError(
                "image-arrays-invalid",
                problem="images must be uint8 of shape (N, H, W, C) with N labels; found"
                f" {images.dtype} {images.shape} and {len(labels)} labels",
                shape=list(images.shape),
                labels=len(labels),
            )
        self.images = images
        self.labels = torch.from_numpy(np.asarray(labels, dtype=np.int64).copy())
        self.mean = mean
        self.std = std
        self.augmentation = augmentation
        self.key = stream_key(seed, "augment")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        """Return an image (C, H, W) and its label; the augmentation is drawn from the seeded global
        generators.
        """
        bits = np.array([seeded_bits()], dtype=np.uint64)
        images_1CHW = _inputs(self, self.images[sample : sample + 1], bits)
        return images_1CHW[0], self.labels[sample]

    def gather(self, ids: Ids, epochs: Ids) -> tuple[Tensor, Tensor]:
        """Return images (B, C, H, W), augmented for their epochs, and labels (B,)."""
        bits = sample_bits(self.key, ids, epochs)
        images_BCHW = _inputs(self, self.images.take(ids, axis=0), bits)
        return images_BCHW, self.labels[ids]

    def stored(self, ids: Ids) -> Batch:
        """Return the bytes of each unaugmented image with its label, and all labels."""
        labels = self.labels.numpy()[ids]
        return rows_as_bytes(self.images.take(ids, axis=0), labels), labels

    def fingerprint(self) -> dict[str, Any]:
        """Return the number, shape and augmentation of the images, and a hash of evenly spaced
        images (up to 16 MiB).
        """
        content = hash_of((self.images, self.labels))
        return {
            "samples": len(self),
            "shape": list(self.images.shape[1:]),
            "sha256": content,
            **_how(self),
        }


class ImageFiles:
    """Data set of image files, decoded at each read; raises `DataError` for a file that cannot be
    decoded.

    With an augmentation and `fitting.crop == "resized"`, each image is first cropped and resized at
    random. Random numbers come from the global generators, which a run seeds for each sample.

    >>> import tempfile
    >>> from PIL import Image
    >>> from surefoot.data import load_images
    >>> root = Path(tempfile.mkdtemp())
    >>> for name, grey in (("dark", 0), ("light", 255)):
    ...     (root / name).mkdir()
    ...     for number in range(4):
    ...         Image.new("L", (8, 8), grey).save(root / name / f"{number}.png")
    >>> files = load_images(root, val_fraction=0.25).train
    >>> isinstance(files, ImageFiles), len(files), files[0][0].shape
    (True, 6, torch.Size([1, 8, 8]))
    """

    def __init__(
        self,
        files: LabeledFiles,
        fitting: Fitting,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
    ) -> None:
        self.files = files
        self.fitting = fitting
        self.mean = mean
        self.std = std
        self.augmentation = augmentation
        # for the fingerprint; `normalized_with` keeps these
        self.measured: Moments = (mean, std)
        self.measured_fitting = fitting.fingerprint()

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        """Return an image (C, H, W) and its label; crop and augmentation are drawn from the seeded
        global generators.
        """
        bits = seeded_bits()
        picture = read_picture(self.files.paths[sample])
        if self.augmentation is not None and self.fitting.crop == "resized":
            image = self.fitting.random_crop(
                picture, lambda draw: fold(bits, _PIECE + draw) / 2**64
            )
        else:
            image = self.fitting.center_crop(picture)
        images_1CHW = _inputs(self, image[None], np.array([bits], dtype=np.uint64))
        return images_1CHW[0], int(self.files.labels[sample])

    def stored(self, ids: Ids) -> Batch:
        """Return the bytes of each file with its label, and all labels."""
        labels = self.files.labels[ids]
        rows = []
        for index, label in zip(ids.tolist(), labels, strict=True):
            rows.append(self.files.paths[index].read_bytes() + label.tobytes())
        return rows, labels

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of files, a hash of names and labels, the measured mean and standard
        deviation, and the augmentation.
        """
        mean, std = self.measured
        return {
            "samples": len(self),
            "sha256": self.files.digest(),
            **self.measured_fitting,
            "measured": [list(mean), list(std)],
            **_how(self),
        }


def _how(dataset: ImageArrays | ImageFiles) -> dict[str, Any]:
    """Return how images become inputs, for a fingerprint."""
    augmentation = None if dataset.augmentation is None else vars(dataset.augmentation)
    return {"mean": list(dataset.mean), "std": list(dataset.std), "augmentation": augmentation}


def _inputs(
    dataset: ImageArrays | ImageFiles, images_BHWC: NDArray[np.uint8], bits_B: NDArray[np.uint64]
) -> Tensor:
    if dataset.augmentation is not None:
        images_BHWC = augment(
            images_BHWC, bits_B, dataset.augmentation, mean_C=np.array(dataset.mean)
        )
    return normalize(images_BHWC, mean=dataset.mean, std=dataset.std)


def normalized_with(dataset: Dataset, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """Return a copy that shares the images, with another mean and deviation per channel."""
    other = copy(dataset)
    other.mean = mean
    other.std = std
    return other


def scaled_with(dataset: Dataset, value_range: ValueRange | None) -> Dataset:
    """Return a copy that shares the files, with other values that become black and white."""
    other = copy(dataset)
    if isinstance(other, ImageFiles):
        other.fitting = replace(other.fitting, value_range=value_range)
    return other


def normalize(
    images_BHWC: NDArray[np.uint8], *, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Convert uint8 images (B, H, W, C) to float32 (B, C, H, W): divide by 255, subtract `mean`,
    and divide by `std`.

    >>> normalize(np.full((1, 1, 1, 1), 255, np.uint8), mean=(0.5,), std=(0.25,)).item()
    2.0
    """
    pixels_BCHW = torch.from_numpy(np.ascontiguousarray(images_BHWC.transpose(0, 3, 1, 2)))
    shift_1C11 = torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1) * 255
    scale_1C11 = torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1) * 255
    return (pixels_BCHW.to(torch.float32) - shift_1C11) / scale_1C11


def read_image(
    path: Path,
    *,
    size: int,
    channels: int,
    crop: Any,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    background: str = "white",
    value_range: ValueRange | None = None,
    as_shown: bool = True,
) -> Tensor:
    """Read an image file and preprocess it like the training images; return a model input (1, C, H,
    W).

    background: the color that shows through transparent parts. value_range: the values of pictures
    with more than 8 bits that become black and white; default: all of 16 bits. as_shown: False for
    runs that began before behavior 10, which ignore orientation and transparency.

    >>> import tempfile
    >>> from PIL import Image
    >>> path = Path(tempfile.mkdtemp()) / "grey.png"
    >>> Image.new("L", (30, 20), 128).save(path)
    >>> read_image(path, size=8, channels=1, crop="padded", mean=(0.5,), std=(0.25,)).shape
    torch.Size([1, 1, 8, 8])
    """
    fitting = Fitting(size, channels, crop, background, value_range, as_shown)
    image_HWC = fitting.center_crop(open_picture(path))
    return normalize(image_HWC[None], mean=mean, std=std)
