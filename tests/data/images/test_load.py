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
    images = np.zeros((number, side, side), dtype=np.uint8)
    images[:, 0, 0], images[:, 0, 1] = np.divmod(np.arange(number), 256)
    return images


def idx_folder(
    place: Path, number: int = 300, *, gz: bool = False, dotted: bool = False, labels: Any = None
) -> Path:
    place.mkdir(exist_ok=True)
    given = np.arange(number) % 4 if labels is None else np.asarray(labels)
    for prefix, images, numbers in (
        ("train", numbered(number), given),
        ("t10k", numbered(20), np.arange(20) % 4),
    ):
        for kind, array in (("images-idx3", images), ("labels-idx1", numbers)):
            name = f"{prefix}-{kind.replace('-', '.') if dotted else kind}-ubyte"
            (place / (name + ".gz" * gz)).write_bytes(
                gzip.compress(idx(array)) if gz else idx(array)
            )
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


def places(dataset: Any) -> set[int]:
    return {int(image[0, 0, 0]) * 256 + int(image[0, 1, 0]) for image in dataset.images}


def names(dataset: Any) -> set[Path]:
    return set(dataset.files.paths)


# --- the parts ------------------------------------------------------------------------------------


def test_training_and_held_out_part_are_the_whole_and_share_nothing(tmp_path: Path) -> None:
    found = load_images(idx_folder(tmp_path), val_fraction=0.2)
    training, held_out = places(found.train), places(found.val)
    assert training | held_out == set(range(300))
    assert (len(training), len(held_out)) == (240, 60)
    assert held_out != set(range(60))
    for part in (found.train, found.val, found.test):
        assert [
            place % 4
            for place in (part.images[:, 0, 0, 0].astype(int) * 256 + part.images[:, 0, 1, 0])
        ] == part.labels.tolist()  # type: ignore[union-attr]


def test_what_is_held_out_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    idx_folder(tmp_path)
    assert places(load_images(tmp_path, seed=0).val) == places(load_images(tmp_path, seed=1).val)


def test_mean_and_deviation_are_those_of_the_training_part(tmp_path: Path) -> None:
    found = load_images(idx_folder(tmp_path))
    assert isinstance(found.train.images, np.ndarray)  # type: ignore[union-attr]
    values = found.train.images / 255  # type: ignore[union-attr]
    assert found.mean == pytest.approx((values.mean(),), abs=1e-12)
    assert found.std == pytest.approx((values.std(),), abs=1e-12)


def test_mean_and_deviation_of_files_are_of_no_more_than_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "evenly_spaced", lambda paths: folder.evenly_spaced(paths, 16))
    read: list[Path] = []

    def noted(path: Path) -> Image.Image:
        read.append(path)
        return pictures.read_picture(path)

    monkeypatch.setattr(load, "read_picture", noted)
    found = load_images(tree(tmp_path), channels=3)
    assert len(found.train) == 18  # 16 of 18 are not measured: every second one is
    values = np.stack([np.asarray(Image.open(path)) for path in read]) / 255
    assert len(read) == 9
    assert found.mean == pytest.approx(values.mean(axis=(0, 1, 2)), abs=1e-12)
    assert found.std == pytest.approx(values.std(axis=(0, 1, 2)), abs=1e-12)


def test_headers_of_no_more_files_than_said_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_MAX_HEADERS", 11)
    read: list[Path] = []
    header = folder._header
    monkeypatch.setattr(
        folder, "_header", lambda path, **how: (read.append(path), header(path, **how))[1]
    )
    folder.fitting(
        read_layout(tree(tmp_path), None).parts["training"],
        size=None,
        channels=None,
        crop="padded",
    )
    assert len(read) == 10


