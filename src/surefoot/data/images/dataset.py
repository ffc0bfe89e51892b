"""Labeled images as data sets: in memory, gathered and augmented a whole micro-batch at once; or in files, read one by one.

Both give the same images for the same (seed, epoch, sample): float32 (C, H, W), normalized, and a class number. Shapes: N images, B
batch, C channels, H height, W width.
"""

from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.data.fingerprints import hash_of
from surefoot.data.images.augmentation import Augmentation, augment, sample_bits
from surefoot.data.images.folder import Files, Fitting, open_picture, read_picture
from surefoot.data.leakage_check import Batch, rows_as_bytes
from surefoot.data.order import Ids
from surefoot.errors import DataError
from surefoot.seeding import fold, seeded_bits, stream_key

Moments = tuple[tuple[float, ...], tuple[float, ...]]
Dataset = TypeVar("Dataset", bound="ImageArrays | ImageFiles")

_PIECE = 1000  # draws of the piece that is cut out begin here, apart from those of augmentation


class ImageArrays:
    """Images in memory (N, H, W, C) as bytes, with their labels (N,); `gather` makes a whole batch.

    `seed` is that of the run: the draws for an image come from (seed, epoch, sample). Without an augmentation nothing is.

    >>> images = ImageArrays(np.zeros((5, 8, 8, 1), np.uint8), np.arange(5), mean=(0.5,), std=(0.25,))
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
                f"images must be bytes of shape (N, H, W, C) with N labels; found {images.dtype} {images.shape} and "
                f"{len(labels)} labels"
            )
        self.images, self.labels = images, torch.from_numpy(np.asarray(labels, dtype=np.int64).copy())
        self.mean, self.std, self.augmentation = mean, std, augmentation
        self.key = stream_key(seed, "augment")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        """One image, as it is in the epoch that the generators are seeded for, and its label."""
        bits = np.array([seeded_bits()], dtype=np.uint64)
        return _inputs(self, self.images[sample : sample + 1], bits)[0], self.labels[sample]

    def gather(self, ids: Ids, epochs: Ids) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,)."""
        return _inputs(self, self.images.take(ids, axis=0), sample_bits(self.key, ids, epochs)), self.labels[ids]

    def stored(self, ids: Ids) -> Batch:
        """The images as bytes with their labels, neither normalized nor changed, and the labels."""
        labels = self.labels.numpy()[ids]
        return rows_as_bytes(self.images.take(ids, axis=0), labels), labels

    def fingerprint(self) -> dict[str, Any]:
        """Their number, shape and augmentation, and a hash of up to 16 MiB of them spread over all."""
        content = hash_of((self.images, self.labels))
        return {"samples": len(self), "shape": list(self.images.shape[1:]), "sha256": content, **_how(self)}


class ImageFiles:
    """Pictures in files, decoded when they are read: `DataError` names one that cannot be. Give the run workers.

    With an augmentation and `fitting.crop == "resized"` a random piece is cut out first. The seed of all that is drawn is that
    of the generators, which a run sets for each sample.

    >>> import tempfile
    >>> from PIL import Image
    >>> from surefoot.data import load_images
    >>> root = Path(tempfile.mkdtemp())
    >>> for name, grey in (("dark", 0), ("light", 255)):
    ...     (root / name).mkdir()
    ...     for number in range(4):
    ...         Image.new("L", (8, 8), grey).save(root / name / f"{number}.png")
    >>> files = load_images(root, val_fraction=0.25).train
    >>> type(files).__name__, len(files), files[0][0].shape
    ('ImageFiles', 6, torch.Size([1, 8, 8]))
    """

    def __init__(
        self,
        files: Files,
        fitting: Fitting,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation | None = None,
    ) -> None:
        self.files, self.fitting, self.mean, self.std, self.augmentation = files, fitting, mean, std, augmentation
        self.measured: Moments = (mean, std)  # tells which pictures these are, however they are normalised

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        """One picture (C, H, W), as it is in the epoch that the generators are seeded for, and its label."""
        bits = seeded_bits()
        picture = read_picture(self.files.paths[sample])
        if self.augmentation is not None and self.fitting.crop == "resized":
            image = self.fitting.random_crop(picture, lambda draw: fold(bits, _PIECE + draw) / 2**64)
        else:
            image = self.fitting.center_crop(picture)
        return _inputs(self, image[None], np.array([bits], dtype=np.uint64))[0], int(self.files.labels[sample])

    def stored(self, ids: Ids) -> Batch:
        """The files as they are, with their labels, and the labels."""
        labels = self.files.labels[ids]
        rows = zip(ids.tolist(), labels, strict=True)
        return [self.files.paths[index].read_bytes() + label.tobytes() for index, label in rows], labels

    def fingerprint(self) -> dict[str, Any]:
        """Their number, hash of names and labels, measured mean and deviation (contents are not read again), and augmentation."""
        own = {"samples": len(self), "sha256": self.files.digest(), **vars(self.fitting)}
        return {**own, "measured": [list(part) for part in self.measured], **_how(self)}


def _how(dataset: ImageArrays | ImageFiles) -> dict[str, Any]:
    changes = dataset.augmentation and vars(dataset.augmentation)
    return {"mean": list(dataset.mean), "std": list(dataset.std), "augmentation": changes}


def _inputs(dataset: ImageArrays | ImageFiles, images_BHWC: NDArray[np.uint8], bits_B: NDArray[np.uint64]) -> Tensor:
    if dataset.augmentation is not None:
        images_BHWC = augment(images_BHWC, bits_B, dataset.augmentation, mean_C=np.array(dataset.mean))
    return normalize(images_BHWC, mean=dataset.mean, std=dataset.std)


def normalised_with(dataset: Dataset, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """The same images with another mean and deviation."""
    other = copy(dataset)
    other.mean, other.std = mean, std
    return other


def normalize(images_BHWC: NDArray[np.uint8], *, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Bytes (B, H, W, C) as float32 (B, C, H, W): divided by 255, less `mean`, divided by `std`, each of one channel.

    >>> normalize(np.full((1, 1, 1, 1), 255, np.uint8), mean=(0.5,), std=(0.25,)).item()
    2.0
    """
    pixels_BCHW = torch.from_numpy(np.ascontiguousarray(images_BHWC.transpose(0, 3, 1, 2)))
    shift, scale = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) * 255 for part in (mean, std))
    return (pixels_BCHW.to(torch.float32) - shift) / scale


def read_image(
    path: Path, *, size: int, channels: int, crop: Any, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """A picture of any kind and size as one input (1, C, H, W) for a model trained on images prepared in that way.

    >>> import tempfile
    >>> from PIL import Image
    >>> path = Path(tempfile.mkdtemp()) / "grey.png"
    >>> Image.new("L", (30, 20), 128).save(path)
    >>> read_image(path, size=8, channels=1, crop="padded", mean=(0.5,), std=(0.25,)).shape
    torch.Size([1, 1, 8, 8])
    """
    return normalize(Fitting(size, channels, crop).center_crop(open_picture(path))[None], mean=mean, std=std)
