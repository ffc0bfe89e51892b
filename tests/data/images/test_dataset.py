"""Images in memory and in files: the same whether gathered or read one by one, by workers, resumed,
in any batch; 8 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torch.utils.data import default_collate

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.loader import Feed
from surefoot.data.order import Order
from surefoot.errors import DataError
from surefoot.recipes.readers.images.augmentation import Augmentation
from surefoot.recipes.readers.images.dataset import ImageArrays, ImageFiles, normalize, read_image
from surefoot.recipes.readers.images.folder import LabeledFiles
from surefoot.recipes.readers.images.picture import Fitting

CHANGES = Augmentation(crop_padding=2, flip=True, cutout=3, randaugment=1)
MOMENTS: dict[str, Any] = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
NUMBER = 24
SIDE = 10
LABELS = np.arange(NUMBER) % 4


def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(NUMBER, SIDE, SIDE, 3), dtype=np.uint8)


def in_memory(*, seed: int = 3, augmentation: Augmentation | None = CHANGES) -> ImageArrays:
    return ImageArrays(pixels(), LABELS, **MOMENTS, augmentation=augmentation, seed=seed)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    place = tmp_path_factory.mktemp("pictures")
    paths = [place / f"{number:02d}.png" for number in range(NUMBER)]
    for path, image in zip(paths, pixels(), strict=True):
        Image.fromarray(image).save(path)
    return LabeledFiles(paths, LABELS)


def in_files(files: LabeledFiles, crop: Any = "padded") -> ImageFiles:
    return ImageFiles(files, Fitting(SIDE, 3, crop), **MOMENTS, augmentation=CHANGES)


@dataclass(frozen=True)
class Images:
    """The images and labels of each step."""

    images: list[torch.Tensor]
    labels: list[torch.Tensor]


def read_steps(
    dataset: Any,
    *,
    workers: int = 0,
    micro_batch_size: int = 8,
    first: int = 0,
    collate: Any = None,
) -> Images:
    """What steps 0 to 5 see from `first` on: two passes."""
    feed = Feed(
        dataset,
        Order(3, samples=NUMBER, batch_size=8),
        seed=3,
        micro_batch_size=micro_batch_size,
        device=torch.device("cpu"),
        workers=workers,
        collate=collate,
    )
    feed.start(first, stop=6)
    steps = Images([], [])
    try:
        for step in range(first, 6):
            batches = [micro_batch.batch for micro_batch in feed.micro_batches(step)]
            steps.images.append(torch.cat([images for images, _ in batches]))
            steps.labels.append(torch.cat([labels for _, labels in batches]))
    finally:
        feed.close()
    return steps


def assert_equal(some: Images, others: Images, *, first: int = 0) -> None:
    """The steps of some are those of others from `first` on."""
    for images, expected in zip(some.images, others.images[first:], strict=True):
        assert torch.equal(images, expected)
    for labels, expected in zip(some.labels, others.labels[first:], strict=True):
        assert torch.equal(labels, expected)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_batch_is_the_same_however_it_is_cut(micro_batch_size: int) -> None:
    in_pieces = read_steps(in_memory(), micro_batch_size=micro_batch_size)

    assert_equal(in_pieces, read_steps(in_memory()))


def test_gathered_images_are_those_read_one_by_one() -> None:
    by_sample = read_steps(in_memory(), collate=default_collate)

    assert_equal(by_sample, read_steps(in_memory()))


@pytest.mark.parametrize("workers", [0, 2])
def test_pictures_in_files_are_changed_as_those_in_memory(
    workers: int, files: LabeledFiles
) -> None:
    from_files = read_steps(in_files(files), workers=workers)

    assert_equal(from_files, read_steps(in_memory()))


@pytest.mark.parametrize("crop", ["padded", "resized"])
def test_a_resumed_feed_of_files_sees_what_one_that_went_on_would_have_seen(
    crop: str, files: LabeledFiles
) -> None:
    resumed = read_steps(in_files(files, crop), first=4)

    assert_equal(resumed, read_steps(in_files(files, crop)), first=4)


def test_a_resumed_feed_of_arrays_sees_what_one_that_went_on_would_have_seen() -> None:
    resumed = read_steps(in_memory(), first=4)

    assert_equal(resumed, read_steps(in_memory()), first=4)


@pytest.mark.parametrize(("seed", "epoch"), [(3, 1), (4, 0)])
def test_an_image_is_changed_anew_in_every_epoch_and_under_every_seed(
    seed: int, epoch: int
) -> None:
    ids = np.arange(NUMBER)
    first, _ = in_memory(seed=3).gather(ids, np.full(NUMBER, 0))

    other, _ = in_memory(seed=seed).gather(ids, np.full(NUMBER, epoch))

    is_same = (first == other).flatten(1).all(dim=1)
    assert is_same.sum() < 3


def test_without_augmentation_images_are_normalised_and_nothing_else() -> None:
    images, labels = in_memory(augmentation=None).gather(np.array([5, 2]), np.array([0, 9]))

    channels_last = (pixels()[[5, 2]] / 255 - MOMENTS["mean"]) / MOMENTS["std"]
    expected = torch.from_numpy(channels_last).float().permute(0, 3, 1, 2)
    assert_close(images, expected, rtol=1e-6, atol=1e-6)
    assert labels.tolist() == [1, 2]
    assert images.is_contiguous()


def test_both_are_sound_data_sets(files: LabeledFiles) -> None:
    for dataset in (in_memory(), in_files(files), in_files(files, "resized")):
        assert check_samples(dataset, seed=0) == NUMBER


def test_a_fingerprint_is_the_same_every_time() -> None:
    assert fingerprint(in_memory()) == fingerprint(in_memory())


def test_fingerprints_tell_images_labels_and_changes_apart(files: LabeledFiles) -> None:
    other_pixels = pixels()
    other_pixels[3, 2, 1] += 1
    other_labels = np.arange(NUMBER) % 3
    datasets = [
        in_memory(),
        in_memory(augmentation=None),
        ImageArrays(other_pixels, LABELS, **MOMENTS, augmentation=CHANGES),
        ImageArrays(pixels(), other_labels, **MOMENTS, augmentation=CHANGES),
        in_files(files),
        in_files(files, "resized"),
    ]

    fingerprints = [fingerprint(dataset) for dataset in datasets]

    for first, second in combinations(fingerprints, 2):
        assert first != second


@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 4, 4)), np.zeros((3, 4, 4), np.uint8), np.zeros((2, 4, 4, 1), np.uint8)]
)
def test_arrays_of_another_kind_are_refused(wrong: np.ndarray) -> None:
    with refused("image-arrays-invalid", DataError, shape=list(wrong.shape), labels=3):
        ImageArrays(wrong, np.zeros(3), mean=(0.5,), std=(0.5,))


@pytest.mark.fast("3")
@pytest.mark.parametrize("killed_at", [1, 3, 5])
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(
    killed_at: int, tmp_path: Path
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        mixture = sf.losses.mixup(*batch, mixup=0.3, cutmix=0.3)
        return sf.losses.mixup_cross_entropy(model(mixture.images), mixture, label_smoothing=0.1)

    def train(run_dir: Path, stop_after: str | None) -> dict[str, torch.Tensor]:
        run = sf.Run(
            model=lambda: sf.models.SimpleCNN(
                channels=3, classes=4, width=4, dropout=0.2, channels_last=True
            ),
            loss=loss,
            train_data=in_memory(seed=0),
            batch_size=8,
            micro_batch_size=4,
            length="6 steps",
            optimizer=sf.optim.adamw(lr=1e-2),
            run_dir=run_dir,
            stop_after=stop_after,
            precision="bf16",
            ema=0.9,
            console=False,
        )
        run.train()
        return run.state.models["model"].state_dict()

    whole = train(tmp_path / "whole", None)

    train(tmp_path / "stopped", f"{killed_at} steps")
    resumed = train(tmp_path / "stopped", None)

    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


# --- pictures of any kind -------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_of_any_mode_becomes_an_input(mode: str, channels: int, tmp_path: Path) -> None:
    """A grey of 100 stays 100 in every mode that can hold it."""
    if mode == "I;16":
        picture = Image.fromarray(np.full((16, 20), 100 * 257, dtype=np.uint16))
    else:
        picture = Image.new("L", (20, 16), 100).convert(mode)
    place = tmp_path / ("picture.tif" if mode == "CMYK" else "picture.png")
    picture.save(place)
    moments = {"mean": (0.0,) * channels, "std": (1.0,) * channels}

    image = read_image(place, size=8, channels=channels, crop="padded", **moments)

    assert image.shape == (1, channels, 8, 8)
    if mode != "1":
        assert_close(image, torch.full_like(image, 100 / 255), rtol=0, atol=1.5 / 255)


@pytest.mark.parametrize("shape", [(30, 12), (12, 30), (12, 12), (5, 5), (7, 200)])
def test_the_middle_of_a_picture_is_taken(shape: tuple[int, int]) -> None:
    width, height = shape
    across = np.linspace(0, 255, width).astype(np.uint8)[None, :].repeat(height, axis=0)

    cropped = Fitting(12, 1).center_crop(Image.fromarray(across)).astype(int)[..., 0]

    assert cropped.shape == (12, 12)
    kept_fraction = min(width, height) / width
    first_column = 255 * (1 - kept_fraction) / 2
    assert abs(cropped[:, 0] - first_column).max() <= 255 / min(width, 12) + 2
    assert abs(cropped.mean() - 127) < 8


def test_a_picture_of_the_right_size_is_taken_as_it_is() -> None:
    image = pixels()[0]
    assert np.array_equal(Fitting(SIDE, 3).center_crop(Image.fromarray(image)), image)


def test_random_pieces_lie_inside_and_have_areas_and_shapes_as_published() -> None:
    """A picture whose red and green say where a pixel is, so that a piece shows where it was
    cut.
    """
    side = 255
    rows, columns = np.mgrid[0:side, 0:side].astype(np.uint8)
    picture = Image.fromarray(np.stack([rows, columns, rows], axis=-1))
    generator = np.random.default_rng(0)
    fitting = Fitting(32, 3, "resized")

    areas = []
    shapes = []
    for _ in range(300):
        draws = generator.random(4)
        piece = fitting.random_crop(picture, draws.__getitem__).astype(float)
        height = (piece[-1, 0, 0] - piece[0, 0, 0]) * 32 / 31
        width = (piece[0, -1, 1] - piece[0, 0, 1]) * 32 / 31
        areas.append(height * width / side**2)
        shapes.append(width / height)

    assert 0.05 < min(areas) < 0.15
    assert 0.85 < max(areas) < 1.1
    assert 0.65 < min(shapes) < 0.85
    assert 1.2 < max(shapes) < 1.5


def test_normalising_by_the_moments_gives_mean_nought_and_deviation_one() -> None:
    values = pixels() / 255
    mean = tuple(values.mean(axis=(0, 1, 2)))
    std = tuple(values.std(axis=(0, 1, 2)))

    normalized = normalize(pixels(), mean=mean, std=std)

    assert_close(normalized.mean(dim=(0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    deviations = normalized.std(dim=(0, 2, 3), unbiased=False)
    assert_close(deviations, torch.ones(3), rtol=1e-5, atol=1e-5)
