from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint, rows
from surefoot.data.fingerprints import hash_of
from surefoot.data.mixture import Mixture
from surefoot.data.text.windows import TrainWindows
from surefoot.errors import DataError
from surefoot.seeding import seed_generators


class Sized:
    def __len__(self):
        return 5


class Own(Sized):
    """Flips a coin of its own."""

    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, sample):
        return torch.tensor(float(sample)), self.draw()


@pytest.mark.parametrize(
    "draw",
    [
        random.Random(0).random,
        np.random.default_rng(0).normal,
        lambda generator=torch.Generator(): torch.rand((), generator=generator),  # noqa: B008
        lambda coin=random.Random(1): coin.random() < 0.5,  # noqa: B008
        lambda count=iter(range(10**9)): next(count),  # noqa: B008
    ],
)
def test_a_generator_of_its_own_is_found_and_named(draw):
    with refused("sample-not-repeatable", DataError, sample=0, kind="Own"):
        check_samples(Own(draw), seed=0)


class Late(Sized):
    """Draws from a generator of its own for the samples from `first` on; gathers them where it is
    told to.
    """

    def __init__(self, first):
        self.first = first
        self.generator = np.random.default_rng(0)

    def __getitem__(self, sample):
        return self.generator.normal() if sample >= self.first else float(sample)


class LateGathers(Late):
    def gather(self, ids, epochs):
        return torch.tensor([self[int(sample)] for sample in ids])


@pytest.mark.parametrize(
    ("kind", "code"), [(Late, "sample-not-repeatable"), (LateGathers, "gather-not-repeatable")]
)
@pytest.mark.parametrize(("first", "differs"), [(2, 2), (3, 4), (4, 4)])
def test_a_generator_that_matters_late_is_found(kind, code, first, differs):
    with refused(code, DataError, sample=differs, kind=kind.__name__):
        check_samples(kind(first), seed=0)
    assert check_samples(kind(5), seed=0) == 5


def test_one_sample_is_read_as_the_only_one():
    assert check_samples([torch.zeros(2)], seed=0) == 1
    assert check_samples([torch.zeros(2), torch.ones(2)], seed=0) == 2


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(()), lambda: float("nan")]
)
def test_global_generators_and_nan_pass(draw):
    assert check_samples(Own(draw), seed=0) == 5


def test_checking_leaves_the_global_generators_as_they_were():
    seed_generators(5)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    seed_generators(5)
    check_samples(Own(random.random), seed=0)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


def test_a_gather_that_draws_from_global_generators_is_refused():
    class Drawing(Sized):
        def gather(self, ids, epochs):
            return torch.rand(len(ids))

    with refused("gather-not-repeatable", DataError, sample=0):
        check_samples(Drawing(), seed=0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class SizedStream(Stream):
    def __len__(self):
        return 3


@pytest.mark.parametrize(
    "dataset", [Stream(), SizedStream(), iter([1, 2]), (one for one in [1, 2])]
)
def test_what_can_only_be_iterated_is_refused_with_a_way_out(dataset):
    with refused("data-set-only-iterated", DataError, kind=type(dataset).__name__):
        check_samples(dataset, seed=0)


def test_no_length_is_refused():
    class Endless:
        def __getitem__(self, sample):
            return sample

    with refused("data-set-without-length", DataError, kind="Endless"):
        check_samples(Endless(), seed=0)


@pytest.mark.parametrize("dataset", [[], TensorDataset(torch.zeros(0, 3)), (torch.zeros(0),)])
def test_no_samples_are_refused(dataset):
    with refused("data-set-empty", DataError):
        check_samples(dataset, seed=0)


def test_tensors_of_different_lengths_are_refused():
    with refused("tensors-differ-in-length", DataError, lengths=[3, 4]):
        check_samples((torch.zeros(3), torch.zeros(4)), seed=0)


def test_a_first_sample_that_cannot_be_read_is_an_error_before_training():
    class Gone(Sized):
        def __getitem__(self, sample):
            raise FileNotFoundError("picture.png")

    with refused("sample-unreadable", DataError, sample=0, kind="Gone") as caught:
        check_samples(Gone(), seed=0)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@dataclass
class Sample:
    values: torch.Tensor


@in_one
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([float("nan")]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (np.float32("nan"), np.float32("nan"), True),
        (float("nan"), float("nan"), True),
        ({"a": [1, "x", b"y"]}, {"a": [1, "x", b"y"]}, True),
        ({"a": 1}, {"b": 1}, False),
        ((1, 2), (1, 2, 3), False),
        (1, 1.0, False),
        (None, None, True),
        (Sample(torch.zeros(1)), Sample(torch.zeros(1)), True),
        (Sample(torch.zeros(1)), Sample(torch.ones(1)), False),
    ],
)
def test_sameness(one, other, expected):
    assert (hash_of(one) == hash_of(other)) is expected


