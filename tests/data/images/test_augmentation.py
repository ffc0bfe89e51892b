"""Augmentation: against one image at a time by hand, and that nothing but (seed, epoch, sample)
changes it; 3 seconds.
"""

from __future__ import annotations

import math

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
    parts = [
        augment(x[at : at + cut], drawn[at : at + cut], EVERYTHING, mean_C=GREY)
        for at in range(0, 40, cut)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_each_epoch_and_each_seed_draws_anew():
    x = images()
    drawn = [bits(), bits(epoch=1), bits(seed=6)]
    found = [augment(x, one, EVERYTHING, mean_C=GREY) for one in drawn]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        same = (found[one] == found[other]).reshape(40, -1).all(axis=1)
        assert same.mean() < 0.1


def test_bits_are_those_of_the_sample_s_seed():
    ids, epochs = np.array([3, 3, 900]), np.array([0, 7, 7])
    expected = [
        fold(11, epoch, sample) for sample, epoch in zip(ids.tolist(), epochs.tolist(), strict=True)
    ]
    assert sample_bits(11, ids, epochs).tolist() == expected


def test_draws_are_even_and_independent_of_each_other():
    drawn = bits(20_000)
    counts = np.bincount(below(drawn, 0, 7), minlength=7)
    assert len(counts) == 7
    assert abs(counts - 20_000 / 7).max() < 5 * math.sqrt(20_000 / 7)
    first, second = (below(drawn, draw, 1000) for draw in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(20_000)


def test_the_images_that_are_given_are_left_alone():
    x = images()
    before = x.copy()
    augment(x, bits(), EVERYTHING, mean_C=GREY)
    assert np.array_equal(x, before)


def test_without_changes_images_are_as_they_were():
    assert np.array_equal(augment(images(), bits(), Augmentation(), mean_C=GREY), images())


# --- shift, flip and hole -------------------------------------------------------------------------


@pytest.mark.parametrize(("padding", "flip"), [(0, True), (2, False), (3, True)])
def test_a_shift_is_a_piece_of_the_padded_image_perhaps_mirrored(padding, flip):
    x = images()
    found = augment(x, bits(), Augmentation(crop_padding=padding, flip=flip), mean_C=GREY)
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    seen = set()
    for place, image in enumerate(found):
        at = [
            (row, column, mirrored)
            for row in range(2 * padding + 1)
            for column in range(2 * padding + 1)
            for mirrored in (False, True)
            if np.array_equal(
                padded[place, row : row + 9, column : column + 12][:, :: -1 if mirrored else 1],
                image,
            )
        ]
        assert len(at) == 1
        seen.add(at[0])
    assert {mirrored for *_, mirrored in seen} == ({False, True} if flip else {False})
    assert (
        len({row for row, *_ in seen}) == len({column for _, column, _ in seen}) == 2 * padding + 1
    )


def test_half_of_the_images_are_mirrored():
    x = np.arange(2, dtype=np.uint8).reshape(1, 1, 2, 1).repeat(10_000, axis=0)
    mirrored = augment(x, bits(10_000), Augmentation(flip=True), mean_C=GREY[:1])[:, 0, 0, 0]
    assert abs(mirrored.mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.parametrize("side", [1, 4, 5])
def test_a_hole_is_a_square_of_the_mean_colour_that_may_reach_over_the_border(side):
    x = images(number=400) // 2
    colour = np.array([200, 210, 220])
    found = augment(x, bits(400), Augmentation(cutout=side), mean_C=colour / 255)
    heights, widths = set(), set()
    for before, after in zip(x, found, strict=True):
        holes = (after != before).any(axis=-1)
        rows, columns = np.flatnonzero(holes.any(axis=1)), np.flatnonzero(holes.any(axis=0))
        assert holes[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        assert holes.sum() == len(rows) * len(columns)
        assert (after[holes] == colour).all()
        heights.add(len(rows))
        widths.add(len(columns))
    assert max(heights) == max(widths) == side
    assert side == 1 or min(heights) < side


# --- colour and shape -----------------------------------------------------------------------------


def one(kind, image, *, sign=1.0, magnitude=10):
    return distort(
        image[None], np.array([KINDS.index(kind)]), np.array([sign]), magnitude=magnitude
    )[0]


def test_strength_nought_changes_nothing():
    x = images()
    for kind in KINDS:
        assert np.array_equal(one(kind, x[0], magnitude=0), x[0]), kind


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
        found = one(kind, images()[0], sign=sign, magnitude=5)
        assert np.array_equal(found, np.rint(values.clip(0, 255)).astype(np.uint8)), kind


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
    theirs = np.asarray(
        Image.fromarray(smooth).transform((side, side), method, data, Image.Resampling.BILINEAR)
    )
    ours = one(kind, smooth[..., None], sign=sign, magnitude=6)[..., 0]
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
    x = images(1).repeat(number, axis=0)
    found = randaugment(x, bits(number), magnitude=7)
    seen = {}
    for image in found:
        seen[image.tobytes()] = seen.get(image.tobytes(), 0) + 1
    counts = {}
    for kind in KINDS:
        expected = {one(kind, x[0], sign=sign, magnitude=7).tobytes() for sign in (1.0, -1.0)}
        counts[kind] = [seen.pop(image) for image in expected]
    assert seen == {}
    assert all(
        abs(sum(each) - number / 10) < 5 * math.sqrt(number * 0.1 * 0.9) for each in counts.values()
    )
    assert all(
        len(counts[kind]) == (1 if kind in ("identity", "posterize", "solarize") else 2)
        for kind in KINDS
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_padding": -1},
        {"cutout": -2},
        {"randaugment": -1},
        {"randaugment_magnitude": 11},
        {"randaugment_magnitude": -1},
    ],
)
def test_values_that_cannot_be_are_refused(wrong):
    ((name, value),) = wrong.items()
    with refused("setting-out-of-range", setting=f"augmentation.{name}", value=value):
        Augmentation(**wrong)


def test_all_values_that_cannot_be_are_refused_at_once():
    with pytest.raises(ConfigError) as caught:
        Augmentation(crop_padding=-1, cutout=-1)
    settings = [problem.fields["setting"] for problem in caught.value.problems]
    assert settings == ["augmentation.crop_padding", "augmentation.cutout"]
