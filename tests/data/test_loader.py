from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from in_one import in_one
from refused import refused
from surefoot.data import loader
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
    noise = random.random() + np.random.rand() + torch.rand(())
    return torch.stack([numbers for numbers, _ in samples]) + noise


def read_steps(dataset, first, stop, *, batch_size=8, micro_batch_size=4, **options):
    samples = len(dataset[0]) if isinstance(dataset, tuple) else len(dataset)
    plan = Order(7, samples=samples, batch_size=batch_size)
    feed = Feed(dataset, plan, seed=7, micro_batch_size=micro_batch_size, device=CPU, **options)
    feed.start(first)
    try:
        return [feed.micro_batches(step) for step in range(first, stop)]
    finally:
        feed.close()


def read_micro_batches(dataset, first, stop, **options):
    return list(chain.from_iterable(read_steps(dataset, first, stop, **options)))


def tensors_of(micro_batches):
    """All tensors of their batches, in their order."""
    tensors = []
    for micro_batch in micro_batches:
        if isinstance(micro_batch.batch, torch.Tensor):
            tensors.append(micro_batch.batch)
        else:
            tensors += micro_batch.batch
    return tensors


def bit_equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


def seed_for(sample, epoch):
    """Seed the generators as for the augmentation of a sample."""
    seed_generators(fold(stream_key(7, "augment"), int(epoch), int(sample)))


def samples_of(micro_batch):
    """Each sample with its epoch, and its row of the batch's first tensor."""
    return zip(micro_batch.sample_ids, micro_batch.epochs, micro_batch.batch[0], strict=True)


NUMBERS = torch.arange(40.0).reshape(20, 2)
PAIRED = TensorDataset(NUMBERS, NUMBERS[:, 0])
DATA = {
    "TensorDataset": PAIRED,
    "tuple": (NUMBERS, NUMBERS[:, 0]),
    "subset": Subset(PAIRED, range(19, -1, -1)),
    "gathers": Gathering(),
    "samples": Augmented(20),
    "list": list(PAIRED),
}


@pytest.mark.parametrize("kind", DATA)
def test_starting_at_step_k_equals_skipping_to_k(kind):
    whole = read_steps(DATA[kind], 0, 9)

    started_at_5 = read_micro_batches(DATA[kind], 5, 9)

    assert bit_equal(tensors_of(started_at_5), tensors_of(chain.from_iterable(whole[5:])))


@in_one
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
def test_samples_do_not_depend_on_the_micro_batch_size(kind, micro_batch_size):
    def read_rows(size):
        inputs = []
        sample_ids = []
        for micro_batch in read_micro_batches(DATA[kind], 0, 6, micro_batch_size=size):
            inputs.append(tensors_of([micro_batch])[0])
            sample_ids += micro_batch.sample_ids.tolist()
        return torch.cat(inputs), sample_ids

    inputs, sample_ids = read_rows(micro_batch_size)
    inputs_at_once, sample_ids_at_once = read_rows(8)

    assert torch.equal(inputs, inputs_at_once)
    assert sample_ids == sample_ids_at_once


@pytest.mark.parametrize("kind", ["TensorDataset", "tuple", "list"])
def test_a_batch_holds_the_samples_that_it_names(kind):
    for micro_batch in read_micro_batches(DATA[kind], 0, 6):
        expected = [2.0 * sample for sample in micro_batch.sample_ids]
        assert micro_batch.batch[1].tolist() == expected


def test_gathered_batches_are_those_read_sample_by_sample():
    gathered = read_micro_batches(DATA["TensorDataset"], 0, 6)
    by_sample = read_micro_batches(DATA["list"], 0, 6)

    assert bit_equal(tensors_of(gathered), tensors_of(by_sample))


