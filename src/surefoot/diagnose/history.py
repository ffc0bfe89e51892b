"""The records of a run as arrays, with its settings: all that findings are made from. Torch-free.

Missing values are not an error, because older versions recorded less: they are NaN, and missing series are empty arrays.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.diagnose.run_settings import RunDescription
from surefoot.tracking.record import Record


@dataclass(frozen=True)
class Series:
    """One quantity: steps made, and its value there."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    def where(self, chosen: NDArray[np.bool_]) -> "Series":
        return Series(self.step[chosen], self.value[chosen])

    def since(self, step: int) -> "Series":
        return self.where(self.step > step)

    @property
    def finite(self) -> "Series":
        return self.where(np.isfinite(self.value))


@dataclass(frozen=True)
class History:
    """The records of a run by kind, in the order of steps."""

    described: RunDescription
    train: tuple[Record, ...] = ()
    scores: tuple[Record, ...] = ()
    layers: tuple[Record, ...] = ()
    last_event: Record | None = None  # of the last session
    data: Mapping[str, Any] = field(default_factory=dict)
    resumed: tuple[int, ...] = ()
    _watched: dict[str, dict[str, Series]] = field(default_factory=dict, init=False)

    @cached_property
    def step(self) -> int:
        """Steps made, according to the records."""
        last = (*self.train[-1:], *self.scores[-1:], *([self.last_event] if self.last_event else ()))
        return max((int(record["step"]) for record in last), default=0)

    @property
    def ended_by(self) -> str | None:
        """The end of the last session: "finished", "stopped by SIGTERM", "diverged" ...; None where it goes on or was killed."""
        return None if self.last_event is None else str(self.last_event.get("event"))

    @property
    def over(self) -> bool:
        return self.described.standing != "running" or self.last_event is not None

    @property
    def complete(self) -> bool:
        """Whether all steps were made, or early stopping ended the run."""
        steps = self.described.steps
        return (steps is not None and self.step >= steps) or self.ended_by in ("finished", "stopped early")

    def column(self, name: str) -> Series:
        """A value of the training records that have it; null is NaN."""
        return _column(self.train, name)

    @cached_property
    def loss(self) -> Series:
        """The training loss of the steps that were applied, where it is a number."""
        return _series([(record["step"], loss_applied(record)) for record in self.train]).finite

    @cached_property
    def windows(self) -> Series:
        """The number of steps in each training record."""
        steps = np.array([record["step"] for record in self.train], dtype=np.int64)
        return Series(steps, np.maximum(np.diff(steps, prepend=0), 1).astype(np.float64))

    def total(self, name: str) -> float:
        """The sum of a value over all training records, and over the last event, which has the time after the last of them."""
        ending = _number((self.last_event or {}).get(name))
        return float(self.column(name).finite.value.sum()) + (ending if math.isfinite(ending) else 0.0)

    @cached_property
    def splits(self) -> dict[str, Series]:
        """The losses of the splits that are evaluated during training, by name."""
        names = dict.fromkeys(name for record in self.scores for name in record if name.endswith("/loss"))
        losses = {name.removesuffix("/loss"): _column(self.scores, name).finite for name in names}
        return {name: series for name, series in losses.items() if len(series)}

    @cached_property
    def score_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for record in self.scores for name in record if "/" in name))

    @property
    def targets(self) -> Mapping[str, Any]:
        """Facts about the targets, from the check of the data."""
        targets = self.data.get("targets")
        return targets if isinstance(targets, dict) else {}

    def watched(self, kind: str) -> dict[str, Series]:
        """A quantity of the layers, such as "update_norm", at every watched step (its index); NaN where a record lacks a name."""
        if kind not in self._watched:
            having = [record for record in self.layers if isinstance(record.get(kind), dict)]
            self._watched[kind] = {
                name: _series(
                    [(record.get("measured_step", record["step"]), record[kind].get(name)) for record in having]
                )
                for name in dict.fromkeys(name for record in having for name in record[kind])
            }
        return self._watched[kind]


def loss_applied(record: Record) -> Any:
    """The training loss of the applied steps of a record; None if no step was applied, which is recorded as 0.

    >>> loss_applied({"loss": 2.0}), loss_applied({"loss": None, "skipped": 2, "loss_applied": 0.0})
    (2.0, None)
    """
    loss = record.get("loss_applied", record.get("loss"))
    return None if loss == 0.0 and "loss_applied" in record else loss


def _column(records: Sequence[Record], name: str) -> Series:
    return _series([(record["step"], record[name]) for record in records if name in record])


def _series(points: Sequence[tuple[Any, Any]]) -> Series:
    steps, values = [step for step, _ in points], [_number(value) for _, value in points]
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))


def _number(value: Any) -> float:
    """A number; NaN for anything else."""
    return float(value) if isinstance(value, int | float) else math.nan
