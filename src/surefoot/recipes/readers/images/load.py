"""Loading of labeled images as training, validation and test data sets.

The choice of validation images depends on the number of training images but not on the seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from surefoot.config.behavior import PICTURES_AS_SHOWN, newest_behavior
from surefoot.config.keywords import known_keywords
from surefoot.config.paths import absolute_path, local_path
from surefoot.data.order import Ids, permutation
from surefoot.data.part_names import check_parts
from surefoot.data.scan import printable
from surefoot.errors import ConfigError, DataError, Setting, out_of_range
from surefoot.recipes.readers.images.arrays import Arrays, arrays_in, digits, synthetic
from surefoot.recipes.readers.images.augmentation import Augmentation, Pixels
from surefoot.recipes.readers.images.dataset import (
    ImageArrays,
    ImageFiles,
    Moments,
    normalized_with,
    scaled_with,
)
from surefoot.recipes.readers.images.folder import (
    LabeledFiles,
    OnCorrupt,
    evenly_spaced,
    first_names,
    fitting,
    readable_files,
)
from surefoot.recipes.readers.images.layout import (
    PictureLayout,
    all_paths,
    layout_of_behavior_1,
    read_layout,
)
from surefoot.recipes.readers.images.picture import (
    Crop,
    Fitting,
    ValueRange,
    check_background,
    read_picture,
    with_pages,
)
from surefoot.seeding import stream_key


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
    notes: tuple[str, ...] = ()
    """Lines about parts that lack classes, images without labels, and files of several pages."""

    def normalized_with(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Return the data sets normalized by another mean and standard deviation; the fields `mean`
        and `std` do not change.

        >>> load_images().normalized_with((0.5,), (0.25,)).train.mean
        (0.5,)
        """
        train = normalized_with(self.train, mean, std)
        val = normalized_with(self.val, mean, std)
        test = None if self.test is None else normalized_with(self.test, mean, std)
        return replace(self, train=train, val=val, test=test)

    def scaled_with(self, value_range: ValueRange | None) -> Self:
        """Return the data sets with other values of pictures of more than 8 bits that become black
        and white.

        >>> load_images().scaled_with((0, 4095)).fitting.value_range
        (0, 4095)
        """
        train = scaled_with(self.train, value_range)
        val = scaled_with(self.val, value_range)
        test = None if self.test is None else scaled_with(self.test, value_range)
        fits = replace(self.fitting, value_range=value_range)
        return replace(self, train=train, val=val, test=test, fitting=fits)


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
    background: str = "white",
    behavior: int | None = None,
) -> ImageDatasets:
    """Load labeled images as training, validation and test data sets; the default is scikit-learn's
    8 x 8 digits.

    path: "synthetic", or a directory of IDX files (MNIST, Fashion-MNIST), CIFAR-10 binary files,
    class directories, or images beside a CSV file of their labels. These may be inside train/, val/
    and test/; if val/ exists, `val_fraction` is ignored. classes: the names of all classes, in order
    of class index. seed: the run's seed, for augmentation. size, channels, crop, on_corrupt,
    background: settings for image files; size and channels also apply to "synthetic". background:
    the color that shows through transparent parts. behavior: that of the run that began with these
    images, so that it reads the same files and pixels (default: the newest).

    Raises `DataError` for unreadable files, and `ConfigError` for invalid settings.

    >>> digits = load_images()
    >>> len(digits.train), len(digits.val), len(digits.test), digits.fitting.size
    (1293, 144, 360, 8)
    """
    if channels not in (None, 1, 3):
        raise out_of_range("data.channels", channels, "1 for gray or 3 for color")
    refuse_fraction(val_fraction)
    if size is not None and size < 1:
        raise out_of_range("data.size", size, "the side of images in pixels, 1 or more")
    if classes is not None and len(set(classes)) != len(classes):
        raise ConfigError(
            "class-named-twice",
            problem=f"data.classes names a class twice: {', '.join(classes)}",
            setting="data.classes",
            value=tuple(classes),
        )
    check_background(background)
    behavior = newest_behavior() if behavior is None else behavior
    as_shown = behavior >= PICTURES_AS_SHOWN
    if not as_shown and background != "white":
        raise ConfigError(
            "background-of-older-run",
            problem=f"background = {background!r}, but the run began with behavior {behavior}, which"
            " ignores transparency",
            remedy="leave the background out, or begin another run",
            setting="data.background",
            value=background,
            behavior=behavior,
        )
    if path is None:
        arrays = digits()
    elif str(path) == "synthetic":
        arrays = _made_up(size, channels, classes)
    else:
        folder = _directory(path)
        arrays_in_folder = arrays_in(folder, numbered=classes is None)
        if arrays_in_folder is None:
            if as_shown:
                layout = read_layout(folder, classes)
            else:
                layout = layout_of_behavior_1(folder, classes)
            fit = partial(
                fitting,
                size=size,
                channels=channels,
                crop=crop,
                background=background,
                as_shown=as_shown,
            )
            return _of_folders(
                layout, val_fraction, fit, augmentation=augmentation, on_corrupt=on_corrupt
            )
        arrays = arrays_in_folder
    settings = {
        "crop": crop != "padded",
        "on_corrupt": on_corrupt != "error",
        "background": background != "white",
    }
    if str(path) != "synthetic":
        settings |= {"size": size is not None, "channels": channels is not None}
    _refuse_settings_of_folders(settings, path)
    arrays = arrays if classes is None else replace(arrays, classes=tuple(classes))
    return _of_arrays(
        arrays,
        str(path or "digits"),
        val_fraction,
        augmentation=augmentation,
        seed=seed,
        as_shown=as_shown,
    )


