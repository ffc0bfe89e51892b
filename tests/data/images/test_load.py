"""Where images come from: three parts that share nothing, every format, and everything that is
wrong with a folder; 6 seconds.
"""

from __future__ import annotations

import gzip
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_sets import DATA, needs
from refused import refused
from surefoot.errors import DataError
from surefoot.recipes.readers.images import arrays as cifar
from surefoot.recipes.readers.images import folder, load
from surefoot.recipes.readers.images import picture as pictures
from surefoot.recipes.readers.images.arrays import synthetic
from surefoot.recipes.readers.images.layout import read_layout
from surefoot.recipes.readers.images.load import ImageDatasets, load_images


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        size.to_bytes(4, "big") for size in array.shape
    )
    return header + array.astype(np.uint8).tobytes()


def numbered(number: int, side: int = 6) -> np.ndarray:
    """Image n says n in its first two pixels."""
    quotients, remainders = np.divmod(np.arange(number), 256)
    images = np.zeros((number, side, side), dtype=np.uint8)
    images[:, 0, 0] = quotients
    images[:, 0, 1] = remainders
    return images


def idx_folder(
    place: Path, *, gz: bool = False, dotted: bool = False, labels: np.ndarray | None = None
) -> Path:
    """300 training images and 20 test images, of four classes if no labels are given."""
    if labels is None:
        labels = np.arange(300) % 4
    arrays = {
        "train-images-idx3-ubyte": numbered(300),
        "train-labels-idx1-ubyte": labels,
        "t10k-images-idx3-ubyte": numbered(20),
        "t10k-labels-idx1-ubyte": np.arange(20) % 4,
    }
    place.mkdir(exist_ok=True)
    for name, array in arrays.items():
        path = place / (name.replace("-idx", ".idx") if dotted else name)
        if gz:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            path.write_bytes(idx(array))
    return place


def picture(
    path: Path, *, mode: str = "RGB", size: tuple[int, int] = (12, 12), seed: int = 0
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def tree(
    place: Path,
    parts: tuple[str, ...] = ("train", "test"),
    classes: tuple[str, ...] = ("cat", "dog"),
) -> Path:
    for part in parts:
        for name in classes:
            for number in range(10):
                picture(place / part / name / f"{number}.png", seed=number)
    return place


def numbers_of(dataset: Any) -> list[int]:
    """The numbers that the images of `idx_folder` say."""
    pixels = dataset.images[:, 0, :2, 0].astype(int)
    return (pixels[:, 0] * 256 + pixels[:, 1]).tolist()


def all_parts(datasets: ImageDatasets) -> list[Any]:
    parts = [datasets.train, datasets.val, datasets.test]
    return [part for part in parts if part is not None]


# --- the parts ------------------------------------------------------------------------------------


def test_training_and_held_out_part_are_the_whole_and_share_nothing(tmp_path: Path) -> None:
    datasets = load_images(idx_folder(tmp_path), val_fraction=0.2)

    training = numbers_of(datasets.train)
    validation = numbers_of(datasets.val)
    assert sorted(training + validation) == list(range(300))
    assert len(validation) == 60
    assert set(validation) != set(range(60))


def test_each_image_keeps_its_label(tmp_path: Path) -> None:
    datasets = load_images(idx_folder(tmp_path), val_fraction=0.2)

    for part in all_parts(datasets):
        expected = [number % 4 for number in numbers_of(part)]
        assert part.labels.tolist() == expected


def test_what_is_held_out_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    idx_folder(tmp_path)

    first = load_images(tmp_path, seed=0)
    second = load_images(tmp_path, seed=1)

    assert set(numbers_of(first.val)) == set(numbers_of(second.val))


def test_mean_and_deviation_are_those_of_the_training_part(tmp_path: Path) -> None:
    datasets = load_images(idx_folder(tmp_path))

    images = datasets.train.images  # type: ignore[union-attr]
    assert isinstance(images, np.ndarray)
    values = images / 255
    assert datasets.mean == pytest.approx((values.mean(),), abs=1e-12)
    assert datasets.std == pytest.approx((values.std(),), abs=1e-12)


def test_mean_and_deviation_of_files_are_of_no_more_than_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "evenly_spaced", lambda paths: folder.evenly_spaced(paths, 16))
    measured: list[Path] = []

    def read_and_note(path: Path) -> Image.Image:
        measured.append(path)
        return pictures.read_picture(path)

    monkeypatch.setattr(load, "read_picture", read_and_note)

    datasets = load_images(tree(tmp_path), channels=3)

    assert len(datasets.train) == 18  # 16 of 18 are not measured: every second one is
    assert len(measured) == 9
    values = np.stack([np.asarray(Image.open(path)) for path in measured]) / 255
    assert datasets.mean == pytest.approx(values.mean(axis=(0, 1, 2)), abs=1e-12)
    assert datasets.std == pytest.approx(values.std(axis=(0, 1, 2)), abs=1e-12)


