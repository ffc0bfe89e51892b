from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from in_one import in_one
from refused import refused
from surefoot.data import loader as feed_module
from surefoot.data.loader import Feed, in_order, to_device
from surefoot.data.order import Order
from surefoot.errors import DataError
from surefoot.seeding import fold, seed_generators, seeded_bits, stream_key

CPU = torch.device("cpu")


class Augmented(Dataset):
    """Draws from all three generators for every sample."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, sample):
        numbers = [sample, random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor(numbers, dtype=torch.float64), sample


class Gathering:
    def __len__(self):
        return 20

    def gather(self, ids, epochs):
        return torch.from_numpy(ids * 100 + epochs)


def noisy(samples):
    return (
        torch.stack([numbers for numbers, _ in samples])
        + random.random()
        + np.random.rand()
        + torch.rand(())
    )


def fed(dataset, first, stop, *, batch_size=8, micro_batch_size=4, **options):
    samples = len(dataset[0]) if isinstance(dataset, tuple) else len(dataset)
    plan = Order(7, samples=samples, batch_size=batch_size)
    feed = Feed(dataset, plan, seed=7, micro_batch_size=micro_batch_size, device=CPU, **options)
    feed.start(first)
    try:
        return [feed.micro_batches(step) for step in range(first, stop)]
    finally:
        feed.close()


def tensors(steps):
    found = []
    for micro_batches in steps:
        for micro_batch in micro_batches:
            found += (
                list(micro_batch.batch)
                if isinstance(micro_batch.batch, list | tuple)
                else [micro_batch.batch]
            )
    return found


def bit_equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(one, other) for one, other in zip(some, others, strict=True)
    )


def made(kind):
    numbers = torch.arange(40.0).reshape(20, 2)
    return {
        "TensorDataset": TensorDataset(numbers, numbers[:, 0]),
        "tuple": (numbers, numbers[:, 0]),
        "subset": Subset(TensorDataset(numbers, numbers[:, 0]), range(19, -1, -1)),
        "gathers": Gathering(),
        "samples": Augmented(20),
        "list": [(numbers[place], numbers[place, 0]) for place in range(20)],
    }[kind]


KINDS = ["TensorDataset", "tuple", "subset", "gathers", "samples", "list"]


@pytest.mark.parametrize("kind", KINDS)
def test_starting_at_step_k_equals_skipping_to_k(kind):
    whole = fed(made(kind), 0, 9)
    assert bit_equal(tensors(fed(made(kind), 5, 9)), tensors(whole[5:]))


@in_one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
def test_samples_do_not_depend_on_the_micro_batch_size(kind, micro_batch_size):
    def rows(size):
        steps = fed(made(kind), 0, 6, micro_batch_size=size)
        first = [
            one.batch if isinstance(one.batch, torch.Tensor) else one.batch[0]
            for step in steps
            for one in step
        ]
        return torch.cat(first), np.concatenate(
            [one.sample_ids for step in steps for one in step]
        ).tolist()

    few, all_at_once = rows(micro_batch_size), rows(8)
    assert torch.equal(few[0], all_at_once[0])
    assert few[1] == all_at_once[1]


@pytest.mark.parametrize("kind", ["TensorDataset", "tuple", "list"])
def test_a_batch_holds_the_samples_that_it_names(kind):
    for micro_batch in [one for step in fed(made(kind), 0, 6) for one in step]:
        assert micro_batch.batch[1].tolist() == [2.0 * sample for sample in micro_batch.sample_ids]


def test_gathered_batches_are_those_read_sample_by_sample():
    dataset = made("TensorDataset")
    assert bit_equal(
        tensors(fed(dataset, 0, 6)), tensors(fed([dataset[place] for place in range(20)], 0, 6))
    )


def test_a_random_split_is_gathered_and_holds_its_own_samples():
    part, _ = random_split(
        made("TensorDataset"), [12, 8], generator=torch.Generator().manual_seed(0)
    )
    micro_batches = [one for step in fed(part, 0, 3, batch_size=4) for one in step]
    assert sorted(int(value) // 2 for one in micro_batches for value in one.batch[1]) == sorted(
        part.indices
    )


def test_a_data_set_smaller_than_a_batch_is_gone_through_as_often_as_needed():
    step = fed((torch.arange(3),), 0, 1, batch_size=9, micro_batch_size=9)[0]
    assert sorted(step[0].batch[0].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert step[0].epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_every_step_has_as_many_micro_batches_and_the_last_may_be_short():
    assert [
        [one.count for one in step] for step in fed(made("samples"), 0, 3, micro_batch_size=3)
    ] == [[3, 3, 2]] * 3


def test_the_same_sample_is_augmented_otherwise_in_the_next_epoch():
    first, second = fed(Augmented(8), 0, 2, micro_batch_size=8)
    row = second[0].batch[1].tolist().index(first[0].batch[1][0].item())
    assert (first[0].batch[0][0, 1:] != second[0].batch[0][row, 1:]).all()


class Seldom(Augmented):
    """Draws for a few samples only, from one generator each; torch's seed is that of the sample for
    all.
    """

    def __getitem__(self, sample):
        drawn = {5: random.random, 11: np.random.rand, 17: np.random.normal}.get(sample, float)()
        return torch.tensor([drawn, float(torch.initial_seed() >> 12)], dtype=torch.float64), sample


def test_what_few_samples_draw_comes_from_their_own_seed():
    dataset = Seldom(20)
    for micro_batch in [one for step in fed(dataset, 0, 6) for one in step]:
        expected = []
        for sample, epoch in zip(
            micro_batch.sample_ids.tolist(), micro_batch.epochs.tolist(), strict=True
        ):
            seed_generators(fold(stream_key(7, "augment"), epoch, sample))
            expected.append(dataset[sample][0])
        assert bit_equal([micro_batch.batch[0]], [torch.stack(expected)])


def test_only_the_generator_that_is_drawn_from_is_seeded_for_every_sample(monkeypatch):
    class Noisy(Augmented):
        def __getitem__(self, sample):
            return torch.tensor([np.random.rand()], dtype=torch.float64), sample

    def reseed(bits):
        seeds.append(bits)
        type(random._inst).seed(random._inst, bits)

    seeds = []
    monkeypatch.setattr(random, "seed", reseed)
    micro_batches = [one for step in fed(Noisy(20), 0, 3, micro_batch_size=8) for one in step]
    assert seeds == [
        0,
        0,
        0,
        0,
    ]  # before each micro-batch, and once more where the first draw is noticed
    monkeypatch.undo()
    for micro_batch in micro_batches:
        for sample, epoch, drawn in zip(
            micro_batch.sample_ids, micro_batch.epochs, micro_batch.batch[0], strict=True
        ):
            seed_generators(fold(stream_key(7, "augment"), int(epoch), int(sample)))
            assert drawn.item() == np.random.rand()


def test_no_sample_is_read_twice_where_none_draws_but_the_first_ones_that_show_it():
    class Counting(Augmented):
        asked = 0

        def __getitem__(self, sample):
            self.asked += 1
            return torch.tensor(sample)

    dataset = Counting(20)
    first = len(fed(dataset, 0, 1)[0][0].batch)
    assert dataset.asked == 8 + 2 * min(first, 4)
    dataset.asked = 0
    fed(dataset, 0, 3)
    assert dataset.asked == 24 + 2 * min(first, 4)


@pytest.mark.parametrize(
    "read", [torch.initial_seed, lambda: torch.rand((), dtype=torch.float64).item()]
)
def test_torch_seeds_are_those_of_the_sample_whether_they_are_drawn_from_or_read(read):
    class Reads(Augmented):
        def __getitem__(self, sample):
            return torch.tensor([float(read())], dtype=torch.float64), sample

    for micro_batch in [one for step in fed(Reads(20), 0, 3, micro_batch_size=8) for one in step]:
        for sample, epoch, number in zip(
            micro_batch.sample_ids, micro_batch.epochs, micro_batch.batch[0], strict=True
        ):
            seed_generators(fold(stream_key(7, "augment"), int(epoch), int(sample)))
            assert number.item() == float(read())


def test_a_seed_that_few_samples_read_is_that_of_the_sample():
    """After samples that draw otherwise, or that neither draw nor read a seed."""

    class Seeded(Augmented):
        def __getitem__(self, sample):
            if self.draws:
                random.random()
            bits = float(self.read() >> 12) if sample in (11, 17) else 0.0
            return torch.tensor([bits], dtype=torch.float64), sample

    for draws, read in ((True, torch.initial_seed), (False, seeded_bits)):
        Seeded.draws = draws
        Seeded.read = staticmethod(read)
        for micro_batch in [one for step in fed(Seeded(20), 0, 6) for one in step]:
            pairs = zip(micro_batch.sample_ids.tolist(), micro_batch.epochs.tolist(), strict=True)
            for (sample, epoch), number in zip(pairs, micro_batch.batch[0], strict=True):
                seed_generators(fold(stream_key(7, "augment"), epoch, sample))
                assert number.item() == (float(seeded_bits() >> 12) if sample in (11, 17) else 0.0)


def test_what_collate_draws_is_a_function_of_the_step():
    whole = tensors(fed(Augmented(20), 0, 4, collate=noisy))
    assert bit_equal(tensors(fed(Augmented(20), 2, 4, collate=noisy)), whole[4:])
    assert not torch.equal(whole[0], whole[1])


def test_what_collate_draws_comes_from_step_and_micro_batch_not_from_the_last_sample():
    steps = fed(
        Augmented(20), 0, 3, collate=lambda samples: torch.tensor([random.random()] * len(samples))
    )
    seed_generators(fold(stream_key(7, "collate"), 2, 1))
    assert steps[2][1].batch[0] == torch.tensor(random.random())


@pytest.mark.parametrize("kind", KINDS)
def test_reading_leaves_the_global_generators_as_they_were(kind):
    seed_generators(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    seed_generators(5)
    fed(made(kind), 0, 3)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_collate_is_given_single_samples_of_tensors():
    steps = fed(
        made("tuple"),
        0,
        2,
        collate=lambda samples: torch.stack([numbers for numbers, _ in samples]) * 10,
    )
    assert steps[0][0].batch[:, 0].tolist() == [20.0 * sample for sample in steps[0][0].sample_ids]


def test_collate_for_whole_batches_is_refused():
    with refused("collate-fn-without-samples", setting="collate_fn"):
        fed(Gathering(), 0, 1, collate=noisy)


def test_count_is_a_function_of_the_batch():
    steps = fed(made("tuple"), 0, 2, count=lambda batch: batch[0].numel())
    assert [one.count for step in steps for one in step] == [8, 8, 8, 8]


@pytest.mark.parametrize("count", [None, -1, float("nan"), "8", torch.ones(2)])
def test_a_count_that_is_no_number_of_targets_is_refused(count):
    with refused("count-invalid"):
        fed(made("tuple"), 0, 1, count=lambda _: count)


def test_a_batch_without_rows_asks_for_a_count():
    with refused("batch-not-countable", DataError):
        fed([1.0, 2.0], 0, 1, collate=sum)


@pytest.mark.filterwarnings("error")
def test_ids_are_copies_that_torch_takes_without_a_warning():
    plan = Order(0, samples=20, batch_size=2)
    before = [plan.ids(step)[0].tolist() for step in range(4)]
    for step in feed_of(plan):
        assert torch.as_tensor(step[0].sample_ids).tolist() == before.pop(0)
        step[0].sample_ids[:] = step[0].epochs[:] = -1
    assert [ids.tolist() for ids in (plan.ids(0)[0], plan.ids(3)[0])] == [fed_ids(0), fed_ids(3)]


def feed_of(plan):
    feed = Feed(made("tuple"), plan, seed=0, micro_batch_size=2, device=CPU)
    feed.start(0)
    return [feed.micro_batches(step) for step in range(4)]


def fed_ids(step):
    return Order(0, samples=20, batch_size=2).ids(step)[0].tolist()


def test_a_step_out_of_order_is_refused():
    with pytest.raises(ValueError, match=r"start\(4\) first"):
        Feed(
            made("tuple"),
            Order(0, samples=20, batch_size=2),
            seed=0,
            micro_batch_size=2,
            device=CPU,
        ).micro_batches(4)


def test_an_error_in_a_sample_names_sample_and_step():
    class Broken(Augmented):
        def __getitem__(self, sample):
            return 1 // (sample - 3)

    with refused("sample-unreadable", DataError, sample=3, kind="Broken") as caught:
        fed(Broken(10), 0, 4)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.fields["step"] in range(4)


def test_samples_that_do_not_fit_together_are_named():
    ragged = [torch.zeros(length) for length in range(1, 21)]
    with refused("samples-not-collated", DataError, step=0):
        fed(ragged, 0, 1)


def test_an_error_in_gather_names_samples_and_step():
    class Broken(Gathering):
        def gather(self, ids, epochs):
            raise OSError("disk gone")

    with refused("samples-not-gathered", DataError, step=0) as caught:
        fed(Broken(), 0, 1)
    assert isinstance(caught.value.__cause__, OSError)


@in_one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 7, 20, 64])
def test_in_order_gives_every_sample_once(kind, batch_size):
    found = list(in_order(made(kind), batch_size=batch_size, seed=0, device=CPU))
    assert np.concatenate([one.sample_ids for one in found]).tolist() == list(range(20))
    assert sum(one.count for one in found) == 20


@in_one
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("most", "batches"),
    [(1, [3]), (2, [1, 5]), (3, [1, 3, 5]), (6, [0, 1, 2, 4, 5, 6]), (7, range(7))],
)
def test_some_batches_in_order_are_spread_evenly_and_are_those_of_all(kind, most, batches):
    """Of 7, the middle of each part."""
    every = list(in_order(made(kind), batch_size=3, seed=0, device=CPU))
    some = list(in_order(made(kind), batch_size=3, seed=0, device=CPU, max_batches=most))
    assert [one.sample_ids.tolist() for one in some] == [
        every[place].sample_ids.tolist() for place in batches
    ]


def test_in_order_of_whole_batches_goes_without_the_runs_collate():
    found = list(in_order(Gathering(), batch_size=8, seed=0, device=CPU, collate=noisy))
    assert torch.cat([one.batch for one in found]).tolist() == [
        100 * sample for sample in range(20)
    ]


def test_moving_keeps_the_structure():
    there = torch.device("meta")
    found = to_device({"a": [torch.zeros(2), "text"], "b": (torch.zeros(3), None)}, there)
    assert found["a"][0].device == found["b"][0].device == there
    assert (found["a"][1], found["b"][1]) == ("text", None)


@pytest.mark.parametrize("kind", ["TensorDataset", "tuple", "subset", "gathers"])
def test_on_cuda_gathered_batches_are_pinned_and_on_their_way_one_step_ahead(kind, monkeypatch):
    """Without a GPU: what would be moved is noted, and stays where it is."""
    asked = []
    monkeypatch.setattr(
        feed_module,
        "to_device",
        lambda batch, device, pin: (asked.append((device.type, pin)), batch)[1],
    )
    feed = Feed(
        made(kind),
        Order(7, samples=20, batch_size=8),
        seed=7,
        micro_batch_size=4,
        device=torch.device("cuda"),
    )
    feed.start(0, stop=3)
    found = []
    ahead = []
    for step in range(3):
        found.append(feed.micro_batches(step))
        ahead.append(len(asked))
    feed.close()
    assert bit_equal(tensors(found), tensors(fed(made(kind), 0, 3)))
    assert ahead == [4, 6, 6]
    assert set(asked) == {("cuda", True)}


def test_a_repeated_micro_batch_is_a_copy_since_a_loss_may_write_into_the_batch():
    ((first, repeated),) = fed(Augmented(8), 0, 1, share=range(1), passes=2)
    assert (repeated.count, repeated.is_padding, len(repeated.sample_ids)) == (0, True, 0)
    expected = repeated.batch[0].clone()
    first.batch[0].zero_()
    first.batch.pop()
    assert len(repeated.batch) == 2
    assert torch.equal(repeated.batch[0], expected)
