"""Training records as arrays, so that a long run takes little Python code for each value."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.tracking.jsonl import kept_records
from surefoot.tracking.record import Record

_FEWEST = 32  # records that are worth arrays


@dataclass(frozen=True, eq=False)
class Columns:
    """Training records with the same names: one array of integers or of floating-point numbers for
    each name but "kind".
    """

    values: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.values["step"])

    def __getitem__(self, part: slice | NDArray[np.bool_]) -> "Columns":
        return Columns({name: numbers[part] for name, numbers in self.values.items()})

    def records(self) -> list[Record]:
        rows = zip(*(numbers.tolist() for numbers in self.values.values()), strict=True)
        return [{"kind": "train", **dict(zip(self.values, row, strict=True))} for row in rows]


def in_columns(blocks: Iterable[tuple[bytes, int | None]]) -> Iterator[Columns | list[Record]]:
    """Yield the records in blocks of lines; of a block with a last step, only events and records
    until this step.

    The order is kept among training records and among other records, and the last record stays
    last. A block with skipped steps keeps its order.
    """
    for lines, last_step in blocks:
        records = kept_records(lines, last_step)
        train = [record for record in records if record["kind"] == "train"]
        if len(train) < _FEWEST or any(record.get("skipped") for record in train):
            yield records
            continue
        others = [record for record in records if record["kind"] != "train"]
        train_is_last = records[-1]["kind"] == "train"
        if others and train_is_last:
            yield others
        for _, alike in groupby(train, key=tuple):
            group = list(alike)
            columns = columns_of(group) if len(group) >= _FEWEST else None
            yield group if columns is None else columns
        if others and not train_is_last:
            yield others


def columns_of(records: Sequence[Record]) -> Columns | None:
    """Return training records with the same names as columns, or None if a value is no number."""
    if "loss_applied" in records[0]:
        return None
    columns = {}
    for name, values in zip(records[0], zip(*map(dict.values, records), strict=True), strict=True):
        if name == "kind":
            continue
        kinds = set(map(type, values))
        if kinds == {float}:
            columns[name] = np.array(values, np.float64)
        elif kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            columns[name] = np.array(values, np.int64)
        else:
            return None
    return Columns(columns)
