"""A picture in a file: decoded, turned and colored as viewers show it, scaled to 8 bits, resized and
cropped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.data.scan import no_such, printable, unreadable
from surefoot.errors import ConfigError, DataError, Setting

if TYPE_CHECKING:
    from PIL import Image

Crop = Literal["padded", "resized"]
ValueRange = tuple[float, float]

_MARGIN = 8 / 7  # ratio of resized side to crop side, as in 256 / 224 pixels
_STARTS_A_PROGRAM = "EPS"  # the format of pictures that Pillow reads with Ghostscript
_ORIENTATION = 0x0112  # the tag of EXIF
_TRANSPARENT_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
_JPEG = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")
_PAGED = (
    *(".tif", ".tiff", ".gif", ".webp", ".apng", ".avif", ".avifs"),
    *(".mpo", ".dcx", ".fli", ".flc", ".im"),
)
_DEPTHS = (8, 10, 12, 14, 16)  # bits of sensors and files
_MOST_OF_TOP_BYTE = 1 << (14 - 8)  # what 14 bits fill of the upper 8 of 16 bits


@dataclass(frozen=True)
class Fitting:
    """Conversion of images of any size to arrays (size, size, channels).

    A picture is turned as its EXIF data say, and transparency shows `background`. Whole numbers of
    more than 8 bits and floats are scaled: `value_range` becomes black to white. If it is None, only
    16-bit pictures that use their whole range are taken. Without `as_shown`, as in runs that began
    before behavior 10, orientation and transparency are ignored, and 16 bits are the whole range.
    """

    size: int
    channels: int
    crop: Crop = "padded"
    background: str = "white"
    value_range: ValueRange | None = None
    as_shown: bool = True

    def fingerprint(self) -> dict[str, Any]:
        """Return what makes other pixels, by name; runs of older behavior know only the first
        three.
        """
        described: dict[str, Any] = {
            "size": self.size,
            "channels": self.channels,
            "crop": self.crop,
        }
        if self.as_shown:
            value_range = None if self.value_range is None else list(self.value_range)
            described |= {
                "as_shown": True,
                "background": self.background,
                "value_range": value_range,
            }
        return described

    def center_crop(self, picture: "Image.Image") -> NDArray[np.uint8]:
        """Resize the shorter side to `size` (8/7 of `size` if `crop` is "resized"), and return the
        center crop.
        """
        picture = self._convert(picture)
        width, height = picture.size
        side = self.size if self.crop == "padded" else round(self.size * _MARGIN)
        shorter = min(width, height)
        if (width, height) != (self.size, self.size):
            size = (round(width * side / shorter), round(height * side / shorter))
            picture = _resize(picture, size, None)
        left = (picture.width - self.size) // 2
        top = (picture.height - self.size) // 2
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
        width = min((area * shape) ** 0.5, picture.width)
        height = min((area / shape) ** 0.5, picture.height)
        left = (picture.width - width) * draw(2)
        top = (picture.height - height) * draw(3)
        box = (left, top, left + width, top + height)
        return self._array(_resize(picture, (self.size, self.size), box))

    def _convert(self, picture: "Image.Image") -> "Image.Image":
        mode = "L" if self.channels == 1 else "RGB"
        if not self.as_shown:
            if picture.mode.startswith("I"):
                picture = _image_of(np.asarray(picture).clip(0, 65535) // 257)
            return picture.convert(mode)
        picture = _turned(picture)
        if has_wide_values(picture):
            return _scaled(picture, self.value_range, background=self.background).convert(mode)
        if picture.mode == "LAB":  # which Pillow does not convert to gray
            picture = picture.convert("RGB")
        return _on_background(picture, self.background).convert(mode)

    def _array(self, picture: "Image.Image") -> NDArray[np.uint8]:
        return np.array(picture, dtype=np.uint8).reshape(self.size, self.size, self.channels)


def open_picture(path: Path) -> "Image.Image":
    """Open and fully decode an image file; raise `DataError` if the file is not an image or is
    damaged.
    """
    from PIL import Image, UnidentifiedImageError

    name = printable(path)
    try:
        with path.open("rb") as file:  # closed here: Pillow does not close damaged files
            picture = Image.open(file)
            if picture.format == _STARTS_A_PROGRAM:
                raise DataError(
                    "picture-starts-a-program",
                    problem=f"{name} holds PostScript (EPS), whatever its name ends in",
                    reason="Pillow would start Ghostscript, another program, to read it",
                    remedy="convert it to PNG",
                    path=path,
                )
            picture.load()
            picture.filename = str(path)  # as Pillow has it for a file that it opened itself
            return picture
    except FileNotFoundError as problem:
        raise no_such(path, kind="file") from problem
    except UnidentifiedImageError as problem:
        raise DataError(
            "picture-unknown",
            problem=f"{name} is not a readable image (PNG, JPEG or similar)",
            path=path,
        ) from problem
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:  # not from Pillow
            raise unreadable(path, problem) from problem
        raise DataError(
            "picture-damaged", problem=f"{name} is a damaged image: {problem}", path=path
        ) from problem


def read_picture(path: Path) -> "Image.Image":
    """Decode an image of a data set; if the file is damaged, raise a `DataError` that names the
    setting to skip such files.
    """
    try:
        return open_picture(path)
    except DataError as problem:
        problem.remedies = (
            "remove the file, or skip such files",
            Setting("data.on_corrupt", "skip"),
        )
        raise


def check_background(background: str) -> None:
    """Raise `ConfigError` if a color is neither a name nor like #ff8000."""
    try:
        _color(background)
    except ValueError as problem:
        raise ConfigError(
            "background-unknown",
            problem=f"background = {background!r} is not a color",
            reason="transparent parts of pictures show it",
            remedy=[
                Setting("data.background", "white"),
                Setting("data.background", "black"),
                Setting("data.background", "#ff8000"),
            ],
            setting="data.background",
            value=background,
        ) from problem


