"""What a curve of losses over learning rates suggests, against closed forms; every kind of curve
has its own sentence. (1 s)
"""

from __future__ import annotations

import numpy as np
import pytest

import surefoot as sf
from in_one import in_one
from refused import refused
from stated import numbers_in
from surefoot.errors import Setting
from surefoot.tools.report.figures import picture
from surefoot.tools.tune.lr_range_test import (
    Curve,
    LRRangeTest,
    as_text,
    check_range,
    diverged,
    smoothed,
    suggest,
)
from surefoot.tools.tune.lr_search import chart_of

RATES: Curve = np.geomspace(1e-6, 10, 141)  # 20 a decade
NOISE = np.random.default_rng(0).normal(size=len(RATES))


def fall(rates: Curve, at: float) -> Curve:
    """From 2.5 to 0.5, in logarithmic rates steepest at `at`: a logistic curve."""
    return np.asarray(2.5 - 2.0 / (1 + (at / rates) ** 2))


@pytest.mark.parametrize("at", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_suggestion_is_where_a_logistic_fall_is_steepest(at: float) -> None:
    rise = np.where(100 * at < RATES, np.log10(RATES / (100 * at)), 0)
    losses = fall(RATES, at) + rise
    found = suggest(RATES, losses + 0.01 * NOISE, end="diverged", diverged_at=10.0)
    assert found.suggested == pytest.approx(at, rel=0.35)
    assert found.minimum is not None
    assert as_text(found.suggested) in found.reason
    assert f"= {as_text(found.minimum / 10)}" in found.reason


def test_a_steepest_fall_right_before_the_divergence_gives_way_to_a_tenth_of_the_minimum() -> None:
    rates = RATES[RATES < 0.02]
    found = suggest(rates, fall(rates, 0.01), end="not finite", diverged_at=0.02)
    assert found.minimum is not None
    assert found.suggested == pytest.approx(found.minimum / 10, rel=0.05)
    assert 0.02 in numbers_in(found.reason)  # where it diverged


def test_a_curve_that_still_falls_at_the_end_says_so() -> None:
    found = suggest(RATES, fall(RATES, 1.0) + 0.01 * NOISE, end="highest")
    assert found.suggested == pytest.approx(1.0, rel=0.4)
    assert 10 in numbers_in(found.reason)
    assert "--max-lr 1e3" in found.reason


@pytest.mark.parametrize(
    "losses", [np.full(len(RATES), 2.3), 2.3 + 0.1 * NOISE], ids=["exactly", "noisy"]
)
def test_a_flat_curve_suggests_nothing(losses: Curve) -> None:
    found = suggest(RATES, losses, end="highest")
    assert found.suggested is None
    assert "--max-lr 1e3" in found.reason


def test_a_loss_that_rises_without_having_fallen_suggests_nothing() -> None:
    losses = 2.3 + np.where(RATES > 0.1, 10 * RATES, 0) + 0.02 * NOISE
    found = suggest(RATES, losses, end="diverged", diverged_at=10.0)
    assert found.suggested is None
    assert "--steps" in found.reason


@pytest.mark.parametrize("losses", [0, 1, 4])
def test_a_loss_that_diverges_at_once_suggests_nothing(losses: int) -> None:
    found = suggest(RATES[:losses], np.full(losses, 2.0), end="not finite", diverged_at=1e-3)
    assert found.suggested is None
    assert numbers_in(found.reason)[:2] == [1e-3, losses]  # where, and after how many
    assert "--min-lr 1e-7" in found.reason


def test_no_rate_is_blamed_for_what_was_not_finite_before() -> None:
    found = suggest(RATES[:0], np.zeros(0), end="not finite")
    assert (found.suggested, found.diverged_at) == (None, None)
    assert "--" not in found.reason  # no other rate to try


def test_smoothing_is_a_mean_that_moves_a_curve_to_neither_side() -> None:
    line = 5.0 - np.log10(RATES)
    assert smoothed(RATES, line)[40:-40] == pytest.approx(line[40:-40], abs=1e-2)


def test_smoothing_spreads_a_spike_evenly_to_both_sides() -> None:
    places = np.arange(len(RATES)) - 70
    spread = smoothed(RATES, np.where(places == 0, -1.0, 0.0))

    around = spread[50:91]
    assert around == pytest.approx(around[::-1], rel=0.05)  # but for how near the ends are
    weights = np.exp(-np.abs(places) * 0.05 / 0.3)
    assert spread[70] == pytest.approx(-1 / weights.sum())


def test_smoothing_is_over_rates_and_not_over_steps() -> None:
    few = np.geomspace(1e-4, 1, 41)
    many = np.geomspace(1e-4, 1, 401)

    of_few = smoothed(few, fall(few, 0.01))
    of_many = smoothed(many, fall(many, 0.01))

    assert of_few == pytest.approx(of_many[::10], abs=0.02)


def test_divergence_is_where_the_average_passes_four_times_its_best() -> None:
    losses = np.array([2.0, 1.0, 0.5, 0.5, 9.0, 9.0])
    mean = 0.0
    weight = 0.0
    means = []
    for loss in losses:  # Kingma and Ba 2014, section 3, with beta = 0.8
        mean = 0.8 * mean + 0.2 * loss
        weight = 0.8 * weight + 0.2
        means.append(mean / weight)

    best = np.minimum.accumulate(means)
    first, *_ = np.flatnonzero(np.array(means) > 4 * best)
    assert diverged(losses) == first


def test_a_loss_below_zero_diverges_only_if_it_rises_far_above() -> None:
    assert diverged(np.array([-1.0, -2.0, -1.5, -1.0])) is None  # a log-likelihood
    assert diverged(np.array([-2.0, 60.0])) == 1


@pytest.mark.parametrize("rate", [1e-9, 2.13e-3, 0.01, 0.5, 3.0, 999.0, 12345.0])
def test_rates_are_written_to_two_digits(rate: float) -> None:
    assert float(as_text(rate)) == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("low", "high", "steps", "code"),
    [
        (1.0, 0.1, 100, "lr-range-empty"),
        (0.1, 0.1, 100, "lr-range-empty"),
        (0.0, 1.0, 100, "setting-out-of-range"),
        (1e-3, float("inf"), 100, "setting-out-of-range"),
        (float("nan"), 1.0, 100, "setting-out-of-range"),
        (1e-6, 10.0, 9, "setting-out-of-range"),
    ],
)
def test_a_range_that_is_none_is_refused(low: float, high: float, steps: int, code: str) -> None:
    with refused(code):
        check_range(low, high, steps)


