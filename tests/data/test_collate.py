from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate

from refused import refused
from surefoot.data.collate import collate
from surefoot.data.loader import Feed
from surefoot.data.nested import leaves
from surefoot.data.order import Order
from surefoot.errors import DataError

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    ids: list[int]
    mask: Tensor | None = None


class Encoding(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any] | None = None, encodings: str | None = None) -> None:
        super().__init__(data)
        self.encodings = encodings


@pytest.mark.parametrize(
    "samples",
    [
        [1, 2],
        [1.5, 2.5],
        [True, False],
        ["a", "b"],
        [np.float32(1), np.float32(2)],
        [np.ones(2), np.zeros(2)],
        [(torch.ones(2), 1), (torch.zeros(2), 2)],
        [[torch.ones(2), [1, 2]], [torch.zeros(2), [3, 4]]],
        [{"x": torch.ones(2), "y": {"z": "a"}}, {"x": torch.ones(2), "y": {"z": "b"}}],
        [Pair(1, torch.ones(1)), Pair(2, torch.ones(1))],
    ],
)
def test_a_batch_is_that_of_torch(samples: list[Any]) -> None:
    ours = collate(samples)
    theirs = default_collate(samples)
    assert str(ours) == str(theirs)
    assert type(ours) is type(theirs)


def test_dataclasses_are_combined_field_by_field() -> None:
    batch = collate([Sample(torch.ones(2), [1, 2]), Sample(torch.zeros(2), [3, 4])])
    assert isinstance(batch, Sample)
    assert (batch.x.tolist(), batch.ids.tolist(), batch.mask) == (
        [[1, 1], [0, 0]],
        [[1, 2], [3, 4]],
        None,
    )


def test_a_list_of_numbers_in_a_mapping_is_a_row() -> None:
    batch = collate([{"ids": [1, 2, 3], "box": [[0.5, 1], [2, 3]]}] * 2)
    assert batch["ids"].tolist() == [[1, 2, 3]] * 2
    assert batch["box"].shape == (2, 2, 2)


def test_a_list_of_numpy_numbers_in_a_mapping_is_a_row_too() -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    batch = collate([{"x": list(row), "seen": [np.True_]} for row in rows])
    assert torch.equal(batch["x"], torch.from_numpy(rows))
    assert batch["seen"].tolist() == [[True], [True]]


def test_a_batch_encoding_stays_one_without_the_text_of_its_first_sample() -> None:
    batch = collate([Encoding({"ids": [1]}, "first"), Encoding({"ids": [2]}, "second")])
    assert isinstance(batch, Encoding)
    assert (batch["ids"].tolist(), batch.encodings) == ([[1], [2]], None)


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (
            torch.ones(2),
            torch.ones(3),
            "dataset[i] is a tensor of shape (2) in sample 0",
        ),
        (
            {"x": [1]},
            {"x": [1, 2]},
            "['x'] is a tensor of shape (1)",
        ),
        (
            (1, torch.ones(2)),
            (1, torch.ones(2, 2)),
            "[1] is a tensor of shape (2)",
        ),
        (
            Sample(torch.ones(1), [1]),
            Sample(torch.ones(2), [1]),
            "dataset[i].x is a tensor of shape",
        ),
        ({"x": None}, {"x": 1}, "['x'] is None in sample 0"),
        ({"x": 1}, {"x": 1, "y": 2}, "parts ['x'] in sample 0"),
        ((1, 2), (1, 2, 3), "a tuple with the parts [0], [1] in sample 0"),
        (
            (Image.new("L", (2, 2)), 1),
            (Image.new("L", (2, 2)), 1),
            "a PIL image",
        ),
        ({"x": object()}, {"x": object()}, "a object, which does not become a tensor"),
    ],
)
def test_samples_that_do_not_fit_are_named_with_both_shapes_and_the_cure(
    first: Any, second: Any, what: str
) -> None:
    feed = Feed(
        [first, second], Order(0, samples=2, batch_size=2), seed=0, device=torch.device("cpu")
    )
    feed.start(
        next(step for step in range(9) if Order(0, samples=2, batch_size=2).ids(step)[0][0] == 0)
    )
    with refused("samples-not-collated", DataError) as caught:
        feed.micro_batches(feed.step)
    assert what in str(caught.value.reason)


class Signal(np.ndarray):
    """A subclass of an array, as packages for units or medical images have them."""


def test_subclasses_of_arrays_are_arrays() -> None:
    rows = np.arange(6.0).reshape(2, 3)
    batch = collate([(row.view(Signal), {"x": row.view(Signal)}) for row in rows])
    assert torch.equal(batch[0], torch.from_numpy(rows))
    assert torch.equal(batch[1]["x"], torch.from_numpy(rows))
    records = np.rec.array(rows)
    assert torch.equal(collate(list(records)), torch.from_numpy(rows))


@pytest.mark.parametrize("inside", [lambda row: row, lambda row: {"x": row}, lambda row: (row, 1)])
def test_masked_values_are_refused_and_arrays_without_them_are_arrays(inside: Any) -> None:
    plain = np.ma.masked_array(np.arange(3.0))
    masked = np.ma.masked_array(np.arange(3.0), mask=[False, True, False])
    batch = collate([inside(plain), inside(plain)])
    assert next(iter(leaves(batch))).tolist() == [[0.0, 1.0, 2.0]] * 2
    with refused("array-masked", DataError, shape=[3]):
        collate([inside(plain), inside(masked)])
    with refused("array-masked", DataError, shape=[]):
        collate([inside(masked[1])])
