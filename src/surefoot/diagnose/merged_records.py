"""Merging of training records in pairs, so that a long run keeps a limited number of records."""

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.diagnose.history import loss_applied
from surefoot.tracking.columns import Columns
from surefoot.tracking.record import PHASES, Record

_SUMMED = ("targets", "starting_targets", "skipped", *(f"{phase}_s" for phase in PHASES))
_LARGEST = (
    "grad_norm_max",
    "host_memory_bytes",
    "host_memory_peak_bytes",
    "device_memory_peak_bytes",
)
_AVERAGED = ("loss", "grad_norm", "clip_fraction")
_INDEXES = 20


class MergedRecords:
    """Training records as one array per value, so that `halve` merges thousands of pairs at once,
    as `thinned` merges one.

    A record with another value than the usual numbers stays a dictionary, in `odd` by its index.
    """

    def __init__(self) -> None:
        self.count = 0
        self.columns: dict[
            str, tuple[NDArray[Any], NDArray[np.bool_]]
        ] = {}  # values, and where they are present
        self.odd: dict[int, Record] = {}
        self.waiting: list[
            Columns
        ] = []  # included in `count`, joined to the others when they are needed

    def extend(self, columns: Columns) -> None:
        """Append columns as `append` does their records."""
        known = {name: values.dtype for name, (values, _) in self.columns.items()}
        known |= {
            name: values.dtype for each in self.waiting[-1:] for name, values in each.values.items()
        }
        kinds = {name: np.dtype(np.float64) for name in _AVERAGED} | known
        if any(
            kinds.get(name, values.dtype) != values.dtype for name, values in columns.values.items()
        ):
            self.append(columns.records())
            return
        if self.waiting and self.waiting[-1].values.keys() != columns.values.keys():
            self._join()
        self.waiting.append(columns)
        self.count += len(columns)

    def _join(self) -> None:
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        added = sum(map(len, waiting))
        before = self.count - added
        for name in dict.fromkeys(chain(self.columns, waiting[0].values)):
            new = [each.values[name] for each in waiting] if name in waiting[0].values else None
            kind = self.columns[name][0].dtype if new is None else new[0].dtype
            values, present = self.columns.get(
                name, (np.zeros(before, kind), np.zeros(before, np.bool_))
            )
            filled = np.full(added, new is not None)
            self.columns[name] = (
                np.concatenate([values, *(new or [np.zeros(added, kind)])]),
                np.concatenate([present, filled]),
            )

    def append(self, records: Sequence[Record]) -> None:
        self._join()
        odd = {index for index, record in enumerate(records) if "loss_applied" in record}
        for name in dict.fromkeys(chain(self.columns, chain.from_iterable(records))):
            if name == "kind":
                continue
            values = [record.get(name) for record in records]
            kinds = set(map(type, values))
            known = self.columns.get(name)
            are_whole = int in kinds if known is None else known[0].dtype == np.int64
            number = int if are_whole and name not in _AVERAGED else float
            present = (
                np.array([type(value) is number for value in values]) if kinds != {number} else None
            )
            if present is not None:
                odd |= {
                    index for index in np.flatnonzero(~present).tolist() if name in records[index]
                }
                values = [value if type(value) is number else number(0) for value in values]
            try:
                array = np.array(values, dtype=np.int64 if number is int else np.float64)
            except OverflowError:  # an integer of more than 64 bits
                odd |= set(range(len(records)))
                array, present = (
                    np.zeros(len(records), dtype=np.int64),
                    np.zeros(len(records), dtype=np.bool_),
                )
            present = np.ones(len(records), dtype=np.bool_) if present is None else present
            before = (np.zeros(self.count, dtype=array.dtype), np.zeros(self.count, dtype=np.bool_))
            joined = [
                np.concatenate(pair) for pair in zip(known or before, (array, present), strict=True)
            ]
            self.columns[name] = (joined[0], joined[1])
        self.odd |= {self.count + index: records[index] for index in odd}
        self.count += len(records)

    def halve(self, count: int) -> None:
        """Merge pairs of the first `count` records, without the last one if `count` is odd."""
        self._join()
        pairs = count // 2
        pair_of_odd = dict.fromkeys(index // 2 for index in self.odd if index < 2 * pairs)
        odd = {
            pair: _as_one(self._record(2 * pair), self._record(2 * pair + 1))
            for pair in pair_of_odd
        }
        self.odd = odd | {
            index - pairs: record for index, record in self.odd.items() if index >= 2 * pairs
        }
        parts = {
            name: tuple(part[start : 2 * pairs : 2] for start in (0, 1) for part in column)
            for name, column in self.columns.items()
        }
        with np.errstate(all="ignore"):
            merged = _merged_pairs(parts, pairs)
        self.columns = {
            name: (
                np.concatenate([merged[name][0], values[2 * pairs :]]),
                np.concatenate([merged[name][1], present[2 * pairs :]]),
            )
            for name, (values, present) in self.columns.items()
        }
        self.count -= pairs

    def records(self) -> list[Record]:
        self._join()
        names = list(self.columns)
        columns = [values.tolist() for values, _ in self.columns.values()]
        present = [flags.tolist() for _, flags in self.columns.values()]
        every = zip(zip(*columns, strict=True), zip(*present, strict=True), strict=True)
        return [
            self.odd.get(index)
            or {"kind": "train", **dict(compress(zip(names, values, strict=True), flags))}
            for index, (values, flags) in enumerate(every)
        ]

    def _record(self, index: int) -> Record:
        values = {
            name: column[index].item()
            for name, (column, present) in self.columns.items()
            if present[index]
        }
        return self.odd.get(index) or {"kind": "train", **values}


def _merged_pairs(
    parts: Mapping[str, tuple[NDArray[Any], ...]], pairs: int
) -> dict[str, tuple[NDArray[Any], NDArray[np.bool_]]]:
    """Return each column of `_as_one` for many pairs: `parts` are values and presence of the first,
    then of the second records.
    """
    ones, nothing = np.ones(pairs), np.zeros(pairs, dtype=np.bool_)
    first, has_first, second, has_second = parts.get("targets", (ones, nothing, ones, nothing))
    share, of_other = np.where(has_first, first, 1), np.where(has_second, second, 1)
    total = share + of_other
    total = np.where(total == 0, 1, total)
    first, has_first, second, has_second = parts.get("loss_max", (ones, nothing, ones, nothing))
    first_is_largest = np.where(has_first, first, 0) > np.where(has_second, second, 0)
    merged = {}
    for name, (one, has_one, other, has_other) in parts.items():
        values, both = np.where(has_other, other, one), has_one & has_other
        if name in _SUMMED:
            values = np.where(both, one + other, values)
        elif name in _LARGEST:
            values = np.where(both, np.where(other > one, other, one), values)
        elif name in _AVERAGED:
            mean = (one * share + other * of_other) / total
            # a mean of nothing is NaN
            mean = np.where(share == 0, other, np.where(of_other == 0, one, mean))
            values = np.where(both, mean, values)
        elif name in ("loss_max", "loss_max_step"):
            values = np.where(first_is_largest & has_one, one, values)
        merged[name] = (values, has_one | has_other)
    return merged


def thinned(records: Sequence[Record]) -> list[Record]:
    """Halve the records of one kind: merge pairs of training records, or drop every second record
    of another kind.

    >>> thinned(
    ...     [
    ...         {"kind": "train", "step": 1, "loss": 2.0, "targets": 1},
    ...         {"kind": "train", "step": 2, "loss": 1.0, "targets": 3},
    ...     ]
    ... )
    [{'kind': 'train', 'step': 2, 'loss': 1.25, 'targets': 4}]
    """
    return list(
        map(_as_one if records[0]["kind"] == "train" else _better, records[::2], records[1::2])
    )


def _as_one(first: Record, second: Record) -> Record:
    merged: dict[str, Any] = first | second
    share, of_other = first.get("targets", 1), second.get("targets", 1)
    for name in (*_SUMMED, *_LARGEST, *_AVERAGED):
        one, other = first.get(name), second.get(name)
        if isinstance(one, int | float) and isinstance(other, int | float):
            mean = (one * share + other * of_other) / (share + of_other or 1)
            if not share or not of_other:  # a mean of nothing is NaN
                mean = one if share else other
            merged[name] = (
                one + other if name in _SUMMED else max(one, other) if name in _LARGEST else mean
            )
    if (first.get("loss_max") or 0) > (second.get("loss_max") or 0):
        merged |= {name: first[name] for name in ("loss_max", "loss_max_step") if name in first}
    if "loss_applied" in merged:
        losses = [(loss_applied(record), record.get("targets", 1)) for record in (first, second)]
        known = [(loss, share) for loss, share in losses if isinstance(loss, int | float)]
        merged["loss_applied"] = sum(loss * share for loss, share in known) / (
            sum(share for _, share in known) or 1
        )
    indexes = [*(first.get("skipped_steps") or ()), *(second.get("skipped_steps") or ())]
    return merged | ({"skipped_steps": indexes[:_INDEXES]} if indexes else {})


def _better(first: Record, second: Record) -> Record:
    """Return the record with the lower first split loss, so that the best is kept; the second
    record without such losses.
    """
    name = next((name for name in second if name.endswith("/loss")), "")
    one, other = first.get(name), second.get(name)
    return (
        first
        if isinstance(one, int | float) and isinstance(other, int | float) and one < other
        else second
    )
