from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset

from refused import refused
from surefoot.data import sample_arguments
from surefoot.data.dataset_checks import check_samples
from surefoot.data.fingerprints import hash_of, hashes_of_samples
from surefoot.data.loader import Feed, in_order
from surefoot.data.mixture import Mixture
from surefoot.data.order import Order
from surefoot.data.sample_arguments import SampleArguments
from surefoot.errors import DataError
from surefoot.seeding import fold, stream_key
from surefoot.tools.leakage_check import first_look

CPU = torch.device("cpu")


class Noisy:
    """Draws as many numbers as the sample has, and one of 32 bits, half of which the generator
    keeps for the next such draw.
    """

    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index, rng):  # noqa: PLE0302
        rng.random(index % 7), rng.integers(1 << 20, dtype=np.uint32)
        return index, rng.random()


class ByKeyword(Noisy):
    def __getitem__(self, index, scale=1.0, *, rng=None):
        return index, scale * super().__getitem__(index, rng)[1]


class Doubled:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


class PassesOn(Doubled):
    def __getitem__(self, index, rng):  # noqa: PLE0302
        return self.inner.__getitem__(index, rng)


def philox(bits):
    return np.random.Generator(np.random.Philox(key=bits))


def drawn(sample, epoch=0):
    return Noisy().__getitem__(sample, philox(fold(stream_key(7, "augment"), epoch, sample)))[1]


def fed(dataset, first=0, stop=6, **options):
    """The batches of steps; an epoch has 2.5 steps."""
    feed = Feed(
        dataset,
        Order(7, samples=20, batch_size=8),
        seed=7,
        micro_batch_size=4,
        device=CPU,
        **options,
    )
    feed.start(first, stop=stop)
    try:
        return [one for step in range(first, stop) for one in feed.micro_batches(step)]
    finally:
        feed.close()


def draws(micro_batches):
    return [number for one in micro_batches for number in one.batch[1].tolist()]


@pytest.mark.parametrize("kind", [Noisy, ByKeyword, lambda: PassesOn(Noisy())])
def test_rng_is_that_of_seed_epoch_and_sample(kind):
    for one in fed(kind()):
        of_samples = zip(one.sample_ids.tolist(), one.epochs.tolist(), strict=True)
        assert one.batch[1].tolist() == [drawn(sample, epoch) for sample, epoch in of_samples]


@pytest.mark.parametrize("workers", [1, 2])
def test_draws_do_not_depend_on_the_number_of_workers(workers):
    assert draws(fed(Noisy(), workers=workers)) == draws(fed(Noisy()))


def test_draws_do_not_depend_on_ranks_accumulation_or_the_first_step():
    whole = draws(fed(Noisy()))
    of_ranks = [draws(fed(Noisy(), share=range(rank, rank + 1))) for rank in (0, 1)]
    halves = [zip(*[iter(numbers)] * 4, strict=True) for numbers in of_ranks]
    assert [
        number for pair in zip(*halves, strict=True) for half in pair for number in half
    ] == whole
    assert draws(fed(Noisy(), 3)) == whole[24:]


def test_a_split_has_the_draws_of_the_first_epoch_at_any_batch_size():
    for batch_size in (3, 20):
        assert draws(in_order(Noisy(), batch_size=batch_size, seed=7, device=CPU)) == [
            *map(drawn, range(20))
        ]


@pytest.mark.parametrize("has_words", [True, False])
def test_first_draws_of_consecutive_samples_and_epochs_are_uniform_and_uncorrelated(
    has_words, monkeypatch
):
    if not has_words:
        monkeypatch.setattr(sample_arguments, "_words", lambda bit_generator: None)

    class First(Noisy):
        def __getitem__(self, index, rng):  # noqa: PLE0302
            return rng.random()

    reads = SampleArguments(First())
    key = stream_key(0, "augment")
    n = 8192
    numbers = np.empty((2, n))
    for epoch, sample in np.ndindex(2, n):
        reads.seed(fold(key, epoch, sample))
        numbers[epoch, sample] = reads.dataset[sample]
    assert len(np.unique(numbers)) == 2 * n
    counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
    chi_square = ((counts - 2 * n / 64) ** 2 / (2 * n / 64)).sum()
    assert 33 < chi_square < 105  # 63 degrees of freedom: beyond it with probability 0.0015
    one, other = numbers
    for first, second in [(one, other), (one[:-1], one[1:]), (one[:-2], one[2:])]:
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / n**0.5


