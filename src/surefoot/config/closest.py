"""The name that a wrong one probably means."""

import difflib
import os.path
from collections.abc import Iterable

_CLEAR = 0.8  # similarity of words that need no common stem


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the probable match among `names`, or None.

    A name that differs only in case or in - and _ comes first. Others must be very similar, be the
    same letters in another order, or have at least half of the longer word as their common stem.

    >>> closest("adamW", ["adam", "adamw"]), closest("lenght", ["length", "loss"])
    ('adamw', 'length')
    >>> closest("shuffle", ["schedule"]), closest("logger", ["log_every"])
    (None, None)
    """
    plain = {_plain(name): name for name in names}
    sought = _plain(word)
    if sought in plain:
        return plain[sought]
    for match in difflib.get_close_matches(sought, plain, n=3):
        stem = os.path.commonprefix([sought, match])  # noqa: RUF071 (of letters)
        is_clear = difflib.SequenceMatcher(None, sought, match).ratio() >= _CLEAR
        is_swapped = sorted(sought) == sorted(match)
        if is_clear or is_swapped or 2 * len(stem) >= max(len(sought), len(match)):
            return plain[match]
    return None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
