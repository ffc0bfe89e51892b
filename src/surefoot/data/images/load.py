"""Loading of labeled images as training, validation and test data sets.

The choice of validation images depends on the number of training images but not on the seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from surefoot.config.keywords import known_keywords
from surefoot.config.paths import absolute_path, local_path
from surefoot.data.images.arrays import Arrays, arrays_in, digits, synthetic
from surefoot.data.images.augmentation import Augmentation, Pixels
from surefoot.data.images.dataset import ImageArrays, ImageFiles, Moments, normalized_with
from surefoot.data.images.folder import (
    Crop,
    Files,
    Fitting,
    OnCorrupt,
    class_folders,
    fitting,
    list_pictures,
    read_picture,
    readable_files,
)
from surefoot.data.order import Ids, permutation
from surefoot.data.scan import Scan
from surefoot.data.text.files import check_parts
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import stream_key

_MEASURED_FILES = 2_000  # files read to measure mean and standard deviation
_TRAIN, _VALIDATION, _TEST = (
    ("train", "training"),
    ("val", "valid", "validation"),
    ("test", "testing"),
)


@dataclass(frozen=True)
class ImageDatasets:
    """Training, validation and test data sets; only `train` is augmented. If no test part exists,
    `test` is None.

    >>> digits = load_images(val_fraction=0.2)
    >>> isinstance(digits, ImageDatasets), len(digits.train), len(digits.val), len(digits.classes)
    (True, 1150, 287, 10)
    """

    train: ImageArrays | ImageFiles
    val: ImageArrays | ImageFiles
    test: ImageArrays | ImageFiles | None
    classes: tuple[str, ...]
    fitting: Fitting
    """The conversion of images to one size and number of channels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    left_out: list[Path]
    """The damaged files that were skipped; empty unless `on_corrupt` is "skip"."""
    not_read: str = ""
    """One line about the files of a directory that are no images of a class; "" without any."""

    def normalized_with(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Return the data sets normalized by another mean and standard deviation; the fields `mean`
        and `std` do not change.

        >>> load_images().normalized_with((0.5,), (0.25,)).train.mean
        (0.5,)
        """
        training, held_out = (normalized_with(part, mean, std) for part in (self.train, self.val))
        test = None if self.test is None else normalized_with(self.test, mean, std)
        return replace(self, train=training, val=held_out, test=test)


@known_keywords
def load_images(
    path: Path | str | None = None,
    *,
    val_fraction: float = 0.1,
    augmentation: Augmentation | None = None,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    size: int | None = None,
    channels: int | None = None,
    crop: Crop = "padded",
    on_corrupt: OnCorrupt = "error",
    behavior: int | None = None,
) -> ImageDatasets:
    """Load labeled images as training, validation and test data sets; the default is scikit-learn's
    8 x 8 digits.

    path: "synthetic", or a directory of IDX files (MNIST, Fashion-MNIST), CIFAR-10 binary files, or
    class directories. Class directories may be inside train/, val/ and test/; if val/ exists,
    `val_fraction` is ignored. classes: the names of all classes, in order of class index. seed: the
    run's seed, for augmentation. size, channels, crop, on_corrupt: settings for image files; size
    and channels also apply to "synthetic". behavior: of the run that began with these images, so
    that it reads the same files (default: the newest).

    Raises `DataError` for unreadable files, and `ConfigError` for invalid settings.

    >>> digits = load_images()
    >>> len(digits.train), len(digits.val), len(digits.test), digits.fitting.size
    (1293, 144, 360, 8)
    """
    if channels not in (None, 1, 3):
        raise ConfigError(f"channels = {channels}: give 1 for gray or 3 for color")
    refuse_fraction(val_fraction)
    if size is not None and size < 1:
        raise ConfigError(f"data.size = {size}: give the side of images in pixels, 1 or more")
    if classes is not None and len(set(classes)) != len(classes):
        raise ConfigError(f"data.classes names a class twice: {', '.join(classes)}")
    made_up = str(path) == "synthetic"
    folder = Path()
    if path is not None and not made_up:
        # pictures are read during training, when the body may have changed the current directory
        folder = absolute_path(local_path(path, setting="path"))
    arrays: Arrays | None
    if made_up:
        shape = {
            "size": size,
            "channels": channels,
            "classes": None if classes is None else len(classes),
        }
        arrays = synthetic(**{name: value for name, value in shape.items() if value is not None})
    elif path is None:
        arrays = digits()
    elif folder.is_dir():
        arrays = arrays_in(folder, numbered=classes is None)
    else:
        what = "is a file: give its directory" if folder.is_file() else "does not exist"
        raise DataError(
            f"{folder} {what} (looked in {Path.cwd()})\n  check the spelling; a relative path starts at the current directory"
        )
    if arrays is None:
        fit = partial(fitting, size=size, channels=channels, crop=crop)
        return _of_folders(
            folder,
            classes,
            val_fraction,
            fit,
            augmentation=augmentation,
            on_corrupt=on_corrupt,
            behavior=behavior,
        )
    foreign = {"crop": crop != "padded", "on_corrupt": on_corrupt != "error"}
    foreign |= {} if made_up else {"size": size is not None, "channels": channels is not None}
    for name, is_given in foreign.items():
        if is_given:
            raise ConfigError(
                f"data.{name} applies only to folders of images; the images of {path or 'the digits'} are arrays of one shape\n"
                f"  remove it (--data.{name}, or the line of a preset or a file)"
            )
    arrays = arrays if classes is None else replace(arrays, classes=tuple(classes))
    return _of_arrays(
        arrays, str(path or "digits"), val_fraction, augmentation=augmentation, seed=seed
    )


def refuse_fraction(val_fraction: float) -> None:
    """Raise `ConfigError` if a fraction for validation is not between 0 and 1."""
    if not 0 < val_fraction < 1:
        raise ConfigError(
            f"data.val_fraction = {val_fraction}: give a fraction between 0 and 1, such as 0.1"
        )


def _of_arrays(
    arrays: Arrays, where: str, val_fraction: float, *, augmentation: Augmentation | None, seed: int
) -> ImageDatasets:
    for part, labels in (("training", arrays.labels), ("test", arrays.test_labels)):
        outside = np.flatnonzero((labels < 0) | (labels >= len(arrays.classes)))
        if outside.size:
            raise DataError(
                f"{where}: {part} image {outside[0]} has the label {labels[outside[0]]}, but there are {len(arrays.classes)} "
                f"classes: {', '.join(arrays.classes[:10])}\n  name all classes (--data.classes), or check the file for damage"
            )
    height, width, channels = arrays.images.shape[1:]
    if arrays.test_images.shape[1:] != (height, width, channels) or height != width:
        raise DataError(
            f"{where}: training images of {height} x {width} pixels and {channels} channel(s), test images of "
            f"{' x '.join(str(side) for side in arrays.test_images.shape[1:])}: all must be squares with one size and number of channels"
        )
    train_ids, val_ids = _split_ids(len(arrays.images), val_fraction)
    training = arrays.images[train_ids]
    mean, std = _moments(_counts(training))
    return ImageDatasets(
        train=ImageArrays(
            training,
            arrays.labels[train_ids],
            mean=mean,
            std=std,
            augmentation=augmentation,
            seed=seed,
        ),
        val=ImageArrays(arrays.images[val_ids], arrays.labels[val_ids], mean=mean, std=std),
        test=ImageArrays(arrays.test_images, arrays.test_labels, mean=mean, std=std),
        classes=arrays.classes,
        fitting=Fitting(height, channels),
        mean=mean,
        std=std,
        left_out=[],
    )


def _of_folders(
    folder: Path,
    classes: Sequence[str] | None,
    val_fraction: float,
    fit: Callable[[Files], Fitting],
    *,
    augmentation: Augmentation | None,
    on_corrupt: OnCorrupt,
    behavior: int | None,
) -> ImageDatasets:
    train, validation, test = (
        next((folder / name for name in names if (folder / name).is_dir()), None)
        for names in (_TRAIN, _VALIDATION, _TEST)
    )
    tree = train or folder
    names = tuple(class_folders(tree) if classes is None else classes)
    if len(names) < 2 or (train is None and (validation or test)):
        raise DataError(
            f"{folder} holds no training data: no IDX files, no CIFAR-10, and no folders of at least two classes"
            f"{' in ' + tree.name + '/' if train else ''}\n"
            "  give a directory with a folder of images for each class, or with such folders in train/, val/ and test/"
        )
    directories = {"training": tree, "val": validation, "test": test}
    parts = {
        name: list_pictures(directory, names, behavior=behavior)
        for name, directory in directories.items()
        if directory
    }
    read = [path for files in parts.values() for path in files.paths]
    not_read = [entry for files in parts.values() for entry in files.left_out]
    left_out: list[Path] = []
    if on_corrupt == "skip":
        for name, files in parts.items():
            parts[name], damaged = readable_files(files)
            left_out += damaged
    training, held_out = parts["training"], parts.get("val")
    fits = fit(training)
    if held_out is None:
        training, held_out = map(training.select, _split_ids(len(training.paths), val_fraction))
    counts_CV = np.zeros((fits.channels, 256), dtype=np.int64)
    # one file at a time, because all images may exceed the memory
    for path in training.paths[:: -(-len(training.paths) // _MEASURED_FILES)]:
        counts_CV += _counts(fits.center_crop(read_picture(path)))
    mean, std = _moments(counts_CV)
    return ImageDatasets(
        train=ImageFiles(
            training, fits, mean=mean, std=std, augmentation=augmentation or Augmentation()
        ),
        val=ImageFiles(held_out, fits, mean=mean, std=std),
        test=ImageFiles(parts["test"], fits, mean=mean, std=std) if "test" in parts else None,
        classes=names,
        fitting=fits,
        mean=mean,
        std=std,
        left_out=left_out,
        not_read=Scan(folder, read, not_read).line(),
    )


def _split_ids(images: int, val_fraction: float) -> tuple[Ids, Ids]:
    number = round(images * val_fraction)
    check_parts(images - number, number, val_fraction, what="images", cure="0.1, or add images")
    order = permutation(stream_key(0, "held-out images"), images, np.arange(images))
    return np.sort(order[number:]), np.sort(order[:number])


def _counts(images: Pixels) -> Ids:
    return np.stack(
        [np.bincount(plane.reshape(-1), minlength=256) for plane in np.moveaxis(images, -1, 0)]
    )


def _moments(counts_CV: Ids) -> Moments:
    values = np.arange(256) / 255
    means, deviations = [], []
    for counts in counts_CV:
        shares = counts / counts.sum()
        means.append(float(shares @ values))
        # a constant channel has deviation 0: avoid a division by zero
        deviations.append(max(float(shares @ (values - means[-1]) ** 2) ** 0.5, 1 / 255))
    return tuple(means), tuple(deviations)
