"""Arithmetic that a flag leaves undone: the formula where it is 0, no bit where it is 1. (1 s)"""

from __future__ import annotations

import pytest
import torch

from surefoot.optim import in_place

FLAGS = [torch.tensor(0.0), None]


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    first = [
        torch.randn(4, 3, 2, 2, generator=generator, dtype=dtype),
        torch.randn(5, generator=generator, dtype=dtype),
    ]
    return [first[0].to(memory_format=torch.channels_last), first[1]]


@pytest.fixture(params=[True, False], ids=["fused", "elsewhere"])
def _kernels(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(in_place, "_FUSED", ())


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("flag", FLAGS)
def test_what_is_subtracted(flag):
    targets = tensors()
    amounts = [torch.ones(4, 3, 2, 2).double(), torch.arange(5.0)]
    expected = [t - 0.5 * (a + 0.2 * t) for t, a in zip(tensors(), amounts, strict=True)]
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
    values = [2.0 * held for held in tensors()]
    in_place.move_towards(averages, values, share=0.25, found_inf=flag)

    torch.testing.assert_close(
        averages, [1.25 * held for held in tensors()], rtol=1e-12, atol=1e-12
    )


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_a_set_flag_leaves_every_bit_even_of_negative_zeros(value):
    targets = [*tensors(torch.float32), torch.tensor([-0.0, 0.0])]
    before = [held.clone() for held in targets]
    amounts = [torch.full_like(held, value) for held in targets]
    in_place.subtract(targets, amounts, rate=0.5, decay=0.2, found_inf=torch.tensor(1.0))
    in_place.move_towards(targets, amounts, share=0.25, found_inf=torch.tensor(1.0))
    in_place.replace(targets[1], amounts[1], found_inf=torch.tensor(1.0))

    assert all(
        torch.equal(held.view(torch.int32), was.view(torch.int32))
        for held, was in zip(targets, before, strict=True)
    )


def test_steps_are_counted_where_they_are_made():
    counters = [torch.tensor(3.0), torch.tensor(5.0)]
    for flag in (torch.tensor(1.0), torch.tensor(0.0), None):
        in_place.count_step(counters, found_inf=flag)

    assert [float(held) for held in counters] == [5.0, 7.0]
