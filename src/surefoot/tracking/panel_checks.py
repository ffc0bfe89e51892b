"""Validation of panels: types, values, and the size limits of a page."""

import base64
import math
from typing import Any

from surefoot.errors import ConfigError

LONGEST = 20_000  # characters of one text
LARGEST = 1_024  # pixels of one side of an image
MOST = 5_000  # pieces, points, examples or images of one panel
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


def wrong_type(what: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a value of another type than a panel takes."""
    return ConfigError(
        "panel-of-wrong-type",
        problem=f"a panel cannot be shown: {what} is a {type(value).__name__}, not {expected}",
        what=what,
        type=type(value).__name__,
    )


def wrong_value(what: str, value: Any, expected: str) -> ConfigError:
    """Return the error for a value that a panel does not take; `expected` says which it takes."""
    return ConfigError(
        "panel-value-invalid",
        problem=f"a panel cannot be shown: {what} is {value!r}, not {expected}",
        what=what,
        value=value,
    )


def check_size(size: int, what: str, *, most: int = MOST) -> None:
    """Raise `ConfigError` if a panel has more of something than a page can show."""
    if size > most:
        raise ConfigError(
            "panel-too-large",
            problem=f"a panel cannot be shown: it has {size:,} {what}, and at most {most:,} fit",
            what=what,
            size=size,
            most=most,
        )


def check_texts(*texts: Any) -> None:
    """Raise `ConfigError` if a value is not a string, is too long, or has a lone surrogate, which a
    file cannot encode.
    """
    for text in texts:
        if not isinstance(text, str):
            raise wrong_type("a text", text, "a str")
        check_size(len(text), "characters in a text", most=LONGEST)
        for index, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                raise ConfigError(
                    "panel-text-not-unicode",
                    problem="a panel cannot be shown: character"
                    f" {index} of a text is half a surrogate pair",
                    index=index,
                )


def check_number(
    value: Any, what: str, *, min_value: float = -math.inf, max_value: float = math.inf
) -> None:
    """Raise `ConfigError` unless the value is None or a finite number from `min_value` to
    `max_value`.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(what, value, "a number or None")
    if not math.isfinite(value) or not min_value <= value <= max_value:
        bounds = f" from {min_value:g} to {max_value:g}" if min_value > -math.inf else ""
        raise wrong_value(what, value, f"a finite number{bounds}, or None")


def is_count(value: Any) -> bool:
    """Return True if the value is a non-negative integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_png(text: Any) -> None:
    """Raise `ConfigError` if a text is not a PNG file in base64, or if the image is too large."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (AttributeError, ValueError) as problem:
        raise _no_png() from problem
    if not data.startswith(_PNG):
        raise _no_png()
    width = int.from_bytes(data[16:20], "big")
    height = int.from_bytes(data[20:24], "big")
    if not width or not height:
        raise _no_png()
    check_size(max(width, height), "pixels on a side of an image", most=LARGEST)


def _no_png() -> ConfigError:
    return ConfigError(
        "panel-image-not-png",
        problem="a panel cannot be shown: an image is not a PNG file in base64",
        remedy="write png=sf.report.encode_png(image)",
    )
