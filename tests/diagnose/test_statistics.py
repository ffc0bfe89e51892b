"""The statistics that findings are made with, against what defines them; under a second."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from surefoot.tools.diagnose.statistics import level, levels, noise, slope, spread, trend


@pytest.mark.parametrize("count", [4, 5, 6])
def test_the_trend_of_values_in_any_order_has_mean_0_and_deviation_1(count: int) -> None:
    """Over all orders, each as likely: so says Kendall 1975."""
    rising = np.arange(float(count))
    trends = np.array([trend(np.array(order)) for order in permutations(rising)])
    assert trends.mean() == pytest.approx(0.0, abs=1e-12)
    assert trends.std() == pytest.approx(1.0, rel=1e-12)
    assert trends.max() == trend(rising) == -trend(-rising)


def test_of_normal_values_spread_and_noise_are_the_standard_deviation() -> None:
    values = 3.0 * np.random.default_rng(0).standard_normal(200_000)
    assert spread(values) == pytest.approx(3.0, rel=0.01)
    assert noise(values) == pytest.approx(3.0, rel=0.01)


def test_a_slow_course_is_no_noise() -> None:
    values = 3.0 * np.random.default_rng(0).standard_normal(200_000)
    course = np.linspace(0, 1e6, len(values))
    assert noise(values + course) == pytest.approx(3.0, rel=0.01)


def test_a_few_strange_values_move_no_statistic() -> None:
    values = np.arange(50.0)
    values[[7, 20, 33]] = [1e9, math.nan, -math.inf]
    assert level(values) == pytest.approx(24.5, abs=2)
    assert slope(np.arange(50.0), values) == pytest.approx(1.0)
    assert trend(values) > 8


@pytest.mark.parametrize("count", [199, 200, 201, 5000])
def test_of_many_values_some_are_looked_at_the_first_and_the_last_among_them(count: int) -> None:
    steps = np.arange(float(count))
    used = min(count, 200)
    pairs = used * (used - 1) / 2
    deviation = math.sqrt(used * (used - 1) * (2 * used + 5) / 18)
    assert slope(steps, 3 * steps + 1) == pytest.approx(3.0)
    assert trend(steps) == pytest.approx(pairs / deviation)


@pytest.mark.parametrize("width", [1, 2, 51, 52])
def test_the_levels_of_windows_are_their_medians(width: int) -> None:
    values = np.random.default_rng(0).standard_normal(5000)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    assert levels(values, width).tolist() == np.median(windows, axis=1).tolist()
