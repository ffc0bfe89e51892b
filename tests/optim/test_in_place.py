"""Arithmetic that a flag leaves undone: the formula where it is 0, no bit where it is 1. (1 s)"""

from __future__ import annotations

import pytest
import torch

from surefoot.optim import in_place

FLAGS = [torch.tensor(0.0), None]


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    kernel = torch.randn(4, 3, 2, 2, generator=generator, dtype=dtype)
    vector = torch.randn(5, generator=generator, dtype=dtype)
    return [kernel.to(memory_format=torch.channels_last), vector]


@pytest.fixture(params=[True, False], ids=["fused", "elsewhere"])
def _kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(in_place, "_FUSED", ())


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("flag", FLAGS)
def test_what_is_subtracted(flag):
    targets = tensors()
    amounts = [torch.ones(4, 3, 2, 2).double(), torch.arange(5.0)]
    expected = []
    for target, amount in zip(tensors(), amounts, strict=True):
        expected.append(target - 0.5 * (amount + 0.2 * target))

    in_place.subtract(targets, amounts, rate=0.5, decay=0.2, found_inf=flag)

    torch.testing.assert_close(targets, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_move_in_vectors_too(dtype):
    """Of which torch's fused SGD on the CPU writes only what is left over after the last whole
    vector.
    """
    targets = [torch.full((99,), 2.0, dtype=dtype)]
    amounts = [torch.full((99,), 0.5, dtype=dtype)]
    in_place.subtract(targets, amounts, rate=0.5, decay=0.25, found_inf=torch.tensor(0.0))
    assert targets[0].tolist() == [1.5] * 99
    in_place.move_towards(targets, amounts, share=0.5, found_inf=torch.tensor(0.0))
    assert targets[0].tolist() == [1.0] * 99
    in_place.subtract(targets, amounts, found_inf=torch.tensor(1.0))
    assert targets[0].tolist() == [1.0] * 99


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("flag", FLAGS)
def test_where_an_average_moves(flag):
    averages = tensors()
    values = [2.0 * tensor for tensor in tensors()]

    in_place.move_towards(averages, values, share=0.25, found_inf=flag)

    expected = [1.25 * tensor for tensor in tensors()]
    torch.testing.assert_close(averages, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_a_set_flag_leaves_every_bit_even_of_negative_zeros(value):
    targets = [*tensors(torch.float32), torch.tensor([-0.0, 0.0])]
    before = bits_of(targets)
    amounts = [torch.full_like(target, value) for target in targets]

    in_place.subtract(targets, amounts, rate=0.5, decay=0.2, found_inf=torch.tensor(1.0))
    in_place.move_towards(targets, amounts, share=0.25, found_inf=torch.tensor(1.0))
    in_place.replace(targets[1], amounts[1], found_inf=torch.tensor(1.0))

    assert all(map(torch.equal, bits_of(targets), before))


def bits_of(tensors):
    return [tensor.clone().view(torch.int32) for tensor in tensors]


def test_steps_are_counted_where_they_are_made():
    counters = [torch.tensor(3.0), torch.tensor(5.0)]
    for flag in (torch.tensor(1.0), torch.tensor(0.0), None):
        in_place.count_step(counters, found_inf=flag)

    assert counters == [5.0, 7.0]
