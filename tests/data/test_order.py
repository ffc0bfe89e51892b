from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from in_one import in_one
from refused import refused
from surefoot.config.mixture_weights import quotas
from surefoot.data.mixture import MixtureOrder
from surefoot.data.order import InOrder, Order, folded, permutation
from surefoot.seeding import fold


def read(plan, steps):
    """The ids and the epochs of the first steps, one after the other."""
    ids = []
    epochs = []
    for step in range(steps):
        ids_of_step, epochs_of_step = plan.ids(step)
        ids.append(ids_of_step)
        epochs.append(epochs_of_step)
    return np.concatenate(ids), np.concatenate(epochs)


@in_one
@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4095, 4097, 70_000])
def test_permutation_is_a_bijection(size):
    permuted = permutation(size * 7, size, np.arange(size))

    assert np.array_equal(np.sort(permuted), np.arange(size))


@given(key=st.integers(0, 2**64 - 1), size=st.integers(1, 5000))
@settings(max_examples=50)
def test_permutation_is_a_bijection_under_any_key(key, size):
    assert len(np.unique(permutation(key, size, np.arange(size)))) == size


def test_permutation_of_a_trillion_samples_costs_nothing_and_stays_inside():
    permuted = permutation(3, 10**12, np.arange(10**12 - 1000, 10**12))

    assert len(np.unique(permuted)) == 1000
    assert permuted.min() >= 0
    assert permuted.max() < 10**12


@pytest.mark.parametrize("size", [3, 5, 24])
def test_every_sample_is_equally_likely_at_every_place(size):
    epochs = 4000

    ids = []
    for seed in range(epochs // 40):
        ids_of_seed, _ = Order(seed, samples=size, batch_size=size * 40).ids(0)
        ids.append(ids_of_seed)

    places = np.concatenate(ids).reshape(epochs, size)
    counts = np.stack([np.bincount(places[:, place], minlength=size) for place in range(size)])
    chi_squared = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    freedom = (size - 1) ** 2
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_all_orders_of_four_samples_occur_equally_often():
    epochs = 4800

    ids, _ = Order(1, samples=4, batch_size=4 * epochs).ids(0)

    orders = ids.reshape(epochs, 4)
    for order in itertools.permutations(range(4)):
        count = (orders == order).all(axis=1).sum()
        assert abs(count - 200) < 5 * 200**0.5


def test_folding_arrays_is_folding_their_elements():
    keys = [0, 1, 2**64 - 1, 0x9E3779B97F4A7C15]
    parts = [0, 5, 2**40, 1]

    of_arrays = folded(np.array(keys, dtype=np.uint64), np.array(parts, dtype=np.uint64))

    assert of_arrays.tolist() == list(map(fold, keys, parts))


@pytest.mark.parametrize(
    ("samples", "batch_size"), [(10, 4), (7, 7), (5, 12), (1, 3), (1000, 32), (40_000, 999)]
)
def test_nothing_is_dropped_or_repeated_within_a_pass(samples, batch_size):
    plan = Order(0, samples=samples, batch_size=batch_size)

    ids, _ = read(plan, math.ceil(3 * samples / batch_size))

    for epoch in ids[: 3 * samples].reshape(3, samples):
        assert np.array_equal(np.sort(epoch), np.arange(samples))


def test_epochs_stand_beside_their_samples():
    _, epochs = read(Order(0, samples=10, batch_size=4), 10)

    assert epochs.tolist() == [position // 10 for position in range(40)]


def test_two_epochs_and_two_seeds_have_different_orders():
    first, second = read(Order(0, samples=100, batch_size=100), 2)[0].reshape(2, 100)
    of_other_seed, _ = Order(1, samples=100, batch_size=100).ids(0)

    assert first.tolist() != second.tolist()
    assert first.tolist() != of_other_seed.tolist()


@pytest.mark.parametrize(
    "build",
    [
        lambda: Order(0, samples=137, batch_size=10),
        lambda: Order(0, samples=3, batch_size=10),
        lambda: MixtureOrder(0, sizes=[137, 3, 50_000], weights=[1, 2, 3], batch_size=37),
    ],
)
def test_a_step_is_the_same_whatever_was_asked_before(build):
    plan = build()

    for step in (0, 1, 5000, 2, 3276, 3277, 0, 10**9, 1):
        ids, epochs = plan.ids(step)
        fresh_ids, fresh_epochs = build().ids(step)
        assert ids.tolist() == fresh_ids.tolist()
        assert epochs.tolist() == fresh_epochs.tolist()


@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_the_sequence_of_samples_does_not_depend_on_the_batch_size(batch_size):
    at_once, _ = Order(5, samples=50, batch_size=192).ids(0)

    ids, _ = read(Order(5, samples=50, batch_size=batch_size), 192 // batch_size)

    assert ids.tolist() == at_once.tolist()


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
    assert permutation(0, 10, np.arange(10)).tolist() == [2, 0, 1, 9, 4, 5, 8, 7, 6, 3]
    assert permutation(0, 1000, np.arange(5)).tolist() == [732, 165, 846, 50, 605]


def test_in_order_holds_every_sample_once():
    plan = InOrder(samples=10, batch_size=4)
    assert [plan.ids(step)[0].tolist() for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.7, 0.2, 0.1], [5, 3, 991], [0.123, 0.456, 7.1]])
def test_mixture_keeps_its_quotas_in_every_block(weights):
    sizes = [700, 40, 5000]

    ids, _ = read(MixtureOrder(3, sizes=sizes, weights=weights, batch_size=250), 40)

    sources = np.searchsorted(np.cumsum(sizes), ids, side="right")
    for block in sources.reshape(10, 1000):
        assert np.bincount(block, minlength=3).tolist() == quotas(weights)


def test_mixture_goes_through_each_source_in_whole_passes():
    sizes = [30, 7, 400]

    ids, epochs = read(MixtureOrder(3, sizes=sizes, weights=[1, 1, 2], batch_size=100), 40)

    for first, size in zip([0, 30, 37], sizes, strict=True):
        of_source = (ids >= first) & (ids < first + size)
        for epoch in range(int(epochs[of_source].max())):  # the last pass may be cut off
            of_epoch = np.sort(ids[of_source & (epochs == epoch)])
            assert np.array_equal(of_epoch, np.arange(first, first + size))


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
    assume(min(shares) >= 1)

    filled = quotas(weights)

    assert sum(filled) == 1000
    for quota, share in zip(filled, shares, strict=True):
        assert abs(quota - share) < 1
