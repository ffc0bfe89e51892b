"""The parts of data by the names of files and folders, as in `datasets` of Hugging Face. Imports no
torch.
"""

import re
from pathlib import PurePath

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
