"""Durations: what text means, and what is due when; 1 second."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.config.durations import Every, Length, every, in_steps, log_interval, planned, seconds
from surefoot.errors import Setting

LENGTH = Length(steps=300, samples_per_epoch=1000, batch_size=30)
sizes = st.integers(1, 10_000)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("200 steps", 200),
        ("1 step", 1),
        (" 1_000steps ", 1000),
        ("1e3 steps", 1000),
        ("3 epochs", 100),
        ("1 epoch", 34),
        ("0.5 Epochs", 17),
    ],
)
def test_run_length_reads_steps_and_epochs(text, steps):
    assert planned(text, samples_per_epoch=1000, batch_size=30).steps == steps


@given(epochs=st.integers(1, 1000), samples=sizes, batch_size=sizes)
def test_length_in_epochs_rounds_up_to_a_whole_step(epochs, samples, batch_size):
    steps = planned(f"{epochs} epochs", samples_per_epoch=samples, batch_size=batch_size).steps

    assert (steps - 1) * batch_size < epochs * samples <= steps * batch_size


@in_one
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("fast", "duration-not-understood"),
        ("", "duration-not-understood"),
        ("-3 steps", "duration-not-understood"),
        (True, "duration-not-understood"),
        ("1 fortnight", "duration-not-understood"),
        ("5%", "duration-not-understood"),
        ("3 min", "duration-not-understood"),
        ("150", "duration-without-unit"),
        (2.5, "duration-without-unit"),
        ("2.5 steps", "setting-out-of-range"),
        ("0 steps", "setting-out-of-range"),
        ("1e18 epochs", "setting-out-of-range"),
    ],
)
def test_run_length_refuses_what_is_no_length(text, code):
    with refused(code, setting="length", value=text):
        planned(text, samples_per_epoch=1000, batch_size=30)


@pytest.mark.parametrize(
    ("text", "examples"),
    [
        ("150", ["150 steps", "150 epochs"]),
        (150, ["150 steps", "150 epochs"]),
        ("0", ["200 steps", "30 epochs"]),
    ],
)
def test_a_length_without_a_unit_is_echoed_with_the_units_it_may_have(text, examples):
    with refused("duration-without-unit", units=["steps", "epochs"]) as error:
        planned(text, samples_per_epoch=1000, batch_size=30)
    assert error.value.remedies == tuple(Setting("length", example) for example in examples)


@pytest.mark.parametrize(
    ("text", "examples"),
    [("40", ["40 steps", "40%", "40 epochs"]), ("400", ["400 steps", "400 epochs"])],
)
def test_the_percentages_proposed_for_a_bare_number_are_at_most_100(text, examples):
    with refused("duration-without-unit") as error:
        in_steps(text, length=LENGTH)
    assert [remedy.value for remedy in error.value.remedies] == examples


def test_an_empty_data_set_has_no_length():
    with refused("setting-out-of-range"):
        planned("1 epochs", samples_per_epoch=0, batch_size=30)


@pytest.mark.parametrize(
    ("text", "steps"),
    [(7, 7), (0, 0), ("0%", 0), ("5%", 15), ("100%", 300), ("0.5%", 2), ("2 epochs", 67)],
)
def test_warmup_reads_steps_shares_and_epochs(text, steps):
    assert in_steps(text, length=LENGTH) == steps


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("3 min", "duration-not-understood"),
        ("101%", "setting-out-of-range"),
        ("5", "duration-without-unit"),
        (-1, "duration-not-understood"),
        (None, "duration-not-understood"),
    ],
)
def test_warmup_refuses_what_is_no_number_of_steps(text, code):
    with refused(code, setting="schedule.warmup"):
        in_steps(text, length=LENGTH, setting="schedule.warmup")


@given(number=st.integers(1, 50), steps=st.integers(1, 500), samples=sizes, batch_size=sizes)
def test_once_per_n_epochs_is_due_where_the_number_of_whole_passes_grows(
    number, steps, samples, batch_size
):
    length = Length(steps=steps, samples_per_epoch=samples, batch_size=batch_size)
    recurring = every(f"{number} epochs", length=length)

    def passes(done):
        return done * batch_size // samples // number

    for done in range(1, steps + 1):
        assert recurring.due(done) == (passes(done) > passes(done - 1))


@given(
    text=st.sampled_from(
        ["1 steps", "7 steps", "3%", "0.7%", "33.3%", "1 epochs", "0.3 epochs", "2 epochs"]
    ),
    count=st.integers(0, 10**12),
)
def test_each_multiple_of_a_period_is_due_rounded_up_and_nothing_between(text, count):
    recurring = every(text, length=LENGTH)
    period = Fraction(*recurring.period)
    step = ceil(count * period)
    following = ceil((count + 1) * period)

    assert recurring.due(following)
    assert [between for between in range(step + 1, following) if recurring.due(between)] == []


def test_a_percentage_is_due_as_often_as_it_fits_and_at_the_end():
    recurring = every("10%", length=Length(steps=33, samples_per_epoch=1, batch_size=1))

    due = [done for done in range(1, 34) if recurring.due(done)]
    assert due == [4, 7, 10, 14, 17, 20, 24, 27, 30, 33]


def test_automatic_records_begin_after_step_10_unless_the_interval_is_shorter():
    def records(steps):
        recurring = log_interval("auto", length=Length(steps, samples_per_epoch=100, batch_size=10))
        return [done for done in range(1, steps + 1) if recurring.due(done)]

    assert records(550)[:3] == [10, 28, 55]
    assert records(200)[:3] == [10, 20, 30]
    assert records(40)[:3] == [2, 4, 6]


def test_never_is_never_due():
    assert every(None, length=LENGTH) == Every()
    assert not any(Every().due(done) for done in range(1, 100))


def test_a_time_is_never_due_by_steps_and_only_where_it_is_allowed():
    assert every("90 min", length=LENGTH, time=True) == Every(seconds=5400.0)

    with refused("duration-not-understood", setting="log_every", units=["steps", "epochs", "%"]):
        every("90 min", length=LENGTH, setting="log_every")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0 steps", "setting-out-of-range"),
        ("0%", "setting-out-of-range"),
        ("0 min", "setting-out-of-range"),
        ("1.5 steps", "setting-out-of-range"),
        ("50", "duration-without-unit"),
        ("every step", "duration-not-understood"),
        (False, "duration-not-understood"),
    ],
)
def test_an_interval_that_means_nothing_is_refused(text, code):
    with refused(code, setting="interval", value=text):
        every(text, length=LENGTH, time=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30 s", 30.0), ("1.5 min", 90.0), ("2 h", 7200.0), ("10 Minutes", 600.0)],
)
def test_times_are_seconds(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("10 steps", "duration-not-understood"),
        ("5%", "duration-not-understood"),
        ("0 s", "setting-out-of-range"),
        ("0", "duration-without-unit"),
    ],
)
def test_what_is_no_time_is_refused(text, code):
    with refused(code, setting="time"):
        seconds(text)


@pytest.mark.parametrize(
    ("epochs", "samples", "several"),
    [(30, 13, 1), (30, 1000, 1), (3, 10_000, 1), (1, 999, 1), (400, 25, 20)],
)
def test_epochs_end_with_a_record_and_short_ones_share_it(
    epochs: int, samples: int, several: int
) -> None:
    """By themselves records come every 50 steps, or twenty times in a run; here at most as far
    apart.
    """
    length = planned(f"{epochs} epochs", samples_per_epoch=samples, batch_size=10)
    recurring = log_interval("auto", length=length)

    records = [step for step in range(1, length.steps + 1) if recurring.due(step)]

    gaps = [later - earlier for earlier, later in pairwise([0, *records])]
    assert max(gaps) <= ceil(max(1, min(50, length.steps / 20)))
    for epoch in range(several, epochs + 1, several):
        assert ceil(epoch * samples / 10) in records
