"""RandAugment with fewer kinds of change (Cubuk et al. 2020: https://arxiv.org/abs/1909.13719), for many images at once.

Changes of colour are a table of 256 values for each image, changes of shape a linear map for each; nothing runs per image.
Left out are equalising, automatic contrast, sharpness and colour balance.

Shapes: B batch, H height, W width, C channels.
"""

import math

import numpy as np
from numpy.typing import NDArray

from surefoot.data.order import folded

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
_FIRST_OF_SHAPE = KINDS.index("shear-x")
_ENHANCED, _SHEARED, _MOVED, _TURNED, _BITS_LOST = 0.9, 0.3, 0.45, math.radians(30), 4  # at the strongest


def randaugmented(images_BHWC: NDArray[np.uint8], bits_B: NDArray[np.uint64], *, magnitude: int) -> NDArray[np.uint8]:
    """Each image under one change, whose kind and direction its bits choose; `magnitude` from 0 (almost none) to 10.

    >>> image, bits = np.full((1, 4, 4, 1), 100, np.uint8), np.array([5], np.uint64)
    >>> randaugmented(image, bits, magnitude=0).tolist() == image.tolist()
    True
    """
    words_B = folded(bits_B, np.zeros_like(bits_B))
    kinds_B = ((words_B >> np.uint64(32)) * np.uint64(len(KINDS)) >> np.uint64(32)).astype(np.int64)
    signs_B = np.where(words_B & np.uint64(1), 1.0, -1.0)
    return changed(images_BHWC, kinds_B, signs_B, magnitude=magnitude)


def changed(
    images_BHWC: NDArray[np.uint8], kinds_B: NDArray[np.int64], signs_B: NDArray[np.float64], *, magnitude: int
) -> NDArray[np.uint8]:
    """Each image under the change of that kind (its place among `KINDS`), in the direction of its sign (1.0 or -1.0)."""
    strength = magnitude / STRONGEST
    after = images_BHWC.copy()
    coloured = np.flatnonzero((kinds_B > 0) & (kinds_B < _FIRST_OF_SHAPE))
    if coloured.size:
        tables = _tables(images_BHWC[coloured], kinds_B[coloured], signs_B[coloured], strength)
        flat = images_BHWC[coloured].reshape(len(coloured), -1)
        after[coloured] = np.take_along_axis(tables, flat, axis=1).reshape(len(coloured), *images_BHWC.shape[1:])
    shaped = np.flatnonzero(kinds_B >= _FIRST_OF_SHAPE)
    if shaped.size:
        maps = _maps(kinds_B[shaped], signs_B[shaped], strength, images_BHWC.shape[1], images_BHWC.shape[2])
        after[shaped] = _warped(images_BHWC[shaped], maps)
    return after


def _tables(
    images_BHWC: NDArray[np.uint8], kinds_B: NDArray[np.int64], signs_B: NDArray[np.float64], strength: float
) -> NDArray[np.uint8]:
    """What becomes of each value, (B, 256)."""
    values = np.arange(256, dtype=np.float64)
    factors_B1 = 1.0 + signs_B[:, None] * _ENHANCED * strength
    # a sum of whole numbers, which is exact in any order
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
    found = np.broadcast_to(values, (len(kinds_B), 256)).copy()
    for kind, table in by_kind.items():
        of_kind_B = kinds_B == KINDS.index(kind)
        found[of_kind_B] = np.broadcast_to(table, found.shape)[of_kind_B]
    return np.rint(np.clip(found, 0, 255)).astype(np.uint8)


def _maps(
    kinds_B: NDArray[np.int64], signs_B: NDArray[np.float64], strength: float, height: int, width: int
) -> NDArray[np.float32]:
    """From a place in the new image to that in the old, from the middle: (B, 2, 3) over (x, y, 1)."""
    found = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (len(kinds_B), 1, 1))
    for kind, row, column, most in (
        ("shear-x", 0, 1, _SHEARED),
        ("shear-y", 1, 0, _SHEARED),
        ("translate-x", 0, 2, _MOVED * width),
        ("translate-y", 1, 2, _MOVED * height),
    ):
        of_kind_B = kinds_B == KINDS.index(kind)
        found[of_kind_B, row, column] = signs_B[of_kind_B] * most * strength
    turned_B = kinds_B == KINDS.index("rotate")
    angle = _TURNED * strength
    found[turned_B, 0, 0] = found[turned_B, 1, 1] = math.cos(angle)
    found[turned_B, 0, 1] = signs_B[turned_B] * -math.sin(angle)
    found[turned_B, 1, 0] = signs_B[turned_B] * math.sin(angle)
    return found.astype(np.float32)


def _warped(images_BHWC: NDArray[np.uint8], maps_B23: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The images read at other places, between the four pixels around each; black outside."""
    batch, height, width, channels = images_BHWC.shape
    x_W = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    y_H1 = (np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2))[:, None]
    (ax, ay, at), (bx, by, bt) = (maps_B23[:, row, :, None, None].swapaxes(0, 1) for row in range(2))
    from_x_BHW = ax * x_W + ay * y_H1 + at + np.float32((width - 1) / 2)
    from_y_BHW = bx * x_W + by * y_H1 + bt + np.float32((height - 1) / 2)
    left_BHW, top_BHW = np.floor(from_x_BHW), np.floor(from_y_BHW)
    of_right_BHW, of_bottom_BHW = from_x_BHW - left_BHW, from_y_BHW - top_BHW
    pixels = images_BHWC.reshape(-1, channels)
    first_B11 = (np.arange(batch) * (height * width))[:, None, None]
    found = np.zeros(images_BHWC.shape, dtype=np.float32)
    for down, row_share in ((0, 1 - of_bottom_BHW), (1, of_bottom_BHW)):
        for across, column_share in ((0, 1 - of_right_BHW), (1, of_right_BHW)):
            row_BHW, column_BHW = top_BHW.astype(np.int64) + down, left_BHW.astype(np.int64) + across
            inside = (row_BHW >= 0) & (row_BHW < height) & (column_BHW >= 0) & (column_BHW < width)
            where = first_B11 + row_BHW.clip(0, height - 1) * width + column_BHW.clip(0, width - 1)
            share = np.where(inside, row_share * column_share, np.float32(0))
            found += pixels.take(where.reshape(-1), axis=0).reshape(found.shape) * share[..., None]
    return np.rint(found).astype(np.uint8)
