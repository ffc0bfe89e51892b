"""The records of a run as arrays, with its settings: all that findings are made from. Torch-free.

Records of older versions lack fields, values that were not finite are null or named in `nonfinite`, and a run that was resumed has
markers among them: none of that is an error here. What is not there is an empty array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.diagnose.run_settings import Described
from surefoot.tracking.record import PHASES, Record


@dataclass(frozen=True)
class Series:
    """One quantity: steps made, and its value there."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: NDArray[np.bool_]) -> Series:
        """Some of it."""
        return Series(self.step[chosen], self.value[chosen])

    def since(self, step: int) -> Series:
        """What lies after so many steps."""
        return self.where(self.step > step)

    @property
    def finite(self) -> Series:
        """What is a number."""
        return self.where(np.isfinite(self.value))


@dataclass(frozen=True)
class Table:
    """One quantity of many parameters or modules: a row for each watched step (its index), a column for each name."""

    step: NDArray[np.int64]
    names: tuple[str, ...]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    def of(self, names: Sequence[str]) -> Table:
        """Some columns, in the order of the table."""
        places = [place for place, name in enumerate(self.names) if name in set(names)]
        return Table(self.step, tuple(self.names[place] for place in places), self.value[:, places])

    def rows(self, chosen: NDArray[np.bool_]) -> Table:
        """Some rows."""
        return Table(self.step[chosen], self.names, self.value[chosen])


@dataclass(frozen=True)
class History:
    """A run as its records tell it, by their kind; each in the order of steps."""

    described: Described
    train: tuple[Record, ...] = ()
    scores: tuple[Record, ...] = ()
    layers: tuple[Record, ...] = ()
    events: tuple[Record, ...] = ()
    last_event: Record | None = None  # of the last sitting
    data: Mapping[str, Any] = field(default_factory=dict)
    resumed: tuple[int, ...] = ()

    @cached_property
    def step(self) -> int:
        """Steps made, as far as the records tell."""
        ended = () if self.last_event is None else (self.last_event,)
        return max((int(records[-1]["step"]) for records in (self.train, self.scores, ended) if records), default=0)

    @property
    def ended_by(self) -> str | None:
        """How the last sitting ended: "finished", "stopped by SIGTERM", "diverged" ...; None where it goes on or was killed."""
        return None if self.last_event is None else str(self.last_event.get("what"))

    @property
    def over(self) -> bool:
        """Whether no step is being made."""
        return self.described.standing != "running" or self.last_event is not None

    @property
    def complete(self) -> bool:
        """Whether all steps were made, or early stopping ended the run."""
        steps = self.described.steps
        return (steps is not None and self.step >= steps) or self.ended_by in ("finished", "stopped early")

    def column(self, name: str) -> Series:
        """A value of the training records that have it; null is NaN."""
        if name not in self._columns:
            self._columns[name] = _series(self.train, name)
        return self._columns[name]

    @cached_property
    def loss(self) -> Series:
        """The training loss of the steps that were applied, where it is a number."""
        steps = [record["step"] for record in self.train]
        values = [_number(loss_of_applied(record)) for record in self.train]
        return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)).finite

    @cached_property
    def windows(self) -> Series:
        """How many steps each training record is about."""
        steps = np.array([record["step"] for record in self.train], dtype=np.int64)
        before = np.concatenate([[0], steps[:-1]]) if steps.size else steps
        return Series(steps, np.maximum(steps - before, 1).astype(np.float64))

    def total(self, name: str) -> float:
        """The sum of a value over all training records, and over the last event, which has the time after the last of them."""
        ending = _number((self.last_event or {}).get(name))
        return float(self.column(name).finite.value.sum()) + (ending if math.isfinite(ending) else 0.0)

    @cached_property
    def splits(self) -> dict[str, Series]:
        """The losses of the splits that are scored while it trains, by name."""
        names = dict.fromkeys(name for record in self.scores for name in record if name.endswith("/loss"))
        found = {name.removesuffix("/loss"): _series(self.scores, name).finite for name in names}
        return {name: series for name, series in found.items() if len(series)}

    @cached_property
    def score_names(self) -> tuple[str, ...]:
        """Everything that is scored, as "SPLIT/SCORE"."""
        return tuple(dict.fromkeys(name for record in self.scores for name in record if "/" in name))

    def watched(self, kind: str) -> Table:
        """A quantity of the layers, such as "update_norm"; NaN where a record lacks a name."""
        if kind not in self._tables:
            self._tables[kind] = _table(self.layers, kind)
        return self._tables[kind]

    @cached_property
    def _columns(self) -> dict[str, Series]:
        return {}

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}


def history_of(records: Iterable[Record], described: Described) -> History:
    """A history from records as they were written (of one curve: what a resume superseded is left out before)."""
    by_kind: dict[str, list[Record]] = {}
    last_event: Record | None = None
    for record in records:
        if isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            by_kind.setdefault(record["kind"], []).append(record)
            if record["kind"] in ("event", "resumed"):
                last_event = record if record["kind"] == "event" else None
    data = by_kind.get("data", [])
    return History(
        described,
        train=tuple(by_kind.get("train", ())),
        scores=tuple(by_kind.get("scores", ())),
        layers=tuple(by_kind.get("layers", ())),
        events=tuple(by_kind.get("event", ())),
        last_event=last_event,
        data=data[-1] if data else {},
        resumed=tuple(record["step"] for record in by_kind.get("resumed", ())),
    )