def shown_size(picture: "Image.Image") -> tuple[int, int]:
    """Return width and height of a picture that is open, but not decoded, as viewers show it."""
    # without this entry, Pillow would decode a PNG; it turns a TIFF itself
    may_be_turned = "exif" in picture.info and picture.format != "TIFF"
    if may_be_turned and _orientation(picture) > 4:  # 5 to 8 are turned by a quarter
        return picture.height, picture.width
    return picture.size


def has_wide_values(picture: "Image.Image") -> bool:
    """Return True for one channel of floats, or of whole numbers of more than 8 bits."""
    return picture.mode == "F" or picture.mode.startswith("I")


def deep_pictures(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the pictures of wide values, and those of colors of 16 bits. Headers of all files but
    JPEG are read, 0.1 ms each: JPEG has 8 bits.
    """
    from PIL import Image

    wide = []
    deep = []
    for path in paths:
        if path.suffix.lower() in _JPEG:
            continue
        try:
            with path.open("rb") as file, Image.open(file) as picture:
                if has_wide_values(picture):
                    wide.append(path)
                elif _has_deep_colors(picture):
                    deep.append(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # a later read reports the error or skips the file
    return wide, deep


def with_pages(paths: Sequence[Path]) -> list[Path]:
    """Return the files of several pages or frames, by the headers of the formats that have them."""
    from PIL import Image

    paged = []
    for path in paths:
        if path.suffix.lower() not in _PAGED:
            continue
        try:
            with path.open("rb") as file, Image.open(file) as picture:
                if getattr(picture, "is_animated", False):
                    paged.append(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # a later read reports the error or skips the file
    return paged


def measure_value_range(paths: Sequence[Path]) -> ValueRange | None:
    """Return the values of the given pictures that become black and white, or None without pictures
    of more than 8 bits.

    Whole numbers span the smallest of 8, 10, 12, 14 and 16 bits that holds all of them. Floats,
    negative and larger numbers span the smallest to the largest one.
    """
    from PIL import Image

    lowest = math.inf
    highest = -math.inf
    of_kind: dict[bool, Path] = {}  # the first picture of whole numbers, and of floats
    deep_colors: dict[Path, int] = {}  # the largest of the upper 8 bits of 16
    for path in paths:
        try:
            with path.open("rb") as file, Image.open(file) as picture:
                wide = has_wide_values(picture)
                deep = _has_deep_colors(picture)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            continue  # a later read reports the error or skips the file
        if deep:
            deep_colors[path] = int(np.asarray(read_picture(path)).max())
        if not wide:
            continue
        values = _values_of(read_picture(path))
        whole = np.issubdtype(values.dtype, np.integer)
        lowest = min(lowest, float(values.min()))
        highest = max(highest, float(values.max()))
        of_kind.setdefault(whole, path)
    _refuse_few_bits(deep_colors)
    if not of_kind:
        return None
    if len(of_kind) == 2:
        raise DataError(
            "pictures-differ-in-values",
            problem=f"{printable(of_kind[False])} holds floats, and {printable(of_kind[True])} whole"
            " numbers",
            reason="one range of values becomes black to white in all pictures",
            remedy="save all pictures with values of one kind, such as 8 bits",
            paths=[of_kind[False], of_kind[True]],
        )
    return _range_of(lowest, highest, whole=True in of_kind)


def _range_of(lowest: float, highest: float, *, whole: bool) -> ValueRange:
    if whole and lowest >= 0:
        for bits in _DEPTHS:
            if highest < 2**bits:
                return 0.0, 2.0**bits - 1
    return lowest, highest


def _scaled(
    picture: "Image.Image", value_range: ValueRange | None, *, background: str
) -> "Image.Image":
    """Return a picture of wide values as 8 bits."""
    values = _values_of(picture)
    lowest = float(values.min())
    highest = float(values.max())
    if value_range is None:
        whole = np.issubdtype(values.dtype, np.integer)
        value_range = _range_of(lowest, highest, whole=whole)
        if value_range != (0, 65535):
            name = _name_of(picture)
            raise DataError(
                "picture-range-unknown",
                problem=f"{printable(name)} holds values from {lowest:.6g} to {highest:.6g}, and no"
                " picture of the training data tells which of them are black and white",
                remedy="save it with 8 bits; in Python, give read_image"
                " value_range=(BLACK, WHITE), or call scaled_with((BLACK, WHITE)) of what"
                " load_images returns",
                path=name,
                lowest=lowest,
                highest=highest,
            )
    black, white = value_range
    width = max(white - black, np.finfo(np.float64).tiny)  # all values may be equal
    shares = (values.astype(np.float64) - black) / width
    scaled = np.rint(shares.clip(0, 1) * 255).astype(np.uint8)
    transparent = picture.info.get("transparency")
    if isinstance(transparent, int):  # a PNG's value that stands for transparency
        scaled[values == transparent] = round(float(np.mean(_color(background))))
    return _image_of(scaled)


def _values_of(picture: "Image.Image") -> NDArray[Any]:
    values = np.asarray(picture)
    if not np.isfinite(values).all():
        name = _name_of(picture)
        raise DataError(
            "picture-not-finite",
            problem=f"{printable(name)} has pixels that are NaN or infinite",
            remedy="replace them, or remove the file",
            path=name,
        )
    return values


def _refuse_few_bits(deep_colors: dict[Path, int]) -> None:
    """Raise `DataError` if all color pictures of 16 bits leave the upper bits empty: Pillow reads
    the upper 8 bits only, so they would be nearly black.
    """
    if not deep_colors or max(deep_colors.values()) >= _MOST_OF_TOP_BYTE:
        return
    path = max(deep_colors, key=deep_colors.__getitem__)
    raise DataError(
        "picture-of-few-bits",
        problem=f"{printable(path)} has 16 bits per color, and fills only the lower ones",
        reason="Pillow reads the upper 8 of 16 bits: the pictures would be nearly black",
        remedy="save the pictures with 8 bits, scaled by the largest value",
        path=path,
        largest=deep_colors[path],
    )


def _has_deep_colors(picture: "Image.Image") -> bool:
    """Return True for colors or transparency of 16 bits, in a picture that is not decoded yet."""
    from PIL.ImageFile import ImageFile

    if has_wide_values(picture) or not isinstance(picture, ImageFile):
        return False
    for tile in picture.tile:
        stored = tile[3] if isinstance(tile[3], str) else (tile[3] or [""])[0]
        if ";16" in str(stored):  # such as RGB;16B
            return True
    return False


def _turned(picture: "Image.Image") -> "Image.Image":
    """Return the picture turned and mirrored as its EXIF data say."""
    from PIL.Image import Transpose

    changes = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    change = changes.get(_orientation(picture))
    return picture if change is None else picture.transpose(change)


def _orientation(picture: "Image.Image") -> int:
    try:
        value = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data raise what they like, and viewers ignore them
        return 1
    return value if isinstance(value, int) else 1


def _on_background(picture: "Image.Image", background: str) -> "Image.Image":
    from PIL import Image

    if picture.mode not in _TRANSPARENT_MODES and "transparency" not in picture.info:
        return picture
    if picture.mode in ("La", "RGBa"):  # multiplied by their opacity
        picture = picture.convert(picture.mode.upper())
    ground = Image.new("RGBA", picture.size, (*_color(background), 255))
    return Image.alpha_composite(ground, picture.convert("RGBA"))


def _color(name: str) -> tuple[int, int, int]:
    from PIL.ImageColor import getrgb

    red, green, blue = getrgb(name)[:3]
    return red, green, blue


def _image_of(values: NDArray[Any]) -> "Image.Image":
    from PIL.Image import fromarray

    return fromarray(values.astype(np.uint8))


def _name_of(picture: "Image.Image") -> str:
    from PIL.ImageFile import ImageFile

    return str(picture.filename) if isinstance(picture, ImageFile) else "the picture"


def _resize(
    picture: "Image.Image", size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> "Image.Image":
    from PIL.Image import Resampling

    return picture.resize(size, Resampling.BILINEAR, box=box)
