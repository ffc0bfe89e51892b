"""Schedules: values at 0, in warm-up, in the middle, at the end and beyond; properties; against
torch and transformers.

5 seconds.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from in_one import in_one
from refused import refused
from surefoot.config.durations import Length
from surefoot.errors import Setting
from surefoot.schedules.curves import SHAPES as TABLE
from surefoot.schedules.joined import join
from surefoot.schedules.lr_schedule import (
    Schedule,
    constant,
    cosine,
    cosine_restarts,
    exponential,
    inverse_sqrt,
    linear,
    multistep,
    one_cycle,
    polynomial,
    wsd,
)

STEPS = 40
MAKERS = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "polynomial": polynomial,
    "inverse_sqrt": inverse_sqrt,
    "multistep": multistep,
    "exponential": exponential,
    "one_cycle": one_cycle,
    "wsd": wsd,
    "cosine_restarts": cosine_restarts,
}
SHAPES = tuple(MAKERS)
# from the end of warm-up to the end of the run
FALLING = ("linear", "cosine", "polynomial", "exponential", "one_cycle")
FLOORED = (*FALLING, "wsd", "cosine_restarts")


def length(steps=STEPS):
    return Length(steps=steps, samples_per_epoch=100, batch_size=10)


def factors(schedule, steps=STEPS, until=None):
    """The factors of a run of so many steps: of its steps, or of all steps before `until`."""
    if until is None:
        until = steps
    factor = schedule.factors(length(steps))
    return [factor(step) for step in range(until)]


def torch_factors(make_scheduler, steps=STEPS):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rises(numbers):
    return all(earlier < later for earlier, later in pairwise(numbers))


def falls(numbers):
    return all(earlier > later for earlier, later in pairwise(numbers))


RATIOS = st.floats(0.001, 0.9)
FLOORS = st.just(0.0) | RATIOS


@st.composite
def runs(draw, shapes=SHAPES):
    """Any schedule with all its settings, and the steps of a run that it fits."""
    shape = draw(st.sampled_from(shapes))
    steps = draw(st.integers(1, 150))
    warmup = draw(st.integers(0, steps - 1))
    settings = {"warmup": warmup}
    if shape == "exponential":
        settings["min_lr_ratio"] = draw(RATIOS)
    elif shape in FLOORED:
        settings["min_lr_ratio"] = draw(FLOORS)
    match shape:
        case "polynomial":
            settings["power"] = draw(st.floats(0.1, 4.0))
        case "one_cycle":
            settings["start_lr_ratio"] = draw(RATIOS)
            settings["rise_shape"] = draw(st.sampled_from(("cosine", "linear")))
        case "multistep":
            assume(warmup < steps - 1)
            milestones = draw(st.sets(st.integers(warmup + 1, steps - 1), min_size=1, max_size=4))
            settings["milestones"] = tuple(sorted(milestones))
            settings["gamma"] = draw(st.floats(0.01, 0.9))
            recur = draw(st.booleans())
            if recur:
                settings["milestones"] = (f"every {min(milestones)} steps",)
                settings["gamma"] = 0.9
        case "wsd":
            if settings["min_lr_ratio"] == 0.0:
                shortest = 0
                longest = steps - warmup
            else:
                shortest = 1
                longest = steps - 1 - warmup
            assume(shortest <= longest)
            settings["cooldown"] = draw(st.integers(shortest, longest))
            settings["cooldown_shape"] = draw(st.sampled_from(("1-sqrt", "linear")))
        case "cosine_restarts":
            settings["cycle"] = draw(st.integers(3, 60))
            settings["cycle_growth"] = draw(st.sampled_from((1.0, 1.5, 2.0)))
    return Schedule(shape, **settings), steps


# --- properties of all shapes ---------------------------------------------------------------------


@given(runs())
def test_no_step_runs_at_rate_0_or_above_the_base_rate_or_below_the_floor(run):
    schedule, steps = run
    floor = schedule.min_lr_ratio or 0.0

    values = factors(schedule, steps)

    assert min(values) > 0.0
    assert max(values) <= 1.0
    assert min(values[schedule.warmup :]) >= floor


@given(runs())
def test_the_full_rate_is_first_used_exactly_where_warmup_ends(run):
    schedule, steps = run

    values = factors(schedule, steps)

    assert values[schedule.warmup] == 1.0
    assert rises(values[: schedule.warmup + 1])


@given(runs((*FALLING, "inverse_sqrt")))
def test_a_schedule_without_plateau_uses_the_full_rate_once_and_only_falls(run):
    schedule, steps = run

    values = factors(schedule, steps)

    assert values.count(1.0) == 1
    assert falls(values[schedule.warmup :])


@given(runs(("constant", "multistep", "wsd")))
def test_a_schedule_with_a_plateau_never_climbs_after_warmup(run):
    schedule, steps = run

    values = factors(schedule, steps, until=3 * steps)

    after_warmup = values[schedule.warmup :]
    assert after_warmup == sorted(after_warmup, reverse=True)


@given(runs(FLOORED))
def test_a_floor_above_0_is_reached_on_the_last_step_and_one_of_0_is_never_run(run):
    schedule, steps = run

    values = factors(schedule, steps)

    if schedule.min_lr_ratio == 0.0:
        assert values[-1] > 0.0
    elif values[-1] != 1.0:  # else warm-up, or a cycle of one step, has it
        assert values[-1] == schedule.min_lr_ratio
        if schedule.shape != "cosine_restarts":
            assert values[-2] > schedule.min_lr_ratio


@given(runs(FLOORED))
def test_the_floor_holds_past_the_end(run):
    schedule, steps = run

    past_the_end = factors(schedule, steps, until=3 * steps)[steps:]

    assert set(past_the_end) == {schedule.min_lr_ratio}


@given(runs(("cosine_restarts",)))
def test_a_cycle_of_warm_restarts_only_falls_and_the_next_begins_at_the_full_rate(run):
    schedule, steps = run

    values = factors(schedule, steps)

    for start, end in cycles(values, schedule.warmup):
        assert falls(values[start:end])


def cycles(values, warmup):
    """The first step of each cycle, and the step after its last."""
    starts = [step for step in range(warmup, len(values)) if values[step] == 1.0]
    return list(pairwise((*starts, len(values))))


@given(runs(("cosine_restarts",)))
def test_cycles_of_warm_restarts_grow_as_planned_and_the_last_takes_what_is_left(run):
    schedule, steps = run
    growth = schedule.cycle_growth

    values = factors(schedule, steps)

    sizes = [end - start for start, end in cycles(values, schedule.warmup)]
    for size, following in pairwise(sizes[:-1]):
        assert following == pytest.approx(size * growth, abs=1 + growth)
    if len(sizes) > 1:
        planned = schedule.cycle * growth ** (len(sizes) - 1)
        assert planned / 2 - 1 <= sizes[-1] <= planned + planned * growth / 2 + 1


@given(runs())
def test_a_resolved_schedule_is_the_same_one(run):
    schedule, steps = run

    resolved = schedule.resolved(length(steps))

    assert factors(resolved, steps, until=2 * steps) == factors(schedule, steps, until=2 * steps)
    assert resolved.resolved(length(steps)) == resolved


def count_shared_steps(schedule, steps):
    """The first steps on which longer runs have the same rates."""
    values = factors(schedule, steps)
    of_longer_runs = [factors(schedule, longer) for longer in (steps + 1, 2 * steps, 7 * steps)]
    for step in range(steps):
        if any(others[step] != values[step] for others in of_longer_runs):
            return step
    return steps


@given(runs())
def test_shared_steps_say_on_how_many_steps_longer_runs_have_the_same_rates(run):
    schedule, steps = run

    shared = schedule.shared_steps(length(steps))

    assert min(shared, steps) == count_shared_steps(schedule, steps)


@given(runs(), runs(), st.booleans())
def test_two_joined_schedules_are_one_after_the_other(first, second, nested):
    early, early_steps = first
    late, late_steps = second
    whole = join(early, late, at=early_steps)
    expected = factors(early, early_steps) + factors(late, late_steps)
    if nested:
        whole = join(whole, constant(), at=len(expected))
        expected = [*expected, 1.0, 1.0]
    steps = len(expected)

    assert factors(whole, steps) == expected
    assert factors(whole.resolved(length(steps)), steps) == expected


@given(runs(), runs())
def test_shared_steps_are_those_of_joined_schedules_too(first, second):
    early, early_steps = first
    late, late_steps = second
    whole = join(early, late, at=early_steps)
    steps = early_steps + late_steps

    shared = whole.shared_steps(length(steps))

    assert min(shared, steps) == count_shared_steps(whole, steps)


@in_one
@pytest.mark.parametrize("shape", SHAPES)
def test_percentages_are_steps_once_resolved_and_stay_so_in_a_longer_run(shape):
    percentages = {
        "warmup": "10%",
        "cooldown": "20%",
        "milestones": ("50%", "7 epochs"),
        "cycle": "25%",
    }
    in_steps = {"warmup": 12, "cooldown": 24, "milestones": (60, 70), "cycle": 30}
    names = [name for name in percentages if name in TABLE[shape].takes]
    schedule = Schedule(shape, **{name: percentages[name] for name in names})

    resolved = schedule.resolved(length(120))

    for name in names:
        assert vars(resolved)[name] == in_steps[name]
    assert resolved.resolved(length(1200)) == resolved


def test_percentages_of_joined_schedules_are_of_their_part_and_stay_so():
    schedule = join(constant("10%"), wsd("10%", cooldown="50%"), at="25%")

    resolved = schedule.resolved(length(40))

    first = constant(1).resolved(length(10))
    second = wsd(3, cooldown=15).resolved(length(30))
    assert resolved == join(first, second, at=10)
    assert resolved.resolved(length(400)) == resolved


@in_one
@pytest.mark.parametrize("shape", SHAPES)
def test_no_digits_are_lost_at_the_end_of_a_very_long_run(shape):
    steps = 10**9  # 1 + cos(pi * (1 - 1e-9)) is 0 in floating point
    factor = MAKERS[shape]().factors(length(steps))

    assert 0.0 < factor(steps - 1) <= factor(steps - 2) <= 1.0


@in_one
@pytest.mark.parametrize("shape", SHAPES)
def test_the_functions_have_the_defaults_of_the_shapes(shape):
    assert MAKERS[shape]().resolved(length()) == Schedule(shape).resolved(length())


@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if shape not in ("multistep", "cosine_restarts")]
)
def test_a_run_of_one_step_has_the_full_rate(shape):
    assert factors(Schedule(shape), 1) == [1.0]


# --- values ---------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "one_cycle"])
def test_warmup_rises_in_equal_parts_and_wastes_no_step(shape):
    assert factors(Schedule(shape, warmup=4))[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]


@in_one
@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (constant(4), {0: 0.2, 4: 1, 20: 1, 39: 1, 50: 1}),
        (linear(8), {0: 1 / 9, 8: 1, 24: 0.5, 39: 1 / 32, 40: 0, 50: 0}),
        (linear(19, min_lr_ratio=0.2), {0: 0.05, 19: 1, 29: 0.6, 39: 0.2, 50: 0.2}),
        (cosine(), {0: 1, 10: 0.5 + math.sqrt(0.125), 20: 0.5, 40: 0, 50: 0}),
        (
            cosine(19, min_lr_ratio=0.2),
            {19: 1, 29: 0.6, 38: 0.2 + 0.4 * (1 + math.cos(0.95 * math.pi)), 39: 0.2},
        ),
        (polynomial(8, power=3.0), {0: 1 / 9, 8: 1, 24: 0.125, 39: 1 / 32**3, 50: 0}),
        (polynomial(19, power=0.5, min_lr_ratio=0.2), {19: 1, 34: 0.6, 39: 0.2, 50: 0.2}),
        (inverse_sqrt(4), {0: 0.2, 4: 1, 16: 0.5, 36: 1 / 3, 100: 0.2}),
        (inverse_sqrt(0), {0: 1, 3: 0.5, 35: 1 / 6}),
        (multistep(4), {0: 0.2, 4: 1, 19: 1, 20: 0.1, 29: 0.1, 30: 0.01, 39: 0.01, 50: 0.01}),
        (multistep(milestones=("25%",), gamma=0.5), {0: 1, 9: 1, 10: 0.5, 39: 0.5, 50: 0.5}),
        (exponential(19, min_lr_ratio=0.01), {0: 0.05, 19: 1, 29: 0.1, 39: 0.01, 50: 0.01}),
        (one_cycle(), {0: 0.04, 6: 0.52, 12: 1, 26: 0.5, 40: 0, 50: 0}),
        (
            one_cycle(20, start_lr_ratio=0.5, min_lr_ratio=0.1),
            {0: 0.5, 10: 0.75, 20: 1, 39: 0.1, 50: 0.1},
        ),
        (one_cycle(rise_shape="linear"), {0: 0.04, 3: 0.28, 6: 0.52, 9: 0.76, 12: 1, 26: 0.5}),
        (wsd(4), {0: 0.2, 4: 1, 32: 1, 34: 0.5, 39: 1 - math.sqrt(7 / 8), 40: 0, 50: 0}),
        (
            wsd(cooldown=16, min_lr_ratio=0.2),
            {0: 1, 23: 1, 27: 0.6, 38: 0.2 + 0.8 * (1 - math.sqrt(15 / 16)), 39: 0.2},
        ),
        (cosine_restarts(), {0: 1, 5: 0.5, 10: 1, 15: 0.5, 30: 1, 35: 0.5, 40: 0, 50: 0}),
        (
            cosine_restarts(4, cycle=12, cycle_growth=2.0),
            {0: 0.2, 4: 1, 10: 0.5, 16: 1, 28: 0.5, 40: 0},
        ),
        (
            cosine_restarts(cycle=11, min_lr_ratio=0.2),
            {0: 1, 5: 0.6, 10: 0.2, 11: 1, 21: 0.2, 22: 1, 39: 0.2, 40: 0.2},
        ),
        # 6 are left
        (
            cosine_restarts(cycle=17),
            {0: 1, 16: math.sin(math.pi / 34) ** 2, 17: 1, 39: math.sin(math.pi / 46) ** 2, 40: 0},
        ),
        # 8 are left, half of 16
        (cosine_restarts(cycle=16), {0: 1, 8: 0.5, 16: 1, 24: 0.5, 32: 1, 36: 0.5, 40: 0}),
    ],
)
def test_values_at_0_in_warmup_in_the_middle_at_the_end_and_beyond(schedule, values):
    factor = schedule.factors(length())

    assert {step: factor(step) for step in values} == pytest.approx(values, abs=1e-12)


def test_the_cooldown_begins_so_that_the_run_ends_with_it():
    assert factors(wsd(cooldown=10)).count(1.0) == 31  # and 9 lower ones: the tenth is at step 40
    assert factors(wsd(cooldown=10, min_lr_ratio=0.1)).count(1.0) == 30
    assert factors(wsd(cooldown=0)) == factors(constant())


def test_a_percentage_of_cycles_gives_as_many_whatever_the_length():
    for steps in range(20, 200):
        assert factors(cosine_restarts(cycle="25%"), steps).count(1.0) == 4


# --- against torch --------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize(
    ("schedule", "make_scheduler"),
    [
        (cosine(), lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS)),
        # with a floor over one step less: torch reaches it after the last step
        (
            cosine(min_lr_ratio=0.1),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 1, eta_min=0.1),
        ),
        (
            linear(min_lr_ratio=0.25),
            lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=STEPS - 1),
        ),
        (
            constant(7),
            lambda optimizer: lr_scheduler.LinearLR(optimizer, 1 / 8, 1.0, total_iters=7),
        ),
        (
            polynomial(power=2.0),
            lambda optimizer: lr_scheduler.PolynomialLR(optimizer, STEPS, power=2.0),
        ),
        (
            multistep(milestones=(9, "60%"), gamma=0.3),
            lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [9, 24], gamma=0.3),
        ),
        (
            multistep(milestones="every 1 epochs", gamma=0.3),
            lambda optimizer: lr_scheduler.StepLR(optimizer, 10, 0.3),
        ),
        (
            multistep(milestones="every 25%", gamma=0.3),
            lambda optimizer: lr_scheduler.StepLR(optimizer, 10, 0.3),
        ),
        (
            wsd(cooldown=10, cooldown_shape="linear"),
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [
                    lr_scheduler.ConstantLR(optimizer, 1.0),
                    lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10),
                ],
                milestones=[STEPS - 10],
            ),
        ),
        (
            exponential(min_lr_ratio=0.02),
            lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.02 ** (1 / (STEPS - 1))),
        ),
        # torch's warm-up ends at pct_start * total_steps - 1
        (
            one_cycle(11, min_lr_ratio=0.04 / 1e4),
            lambda optimizer: lr_scheduler.OneCycleLR(
                optimizer, 1.0, total_steps=STEPS, pct_start=12 / STEPS, cycle_momentum=False
            ),
        ),
        (
            cosine_restarts(cycle=10),
            lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
        ),
        (
            join(constant(7), cosine(), at=10),
            lambda optimizer: lr_scheduler.SequentialLR(
                optimizer,
                [
                    lr_scheduler.LinearLR(optimizer, 1 / 8, 1.0, total_iters=7),
                    lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 10),
                ],
                milestones=[10],
            ),
        ),
    ],
)
def test_every_step_is_torch_s(schedule, make_scheduler):
    assert factors(schedule) == pytest.approx(torch_factors(make_scheduler), abs=1e-12)


def test_milestones_that_recur_do_not_drift_where_an_epoch_is_no_whole_number_of_steps():
    uneven = Length(steps=60, samples_per_epoch=25, batch_size=10)
    factor = multistep(milestones="every 3 epochs", gamma=0.5).factors(uneven)

    assert [factor(step) for step in range(60)] == [0.5 ** int(step / 7.5) for step in range(60)]


def test_milestones_that_recur_go_on_in_a_longer_run():
    resolved = multistep(milestones="every 25%", gamma=0.5).resolved(length())

    assert resolved.milestones == ("every 10 steps",)
    assert factors(resolved, 80)[:40] == factors(resolved)
    assert factors(resolved, 80)[79] == 0.5**7


@in_one
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_the_momentum_of_one_cycle_is_torch_s(optimizer):
    trained = optimizer([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(trained, 1.0, total_steps=STEPS, pct_start=12 / STEPS)
    expected = []
    for _ in range(STEPS):
        group = trained.param_groups[0]
        if optimizer is torch.optim.SGD:
            expected.append(group["momentum"])
        else:
            expected.append(group["betas"][0])
        trained.step()
        if len(expected) < STEPS:
            scheduler.step()

    values = momenta(one_cycle(11, **AS_TORCH))

    assert values == pytest.approx(expected, abs=1e-12)


AS_TORCH = {"min_lr_ratio": 0.04 / 1e4, "momentum_range": (0.85, 0.95)}


def momenta(schedule):
    momentum = schedule.momentum(length())
    return [momentum(step) for step in range(STEPS)]


def test_one_cycle_leaves_the_momentum_alone_where_no_range_is_given():
    assert one_cycle(11).momentum(length()) is None


def test_a_one_cycle_with_a_linear_rise_rises_as_torch_s():
    trained = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.OneCycleLR(
        trained, 1.0, total_steps=STEPS, pct_start=12 / STEPS, anneal_strategy="linear"
    )
    expected_rates = []
    expected_momenta = []
    for _ in range(12):
        expected_rates.append(trained.param_groups[0]["lr"])
        expected_momenta.append(trained.param_groups[0]["momentum"])
        trained.step()
        scheduler.step()

    schedule = one_cycle(11, rise_shape="linear", **AS_TORCH)

    assert factors(schedule)[:12] == pytest.approx(expected_rates, abs=1e-12)
    assert momenta(schedule)[:12] == pytest.approx(expected_momenta, abs=1e-12)


def test_a_one_cycle_with_a_linear_rise_falls_as_one_with_another():
    linear_rise = one_cycle(11, rise_shape="linear", **AS_TORCH)
    cosine_rise = one_cycle(11, rise_shape="cosine", **AS_TORCH)

    assert factors(linear_rise)[11:] == factors(cosine_rise)[11:]
    assert momenta(linear_rise)[11:] == momenta(cosine_rise)[11:]


def test_a_one_cycle_of_an_older_run_is_the_same_schedule():
    assert "rise_shape" not in one_cycle().to_dict()
    assert one_cycle(rise_shape="linear").to_dict()["rise_shape"] == "linear"


def test_warm_restarts_that_grow_are_torch_s():
    expected = torch_factors(
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, 2), 70
    )

    values = factors(cosine_restarts(cycle=10, cycle_growth=2.0), 70)

    assert values == pytest.approx(expected, abs=1e-12)


# --- against transformers -------------------------------------------------------------------------


def transformers_factors(name, warmup, steps, *, floor=0.0, power=1.0, cooldown=0, cycles=1):
    """transformers/optimization.py at 005edac, its get_*_schedule* functions by name, as one array
    over the steps.
    """
    step = np.arange(steps, dtype=np.float64)
    progress = (step - warmup) / (steps - warmup)
    match name:
        case "constant_with_warmup":
            after_warmup = np.ones(steps)
        case "linear":
            after_warmup = 1.0 - progress
        case "cosine":
            after_warmup = 0.5 * (1.0 + np.cos(np.pi * progress))
        case "cosine_with_restarts":
            progress_of_cycle = (cycles * progress) % 1.0
            after_warmup = 0.5 * (1.0 + np.cos(np.pi * progress_of_cycle))
        case "polynomial":
            falling = np.maximum(1.0 - progress, 0.0) ** power
            after_warmup = (1.0 - floor) * falling + floor
        case "inverse_sqrt":
            after_warmup = np.sqrt(warmup / np.maximum(step, 1.0))
        case "warmup_stable_decay":  # decay_type "1-sqrt"
            cooling = np.clip((step - (steps - cooldown)) / max(cooldown, 1), 0.0, 1.0)
            after_warmup = (1.0 - np.sqrt(cooling)) * (1.0 - floor) + floor
    return np.where(step < warmup, step / max(warmup, 1), after_warmup)


@pytest.mark.parametrize(
    ("schedule", "name", "settings"),
    [
        (constant(8), "constant_with_warmup", {}),
        (linear(8), "linear", {}),
        (cosine(8), "cosine", {}),
        (cosine_restarts(8, cycle=8), "cosine_with_restarts", {"cycles": 4}),
        (polynomial(8, power=2.0), "polynomial", {"power": 2.0}),
        (inverse_sqrt(8), "inverse_sqrt", {}),
        (wsd(8, cooldown=12), "warmup_stable_decay", {"cooldown": 12}),
    ],
)
def test_after_warmup_every_step_is_that_of_transformers(schedule, name, settings):
    expected = transformers_factors(name, 8, STEPS, **settings)

    assert factors(schedule)[8:] == pytest.approx(expected[8:].tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "name", "settings"),
    [
        (polynomial(8, power=2.0, min_lr_ratio=0.1), "polynomial", {"power": 2.0}),
        (wsd(8, cooldown=12, min_lr_ratio=0.1), "warmup_stable_decay", {"cooldown": 12}),
    ],
)
def test_with_a_floor_it_is_transformers_over_one_step_less(schedule, name, settings):
    of_transformers = transformers_factors(name, 8, STEPS - 1, floor=0.1, **settings)

    expected = [*of_transformers[8:].tolist(), 0.1]
    assert factors(schedule)[8:] == pytest.approx(expected, abs=1e-12)


def test_warmup_is_that_of_transformers_without_its_step_at_rate_0():
    expected = transformers_factors("constant_with_warmup", 9, STEPS + 1)

    assert expected[0] == 0.0
    assert factors(constant(8)) == pytest.approx(expected[1:].tolist(), abs=1e-12)


# --- what is refused, and what is written down ----------------------------------------------------


@in_one
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [30, 1000, "30 steps", "100%", "3 epochs"])
def test_warmup_that_does_not_end_within_the_run_is_refused_with_both_numbers(shape, warmup):
    with refused("schedule-warmup-too-long", setting="schedule.warmup", value=warmup, steps=30):
        Schedule(shape, warmup=warmup).factors(length(30))


@in_one
@pytest.mark.parametrize(
    ("shape", "name", "values"),
    [
        ("linear", "min_lr_ratio", (-0.1, math.nan)),
        ("wsd", "min_lr_ratio", (1.5,)),
        ("polynomial", "power", (0.0, -1.0, math.nan, math.inf)),
        ("multistep", "gamma", (1.0, 0.0, math.nan)),
        ("one_cycle", "start_lr_ratio", (0.0, 1.0, math.nan)),
        ("one_cycle", "momentum_range", ((0.9, 0.8), (0.9, 1.0))),
        ("cosine_restarts", "cycle_growth", (0.5, math.nan, math.inf)),
        ("wsd", "cooldown_shape", ("cosine",)),
    ],
)
def test_a_value_out_of_range_is_refused_where_it_is_written(shape, name, values):
    for value in values:
        with refused("setting-out-of-range", setting=f"schedule.{name}", value=value):
            Schedule(shape, **{name: value})


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        pytest.param("zigzag", SHAPES, id="like none: all"),
        pytest.param("cosign", ("cosine",), id="like one: this one"),
    ],
)
def test_an_unknown_schedule_is_refused_with_those_that_there_are(name, shapes):
    with refused("schedule-unknown", value=name) as caught:
        Schedule(name)
    (remedy,) = caught.value.remedies
    assert tuple(shape for shape in SHAPES if shape in remedy) == shapes


def test_an_exponential_decay_to_0_is_refused_with_a_floor_to_type():
    with refused("schedule-never-zero", setting="schedule.min_lr_ratio") as caught:
        exponential(min_lr_ratio=0.0)
    assert caught.value.remedies == (Setting("schedule.min_lr_ratio", 0.01),)


@pytest.mark.parametrize("milestones", [(), "50%", ("every 3 steps", "50%")])
def test_milestones_of_another_form_are_refused(milestones):
    with refused("schedule-milestones-malformed", value=milestones):
        Schedule("multistep", milestones=milestones)


FOREIGN = {
    "min_lr_ratio": 0.1,
    "power": 2.0,
    "cooldown": "5%",
    "milestones": ("50%",),
    "gamma": 0.5,
    "start_lr_ratio": 0.1,
    "cycle": "10%",
    "cycle_growth": 2.0,
    "cooldown_shape": "linear",
    "momentum_range": (0.8, 0.9),
}


@in_one
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_setting_is_refused_naming_the_shapes_that_take_it(name):
    owners = [shape for shape in SHAPES if name in TABLE[shape].takes]
    others = [shape for shape in SHAPES if shape not in owners]

    assert others
    for shape in others:
        with refused("schedule-setting-foreign", setting=f"schedule.{name}") as caught:
            Schedule(shape, **{name: FOREIGN[name]})
        settings = [remedy for remedy in caught.value.remedies if isinstance(remedy, Setting)]
        assert [setting.value for setting in settings] == owners


@in_one
@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if "min_lr_ratio" not in TABLE[shape].takes]
)
def test_a_floor_of_0_says_nothing_to_a_shape_without_floor(shape):
    with_floor = Schedule(shape, min_lr_ratio=0.0)

    assert with_floor.resolved(length()) == Schedule(shape).resolved(length())


@in_one
@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (constant("5"), "schedule.warmup"),
        (wsd(cooldown="5"), "schedule.cooldown"),
        (multistep(milestones=("5",)), "schedule.milestones"),
        (multistep(milestones="every 5"), "schedule.milestones"),
        (cosine_restarts(cycle="5"), "schedule.cycle"),
        (join(constant(), linear(), at="5"), "at"),
    ],
)
def test_a_duration_without_a_unit_is_refused_by_the_name_of_its_setting(schedule, name):
    with refused("duration-without-unit", setting=name, value="5"):
        schedule.factors(length())


@in_one
@pytest.mark.parametrize(
    ("schedule", "code", "fields"),
    [
        (cosine_restarts(cycle="0%"), "schedule-cycle-too-short", {"value": "0%"}),
        (cosine_restarts(cycle=0), "schedule-cycle-too-short", {"value": 0}),
        (
            wsd(10, cooldown=31),
            "schedule-cooldown-too-long",
            {"cooldown_steps": 31, "available_steps": 30, "steps": 40},
        ),
        (wsd(10, cooldown="80%"), "schedule-cooldown-too-long", {"cooldown_steps": 32}),
        (
            wsd(10, cooldown=30, min_lr_ratio=0.1),
            "schedule-cooldown-too-long",
            {"available_steps": 29},
        ),
        (wsd(cooldown=0, min_lr_ratio=0.1), "schedule-cooldown-too-long", {"cooldown_steps": 0}),
        (
            multistep(milestones=("50%", "100%")),
            "schedule-milestones-out-of-order",
            {"milestone_steps": (20, 40), "value": ("50%", "100%")},
        ),
        (
            multistep(milestones=(20, 20)),
            "schedule-milestones-out-of-order",
            {"milestone_steps": (20, 20)},
        ),
        (
            multistep(milestones=(30, 20)),
            "schedule-milestones-out-of-order",
            {"milestone_steps": (30, 20)},
        ),
        (
            multistep(milestones="every 4 epochs"),
            "schedule-milestones-out-of-order",
            {"milestone_steps": (40,)},
        ),
        (
            multistep("50%"),
            "schedule-milestones-out-of-order",
            {"milestone_steps": (20, 30), "warmup_steps": 20},
        ),
        (
            multistep(milestones=(10, 20), gamma=1e-200),
            "schedule-underflows",
            {"setting": "schedule.gamma", "step": 39},
        ),
        (polynomial(power=500.0), "schedule-underflows", {"setting": "schedule.power"}),
        (join(constant(), linear(), at="100%"), "joined-schedule-without-steps", {"step": 40}),
        (join(constant(), linear(), at=0), "joined-schedule-without-steps", {"step": 0}),
        (
            join(constant(), linear("100%"), at=10),
            "schedule-warmup-too-long",
            {"warmup_steps": 30, "steps": 30},
        ),
    ],
)
def test_a_schedule_that_does_not_fit_its_run_is_refused(schedule, code, fields):
    with refused(code, **fields):
        schedule.factors(length())


def test_the_error_of_a_joined_part_says_where_it_was_joined():
    with refused("schedule-warmup-too-long") as caught:
        join(constant(), linear("100%"), at=10).factors(length())
    assert caught.value.places == ("joined at step 10 of 40",)


@in_one
@pytest.mark.parametrize(
    "schedule", [*[make() for make in MAKERS.values()], join(constant(), linear())]
)
def test_what_is_written_down_is_json_without_what_is_absent(schedule):
    described = schedule.to_dict()

    assert json.loads(json.dumps(described)) == described
    assert "None" not in repr(described)
    assert described != constant(9).to_dict()


def test_a_resolved_schedule_is_written_down_with_its_defaults():
    assert Schedule("multistep").resolved(length()).to_dict() == {
        "shape": "multistep",
        "warmup": 0,
        "milestones": [20, 30],
        "gamma": 0.1,
    }
