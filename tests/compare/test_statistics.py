"""Differences against NumPy and simulation: the mean is the difference of the scores, the error
covers what it says. (2 s)
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from in_one import in_one
from surefoot.tools.compare.statistics import (
    ScoreDifference,
    holm,
    mean_and_error,
    paired_difference,
    t_tail,
    unpaired_difference,
    with_split,
)


def ragged(seed: int, batches: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 50, size=batches).astype(float)
    return generator.normal(2.0, 0.5, batches), generator.normal(2.1, 0.5, batches), counts


def test_the_mean_is_the_difference_of_the_scores_of_the_whole_split() -> None:
    first, second, counts = ragged(0)
    difference = paired_difference(list(first), list(second), counts=list(counts))
    of_scores = np.average(first, weights=counts) - np.average(second, weights=counts)
    assert math.isclose(difference.mean, of_scores, rel_tol=1e-12)


def test_with_equal_counts_the_error_is_that_of_a_mean() -> None:
    first, second, _ = ragged(1)
    difference = paired_difference(list(first), list(second), counts=[7.0] * len(first))
    of_numpy = float(np.std(first - second, ddof=1) / math.sqrt(len(first)))
    assert math.isclose(difference.standard_error, of_numpy, rel_tol=1e-12)


def test_the_error_does_not_depend_on_what_both_have_in_common() -> None:
    first, second, counts = ragged(2)
    hard = np.linspace(0.0, 9.0, len(first))  # of some batches, for both
    alone = paired_difference(list(first), list(second), counts=list(counts))
    shared = paired_difference(list(first + hard), list(second + hard), counts=list(counts))
    assert math.isclose(alone.standard_error, shared.standard_error, rel_tol=1e-9)


def test_a_test_at_five_percent_is_wrong_in_five_percent() -> None:
    """2,000 draws of batches whose difference has the mean 0, or rather of which the weighted mean
    has: 4 % to 6 %.
    """
    generator = np.random.default_rng(3)
    wrong = 0
    for _ in range(2000):
        counts = generator.integers(20, 60, size=30).astype(float)
        scores = generator.normal(0.0, 0.3, size=30) / np.sqrt(counts)
        difference = paired_difference(list(scores), [0.0] * 30, counts=list(counts))
        wrong += difference.p_value < 0.05
    assert 0.04 < wrong / 2000 < 0.065


@pytest.mark.parametrize("spreads", [(1.0, 1.0), (1.0, 5.0)])
def test_three_seeds_against_three_others_are_wrong_in_at_most_five_percent(
    spreads: tuple[float, float],
) -> None:
    """Also where one variant scatters more; and ten standard deviations are seen."""
    generator = np.random.default_rng(6)
    wrong = 0
    seen = 0
    for _ in range(2000):
        one = generator.normal(0.0, spreads[0], size=3)
        other = generator.normal(0.0, spreads[1], size=3)
        far_away = other + 10 * max(spreads)
        wrong += unpaired_difference(list(one), list(other)).p_value < 0.05
        seen += unpaired_difference(list(one), list(far_away)).p_value < 0.05
    assert wrong / 2000 < 0.05
    assert seen / 2000 > 0.95


def test_unpaired_scores_are_those_of_welch() -> None:
    """His example's form: s1^2/n1 + s2^2/n2, with the degrees of freedom of Satterthwaite."""
    generator = np.random.default_rng(7)
    one = generator.normal(size=5)
    other = generator.normal(0.0, 3.0, size=9)

    difference = unpaired_difference(list(one), list(other))

    of_one = np.var(one, ddof=1) / 5
    of_other = np.var(other, ddof=1) / 9
    variance = of_one + of_other
    assert difference.mean == pytest.approx(one.mean() - other.mean())
    assert difference.standard_error == pytest.approx(variance**0.5)
    assert difference.freedom == int(variance**2 / (of_one**2 / 4 + of_other**2 / 8))