@pytest.mark.parametrize("has_words", [True, False])
def test_after_any_draws_the_generator_is_a_new_philox(has_words, monkeypatch):
    if not has_words:
        monkeypatch.setattr(sample_arguments, "_words", lambda bit_generator: None)
    reads = SampleArguments(Noisy())
    assert (reads.words is not None) == has_words
    for bits in (0, 1, 2**64 - 1, fold(3, 5)):
        reads.seed(bits)
        new = philox(bits)
        for draw in (
            "random(5)",
            "integers(9, size=3, dtype=np.uint32)",
            "standard_normal(3, dtype=np.float32)",
        ):
            ours, theirs = (
                eval(f"rng.{draw}", {"np": np, "rng": rng}) for rng in (reads.generator, new)
            )
            assert ours.tolist() == theirs.tolist()


def test_a_memory_of_another_layout_is_not_written(monkeypatch):
    monkeypatch.setattr(sample_arguments, "_KEY", 9)
    assert SampleArguments(Noisy()).words is None


WRAPPED = {
    "subset": lambda: Subset(Subset(Noisy(), range(1, 20)), range(5)),
    "concatenation": lambda: ConcatDataset([torch.arange(1), Subset(Noisy(), range(1, 5))]),
    "stack": lambda: Subset(StackDataset(Noisy(), ByKeyword()), range(1, 5)),
    "named stack": lambda: StackDataset(index=range(20), noise=Noisy()),
    "mixture": lambda: Mixture({"a": (Subset(Noisy(), [1, 2]), 0.5), "b": ([3, 4], 0.5)}),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapper_of_torch_or_a_mixture_passes_it_on(kind):
    dataset = WRAPPED[kind]()
    reads = SampleArguments(dataset)
    sample = 1
    reads.seed(11)
    rng = philox(11)
    first = Noisy().__getitem__({"subset": 2, "stack": 2, "mixture": 2}.get(kind, 1), rng)
    second = {
        "stack": lambda: (first, Noisy().__getitem__(2, rng)),
        "named stack": lambda: {"index": 1, "noise": first},
    }
    assert reads.dataset[sample] == second.get(kind, lambda: first)()
    with pytest.raises(TypeError, match="'rng'"):
        dataset[sample]  # the user's own data set is as it was


def test_a_data_set_without_it_is_read_as_it_is():
    for dataset in (
        [1, 2],
        Subset([1, 2], [0]),
        ConcatDataset([[1], [2]]),
        StackDataset([1], [2]),
        Doubled([1]),
    ):
        assert SampleArguments(dataset).dataset is dataset


def test_the_start_reads_such_a_data_set_under_one_seed_and_refuses_a_wrapper_that_passes_none_on():
    assert check_samples(Subset(Noisy(), range(5)), seed=0) == 5
    with refused("sample-unreadable", DataError, kind="Doubled") as caught:
        check_samples(Doubled(Noisy()), seed=0)
    assert "def __getitem__(self, index, rng)" in str(caught.value.remedies)


def test_an_error_names_the_generator_that_repeats_it():
    class Broken(Noisy):
        def __getitem__(self, index, rng):  # noqa: PLE0302
            return 1 // (index - 3)

    with refused("sample-unreadable", DataError, sample=3, kind="Broken") as caught:
        fed(Broken())
    epoch_0 = fold(stream_key(7, "augment"), 0, 3)
    call = f"dataset.__getitem__(3, rng=np.random.Generator(np.random.Philox(key={epoch_0})))"
    assert call in str(caught.value.remedies)


def test_hashes_of_samples_and_the_check_for_leaks_read_each_sample_under_its_seed():
    hashes = hashes_of_samples(Noisy(), seed=7, gather=False, unknown={})
    assert [hashes[f"sample {sample}"] for sample in (0, 10, 19)] == [
        hash_of((n, drawn(n))) for n in (0, 10, 19)
    ]
    overlap = first_look(Noisy(), {"val": Subset(Noisy(), [13, 5, 9])}, seed=0)["overlap"]
    assert overlap == {"val": {"checked": 3, "overlapping": 3}}


def test_only_rng_is_seeded_where_only_rng_is_drawn_from(monkeypatch):
    seeds = []
    reseed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda bits: (seeds.append(bits), reseed(bits)))
    fed(Noisy(), stop=3)
    assert seeds == [0] * 6  # one before each micro-batch


def test_a_sample_that_moves_its_generator_far_changes_no_other():
    reads = SampleArguments(Noisy())
    for change in (
        lambda rng: rng.advance(1 << 70),
        lambda rng: setattr(rng, "state", np.random.Philox(key=1 << 90).state),
    ):
        change(reads.bit_generator)
        reads.seed(5)
        assert reads.dataset[3] == Noisy().__getitem__(3, philox(5))


def test_a_copy_for_another_process_has_a_generator_of_its_own():
    reads = SampleArguments(Noisy())
    copied = pickle.loads(pickle.dumps(reads))
    copied.seed(5)
    reads.seed(6)
    assert (copied.dataset[3], reads.dataset[3]) == (
        Noisy().__getitem__(3, philox(5)),
        Noisy().__getitem__(3, philox(6)),
    )
