"""Image augmentation of whole batches: random crops, flips, RandAugment and cutout.

Augmentation is a bit-exact function of (seed, epoch, sample id). Color operations are lookup tables
of 256 values per image; geometric operations are affine maps. Shape suffixes: B batch, H height, W
width, C channels.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from surefoot.data.order import folded
from surefoot.errors import out_of_range, together

Pixels = NDArray[np.uint8]
Bits = NDArray[np.uint64]

_DOWN, _ACROSS, _MIRRORED, _HOLE_DOWN, _HOLE_ACROSS, _FURTHER = range(6)  # draw numbers
STRONGEST = 10  # magnitudes are 0 to 10

KINDS = (
    "identity",
    "brightness",
    "contrast",
    "posterize",
    "solarize",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
    "rotate",
)
# at magnitude 10
_ENHANCED = 0.9
_SHEARED = 0.3
_MOVED = 0.45
_TURNED = math.radians(30)
_BITS_LOST = 4


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Augmentation settings of training images; the defaults leave images unchanged.

    crop_padding: pixels of black padding on every side before a random crop of the original size.
    flip: mirror half of the images left to right. randaugment: number of random operations of
    magnitude `randaugment_magnitude` (0 to 10), as in RandAugment
    (https://arxiv.org/abs/1909.13719) without equalize, autocontrast, sharpness and color. cutout:
    side in pixels of a randomly centered square in the mean color (DeVries and Taylor 2017:
    https://arxiv.org/abs/1708.04552). Raises `ConfigError` with all invalid values.

    >>> Augmentation(crop_padding=4, flip=True)
    Augmentation(crop_padding=4, flip=True, cutout=0, randaugment=0, randaugment_magnitude=5)
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    randaugment: int = 0
    randaugment_magnitude: int = 5

    def __post_init__(self) -> None:
        problems = []
        for name, highest, meaning in (
            ("crop_padding", math.inf, "0 or more pixels per side"),
            ("cutout", math.inf, "the square's side in pixels, or 0 for none"),
            ("randaugment", math.inf, "0 or more changes per image"),
            ("randaugment_magnitude", STRONGEST, f"from 0 to {STRONGEST}"),
        ):
            value = getattr(self, name)
            if not 0 <= value <= highest:
                problems.append(out_of_range(f"augmentation.{name}", value, meaning))
        if problems:
            raise together(problems)


def augment(
    images_BHWC: Pixels, bits_B: Bits, how: Augmentation, *, mean_C: NDArray[np.float64]
) -> Pixels:
    """Augment images (B, H, W, C) with draws from `bits_B`; cutout squares have the color `mean_C`
    (0 to 1).

    >>> image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    >>> bits, grey = np.array([11], np.uint64), np.array([0.5])
    >>> augment(image, bits, Augmentation(crop_padding=1, flip=True), mean_C=grey)[0, :, :, 0]
    array([[0, 0, 0],
           [2, 1, 0],
           [5, 4, 3]], dtype=uint8)
    """
    if how.crop_padding or how.flip:
        images_BHWC = _cut(images_BHWC, bits_B, padding=how.crop_padding, flip=how.flip)
    for number in range(how.randaugment):
        images_BHWC = randaugment(
            images_BHWC, _drawn(bits_B, _FURTHER + number), magnitude=how.randaugment_magnitude
        )
    if how.cutout:
        images_BHWC = _with_holes(images_BHWC, bits_B, side=how.cutout, mean_C=mean_C)
    return images_BHWC


def below(bits_B: Bits, draw: int, bound: int) -> NDArray[np.int64]:
    """Return a random integer in [0, bound) per sample, (B,); different values of `draw` give
    independent integers.
    """
    upper_B = _drawn(bits_B, draw) >> np.uint64(32)
    return (upper_B * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def _drawn(bits_B: Bits, draw: int) -> Bits:
    return folded(bits_B, np.full_like(bits_B, draw))


def _cut(images_BHWC: Pixels, bits_B: Bits, *, padding: int, flip: bool) -> Pixels:
    batch, height, width, channels = images_BHWC.shape
    wide = width + 2 * padding
    padded = np.zeros((batch, height + 2 * padding, wide, channels), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = images_BHWC
    down_B = below(bits_B, _DOWN, 2 * padding + 1)
    across_B = below(bits_B, _ACROSS, 2 * padding + 1)
    columns_BW = np.arange(width) + np.zeros((batch, 1), dtype=np.int64)
    if flip:
        mirrored_B = below(bits_B, _MIRRORED, 2) == 1
        columns_BW[mirrored_B] = columns_BW[mirrored_B, ::-1]
    rows_BH = np.arange(height) + down_B[:, None] + np.arange(batch)[:, None] * padded.shape[1]
    where_BHW = (rows_BH * wide + across_B[:, None])[:, :, None] + columns_BW[:, None, :]
    pixels: Pixels = padded.reshape(-1, channels).take(where_BHW.reshape(-1), axis=0)
    return pixels.reshape(images_BHWC.shape)


def _with_holes(
    images_BHWC: Pixels, bits_B: Bits, *, side: int, mean_C: NDArray[np.float64]
) -> Pixels:
    _, height, width, _ = images_BHWC.shape
    rows_BH = np.arange(height) + side // 2 - below(bits_B, _HOLE_DOWN, height)[:, None]
    columns_BW = np.arange(width) + side // 2 - below(bits_B, _HOLE_ACROSS, width)[:, None]
    in_rows_BH = (rows_BH >= 0) & (rows_BH < side)
    in_columns_BW = (columns_BW >= 0) & (columns_BW < side)
    inside_BHW = in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
    color_C = np.rint(mean_C * 255).astype(np.uint8)
    return np.where(inside_BHW[..., None], color_C, images_BHWC)


def randaugment(images_BHWC: Pixels, bits_B: Bits, *, magnitude: int) -> Pixels:
    """Apply one random operation to each image; `magnitude` is 0 (almost no change) to 10.

    >>> image, bits = np.full((1, 4, 4, 1), 100, np.uint8), np.array([5], np.uint64)
    >>> randaugment(image, bits, magnitude=0).tolist() == image.tolist()
    True
    """
    signs_B = np.where(_drawn(bits_B, 0) & np.uint64(1), 1.0, -1.0)
    return distort(images_BHWC, below(bits_B, 0, len(KINDS)), signs_B, magnitude=magnitude)


def distort(
    images_BHWC: Pixels, kinds_B: NDArray[np.int64], signs_B: NDArray[np.float64], *, magnitude: int
) -> Pixels:
    """Apply the operation `KINDS[kind]` with a sign (1.0 or -1.0) to each image."""
    strength = magnitude / STRONGEST
    after = images_BHWC.copy()
    colored = np.flatnonzero((kinds_B > 0) & (kinds_B < KINDS.index("shear-x")))
    if colored.size:
        tables = _tables(images_BHWC[colored], kinds_B[colored], signs_B[colored], strength)
        flat = images_BHWC[colored].reshape(len(colored), -1)
        looked_up = np.take_along_axis(tables, flat, axis=1)
        after[colored] = looked_up.reshape(len(colored), *images_BHWC.shape[1:])
    shaped = np.flatnonzero(kinds_B >= KINDS.index("shear-x"))
    if shaped.size:
        _, height, width, _ = images_BHWC.shape
        maps = _maps(kinds_B[shaped], signs_B[shaped], strength, height, width)
        after[shaped] = _warp(images_BHWC[shaped], maps)
    return after


def _tables(
    images_BHWC: Pixels, kinds_B: NDArray[np.int64], signs_B: NDArray[np.float64], strength: float
) -> Pixels:
    values = np.arange(256, dtype=np.float64)
    factors_B1 = 1.0 + signs_B[:, None] * _ENHANCED * strength
    # an integer sum is exact in any order
    totals_B = images_BHWC.reshape(len(images_BHWC), -1).sum(axis=1, dtype=np.int64)
    means_B1 = np.rint(totals_B / images_BHWC[0].size)[:, None]
    lost = round(_BITS_LOST * strength)
    threshold = 256 * (1.0 - strength)
    by_kind = {
        "brightness": values * factors_B1,
        "contrast": means_B1 + (values - means_B1) * factors_B1,
        "posterize": (np.arange(256) >> lost << lost).astype(np.float64),
        "solarize": np.where(values < threshold, values, 255 - values),
    }
    tables = np.broadcast_to(values, (len(kinds_B), 256)).copy()
    for kind, table in by_kind.items():
        of_kind_B = kinds_B == KINDS.index(kind)
        tables[of_kind_B] = np.broadcast_to(table, tables.shape)[of_kind_B]
    return np.rint(np.clip(tables, 0, 255)).astype(np.uint8)


def _maps(
    kinds_B: NDArray[np.int64],
    signs_B: NDArray[np.float64],
    strength: float,
    height: int,
    width: int,
) -> NDArray[np.float32]:
    # maps of (x, y, 1) from new to old coordinates; the origin is the center of the image
    maps = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(kinds_B), 1, 1))
    for kind, row, column, largest in (
        ("shear-x", 0, 1, _SHEARED),
        ("shear-y", 1, 0, _SHEARED),
        ("translate-x", 0, 2, _MOVED * width),
        ("translate-y", 1, 2, _MOVED * height),
    ):
        of_kind_B = kinds_B == KINDS.index(kind)
        maps[of_kind_B, row, column] = signs_B[of_kind_B] * largest * strength
    turned_B = kinds_B == KINDS.index("rotate")
    angle = _TURNED * strength
    maps[turned_B, 0, 0] = math.cos(angle)
    maps[turned_B, 1, 1] = math.cos(angle)
    maps[turned_B, 0, 1] = signs_B[turned_B] * -math.sin(angle)
    maps[turned_B, 1, 0] = signs_B[turned_B] * math.sin(angle)
    return maps.astype(np.float32)


def _warp(images_BHWC: Pixels, maps_B23: NDArray[np.float32]) -> Pixels:
    batch, height, width, channels = images_BHWC.shape
    x_W = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    y_H1 = (np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2))[:, None]
    ax, ay, at = maps_B23[:, 0, :, None, None].swapaxes(0, 1)
    bx, by, bt = maps_B23[:, 1, :, None, None].swapaxes(0, 1)
    from_x_BHW = ax * x_W + ay * y_H1 + at + np.float32((width - 1) / 2)
    from_y_BHW = bx * x_W + by * y_H1 + bt + np.float32((height - 1) / 2)
    left_BHW = np.floor(from_x_BHW)
    top_BHW = np.floor(from_y_BHW)
    of_right_BHW = from_x_BHW - left_BHW
    of_bottom_BHW = from_y_BHW - top_BHW
    pixels = images_BHWC.reshape(-1, channels)
    first_B11 = (np.arange(batch) * (height * width))[:, None, None]
    warped = np.zeros(images_BHWC.shape, dtype=np.float32)
    for down, row_share in ((0, 1 - of_bottom_BHW), (1, of_bottom_BHW)):
        for across, column_share in ((0, 1 - of_right_BHW), (1, of_right_BHW)):
            row_BHW = top_BHW.astype(np.int64) + down
            column_BHW = left_BHW.astype(np.int64) + across
            inside = (row_BHW >= 0) & (row_BHW < height) & (column_BHW >= 0) & (column_BHW < width)
            where = first_B11 + row_BHW.clip(0, height - 1) * width + column_BHW.clip(0, width - 1)
            share = np.where(inside, row_share * column_share, np.float32(0))
            corner = pixels.take(where.reshape(-1), axis=0).reshape(warped.shape)
            warped += corner * share[..., None]
    return np.rint(warped).astype(np.uint8)
