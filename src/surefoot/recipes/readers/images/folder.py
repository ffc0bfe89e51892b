"""Labeled image files: their sizes and channels, and those that cannot be decoded."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.data.scan import printable
from surefoot.errors import DataError, Setting
from surefoot.recipes.readers.images.picture import (
    Crop,
    Fitting,
    deep_pictures,
    has_wide_values,
    measure_value_range,
    open_picture,
    shown_size,
)

OnCorrupt = Literal["error", "skip"]

_MAX_HEADERS = 10_000  # image headers read before training, 0.1 ms each
_MEASURED_FILES = 2_000  # files whose values are read before training


@dataclass(frozen=True)
class LabeledFiles:
    """Paths of image files and their class indices."""

    paths: list[Path]
    labels: NDArray[np.int64]

    def select(self, indices: NDArray[np.int64]) -> Self:
        return replace(
            self,
            paths=[self.paths[index] for index in indices.tolist()],
            labels=self.labels[indices],
        )

    def digest(self) -> str:
        """Return a hash of the labels, and of each file's name with its class directory."""
        names = [f"{path.parent.name}/{path.name}" for path in self.paths]
        content = repr((names, self.labels.tolist()))
        return sha256(content.encode(errors="surrogateescape")).hexdigest()


def evenly_spaced(paths: Sequence[Path], count: int = _MEASURED_FILES) -> Sequence[Path]:
    """Return at most `count` of the paths."""
    return paths[:: max(1, -(-len(paths) // count))]


def fitting(
    files: LabeledFiles,
    *,
    size: int | None,
    channels: int | None,
    crop: Crop,
    background: str = "white",
    as_shown: bool = True,
) -> Fitting:
    """Return a `Fitting`; `size` and `channels` default to those of the images, and its range of
    values is measured. Raises `DataError` if the images differ.
    """
    if size is None or channels is None:
        common_size, common_channels = _shape(
            files, size=size, channels=channels, as_shown=as_shown
        )
        size = common_size if size is None else size
        channels = common_channels if channels is None else channels
    value_range = None
    if as_shown:
        wide, deep = deep_pictures(files.paths)
        value_range = measure_value_range([*evenly_spaced(wide), *evenly_spaced(deep)])
    return Fitting(size, channels, crop, background, value_range, as_shown)


def _shape(
    files: LabeledFiles, *, size: int | None, channels: int | None, as_shown: bool
) -> tuple[int, int]:
    """Return the size and the number of channels of the images, where they are not given."""
    sizes: dict[tuple[int, int], Path] = {}
    depths: dict[int, Path] = {}
    for path in evenly_spaced(files.paths, _MAX_HEADERS):
        header = _header(path, as_shown=as_shown)
        if header is not None:
            width, height, channel_count = header
            sizes.setdefault((width, height), path)
            depths.setdefault(channel_count, path)
    if not sizes:
        raise _none_readable(files)
    width, height = next(iter(sizes))
    depth = next(iter(depths))
    if size is None and len(sizes) > 1:
        shown = []
        for (across, down), path in islice(sizes.items(), 2):
            shown.append(f"{printable(path)} has {across} x {down} pixels")
        raise DataError(
            "images-differ-in-size",
            problem=f"images differ in size: {', '.join(shown)}",
            remedy=("choose one for all images, such as", Setting("data.size", 64)),
            paths=[*sizes.values()][:2],
        )
    if channels is None and len(depths) > 1:
        shown = [f"{printable(path)} has {count} channel(s)" for count, path in depths.items()]
        raise DataError(
            "images-differ-in-channels",
            problem=f"images differ in channels: {', '.join(shown[:2])}",
            remedy=("choose one for all images, such as", Setting("data.channels", 3)),
            paths=[*depths.values()][:2],
        )
    if size is None and width != height:
        raise DataError(
            "images-not-square",
            problem=f"{printable(files.paths[0])} has {width} x {height} pixels, not a square",
            remedy=("choose one side for all, such as", Setting("data.size", height)),
            path=files.paths[0],
            width=width,
            height=height,
        )
    return width, depth


def readable_files(files: LabeledFiles, *, threads: int = 4) -> tuple[LabeledFiles, list[Path]]:
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
        raise _none_readable(files)
    readable = files.select(np.flatnonzero(is_readable))
    damaged = files.select(np.flatnonzero(~is_readable))
    return readable, damaged.paths


def first_names(names: Sequence[str]) -> str:
    """Return the first ten names, and the number of all if there are more."""
    more = f" ... ({len(names)})" if len(names) > 10 else ""
    return f"{', '.join(names[:10])}{more}"


def _none_readable(files: LabeledFiles) -> DataError:
    first = files.paths[0]
    return DataError(
        "images-unreadable",
        problem=f"none of {len(files.paths)} images can be read; the first is {printable(first)}",
        path=first,
        count=len(files.paths),
    )


def _header(path: Path, *, as_shown: bool) -> tuple[int, int, int] | None:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            width, height = shown_size(picture) if as_shown else picture.size
            gray = picture.mode in ("1", "L", "LA", "I", "I;16", "F")
            if as_shown and has_wide_values(picture):
                gray = True
            return width, height, 1 if gray else 3
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None  # a later read reports the error or skips the file