def test_headers_of_no_more_files_than_said_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_MAX_HEADERS", 11)
    read: list[Path] = []
    read_header = folder._header

    def read_and_note(path: Path, **settings: Any) -> Any:
        read.append(path)
        return read_header(path, **settings)

    monkeypatch.setattr(folder, "_header", read_and_note)
    files = read_layout(tree(tmp_path), None).parts["training"]

    folder.fitting(files, size=None, channels=None, crop="padded")

    assert len(read) == 10


@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_images_are_normalised_as_is_asked_and_stay_what_was_measured(
    kind: str, tmp_path: Path
) -> None:
    measured = load_images(tree(tmp_path) if kind == "files" else None)
    mean = (0.25,) * len(measured.mean)
    std = (0.5,) * len(measured.mean)

    normalized = measured.normalized_with(mean, std)

    for part in all_parts(normalized):
        assert part.mean == mean
        assert part.std == std
    assert normalized.mean == measured.mean == measured.train.mean
    assert normalized.std == measured.std == measured.train.std


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    expected = {np.rint(image * 255 / 16).astype(np.uint8).tobytes() for image in digits.images}

    datasets = load_images()

    images = np.concatenate([part.images for part in all_parts(datasets)])
    assert len(images) == 1797
    assert {image.tobytes() for image in images} == expected
    assert datasets.classes == tuple("0123456789")


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_what_is_no_fraction_is_refused_even_where_it_is_not_used(
    fraction: float, tmp_path: Path
) -> None:
    with refused("setting-out-of-range", setting="data.val_fraction"):
        load_images(tree(tmp_path, ("train", "val")), val_fraction=fraction)


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_a_fraction_that_leaves_a_part_empty_is_refused(fraction: float, tmp_path: Path) -> None:
    with refused("part-without-data", DataError, value=fraction):
        load_images(idx_folder(tmp_path), val_fraction=fraction)


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written", [{}, {"gz": True}, {"dotted": True}, {"gz": True, "dotted": True}]
)
def test_idx_files_may_be_compressed_and_called_with_a_dot(
    written: dict[str, bool], tmp_path: Path
) -> None:
    datasets = load_images(idx_folder(tmp_path, **written))

    assert len(datasets.train) == 270
    assert datasets.classes == ("0", "1", "2", "3")
    assert datasets.fitting.size == 6


@pytest.mark.parametrize("given", ["cifar-10-batches-bin", "."])
def test_cifar_is_read_from_its_folder_or_the_one_above(given: str, tmp_path: Path) -> None:
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    rows = np.random.default_rng(0).integers(10, size=(20, 3073), dtype=np.uint8)
    for name in (*cifar.TRAINING_FILES, cifar.TEST_FILE):
        (place / name).write_bytes(rows.tobytes())

    datasets = load_images(tmp_path / given)

    assert part_sizes(datasets) == (90, 10, 20)
    assert datasets.fitting.channels == 3
    assert datasets.fitting.size == 32
    assert datasets.classes[3] == "cat"


def test_a_made_up_set_has_the_size_that_is_asked() -> None:
    datasets = load_images("synthetic", size=8, channels=1, classes=["a", "b", "c"])

    assert datasets.fitting.size == 8
    assert datasets.fitting.channels == 1
    assert datasets.classes == ("a", "b", "c")


def test_a_made_up_set_can_be_learned() -> None:
    datasets = load_images("synthetic", size=8, channels=1, classes=["a", "b", "c"])
    train: Any = datasets.train
    test: Any = datasets.test
    labels = train.labels.numpy()

    means = np.stack([train.images[labels == label].mean(axis=0) for label in range(3)])
    distances = ((test.images[:, None] - means) ** 2).sum(axis=(2, 3, 4))

    is_right = distances.argmin(axis=1) == test.labels.numpy()
    assert is_right.mean() > 0.95


def test_a_missing_idx_file_is_refused(tmp_path: Path) -> None:
    (idx_folder(tmp_path) / "t10k-images-idx3-ubyte").unlink()

    with refused("image-files-missing", DataError):
        load_images(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("train-labels-idx1-ubyte", idx(np.zeros(9)), "idx-labels-not-of-images"),
        ("t10k-labels-idx1-ubyte", idx(np.full(20, 7)), "label-without-class"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((20, 5, 5))), "image-arrays-differ"),
        ("train-images-idx3-ubyte", b"what", "idx-of-another-kind"),
    ],
)
def test_idx_files_that_do_not_belong_together_are_refused(
    name: str, content: bytes, code: str, tmp_path: Path
) -> None:
    (idx_folder(tmp_path) / name).write_bytes(content)

    with refused(code, DataError):
        load_images(tmp_path)


