"""Loss, gradient norm and skipped updates of the steps since the last record, kept on the device
and in checkpoints.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from surefoot.checkpoint.state_json import Epoch
from surefoot.distributed.world import World
from surefoot.mean import Mean, Reduced, Reduction, read_numbers, refuse_two_ways
from surefoot.train.loop import Step

Row = tuple[int, Tensor | None, Tensor | float, Tensor | None, Tensor | None, Tensor | None]
_COLUMNS = 6  # of a row
_LOSS = "logged/loss"
_SHOWN = 20  # largest number of skipped steps in a record


@dataclass
class EpochTotals:
    """The totals from the step `start`, with which an epoch began, to the last record."""

    start: int
    # of the loss and the logged values, by the names of `logged_table`
    totals: dict[str, Mean] = field(default_factory=dict)


@dataclass
class Meter:
    """The rows of all steps since the last `read`."""

    rows: list[Row] = field(default_factory=list)
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    # the latest consecutive ones, up to the last record
    skipped_in_a_row: list[int] = field(default_factory=list)
    of_nothing: float = math.nan  # the loss of steps without a target, and other means of nothing
    epoch: EpochTotals | None = None  # None: the length of the run is not in epochs

    def add(self, step: Step) -> None:
        """Append a step's row without reading tensors. Values that the user logs later in the same
        step are included.
        """
        if len(step.clip_fractions) < 2:
            clipped = next(iter(step.clip_fractions.values()), None)
        else:
            clipped = _mean(step.clip_fractions.values())
        self.rows.append(
            (step.index, step.loss, step.target_count, step.grad_norm, clipped, step.skipped)
        )
        self.logged.append((step.index, step._logged))

    def read(self, *, first_steps: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        """Return the averages for a record and the indexes of the skipped steps; start a new
        window. Waits for the device.

        `loss` is the mean over all targets, NaN without any. `loss_max` is the largest finite loss
        of one step, skipped or not, and `loss_max_step` is the first step with this loss.
        `first_step_loss` is the loss of step 0, before any update; only the first record of a run
        has it. If updates were skipped, `skipped` counts them, `skipped_steps` lists the first 20,
        and `loss_applied` leaves them out. `starting_targets` counts the targets of `first_steps`,
        the first steps of sessions. `clip_fraction` is the clipped share of the gradient, from 0 to
        1, averaged over applied steps and optimizers.
        """
        rows = _table(self.rows)  # NumPy is several times faster for few elements
        logged = self.logged_table()
        if self.epoch is not None:
            self.epoch.totals = self._epoch_totals(self.epoch, rows, logged)
        self.rows = []
        self.logged = []
        values: dict[str, Any] = {}
        is_unmeasured = np.isnan(rows[:, -1])
        if is_unmeasured.any():
            rows = rows[~is_unmeasured]
        step, loss, count, norm, clipped, skipped = rows.T
        applied = skipped == 0
        counted = count > 0
        skipped_steps = [int(index) for index in step[~applied]]
        if len(rows):
            values["loss"] = self._weighted(loss, count, counted)
            values["targets"] = float(count.sum())
            if step[0] == 0 and counted[0]:
                values["first_step_loss"] = float(loss[0])
            if first_steps:
                values["starting_targets"] = float(count[np.isin(step, first_steps)].sum())
            values["grad_norm"] = float(norm.mean())
            values["grad_norm_max"] = float(norm.max())
            clip_fractions = clipped[applied & ~np.isnan(clipped)]
            if clip_fractions.size:
                values["clip_fraction"] = float(clip_fractions.mean())
            values["skipped"] = int(skipped.sum())
            if skipped_steps:
                if applied.any():
                    values["loss_applied"] = self._weighted(loss, count, counted & applied)
                values["skipped_steps"] = skipped_steps[:_SHOWN]
            finite = np.isfinite(loss) & counted
            if finite.any():
                largest = np.where(finite, loss, -math.inf).argmax()
                values["loss_max"] = float(loss[largest])
                values["loss_max_step"] = int(step[largest])
        for kind_and_name, table in logged.items():
            kind, _, name = kind_and_name.partition("/")
            if name in values:
                refuse_two_ways(name)
            values[name] = _reduced(kind, table, of_nothing=self.of_nothing)
        return values, skipped_steps

    def read_epoch(self, start: int, end: int) -> dict[str, float] | None:
        """Return the means over the epoch of the steps from `start` up to `end`, of steps that were
        applied, and its `targets`; None if its beginning is unknown. The rows stay for the next
        record. Waits for the device.
        """
        epoch = self.epoch
        if epoch is None or epoch.start != start:  # the totals are of an earlier epoch
            if not self.rows or self.rows[0][0] > start:
                return None
            epoch = EpochTotals(start)
        totals = self._epoch_totals(epoch, _table(self.rows), self.logged_table(), end=end)
        values = {}
        for kind_and_name, total in totals.items():
            _, _, name = kind_and_name.partition("/")
            values[name] = float(total.value_or(self.of_nothing))
        values["targets"] = float(totals[_LOSS].count)
        return values

    @staticmethod
    def _epoch_totals(
        epoch: EpochTotals,
        rows: NDArray[np.float64],
        logged: Mapping[str, Tensor],
        *,
        end: float = math.inf,
    ) -> dict[str, Mean]:
        step, loss, count, _, _, skipped = rows.T
        chosen = (step >= epoch.start) & (step < end) & (skipped == 0) & (count > 0)
        loss = loss[chosen]
        count = count[chosen]
        totals = dict(epoch.totals)
        before = totals.get(_LOSS, Mean(0.0, 0.0))
        totals[_LOSS] = before + Mean(float((loss * count).sum()), float(count.sum()))
        for name, table in logged.items():
            later = table[(table[:, 0] >= epoch.start) & (table[:, 0] < end)]
            if len(later):
                kind, _, _ = name.partition("/")
                totals[name] = _with(later, totals.get(name), kind=kind)
        return totals

    def _weighted(
        self, loss: NDArray[np.float64], count: NDArray[np.float64], chosen: NDArray[np.bool_]
    ) -> float:
        loss = loss[chosen]
        count = count[chosen]
        if not count.size:
            return self.of_nothing
        with np.errstate(invalid="ignore"):  # inf - inf: the record then holds NaN
            return float((loss * count).sum() / count.sum())

    def note_skipped(self, skipped: list[int], *, done: int) -> None:
        """Update `skipped_in_a_row` from the skipped steps of a record that ends after `done`
        steps.
        """
        for step in skipped:
            follows = self.skipped_in_a_row[-1:] == [step - 1]
            before = self.skipped_in_a_row if follows else []
            self.skipped_in_a_row = [*before, step]  # a checkpoint may hold the other list
        if self.skipped_in_a_row[-1:] != [done - 1]:
            self.skipped_in_a_row = []

    def collect(self, world: World) -> None:
        """Gather the logged values of all ranks on rank 0, in the order of steps and ranks.
        Collective.
        """
        if world.size == 1:
            return
        tables = {name: table.tolist() for name, table in self.logged_table().items()}
        entries: list[tuple[int, dict[str, Any]]] = []
        for tables_of_rank in world.gathered(tables):
            for name, rows in tables_of_rank.items():
                entries += _entries(name, rows)
        self.logged = []
        if world.is_main:
            self.logged = sorted(entries, key=lambda entry: entry[0])

    def table(self) -> Tensor:
        """Return the rows (steps, 6) as float64 on the host: step, loss, count, norm, clipped,
        skipped (NaN if not measured).
        """
        return torch.from_numpy(_table(self.rows))

    def logged_table(self) -> dict[str, Tensor]:
        """Return the user's values as float64 on the host, with the columns step, total and count.
        Their names are those in a checkpoint, such as "logged/NAME" for a mean and "max/NAME".
        """
        rows_by_name: dict[str, list[tuple[float, Any, Any]]] = {}
        for index, values in self.logged:
            for name, value in values.items():
                kind = "logged"
                mean = value
                if isinstance(value, Reduced):
                    kind = value.how
                    mean = Mean(value.number, 1)
                elif not isinstance(value, Mean):
                    mean = Mean(value, 1)
                rows = rows_by_name.setdefault(f"{kind}/{name}", [])
                rows.append((float(index), mean.total, mean.count))
        return {name: torch.from_numpy(_table(rows)) for name, rows in rows_by_name.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {"rows": self.table(), **self.logged_table()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the rows and logged values since the last record from a checkpoint's tensors."""
        self.rows = []
        for index, loss, count, norm, clipped, skipped in tensors["rows"]:
            if skipped.isnan():  # not measured
                self.rows.append((int(index), None, 0, None, None, None))
            else:
                self.rows.append((int(index), loss, count, norm, clipped, skipped))
        self.logged = []
        for name, table in tensors.items():
            if name != "rows":
                self.logged += _entries(name, table.tolist())

    def epoch_state(self) -> Epoch | None:
        """Return the totals of the current epoch for state.json; its other steps are in `tensors`."""
        if self.epoch is None:
            return None
        totals = {}
        for name, total in self.epoch.totals.items():
            totals[name] = [repr(float(total.total)), repr(float(total.count))]
        return {"start": self.epoch.start, "totals": totals}

    def load_epoch(self, state: Epoch | None) -> None:
        """Restore what `epoch_state` returned; None is the state of an older checkpoint."""
        self.epoch = None
        if state is not None:
            totals = {}
            for name, (total, count) in state["totals"].items():
                totals[name] = Mean(float(total), float(count))
            self.epoch = EpochTotals(state["start"], totals)