def test_the_error_of_seeds_and_data_covers_both() -> None:
    """Scores of crossed effects: of the seed, of the batch, and of both together. Three seeds are
    compared with three others that are as good on average over all data: wrong in at most 5 %.
    """
    generator = np.random.default_rng(8)
    wrong = 0
    for _ in range(1000):
        of_batches = generator.normal(size=20)
        of_variants_and_batches = generator.normal(0.0, 0.5, size=(2, 1, 20))
        of_seeds = generator.normal(0.0, 0.1, size=(2, 3, 1))
        of_seeds_and_batches = generator.normal(0.0, 0.3, size=(2, 3, 20))
        scores = of_batches + of_variants_and_batches + of_seeds + of_seeds_and_batches
        over_seeds = unpaired_difference(*scores.mean(axis=2).tolist())
        over_data = paired_difference(*scores.mean(axis=1).tolist(), counts=[1.0] * 20)
        wrong += with_split(over_seeds, over_data).p_value < 0.05
    assert wrong / 1000 < 0.05


def test_without_any_spread_a_difference_is_not_tested() -> None:
    assert math.isnan(unpaired_difference([0.9] * 3, [0.91] * 3).p_value)
    assert unpaired_difference([0.9] * 3, [0.9] * 3).p_value == 1.0


def test_seeds_without_spread_leave_the_freedom_of_the_data() -> None:
    over_seeds = ScoreDifference(1.0, 0.0, 3, 2)
    over_data = ScoreDifference(1.0, 0.5, 9, 8)
    assert with_split(over_seeds, over_data).freedom == 8


def test_two_standard_errors_of_many_batches_are_the_level() -> None:
    assert t_tail(1.9788, freedom=127) == pytest.approx(0.05, abs=1e-4)


@in_one
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 127])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 9.0])
def test_the_tail_is_the_integral_of_the_density(t: float, freedom: int) -> None:
    """The density of t by its definition, integrated over angles, on which it is smooth: (1 +
    x^2/v)^(-(v+1)/2).
    """
    angles = (np.arange(200_000) + 0.5) / 200_000 * math.pi / 2
    density = np.cos(angles) ** (freedom - 1)  # x = sqrt(v) tan(angle)
    is_beyond = angles > math.atan(t / math.sqrt(freedom))
    tail = density[is_beyond].sum() / density.sum()
    assert t_tail(t, freedom=freedom) == pytest.approx(tail, abs=1e-4)  # that of the sum


def test_one_pair_tells_nothing_of_the_noise() -> None:
    alone = paired_difference([1.0], [2.0], counts=[5.0])
    assert alone.mean == -1.0
    assert math.isnan(alone.standard_error)
    assert math.isnan(alone.p_value)


@pytest.mark.parametrize(
    ("first", "second"), [(math.inf, 1.0), (math.inf, math.inf), (math.nan, 1.0)]
)
def test_a_score_that_is_not_finite_tells_nothing(first: float, second: float) -> None:
    assert math.isnan(paired_difference([first, 1.0], [second, 1.5], counts=[1.0, 1.0]).p_value)


def test_a_batch_with_nothing_to_count_is_no_pair() -> None:
    with_empty = paired_difference([1.0, 9.0, 2.5], [2.0, 0.0, 3.0], counts=[2.0, 0.0, 3.0])
    assert with_empty == paired_difference([1.0, 2.5], [2.0, 3.0], counts=[2.0, 3.0])
    assert paired_difference([0.0], [0.0], counts=[0.0]).pairs == 0


def test_equal_scores_are_no_difference() -> None:
    assert paired_difference([1.0, 2.0], [1.0, 2.0], counts=[1.0, 1.0]).p_value == 1.0


def test_holm_keeps_the_order_and_never_falls_below() -> None:
    p_values = [0.2, 0.001, math.nan, 0.013, 0.04]
    corrected = holm(p_values)
    assert math.isnan(corrected[2])
    by_p_value = dict(zip(p_values, corrected, strict=True))
    in_order = [by_p_value[p] for p in (0.001, 0.013, 0.04, 0.2)]
    assert in_order == pytest.approx([0.004, 0.039, 0.08, 0.2])


def test_holm_is_wrong_about_any_of_ten_in_at_most_five_percent() -> None:
    generator = np.random.default_rng(4)
    wrong = 0
    for p_values in generator.uniform(size=(4000, 10)):
        wrong += min(holm(list(p_values))) < 0.05
    assert wrong / 4000 < 0.06


def test_mean_and_error_are_those_of_numpy() -> None:
    values = list(np.random.default_rng(5).normal(size=9))
    mean, error = mean_and_error(values)
    assert (mean, error) == pytest.approx((np.mean(values), np.std(values, ddof=1) / 3))


def test_a_repeat_that_is_not_finite_leaves_no_error_to_tell() -> None:
    assert mean_and_error([1.0, math.inf]) == (math.inf, None)
