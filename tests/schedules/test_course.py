"""The rates of a run whose length changes any number of times, for every shape of schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot as sf
from refused import refused
from surefoot.config.durations import Length
from surefoot.schedules.curves import SHAPES, Factors
from surefoot.schedules.joined import AnySchedule, Continued
from surefoot.train.course import Leg, course_of

FIRST_STEPS = 40
SCHEDULES: dict[str, AnySchedule] = {
    "constant": sf.schedules.constant("10%"),
    "linear": sf.schedules.linear("10%"),
    "cosine": sf.schedules.cosine("10%", min_lr_ratio=0.1),
    "polynomial": sf.schedules.polynomial("5%", power=2.0),
    "inverse_sqrt": sf.schedules.inverse_sqrt("5%"),
    "multistep": sf.schedules.multistep("5%"),
    "exponential": sf.schedules.exponential("10%"),
    "one_cycle": sf.schedules.one_cycle(),
    "wsd": sf.schedules.wsd("10%", cooldown="25%", min_lr_ratio=0.01),
    "cosine_restarts": sf.schedules.cosine_restarts("5%"),
}
KNOWS_NO_END = ("constant", "inverse_sqrt", "multistep")
OTHERS: dict[str, AnySchedule] = {
    "joined": sf.schedules.join(sf.schedules.constant("10%"), sf.schedules.cosine()),
    "from_function": sf.schedules.from_function(lambda step: 1.0 / (step + 1)),
}
FALLS = [name for name in SCHEDULES if name not in KNOWS_NO_END]
# of a change: the steps since the last one, and those that are left from there on
HISTORIES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=4)


def test_every_shape_is_here() -> None:
    assert SCHEDULES.keys() == SHAPES.keys()


def length_of(steps: int) -> Length:
    return Length(steps=steps, samples_per_epoch=8, batch_size=1)


def legs_of(schedule: AnySchedule, history: Sequence[tuple[int, int]]) -> list[Leg]:
    """Return the legs of a run, each of whose changes is within its length."""
    legs = [Leg(0, f"{FIRST_STEPS} steps", 8, 1, schedule)]
    steps = FIRST_STEPS
    for since, left in history:
        at = min(legs[-1].begin + since, steps)
        steps = at + left
        legs.append(Leg(at, f"{steps} steps", 8, 1, schedule))
    return legs


def course(legs: Sequence[Leg]) -> tuple[int, Factors, AnySchedule]:
    """Return the steps of a run after its legs, its factors and its schedule."""
    first = length_of(int(legs[0].length.split()[0]))
    schedule = legs[0].schedule.resolved(first)
    length, schedule = course_of(legs, first_length=first, first_schedule=schedule)
    return length.steps, schedule.factors(length), schedule


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30)
@given(history=HISTORIES)
def test_no_rate_jumps_where_the_length_changes(name: str, history: list[tuple[int, int]]) -> None:
    legs = legs_of(SCHEDULES[name], history)
    for count in range(1, len(legs)):
        at = legs[count].begin
        try:
            steps_before, before, earlier = course(legs[:count])
            steps, factor, schedule = course(legs[: count + 1])
        except sf.ConfigError:
            return  # too short for its warm-up or its cool-down
        assert [factor(step) for step in range(at)] == [before(step) for step in range(at)]
        present = before(min(at, steps_before - 1))
        if isinstance(schedule, Continued) and schedule.at == at:
            assert factor(at) == pytest.approx(present, rel=1e-9)
        else:  # the same curve, with its warm-up and milestones, over the new length
            same = earlier.factors(length_of(steps))
            assert [factor(step) for step in range(steps)] == [same(step) for step in range(steps)]


@pytest.mark.parametrize("name", FALLS)
@settings(max_examples=30)
@given(history=HISTORIES)
def test_a_fall_reaches_its_floor_and_never_rises_again(
    name: str, history: list[tuple[int, int]]
) -> None:
    legs = legs_of(SCHEDULES[name], history)
    try:
        steps, factor, schedule = course(legs)
    except sf.ConfigError:
        return
    minimum = SCHEDULES[name].resolved(length_of(FIRST_STEPS)).to_dict().get("min_lr_ratio", 0.0)
    if steps - legs[-1].begin > 1:  # one step has no room for a fall
        # a minimum of 0 is reached one step after the last
        assert factor(steps if minimum == 0.0 else steps - 1) == pytest.approx(minimum, abs=1e-9)
    if schedule.to_dict()["shape"] == "continued":
        rest = [factor(step) for step in range(legs[-1].begin, steps)]
        assert all(later <= earlier for earlier, later in pairwise(rest))


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30)
@given(history=HISTORIES)
def test_percentages_of_what_was_not_changed_keep_their_steps(
    name: str, history: list[tuple[int, int]]
) -> None:
    try:
        _, _, schedule = course(legs_of(SCHEDULES[name], history))
    except sf.ConfigError:
        return
    began = SCHEDULES[name].resolved(length_of(FIRST_STEPS))
    while schedule.to_dict()["shape"] == "continued":
        schedule = schedule.first  # type: ignore[union-attr]
    assert schedule.to_dict() == began.to_dict()


@pytest.mark.parametrize("name", KNOWS_NO_END)
@settings(max_examples=30)
@given(history=HISTORIES)
def test_a_shape_that_knows_no_end_is_that_of_a_run_of_the_new_length(
    name: str, history: list[tuple[int, int]]
) -> None:
    try:
        steps, factor, _ = course(legs_of(SCHEDULES[name], history))
    except sf.ConfigError:
        return
    began = SCHEDULES[name].resolved(length_of(FIRST_STEPS))
    whole = began.factors(length_of(steps))
    assert [factor(step) for step in range(steps)] == [whole(step) for step in range(steps)]


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=30)
@given(history=HISTORIES, since=st.integers(1, 60), left=st.integers(30, 200))
def test_a_new_schedule_has_a_warm_up_only_if_it_is_asked_for(
    name: str, history: list[tuple[int, int]], since: int, left: int
) -> None:
    legs = legs_of(sf.schedules.linear("10%"), history)
    try:
        steps, _, _ = course(legs)
    except sf.ConfigError:
        return
    at = min(legs[-1].begin + since, steps)
    asked = SCHEDULES[name]
    for warmup in (0, "20%"):
        new = replace(asked, warmup=warmup)
        _, factor, _ = course(
            [*legs, Leg(at, f"{at + left} steps", 8, 1, new, begins_schedule=True)]
        )
        alone = new.factors(length_of(left))
        rates = [factor(step) for step in range(at, at + left)]
        assert rates == [alone(step) for step in range(left)]
        assert (rates[0] == 1.0) == (warmup == 0)


@pytest.mark.parametrize("name", [*SCHEDULES, *OTHERS])
@settings(max_examples=30)
@given(history=HISTORIES, since=st.integers(1, 60), left=st.integers(40, 200))
def test_a_stretched_schedule_is_that_of_a_run_that_had_the_length_from_the_start(
    name: str, history: list[tuple[int, int]], since: int, left: int
) -> None:
    asked = (SCHEDULES | OTHERS)[name]
    legs = legs_of(asked, history)
    try:
        steps, before, _ = course(legs)
    except sf.ConfigError:
        return
    at = min(legs[-1].begin + since, steps)
    stretched = Leg(at, f"{at + left} steps", 8, 1, asked, stretches=True)
    steps, factor, _ = course([*legs, stretched])
    whole = asked.factors(length_of(steps))
    assert [factor(step) for step in range(at)] == [before(step) for step in range(at)]
    assert [factor(step) for step in range(at, steps + 1)] == [
        whole(step) for step in range(at, steps + 1)
    ]


@settings(max_examples=30)
@given(at=st.integers(20, 39), left=st.integers(2, 100), longer=st.integers(1, 100))
def test_what_was_stretched_goes_on_without_a_jump_when_the_length_changes_again(
    at: int, left: int, longer: int
) -> None:
    asked = sf.schedules.cosine("10%")
    stretched = Leg(at, f"{at + left} steps", 8, 1, asked, stretches=True)
    legs = [Leg(0, f"{FIRST_STEPS} steps", 8, 1, asked), stretched]
    _, before, _ = course(legs)
    last = Leg(at + left - 1, f"{at + left + longer} steps", 8, 1, asked)
    steps, factor, _ = course([*legs, last])
    assert factor(last.begin) == pytest.approx(before(last.begin), rel=1e-9)
    assert factor(steps) == 0.0


def test_a_new_schedule_is_stretched_from_where_it_began() -> None:
    new = sf.schedules.linear()
    legs = [
        Leg(0, "40 steps", 8, 1, sf.schedules.cosine()),
        Leg(10, "40 steps", 8, 1, new, begins_schedule=True),
        Leg(30, "90 steps", 8, 1, new, stretches=True),
    ]
    _, factor, _ = course(legs)
    alone = new.factors(length_of(80))
    assert [factor(step) for step in range(30, 90)] == [alone(step - 10) for step in range(30, 90)]


def test_a_momentum_is_stretched_with_its_schedule() -> None:
    asked = sf.schedules.one_cycle(momentum_range=(0.85, 0.95))
    legs = [Leg(0, "40 steps", 8, 1, asked), Leg(20, "80 steps", 8, 1, asked, stretches=True)]
    _, _, schedule = course(legs)
    momentum = schedule.momentum(length_of(80))
    whole = asked.momentum(length_of(80))
    before = asked.momentum(length_of(40))
    assert momentum is not None
    assert whole is not None
    assert before is not None
    assert [momentum(step) for step in range(20)] == [before(step) for step in range(20)]
    assert [momentum(step) for step in range(20, 80)] == [whole(step) for step in range(20, 80)]


def test_a_length_that_has_passed_is_refused() -> None:
    legs = [
        Leg(0, "40 steps", 8, 1, sf.schedules.linear()),
        Leg(30, "20 steps", 8, 1, sf.schedules.linear()),
    ]
    with refused("length-already-passed", step=30):
        course(legs)
