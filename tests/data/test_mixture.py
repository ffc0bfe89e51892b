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

FEW, MANY = torch.arange(7), torch.arange(100, 150)


def fed(mixture, steps, *, batch_size=100):
    check_samples(mixture, seed=0)
    plan = MixtureOrder(0, sizes=mixture.sizes, weights=mixture.weights, batch_size=batch_size)
    feed = Feed(mixture, plan, seed=0, micro_batch_size=batch_size, device=torch.device("cpu"))
    feed.start(0)
    return [feed.micro_batches(step)[0] for step in range(steps)]


def test_a_mixture_is_the_concatenation_of_its_parts():
    mixture = Mixture({"few": (FEW.tolist(), 1), "many": (MANY.tolist(), 1)})
    assert [mixture[sample] for sample in range(len(mixture))] == [*FEW.tolist(), *MANY.tolist()]


@pytest.mark.parametrize("sample", [-1, 57])
def test_a_sample_outside_is_refused(sample):
    with pytest.raises(IndexError):
        Mixture({"few": (FEW.tolist(), 1), "many": (MANY.tolist(), 1)})[sample]


@pytest.mark.parametrize(
    "kind", [lambda part: (part,), TensorDataset, lambda part: [(one,) for one in part]]
)
def test_parts_are_drawn_in_proportion_and_in_whole_passes(kind):
    values = torch.cat(
        [
            one.batch[0]
            for one in fed(Mixture({"few": (kind(FEW), 0.14), "many": (kind(MANY), 0.86)}), 10)
        ]
    )
    assert torch.bincount(values)[:7].tolist() == [20] * 7
    assert sorted(torch.bincount(values)[100:].tolist()) == [17] * 40 + [18] * 10


def test_gathering_a_mixture_is_reading_it_sample_by_sample():
    def batches(kind):
        return [
            one.batch[0]
            for one in fed(Mixture({"few": (kind(FEW), 1), "many": (kind(MANY), 3)}), 5)
        ]

    gathered = batches(TensorDataset)
    read = batches(lambda part: [(one,) for one in part])
    assert all(torch.equal(one, other) for one, other in zip(gathered, read, strict=True))


def test_windows_in_a_mixture_are_shifted_by_the_epoch_of_their_own_source():
    tokens = {"few": np.arange(30), "many": np.arange(1000, 2000)}
    parts = {name: TrainWindows(array, context=5, seed=3) for name, array in tokens.items()}
    mixture = Mixture({name: (part, 1) for name, part in parts.items()})
    for one in fed(mixture, 3):
        for row, (sample, epoch) in enumerate(
            zip(one.sample_ids.tolist(), one.epochs.tolist(), strict=True)
        ):
            few = sample < len(parts["few"])
            part, local = (
                (parts["few"], sample) if few else (parts["many"], sample - len(parts["few"]))
            )
            expected = part.gather(np.array([local]), np.array([epoch]))
            assert torch.equal(one.batch[0][row], expected[0][0])
            assert torch.equal(one.batch[1][row], expected[1][0])


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
    inner = Mixture({"few": ((FEW,), 1), "many": ((MANY,), 1)})
    outer = Mixture({"inner": (inner, 1), "other": ((torch.arange(500, 510),), 1)})
    found = gather_fn(outer)(np.array([66, 0, 57, 7]), np.zeros(4, np.int64))
    assert found[0].tolist() == [509, 0, 500, 100]


def test_parts_that_cannot_be_mixed_are_named():
    with refused("mixture-of-samples-and-batches", DataError, batched=["text"], single=["numbers"]):
        Mixture(
            {"text": (TrainWindows(np.arange(30), context=5, seed=0), 1), "numbers": ([1, 2], 1)}
        )


def test_parts_of_different_shape_are_an_error_that_names_them():
    mixture = Mixture(
        {
            name: (TrainWindows(np.arange(90), context=context, seed=0), 1)
            for name, context in (("a", 5), ("b", 6))
        }
    )
    with refused("mixture-samples-differ", DataError, parts=["a", "b"]):
        fed(mixture, 1)


def test_an_empty_part_is_named():
    with refused("data-set-empty", DataError) as caught:
        Mixture({"few": (FEW.tolist(), 1), "none": ([], 1)})
    assert caught.value.places == ("part 'none' of the mixture",)


def test_no_parts_and_no_weight_are_refused():
    with refused("mixture-without-parts", DataError):
        Mixture({})
    with refused("mixture-weights-invalid", weights=[0.0]):
        Mixture({"few": (FEW.tolist(), 0)})


def test_fingerprint_holds_every_part_with_its_weight():
    found = json.loads(json.dumps(fingerprint(Mixture({"few": ((FEW,), 1), "many": ((MANY,), 3)}))))
    assert found["type"] == "Mixture"
    assert {name: part["weight"] for name, part in found["parts"].items()} == {
        "few": 1.0,
        "many": 3.0,
    }
    assert found["parts"]["few"]["sha256"] != found["parts"]["many"]["sha256"]
