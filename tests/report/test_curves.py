"""Curves in little memory: extremes, ends and means survive whatever the length; 1 second."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from surefoot.tools.report.curves import Curve, curve_of, smooth
from surefoot.tools.report.followed import FollowedRun
from surefoot.tools.report.series import ReportedRun, read_reported_run
from surefoot.tools.report.watched_run import no_files
from surefoot.tracking.run_records import RunRecords
from surefoot.tracking.table import Table
from written_runs import train


def curve(values: list[float], *, recent: int = 1000) -> Curve:
    table = Table(recent=recent, stretches=1000)
    for step, value in enumerate(values):
        table.append({"step": step, "value": value})
    return curve_of(table, "value")


@pytest.mark.parametrize("length", [1, 2, 599, 600, 601, 1200, 1201, 2001, 20_000])
def test_extremes_and_ends_of_a_curve_are_kept_whatever_its_length(length: int) -> None:
    generator = random.Random(length)
    values = [generator.gauss(0, 1) for _ in range(length)]
    values[generator.randrange(length)] = 1e6

    points = dict(curve(values).points())

    assert len(points) <= 2 * 600 + 2
    assert points == {step: values[step] for step in points}
    ends = {0, length - 1}
    extremes = {values.index(max(values)), values.index(min(values))}
    assert ends | extremes <= points.keys()


def test_a_short_curve_is_kept_as_it_is() -> None:
    values = [math.sin(step) for step in range(600)]
    assert curve(values).points() == list(enumerate(values))


@pytest.mark.parametrize("stretches", [1, 7, 40])
def test_fewer_points_can_be_asked_for_and_hold_the_extremes_too(stretches: int) -> None:
    values = [math.sin(step / 50) for step in range(5000)]
    points = curve(values).points(stretches)
    assert len(points) <= 2 * stretches + 2
    values_of_points = [value for _, value in points]
    assert max(values_of_points) == max(values)
    assert min(values_of_points) == min(values)


def test_the_mean_over_stretches_is_that_of_all_values() -> None:
    values = [float(step % 17) for step in range(3777)]
    means = curve(values).means()
    total = math.fsum(mean * count for _, mean, count in means)
    assert total == pytest.approx(math.fsum(values), rel=1e-12)
    assert sum(count for _, _, count in means) == len(values)


def test_what_is_not_finite_is_remembered_and_drawn_nowhere() -> None:
    some_finite = curve([1.0, math.nan, 3.0, math.inf, -math.inf])
    assert some_finite.points() == [(0, 1.0), (2, 3.0)]
    assert some_finite.strange == (1, 3, 4)
    assert curve([math.nan] * 3).points() == []


def test_the_best_of_equal_values_is_the_first() -> None:
    alternating = curve([2.0, 1.0] * 4000)
    assert alternating.best("min") == (1, 1.0)
    assert alternating.best("max") == (0, 2.0)


def test_smoothing_keeps_a_straight_line_straight_away_from_its_ends() -> None:
    points = smooth(curve([0.5 * step for step in range(600)]))
    for step, value in points[40:-40]:
        assert value == pytest.approx(0.5 * step, abs=1e-9)


def test_smoothing_weighs_each_stretch_by_its_values() -> None:
    generator = random.Random(0)
    values = [generator.gauss(5, 1) for _ in range(6000)]
    for _, value in smooth(curve(values)):
        assert abs(value - 5) < 0.5


@pytest.mark.parametrize("length", [700, 2500, 9000])
def test_a_curve_does_not_depend_on_how_many_records_stay_as_they_are(length: int) -> None:
    generator = random.Random(length)
    values = [float(generator.randrange(50)) for _ in range(length)]
    few_stay = curve(values, recent=100)
    all_stay = curve(values, recent=length)
    assert few_stay.points() == all_stay.points()
    assert few_stay.means() == all_stay.means()  # sums of whole numbers are exact in any order


def test_values_of_training_are_drawn_by_kind() -> None:
    records = RunRecords()
    for step in range(1, 4):
        record = train(step, lr=0.1, mine=1.0, samples=4, text="a")
        records.add(record | {"lr/critic": 0.2, "momentum": 0.5, "logged_rates": ["momentum"]})
        records.add({"kind": "eval", "step": step, "val/loss": 2.0, "val/text": "b"})
    run = ReportedRun(no_files(Path("run")), records)
    assert {"loss", "lr", "lr/critic"} <= run.train.keys()
    assert run.train.keys().isdisjoint({"samples", "momentum", "mine"})
    assert run.users.keys() == {"mine", "momentum"}
    assert run.scores.keys() == {"val/loss"}


def test_a_page_that_follows_a_run_shows_no_record_of_a_deleted_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    followed = FollowedRun(tmp_path)
    assert read_reported_run(tmp_path, followed=followed).records.count == 1
    (tmp_path / "metrics.jsonl").unlink()
    assert read_reported_run(tmp_path, followed=followed).records.count == 0
