"""Image files in one directory per class: listing, checks, decoding and resizing."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.config.behavior import ONE_SCANNER, newest_behavior
from surefoot.data.scan import PICTURES, LeftOut, scan, scan_as_before
from surefoot.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

_EARLIER = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
OnCorrupt = Literal["error", "skip"]
Crop = Literal["padded", "resized"]

_STARTS_A_PROGRAM = "EPS"  # the format of pictures that Pillow reads with Ghostscript
_MAX_HEADERS = 10_000  # image headers read before training, 0.1 ms each
_MARGIN = 8 / 7  # ratio of resized side to crop side, as in 256 / 224 pixels


@dataclass(frozen=True)
class Fitting:
    """Conversion of images of any size to arrays (size, size, channels)."""

    size: int
    channels: int
    crop: Crop = "padded"

    def center_crop(self, picture: "Image.Image") -> NDArray[np.uint8]:
        """Resize the shorter side to `size` (8/7 of `size` if `crop` is "resized"), and return the
        center crop.
        """
        picture = self._convert(picture)
        width, height = picture.size
        side = self.size if self.crop == "padded" else round(self.size * _MARGIN)
        shorter = min(width, height)
        if (width, height) != (self.size, self.size):
            picture = _resize(
                picture, (round(width * side / shorter), round(height * side / shorter)), None
            )
        left, top = (picture.width - self.size) // 2, (picture.height - self.size) // 2
        return self._array(picture.crop((left, top, left + self.size, top + self.size)))

    def random_crop(
        self, picture: "Image.Image", draw: Callable[[int], float]
    ) -> NDArray[np.uint8]:
        """Return a resized random crop: 8% to 100% of the area, aspect ratio 3/4 to 4/3
        (https://arxiv.org/abs/1409.4842, section 6).
        """
        picture = self._convert(picture)
        area = picture.width * picture.height * (0.08 + 0.92 * draw(0))
        shape = (3 / 4) * (16 / 9) ** draw(1)
        width, height = (
            min((area * shape) ** 0.5, picture.width),
            min((area / shape) ** 0.5, picture.height),
        )
        left, top = (picture.width - width) * draw(2), (picture.height - height) * draw(3)
        return self._array(
            _resize(picture, (self.size, self.size), (left, top, left + width, top + height))
        )

    def _convert(self, picture: "Image.Image") -> "Image.Image":
        if picture.mode.startswith("I"):  # 16 bits: Pillow would clip at 255 instead of scaling
            from PIL.Image import fromarray

            picture = fromarray((np.asarray(picture).clip(0, 65535) // 257).astype(np.uint8))
        return picture.convert("L" if self.channels == 1 else "RGB")

    def _array(self, picture: "Image.Image") -> NDArray[np.uint8]:
        return np.array(picture, dtype=np.uint8).reshape(self.size, self.size, self.channels)


@dataclass(frozen=True)
class Files:
    """Paths of image files and their class indices; `left_out` is what was there and is not
    read.
    """

    paths: list[Path]
    labels: NDArray[np.int64]
    left_out: list[LeftOut] = field(default_factory=list)

    def select(self, indices: NDArray[np.int64]) -> Self:
        return replace(
            self,
            paths=[self.paths[index] for index in indices.tolist()],
            labels=self.labels[indices],
        )

    def digest(self) -> str:
        """Return a hash of the labels, and of each file's name with its class directory."""
        names = [f"{path.parent.name}/{path.name}" for path in self.paths]
        return sha256(
            repr((names, self.labels.tolist())).encode(errors="surrogateescape")
        ).hexdigest()


def open_picture(path: Path) -> "Image.Image":
    """Open and fully decode an image file; raise `DataError` if the file is not an image or is
    damaged.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with path.open("rb") as file:  # closed here: Pillow does not close damaged files
            picture = Image.open(file)
            if picture.format == _STARTS_A_PROGRAM:
                raise DataError(
                    "picture-starts-a-program",
                    problem=f"{path} holds PostScript (EPS), whatever its name ends in",
                    reason="Pillow would start Ghostscript, another program, to read it",
                    remedy="convert it to PNG",
                    path=path,
                )
            picture.load()
            return picture
    except FileNotFoundError as problem:
        raise DataError(f"no file {path} (looked in {Path.cwd()})") from problem
    except UnidentifiedImageError as problem:
        raise DataError(f"{path} is not a readable image (PNG, JPEG or similar)") from problem
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        if (
            isinstance(problem, OSError) and problem.errno is not None
        ):  # from the file system, not from Pillow
            raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
        raise DataError(f"{path} is a damaged image: {problem}") from problem


def read_picture(path: Path) -> "Image.Image":
    """Decode an image of a data set; if the file is damaged, raise a `DataError` that names the
    flag to skip such files.
    """
    try:
        return open_picture(path)
    except DataError as problem:
        raise DataError(
            f"{problem}\n  remove the file, or skip such files: --data.on-corrupt skip"
        ) from problem


def class_folders(tree: Path) -> list[str]:
    """Return the sorted names of the directories in `tree`, or an empty list if `tree` is
    missing.
    """
    folders = tree.iterdir() if tree.is_dir() else ()
    return sorted(
        folder.name for folder in folders if folder.is_dir() and not folder.name.startswith(".")
    )


def list_pictures(tree: Path, classes: Sequence[str], *, behavior: int | None = None) -> Files:
    """List the images in the class directories, sorted by class and path, as a run of this behavior
    reads them (default: the newest); raise `DataError` for unknown or empty classes.
    """
    behavior = newest_behavior() if behavior is None else behavior
    outside = [name for name in class_folders(tree) if name not in classes]
    if outside:
        raise DataError(
            f"{tree / outside[0]} is not one of the classes: {first_names(classes)}\n"
            "  is the folder misplaced, or missing from the training part or from --data.classes?"
        )
    groups: list[list[Path]] = []
    left_out = list[LeftOut]()
    for folder in (tree / name for name in classes):
        if not folder.is_dir():
            raise _without_images(folder, what="is missing")
        if behavior < ONE_SCANNER:
            found = scan_as_before(folder, _EARLIER, ignore_case=True)
        else:
            found = scan(folder, PICTURES)
        if not found.files:
            raise _without_images(folder, what="holds no image", reason=found.line())
        groups.append(found.files)
        left_out += found.left_out
    labels = np.repeat(np.arange(len(groups)), [len(paths) for paths in groups])
    return Files(list(chain(*groups)), labels, left_out)


def _without_images(folder: Path, *, what: str, reason: str = "") -> DataError:
    return DataError(
        "class-without-images",
        problem=f"class folder {folder} {what}: every class needs at least one file of"
        f" {', '.join(PICTURES[:3])} ...",
        reason=reason or None,
        remedy="add images, or remove the class",
        path=folder,
    )


def fitting(files: Files, *, size: int | None, channels: int | None, crop: Crop) -> Fitting:
    """Return a `Fitting`; `size` and `channels` default to those of the images. Raises `DataError`
    if the images differ.
    """
    if size is not None and channels is not None:
        return Fitting(size, channels, crop)
    sizes: dict[tuple[int, int], Path] = {}
    depths: dict[int, Path] = {}
    for path in files.paths[:: -(-len(files.paths) // _MAX_HEADERS)]:
        if (header := _header(path)) is not None:
            sizes.setdefault(header[:2], path)
            depths.setdefault(header[2], path)
    if not sizes:
        raise DataError(
            f"none of {len(files.paths)} images can be read; the first is {files.paths[0]}"
        )
    (width, height), depth = next(iter(sizes)), next(iter(depths))
    of_size = [f"{path} has {across} x {down} pixels" for (across, down), path in sizes.items()]
    of_depth = [f"{path} has {number} channel(s)" for number, path in depths.items()]
    for name, setting, pictures, flag in (
        ("size", size, of_size, "--data.size 64"),
        ("channels", channels, of_depth, "--data.channels 3"),
    ):
        if setting is None and len(pictures) > 1:
            raise DataError(
                f"images differ in {name}: {', '.join(pictures[:2])}\n  choose one for all images, such as {flag}"
            )
    if size is None and width != height:
        raise DataError(
            f"{files.paths[0]} has {width} x {height} pixels, not a square: choose one side for all, such as --data.size {height}"
        )
    return Fitting(width if size is None else size, depth if channels is None else channels, crop)


def readable_files(files: Files, *, threads: int = 4) -> tuple[Files, list[Path]]:
    """Return the files that Pillow can decode, and the paths of the others. Raises `DataError` if
    none can be decoded.
    """

    def sound(path: Path) -> bool:
        try:
            open_picture(path)
        except DataError:
            return False
        return True

    with ThreadPoolExecutor(threads) as pool:  # Pillow releases the GIL while it decodes
        is_readable = np.array(list(pool.map(sound, files.paths)), dtype=bool)
    if not is_readable.any():
        raise DataError(
            f"none of {len(files.paths)} images can be read; the first is {files.paths[0]}"
        )
    damaged = [
        path for path, good in zip(files.paths, is_readable.tolist(), strict=True) if not good
    ]
    return files.select(np.flatnonzero(is_readable)), damaged


def first_names(names: Sequence[str]) -> str:
    """Return the first ten names, and the number of all if there are more."""
    return ", ".join(names[:10]) + (f" ... ({len(names)})" if len(names) > 10 else "")


def _header(path: Path) -> tuple[int, int, int] | None:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return (
                picture.width,
                picture.height,
                1 if picture.mode in ("1", "L", "LA", "I", "I;16", "F") else 3,
            )
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # a later read reports the error or skips the file


def _resize(
    picture: "Image.Image", size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> "Image.Image":
    from PIL.Image import Resampling

    return picture.resize(size, Resampling.BILINEAR, box=box)