def _directory(path: Path | str) -> Path:
    """Return the absolute path of a directory. Raises `DataError` if it is none."""
    # pictures are read during training, when the body may have changed the current directory
    folder = absolute_path(local_path(path, setting="path"))
    if not folder.is_dir():
        what = "is a file: give its directory" if folder.is_file() else "does not exist"
        raise DataError(
            "images-no-directory",
            problem=f"{printable(folder)} {what} (looked in {Path.cwd()})",
            remedy="check the spelling; a relative path starts at the current directory",
            path=folder,
        )
    return folder


def _made_up(size: int | None, channels: int | None, classes: Sequence[str] | None) -> Arrays:
    shape = {}
    if size is not None:
        shape["size"] = size
    if channels is not None:
        shape["channels"] = channels
    if classes is not None:
        shape["classes"] = len(classes)
    return synthetic(**shape)


def _refuse_settings_of_folders(settings: Mapping[str, bool], path: Path | str | None) -> None:
    """Raise `ConfigError` if a setting of folders of images is given for arrays."""
    for name, is_given in settings.items():
        if is_given:
            raise ConfigError(
                "setting-of-image-folders",
                problem=f"data.{name} applies only to folders of images; the images of"
                f" {printable(path or 'the digits')} are arrays of one shape",
                remedy=("remove", Setting(f"data.{name}"), "or the line of a preset or a file"),
                setting=f"data.{name}",
            )


def refuse_fraction(val_fraction: float) -> None:
    """Raise `ConfigError` if a fraction for validation is not between 0 and 1."""
    if not 0 < val_fraction < 1:
        raise out_of_range(
            "data.val_fraction", val_fraction, "a fraction between 0 and 1, such as 0.1"
        )


