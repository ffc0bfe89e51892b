"""Values that differ have other hashes; what differs from process to process does not count."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, StackDataset, TensorDataset

from in_one import in_one
from surefoot.data.dataset_checks import fingerprint
from surefoot.data.fingerprints import hash_of, hashes_of_samples


@dataclass
class Pair:
    one: Any
    other: Any


@in_one
@pytest.mark.parametrize(
    ("value", "other"),
    [
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(2, 3), torch.ones(3, 2)),
        (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
        (np.ones(3), np.arange(3.0)),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (1, 1.0),
        ("a", b"a"),
        ([1, [2]], [[1], 2]),
        ({"x": 1}, {"y": 1}),
        ({1, 2}, {1, 3}),
        (Pair(1, "x"), Pair(1, "y")),
        (np.float32(1), np.float64(1)),
    ],
)
def test_values_that_differ_have_other_hashes(value: Any, other: Any) -> None:
    assert hash_of(value) != hash_of(other)


@pytest.mark.parametrize("changed", [0, 20, 40])
def test_a_list_is_all_of_its_samples_where_they_are_not_many(changed: int) -> None:
    samples = [torch.ones(3) for _ in range(41)]
    before = fingerprint(samples)
    samples[changed][1] = 2
    assert fingerprint(samples)["sha256"] != before["sha256"]


def test_parts_of_parts_are_told_apart_and_many_parts_are_one_hash() -> None:
    parts: list[Any] = [
        TensorDataset(torch.ones(2)),
        ConcatDataset([TensorDataset(torch.ones(2)), [1, 2]]),
    ]
    told = fingerprint(ConcatDataset(parts))
    assert told["parts"]["1"]["parts"]["1"]["sha256"] == fingerprint([1, 2])["sha256"]
    hashes = hashes_of_samples(ConcatDataset(parts), seed=0, gather=True, unknown={})
    assert {"sample 1 (part 0)", "sample 3 (part 1.0)", "sample 5 (part 1.1)"} <= hashes.keys()
    many = [fingerprint(ConcatDataset([[0]] * 99 + [[last]])) for last in (0, 1)]
    assert "parts" not in many[0]
    assert many[0]["sha256"] != many[1]["sha256"]
    assert fingerprint(StackDataset(x=[1], y=[2]))["parts"].keys() == {"x", "y"}


def test_a_tensor_without_values_is_its_shape_whatever_its_strides() -> None:
    empty = torch.from_numpy(np.lib.stride_tricks.as_strided(np.zeros(1), (0,), (0,)))
    assert empty.stride() == (0,)
    assert hash_of(empty) == hash_of(torch.zeros(0, dtype=torch.float64))
    assert hash_of(empty) != hash_of(torch.zeros(0))


def test_what_differs_from_process_to_process_does_not_count() -> None:
    assert list({0, 8}) != list({8, 0})  # in which order a set comes
    assert hash_of({0, 8}) == hash_of({8, 0})
    assert hash_of(Path("/data/one/a.png")) == hash_of(Path("/mnt/a.png"))
    assert hash_of("<Graph at 0x7f1234567890>") == hash_of("<Graph at 0x7f0987654321>")
    assert hash_of(Tensor([float("nan")])) == hash_of(Tensor([float("nan")]))


def test_a_picture_is_its_pixels() -> None:
    from PIL import Image

    pictures = [Image.new("L", (2, 2), color) for color in (0, 0, 9)]
    assert hash_of(pictures[0]) == hash_of(pictures[1]) != hash_of(pictures[2])