def test_images_are_normalised_as_is_asked_and_stay_what_was_measured(tmp_path: Path) -> None:
    for place in (None, tree(tmp_path)):
        measured = load_images(place)
        given = ((0.25,) * len(measured.mean), (0.5,) * len(measured.mean))
        found = measured.normalized_with(*given)
        assert (found.mean, found.std) == (measured.mean, measured.std)
        for part in (found.train, found.val, found.test):
            assert (part.mean, part.std) == given  # type: ignore[union-attr]
        assert (measured.train.mean, measured.train.std) == (measured.mean, measured.std)


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    found = load_images()
    parts = [part for part in (found.train, found.val, found.test) if part is not None]
    ours = {part.images[place, ..., 0].tobytes() for part in parts for place in range(len(part))}  # type: ignore[union-attr]
    expected = {np.rint(image * 255 / 16).astype(np.uint8).tobytes() for image in theirs.images}
    assert ours == expected
    assert sum(len(part) for part in parts) == 1797
    assert found.classes == tuple("0123456789")


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
    found = load_images(idx_folder(tmp_path, **written))
    assert (len(found.train), found.classes, found.fitting.size) == (270, ("0", "1", "2", "3"), 6)


def test_cifar_is_read_from_its_folder_or_the_one_above(tmp_path: Path) -> None:
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    rows = np.random.default_rng(0).integers(10, size=(20, 3073), dtype=np.uint8)
    for name in (*cifar.TRAINING_FILES, cifar.TEST_FILE):
        (place / name).write_bytes(rows.tobytes())
    for path in (place, tmp_path):
        found = load_images(path)
        assert (len(found.train), len(found.val), found.fitting.channels, found.fitting.size) == (
            90,
            10,
            3,
            32,
        )
        assert found.classes[3] == "cat"


def test_a_made_up_set_has_the_size_that_is_asked_and_can_be_learned() -> None:
    found = load_images("synthetic", size=8, channels=1, classes=["a", "b", "c"])
    assert (found.fitting.size, found.fitting.channels, found.classes) == (8, 1, ("a", "b", "c"))
    images, labels = found.train.images.astype(float), found.train.labels.numpy()  # type: ignore[union-attr]
    means = np.stack([images[labels == label].mean(axis=0) for label in range(3)])
    nearest = ((found.test.images[:, None] - means) ** 2).sum(axis=(2, 3, 4)).argmin(axis=1)  # type: ignore[union-attr]
    assert (nearest == found.test.labels.numpy()).mean() > 0.95  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda place: (place / "t10k-images-idx3-ubyte").unlink(), "image-files-missing"),
        (
            lambda place: (place / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(9))),
            "idx-labels-not-of-images",
        ),
        (
            lambda place: (place / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(20, 7))),
            "label-without-class",
        ),
        (
            lambda place: (place / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((20, 5, 5)))),
            "image-arrays-differ",
        ),
        (
            lambda place: (place / "train-images-idx3-ubyte").write_bytes(b"what"),
            "idx-of-another-kind",
        ),
    ],
)
def test_idx_files_that_do_not_belong_together_are_refused(
    change: Any, code: str, tmp_path: Path
) -> None:
    change(idx_folder(tmp_path))
    with refused(code, DataError):
        load_images(tmp_path)


def test_a_damaged_label_does_not_become_hundreds_of_classes(tmp_path: Path) -> None:
    labels = np.arange(300) % 4
    labels[123] = 255
    with refused("idx-label-without-image", DataError, row=123, label=255, absent=4):
        load_images(idx_folder(tmp_path, labels=labels))
    assert len(load_images(tmp_path, classes=[str(number) for number in range(256)]).classes) == 256


def test_a_label_outside_the_named_classes_is_refused(tmp_path: Path) -> None:
    with refused("label-without-class", DataError, row=3, label=3):
        load_images(idx_folder(tmp_path), classes=["a", "b", "c"])


@pytest.mark.parametrize(
    "setting", [{"size": 8}, {"channels": 3}, {"crop": "resized"}, {"on_corrupt": "skip"}]
)
def test_settings_of_folders_are_foreign_to_arrays(setting: dict[str, Any], tmp_path: Path) -> None:
    for path in (None, idx_folder(tmp_path)):
        with refused("setting-of-image-folders", setting=f"data.{next(iter(setting))}"):
            load_images(path, **setting)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"channels": 2}, "setting-out-of-range"),
        ({"size": 0}, "setting-out-of-range"),
        ({"classes": ["a", "a"]}, "class-named-twice"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], code: str) -> None:
    with refused(code, setting=f"data.{next(iter(wrong))}"):
        load_images("synthetic", **wrong)


# --- folders --------------------------------------------------------------------------------------


