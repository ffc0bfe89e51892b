"""What a schedule comes to over a run, against closed forms; 1 second."""

from __future__ import annotations

import math

import pytest

import surefoot as sf
from in_one import in_one
from surefoot.config.durations import Length
from surefoot.schedules.curves import SHAPES
from surefoot.schedules.joined import Joined
from surefoot.schedules.lr_schedule import Schedule
from surefoot.tools.plan import schedule_plot
from surefoot.tools.plan.schedule_plot import Trace, table, trace_schedules


def of_steps(steps: int) -> Length:
    return Length(steps=steps, samples_per_epoch=1, batch_size=1)


def trace(schedule: Schedule | Joined, steps: int = 1000) -> Trace:
    (traced,) = trace_schedules({"it": schedule}, of_steps(steps))
    return traced


@pytest.mark.parametrize(
    ("schedule", "mean"),
    [
        (sf.schedules.constant(), 1.0),
        (sf.schedules.linear(), (1000 + 1) / 2 / 1000),  # 1, 0.999, ..., 0.001
        (sf.schedules.linear(min_lr_ratio=0.5), 0.75),
        # half a cosine is odd about its middle, as a line is
        (sf.schedules.cosine(), (1000 + 1) / 2 / 1000),
        (sf.schedules.constant(99), (99 * 50 / 100 + 901) / 1000),  # 0.01, 0.02, ..., 0.99
        (sf.schedules.multistep(milestones=("50%",), gamma=0.25), 0.625),
        (
            sf.schedules.join(sf.schedules.constant(), sf.schedules.linear(min_lr_ratio=0.5)),
            (500 + 375) / 1000,
        ),
    ],
)
def test_the_mean_factor_is_the_closed_form(schedule: Schedule | Joined, mean: float) -> None:
    assert trace(schedule).mean == pytest.approx(mean, rel=1e-12)


@in_one
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [7, 200])
def test_peak_lowest_and_mean_are_those_of_every_factor_of_the_run(shape: str, steps: int) -> None:
    schedule = Schedule(shape, warmup=2)  # type: ignore[arg-type]  # the shapes are those that there are
    factor = schedule.factors(of_steps(steps))
    factors = [factor(step) for step in range(steps)]

    traced = trace(schedule, steps)

    peak_step = factors.index(max(factors))
    later = factors[peak_step:]
    lowest_step = peak_step + later.index(min(later))
    assert traced.peak == (peak_step, max(factors))
    assert traced.lowest == (lowest_step, min(later))
    assert traced.mean == pytest.approx(math.fsum(factors) / steps, rel=1e-12)
    assert traced.warmup == 2


def test_of_a_long_run_some_steps_are_looked_at_and_the_marks_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = sf.schedules.cosine("3%", min_lr_ratio=0.1)
    whole = trace(schedule, 99_991)
    monkeypatch.setattr(schedule_plot, "LOOKED_AT", 1000)
    few = trace(schedule, 99_991)
    assert len(few.steps) <= 1002 < len(whole.steps)
    assert (few.peak, few.lowest, few.warmup) == (whole.peak, whole.lowest, whole.warmup)
    assert few.mean == pytest.approx(whole.mean, rel=2e-3)


def test_a_table_has_a_row_for_each_schedule_in_rates_where_the_base_is_known() -> None:
    schedules = {
        "flat": sf.schedules.constant(),
        "linear": sf.schedules.linear(10, min_lr_ratio=0.5),
    }
    traces = trace_schedules(schedules, of_steps(100))

    rows = [" ".join(line.split()) for line in table(traces, rate=0.02).splitlines()]

    head, flat, linear, *_ = rows
    assert head == "schedule warm-up ends peak lowest mean factor"
    assert flat == "flat none 0.02, step 0 0.02, step 0 1.000"
    linear, _, mean = linear.rpartition(" ")
    assert linear == "linear step 10 0.02, step 10 0.01, step 99"
    assert float(mean) == pytest.approx(traces[1].mean, abs=5e-4)
    assert "1, step 0" in table(traces)  # factors, without a base


def test_all_schedules_that_do_not_fit_are_named() -> None:
    schedules = {
        "one": sf.schedules.constant(30),
        "two": sf.schedules.linear(),
        "three": sf.schedules.wsd(15, cooldown=10),
    }
    with pytest.raises(sf.ConfigError) as refused:
        trace_schedules(schedules, of_steps(20))
    assert [problem.places for problem in refused.value.problems] == [("one",), ("three",)]
