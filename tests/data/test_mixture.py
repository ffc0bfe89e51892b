from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.gathering import gather_fn
from surefoot.data.loader import Feed
from surefoot.data.mixture import Mixture, MixtureOrder
from surefoot.data.text.windows import TrainWindows
from surefoot.errors import DataError

FEW = torch.arange(7)
MANY = torch.arange(100, 150)


def mix(few, many, *, weights=(1, 1)):
    return Mixture({"few": (few, weights[0]), "many": (many, weights[1])})


def list_samples(part):
    return [(number,) for number in part]


def read(mixture, steps, *, batch_size=100):
    """The micro-batch of each of the first steps."""
    check_samples(mixture, seed=0)
    plan = MixtureOrder(0, sizes=mixture.sizes, weights=mixture.weights, batch_size=batch_size)
    feed = Feed(mixture, plan, seed=0, micro_batch_size=batch_size, device=torch.device("cpu"))
    feed.start(0)
    return [feed.micro_batches(step)[0] for step in range(steps)]


def read_numbers(mixture, steps):
    return torch.cat([micro_batch.batch[0] for micro_batch in read(mixture, steps)])


def test_a_mixture_is_the_concatenation_of_its_parts():
    mixture = mix(FEW.tolist(), MANY.tolist())

    assert [mixture[sample] for sample in range(len(mixture))] == [*FEW.tolist(), *MANY.tolist()]


@pytest.mark.parametrize("sample", [-1, 57])
def test_a_sample_outside_is_refused(sample):
    mixture = mix(FEW.tolist(), MANY.tolist())

    with pytest.raises(IndexError):
        mixture[sample]


@pytest.mark.parametrize("kind", [lambda part: (part,), TensorDataset, list_samples])
def test_parts_are_drawn_in_proportion_and_in_whole_passes(kind):
    numbers = read_numbers(mix(kind(FEW), kind(MANY), weights=(0.14, 0.86)), 10)

    counts = torch.bincount(numbers)
    assert counts[:7].tolist() == [20] * 7
    assert sorted(counts[100:].tolist()) == [17] * 40 + [18] * 10


def test_gathering_a_mixture_is_reading_it_sample_by_sample():
    gathered = read_numbers(mix(TensorDataset(FEW), TensorDataset(MANY), weights=(1, 3)), 5)
    by_sample = read_numbers(mix(list_samples(FEW), list_samples(MANY), weights=(1, 3)), 5)

    assert torch.equal(gathered, by_sample)


def test_windows_in_a_mixture_are_shifted_by_the_epoch_of_their_own_source():
    few = TrainWindows(np.arange(30), context=5, seed=3)
    many = TrainWindows(np.arange(1000, 2000), context=5, seed=3)

    for micro_batch in read(mix(few, many), 3):
        inputs, targets = micro_batch.batch
        for row, sample in enumerate(micro_batch.sample_ids):
            epochs = micro_batch.epochs[[row]]
            if sample < len(few):
                expected_inputs, expected_targets = few.gather(np.array([sample]), epochs)
            else:
                in_many = np.array([sample - len(few)])
                expected_inputs, expected_targets = many.gather(in_many, epochs)
            assert torch.equal(inputs[row], expected_inputs[0])
            assert torch.equal(targets[row], expected_targets[0])


def test_batches_whose_rows_are_not_samples_are_not_mixed():
    class Packed:
        def __len__(self):
            return 4

        def gather(self, ids, epochs):
            return torch.nn.utils.rnn.pack_sequence(
                [torch.full((2,), float(sample)) for sample in ids]
            )

    gather = gather_fn(Mixture({"one": (Packed(), 1), "other": (Packed(), 1)}))
    with refused("mixture-samples-differ", DataError):
        gather(np.array([0, 5]), np.zeros(2, np.int64))


def test_a_mixture_of_mixtures_is_gathered():
    inner = mix((FEW,), (MANY,))
    outer = Mixture({"inner": (inner, 1), "other": ((torch.arange(500, 510),), 1)})

    (numbers,) = gather_fn(outer)(np.array([66, 0, 57, 7]), np.zeros(4, np.int64))

    assert numbers.tolist() == [509, 0, 500, 100]


def test_parts_that_cannot_be_mixed_are_named():
    windows = TrainWindows(np.arange(30), context=5, seed=0)

    with refused("mixture-of-samples-and-batches", DataError, batched=["text"], single=["numbers"]):
        Mixture({"text": (windows, 1), "numbers": ([1, 2], 1)})


def test_parts_of_different_shape_are_an_error_that_names_them():
    of_5 = TrainWindows(np.arange(90), context=5, seed=0)
    of_6 = TrainWindows(np.arange(90), context=6, seed=0)

    with refused("mixture-samples-differ", DataError, parts=["few", "many"]):
        read(mix(of_5, of_6), 1)


def test_an_empty_part_is_named():
    with refused("data-set-empty", DataError) as caught:
        Mixture({"few": (FEW.tolist(), 1), "none": ([], 1)})
    assert caught.value.places == ("part 'none' of the mixture",)


def test_a_mixture_without_parts_is_refused():
    with refused("mixture-without-parts", DataError):
        Mixture({})


def test_a_weight_of_nought_is_refused():
    with refused("mixture-weights-invalid", weights=[0.0]):
        Mixture({"few": (FEW.tolist(), 0)})


def test_fingerprint_holds_every_part_with_its_weight():
    facts = fingerprint(mix((FEW,), (MANY,), weights=(1, 3)))

    assert json.loads(json.dumps(facts)) == facts
    assert facts["type"] == "Mixture"
    few = facts["parts"]["few"]
    many = facts["parts"]["many"]
    assert few["weight"] == 1.0
    assert many["weight"] == 3.0
    assert few["sha256"] != many["sha256"]