def _of_arrays(
    arrays: Arrays,
    where: str,
    val_fraction: float,
    *,
    augmentation: Augmentation | None,
    seed: int,
    as_shown: bool,
) -> ImageDatasets:
    for part, labels in (("training", arrays.labels), ("test", arrays.test_labels)):
        outside = np.flatnonzero((labels < 0) | (labels >= len(arrays.classes)))
        if outside.size:
            first = int(outside[0])
            raise DataError(
                "label-without-class",
                problem=f"{where}: {part} image {first} has the label {labels[first]}, but there are"
                f" {len(arrays.classes)} classes: {', '.join(arrays.classes[:10])}",
                remedy=[
                    "check the file for damage",
                    ("name all classes with", Setting("data.classes")),
                ],
                row=first,
                label=int(labels[first]),
            )
    height, width, channels = arrays.images.shape[1:]
    test_shape = arrays.test_images.shape[1:]
    if test_shape != (height, width, channels) or height != width:
        raise DataError(
            "image-arrays-differ",
            problem=f"{where}: training images of {height} x {width} pixels and {channels} channel(s),"
            f" test images of {' x '.join(str(side) for side in test_shape)}",
            reason="all must be squares with one size and number of channels",
            training=[height, width, channels],
            test=list(test_shape),
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
        fitting=Fitting(height, channels, as_shown=as_shown),
        mean=mean,
        std=std,
        left_out=[],
    )


def _of_folders(
    layout: PictureLayout,
    val_fraction: float,
    fit: Callable[[LabeledFiles], Fitting],
    *,
    augmentation: Augmentation | None,
    on_corrupt: OnCorrupt,
) -> ImageDatasets:
    parts = dict(layout.parts)
    if not parts["training"].paths:
        raise DataError(
            "images-missing",
            problem=f"{printable(layout.path)} has no image for training",
            reason=f"no folder holds one of the classes {first_names(layout.classes)}",
            remedy=("check the names in", Setting("data.classes")),
            path=layout.path,
        )
    left_out: list[Path] = []
    if on_corrupt == "skip":
        for name, files in parts.items():
            parts[name], damaged = readable_files(files)
            left_out += damaged
    training = parts["training"]
    fits = fit(training)
    if "val" in parts:
        held_out = parts["val"]
    else:
        train_ids, val_ids = _split_ids(len(training.paths), val_fraction)
        held_out = training.select(val_ids)
        training = training.select(train_ids)
    counts_CV = np.zeros((fits.channels, 256), dtype=np.int64)
    # one file at a time, because all images may exceed the memory
    for path in evenly_spaced(training.paths):
        counts_CV += _counts(fits.center_crop(read_picture(path)))
    mean, std = _moments(counts_CV)
    notes = layout.notes()
    if fits.as_shown:
        paged = with_pages(all_paths(parts))
        if paged:
            name = printable(paged[0].name)
            plural = "s have" if len(paged) > 1 else " has"
            notes.append(f"{len(paged):,} file{plural} several pages ({name}): the first is read")
    test = None
    if "test" in parts:
        test = ImageFiles(parts["test"], fits, mean=mean, std=std)
    return ImageDatasets(
        train=ImageFiles(
            training, fits, mean=mean, std=std, augmentation=augmentation or Augmentation()
        ),
        val=ImageFiles(held_out, fits, mean=mean, std=std),
        test=test,
        classes=layout.classes,
        fitting=fits,
        mean=mean,
        std=std,
        left_out=left_out,
        not_read=layout.not_read(),
        notes=tuple(notes),
    )


def _split_ids(images: int, val_fraction: float) -> tuple[Ids, Ids]:
    number = round(images * val_fraction)
    check_parts(images - number, number, val_fraction, what="images", cure="0.1, or add images")
    order = permutation(stream_key(0, "held-out images"), images, np.arange(images))
    return np.sort(order[number:]), np.sort(order[:number])


def _counts(images: Pixels) -> Ids:
    """Return how often each channel has each value, (C, 256)."""
    planes = np.moveaxis(images, -1, 0)
    return np.stack([np.bincount(plane.reshape(-1), minlength=256) for plane in planes])


def _moments(counts_CV: Ids) -> Moments:
    values = np.arange(256) / 255
    means = []
    deviations = []
    for counts in counts_CV:
        shares = counts / counts.sum()
        mean = float(shares @ values)
        variance = float(shares @ (values - mean) ** 2)
        means.append(mean)
        deviations.append(max(variance**0.5, 1 / 255))  # a constant channel has deviation 0
    return tuple(means), tuple(deviations)
