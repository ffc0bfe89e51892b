"""What the steps since the last log came to; it stays on the device until then.

A row holds the loss of the global batch, the number of things counted, the gradient's norm, how much of the gradient was
limited and whether the update was skipped. Rows not yet logged are part of a checkpoint, so a resumed run writes the same records.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.distributed.world import World
from surefoot.mean import Mean
from surefoot.train.loop import Step

Row = tuple[int, Tensor | None, Tensor | float, Tensor | None, Tensor | None, Tensor | None]
_SHOWN = 20  # steps that were not applied


@dataclass
class Meter:
    """One row per step since the last `read`."""

    rows: list[Row] = field(default_factory=list)
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    skipped_in_a_row: list[int] = field(default_factory=list)  # up to now, as far as the records that were read tell

    def add(self, step: Step) -> None:
        """Keep a step's row; reads nothing. Values that the user logs later in the same step are seen too."""
        clipped = (
            next(iter(step.clip_fractions.values()), None)
            if len(step.clip_fractions) < 2
            else _mean(step.clip_fractions.values())
        )
        self.rows.append((step.index, step.loss, step.target_count, step.grad_norm, clipped, step.skipped))
        self.logged.append((step.index, step._logged))

    def read(self, *, first_steps: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Wait for the device and average over the rows, for a record; also the steps not applied. Starts a new window.

        `loss` is over everything counted, `loss_max` the largest finite one of a single step, applied or not, and `loss_max_step` the
        first step that had it. Where updates were skipped, `skipped` counts them, `skipped_steps` names the first 20, and
        `loss_applied` leaves them out. `norm` is the mean over steps, `grad_norm_max` the largest. `starting_targets` are those of
        `first_steps`, with which sessions began. `clipped` is how much of the gradient was limited, from 0 to 1, as a mean over
        the applied steps and the optimizers.
        """
        # in NumPy: on so few numbers it is several times as fast as torch
        rows, logged = self.table().numpy(), self.logged_table()
        self.rows, self.logged = [], []
        values: dict[str, Any] = {}
        step, loss, count, norm, clipped, skipped = measured = rows[~np.isnan(rows[:, -1])].T
        applied = skipped == 0
        if skipped.size:
            values |= {"loss": _weighted(measured), "targets": float(count.sum())}
            if first_steps:
                values["starting_targets"] = float(count[np.isin(step, first_steps)].sum())
            values |= {"grad_norm": float(norm.mean()), "grad_norm_max": float(norm.max())}
            limited = clipped[applied & ~np.isnan(clipped)]
            if limited.size:
                values["clip_fraction"] = float(limited.mean())
            values["skipped"] = int(skipped.sum())
            if applied.any() and not applied.all():
                values["loss_applied"] = _weighted(measured[:, applied])
            if not applied.all():
                values["skipped_steps"] = [int(index) for index in step[~applied][:_SHOWN]]
            finite = np.isfinite(loss) & (count > 0)
            if finite.any():
                largest = np.where(finite, loss, -math.inf).argmax()
                values |= {"loss_max": float(loss[largest]), "loss_max_step": int(step[largest])}
        values |= {name: float(Mean(table[:, 1].sum(), table[:, 2].sum()).value) for name, table in logged.items()}
        return values, [int(index) for index in step[~applied]]

    def note_skipped(self, skipped: list[int], *, done: int) -> None:
        """Take notice of the skipped steps among those read, when `done` steps are made."""
        for step in skipped:
            self.skipped_in_a_row = (
                [*self.skipped_in_a_row, step] if self.skipped_in_a_row[-1:] == [step - 1] else [step]
            )
        if self.skipped_in_a_row[-1:] != [done - 1]:
            self.skipped_in_a_row = []

    def collect(self, world: World) -> None:
        """Hand the values that were logged on any rank to rank 0, in the order of steps and ranks; collective.

        The rows are the same on every rank: loss, count and norm are of the whole step.
        """
        if world.size == 1:
            return
        by_rank = world.gathered({name: table.tolist() for name, table in self.logged_table().items()})
        entries = [
            (int(index), {name: Mean(*mean)}) for own in by_rank for name, rows in own.items() for index, *mean in rows
        ]
        self.logged = sorted(entries, key=lambda pair: pair[0]) if world.is_main else []

    def table(self) -> Tensor:
        """The rows as float64 on the host: step, loss, count, norm, clipped, skipped (NaN where not measured)."""
        if not self.rows:
            return torch.empty(0, 6, dtype=torch.float64)
        nothing = torch.tensor(math.nan)
        columns = zip(*self.rows, strict=True)
        return torch.stack(
            [_column([nothing if each is None else each for each in column]) for column in columns], dim=1
        )

    def logged_table(self) -> dict[str, Tensor]:
        """The user's values as float64 on the host: for each name rows of step, total, count."""
        rows_by_name: dict[str, list[tuple[float, Any, Any]]] = {}
        for index, values in self.logged:
            for name, value in values.items():
                mean = value if isinstance(value, Mean) else Mean(value, 1)
                rows_by_name.setdefault(name, []).append((float(index), mean.total, mean.count))
        return {
            name: torch.stack([_column(column) for column in zip(*rows, strict=True)], dim=1)
            for name, rows in rows_by_name.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.table(), **{f"logged/{name}": table for name, table in self.logged_table().items()}}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.rows = [
            (int(index), None, 0, None, None, None) if rest[-1].isnan() else (int(index), *rest)
            for index, *rest in tensors["rows"]
        ]
        self.logged = [
            (int(index), {name.removeprefix("logged/"): Mean(total, count)})
            for name, table in tensors.items()
            if name.startswith("logged/")
            for index, total, count in table
        ]


def derived(
    functions: Mapping[str, Callable[[Mapping[str, float]], float]] | None, values: Mapping[str, float]
) -> dict[str, float]:
    """The run's `derived` values of a record whose steps have a loss.

    >>> derived({"double": lambda values: 2 * values["loss"]}, {"loss": 1.5}), derived({"double": max}, {})
    ({'double': 3.0}, {})
    """
    return {name: function(values) for name, function in (functions or {}).items() if "loss" in values}


def _weighted(measured: NDArray[np.float64]) -> float:
    _, loss, count, *_ = measured[:, measured[2] > 0]
    with np.errstate(invalid="ignore"):  # inf - inf: such a loss is in the record
        return float((loss * count).sum() / count.sum()) if count.size else 0.0


def _mean(values: Iterable[Tensor | None]) -> Tensor | None:
    """The mean over several optimizers, on the device; None where none of them has a limit."""
    fractions = [value.float() for value in values if value is not None]
    return torch.stack(fractions).mean() if fractions else None


def _column(values: Sequence[Tensor | float]) -> Tensor:
    """One column as float64 on the host; tensors of one kind are fetched together."""
    if len({(value.dtype, value.device) if isinstance(value, Tensor) else None for value in values}) > 1:
        return torch.tensor([float(value) for value in values], dtype=torch.float64)
    if isinstance(values[0], Tensor):
        with torch.no_grad():
            return torch.stack(values).cpu().double()  # type: ignore[arg-type]  # all are tensors then
    return torch.tensor(values, dtype=torch.float64)