def test_a_damaged_label_does_not_become_hundreds_of_classes(tmp_path: Path) -> None:
    labels = np.arange(300) % 4
    labels[123] = 255
    idx_folder(tmp_path, labels=labels)
    classes = [str(number) for number in range(256)]

    with refused("idx-label-without-image", DataError, row=123, label=255, absent=4):
        load_images(tmp_path)
    assert len(load_images(tmp_path, classes=classes).classes) == 256


def test_a_label_outside_the_named_classes_is_refused(tmp_path: Path) -> None:
    with refused("label-without-class", DataError, row=3, label=3):
        load_images(idx_folder(tmp_path), classes=["a", "b", "c"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("size", 8), ("channels", 3), ("crop", "resized"), ("on_corrupt", "skip")],
)
def test_settings_of_folders_are_foreign_to_arrays(name: str, value: Any, tmp_path: Path) -> None:
    for path in (None, idx_folder(tmp_path)):
        with refused("setting-of-image-folders", setting=f"data.{name}"):
            load_images(path, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("channels", 2, "setting-out-of-range"),
        ("size", 0, "setting-out-of-range"),
        ("classes", ["a", "a"], "class-named-twice"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, value: Any, code: str) -> None:
    with refused(code, setting=f"data.{name}"):
        load_images("synthetic", **{name: value})


# --- folders --------------------------------------------------------------------------------------


def part_sizes(datasets: ImageDatasets) -> tuple[int, int, int]:
    tests = 0 if datasets.test is None else len(datasets.test)
    return len(datasets.train), len(datasets.val), tests


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((".",), (18, 2, 0)),
        (("train", "test"), (18, 2, 20)),
        (("train", "val"), (20, 20, 0)),
        (("train", "val", "test"), (20, 20, 20)),
    ],
)
def test_parts_are_folders_or_held_out(
    parts: tuple[str, ...], expected: tuple[int, int, int], tmp_path: Path
) -> None:
    datasets = load_images(tree(tmp_path, parts))

    assert part_sizes(datasets) == expected
    training: Any = datasets.train
    validation: Any = datasets.val
    assert not {*training.files.paths} & {*validation.files.paths}


def test_images_of_folders_have_their_shape_and_the_class_of_their_folder(tmp_path: Path) -> None:
    datasets = load_images(tree(tmp_path))

    image, label = datasets.train[0]
    assert datasets.classes == ("cat", "dog")
    assert image.shape == (3, 12, 12)
    assert label == 0


def test_classes_may_be_ordered(tmp_path: Path) -> None:
    tree(tmp_path, ("train",))

    files = load_images(tmp_path, classes=["dog", "cat"]).train.files  # type: ignore[union-attr]

    for path, label in zip(files.paths, files.labels, strict=True):
        assert path.parent.name == ("dog", "cat")[label]


def test_a_folder_outside_the_named_classes_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, ("train",), ("bird", "cat", "dog"))

    with refused("class-unknown", DataError, path=tmp_path / "train" / "bird"):
        load_images(tmp_path, classes=["dog", "cat"])


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda place: (place / "train" / "ant").mkdir(), "class folder .*ant holds no image"),
        (
            lambda place: picture(place / "test" / "eel" / "1.png"),
            "test/eel is not one of the classes",
        ),
        (
            lambda place: picture(place / "train" / "cat" / "00.png", size=(9, 9)),
            "images differ in size.*size=64",
        ),
        (
            lambda place: picture(place / "train" / "cat" / "00.png", mode="L"),
            "images differ in channels.*channels=3",
        ),
        (
            lambda place: shutil.rmtree(place / "train" / "dog"),
            "no folders of at least two classes",
        ),
        (lambda place: shutil.rmtree(place / "train"), "there is no training part"),
    ],
)
def test_a_tree_that_cannot_be_trained_on_is_told(
    change: Any, pattern: str, tmp_path: Path
) -> None:
    change(tree(tmp_path))

    with pytest.raises(DataError) as caught:
        load_images(tmp_path)
    lines = str(caught.value).splitlines()
    assert re.search(pattern, " ".join(lines))
    assert len(lines) <= 5


def test_mixed_pictures_are_made_equal_where_that_is_asked(tmp_path: Path) -> None:
    tree(tmp_path)
    picture(tmp_path / "train" / "cat" / "00.png", mode="L", size=(30, 20))

    train = load_images(tmp_path, size=16, channels=1).train

    images = [train[place][0] for place in range(len(train))]
    assert {tuple(image.shape) for image in images} == {(1, 16, 16)}


