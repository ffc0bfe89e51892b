"""The training records of a long run in bounded memory: a table in which pairs of older records are
merged.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.tracking.columns import Columns
from surefoot.tracking.record import KINDS, PHASES, Record

Column = NDArray[np.float64]

_SUMMED = ("targets", "starting_targets", "skipped", *(f"{phase}_s" for phase in PHASES))
_LARGEST = (
    "grad_norm_max",
    "host_memory_bytes",
    "host_memory_peak_bytes",
    "device_memory_peak_bytes",
)
_AVERAGED = ("loss", "grad_norm", "clip_fraction")
_INTEGERS = {name for name, kind in KINDS["train"].items() if kind is int}
_INDEXES = 20  # of skipped steps in one record


class TrainingTable:
    """Training records as one column of numbers for each name. A record lacks a value where the
    column is NaN. Values that are no numbers are left out, except the indexes of skipped steps.
    """

    def __init__(self) -> None:
        self.count = 0
        self.parts: list[dict[str, Column]] = []  # in order
        self.skipped_steps: dict[int, list[int]] = {}  # by row

    def extend(self, records: Columns | Sequence[Record]) -> None:
        """Append records."""
        if isinstance(records, Columns):
            part = {name: values.astype(np.float64) for name, values in records.values.items()}
        else:
            part = _columns_of(records)
            for row, record in enumerate(records):
                if record.get("skipped_steps"):
                    self.skipped_steps[self.count + row] = record["skipped_steps"]
        self.parts.append(part)
        self.count += len(records)

    def halve(self, count: int) -> None:
        """Merge pairs of the first `count` records, without the last one if `count` is odd."""
        pairs = count // 2
        columns = self._joined()
        first = {name: column[: 2 * pairs : 2] for name, column in columns.items()}
        second = {name: column[1 : 2 * pairs : 2] for name, column in columns.items()}
        merged = merged_pairs(first, second)
        self.parts = [
            {
                name: np.concatenate([merged[name], column[2 * pairs :]])
                for name, column in columns.items()
            }
        ]
        skipped_steps: dict[int, list[int]] = {}
        for row, indexes in sorted(self.skipped_steps.items()):
            row_now = row // 2 if row < 2 * pairs else row - pairs
            skipped_steps[row_now] = [*skipped_steps.get(row_now, []), *indexes][:_INDEXES]
        self.skipped_steps = skipped_steps
        self.count -= pairs

    def records(self) -> list[Record]:
        """Return the rows as records."""
        if not self.count:
            return []
        records: list[Record] = [{"kind": "train"} for _ in range(self.count)]
        for name, column in self._joined().items():
            number = int if name in _INTEGERS else float
            for row in np.flatnonzero(~np.isnan(column)).tolist():
                records[row][name] = number(column[row])
        for row, indexes in self.skipped_steps.items():
            records[row]["skipped_steps"] = indexes
        return records

    def _joined(self) -> dict[str, Column]:
        """Return all rows, which are one part from now on."""
        if len(self.parts) != 1:
            names = dict.fromkeys(chain.from_iterable(self.parts))
            joined = {}
            for name in names:
                columns = [
                    part[name] if name in part else np.full(len(part["step"]), np.nan)
                    for part in self.parts
                ]
                joined[name] = np.concatenate(columns)
            self.parts = [joined]
        return self.parts[0]


def merged_pairs(first: dict[str, Column], second: dict[str, Column]) -> dict[str, Column]:
    """Merge each row of `first` with that of `second`, which follows it. Both have the same names.

    Times and counts are added. Losses, norms and clip fractions are averaged over targets, and a
    mean of nothing counts nothing. Of other values the later one stays.
    """
    merged = {}
    share = _shares(first)
    other_share = _shares(second)
    for name, one in first.items():
        other = second[name]
        if name in _SUMMED:
            merged[name] = np.where(_has(one) & _has(other), one + other, _later(one, other))
        elif name in _LARGEST:
            merged[name] = np.fmax(one, other)
        elif name in _AVERAGED:
            merged[name] = _mean(one, share, other, other_share)
        else:
            merged[name] = _later(one, other)
    if "loss_max" in first:
        first_is_larger = first["loss_max"] > np.nan_to_num(second["loss_max"], nan=-np.inf)
        for name in ("loss_max", "loss_max_step"):
            if name in first:
                merged[name] = np.where(first_is_larger, first[name], merged[name])
    if "loss_applied" in first:
        applied = _mean(_applied(first), share, _applied(second), other_share)
        is_known = _has(first["loss_applied"]) | _has(second["loss_applied"])
        # 0 if no step was applied
        merged["loss_applied"] = np.where(is_known, np.nan_to_num(applied, nan=0.0), np.nan)
    return merged


def _columns_of(records: Sequence[Record]) -> dict[str, Column]:
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(records)):
        numbers = [_number(record.get(name)) for record in records]
        if name in ("step", "loss") or not np.isnan(numbers).all():
            columns[name] = np.array(numbers, np.float64)
    return columns


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _has(column: Column) -> NDArray[np.bool_]:
    return ~np.isnan(column)


def _later(one: Column, other: Column) -> Column:
    return np.where(_has(other), other, one)


def _shares(columns: dict[str, Column]) -> Column:
    """Return the targets of each row, or 1 where they are not recorded."""
    targets = columns.get("targets")
    if targets is None:
        return np.ones(len(columns["step"]))
    return np.where(_has(targets), targets, 1.0)


def _mean(one: Column, share: Column, other: Column, other_share: Column) -> Column:
    """Return the weighted means of two columns, of one value where the other is missing or counts
    nothing.
    """
    one_counts = _has(one) & (share != 0)
    other_counts = _has(other) & (other_share != 0)
    total = np.where(one_counts & other_counts, share + other_share, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):  # of infinite values
        mean = (one * share + other * other_share) / total
    return np.where(one_counts & other_counts, mean, np.where(one_counts, one, _later(one, other)))


def _applied(columns: dict[str, Column]) -> Column:
    """Return the losses of the applied steps, as `loss_applied` does for one record."""
    applied = columns["loss_applied"]
    loss = columns.get("loss", np.full(len(applied), np.nan))
    return np.where(_has(applied), np.where(applied == 0.0, np.nan, applied), loss)
