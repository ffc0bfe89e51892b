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

from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.record import PHASES, Record
from surefoot.tracking.run_records import RunRecords
from surefoot.tracking.table import Summary, Table

# what stretches of a long run say of a value; of others, the last one
_SUMMARIES: dict[str, Summary] = {
    **dict.fromkeys(("targets", "starting_targets", "skipped"), "total"),
    **{f"{phase}_s": "total" for phase in PHASES},
    **dict.fromkeys(("loss", "grad_norm", "clip_fraction"), "mean"),
    **dict.fromkeys(("grad_norm_max", "loss_max"), "highest"),
    "host_memory_bytes": "highest",
    "host_memory_peak_bytes": "highest",
    "device_memory_peak_bytes": "highest",
}


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
    """The records of a run, with the description of the run."""

    described: RunDescription
    records: RunRecords = field(default_factory=RunRecords)
    _watched: dict[str, dict[str, Series]] = field(default_factory=dict, init=False)

    @property
    def step(self) -> int:
        """The step of the last record."""
        return self.records.last_step

    @property
    def last_step(self) -> int:
        """The last step that is known to be complete, from the records or the newest checkpoint."""
        return self.records.completed_step(self.described.saved_step)

    @property
    def has_trained(self) -> bool:
        """False if no step was completed, or all completed steps had no targets."""
        targets = self.column("targets").value
        return self.last_step > 0 and (not len(targets) or bool(targets.any()))

    @property
    def last_event(self) -> Record | None:
        """The end of the last session, or None if the session runs or was killed."""
        return self.records.ending or None

    @property
    def ended_by(self) -> str | None:
        """The outcome of the last session, such as "finished" or "diverged", or None if the session
        runs or was killed.
        """
        return self.records.ended_by

    @property
    def data(self) -> Mapping[str, Any]:
        """The check of the data before the first step."""
        return self.records.data

    @property
    def resumed(self) -> tuple[int, ...]:
        """The steps from which the run was resumed."""
        return tuple(self.records.resumed)

    def score(self, name: str) -> Series:
        """Return the finite values of an evaluated score, such as "val/loss", without those before
        a change that makes them another quantity.
        """
        described = self.described
        changed_at = max(described.loss_changed_at, described.changed_at("ema"))
        scores = self._score(name).finite
        # the evaluation at the step of the change has the weights and the settings before
        return scores.since(changed_at) if changed_at else scores

    def _score(self, name: str) -> Series:
        summary: Summary = "lowest" if name.endswith("/loss") else "last"  # the best one is kept
        return _known(self.records.scores, name, summary)

    def not_finite_since(self, name: str) -> int | None:
        """Return the first step of the last evaluations in which a score is not finite, or None if
        its last value is finite.
        """
        since = None
        series = self._score(name)
        for step, is_finite in zip(series.step, np.isfinite(series.value), strict=True):
            if is_finite:
                since = None
            elif since is None:
                since = int(step)
        return since

    @property
    def over(self) -> bool:
        if self.described.standing != "running":
            return True
        return self.last_event is not None and not self.records.is_at_change

    @property
    def complete(self) -> bool:
        """True if all steps are complete or early stopping ended the run."""
        steps = self.described.steps
        if steps is not None and self.step >= steps:
            return True
        return self.records.is_complete

    @property
    def was_stopped_early(self) -> bool:
        """True if early stopping ended the run, so that a longer run would end there too."""
        return self.ended_by == "stopped early"

    def column(self, name: str) -> Series:
        """Return the values `name` of the training records that have it. One that is not finite is
        infinity.
        """
        return _known(self.records.train, name, _SUMMARIES.get(name, "last"))

    @cached_property
    def loss(self) -> Series:
        """The training loss of applied steps, without records that lack a loss, and without those
        before a change that makes it another quantity.
        """
        return self.column("loss").finite.since(self.described.loss_changed_at)

    @property
    def first_step_loss(self) -> float:
        """The loss of step 0, before any update, or NaN if it is not recorded or is now another
        quantity.
        """
        if self.described.loss_changed_at:
            return math.nan
        losses = self.column("first_step_loss").finite.value
        return float(losses[0]) if len(losses) else math.nan

    @property
    def loss_is_finite(self) -> bool:
        """False if the last training record has no finite loss, so that earlier ones say nothing
        about the present.
        """
        return not self.train_count or math.isfinite(self.records.train.last("loss"))

    @property
    def train_count(self) -> int:
        """The number of training records, or of their stretches in a long run."""
        return len(self.records.train.steps)

    @cached_property
    def windows(self) -> Series:
        """The number of steps in each training record."""
        steps = self.records.train.steps
        return Series(steps, np.maximum(np.diff(steps, prepend=0), 1).astype(np.float64))

    def total(self, name: str) -> float:
        """Return the sum of a value over all training records and the last event, which covers the
        time after the last record.
        """
        return self.records.total(name)

    @cached_property
    def splits(self) -> dict[str, Series]:
        names = [name for name in self.score_names if name.endswith("/loss")]
        losses = {name.removesuffix("/loss"): self.score(name) for name in names}
        return {name: series for name, series in losses.items() if len(series)}

    @property
    def score_names(self) -> Sequence[str]:
        return self.records.scores.names

    @property
    def targets(self) -> Mapping[str, Any]:
        targets = self.data.get("targets")
        return targets if isinstance(targets, dict) else {}

    @property
    def overlaps(self) -> dict[str, dict[str, Any]]:
        """For each split, the counts of its samples that are in the training data."""
        recorded = self.data.get("overlap")
        if not isinstance(recorded, dict):
            return {}
        return {split: counts for split, counts in recorded.items() if isinstance(counts, dict)}

    @property
    def layers_count(self) -> int:
        """The number of measured steps, or of their stretches in a long run."""
        return len(self.records.layers.steps)

    def watched(self, kind: str) -> dict[str, Series]:
        """Return a quantity such as "update_norm" for each layer and measured step. A missing layer
        is NaN.
        """
        if kind not in self._watched:
            layers = self.records.layers
            names = [name for name in layers.names if name.startswith(f"{kind}/")]
            _, values = layers.values(names, "last")
            is_measured = ~np.isnan(values).all(axis=0)
            steps = layers.steps[is_measured]
            self._watched[kind] = {
                name.removeprefix(f"{kind}/"): Series(steps, row)
                for name, row in zip(names, values[:, is_measured], strict=True)
            }
        return self._watched[kind]


def _known(table: Table, name: str, summary: Summary) -> Series:
    """Return a name's values without missing ones."""
    if name not in table.names:
        return Series(np.zeros(0, np.int64), np.zeros(0))
    steps, values = table.values([name], summary)
    is_known = ~np.isnan(values[0])
    return Series(steps[0, is_known].astype(np.int64), values[0, is_known])
