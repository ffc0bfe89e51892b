"""Validation of panels: types, values, and the size limits of a page."""

import base64
import math
from collections.abc import Sized
from typing import Any

from surefoot.errors import ConfigError

LONGEST = 20_000  # characters of one text
LARGEST = 1_024  # pixels of one side of an image
_MOST = 5_000  # pieces, points, examples or images of one panel
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"


def check(holds: bool, otherwise: str) -> None:
    """Raise `ConfigError` with the text `otherwise` unless a condition holds."""
    if not holds:
        raise invalid_panel(otherwise)


def invalid_panel(why: str) -> ConfigError:
    """Return the error for a panel that a page cannot show."""
    return ConfigError("panel-invalid", problem=f"a panel cannot be shown: {why}")


def check_texts(*texts: Any) -> None:
    """Raise `ConfigError` if a value is not a string, is too long, or has a lone surrogate, which a
    file cannot encode.
    """
    for text in texts:
        check(isinstance(text, str), f"a text is a {type(text).__name__}, not a str")
        check(
            len(text) <= LONGEST,
            f"a text has {len(text):,} characters, but at most {LONGEST:,} can be shown",
        )
        check(
            not any("\ud800" <= one <= "\udfff" for one in text),
            "a text holds half a surrogate pair",
        )


def check_number(
    value: Any, what: str, *, min_value: float = -math.inf, max_value: float = math.inf
) -> None:
    """Raise `ConfigError` unless the value is None or a finite number from `min_value` to
    `max_value`.
    """
    if value is not None:
        check(
            isinstance(value, int | float) and not isinstance(value, bool),
            f"{what} is a {type(value).__name__}",
        )
        check(
            math.isfinite(value) and min_value <= value <= max_value,
            f"{what} is {value}: give a finite value in range, or None",
        )


def is_count(value: Any) -> bool:
    """Return True if the value is a non-negative integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def check_count(parts: Sized, what: str) -> None:
    """Raise `ConfigError` if a panel has too many parts to show."""
    check(len(parts) <= _MOST, f"{len(parts):,} {what}, but at most {_MOST:,} can be shown")


def check_png(text: Any) -> None:
    """Raise `ConfigError` if a text is not a PNG file in base64, or if the image is too large."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (AttributeError, ValueError) as problem:
        raise invalid_panel("an image's png is not base64") from problem
    check(data.startswith(_PNG) and len(data) >= len(_PNG) + 8, "an image's png is not a PNG file")
    wide, high = (int.from_bytes(data[offset : offset + 4], "big") for offset in (16, 20))
    check(
        0 < wide <= LARGEST and 0 < high <= LARGEST,
        f"an image has {wide} x {high} pixels, at most {LARGEST} a side",
    )
