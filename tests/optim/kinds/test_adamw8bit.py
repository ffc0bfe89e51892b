"""AdamW in 8 bits: near AdamW, a quarter of its memory, and the library's own numbers. (10 s, most
of it the library's import)
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from refused import refused
from surefoot.checkpoint.optimizer_state import load_optimizer, optimizer_tensors
from surefoot.optim.kinds.adamw8bit import AdamW8bit, quantization


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("bitsandbytes")


def train(optimizer_of, shape, steps=20):
    """A weight after some steps, and the optimizer's state of it."""
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    optimizer = optimizer_of([weight])
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        weight.grad = 0.1 * torch.randn(shape, generator=generator) + weight.detach()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_a_small_parameter_is_trained_as_by_adamw(library):
    ours, _ = train(lambda p: AdamW8bit(p, lr=0.01, weight_decay=0.1), (50, 80))
    theirs, _ = train(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), (50, 80))

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (70, 61)])
def test_a_large_one_is_trained_as_by_the_library(library, shape):
    """Whose first step is the same but for the order of sums; later ones drift by the rounding of
    codes.
    """
    ours, _ = train(lambda p: AdamW8bit(p, lr=0.01, weight_decay=0.1), shape)
    theirs, _ = train(lambda p: library.optim.AdamW8bit(p, lr=0.01, weight_decay=0.1), shape)
    exact, _ = train(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), shape)

    start, _ = train(torch.optim.AdamW, shape, steps=0)

    change = float((exact - start).norm())
    assert float((ours - theirs).norm()) < 0.02 * change
    assert float((ours - exact).norm()) < 0.1 * change


def test_the_state_is_about_a_quarter(library):
    def state_bytes(optimizer_of):
        _, state = train(optimizer_of, (256, 256), steps=1)
        return sum(tensor.nbytes for tensor in state.values())

    ratio = state_bytes(AdamW8bit) / state_bytes(torch.optim.AdamW)

    assert ratio == pytest.approx(0.25, abs=0.01)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with refused("package-not-usable", modules=["bitsandbytes"]):
        quantization()


def test_codes_that_lie_otherwise_after_a_resume_are_read_in_order(library, monkeypatch):
    """On CUDA the library writes what it reads in order of memory, into a tensor that lies as the
    codes do.
    """

    def as_on_cuda(codes, **settings):
        assert codes.is_contiguous(), "would be mixed up"
        return read(codes, **settings)

    weight = nn.Parameter(torch.randn(64, 80, generator=torch.Generator().manual_seed(0)).t())
    names = {weight: "weight"}
    optimizer = AdamW8bit([weight], lr=0.01)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors, plain, *_ = optimizer_tensors(optimizer, names)
    load_optimizer(optimizer, tensors, plain, names)
    read = optimizer.quantization.dequantize_blockwise
    monkeypatch.setattr(optimizer.quantization, "dequantize_blockwise", as_on_cuda)
    before = weight.detach().clone()

    optimizer.step()

    assert not torch.equal(weight.detach(), before)
