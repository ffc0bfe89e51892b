"""Orders after any history of batch sizes: every sample once an epoch, at every cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from surefoot.config.batch_size import Batching, batching
from surefoot.data.batch_lists import BatchLists
from surefoot.data.buckets import Buckets
from surefoot.data.mixture import MixtureOrder
from surefoot.data.order import Cut, MicroBatches, Order, Passed
from surefoot.data.orders import Lanes, SequentialOrder, Weighted, WeightedOrder
from surefoot.data.streams.tape import Arrival
from surefoot.run.history import SettingsHistory, StepSize, passed_in
from surefoot.train.changed_settings import SegmentSettings

SAMPLES = 47
PARTS = [30, 17]  # of the mixture
LENGTHS = np.arange(SAMPLES) % 9 + 1

Build = Callable[[Batching, Passed], MicroBatches]


def permutation(sizes: Batching, passed: Passed) -> MicroBatches:
    order = Order(3, samples=SAMPLES, batch_size=sizes.batch_size, passed=passed)
    return Cut(order, sizes.micro_batch_size)


def sequential(sizes: Batching, passed: Passed) -> MicroBatches:
    order = SequentialOrder(samples=SAMPLES, batch_size=sizes.batch_size, passed=passed)
    return Cut(order, sizes.micro_batch_size)


def weighted(sizes: Batching, passed: Passed) -> MicroBatches:
    weights = Weighted([1.0 + sample % 3 for sample in range(SAMPLES)], replacement=False)
    order = WeightedOrder(3, weights, batch_size=sizes.batch_size, passed=passed)
    return Cut(order, sizes.micro_batch_size)


def mixture(sizes: Batching, passed: Passed) -> MicroBatches:
    order = MixtureOrder(
        3, sizes=PARTS, weights=[2.0, 1.0], batch_size=sizes.batch_size, passed=passed
    )
    return Cut(order, sizes.micro_batch_size)


def stream(sizes: Batching, passed: Passed) -> MicroBatches:
    order = Arrival(
        lambda row: SAMPLES,
        samples=SAMPLES,
        batch_size=sizes.batch_size,
        head=4,
        passed=passed,
    )
    return Cut(order, sizes.micro_batch_size)


def lanes(sizes: Batching, passed: Passed) -> MicroBatches:
    order = Lanes(samples=SAMPLES, batch_size=sizes.batch_size, passed=passed)
    return Cut(order, sizes.micro_batch_size, steps=order.steps)


def buckets(sizes: Batching, passed: Passed) -> MicroBatches:
    return Buckets(
        3, lengths=LENGTHS, tokens=9 * sizes.micro_batch_size, pieces=sizes.pieces, passed=passed
    )


def lists(sizes: Batching, passed: Passed) -> MicroBatches:
    batches = BatchSampler(SequentialSampler(range(SAMPLES)), 5, drop_last=False)
    listed = BatchLists(3, batches, samples=SAMPLES, has_torch_batches=True)
    return listed.resized(sizes.batch_size).cut(sizes.pieces, passed)


BUILDS: dict[str, Build] = {
    build.__name__: build
    for build in (permutation, sequential, weighted, mixture, stream, lanes, buckets, lists)
}
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4)).map(
    lambda pair: batching(pair[0] * pair[1], pair[0])
)
HISTORIES = st.lists(st.tuples(SIZES, st.integers(1, 9)), min_size=1, max_size=6)


FULL_STEPS = ("permutation", "sequential", "weighted", "mixture", "stream")


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "mixture"])
@settings(max_examples=25)
@given(history=HISTORIES)
def test_every_sample_is_seen_once_an_epoch_at_every_cut(
    name: str, history: list[tuple[Batching, int]]
) -> None:
    by_epoch: dict[int, list[int]] = {}
    for sample, epoch in read_by(plans_of(BUILDS[name], history)):
        assert epoch in (len(by_epoch), len(by_epoch) - 1)  # in the order of the epochs
        by_epoch.setdefault(epoch, []).append(sample)

    *whole, last = by_epoch.values()
    assert all(sorted(samples) == list(range(SAMPLES)) for samples in whole)
    assert len(set(last)) == len(last)
    if name not in FULL_STEPS:
        assert len(last) == SAMPLES


@pytest.mark.parametrize("name", FULL_STEPS)
@settings(max_examples=25)
@given(history=HISTORIES)
def test_full_steps_read_what_a_run_without_changes_reads(
    name: str, history: list[tuple[Batching, int]]
) -> None:
    read = read_by(plans_of(BUILDS[name], history))
    one_by_one = BUILDS[name](batching(1, 1), Passed())
    assert read == read_by([(one_by_one, range(len(read)))])


def read_by(plans: list[tuple[Any, range]]) -> list[tuple[int, int]]:
    """Return the samples of some steps with their epochs, in order."""
    read: list[tuple[int, int]] = []
    for plan, steps in plans:
        for step in steps:
            for ids, epochs in plan.micro_batches(step):
                read += zip(ids.tolist(), epochs.tolist(), strict=True)
    return read


@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=10)
@given(history=HISTORIES)
def test_a_step_has_the_same_samples_whatever_was_read_before_it(
    name: str, history: list[tuple[Batching, int]]
) -> None:
    for plan, steps in plans_of(BUILDS[name], history):
        again = [plan.micro_batches(step) for step in reversed(steps)]
        for step, pieces in zip(steps, reversed(again), strict=True):
            for (ids, epochs), (ids_then, epochs_then) in zip(
                plan.micro_batches(step), pieces, strict=True
            ):
                assert np.array_equal(ids, ids_then)
                assert np.array_equal(epochs, epochs_then)


@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=10)
@given(history=HISTORIES)
def test_a_step_before_the_present_size_can_be_looked_at(
    name: str, history: list[tuple[Batching, int]]
) -> None:
    plan, steps = plans_of(BUILDS[name], history)[-1]
    for step in range(steps.start):
        for ids, epochs in plan.micro_batches(step):
            assert len(ids) == len(epochs)
            assert all(0 <= sample < SAMPLES for sample in ids.tolist())
            assert (epochs >= 0).all()


def plans_of(build: Build, history: list[tuple[Batching, int]]) -> list[tuple[Any, range]]:
    """Return the plan of each part of a history with its steps. A part has a number of steps, or of
    epochs if each begins with a step.
    """

    def step_size(chosen: Any, samples: int) -> StepSize:
        steps = build(chosen.sizes, Passed()).steps
        return StepSize(chosen.sizes.batch_size, samples, steps)

    counts = []
    for sizes, count in history:
        steps_per_epoch = build(sizes, Passed()).steps
        counts.append(count if steps_per_epoch is None else -(-count // 3) * steps_per_epoch)
    begins = [0, *accumulate(counts)]
    segments: list[Any] = []
    for begin, (sizes, _) in zip(begins, history, strict=False):
        chosen = SimpleNamespace(
            batch_size=f"{sizes.batch_size} tokens",  # so that both sizes decide
            micro_batch_size=f"{sizes.micro_batch_size} tokens",
            sizes=sizes,
        )
        segments.append(SegmentSettings(begin, chosen))  # type: ignore[arg-type]
    plans = []
    for index, segment in enumerate(segments):
        past = tuple(segments[: index + 1])
        passed, _ = passed_in(SettingsHistory({}, (), past), step_size, samples=SAMPLES)
        plan = build(segment.settings.sizes, passed)
        plans.append((plan, range(segment.begin, begins[index + 1])))
    return plans