def loss_of_applied(record: Record) -> Any:
    """The training loss of the steps of a record that were applied; None where none was, whose sum is noted as 0.

    >>> loss_of_applied({"loss": 2.0}), loss_of_applied({"loss": None, "skipped": 2, "loss_of_applied": 0.0})
    (2.0, None)
    """
    held = record.get("loss_of_applied", record.get("loss"))
    return None if held == 0.0 and "loss_of_applied" in record else held


def _series(records: Sequence[Record], name: str) -> Series:
    held = [(record["step"], _number(record[name])) for record in records if name in record]
    steps, values = zip(*held, strict=True) if held else ((), ())
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))


def _table(records: Sequence[Record], kind: str) -> Table:
    having = [record for record in records if isinstance(record.get(kind), dict)]
    names = tuple(dict.fromkeys(name for record in having for name in record[kind]))
    rows = [
        [_number(record[kind].get(name, math.nan), record.get(f"{kind}/{name}")) for name in names] for record in having
    ]
    steps = [int(record["step"] if record.get("watched_step") is None else record["watched_step"]) for record in having]
    value = np.array(rows, dtype=np.float64).reshape(len(having), len(names))
    return Table(np.array(steps, dtype=np.int64), names, value)


def _number(value: Any, otherwise: Any = None) -> float:
    """A number; for null that which stands in `nonfinite`, and NaN for anything else."""
    for held in (value, otherwise):
        if isinstance(held, int | float):
            return float(held)
    return math.nan


MOST: dict[str, int] = {"train": 2000, "scores": 1000, "layers": 200, "event": 200}

"""Of each kind. Past it the older half is thinned to half as many, so what is new is whole and what is old is coarse."""

_SUMMED = ("targets", "starting_targets", "skipped", *(f"{phase}_s" for phase in PHASES))

_LARGEST = ("norm_max", "host_memory_bytes", "host_memory_peak_bytes", "device_memory_peak_bytes")

_AVERAGED = ("loss", "norm", "clipped")

_NUMBER = (int, float)

_INDEXES = 20


class Collected:
    """Takes records as they are written, and makes a history of them; `times` as many as `MOST` are kept of each kind."""

    def __init__(self, records: Iterable[Record] = (), *, times: int = 1) -> None:
        self.kinds: dict[str, list[Record]] = {}
        self.times = times
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Keep a record; texts are not."""
        kind = record["kind"]
        if kind == "sample":
            return
        if kind == "resumed":  # what ended the sittings before is over
            self.kinds.pop("event", None)
        kept = self.kinds.setdefault(kind, [])
        kept.append(record)
        if len(kept) > self.times * MOST.get(kind, len(kept)):
            older = len(kept) // 2 // 2 * 2
            kept[:older] = thinned(kept[:older])

    def history(self, described: Described) -> History:
        """All that is kept."""
        return history_of([record for kept in self.kinds.values() for record in kept], described)


def thinned(records: Sequence[Record]) -> list[Record]:
    """Half as many records of one kind: those of training two by two as one, of the others every second.

    >>> thinned([{"kind": "train", "step": 1, "loss": 2.0, "targets": 1}, {"kind": "train", "step": 2, "loss": 1.0, "targets": 3}])
    [{'kind': 'train', 'step': 2, 'loss': 1.25, 'targets': 4}]
    """
    pairs = zip(records[::2], records[1::2], strict=True)
    return [_as_one(first, second) if second["kind"] == "train" else _better(first, second) for first, second in pairs]


def _as_one(first: Record, second: Record) -> Record:
    """Two neighbouring records of training as that of all their steps: sums, means over targets, and what is largest."""
    merged: dict[str, Any] = first | second
    share, of_other = first.get("targets", 1), second.get("targets", 1)
    ways: Sequence[tuple[Sequence[str], Callable[[float, float], float]]] = (
        (_SUMMED, lambda one, other: one + other),
        (_LARGEST, max),
        (_AVERAGED, lambda one, other: (one * share + other * of_other) / (share + of_other or 1)),
    )
    for names, joined in ways:
        for name in names:
            one, other = first.get(name), second.get(name)
            if isinstance(one, _NUMBER) and isinstance(other, _NUMBER):
                merged[name] = joined(one, other)
    if (first.get("loss_max") or 0) > (second.get("loss_max") or 0):
        merged |= {name: first[name] for name in ("loss_max", "loss_max_step") if name in first}
    if "loss_of_applied" in merged:
        losses = [(loss_of_applied(record), record.get("targets", 1)) for record in (first, second)]
        known = [(loss, share) for loss, share in losses if isinstance(loss, int | float)]
        merged["loss_of_applied"] = sum(loss * share for loss, share in known) / (sum(share for _, share in known) or 1)
    indexes = [*(first.get("skipped_steps") or ()), *(second.get("skipped_steps") or ())]
    return merged | ({"skipped_steps": indexes[:_INDEXES]} if indexes else {})


def _better(first: Record, second: Record) -> Record:
    """Of two evaluations that with the lower first loss, so that the best is never lost; of all else the second."""
    loss = next((name for name in second if name.endswith("/loss")), None)
    if loss is None or not isinstance(first.get(loss), int | float) or not isinstance(second.get(loss), int | float):
        return second
    return first if first[loss] < second[loss] else second