def test_the_ends_of_an_empty_range_are_proposed_in_order() -> None:
    with refused("lr-range-empty", min_lr=1.0, max_lr=0.1) as error:
        check_range(1.0, 0.1, 100)
    assert error.value.remedies == ((Setting("min_lr", 0.1), Setting("max_lr", 1.0)),)


def test_all_that_is_wrong_with_a_range_is_told_at_once() -> None:
    with pytest.raises(sf.ConfigError) as error:
        check_range(-1, float("nan"), 2)
    settings = [problem.fields["setting"] for problem in error.value.problems]
    assert settings == ["min_lr", "max_lr", "steps"]


@in_one
@pytest.mark.parametrize("place", [0, 1, 40, 97, 99])
@pytest.mark.parametrize("spike", [0.0, 60.0])
def test_one_bad_batch_changes_no_suggestion(place: int, spike: float) -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.02, 100)
    rates = np.geomspace(1e-6, 10.0, 100)
    falling = fall(rates, 0.01) + noise
    level = 2.3 + noise
    expected = suggest(rates, falling, end="highest").suggested

    falling[place] = spike
    level[place] = spike
    suggested = suggest(rates, falling, end="highest").suggested

    assert expected is not None
    assert suggested is not None
    assert 0.6 < suggested / expected < 1.6
    assert suggest(rates, level, end="highest").suggested is None


@pytest.mark.parametrize("steps", [30, 100])
def test_of_noise_alone_there_is_seldom_a_suggestion(steps: int) -> None:
    """200 curves that do not depend on the rate: a least of many places falls far now and then, in
    one of twelve at most.
    """
    rates = np.geomspace(1e-6, 10.0, steps)
    curves = np.random.default_rng(1).normal(2.3, 0.02, (200, steps))

    suggested = [suggest(rates, curve, end="highest").suggested for curve in curves]

    assert len([rate for rate in suggested if rate is not None]) <= 16


def test_a_result_prints_as_a_short_table_with_the_suggestion_and_why_the_test_ended() -> None:
    rates = RATES[:-1]
    found = suggest(rates, fall(rates, 0.01), end="diverged", diverged_at=10.0)

    lines = str(found).splitlines()
    assert lines[0].split() == ["lr", "loss", "smoothed"]
    assert len(lines) <= 18
    (suggestion,) = [line for line in lines if line.startswith("suggested  ")]
    assert suggestion.split()[-1] == as_text(found.suggested or 0)
    assert as_text(found.suggested or 0) in found.reason
    assert numbers_in(lines[-1])[:2] == [10, 4]  # it stopped there, at so many times the minimum


def test_a_result_without_a_suggestion_prints_none() -> None:
    assert "suggested  " not in str(suggest(RATES[:0], np.zeros(0), end="not finite"))


def test_a_test_that_went_to_its_end_says_to_which_rate() -> None:
    assert numbers_in(flat().ended) == [10]


def test_the_drawn_curve_ends_where_losses_count_as_less_than_they_are() -> None:
    losses = fall(RATES, 0.01) + np.where(RATES > 1, 100.0, 0.0)
    drawn = chart_of(suggest(RATES, losses, end="diverged", diverged_at=10.0)).lines[1]

    last_rate, _ = drawn.points[-1]
    assert drawn.name == "smoothed"
    assert last_rate == RATES[RATES <= 1][-1]
    assert [rate for rate, _ in chart_of(flat()).lines[1].points] == RATES.tolist()


@pytest.mark.parametrize(("least", "scale"), [(0.5, "log"), (-4.5, "linear")])
def test_losses_above_what_is_drawn_are_marks_at_the_top(least: float, scale: str) -> None:
    losses = fall(RATES, 0.01) - 0.5 + least
    losses[RATES > 5] += 1e6
    chart = chart_of(suggest(RATES, losses, end="diverged", diverged_at=10.0))

    marked = [mark.x for mark in chart.marks if mark.kind == "strange"]
    assert marked == RATES[RATES > 5].tolist()
    assert chart.scale == scale
    for line in chart.lines:
        assert max(value for _, value in line.points) < 1e5


def flat() -> LRRangeTest:
    return suggest(RATES, np.full(len(RATES), 2.3), end="highest")


@pytest.mark.parametrize(
    "found",
    [
        suggest(RATES, fall(RATES, 0.01), end="diverged", diverged_at=10.0),
        flat(),
        suggest(RATES[:0], np.zeros(0), end="not finite"),
    ],
    ids=["fall", "flat", "nothing"],
)
def test_a_picture_is_drawn_of_every_kind_of_curve(found: LRRangeTest) -> None:
    svg = picture([chart_of(found)], title="a test")
    assert ("suggested: 0.01" in svg) == (found.suggested is not None)
