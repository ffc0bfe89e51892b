"""The values of a verb's own options: numbers and choices, each refused with the option named."""

from __future__ import annotations

import math
from typing import Any

from surefoot.errors import ConfigError


def whole(option: str, text: str, *, least: int = 1) -> int:
    """A whole number of `least` or more.

    >>> whole("--jobs", "2")
    2
    """
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ConfigError(f"{option} {text!r} is not a whole number, {least} or more")
    return int(text)


def number(option: str, text: str, *, example: str) -> float:
    """A finite number; `example` is one as it is typed.

    >>> number("--target", "1.5", example="0.2")
    1.5
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{option} {text!r} is not a number\n  write it as in {option} {example}")
    return found


def one_of(option: str, text: str, choices: tuple[Any, ...]) -> Any:
    """One of some words."""
    if text not in choices:
        raise ConfigError(f"{option} {text!r} is none of {', '.join(choices)}")
    return text