def test_rows_are_those_of_the_first_tensor_anywhere():
    assert rows({"text": ["a"], "deep": (None, [torch.zeros(4, 2)])}) == 4


def test_fingerprint_is_json_that_tells_data_apart():
    def of(tensor):
        return json.dumps(fingerprint(TensorDataset(tensor)))

    numbers = torch.arange(12.0).reshape(4, 3)
    changed = numbers.clone()
    changed[3, 2] += 1
    others = [of(changed), of(numbers.double()), of(numbers.reshape(3, 4)), of(numbers[:3])]
    assert of(numbers) == of(numbers.clone())
    assert of(numbers) not in others


def test_fingerprint_stays_what_it_is_since_runs_that_are_there_hold_it():
    numbers = torch.arange(6.0).reshape(3, 2)
    assert fingerprint((numbers,))["sha256"] == "74039529be33f1e7"
    assert fingerprint(Subset(TensorDataset(numbers), [2, 0]))["indices"] == "e935a1f1bba7634c"
    assert fingerprint([1, "a", None])["sha256"] == "07822afb51167c10"


def test_fingerprint_of_a_data_set_that_says_it_itself():
    assert fingerprint(TrainWindows(np.arange(50), context=5, seed=0))["tokens"] == 50


class Repeated:
    """A data set that repeats itself, as `grain.MapDataset.repeat()`."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.ones(2), index % 120


@pytest.mark.parametrize("length", [1 << 62, sys.maxsize, 1 << 70])
def test_a_length_without_an_end_is_refused(length):
    with refused("data-set-without-end", DataError):
        check_samples(Repeated(length), seed=0)
    with refused("data-set-without-end", DataError):
        Mixture({"a": (Repeated(length), 1.0)})
    assert check_samples(Repeated((1 << 62) - 1), seed=0) == (1 << 62) - 1


def test_rows_as_long_as_a_batch_are_samples_and_a_loaders_batches_are_not():
    windows = [(torch.arange(4) + n, torch.arange(4) + n + 1) for n in range(6)]
    assert check_samples(windows, seed=0, batch_size=4) == 6
    frames = [(torch.full((4, 2), float(n)), torch.full((4, 3), float(n))) for n in range(6)]
    assert check_samples(frames, seed=0, batch_size=4) == 6
    assert check_samples([{"ids": torch.arange(4)} for _ in range(6)], seed=0, batch_size=4) == 6
    of_any_length = [(torch.ones(length, 2), torch.ones(length)) for length in (4, 7, 3, 9)]
    assert check_samples(of_any_length, seed=0, batch_size=4) == 4
    ends_shorter = [of_any_length[0], of_any_length[1], of_any_length[2]]
    assert check_samples(ends_shorter, seed=0, batch_size=4) == 3
    rows = TensorDataset(torch.randn(10, 3), torch.arange(10))
    for batches in ([*DataLoader(rows, 4)], [{"x": x, "y": y} for x, y in DataLoader(rows, 4)]):
        with refused("list-of-batches", DataError, batch_size=4):
            check_samples(batches, seed=0, batch_size=4)


def test_a_collate_fn_says_that_entries_as_long_as_a_batch_are_samples():
    frames = [(torch.full((4, 2), float(n)), torch.arange(4)) for n in range(6)]
    with refused("list-of-batches", DataError, batch_size=4):
        check_samples(frames, seed=0, batch_size=4)
    assert check_samples(frames, seed=0, batch_size=4, collates=True) == 6

    def loss(model, batch):
        inputs, labels = batch
        assert inputs.shape[1:] == (4, 2)
        return torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    settings = {"train_data": frames, "batch_size": 4, "loss": loss, "console": False}
    settings |= {"model": torch.nn.Linear(2, 4), "length": "2 steps", "device": "cpu"}
    settings["optimizer"] = sf.optim.sgd(0.1)
    with refused("list-of-batches", DataError):
        sf.Run(**settings)
    run = sf.Run(**settings, collate_fn=torch.utils.data.default_collate)
    run.train()
    assert run.state.step == 2
