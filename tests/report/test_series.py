"""Curves in little memory: extremes, ends and means survive whatever the length; 1 second."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from surefoot.diagnose.reading import RecordCollector
from surefoot.report.curves import Curve, smooth
from surefoot.report.series import Recorded, read_reported_run
from surefoot.report.thinned import ThinnedRun
from surefoot.tracking.columns import Columns, in_columns
from surefoot.tracking.jsonl import line
from surefoot.tracking.record import Record
from surefoot.tracking.run_reader import read_records


def curve(values: list[float], stretches: int = 300) -> Curve:
    made = Curve(stretches)
    for step, value in enumerate(values):
        made.add(step, value)
    return made


@pytest.mark.parametrize("length", [1, 2, 599, 600, 601, 1200, 1201, 20_000])
def test_extremes_and_ends_of_a_curve_are_kept_whatever_its_length(length: int) -> None:
    generator = random.Random(length)
    values = [generator.gauss(0, 1) for _ in range(length)]
    values[generator.randrange(length)] = 1e6
    points = dict(curve(values).points())
    assert len(points) <= 2 * 600 + 2
    assert all(values[step] == value for step, value in points.items())
    assert {0, length - 1, values.index(max(values)), values.index(min(values))} <= points.keys()


def test_a_short_curve_is_kept_as_it_is() -> None:
    values = [math.sin(step) for step in range(600)]
    assert curve(values).points() == list(enumerate(values))


@pytest.mark.parametrize("stretches", [1, 7, 40])
def test_fewer_points_can_be_asked_for_and_hold_the_extremes_too(stretches: int) -> None:
    values = [math.sin(step / 50) for step in range(5000)]
    points = curve(values).points(stretches)
    assert len(points) <= 2 * stretches + 2
    assert {max(values), min(values)} <= {value for _, value in points}


def test_the_mean_over_stretches_is_that_of_all_values() -> None:
    values = [float(step % 17) for step in range(3777)]
    means = curve(values).means()
    assert math.fsum(value * count for _, value, count in means) == pytest.approx(
        math.fsum(values), rel=1e-12
    )
    assert sum(count for *_, count in means) == len(values)


def test_what_is_not_finite_is_remembered_and_drawn_nowhere() -> None:
    made = curve([1.0, math.nan, 3.0, math.inf, -math.inf])
    assert made.points() == [(0, 1.0), (2, 3.0)]
    assert made.strange == [1, 3, 4]


@pytest.mark.parametrize("at_once", [True, False])
def test_of_many_values_that_are_not_finite_the_first_steps_are_kept(at_once: bool) -> None:
    made = Curve()
    for step in range(0, 300, 100):
        steps = list(range(step, step + 100))
        if at_once:
            made.extend(steps, [math.nan] * 100)
        else:
            for each in steps:
                made.add(each, math.nan)
    assert (made.strange, made.count, made.points()) == (list(range(50)), 0, [])


def test_the_first_of_equal_extremes_is_the_one_that_is_told() -> None:
    made = curve([2.0, 1.0] * 4000)
    assert made.best("min") == (1, 1.0)
    assert made.best("max") == (0, 2.0)


def test_smoothing_keeps_a_straight_line_straight_away_from_its_ends() -> None:
    found = smooth(curve([0.5 * step for step in range(600)]))
    assert all(value == pytest.approx(0.5 * step, abs=1e-9) for step, value in found[40:-40])


def test_smoothing_weighs_each_stretch_by_its_values() -> None:
    generator = random.Random(0)
    values = [generator.gauss(5, 1) for _ in range(6000)]
    found = [value for _, value in smooth(curve(values))]
    assert max(abs(value - 5) for value in found) < 0.5


@pytest.mark.parametrize("part", [1, 63, 64, 1000, 7777])
def test_many_values_at_once_are_those_added_one_by_one(part: int) -> None:
    generator = random.Random(part)
    values = [float(generator.randrange(50)) for _ in range(20_000)]
    values[12_345] = math.nan
    made, expected = Curve(40), curve(values, 40)
    for start in range(0, len(values), part):
        made.extend(range(start, min(start + part, len(values))), values[start : start + part])
    assert made.to_json() == expected.to_json()  # sums of whole numbers are exact in any order


def test_a_file_read_in_columns_has_the_curves_and_history_of_its_records(tmp_path: Path) -> None:
    generator, texts = random.Random(0), list[str]()
    for step in range(1, 9001):
        record = {
            "kind": "train",
            "step": step,
            "loss": generator.gauss(2, 1),
            "targets": 640.0,
            "skipped": 0,
        }
        record |= {
            "grad_norm_max": generator.random(),
            "training_s": generator.random(),
            "samples": step % 7,
        }
        record |= (
            {"mine": -(10.0 ** -(step % 9)), "loss_max": 3.0, "loss_max_step": step}
            if step > 1000
            else {}
        )
        record |= {"starting_targets": 1.5, "mine": None} if step == 1 or step % 3001 == 0 else {}
        record |= (
            {"skipped": 1, "skipped_steps": [step], "loss_applied": 2.0} if step % 2003 == 0 else {}
        )
        record |= {"loss": math.nan} if step % 4001 == 0 else {}
        record |= {"samples": 2.5, "also": True} if step == 5000 else {}
        texts.append(line(record | ({"samples": 1 << 64} if step == 5500 else {})))
        texts += (
            [line({"kind": "eval", "step": step, "val/loss": 1 / step})] if step % 50 == 0 else []
        )
        texts += (
            [line({"kind": "event", "step": step, "event": "stopped", "training_s": 1.0})]
            if step == 7000
            else []
        )
        texts += [line({"kind": "resume", "step": 6800})] if step == 7000 else []
        texts += (
            [line({"kind": "event", "step": step, "event": "finished"})] if step == 9000 else []
        )
        texts += [texts[-1][:-9]] if step == 3500 else []  # damaged
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    one_by_one, expected, parts = Recorded(), RecordCollector(times=1), 0
    for record in read_records(tmp_path):
        one_by_one.add(record)
        expected.add(record)
    collected = RecordCollector(times=1)

    def collect(part: Columns | list[Record]) -> None:
        nonlocal parts
        parts += isinstance(part, Columns)
        collected.add_part(part)

    recorded = read_reported_run(tmp_path, also=collect).recorded
    assert parts >= 4
    for kind in ("train", "users", "scores"):
        curves = [
            {n: c.to_json() for n, c in getattr(each, kind).items()}
            for each in (recorded, one_by_one)
        ]
        assert curves[0] == curves[1]
        vars(recorded)[kind] = vars(one_by_one)[kind] = None
    assert vars(recorded) | {"layers": None} == vars(one_by_one) | {"layers": None}
    kept, kept_one_by_one = collected.by_kind(), expected.by_kind()
    assert kept.keys() == kept_one_by_one.keys()
    for kind, of_kind in kept.items():
        assert list(map(numbers_of, of_kind)) == list(map(numbers_of, kept_one_by_one[kind]))


def numbers_of(record: dict[str, Any]) -> dict[str, Any]:
    """A record of training without values that are no numbers; others as they are."""
    if record["kind"] != "train":
        return record
    return {
        name: value
        for name, value in record.items()
        if type(value) in (int, float) and not math.isnan(value)
    }


def test_many_records_at_once_are_those_added_one_by_one() -> None:
    generator, records = random.Random(0), list[dict[str, Any]]()
    for step in range(1, 2001):
        record = {
            "kind": "train",
            "step": step,
            "loss": float(step % 9),
            "training_s": 0.25,
            "mine": step,
        }
        record |= generator.choice(
            [{}, {"targets": 4.0}, {"lr": None}, {"mine": "text"}, {"starting_targets": 1.0}]
        )
        records.append(
            record
            | (
                {"skipped": 1, "skipped_steps": [step], "loss_applied": 2.0}
                if step % 97 == 0
                else {}
            )
        )
        records += [{"kind": "eval", "step": step, "val/loss": 1.0}] if step % 50 == 0 else []
        records += [{"kind": "resume", "step": step}] if step % 400 == 0 else []
    one_by_one, at_once = Recorded(), Recorded()
    for record in records:
        one_by_one.add(record)
    for start in range(0, len(records), 333):
        for part in in_columns(
            [("".join(f"{line(each)}\n" for each in records[start : start + 333]).encode(), None)]
        ):
            at_once.add_part(part)
    for kind in ("train", "users", "scores"):
        curves = [
            {n: c.to_json() for n, c in getattr(each, kind).items()}
            for each in (at_once, one_by_one)
        ]
        assert curves[0] == curves[1]
        vars(at_once)[kind] = vars(one_by_one)[kind] = None
    assert vars(at_once) | {"layers": None} == vars(one_by_one) | {"layers": None}


def test_a_page_that_follows_a_run_shows_no_record_of_a_deleted_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    following = ThinnedRun(tmp_path, is_full=True)
    assert read_reported_run(tmp_path, following=following).recorded.count == 1
    (tmp_path / "metrics.jsonl").unlink()
    assert read_reported_run(tmp_path, following=following).recorded.count == 0
