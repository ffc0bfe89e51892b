from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.data.mixture import MixtureOrder, quotas
from surefoot.data.order import InOrder, Order, folded, permutation
from surefoot.seeding import fold


def seen(plan, steps):
    return [tuple(array.tolist() for array in plan.ids(step)) for step in steps]


@in_one
@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 70_000])
def test_permutation_is_a_bijection(size):
    assert np.array_equal(np.sort(permutation(size * 7, size, np.arange(size))), np.arange(size))


@given(key=st.integers(0, 2**64 - 1), size=st.integers(1, 5000))
@settings(max_examples=50)
def test_permutation_is_a_bijection_under_any_key(key, size):
    assert len(np.unique(permutation(key, size, np.arange(size)))) == size


def test_permutation_of_a_trillion_samples_costs_nothing_and_stays_inside():
    found = permutation(3, 10**12, np.arange(10**12 - 1000, 10**12))
    assert len(np.unique(found)) == 1000
    assert found.min() >= 0
    assert found.max() < 10**12


@pytest.mark.parametrize("size", [3, 5, 24])
def test_every_sample_is_equally_likely_at_every_place(size):
    epochs = 4000
    ids = np.concatenate(
        [Order(seed, samples=size, batch_size=size * 40).ids(0)[0] for seed in range(epochs // 40)]
    )
    places = ids.reshape(epochs, size)
    counts = np.stack([np.bincount(places[:, place], minlength=size) for place in range(size)])
    chi_squared = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    freedom = (size - 1) ** 2
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_all_orders_of_four_samples_occur_equally_often():
    epochs = 4800
    ids = Order(1, samples=4, batch_size=4 * epochs).ids(0)[0].reshape(epochs, 4)
    counts = [int((ids == order).all(axis=1).sum()) for order in itertools.permutations(range(4))]
    assert min(counts) > 200 - 5 * 200**0.5
    assert max(counts) < 200 + 5 * 200**0.5


def test_folding_arrays_is_folding_their_elements():
    keys = np.array([0, 1, 2**64 - 1, 0x9E3779B97F4A7C15], dtype=np.uint64)
    parts = np.array([0, 5, 2**40, 1], dtype=np.uint64)
    assert folded(keys, parts).tolist() == [
        fold(int(key), int(part)) for key, part in zip(keys, parts, strict=True)
    ]


@pytest.mark.parametrize(
    ("samples", "batch_size"), [(10, 4), (7, 7), (5, 12), (1, 3), (1000, 32), (40_000, 999)]
)
def test_nothing_is_dropped_or_repeated_within_a_pass(samples, batch_size):
    plan = Order(0, samples=samples, batch_size=batch_size)
    steps = -(-3 * samples // batch_size)
    ids = np.concatenate([plan.ids(step)[0] for step in range(steps)])
    for epoch in range(3):
        assert np.array_equal(
            np.sort(ids[epoch * samples : (epoch + 1) * samples]), np.arange(samples)
        )


def test_epochs_stand_beside_their_samples():
    plan = Order(0, samples=10, batch_size=4)
    epochs = np.concatenate([plan.ids(step)[1] for step in range(10)])
    assert epochs.tolist() == [position // 10 for position in range(40)]


def test_two_epochs_and_two_seeds_have_different_orders():
    plan = Order(0, samples=100, batch_size=100)
    assert (
        plan.ids(0)[0].tolist()
        != plan.ids(1)[0].tolist()
        != Order(1, samples=100, batch_size=100).ids(0)[0].tolist()
    )


@pytest.mark.parametrize(
    "made",
    [
        lambda: Order(0, samples=137, batch_size=10),
        lambda: Order(0, samples=3, batch_size=10),
        lambda: MixtureOrder(0, sizes=[137, 3, 50_000], weights=[1, 2, 3], batch_size=37),
    ],
)
def test_a_step_is_the_same_whatever_was_asked_before(made):
    forwards = made()
    steps = [0, 1, 5000, 2, 3276, 3277, 0, 10**9, 1]
    assert seen(forwards, steps) == [seen(made(), [step])[0] for step in steps]


@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_the_sequence_of_samples_does_not_depend_on_the_batch_size(batch_size):
    def sequence(batch_size):
        plan = Order(5, samples=50, batch_size=batch_size)
        return np.concatenate([plan.ids(step)[0] for step in range(192 // batch_size)]).tolist()

    assert sequence(batch_size) == sequence(192)


def test_step_one_million_costs_what_step_0_costs():
    def cost_s(step):
        times = []
        for _ in range(5):
            plan = Order(0, samples=50_000, batch_size=32)
            started = time.process_time()
            plan.ids(step)
            times.append(time.process_time() - started)
        return min(times)

    assert cost_s(10**6) < 5 * cost_s(0) + 1e-3


def test_order_of_this_version_is_the_order_of_the_next():
    # a changed number here means that runs already begun would see other samples: it needs a
    # decision note
    assert (
        Order(0, samples=1000, batch_size=6).ids(12345)[0].tolist()
        == Order(0, samples=1000, batch_size=6).ids(12345)[0].tolist()
    )
    assert permutation(0, 10, np.arange(10)).tolist() == [2, 0, 1, 9, 4, 5, 8, 7, 6, 3]
    assert permutation(0, 1000, np.arange(5)).tolist() == [732, 165, 846, 50, 605]


def test_in_order_holds_every_sample_once():
    plan = InOrder(samples=10, batch_size=4)
    assert [plan.ids(step)[0].tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.7, 0.2, 0.1], [5, 3, 991], [0.123, 0.456, 7.1]])
def test_mixture_keeps_its_quotas_in_every_block(weights):
    sizes = [700, 40, 5000]
    plan = MixtureOrder(3, sizes=sizes, weights=weights, batch_size=250)
    sources = np.searchsorted(
        np.cumsum(sizes), np.concatenate([plan.ids(step)[0] for step in range(40)]), side="right"
    )
    for block in sources.reshape(10, 1000):
        assert np.bincount(block, minlength=3).tolist() == quotas(weights)


def test_mixture_goes_through_each_source_in_whole_passes():
    sizes = [30, 7, 400]
    plan = MixtureOrder(3, sizes=sizes, weights=[1, 1, 2], batch_size=100)
    ids, epochs = (
        np.concatenate(part) for part in zip(*(plan.ids(step) for step in range(40)), strict=True)
    )
    for first, size in zip([0, 30, 37], sizes, strict=True):
        here = (ids >= first) & (ids < first + size)
        for epoch in range(int(epochs[here].max())):  # the last pass may be cut off
            assert np.array_equal(
                np.sort(ids[here & (epochs == epoch)]), np.arange(first, first + size)
            )


@pytest.mark.parametrize(
    "weights", [[1, 0], [1, -1], [1, float("inf")], [1, float("nan")], [], [1, 1e-9]]
)
def test_weights_that_cannot_be_kept_are_refused(weights):
    with refused("mixture-weights-invalid"):
        quotas(weights)


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
@settings(max_examples=50)
def test_quotas_fill_a_block_and_are_less_than_one_off(weights):
    shares = [weight / sum(weights) * 1000 for weight in weights]
    if min(shares) < 1:
        return
    found = quotas(weights)
    assert sum(found) == 1000
    assert all(abs(quota - share) < 1 for quota, share in zip(found, shares, strict=True))
