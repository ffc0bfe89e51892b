"""Texts, images and histograms that a loop shows in TensorBoard and trackers, as JSON values.

`record_of` returns a record of kind "text", "image" or "histogram", which metrics.jsonl does not
hold. Torch is not imported here.
"""

import base64
from io import BytesIO
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from surefoot.errors import ConfigError
from surefoot.tracking.record import Record

ShownKind = Literal["text", "image", "histogram"]
SHOWN_KINDS: tuple[ShownKind, ...] = ("text", "image", "histogram")
_BINS = 64  # as in Weights & Biases
_CHANNELS = (1, 3, 4)


def record_of(kind: ShownKind, name: str, value: Any, *, step: int) -> Record:
    """Return the record of a value. Waits for its device. Raises `ConfigError` for a value that is
    not of this kind.

    >>> record_of("text", "prompt", "Once", step=3)
    {'kind': 'text', 'step': 3, 'name': 'prompt', 'text': 'Once'}
    >>> record_of("histogram", "weights", [1.0, 3.0], step=3)["count"]
    2
    """
    record: Record = {"kind": kind, "step": step, "name": name}
    match kind:
        case "text":
            if not isinstance(value, str):
                _refuse(kind, name, f"a {type(value).__name__}", "give a str")
            return record | {"text": value}
        case "image":
            return record | {"png": base64.b64encode(_png(name, value)).decode()}
        case "histogram":
            return record | _histogram(name, value)


def tag_of(record: Record) -> str:
    """Return the name under which a tracker shows a record.

    >>> tag_of({"kind": "image", "step": 3, "name": "digits", "png": ""})
    'images/digits'
    """
    return f"{record['kind']}s/{record['name']}"


def image_in(record: Record) -> Image.Image:
    """Return the picture of a record of kind "image"."""
    return Image.open(BytesIO(base64.b64decode(record["png"])), formats=["PNG"])


def _array(value: Any) -> NDArray[Any]:
    """Return a tensor, array or list of numbers as an array."""
    if hasattr(value, "detach"):  # a tensor; NumPy has no bfloat16
        tensor = value.detach().cpu()
        value = tensor.double() if tensor.is_floating_point() else tensor
    return np.asarray(value)


def _has_channels_first(value: Any, shape: tuple[int, ...]) -> bool:
    """Return True for (C, H, W). Where both ends may be channels, as of (4, 6, 3), a tensor has
    them first, as torch has, and an array last, as NumPy and PIL have.
    """
    if shape[0] in _CHANNELS and shape[-1] in _CHANNELS:
        return hasattr(value, "detach")
    return shape[0] in _CHANNELS


def _png(name: str, value: Any) -> bytes:
    image = value
    if not isinstance(image, Image.Image):
        pixels = _array(value)
        if pixels.ndim == 3 and _has_channels_first(value, pixels.shape):
            pixels = np.moveaxis(pixels, 0, -1)
        is_image = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in _CHANNELS)
        if not is_image or pixels.size == 0 or pixels.dtype.kind not in "biuf":
            what = f"an array of shape {pixels.shape} and type {pixels.dtype}"
            cure = (
                "give (C, H, W), (H, W, C) or (H, W), or a PIL image; join several in one picture"
            )
            _refuse("image", name, what, cure)
        if pixels.dtype.kind in "bf":
            pixels = np.nan_to_num(pixels.astype(np.float64)).clip(0, 1) * 255
        pixels = pixels.clip(0, 255).round().astype(np.uint8)
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
    if 0 in image.size:
        _refuse("image", name, f"a picture of {image.size} pixels", "give one that is not empty")
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGB")
    file = BytesIO()
    image.save(file, "png")
    return file.getvalue()


def _histogram(name: str, value: Any) -> dict[str, Any]:
    """Return the counts of the finite numbers between edges, and their sums."""
    try:
        numbers = _array(value).astype(np.float64).ravel()
    except (TypeError, ValueError):
        _refuse("histogram", name, f"a {type(value).__name__}", "give a tensor or numbers")
    finite = numbers[np.isfinite(numbers)]
    with np.errstate(over="ignore", invalid="ignore"):  # of huge numbers
        counts, edges = _binned(finite)
        return {
            "counts": counts,
            "edges": edges,
            "count": len(finite),
            "sum": float(finite.sum()),
            "sum_of_squares": float(np.square(finite).sum()),
            "nonfinite_count": len(numbers) - len(finite),
        }


def _binned(finite: NDArray[Any]) -> tuple[list[int], list[float]]:
    try:
        counts, edges = np.histogram(finite, bins=_BINS)
    except ValueError:  # their range is too narrow or too wide for bins
        low = float(finite.min())
        high = float(finite.max())
        if low == high:
            high = low + max(1.0, float(np.spacing(abs(low))))
        return [len(finite)], [low, high]
    return counts.tolist(), edges.tolist()


def _refuse(kind: ShownKind, name: str, what: str, remedy: str) -> Any:
    raise ConfigError(
        "not-to-be-shown",
        problem=f"step.log_{kind}: {name!r} is {what}, which is no {kind}",
        remedy=remedy,
        setting=cast("str", kind),
        value=name,
    )