def test_a_random_split_is_gathered_and_holds_its_own_samples():
    part, _ = random_split(PAIRED, [12, 8], generator=torch.Generator().manual_seed(0))

    samples = []
    for micro_batch in read_micro_batches(part, 0, 3, batch_size=4):
        samples += [int(number) // 2 for number in micro_batch.batch[1]]

    assert sorted(samples) == sorted(part.indices)


def test_a_data_set_smaller_than_a_batch_is_gone_through_as_often_as_needed():
    (micro_batch,) = read_micro_batches((torch.arange(3),), 0, 1, batch_size=9, micro_batch_size=9)

    assert sorted(micro_batch.batch[0].tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert micro_batch.epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_every_step_has_as_many_micro_batches_and_the_last_may_be_short():
    for micro_batches in read_steps(DATA["samples"], 0, 3, micro_batch_size=3):
        assert [micro_batch.count for micro_batch in micro_batches] == [3, 3, 2]


def test_the_same_sample_is_augmented_otherwise_in_the_next_epoch():
    first, second = read_micro_batches(Augmented(8), 0, 2, micro_batch_size=8)

    numbers, samples = first.batch
    numbers_later, samples_later = second.batch
    row = samples_later.tolist().index(samples[0].item())
    assert (numbers[0, 1:] != numbers_later[row, 1:]).all()


class Seldom(Augmented):
    """Draws for a few samples only, from one generator each; torch's seed is that of the sample for
    all.
    """

    def __getitem__(self, sample):
        draws = {5: random.random, 11: np.random.rand, 17: np.random.normal}
        number = draws[sample]() if sample in draws else 0.0
        seed = float(torch.initial_seed() >> 12)
        return torch.tensor([number, seed], dtype=torch.float64), sample


def test_what_few_samples_draw_comes_from_their_own_seed():
    dataset = Seldom(20)

    for micro_batch in read_micro_batches(dataset, 0, 6):
        for sample, epoch, row in samples_of(micro_batch):
            seed_for(sample, epoch)
            expected, _ = dataset[sample]
            assert torch.equal(row, expected)


def test_only_the_generator_that_is_drawn_from_is_seeded_for_every_sample(monkeypatch):
    class Noisy(Augmented):
        def __getitem__(self, sample):
            return torch.tensor([np.random.rand()], dtype=torch.float64), sample

    def reseed(bits):
        seeds.append(bits)
        type(random._inst).seed(random._inst, bits)

    seeds = []
    monkeypatch.setattr(random, "seed", reseed)
    micro_batches = read_micro_batches(Noisy(20), 0, 3, micro_batch_size=8)
    monkeypatch.undo()

    # before each micro-batch, and once more where the first draw is noticed
    assert seeds == [0, 0, 0, 0]
    for micro_batch in micro_batches:
        for sample, epoch, number in samples_of(micro_batch):
            seed_for(sample, epoch)
            assert number.item() == np.random.rand()


def test_no_sample_is_read_twice_where_none_draws_but_the_first_ones_that_show_it():
    class Counting(Augmented):
        reads = 0

        def __getitem__(self, sample):
            self.reads += 1
            return torch.tensor(sample)

    dataset = Counting(20)
    first, *_ = read_micro_batches(dataset, 0, 1)
    read_again = 2 * min(len(first.batch), 4)
    assert dataset.reads == 8 + read_again

    dataset.reads = 0
    read_steps(dataset, 0, 3)
    assert dataset.reads == 24 + read_again


@pytest.mark.parametrize(
    "read", [torch.initial_seed, lambda: torch.rand((), dtype=torch.float64).item()]
)
def test_torch_seeds_are_those_of_the_sample_whether_they_are_drawn_from_or_read(read):
    class Reads(Augmented):
        def __getitem__(self, sample):
            return torch.tensor([float(read())], dtype=torch.float64), sample

    for micro_batch in read_micro_batches(Reads(20), 0, 3, micro_batch_size=8):
        for sample, epoch, number in samples_of(micro_batch):
            seed_for(sample, epoch)
            assert number.item() == float(read())


@pytest.mark.parametrize(
    ("draws", "read"),
    [
        pytest.param(True, torch.initial_seed, id="after samples that draw otherwise"),
        pytest.param(False, seeded_bits, id="after samples that neither draw nor read a seed"),
    ],
)
def test_a_seed_that_few_samples_read_is_that_of_the_sample(draws, read):
    class Seeded(Augmented):
        def __getitem__(self, sample):
            if draws:
                random.random()
            bits = float(read() >> 12) if sample in (11, 17) else 0.0
            return torch.tensor([bits], dtype=torch.float64), sample

    for micro_batch in read_micro_batches(Seeded(20), 0, 6):
        for sample, epoch, number in samples_of(micro_batch):
            seed_for(sample, epoch)
            expected = float(seeded_bits() >> 12) if sample in (11, 17) else 0.0
            assert number.item() == expected


def test_what_collate_draws_is_a_function_of_the_step():
    whole = tensors_of(read_micro_batches(Augmented(20), 0, 4, collate=noisy))

    started_at_2 = tensors_of(read_micro_batches(Augmented(20), 2, 4, collate=noisy))

    assert bit_equal(started_at_2, whole[4:])
    assert not torch.equal(whole[0], whole[1])


def test_what_collate_draws_comes_from_step_and_micro_batch_not_from_the_last_sample():
    def draw(samples):
        return torch.tensor([random.random()] * len(samples))

    steps = read_steps(Augmented(20), 0, 3, collate=draw)

    seed_generators(fold(stream_key(7, "collate"), 2, 1))
    assert steps[2][1].batch[0] == torch.tensor(random.random())


@pytest.mark.parametrize("kind", DATA)
def test_reading_leaves_the_global_generators_as_they_were(kind):
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    seed_generators(5)
    expected = draw()

    seed_generators(5)
    read_steps(DATA[kind], 0, 3)

    assert draw() == expected


def test_collate_is_given_single_samples_of_tensors():
    def stack_tenfold(samples):
        return torch.stack([numbers for numbers, _ in samples]) * 10

    first, *_ = read_micro_batches(DATA["tuple"], 0, 2, collate=stack_tenfold)

    assert first.batch[:, 0].tolist() == [20.0 * sample for sample in first.sample_ids]


def test_collate_for_whole_batches_is_refused():
    with refused("collate-fn-without-samples", setting="collate_fn"):
        read_steps(Gathering(), 0, 1, collate=noisy)


def test_count_is_a_function_of_the_batch():
    micro_batches = read_micro_batches(DATA["tuple"], 0, 2, count=lambda batch: batch[0].numel())

    assert [micro_batch.count for micro_batch in micro_batches] == [8, 8, 8, 8]


@pytest.mark.parametrize("count", [None, -1, float("nan"), "8", torch.ones(2)])
def test_a_count_that_is_no_number_of_targets_is_refused(count):
    with refused("count-invalid"):
        read_steps(DATA["tuple"], 0, 1, count=lambda _: count)


def test_a_batch_without_rows_asks_for_a_count():
    with refused("batch-not-countable", DataError):
        read_steps([1.0, 2.0], 0, 1, collate=sum)


def build_feed(plan):
    return Feed(DATA["tuple"], plan, seed=0, micro_batch_size=2, device=CPU)


def ids_of(plan):
    return [plan.ids(step)[0].tolist() for step in range(4)]


@pytest.mark.filterwarnings("error")
def test_ids_are_copies_that_torch_takes_without_a_warning():
    plan = Order(0, samples=20, batch_size=2)
    feed = build_feed(plan)
    feed.start(0)

    ids = []
    for step in range(4):
        (micro_batch,) = feed.micro_batches(step)
        ids.append(torch.as_tensor(micro_batch.sample_ids).tolist())
        micro_batch.sample_ids[:] = -1
        micro_batch.epochs[:] = -1

    expected = ids_of(Order(0, samples=20, batch_size=2))
    assert ids == expected
    assert ids_of(plan) == expected


def test_a_step_out_of_order_is_refused():
    feed = build_feed(Order(0, samples=20, batch_size=2))

    with pytest.raises(ValueError, match=r"start\(4\) first"):
        feed.micro_batches(4)


def test_an_error_in_a_sample_names_sample_and_step():
    class Broken(Augmented):
        def __getitem__(self, sample):
            return 1 // (sample - 3)

    with refused("sample-unreadable", DataError, sample=3, kind="Broken") as caught:
        read_steps(Broken(10), 0, 4)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.fields["step"] in range(4)


def test_samples_that_do_not_fit_together_are_named():
    ragged = [torch.zeros(length) for length in range(1, 21)]
    with refused("samples-not-collated", DataError, step=0):
        read_steps(ragged, 0, 1)


def test_an_error_in_gather_names_samples_and_step():
    class Broken(Gathering):
        def gather(self, ids, epochs):
            raise OSError("disk gone")

    with refused("samples-not-gathered", DataError, step=0) as caught:
        read_steps(Broken(), 0, 1)
    assert isinstance(caught.value.__cause__, OSError)


def ids_by_batch(micro_batches):
    return [micro_batch.sample_ids.tolist() for micro_batch in micro_batches]


@in_one
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("batch_size", [1, 7, 20, 64])
def test_in_order_gives_every_sample_once(kind, batch_size):
    batches = list(in_order(DATA[kind], batch_size=batch_size, seed=0, device=CPU))

    assert list(chain.from_iterable(ids_by_batch(batches))) == list(range(20))
    assert sum(batch.count for batch in batches) == 20


@in_one
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(
    ("max_batches", "places"),
    [(1, [3]), (2, [1, 5]), (3, [1, 3, 5]), (6, [0, 1, 2, 4, 5, 6]), (7, range(7))],
)
def test_some_batches_in_order_are_spread_evenly_and_are_those_of_all(kind, max_batches, places):
    """Of 7, the middle of each part."""
    all_ids = ids_by_batch(in_order(DATA[kind], batch_size=3, seed=0, device=CPU))

    some = in_order(DATA[kind], batch_size=3, seed=0, device=CPU, max_batches=max_batches)

    assert ids_by_batch(some) == [all_ids[place] for place in places]


def test_in_order_of_whole_batches_goes_without_the_runs_collate():
    batches = in_order(Gathering(), batch_size=8, seed=0, device=CPU, collate=noisy)

    numbers = torch.cat([micro_batch.batch for micro_batch in batches])
    assert numbers.tolist() == [100 * sample for sample in range(20)]


def test_moving_keeps_the_structure():
    there = torch.device("meta")
    batch = {"a": [torch.zeros(2), "text"], "b": (torch.zeros(3), None)}

    moved = to_device(batch, there)

    first, text = moved["a"]
    second, nothing = moved["b"]
    assert first.device == second.device == there
    assert text == "text"
    assert nothing is None


@pytest.mark.parametrize("kind", ["TensorDataset", "tuple", "subset", "gathers"])
def test_on_cuda_gathered_batches_are_pinned_and_on_their_way_one_step_ahead(kind, monkeypatch):
    """Without a GPU: what would be moved is noted, and stays where it is."""
    moves = []

    def note_move(batch, device, pin):
        moves.append((device.type, pin))
        return batch

    monkeypatch.setattr(loader, "to_device", note_move)
    plan = Order(7, samples=20, batch_size=8)
    feed = Feed(DATA[kind], plan, seed=7, micro_batch_size=4, device=torch.device("cuda"))
    feed.start(0, stop=3)

    micro_batches = []
    move_counts = []
    for step in range(3):
        micro_batches += feed.micro_batches(step)
        move_counts.append(len(moves))
    feed.close()

    assert move_counts == [4, 6, 6]
    assert set(moves) == {("cuda", True)}
    on_cpu = read_micro_batches(DATA[kind], 0, 3)
    assert bit_equal(tensors_of(micro_batches), tensors_of(on_cpu))


def test_a_repeated_micro_batch_is_padding():
    _, repeated = read_micro_batches(Augmented(8), 0, 1, share=range(1), passes=2)

    assert repeated.is_padding
    assert repeated.count == 0
    assert len(repeated.sample_ids) == 0


def test_a_repeated_micro_batch_is_a_copy_since_a_loss_may_write_into_the_batch():
    first, repeated = read_micro_batches(Augmented(8), 0, 1, share=range(1), passes=2)
    expected = repeated.batch[0].clone()

    first.batch[0].zero_()
    first.batch.pop()

    assert len(repeated.batch) == 2
    assert torch.equal(repeated.batch[0], expected)
