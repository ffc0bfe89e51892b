"""What a path holds, and what each recipe would make of it, before any training: files by kind,
fields of rows, samples as the model will see them, and what is odd. Imports no torch.

A recipe's `look.py` has `look(config, count=...)`, which calls the functions that its training
calls.
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.data.scan import (
    JSON_LINES,
    OTHER_KIND,
    TABLES,
    LeftOut,
    Scan,
    kind_of,
    printable,
    scan,
)
from surefoot.errors import SurefootError, first_line

_ROWS_READ = 1_000  # of each file of rows, for its fields
_FILES_READ = 20  # whose fields are shown
_NAMED = 5  # files in one line about odd ones


@dataclass(frozen=True)
class Piece:
    """A part of a sample's text; the loss counts it if `is_target`."""

    text: str
    is_target: bool = True


@dataclass(frozen=True)
class DataPreview:
    """What a recipe makes of a path: `about` is what the header of its run says of the data."""

    about: Sequence[str]
    facts: Sequence[str] = ()
    samples: Sequence[Sequence[Piece]] = ()
    odd: Sequence[str] = ()
    sheet: bytes | None = None
    """A PNG file with pictures as the model sees them."""


@dataclass
class Contents:
    """Files of a path by kind, with their number and bytes; the fields of rows; what is odd."""

    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)


def look(name: str, config: Any, *, count: int) -> DataPreview:
    """Return what a recipe makes of the data of a configuration, with `count` samples."""
    module = importlib.import_module(f"surefoot.recipes.{name}.look")
    result: DataPreview = module.look(config, count=count)
    return result


def contents(path: Path) -> Contents:
    """Return what a path holds, whatever reads it. Raises `DataError` as `scan` does."""
    result = Contents()
    everything = scan(path, ())
    files = [*everything.files]
    others = list[LeftOut]()
    for entry in everything.left_out:
        if entry.reason == OTHER_KIND:
            files.append(entry.path)
        else:
            others.append(entry)
    sizes = {file: file.stat().st_size for file in files}
    for file, size in sizes.items():
        kind = printable(kind_of(file)) or "without a suffix"
        number, total = result.kinds.get(kind, (0, 0))
        result.kinds[kind] = (number + 1, total + size)
    rows = [file for file in files if kind_of(file) in (*JSON_LINES, *TABLES)]
    for file in rows[:_FILES_READ]:
        try:
            result.fields.append(f"{_name(file, path)}: {_fields(file)}")
        except SurefootError as problem:
            result.odd.append(first_line(problem))
    if len(rows) > _FILES_READ:
        result.fields.append(f"... and {len(rows) - _FILES_READ:,} more files of rows")
    empty = [_name(file, path) for file in files if sizes[file] == 0]
    if empty:
        more = f" ... ({len(empty):,})" if len(empty) > _NAMED else ""
        result.odd.append(f"files of 0 bytes: {', '.join(empty[:_NAMED])}{more}")
    result.odd += Scan(path, files, others).reasons()
    return result


def _fields(file: Path) -> str:
    if kind_of(file) in TABLES:
        from surefoot.data.tables import Table  # imports torch

        table = Table(file)
        columns = ", ".join(map(printable, table.fingerprint()["columns"]))
        facts = [f"{len(table):,} rows", f"columns {columns}", *table.reading_notes]
        return "; ".join(facts)
    from surefoot.recipes.readers.text.documents import json_lines  # imports NumPy

    count = 0
    keys = Counter[str]()
    for _, row in islice(json_lines(file), _ROWS_READ):
        count += 1
        if isinstance(row, dict):
            keys.update([*row])
        else:
            keys[f"no object, but a {type(row).__name__}"] += 1
    first = "the first " if count == _ROWS_READ else ""
    named = [f"{printable(key)} ({number:,})" for key, number in keys.items()]
    return f"{first}{count:,} rows; keys {', '.join(named) or 'none'}"


def _name(file: Path, root: Path) -> str:
    return printable(file.name if file == root else file.relative_to(root))


def evenly(total: int, count: int) -> Iterator[int]:
    """Yield `count` evenly spaced indices below `total`, or all of them.

    >>> list(evenly(10, 3)), list(evenly(2, 3))
    ([0, 3, 6], [0, 1])
    """
    count = min(total, count)
    for number in range(count):
        yield number * total // count
