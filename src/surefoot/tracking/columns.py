"""Training records as arrays, which take no Python code for each value."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.tracking.record import Record

_LEAST, _MOST = 32, 4096  # records of columns


@dataclass(frozen=True, eq=False)
class Columns:
    """Training records with the same names: one array of integers or of floating-point numbers for each name but "kind"."""

    values: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.values["step"])

    def __getitem__(self, part: slice) -> "Columns":
        return Columns({name: numbers[part] for name, numbers in self.values.items()})

    def records(self) -> list[Record]:
        rows = zip(*(numbers.tolist() for numbers in self.values.values()), strict=True)
        return [{"kind": "train", **dict(zip(self.values, row, strict=True))} for row in rows]


def columns_of(records: Sequence[Record]) -> Columns | None:
    """Return training records as columns, or None if their names or types differ, or if a value is not a number.

    >>> columns = columns_of([{"kind": "train", "step": step, "loss": 0.5} for step in (1, 2)])
    >>> columns.values["step"].tolist(), columns_of([{"kind": "train", "step": 1, "loss": None}])
    ([1, 2], None)
    """
    names = list(records[0])
    if set(map(len, records)) != {len(names)} or "loss_applied" in records[0] or len(names) < 2:
        return None
    values: dict[str, NDArray[Any]] = {}
    try:
        for name, column in zip(names, zip(*map(itemgetter(*names), records), strict=True), strict=True):
            if name == "kind":
                continue
            kinds = set(map(type, column))
            if kinds == {float}:
                values[name] = np.frombuffer(array("d", column))
            elif kinds == {int}:
                values[name] = np.frombuffer(array("q", column), dtype=np.int64)
            else:
                return None
    except (KeyError, OverflowError):  # another name, or an integer of more than 64 bits
        return None
    return None if "skipped" in values and values["skipped"].any() else Columns(values)


def in_columns(blocks: Iterable[list[Record]]) -> Iterator[Columns | list[Record]]:
    """Yield all records. The order is kept among training records and among other records, and the last record stays last."""
    pieces, others, names, is_train_last = list[Columns](), list[Record](), list[str](), False

    def waiting() -> Iterator[Columns | list[Record]]:
        joined: list[Columns | list[Record]] = (
            [Columns({name: np.concatenate([piece.values[name] for piece in pieces]) for name in names})]
            if pieces
            else []
        )
        rest: list[Columns | list[Record]] = [others.copy()] if others else []
        pieces.clear()
        others.clear()
        yield from [*rest, *joined] if is_train_last else [*joined, *rest]

    for records in blocks:
        kinds = list(map(itemgetter("kind"), records))
        train = list(compress(records, map("train".__eq__, kinds)))
        columns = columns_of(train) if len(train) >= _LEAST else None
        if train and columns is None:
            yield from waiting()
            yield records
            continue
        if columns is not None:
            if pieces and (
                list(columns.values) != names or sum(map(len, pieces)) >= _MOST or _types(columns) != _types(pieces[0])
            ):
                yield from waiting()
            pieces.append(columns)
            names = list(columns.values)
        others += compress(records, map("train".__ne__, kinds))
        is_train_last = records[-1]["kind"] == "train" if records else is_train_last
    yield from waiting()


def _types(columns: Columns) -> list[Any]:
    return [numbers.dtype for numbers in columns.values.values()]
