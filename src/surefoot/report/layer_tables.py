"""What the watched steps tell of each layer, as tables for heat maps: of many steps neighbours become one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.report.heatmap import HeatMap, grouped, heat_map
from surefoot.tracking.record import Record

COLUMNS = 120
_KINDS = ("gradient_norm", "weight_norm", "update_norm", "saturated", "activation_norm")
Table = dict[str, dict[str, float]]  # kind -> name -> value


class Layers:
    """The "layers" records of a run: at most twice `COLUMNS` of them, each the largest of its neighbours' values."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.tables: list[Table] = []
        self.size = 1  # watched steps in each column but the last
        self.in_last = 0
        self.never_updated: list[str] = []

    def add(self, record: Record) -> None:
        """Take one record."""
        table = {kind: _numbers(record.get(kind)) for kind in _KINDS}
        weights, updates = table.pop("weight_norm"), table.pop("update_norm")
        table["ratio"] = {
            name: update / weights[name] for name, update in updates.items() if weights.get(name, 0.0) > 0
        }
        step = record.get("watched_step", record["step"])
        never = record.get("never_updated")
        self.never_updated = [str(name) for name in never] if isinstance(never, list) else []
        if self.tables and self.in_last < self.size:
            self.tables[-1] = _larger(self.tables[-1], table)
            self.in_last += 1
            return
        if len(self.tables) == 2 * COLUMNS:
            self.tables = [_larger(one, other) for one, other in zip(self.tables[::2], self.tables[1::2], strict=True)]
            self.steps = self.steps[::2]
            self.size *= 2
        self.steps.append(step if isinstance(step, int) else record["step"])
        self.tables.append(table)
        self.in_last = 1

    def maps(self) -> list[HeatMap]:
        """Gradient norm, update to weight, and what is saturated, as far as they were recorded."""
        several = f" Each column is the largest of {self.size} watched steps." if self.size > 1 else ""
        found = [
            heat_map(
                "gradient_norm",
                "Gradient norm of each layer",
                self._table("gradient_norm"),
                self.steps,
                note=f"Before clipping. Light is large.{several}",
            ),
            heat_map(
                "ratio",
                "Update to weight",
                self._table("ratio"),
                self.steps,
                note=f"How large a step is against what it changes: about 0.001 is usual.{several}",
            ),
        ]
        if any(value > 0 for table in self.tables for value in table["saturated"].values()):
            found.append(
                heat_map(
                    "saturated",
                    "Outputs at their flat end",
                    self._table("saturated"),
                    self.steps,
                    logarithmic=False,
                    unit="fraction",
                    note=f"Of activations that saturate or rectify; 100 % passes no gradient.{several}",
                )
            )
        return [one for one in found if one is not None]

    def _table(self, kind: str) -> dict[str, Sequence[float | None]]:
        names = list(dict.fromkeys(name for table in self.tables for name in table[kind]))
        together = _norm if kind == "gradient_norm" else _largest
        rows: dict[str, Sequence[float | None]] = {}
        for group, members in grouped(names).items():
            columns = []
            for table in self.tables:
                held = [table[kind][name] for name in members if name in table[kind]]
                columns.append(together(held) if held else None)
            rows[group] = columns
        return rows


def _numbers(held: Any) -> dict[str, float]:
    if not isinstance(held, dict):
        return {}
    return {
        name: float(value)
        for name, value in held.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _larger(one: Table, other: Table) -> Table:
    return {
        kind: {
            name: _largest([held[name] for held in (one[kind], other[kind]) if name in held])
            for name in {**one[kind], **other[kind]}
        }
        for kind in one
    }


def _largest(values: Sequence[float]) -> float:
    strange = [value for value in values if not math.isfinite(value)]
    return strange[0] if strange else max(values)


def _norm(values: Sequence[float]) -> float:
    """The norm of several parameters together."""
    return math.hypot(*values)
