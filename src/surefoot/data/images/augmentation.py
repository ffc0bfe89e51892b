"""Random changes of images, many images at once: a shift, a flip, colour and shape (see `randaugment`), and a hole.

What is drawn for an image is a function of 64 bits that belong to it, which come from (seed, epoch, sample). So neither the
other images of a batch, nor workers, nor a resume change it, and the same image comes out where it is read alone. Everything
is whole numbers, or arithmetic on one pixel at a time, so that it is equal to the bit.

Shapes: B batch, H height, W width, C channels.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.data.images.randaugment import STRONGEST, randaugmented
from surefoot.data.order import folded
from surefoot.errors import ConfigError

Pixels = NDArray[np.uint8]
Bits = NDArray[np.uint64]

_DOWN, _ACROSS, _MIRRORED, _HOLE_DOWN, _HOLE_ACROSS, _FURTHER = range(6)  # a number of its own for every draw


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How images to train on are changed; as it stands, not at all.

    crop_padding: pixels of black on every side, before a piece of the image's own size is cut out anywhere.
    flip: left and right exchanged in half of the images.
    randaugment: so many changes of colour and shape, each chosen at random, of strength `magnitude` (0 to 10): Cubuk et al.
    2020 (https://arxiv.org/abs/1909.13719) with fewer kinds.
    cutout: side of a square of the mean colour, put anywhere, in part outside too: DeVries and Taylor 2017
    (https://arxiv.org/abs/1708.04552).

    Raises `ConfigError` with all values that cannot be.
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    randaugment: int = 0
    magnitude: int = 5

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value}: {wanted}"
            for name, value, fits, wanted in (
                ("crop_padding", self.crop_padding, self.crop_padding >= 0, "pixels on each side, 0 for none"),
                ("cutout", self.cutout, self.cutout >= 0, "side of the square in pixels, 0 for none"),
                ("randaugment", self.randaugment, self.randaugment >= 0, "changes an image, 0 for none"),
                ("magnitude", self.magnitude, 0 <= self.magnitude <= STRONGEST, f"from 0 to {STRONGEST}"),
            )
            if not fits
        ]
        if problems:
            raise ConfigError("augmentation: " + "\n  ".join(problems))


def augmented(images_BHWC: Pixels, bits_B: Bits, how: Augmentation, *, mean_C: NDArray[np.float64]) -> Pixels:
    """The images changed as `how` says, each by what its bits draw; `mean_C` (0 to 1) is the colour of holes.

    >>> image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    >>> bits, grey = np.array([11], np.uint64), np.array([0.5])
    >>> augmented(image, bits, Augmentation(crop_padding=1, flip=True), mean_C=grey)[0, :, :, 0]
    array([[0, 0, 0],
           [2, 1, 0],
           [5, 4, 3]], dtype=uint8)
    """
    if how.crop_padding or how.flip:
        images_BHWC = _cut(images_BHWC, bits_B, padding=how.crop_padding, flip=how.flip)
    for number in range(how.randaugment):
        images_BHWC = randaugmented(images_BHWC, _drawn(bits_B, _FURTHER + number), magnitude=how.magnitude)
    if how.cutout:
        images_BHWC = _with_holes(images_BHWC, bits_B, side=how.cutout, mean_C=mean_C)
    return images_BHWC


def sample_bits(key: int, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Bits:
    """The bits of each sample in its epoch: `fold(key, epoch, sample)`.

    >>> from surefoot.seeding import fold
    >>> int(sample_bits(7, np.array([3]), np.array([1]))[0]) == fold(7, 1, 3)
    True
    """
    keys = np.full(len(ids), key, dtype=np.uint64)
    return folded(folded(keys, epochs.astype(np.uint64)), ids.astype(np.uint64))


def below(bits_B: Bits, draw: int, bound: int) -> NDArray[np.int64]:
    """One number from 0 to below `bound` for each sample; `draw` tells the draws of a sample apart.

    >>> below(np.array([1, 2, 3], np.uint64), 0, 1).tolist()
    [0, 0, 0]
    """
    words = _drawn(bits_B, draw) >> np.uint64(32)
    return ((words * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def _drawn(bits_B: Bits, draw: int) -> Bits:
    return folded(bits_B, np.full_like(bits_B, draw))


def _cut(images_BHWC: Pixels, bits_B: Bits, *, padding: int, flip: bool) -> Pixels:
    batch, height, width, channels = images_BHWC.shape
    wide = width + 2 * padding
    padded = np.zeros((batch, height + 2 * padding, wide, channels), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = images_BHWC
    down_B, across_B = (below(bits_B, draw, 2 * padding + 1) for draw in (_DOWN, _ACROSS))
    columns_BW = np.arange(width) + np.zeros((batch, 1), dtype=np.int64)
    if flip:
        mirrored_B = below(bits_B, _MIRRORED, 2) == 1
        columns_BW[mirrored_B] = columns_BW[mirrored_B, ::-1]
    rows_BH = np.arange(height) + down_B[:, None] + np.arange(batch)[:, None] * padded.shape[1]
    where_BHW = (rows_BH * wide + across_B[:, None])[:, :, None] + columns_BW[:, None, :]
    pixels: Pixels = padded.reshape(-1, channels).take(where_BHW.reshape(-1), axis=0)
    return pixels.reshape(images_BHWC.shape)


def _with_holes(images_BHWC: Pixels, bits_B: Bits, *, side: int, mean_C: NDArray[np.float64]) -> Pixels:
    _, height, width, _ = images_BHWC.shape
    first_row_B = below(bits_B, _HOLE_DOWN, height) - side // 2
    first_column_B = below(bits_B, _HOLE_ACROSS, width) - side // 2
    rows_BH, columns_BW = np.arange(height) - first_row_B[:, None], np.arange(width) - first_column_B[:, None]
    inside_BHW = ((rows_BH >= 0) & (rows_BH < side))[:, :, None] & ((columns_BW >= 0) & (columns_BW < side))[:, None, :]
    return np.where(inside_BHW[..., None], np.rint(mean_C * 255).astype(np.uint8), images_BHWC)