@pytest.fixture(params=["empty", "text", "cut"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A damaged picture of the tree in `tmp_path`."""
    path = tree(tmp_path) / "train" / "cat" / "5.png"
    contents = {"empty": b"", "text": b"no picture at all", "cut": path.read_bytes()[:200]}
    path.write_bytes(contents[request.param])
    return path


def test_a_damaged_picture_stops(damaged: Path, tmp_path: Path) -> None:
    def read_all() -> None:
        datasets = load_images(tmp_path)
        for part in (datasets.train, datasets.val):
            for sample in range(len(part)):
                part[sample]

    with pytest.raises(DataError) as caught:
        read_all()
    assert caught.value.fields["path"] == damaged


def test_a_damaged_picture_is_left_out_where_that_is_asked(damaged: Path, tmp_path: Path) -> None:
    datasets = load_images(tmp_path, on_corrupt="skip")

    assert datasets.left_out == [damaged]
    assert part_sizes(datasets) == (17, 2, 20)


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    with refused("file-unreadable", DataError, path=tmp_path):
        pictures.open_picture(tmp_path)


@pytest.mark.parametrize("path", ["nowhere", "file.png"])
def test_a_path_that_is_no_directory_is_told(path: str, tmp_path: Path) -> None:
    picture(tmp_path / "file.png")
    with refused("images-no-directory", DataError, path=tmp_path / path):
        load_images(tmp_path / path)


@pytest.mark.slow
@needs("fashion-mnist")
def test_fashion_mnist_is_read_whole() -> None:
    datasets = load_images(DATA / "fashion-mnist")

    assert part_sizes(datasets) == (54_000, 6_000, 10_000)
    assert np.bincount(datasets.test.labels.numpy()).tolist() == [1000] * 10  # type: ignore[union-attr]
    assert datasets.mean == pytest.approx((0.2860,), abs=5e-4)  # as others publish of all 60,000
    assert datasets.std == pytest.approx((0.3530,), abs=5e-4)


@pytest.mark.slow
@needs("cifar10")
def test_a_tree_of_real_jpegs_is_read(tmp_path: Path) -> None:
    with tarfile.open(DATA / "cifar10" / "cifar10-jpeg-subset.tar.gz") as archive:
        files = [member for member in archive if member.isfile()]
        some = [file for file in files if int(Path(file.name).stem) % 500 < 5]
        archive.extractall(tmp_path, some, filter="data")

    datasets = load_images(tmp_path / "cifar10")

    image, _ = datasets.train[0]
    assert datasets.classes == cifar.CLASSES
    assert image.shape == (3, 32, 32)


def test_synthetic_images_are_patterns_of_their_class_under_noise_that_is_drawn_once_for_each() -> (
    None
):
    """In pieces as all at once: also past the first thousand."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(64, 192, (3, 4, 4, 1))
    noise = generator.integers(-64, 64, (1320, 4, 4, 1))
    labels = np.arange(1320) % 3
    images = (patterns[labels] + noise).astype(np.uint8)

    arrays = synthetic(images=1100, size=4, channels=1, classes=3)

    assert np.array_equal(np.concatenate([arrays.images, arrays.test_images]), images)
    assert np.array_equal(np.concatenate([arrays.labels, arrays.test_labels]), labels)


@pytest.mark.parametrize("kind", ["tiff", "gif", "webp", "mpo"])
def test_files_of_several_pages_are_said(kind: str, tmp_path: Path) -> None:
    pages = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            pages[0].save(tmp_path / name / f"{number}.{kind}")
    assert load_images(tmp_path, val_fraction=0.25).notes == ()

    pages[0].save(tmp_path / "dog" / f"3.{kind}", save_all=True, append_images=pages[1:])
    (note,) = load_images(tmp_path, val_fraction=0.25).notes
    assert note.startswith(f"1 file has several pages (3.{kind})")


def test_one_deep_picture_among_many_is_measured(tmp_path: Path) -> None:
    plain = tmp_path / "plain.png"
    deep = tmp_path / "deep.png"
    Image.new("L", (2, 2)).save(plain)
    Image.fromarray(np.full((2, 2), 3000, dtype=np.uint16)).save(deep)
    paths = [plain] * 2_100
    paths[1] = deep
    assert deep not in folder.evenly_spaced(paths)
    files = folder.LabeledFiles(paths, np.zeros(len(paths), dtype=np.int64))

    fitting = folder.fitting(files, size=2, channels=1, crop="padded")

    assert fitting.value_range == (0, 4095)
