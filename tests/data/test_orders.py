"""Orders beside the permutation: what each step reads, as a function of its number alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from refused import refused
from surefoot.config.batch_size import Batching
from surefoot.config.order import Weighted
from surefoot.data.batch_lists import BatchLists
from surefoot.data.order import Order
from surefoot.data.orders import Lanes, SequentialOrder, WeightedOrder, plan_order

WEIGHTS = [0.0, 1.0, 2.0, 0.5, 3.0, 0.0, 1.5]


class Lists:
    """A batch sampler that lists what a function of the epoch returns."""

    def __init__(self, list_of: Callable[[int], Any]) -> None:
        self.list_of = list_of
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.list_of(self.epoch))


def shuffled(_: int) -> list[list[int]]:
    """Batches of a sampler that draws from Python's and torch's global generators."""
    ids = torch.randperm(23).tolist()
    random.shuffle(ids)
    return [ids[start : start + 5] for start in range(0, 23, 5)]


def sequence(plan: Any, steps: int) -> tuple[list[int], list[int]]:
    """Ids and epochs of the first steps, one after the other."""
    ids, epochs = zip(*(plan.ids(step) for step in range(steps)), strict=True)
    return np.concatenate(ids).tolist(), np.concatenate(epochs).tolist()


PLANS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialOrder(samples=23, batch_size=10),
    "lanes": lambda: Lanes(samples=23, batch_size=10),
    "weighted": lambda: WeightedOrder(0, Weighted(WEIGHTS), batch_size=10),
    "weighted, once": lambda: WeightedOrder(
        0, Weighted(WEIGHTS, num_samples=4, replacement=False), batch_size=10
    ),
    "some of a permutation": lambda: Order(0, samples=23, batch_size=10, num_samples=9),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_the_same_whatever_was_asked_before(name: str) -> None:
    plan = PLANS[name]()
    for step in (0, 1, 5000, 2, 3276, 0, 10**8, 1):
        again = PLANS[name]().ids(step)
        assert all(
            np.array_equal(one, other) for one, other in zip(plan.ids(step), again, strict=True)
        )


@pytest.mark.parametrize(
    "name", ["sequential", "weighted", "weighted, once", "some of a permutation"]
)
def test_the_sequence_of_samples_does_not_depend_on_the_batch_size(name: str) -> None:
    smaller = PLANS[name]()
    smaller.batch_size = 5
    if hasattr(smaller, "blocks"):
        smaller.blocks.batch_size = 5
    assert sequence(smaller, 40) == sequence(PLANS[name](), 20)


def test_sequential_is_first_to_last_epoch_after_epoch() -> None:
    ids, epochs = sequence(SequentialOrder(samples=7, batch_size=3), 14)
    assert ids == [*range(7)] * 6
    assert epochs == [place // 7 for place in range(42)]


@pytest.mark.parametrize(
    ("samples", "lanes"), [(24, 8), (23, 10), (101, 24), (10, 10), (7, 1), (19, 10)]
)
def test_lanes_are_the_parts_of_tensor_split(samples: int, lanes: int) -> None:
    plan = Lanes(samples=samples, batch_size=lanes)
    parts = [part.tolist() for part in torch.arange(samples).tensor_split(lanes)]
    for epoch in range(2):
        for place in range(plan.steps):
            ids, epochs = plan.ids(epoch * plan.steps + place)
            assert ids.tolist() == [part[place] for part in parts if place < len(part)]
            assert set(epochs.tolist()) == {epoch}
    assert sorted(sequence(plan, plan.steps)[0]) == [
        *range(samples)
    ]  # nothing is dropped or repeated


def test_lanes_of_equal_length_are_those_of_word_language_model() -> None:
    batchified = torch.arange(24).view(4, -1).t()  # batchify of its main.py
    plan = Lanes(samples=24, batch_size=4)
    assert [plan.ids(step)[0].tolist() for step in range(6)] == batchified.tolist()


def test_a_lane_stays_in_its_micro_batch() -> None:
    plan = plan_order("lanes", seed=0, samples=23, sizes=Batching(10, 5))
    lane_of = {
        sample: lane
        for lane, part in enumerate(np.array_split(np.arange(23), 10))
        for sample in part
    }
    for step in range(6):
        for index, (ids, _) in enumerate(plan.micro_batches(step)):
            assert all(lane_of[sample] // 5 == index for sample in ids.tolist())
    assert [len(ids) for ids, _ in plan.micro_batches(2)] == [
        3,
        0,
    ]  # of three lanes, one sample more


def chi_squared(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def bound(freedom: int) -> float:
    """Five standard deviations above the mean of a chi-squared distribution."""
    return freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("weights", [WEIGHTS, [1.0] * 30, [1e-300, 1e-300, 3e-300], [1e9, 5e8]])
def test_draws_have_the_distribution_of_their_weights(weights: list[float]) -> None:
    draws = 40_000
    ids, _ = WeightedOrder(3, Weighted(weights), batch_size=draws).ids(1)
    counts = np.bincount(ids, minlength=len(weights))
    expected = draws * np.array(weights) / sum(weights)
    possible = expected > 0
    assert not counts[~possible].any()
    assert chi_squared(counts[possible], expected[possible]) < bound(int(possible.sum()) - 1)


def test_two_draws_in_a_row_are_independent() -> None:
    draws = 60_000
    weights = np.array([1.0, 2.0, 3.0])
    ids = WeightedOrder(1, Weighted(weights.tolist()), batch_size=draws).ids(0)[0].reshape(-1, 2)
    counts = np.bincount(ids[:, 0] * 3 + ids[:, 1], minlength=9)
    expected = np.outer(weights, weights).ravel() / 36 * draws / 2
    assert chi_squared(counts, expected) < bound(8)


def test_draws_without_replacement_have_the_distribution_of_one_draw_after_the_other() -> None:
    epochs = 12_000
    weights = np.array([1.0, 2.0, 0.5, 3.0])
    plan = WeightedOrder(
        2, Weighted(weights.tolist(), num_samples=2, replacement=False), batch_size=2 * epochs
    )
    ids, numbers = plan.ids(0)
    assert numbers.tolist() == [place // 2 for place in range(2 * epochs)]
    counts = list[int]()
    expected = list[float]()
    pairs = ids.reshape(-1, 2)
    for first, second in itertools.permutations(range(4), 2):
        counts.append(int(((pairs[:, 0] == first) & (pairs[:, 1] == second)).sum()))
        rest = weights.sum() - weights[first]
        expected.append(epochs * weights[first] / weights.sum() * weights[second] / rest)
    assert sum(counts) == epochs  # no pair is one sample twice
    assert chi_squared(np.array(counts), np.array(expected)) < bound(11)


def test_no_two_draws_share_an_augmentation() -> None:
    ids, draws = sequence(WeightedOrder(0, Weighted(WEIGHTS), batch_size=10), 20)
    assert len({*zip(ids, draws, strict=True)}) == 200


@pytest.mark.parametrize("count", [4, 23, 30, 46, 60])
def test_an_epoch_of_another_size_has_the_first_samples_of_permutations(count: int) -> None:
    plan = Order(0, samples=23, batch_size=count, num_samples=count)
    for step in range(3):
        ids, passes = plan.ids(step)
        assert plan.samples == count
        for each in set(passes.tolist()):
            assert len({*ids[passes == each].tolist()}) == (passes == each).sum()  # none twice
    ids, passes = (list(part) for part in sequence(plan, 3))
    assert len({*zip(ids, passes, strict=True)}) == 3 * count  # each has its own augmentation


@pytest.mark.parametrize(
    ("arguments", "code", "fields"),
    [
        ({"weights": [1, -1]}, "setting-out-of-range", {"setting": "weights[1]", "value": -1.0}),
        ({"weights": [1, float("inf")]}, "setting-out-of-range", {"setting": "weights[1]"}),
        ({"weights": [1, float("nan")]}, "setting-out-of-range", {"setting": "weights[1]"}),
        ({"weights": [0, 0]}, "setting-out-of-range", {"setting": "sum(weights)"}),
        ({"weights": []}, "setting-out-of-range", {"setting": "sum(weights)"}),
        ({"weights": torch.ones(3, 2)}, "weights-not-numbers", {}),
        ({"weights": 3}, "weights-not-numbers", {}),
        ({"weights": [1], "num_samples": 0}, "setting-out-of-range", {"setting": "num_samples"}),
        ({"weights": [1, 0, 1], "replacement": False}, "draws-exceed-samples", {"samples": 2}),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(
    arguments: dict[str, Any], code: str, fields: dict[str, Any]
) -> None:
    with refused(code, **fields):
        Weighted(**arguments)


def test_weights_may_be_a_tensor_or_an_array() -> None:
    assert Weighted(torch.tensor([1.0, 2.0])) == Weighted(np.array([1, 2])) == Weighted([1, 2])


# --- batches of a sampler -------------------------------------------------------------------------


def read(plan: BatchLists, steps: int, *, pieces: int = 1) -> list[list[int]]:
    cut = plan.cut(pieces)
    return [
        np.concatenate([ids for ids, _ in cut.micro_batches(step)]).tolist()
        for step in range(steps)
    ]


def test_the_batches_of_each_epoch_are_those_that_the_sampler_lists() -> None:
    def by_epoch(epoch: int) -> list[list[int]]:
        return [[epoch, 1, 2], [3], [4, 5]]

    plan = BatchLists(0, Lists(by_epoch), samples=23)
    assert (plan.steps, plan.samples, plan.largest) == (3, 6, 3)
    assert read(plan, 9) == [batch for epoch in range(3) for batch in by_epoch(epoch)]
    assert [epochs.tolist() for step in (0, 5) for _, epochs in plan.micro_batches(step)] == [
        [0, 0, 0],
        [1, 1],
    ]


def test_a_sampler_that_draws_from_global_generators_is_addressed_and_changes_by_epoch() -> None:
    plan = BatchLists(0, Lists(shuffled), samples=23)
    steps = [0, 7, 3, 12, 1]
    forwards = read(plan, 15)
    assert [plan.micro_batches(step)[0][0].tolist() for step in steps] == [
        forwards[step] for step in steps
    ]
    assert [sorted(itertools.chain(*forwards[start : start + 5])) for start in (0, 5, 10)] == [
        [*range(23)]
    ] * 3
    assert forwards[:5] != forwards[5:10]
    assert read(BatchLists(1, Lists(shuffled), samples=23), 5) != forwards[:5]  # another seed


def test_reading_a_sampler_leaves_the_global_generators_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate()
    BatchLists(0, Lists(shuffled), samples=23).micro_batches(7)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize("pieces", [1, 2, 5, 8])
def test_a_listed_batch_is_cut_evenly_whatever_its_size(pieces: int) -> None:
    plan = BatchLists(0, Lists(shuffled), samples=23)
    assert read(plan, 15, pieces=pieces) == read(plan, 15)
    sizes = [len(ids) for ids, _ in plan.cut(pieces).micro_batches(0)]
    assert len(sizes) == pieces
    assert max(sizes) - min(sizes) <= 1


def test_a_sample_listed_twice_in_an_epoch_has_two_augmentations() -> None:
    plan = BatchLists(0, Lists(lambda _: [[4, 4, 1], [4, 1]]), samples=5)
    ids, epochs = zip(*(plan.micro_batches(step)[0] for step in range(4)), strict=True)
    addresses = [*zip(np.concatenate(ids).tolist(), np.concatenate(epochs).tolist(), strict=True)]
    assert len({*addresses}) == 10
    assert addresses[0] == (4, 0)  # the first is read as in a plain epoch


OWN = torch.Generator().manual_seed(0)
REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "its own generator": (
        lambda _: torch.randperm(20, generator=OWN).view(4, 5).tolist(),
        "sampler-not-repeatable",
    ),
    "no end": (lambda _: itertools.repeat([0, 1]), "sampler-without-end"),
    "another number": (lambda epoch: [[0]] * (epoch + 3), "sampler-epochs-differ"),
    "no batch": (lambda _: [], "sampler-without-batches"),
    "an empty batch": (lambda _: [[1], []], "sampler-batch-invalid"),
    "no such sample": (lambda _: [[1, 23]], "sampler-batch-invalid"),
    "a negative sample": (lambda _: [[-1]], "sampler-batch-invalid"),
    "samples, not batches": (lambda _: [1, 2], "sampler-batch-invalid"),
    "names": (lambda _: [["a"]], "sampler-batch-invalid"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_sampler_that_cannot_be_addressed_is_refused_by_name(name: str) -> None:
    list_of, code = REFUSED[name]
    with refused(code, sampler="Lists"):
        BatchLists(0, Lists(list_of), samples=23)


def test_another_number_of_batches_in_a_late_epoch_is_named_there() -> None:
    plan = BatchLists(0, Lists(lambda epoch: [[0], [1]] if epoch < 5 else [[0]]), samples=3)
    assert len(plan.micro_batches(9)) == 1
    with refused("sampler-epochs-differ", sampler="Lists", epoch=5, batches=1, first=2):
        plan.micro_batches(10)