def parts_of(found: ImageDatasets) -> tuple[int, int, int]:
    return len(found.train), len(found.val), 0 if found.test is None else len(found.test)


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
    found = load_images(tree(tmp_path, parts))
    assert parts_of(found) == expected
    assert not names(found.train) & names(found.val)
    assert found.classes == ("cat", "dog")
    image, label = found.train[0]
    assert (image.shape, label) == ((3, 12, 12), 0)


def test_classes_may_be_chosen_and_ordered_and_others_are_outside(tmp_path: Path) -> None:
    tree(tmp_path, ("train",), ("bird", "cat", "dog"))
    with refused("class-unknown", DataError, path=tmp_path / "train" / "bird"):
        load_images(tmp_path, classes=["dog", "cat"])
    shutil.rmtree(tmp_path / "train" / "bird")
    found = load_images(tmp_path, classes=["dog", "cat"])
    assert {
        path.parent.name
        for path, label in zip(found.train.files.paths, found.train.files.labels, strict=True)
        if label == 0
    } == {"dog"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "says"),
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
def test_a_tree_that_cannot_be_trained_on_is_told(change: Any, says: str, tmp_path: Path) -> None:
    change(tree(tmp_path))
    with pytest.raises(DataError) as caught:
        load_images(tmp_path)
    assert re.search(says, str(caught.value).replace("\n", " "))
    assert len(str(caught.value).splitlines()) <= 5


def test_mixed_pictures_are_made_equal_where_that_is_asked(tmp_path: Path) -> None:
    tree(tmp_path)
    picture(tmp_path / "train" / "cat" / "00.png", mode="L", size=(30, 20))
    found = load_images(tmp_path, size=16, channels=1)
    assert {tuple(found.train[place][0].shape) for place in range(len(found.train))} == {
        (1, 16, 16)
    }


@pytest.mark.parametrize("content", [b"", b"no picture at all", "cut"])
def test_a_damaged_picture_stops_or_is_left_out_as_configured(
    content: bytes | str, tmp_path: Path
) -> None:
    place = tree(tmp_path) / "train" / "cat" / "5.png"
    place.write_bytes(place.read_bytes()[:200] if isinstance(content, str) else content)

    def read_all() -> None:
        found = load_images(tmp_path)
        for part in (found.train, found.val):
            for sample in range(len(part)):
                part[sample]

    with pytest.raises(DataError) as caught:
        read_all()
    assert caught.value.fields["path"] == place
    found = load_images(tmp_path, on_corrupt="skip")
    assert found.left_out == [place]
    assert parts_of(found) == (17, 2, 20)


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
    found = load_images(DATA / "fashion-mnist")
    assert parts_of(found) == (54_000, 6_000, 10_000)
    assert np.bincount(found.test.labels.numpy()).tolist() == [1000] * 10  # type: ignore[union-attr]
    assert found.mean == pytest.approx((0.2860,), abs=5e-4)  # as others publish of all 60,000
    assert found.std == pytest.approx((0.3530,), abs=5e-4)


@pytest.mark.slow
@needs("cifar10")
def test_a_tree_of_real_jpegs_is_read(tmp_path: Path) -> None:
    with tarfile.open(DATA / "cifar10" / "cifar10-jpeg-subset.tar.gz") as archive:
        chosen = [
            member
            for member in archive
            if member.isfile() and int(Path(member.name).stem) % 500 < 5
        ]
        archive.extractall(tmp_path, chosen, filter="data")
    found = load_images(tmp_path / "cifar10")
    assert found.classes == cifar.CLASSES
    assert found.train[0][0].shape == (3, 32, 32)


def test_synthetic_images_are_patterns_of_their_class_under_noise_that_is_drawn_once_for_each() -> (
    None
):
    """In pieces as all at once: also past the first thousand."""
    arrays = synthetic(images=1100, size=4, channels=1, classes=3)
    generator = np.random.default_rng(0)
    patterns = generator.integers(64, 192, (3, 4, 4, 1))
    noise = generator.integers(-64, 64, (1320, 4, 4, 1))
    labels = np.arange(1320) % 3
    images = (patterns[labels] + noise).astype(np.uint8)
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
    paths[1] = deep  # not among the evenly spaced ones
    assert deep not in folder.evenly_spaced(paths)
    files = folder.LabeledFiles(paths, np.zeros(len(paths), dtype=np.int64))
    assert folder.fitting(files, size=2, channels=1, crop="padded").value_range == (0, 4095)
