"""Orders beside the permutation: what each step reads, as a function of its number alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
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
    ids = list[int]()
    epochs = list[int]()
    for step in range(steps):
        ids_of_step, epochs_of_step = plan.ids(step)
        ids += ids_of_step.tolist()
        epochs += epochs_of_step.tolist()
    return ids, epochs


ONCE = Weighted(WEIGHTS, num_samples=4, replacement=False)
PLANS: dict[str, Callable[..., Any]] = {
    "sequential": partial(SequentialOrder, samples=23),
    "lanes": partial(Lanes, samples=23),
    "weighted": partial(WeightedOrder, 0, Weighted(WEIGHTS)),
    "weighted, once": partial(WeightedOrder, 0, ONCE),
    "some of a permutation": partial(Order, 0, samples=23, num_samples=9),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_the_same_whatever_was_asked_before(name: str) -> None:
    plan = PLANS[name](batch_size=10)

    for step in (0, 1, 5000, 2, 3276, 0, 10**8, 1):
        ids, epochs = plan.ids(step)
        fresh_ids, fresh_epochs = PLANS[name](batch_size=10).ids(step)
        assert np.array_equal(ids, fresh_ids)
        assert np.array_equal(epochs, fresh_epochs)


@pytest.mark.parametrize(
    "name", ["sequential", "weighted", "weighted, once", "some of a permutation"]
)
def test_the_sequence_of_samples_does_not_depend_on_the_batch_size(name: str) -> None:
    smaller = PLANS[name](batch_size=5)
    larger = PLANS[name](batch_size=10)

    assert sequence(smaller, 40) == sequence(larger, 20)


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

    for step in range(2 * plan.steps):
        epoch, place = divmod(step, plan.steps)
        ids, epochs = plan.ids(step)
        assert ids.tolist() == [part[place] for part in parts if place < len(part)]
        assert set(epochs.tolist()) == {epoch}


@pytest.mark.parametrize(
    ("samples", "lanes"), [(24, 8), (23, 10), (101, 24), (10, 10), (7, 1), (19, 10)]
)
def test_lanes_drop_and_repeat_nothing(samples: int, lanes: int) -> None:
    plan = Lanes(samples=samples, batch_size=lanes)

    ids, _ = sequence(plan, plan.steps)

    assert sorted(ids) == [*range(samples)]


def test_lanes_of_equal_length_are_those_of_word_language_model() -> None:
    batchified = torch.arange(24).view(4, -1).t()  # batchify of its main.py
    plan = Lanes(samples=24, batch_size=4)

    assert [plan.ids(step)[0].tolist() for step in range(6)] == batchified.tolist()


def test_a_lane_stays_in_its_micro_batch() -> None:
    plan = plan_order("lanes", seed=0, samples=23, sizes=Batching(10, 5))
    lanes = np.array_split(np.arange(23), 10)
    samples_of_micro_batches = [np.concatenate(lanes[:5]), np.concatenate(lanes[5:])]

    for step in range(6):
        for index, (ids, _) in enumerate(plan.micro_batches(step)):
            assert set(ids) <= set(samples_of_micro_batches[index])


def test_a_micro_batch_of_lanes_that_are_at_their_end_is_empty() -> None:
    plan = plan_order("lanes", seed=0, samples=23, sizes=Batching(10, 5))

    sizes = [len(ids) for ids, _ in plan.micro_batches(2)]

    assert sizes == [3, 0]  # three lanes have one sample more


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

    ids, _ = WeightedOrder(1, Weighted(weights.tolist()), batch_size=draws).ids(0)

    pairs = ids.reshape(-1, 2)
    counts = np.bincount(pairs[:, 0] * 3 + pairs[:, 1], minlength=9)
    expected = np.outer(weights, weights).ravel() / 36 * draws / 2
    assert chi_squared(counts, expected) < bound(8)


def test_draws_without_replacement_have_the_distribution_of_one_draw_after_the_other() -> None:
    epochs = 12_000
    weights = np.array([1.0, 2.0, 0.5, 3.0])
    pairs_of = Weighted(weights.tolist(), num_samples=2, replacement=False)

    ids, numbers = WeightedOrder(2, pairs_of, batch_size=2 * epochs).ids(0)

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

    assert plan.samples == count
    for step in range(3):
        ids, passes = plan.ids(step)
        for number in set(passes.tolist()):
            of_pass = ids[passes == number].tolist()
            assert len({*of_pass}) == len(of_pass), "none twice"


@pytest.mark.parametrize("count", [4, 23, 30, 46, 60])
def test_samples_of_an_epoch_of_another_size_share_no_augmentation(count: int) -> None:
    plan = Order(0, samples=23, batch_size=count, num_samples=count)

    ids, passes = sequence(plan, 3)

    assert len({*zip(ids, passes, strict=True)}) == 3 * count


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


def read_step(plan: BatchLists, step: int) -> list[int]:
    ids = [ids for ids, _ in plan.micro_batches(step)]
    return np.concatenate(ids).tolist()


def read_steps(plan: BatchLists, steps: int) -> list[list[int]]:
    return [read_step(plan, step) for step in range(steps)]


def test_the_batches_of_each_epoch_are_those_that_the_sampler_lists() -> None:
    plan = BatchLists(0, Lists(lambda epoch: [[epoch, 1, 2], [3], [4, 5]]), samples=23)

    assert plan.steps == 3
    assert plan.samples == 6
    assert plan.largest == 3
    assert read_steps(plan, 6) == [[0, 1, 2], [3], [4, 5], [1, 1, 2], [3], [4, 5]]
    ((_, epochs_of_first),) = plan.micro_batches(0)
    ((_, epochs_of_last),) = plan.micro_batches(5)
    assert epochs_of_first.tolist() == [0, 0, 0]
    assert epochs_of_last.tolist() == [1, 1]


@pytest.fixture
def shuffled_steps() -> list[list[int]]:
    """Three epochs of a sampler that draws from global generators, read in their order."""
    return read_steps(BatchLists(0, Lists(shuffled), samples=23), 15)


def test_a_sampler_that_draws_from_global_generators_is_addressed(
    shuffled_steps: list[list[int]],
) -> None:
    plan = BatchLists(0, Lists(shuffled), samples=23)

    for step in (0, 7, 3, 12, 1):
        assert read_step(plan, step) == shuffled_steps[step]


def test_a_sampler_that_draws_from_global_generators_changes_by_epoch_and_by_seed(
    shuffled_steps: list[list[int]],
) -> None:
    other_seed = read_steps(BatchLists(1, Lists(shuffled), samples=23), 5)

    epochs = [shuffled_steps[start : start + 5] for start in (0, 5, 10)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == [*range(23)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != other_seed


def test_reading_a_sampler_leaves_the_global_generators_as_they_were() -> None:
    torch_state = torch.get_rng_state()
    python_state = random.getstate()

    BatchLists(0, Lists(shuffled), samples=23).micro_batches(7)

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


@pytest.mark.parametrize("pieces", [1, 2, 5, 8])
def test_a_listed_batch_is_cut_evenly_whatever_its_size(
    pieces: int, shuffled_steps: list[list[int]]
) -> None:
    plan = BatchLists(0, Lists(shuffled), samples=23).cut(pieces)

    assert read_steps(plan, 15) == shuffled_steps
    sizes = [len(ids) for ids, _ in plan.micro_batches(0)]
    assert len(sizes) == pieces
    assert max(sizes) - min(sizes) <= 1


def test_a_sample_listed_twice_in_an_epoch_has_two_augmentations() -> None:
    plan = BatchLists(0, Lists(lambda _: [[4, 4, 1], [4, 1]]), samples=5)

    addresses = list[tuple[int, int]]()
    for step in range(4):
        ((ids, epochs),) = plan.micro_batches(step)
        addresses += zip(ids.tolist(), epochs.tolist(), strict=True)

    assert len({*addresses}) == 10
    assert addresses[0] == (4, 0)  # the first is read as in a plain epoch


GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("list_of", "code"),
    [
        pytest.param(
            lambda _: torch.randperm(20, generator=GENERATOR).view(4, 5).tolist(),
            "sampler-not-repeatable",
            id="its own generator",
        ),
        pytest.param(lambda _: itertools.repeat([0, 1]), "sampler-without-end", id="no end"),
        pytest.param(
            lambda epoch: [[0]] * (epoch + 3), "sampler-epochs-differ", id="another number"
        ),
        pytest.param(lambda _: [], "sampler-without-batches", id="no batch"),
        pytest.param(lambda _: [[1], []], "sampler-batch-invalid", id="an empty batch"),
        pytest.param(lambda _: [[1, 23]], "sampler-batch-invalid", id="no such sample"),
        pytest.param(lambda _: [[-1]], "sampler-batch-invalid", id="a negative sample"),
        pytest.param(lambda _: [1, 2], "sampler-batch-invalid", id="samples, not batches"),
        pytest.param(lambda _: [["a"]], "sampler-batch-invalid", id="names"),
    ],
)
def test_a_sampler_that_cannot_be_addressed_is_refused_by_name(
    list_of: Callable[[int], Any], code: str
) -> None:
    with refused(code, sampler="Lists"):
        BatchLists(0, Lists(list_of), samples=23)


def test_another_number_of_batches_in_a_late_epoch_is_named_there() -> None:
    plan = BatchLists(0, Lists(lambda epoch: [[0], [1]] if epoch < 5 else [[0]]), samples=3)
    assert len(plan.micro_batches(9)) == 1
    with refused("sampler-epochs-differ", sampler="Lists", epoch=5, batches=1, first=2):
        plan.micro_batches(10)