def _entries(kind_and_name: str, rows: Sequence[Sequence[float]]) -> list[tuple[int, Any]]:
    """Return the entries of `Meter.logged` with the rows of one table of `logged_table`."""
    kind, _, name = kind_and_name.partition("/")
    entries = []
    for index, total, count in rows:
        value = Mean(total, count) if kind == "logged" else Reduced(cast("Reduction", kind), total)
        entries.append((int(index), {name: value}))
    return entries


def _reduced(kind: str, table: Tensor, *, of_nothing: float) -> float:
    """Return the value of a record from the rows of a table of `logged_table`."""
    step, total, count = table.unbind(1)
    match kind:
        case "sum":
            return float(total.sum())
        case "max":
            return float(total.max())
        case "min":
            return float(total.min())
        case "last":
            return float(total[step.argmax()])  # the first row of the last step: the lowest rank
    return float(Mean(total.sum(), count.sum()).value_or(of_nothing))


def _with(table: Tensor, before: Mean | None, *, kind: str) -> Mean:
    """Return the total of an epoch's logged values with further rows of `logged_table`. The total
    of a sum, maximum or last value is this value, with a count of 1.
    """
    if kind == "logged":
        added = Mean(float(table[:, 1].sum()), float(table[:, 2].sum()))
        if before is None:
            return added
        return before + added
    value = _reduced(kind, table, of_nothing=math.nan)
    if before is None:
        return Mean(value, 1.0)
    both = torch.tensor([[0.0, float(before.total), 1.0], [1.0, value, 1.0]], dtype=torch.float64)
    return Mean(_reduced(kind, both, of_nothing=math.nan), 1.0)


def derived(
    functions: Mapping[str, Callable[[Mapping[str, float]], float]] | None,
    values: Mapping[str, float],
) -> dict[str, float]:
    """Return the `derived` values of a record, or an empty dictionary if the record has no loss.

    >>> (
    ...     derived({"double": lambda values: 2 * values["loss"]}, {"loss": 1.5}),
    ...     derived({"double": max}, {}),
    ... )
    ({'double': 3.0}, {})
    """
    if functions is None or "loss" not in values:
        return {}
    return {name: function(values) for name, function in functions.items()}


def _mean(values: Iterable[Tensor | None]) -> Tensor | None:
    fractions = [value.float() for value in values if value is not None]
    return torch.stack(fractions).mean() if fractions else None


def _table(rows: Sequence[Sequence[Tensor | float | None]]) -> NDArray[np.float64]:
    columns = len(rows[0]) if rows else _COLUMNS
    numbers = [math.nan if number is None else number for row in rows for number in row]
    table = np.array(read_numbers(numbers), dtype=np.float64)
    return table.reshape(len(rows), columns)
