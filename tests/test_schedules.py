"""Schedules: values at 0, in warm-up, in the middle, at the end and beyond, against torch; 1 second."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.durations import Length
from surefoot.errors import ConfigError
from surefoot.schedules import Schedule, constant, linear, warmup_cosine

STEPS = 40
SHAPES = ("constant", "linear", "cosine")


def length(steps=STEPS):
    return Length(steps=steps, samples_per_epoch=100, batch_size=10)


def factors(schedule, steps=STEPS, until=None):
    factor = schedule.factors(length(steps))
    return [factor(step) for step in range(steps if until is None else until)]


def torch_factors(make, steps=STEPS):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 7, STEPS - 1])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_full_rate_is_used_exactly_once_and_first_after_warmup(shape, warmup, floor):
    found = factors(Schedule(shape, warmup=warmup, floor=0.0 if shape == "constant" else floor))

    assert found[warmup] == 1.0
    assert all(factor < 1.0 for factor in found[:warmup])
    assert shape == "constant" or all(factor < 1.0 for factor in found[warmup + 1 :])


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_rises_in_equal_parts_and_wastes_no_step(shape):
    assert factors(Schedule(shape, warmup=4))[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]


@settings(deadline=None)  # the machine may be busy
@given(
    shape=st.sampled_from(("linear", "cosine")),
    steps=st.integers(1, 200),
    share=st.floats(0, 0.999),
    floor=st.floats(0, 1),
)
def test_it_never_climbs_after_warmup_and_never_leaves_its_bounds(shape, steps, share, floor):
    warmup = int(share * steps)
    found = factors(Schedule(shape, warmup=warmup, floor=floor), steps, until=3 * steps)

    assert all(later <= earlier for earlier, later in zip(found[warmup:], found[warmup + 1 :], strict=False))
    assert all(0.0 < factor <= 1.0 for factor in found[:steps])
    assert all(factor == floor for factor in found[steps:])


@pytest.mark.parametrize("make", [linear, warmup_cosine])
def test_a_floor_above_zero_is_reached_on_the_last_step(make):
    assert factors(make(3, floor=0.1))[-1] == 0.1
    assert factors(make(3, floor=0.1))[-2] > 0.1


@pytest.mark.parametrize("make", [linear, warmup_cosine])
def test_a_floor_of_zero_is_reached_one_step_after_the_last(make):
    found = factors(make(3), until=STEPS + 5)

    assert found[STEPS - 1] > 0.0
    assert found[STEPS:] == [0.0] * 5


def test_cosine_is_half_way_down_in_the_middle():
    assert factors(warmup_cosine(0), 40)[20] == pytest.approx(0.5)
    assert factors(warmup_cosine(0, floor=0.2), 41)[20] == pytest.approx(0.6)


def test_cosine_is_torch_s():
    expected = torch_factors(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS))

    assert factors(warmup_cosine()) == pytest.approx(expected, abs=1e-12)


def test_cosine_with_a_floor_is_torch_s_over_one_step_less():
    expected = torch_factors(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 1, eta_min=0.1)
    )

    assert factors(warmup_cosine(floor=0.1)) == pytest.approx(expected, abs=1e-12)


def test_linear_is_torch_s():
    expected = torch_factors(
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=STEPS - 1)
    )

    assert factors(linear(floor=0.25)) == pytest.approx(expected, abs=1e-12)


def test_warmup_is_torch_s_linear():
    expected = torch_factors(lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 8, 1.0, total_iters=7))

    assert factors(constant(7)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("make", [constant, linear, warmup_cosine])
@pytest.mark.parametrize("warmup", [30, 1000, "30 steps", "100%", "3 epochs"])
def test_warmup_that_does_not_end_within_the_run_is_refused_naming_both(make, warmup):
    with pytest.raises(ConfigError, match=r"(?s)warmup = \d+ steps.*run of 30 steps.*try: --schedule.warmup"):
        make(warmup).factors(length(30))


@pytest.mark.parametrize(
    ("shape", "floor", "message"),
    [
        ("cosign", 0.0, "schedule.name"),
        ("linear", -0.1, "floor"),
        ("linear", math.nan, "floor"),
        ("constant", 0.1, "floor"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(shape, floor, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(shape, floor=floor)


def test_a_run_of_one_step_has_the_full_rate():
    assert [factors(Schedule(shape), 1) for shape in SHAPES] == [[1.0]] * 3


def test_resolved_warmup_stays_what_it_was_in_a_longer_run():
    resolved = constant("10%").resolved(length())

    assert resolved == constant(4)
    assert factors(resolved, 10 * STEPS)[:STEPS] == factors(constant("10%"))


@pytest.mark.parametrize("schedule", [constant(), constant("5%"), constant("1 epochs"), linear(3), warmup_cosine("5%")])
def test_extends_exactly_says_whether_a_longer_run_has_the_same_rates(schedule):
    same = factors(schedule, STEPS) == factors(schedule, 10 * STEPS)[:STEPS]

    assert schedule.extends_exactly == same
