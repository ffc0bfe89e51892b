"""The parts of data: their names in files and folders, as in `datasets` of Hugging Face, and the
check that none is empty. Imports no torch.
"""

import re
from pathlib import PurePath

from surefoot.errors import DataError

PARTS = {
    "training": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")


def part_of(file: PurePath) -> str | None:
    """Return the part that a file's name, or else the nearest folder's, has as a word; None if no
    name has one.

    >>> [part_of(PurePath(name)) for name in ("data/test-00000-of-00001.parquet", "Train/a.jsonl")]
    ['test', 'training']
    >>> part_of(PurePath("latest.jsonl")) is None
    True
    """
    for name in reversed(file.parts):
        words = _BETWEEN_WORDS.split(name.lower())
        for part, names in PARTS.items():
            if any(word in names for word in words):
                return part
    return None


def check_parts(training: int, held_out: int, val_fraction: float, *, what: str, cure: str) -> None:
    """Raise `DataError` if a split leaves no text for training or validation. `what` is the counted
    unit, `cure` a fraction to try.
    """
    if not 0 < val_fraction < 1 or not training or not held_out:
        raise DataError(
            "part-without-data",
            problem=f"val_fraction = {val_fraction} of {training + held_out} {what} leaves"
            f" {training} for training and {held_out} for validation",
            remedy=f"give a fraction between 0 and 1, such as {cure}",
            setting="val_fraction",
            value=val_fraction,
            training=training,
            validation=held_out,
        )
