"""The records and settings of a run as arrays. A missing value is NaN; a missing series is empty.
Torch-free.
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
    """Values of one quantity, each with the number of completed steps."""

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
    """The records of a run by kind, in step order."""

    described: RunDescription
    train: tuple[Record, ...] = ()
    scores: tuple[Record, ...] = ()
    layers: tuple[Record, ...] = ()
    slow_ranks: tuple[Record, ...] = ()
    last_event: Record | None = None  # the end of the last session
    data: Mapping[str, Any] = field(default_factory=dict)
    resumed: tuple[int, ...] = ()
    _watched: dict[str, dict[str, Series]] = field(default_factory=dict, init=False)
    _columns: dict[str, Series] = field(default_factory=dict, init=False)

    @cached_property
    def step(self) -> int:
        """The step of the last record."""
        last = (
            *self.train[-1:],
            *self.scores[-1:],
            *([self.last_event] if self.last_event else ()),
        )
        return max((int(record["step"]) for record in last), default=0)

    @property
    def last_step(self) -> int:
        """The last step that is known to be complete, from the records or the newest checkpoint."""
        return max(self.step, self.described.saved_step)

    @property
    def has_trained(self) -> bool:
        """False if no step was completed, or all completed steps had no targets."""
        targets = [record.get("targets", 1) for record in self.train]
        return self.last_step > 0 and (not targets or any(targets))

    @property
    def ended_by(self) -> str | None:
        """The outcome of the last session, such as "finished" or "diverged", or None if the session
        runs or was killed.
        """
        return None if self.last_event is None else str(self.last_event.get("event"))

    def score(self, name: str) -> Series:
        """Return the finite values of an evaluated score, such as "val/loss"."""
        return _column(self.scores, name).finite

    def not_finite_since(self, name: str) -> int | None:
        """Return the first step of the last evaluations in which a score is not finite, or None if
        its last value is finite.
        """
        since = None
        series = _column(self.scores, name)
        for step, is_finite in zip(series.step, np.isfinite(series.value), strict=True):
            if is_finite:
                since = None
            elif since is None:
                since = int(step)
        return since

    @property
    def over(self) -> bool:
        return self.described.standing != "running" or self.last_event is not None

    @property
    def complete(self) -> bool:
        """True if all steps are complete or early stopping ended the run."""
        steps = self.described.steps
        return (steps is not None and self.step >= steps) or self.ended_by in (
            "finished",
            "stopped early",
        )

    def column(self, name: str) -> Series:
        """Return the column `name` of the training records that have this value; null becomes
        NaN.
        """
        if name not in self._columns:
            self._columns[name] = _column(self.train, name)
        return self._columns[name]

    @cached_property
    def loss(self) -> Series:
        """The training loss of applied steps, without records that lack a loss."""
        return _series([(record["step"], loss_applied(record)) for record in self.train]).finite

    @property
    def first_step_loss(self) -> float:
        """The loss of step 0, before any update, or NaN if it is not recorded."""
        return _number(self.train[0].get("first_step_loss")) if self.train else math.nan

    @property
    def loss_is_finite(self) -> bool:
        """False if the last training record has no finite loss, so that earlier ones say nothing
        about the present.
        """
        return not self.train or math.isfinite(_number(loss_applied(self.train[-1])))

    @cached_property
    def windows(self) -> Series:
        """The number of steps in each training record."""
        steps = np.array([record["step"] for record in self.train], dtype=np.int64)
        return Series(steps, np.maximum(np.diff(steps, prepend=0), 1).astype(np.float64))

    def total(self, name: str) -> float:
        """Return the sum of a value over all training records and the last event, which covers the
        time after the last record.
        """
        ending = _number((self.last_event or {}).get(name))
        return float(self.column(name).finite.value.sum()) + (
            ending if math.isfinite(ending) else 0.0
        )

    @cached_property
    def splits(self) -> dict[str, Series]:
        names = dict.fromkeys(
            name for record in self.scores for name in record if name.endswith("/loss")
        )
        losses = {name.removesuffix("/loss"): _column(self.scores, name).finite for name in names}
        return {name: series for name, series in losses.items() if len(series)}

    @cached_property
    def score_names(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(name for record in self.scores for name in record if "/" in name)
        )

    @property
    def targets(self) -> Mapping[str, Any]:
        targets = self.data.get("targets")
        return targets if isinstance(targets, dict) else {}

    def watched(self, kind: str) -> dict[str, Series]:
        """Return a quantity such as "update_norm" for each layer and measured step. A missing layer
        is NaN.
        """
        if kind not in self._watched:
            having = [record for record in self.layers if isinstance(record.get(kind), dict)]
            self._watched[kind] = {
                name: _series(
                    [
                        (record.get("measured_step", record["step"]), record[kind].get(name))
                        for record in having
                    ]
                )
                for name in dict.fromkeys(name for record in having for name in record[kind])
            }
        return self._watched[kind]


def loss_applied(record: Record) -> Any:
    """Return the training loss of a record's applied steps, or None if no step was applied.

    >>> loss_applied({"loss": 2.0}), loss_applied({"loss": None, "skipped": 2, "loss_applied": 0.0})
    (2.0, None)
    """
    loss = record.get("loss_applied", record.get("loss"))
    return None if loss == 0.0 and "loss_applied" in record else loss


def _column(records: Sequence[Record], name: str) -> Series:
    return _series([(record["step"], record[name]) for record in records if name in record])


def _series(points: Sequence[tuple[Any, Any]]) -> Series:
    steps, values = [step for step, _ in points], [value for _, value in points]
    if not {*map(type, values)} <= {int, float}:
        values = list(map(_number, values))
    return Series(np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
