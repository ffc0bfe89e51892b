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


def fill_table(
    records: list[dict[str, Any]], *, recent: int, stretches: int, **places: str
) -> Table:
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
    both_have_x = [{"step": 1, "x": 1.5}, {"step": 2, "x": value}]
    np.testing.assert_array_equal(columns_of(both_have_x)["x"], [1.5, number])
    one_has_none = [*both_have_x, {"step": 3}]
    np.testing.assert_array_equal(columns_of(one_has_none)["x"], [1.5, number, math.nan])


def random_records(random: Random, count: int) -> list[dict[str, Any]]:
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


def has_finite(record: dict[str, Any], name: str) -> bool:
    value = record.get(name)
    return type(value) in (int, float) and math.isfinite(value)


def expected_point(records: list[dict[str, Any]], name: str, kind: str) -> tuple[int, float]:
    """The step and the value of one stretch of these records."""
    finite = [record for record in records if has_finite(record, name)]
    end = records[-1]["step"]
    if not finite:
        return end, math.nan
    values = [float(record[name]) for record in finite]
    if kind == "highest":
        record = finite[values.index(max(values))]  # the first one
        if name == "largest":
            return record.get("largest_at", record["step"]), max(values)
        return record["step"], max(values)
    if kind == "lowest":
        record = finite[values.index(min(values))]
        return record["step"], min(values)
    if kind == "last":
        return end, values[-1]
    if kind == "total":
        return end, sum(values)
    assert kind == "mean"
    return end, sum(values) / len(values)


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
    records = random_records(Random(seed), count)
    table = fill_table(records, recent=10, stretches=8, largest="largest_at")

    (steps,), (values,) = table.values([name], kind)  # type: ignore[arg-type]

    size = table.size
    stretch_count = table.stretches.shape[2]
    assert stretch_count <= 8
    assert len(steps) - stretch_count < 10 + size
    some_are_merged = len(table.steps) < table.count
    assert some_are_merged == (size > 1)
    for index in range(stretch_count):
        stretch = records[index * size : (index + 1) * size]
        step, value = expected_point(stretch, name, kind)
        assert steps[index] == step
        assert values[index] == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("at_once", [1, 7, 150])
def test_a_table_does_not_depend_on_how_many_records_are_added_at_once(
    seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = random_records(Random(seed), 150)
    expected = fill_table(records, recent=10, stretches=8)
    monkeypatch.setattr(tables, "_WAITING", at_once)
    table = fill_table(records, recent=10, stretches=8)
    assert table.names == expected.names
    assert table.state() == expected.state()
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(table.arrays()[name], array)


def test_totals_ends_and_extrema_are_those_of_all_records() -> None:
    records = [{"step": step, "x": float(step % 17)} for step in range(1, 3778)]
    records[1234]["x"] = 99.0
    table = fill_table(records, recent=50, stretches=40)
    assert table.total("x") == sum(record["x"] for record in records)
    assert table.last("x") == records[-1]["x"]
    _, values = table.values(["x"], "highest")
    assert values.max() == 99.0
    assert table.steps[-1] == 3777
    assert table.count == 3777
    assert len(table.steps) < 40 + 50 + 128


def test_the_first_steps_with_values_that_are_not_finite_are_kept() -> None:
    values = [1.0, math.nan] * 150
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    table = fill_table(records, recent=5, stretches=4)
    assert table.strange_steps("x") == list(range(1, 100, 2))


def test_an_empty_table_has_no_rows() -> None:
    table = Table(recent=5, stretches=4)
    assert table.names == []
    assert len(table.steps) == 0
    assert table.total("x") == 0.0
    assert math.isnan(table.last("x"))
    assert table.curve("x", most=3).shape == (12, 0)


def test_a_restored_table_takes_records_as_the_one_before() -> None:
    records = random_records(Random(0), 150)
    table = fill_table(records[:90], recent=10, stretches=8)
    restored = Table(recent=10, stretches=8)
    restored.restore(table.arrays(), table.state())

    for record in records[90:]:
        table.append(record)
        restored.append(record)

    np.testing.assert_array_equal(
        restored.values(restored.names, "last"), table.values(table.names, "last")
    )
    assert restored.state() == table.state()


def test_of_many_measured_steps_the_largest_value_of_neighbors_is_kept() -> None:
    norms = dict.fromkeys(range(1, 1000), 1.0) | {401: 7.0, 17: math.inf}
    records = RunRecords()
    for step, norm in norms.items():
        record = {"kind": "layer_stats", "step": step, "measured_step": step - 1}
        records.add(record | {"grad_norm": {"up": norm}})

    grid = records.layers.grid(most=240)

    assert grid.shape[2] == 125  # eight steps each
    row = records.layers.row_of["grad_norm/up"]
    assert np.flatnonzero(grid[tables.HIGH, row] == 7.0).tolist() == [400 // 8]
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
    expected_steps = [10, 20, 30]
    if (name, kind) == ("largest", "highest"):
        expected_steps = [7, 20, 30]
    table = fill_table(records, recent=10, stretches=4, largest="largest_at")

    steps, values = table.values([name], kind)  # type: ignore[arg-type]

    assert steps.tolist() == [expected_steps]
    expected_values = [record.get(name, math.nan) for record in records]
    np.testing.assert_array_equal(values, [expected_values])


@pytest.mark.parametrize("recent", [2, 10])
def test_a_total_is_that_of_the_finite_values(recent: int) -> None:
    values = [1.0, math.nan, 2.0, None, 4.0, math.inf, "text", 8.0, -math.inf, 16.0]
    records = [{"step": step, "x": value} for step, value in enumerate(values)]
    records.append({"step": len(values)})
    assert fill_table(records, recent=recent, stretches=4).total("x") == 31.0


def test_names_beyond_the_most_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_NAMES", 3)  # with that of the step
    records = [{"step": step, "a": 1.0, "b": 2.0, f"c{step}": 3.0} for step in range(20)]
    table = fill_table(records, recent=5, stretches=4)
    assert table.names == ["a", "b"]
    assert table.total("a") == 20.0
    assert table.total("b") == 40.0
    assert table.total("c1") == 0.0


def test_each_measured_step_of_a_grid_is_that_of_its_records() -> None:
    records = [{"step": 3 * step, "x": float(step), "y": 1.0} for step in range(20)]
    table = fill_table(records, recent=50, stretches=8)
    grid = table.grid(most=50)
    expected_steps = [record["step"] for record in records]
    for statistic in (tables.FIRST_AT, tables.LOW_AT, tables.HIGH_AT, tables.LAST_AT):
        for name in ("x", "y"):
            steps = grid[statistic, table.row_of[name]]
            assert steps.tolist() == expected_steps
