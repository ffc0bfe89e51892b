"""A table of records: numbers and missing ones, and stretches that keep sums, extrema and ends, and
do not depend on how many records are added at once; 1 second.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest

from surefoot.tracking import table as tables
from surefoot.tracking.run_records import RunRecords
from surefoot.tracking.table import Table, columns_of


def filled(records: list[dict[str, Any]], *, recent: int, stretches: int, **places: str) -> Table:
    table = Table(recent=recent, stretches=stretches, places=places)
    for record in records:
        table.append(record)
    return table


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (2.5, 2.5),
        (1 << 2000, math.inf),
        (math.nan, math.inf),
        (-math.inf, -math.inf),
        (None, math.inf),
        (True, math.nan),
        ("2.5", math.nan),
        ([1], math.nan),
        ({"a": 1}, math.nan),
    ],
)
def test_numbers_are_kept_and_infinity_stands_for_what_is_not_finite(
    value: Any, number: float
) -> None:
    records = [{"step": 1, "x": 1.5}, {"step": 2, "x": value}, {"step": 3}]
    np.testing.assert_array_equal(columns_of(records)["x"], [1.5, number, math.nan])
    alike = [{"step": 1, "x": 1.5}, {"step": 2, "x": value}]
    np.testing.assert_array_equal(columns_of(alike)["x"], [1.5, number])


def mixed(random: Random, count: int) -> list[dict[str, Any]]:
    """Records of which some lack values, or have values that are not finite or no numbers."""
    records = []
    for step in range(1, count + 1):
        record: dict[str, Any] = {"kind": "train", "step": step, "x": float(random.randrange(9))}
        record["largest"] = float(random.randrange(5))
        record["largest_at"] = step * 10
        if step > count // 3:
            record["late"] = step / 4
        if random.random() < 0.2:
            record.pop(random.choice(["x", "largest", "largest_at"]))
        if random.random() < 0.1:
            record["x"] = random.choice([math.nan, math.inf, None, "text", True, 1 << 70])
        records.append(record)
    return records


def expected(records: list[dict[str, Any]], name: str, kind: str) -> list[Any]:
    """What one stretch of these records says: step and value."""
    values = [
        (record["step"], float(record[name]), record)
        for record in records
        if type(record.get(name)) in (int, float) and math.isfinite(record[name])
    ]
    end = records[-1]["step"]
    if not values:
        return [end, None]
    numbers = [value for _, value, _ in values]
    if kind == "highest":
        _, value, record = max(values, key=lambda each: each[1])  # the first one
        return [
            record.get("largest_at", record["step"]) if name == "largest" else record["step"],
            value,
        ]
    if kind == "lowest":
        step, value, _ = min(values, key=lambda each: each[1])
        return [step, value]
    of_kind = {"last": numbers[-1], "total": sum(numbers), "mean": sum(numbers) / len(numbers)}
    return [end, of_kind[kind]]


@pytest.mark.parametrize("count", [3, 20, 41, 150])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x", "mean"),
        ("x", "total"),
        ("x", "last"),
        ("x", "lowest"),
        ("largest", "highest"),
        ("late", "last"),
    ],
)
def test_stretches_say_what_their_records_say(seed: int, count: int, name: str, kind: str) -> None:
    records = mixed(Random(seed), count)
    table = filled(records, recent=10, stretches=8, largest="largest_at")
    folded = table.count - len(table.steps) + 1  # at least one stretch is merged if above 1
    steps, values = table.values([name], kind)  # type: ignore[arg-type]
    size = table.size
    old = table.stretches.shape[2]
    assert old <= 8
    assert len(steps[0]) - old < 10 + size
    assert (folded > 1) == (size > 1)
    found = [
        [int(step), None if math.isnan(value) else value]
        for step, value in zip(steps[0, :old], values[0, :old], strict=True)
    ]
    parts = [records[index * size : (index + 1) * size] for index in range(old)]
    assert found == [pytest.approx(expected(part, name, kind)) for part in parts]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at_once", [1, 7, 150])
def test_a_table_does_not_depend_on_how_many_records_are_added_at_once(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = mixed(Random(seed), 150)
    whole = filled(records, recent=10, stretches=8)
    monkeypatch.setattr(tables, "_WAITING", at_once)
    parts = filled(records, recent=10, stretches=8)
    assert parts.names == whole.names
    assert parts.state() == whole.state()
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(parts.arrays()[name], array)


def test_totals_ends_and_extrema_are_those_of_all_records() -> None:
    records = [{"step": step, "x": float(step % 17)} for step in range(1, 3778)]
    records[1234]["x"] = 99.0
    table = filled(records, recent=50, stretches=40)
    assert table.total("x") == sum(record["x"] for record in records)
    assert table.last("x") == records[-1]["x"]
    _, values = table.values(["x"], "highest")
    assert values.max() == 99.0
    assert (table.steps[-1], table.count, len(table.steps) < 40 + 50 + 128) == (3777, 3777, True)


def test_the_first_steps_with_values_that_are_not_finite_are_kept() -> None:
    records = [{"step": step, "x": math.nan if step % 2 else 1.0} for step in range(300)]
    assert filled(records, recent=5, stretches=4).strange_steps("x") == list(range(1, 100, 2))


def test_an_empty_table_has_no_rows() -> None:
    table = Table(recent=5, stretches=4)
    assert (table.names, len(table.steps), table.total("x")) == ([], 0, 0.0)
    assert math.isnan(table.last("x"))
    assert table.curve("x", most=3).shape == (12, 0)


def test_a_table_is_restored_and_goes_on_from_its_arrays() -> None:
    records = mixed(Random(0), 150)
    first = filled(records[:90], recent=10, stretches=8)
    again = Table(recent=10, stretches=8)
    again.restore(first.arrays(), first.state())
    for table in (first, again):
        for record in records[90:]:
            table.append(record)
    np.testing.assert_array_equal(
        again.values(again.names, "last"), first.values(first.names, "last")
    )
    assert again.state() == first.state()


def test_of_many_measured_steps_the_largest_value_of_neighbors_is_kept() -> None:
    records = RunRecords()
    for step in range(1, 1000):
        norm = {"up": 7.0 if step == 401 else math.inf if step == 17 else 1.0}
        records.add(
            {"kind": "layer_stats", "step": step, "measured_step": step - 1, "grad_norm": norm}
        )
    grid = records.layers.grid(most=240)
    assert grid.shape[2] == 125
    row = records.layers.row_of["grad_norm/up"]
    assert grid[tables.HIGH, row].tolist().count(7.0) == 1
    assert grid[tables.HIGH, row, 400 // 8] == 7.0
    assert np.flatnonzero(grid[tables.STRANGE, row]).tolist() == [16 // 8]


@pytest.mark.parametrize("name", ["x", "largest"])
@pytest.mark.parametrize("kind", ["last", "mean", "total", "lowest", "highest"])
def test_recent_records_have_their_own_steps_and_the_largest_value_its_place(
    name: str, kind: str
) -> None:
    records = [
        {"step": 10, "x": 1.0, "largest": 3.0, "largest_at": 7},
        {"step": 20, "x": 2.0, "largest": 4.0},
        {"step": 30, "x": 3.0},
    ]
    table = filled(records, recent=10, stretches=4, largest="largest_at")
    steps, values = table.values([name], kind)  # type: ignore[arg-type]
    at_places = name == "largest" and kind == "highest"
    assert steps.tolist() == [[7 if at_places else 10, 20, 30]]
    numbers = [record.get(name, math.nan) for record in records]
    np.testing.assert_array_equal(values, [numbers])


@pytest.mark.parametrize("recent", [2, 10])
def test_a_total_is_that_of_the_finite_values(recent: int) -> None:
    values = [1.0, math.nan, 2.0, None, 4.0, math.inf, "text", 8.0, -math.inf, 16.0]
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    records.append({"step": len(values)})
    assert filled(records, recent=recent, stretches=4).total("x") == 31.0


def test_names_beyond_the_most_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_NAMES", 3)  # with that of the step
    records = [{"step": step, "a": 1.0, "b": 2.0, f"c{step}": 3.0} for step in range(20)]
    table = filled(records, recent=5, stretches=4)
    assert table.names == ["a", "b"]
    assert [table.total(name) for name in ("a", "b", "c1")] == [20.0, 40.0, 0.0]


def test_each_measured_step_of_a_grid_is_that_of_its_records() -> None:
    records = [{"step": 3 * step, "x": float(step), "y": 1.0} for step in range(20)]
    table = filled(records, recent=50, stretches=8)
    grid = table.grid(most=50)
    rows = [table.row_of[name] for name in ("x", "y")]
    for statistic in (tables.FIRST_AT, tables.LOW_AT, tables.HIGH_AT, tables.LAST_AT):
        steps = grid[statistic, rows]
        assert steps.tolist() == 2 * [[record["step"] for record in records]]
