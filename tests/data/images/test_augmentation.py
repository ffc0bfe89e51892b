"""Augmentation: against one image at a time by hand, and that nothing but (seed, epoch, sample)
changes it; 3 seconds.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from in_one import in_one
from refused import refused
from surefoot.data.order import sample_bits
from surefoot.errors import ConfigError
from surefoot.recipes.readers.images.augmentation import (
    KINDS,
    Augmentation,
    augment,
    below,
    distort,
    randaugment,
)
from surefoot.seeding import fold, stream_key

GREY = np.array([0.5, 0.5, 0.5])
EVERYTHING = Augmentation(
    crop_padding=3, flip=True, cutout=4, randaugment=2, randaugment_magnitude=7
)


def images(number=40, height=9, width=12, channels=3):
    return np.random.default_rng(0).integers(
        1, 256, size=(number, height, width, channels), dtype=np.uint8
    )


def bits(number=40, seed=5, epoch=0):
    return sample_bits(stream_key(seed, "augment"), np.arange(number), np.full(number, epoch))


# --- of what it is a function ---------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_an_image_comes_out_the_same_alone_and_in_any_batch(cut):
    x = images()
    drawn = bits()
    whole = augment(x, drawn, EVERYTHING, mean_C=GREY)

    parts = []
    for first in range(0, 40, cut):
        part = slice(first, first + cut)
        parts.append(augment(x[part], drawn[part], EVERYTHING, mean_C=GREY))

    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize(
    ("some", "others"),
    [
        pytest.param(bits(), bits(epoch=1), id="two epochs"),
        pytest.param(bits(), bits(seed=6), id="two seeds"),
        pytest.param(bits(epoch=1), bits(seed=6), id="two of both"),
    ],
)
def test_each_epoch_and_each_seed_draws_anew(some, others):
    x = images()

    first = augment(x, some, EVERYTHING, mean_C=GREY)
    second = augment(x, others, EVERYTHING, mean_C=GREY)

    is_same = (first == second).reshape(40, -1).all(axis=1)
    assert is_same.mean() < 0.1


def test_bits_are_those_of_the_sample_s_seed():
    ids = np.array([3, 3, 900])
    epochs = np.array([0, 7, 7])

    expected = [fold(11, 0, 3), fold(11, 7, 3), fold(11, 7, 900)]
    assert sample_bits(11, ids, epochs).tolist() == expected


def test_draws_are_even():
    counts = np.bincount(below(bits(20_000), 0, 7), minlength=7)

    assert len(counts) == 7
    assert abs(counts - 20_000 / 7).max() < 5 * math.sqrt(20_000 / 7)


def test_two_draws_are_independent_of_each_other():
    drawn = bits(20_000)

    correlations = np.corrcoef(below(drawn, 0, 1000), below(drawn, 1, 1000))

    assert abs(correlations[0, 1]) < 5 / math.sqrt(20_000)


def test_the_images_that_are_given_are_left_alone():
    x = images()

    augment(x, bits(), EVERYTHING, mean_C=GREY)

    assert np.array_equal(x, images())


def test_without_changes_images_are_as_they_were():
    unchanged = augment(images(), bits(), Augmentation(), mean_C=GREY)

    assert np.array_equal(unchanged, images())


# --- shift, flip and hole -------------------------------------------------------------------------


def locate_piece(piece, padded):
    """The row, the column, and whether the piece is mirrored, of its only place in an image."""
    height, width, _ = piece.shape
    places = []
    for row in range(padded.shape[0] - height + 1):
        for column in range(padded.shape[1] - width + 1):
            original = padded[row : row + height, column : column + width]
            if np.array_equal(original, piece):
                places.append((row, column, False))
            if np.array_equal(original[:, ::-1], piece):
                places.append((row, column, True))
    (place,) = places
    return place


@pytest.mark.parametrize(
    ("padding", "flip", "directions"),
    [(0, True, {False, True}), (2, False, {False}), (3, True, {False, True})],
)
def test_a_shift_is_a_piece_of_the_padded_image_perhaps_mirrored(padding, flip, directions):
    x = images()
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))

    shifted = augment(x, bits(), Augmentation(crop_padding=padding, flip=flip), mean_C=GREY)

    rows, columns, mirrored = zip(*map(locate_piece, shifted, padded), strict=True)
    assert set(mirrored) == directions
    assert len(set(rows)) == len(set(columns)) == 2 * padding + 1


def test_half_of_the_images_are_mirrored():
    x = np.arange(2, dtype=np.uint8).reshape(1, 1, 2, 1).repeat(10_000, axis=0)

    flipped = augment(x, bits(10_000), Augmentation(flip=True), mean_C=GREY[:1])

    is_mirrored = flipped[:, 0, 0, 0]
    assert abs(is_mirrored.mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_hole_is_a_square_of_the_mean_colour_that_may_reach_over_the_border(side):
    x = images(number=400) // 2
    colour = np.array([200, 210, 220])

    with_holes = augment(x, bits(400), Augmentation(cutout=side), mean_C=colour / 255)

    heights = set()
    widths = set()
    for before, after in zip(x, with_holes, strict=True):
        is_hole = (after != before).any(axis=-1)
        rows = np.flatnonzero(is_hole.any(axis=1))
        columns = np.flatnonzero(is_hole.any(axis=0))
        assert is_hole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert is_hole.sum() == len(rows) * len(columns)
        assert (after[is_hole] == colour).all()
        heights.add(len(rows))
        widths.add(len(columns))
    assert max(heights) == max(widths) == side
    assert side == 1 or min(heights) < side


# --- colour and shape -----------------------------------------------------------------------------


def distort_one(kind, image, *, sign=1.0, magnitude=10):
    kinds = np.array([KINDS.index(kind)])
    (distorted,) = distort(image[None], kinds, np.array([sign]), magnitude=magnitude)
    return distorted


@pytest.mark.parametrize("kind", KINDS)
def test_strength_nought_changes_nothing(kind):
    image = images()[0]

    assert np.array_equal(distort_one(kind, image, magnitude=0), image)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_colours_are_those_of_the_formulas(sign):
    image = images()[0].astype(np.float64)
    factor = 1 + sign * 0.9 * 0.5
    mean = round(image.mean())
    expected = {
        "brightness": image * factor,
        "contrast": mean + (image - mean) * factor,
        "posterize": image // 4 * 4,
        "solarize": np.where(image < 128, image, 255 - image),
    }
    for kind, values in expected.items():
        distorted = distort_one(kind, images()[0], sign=sign, magnitude=5)
        assert np.array_equal(distorted, np.rint(values.clip(0, 255)).astype(np.uint8)), kind


@in_one
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kind", ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"])
def test_shapes_are_those_that_pillow_makes_with_the_same_map(kind, sign):
    """Away from the border, where Pillow reads pixels that are not there."""
    side = 31
    strength = 0.6
    smooth = np.add.outer(np.arange(side) * 3, np.arange(side) * 5).astype(np.uint8)
    middle = (side - 1) / 2
    ax, ay, at, bx, by, bt = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0
    match kind:
        case "shear-x":
            ay = sign * 0.3 * strength
        case "shear-y":
            bx = sign * 0.3 * strength
        case "translate-x":
            at = sign * 0.45 * side * strength
        case "translate-y":
            bt = sign * 0.45 * side * strength
        case "rotate":
            angle = sign * math.radians(30) * strength
            ax = math.cos(angle)
            ay = -math.sin(angle)
            bx = math.sin(angle)
            by = math.cos(angle)
    # Pillow reads at the middles of pixels: half a pixel more on both sides
    shift_x = at + middle - ax * middle - ay * middle
    shift_y = bt + middle - bx * middle - by * middle
    data = (ax, ay, shift_x + 0.5 - 0.5 * (ax + ay), bx, by, shift_y + 0.5 - 0.5 * (bx + by))
    method = Image.Transform.AFFINE
    transformed = Image.fromarray(smooth).transform(
        (side, side), method, data, Image.Resampling.BILINEAR
    )
    theirs = np.asarray(transformed)

    ours = distort_one(kind, smooth[..., None], sign=sign, magnitude=6)[..., 0]

    rows, columns = np.mgrid[0:side, 0:side]
    from_x = ax * (columns - middle) + ay * (rows - middle) + at + middle
    from_y = bx * (columns - middle) + by * (rows - middle) + bt + middle
    inside = (from_x > 0) & (from_x < side - 1) & (from_y > 0) & (from_y < side - 1)
    assert inside.sum() > 200
    assert abs(theirs.astype(int) - ours.astype(int))[inside].max() <= 1  # rounding
    outside = (from_x < -1) | (from_x > side) | (from_y < -1) | (from_y > side)
    assert (ours[outside] == 0).all()


def test_every_kind_and_direction_is_chosen_about_as_often():
    number = 4000
    (image,) = images(1)
    x = image[None].repeat(number, axis=0)

    distorted = randaugment(x, bits(number), magnitude=7)

    counts = Counter(result.tobytes() for result in distorted)
    for kind in KINDS:
        results = {
            distort_one(kind, image, sign=1.0, magnitude=7).tobytes(),
            distort_one(kind, image, sign=-1.0, magnitude=7).tobytes(),
        }
        has_one_direction = kind in ("identity", "posterize", "solarize")
        assert len(results) == (1 if has_one_direction else 2)
        assert all(result in counts for result in results)
        times = sum(counts.pop(result) for result in results)
        assert abs(times - number / 10) < 5 * math.sqrt(number * 0.1 * 0.9)
    assert not counts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("crop_padding", -1),
        ("cutout", -2),
        ("randaugment", -1),
        ("randaugment_magnitude", 11),
        ("randaugment_magnitude", -1),
    ],
)
def test_values_that_cannot_be_are_refused(name, value):
    with refused("setting-out-of-range", setting=f"augmentation.{name}", value=value):
        Augmentation(**{name: value})


def test_all_values_that_cannot_be_are_refused_at_once():
    with pytest.raises(ConfigError) as caught:
        Augmentation(crop_padding=-1, cutout=-1)
    settings = [problem.fields["setting"] for problem in caught.value.problems]
    assert settings == ["augmentation.crop_padding", "augmentation.cutout"]
