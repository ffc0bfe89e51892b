"""What the modern family computes on the CPU in its own way: norms, rotations, squared ReLU,
SwiGLU, tiles of attention. 2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from in_one import in_one
from surefoot.models import attention
from surefoot.models.attention import (
    causal_attention,
    in_one_tile,
    norm_and_rotate,
    rotate,
    rotations,
    tiled_attention,
)
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig
from surefoot.models.layers import EPSILON, RMSNorm, relu2, rms_norm, swiglu


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(output: Tensor, inputs: list[Tensor], outer: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, outer)


def test_rms_norm_and_its_gradient_are_torchs() -> None:
    x = numbers(3, 5, 8).requires_grad_()
    outer = numbers(3, 5, 8, seed=1)
    found = rms_norm(x)
    expected = F.rms_norm(x, (8,), eps=EPSILON)
    assert_close(found, expected)
    assert_close(gradients(found, [x], outer), gradients(expected, [x], outer))


def test_rms_norm_with_gains_is_torchs() -> None:
    norm = RMSNorm(8).double()
    x = numbers(3, 5, 8)
    assert norm.weight is not None
    torch.nn.init.normal_(norm.weight)
    assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, eps=EPSILON))
    assert list(RMSNorm(8, gains=False).parameters()) == []


def test_under_autocast_a_norm_hands_on_what_the_next_product_takes_and_its_gradient_is_wide() -> (
    None
):
    x = numbers(4, 16, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rms_norm(x)
    assert found.dtype == torch.bfloat16
    (gradient,) = gradients(found, [x], found.detach().roll(1, dims=-1))
    expected = gradients(rms_norm(x), [x], found.detach().roll(1, dims=-1).float())[0]
    assert gradient.dtype == torch.float32
    assert_close(gradient, expected)


def test_under_autocast_a_model_of_float64_stays_one() -> None:
    model = GPT(GPTConfig(layers=1, heads=2, width=8, context=4, vocab_size=10)).double()
    tokens = torch.arange(4)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens)
    assert_close(found, model(tokens), rtol=0, atol=0)


def test_squared_relu_and_its_gradient_are_the_formula() -> None:
    x = numbers(7, 9).requires_grad_()
    outer = numbers(7, 9, seed=1)
    found = relu2(x)
    expected = F.relu(x).square()
    assert_close(found, expected, rtol=0, atol=0)
    assert_close(gradients(found, [x], outer), gradients(expected, [x], outer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_and_its_gradient_are_the_formula(dtype: torch.dtype) -> None:
    x = numbers(7, 10, dtype=dtype).requires_grad_()
    outer = numbers(7, 5, seed=1, dtype=dtype)
    found = swiglu(x)
    expected = F.silu(x[:, :5]) * x[:, 5:]
    assert_close(found, expected, rtol=0, atol=0)
    assert_close(gradients(found, [x], outer), gradients(expected, [x], outer), rtol=0, atol=0)


@pytest.mark.parametrize("heads", [1, 6])
def test_norm_and_rotation_together_are_one_after_the_other(heads: int) -> None:
    x_BTHD = numbers(2, 5, 3 * heads, 8)[:, :, :heads].requires_grad_()
    turns = tuple(part.double() for part in rotations(5, 8))
    outer = numbers(2, heads, 5, 8, seed=1)
    found = norm_and_rotate(x_BTHD, *turns)
    expected = rotate(F.rms_norm(x_BTHD, (8,), eps=EPSILON).transpose(1, 2), *turns)
    assert_close(found, expected)
    assert_close(gradients(found, [x_BTHD], outer), gradients(expected, [x_BTHD], outer))


def test_with_weights_in_bfloat16_norm_and_rotation_are_rounded_once() -> None:
    x_BTHD = numbers(2, 5, 4, 8).bfloat16()
    turns = tuple(part.bfloat16() for part in rotations(5, 8))
    wide = rotate(rms_norm(x_BTHD.float()).transpose(1, 2), *(part.float() for part in turns))
    assert_close(norm_and_rotate(x_BTHD, *turns).float(), wide, rtol=2**-8, atol=1e-7)


@in_one
@pytest.mark.parametrize("tiles", [nullcontext, in_one_tile])
@pytest.mark.parametrize("time", [1, 63, 64, 65, 200])
def test_attention_in_tiles_and_its_gradients_are_torchs(
    time: int, tiles: Callable[[], AbstractContextManager[None]]
) -> None:
    q, k, v = (
        numbers(2, 3, time, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3)
    )
    outer = numbers(2, 3, time, 8, seed=3, dtype=torch.float32)
    with tiles():
        found = tiled_attention(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    pairs = zip(
        gradients(found, [q, k, v], outer), gradients(expected, [q, k, v], outer), strict=True
    )
    for ours, theirs in pairs:
        assert_close(
            ours, theirs, rtol=1e-4, atol=1e-5
        )  # sums of up to 200 products in another order


@pytest.mark.parametrize(
    ("dtype", "drop_fraction", "most", "tiled"),
    [
        (torch.bfloat16, 0.0, 1024, True),
        (torch.float32, 0.0, 1024, False),
        (torch.bfloat16, 0.1, 1024, False),
        (torch.bfloat16, 0.0, 15, False),
    ],
)
def test_attention_goes_in_tiles_where_it_is_narrow_causal_and_nothing_is_dropped(
    dtype: torch.dtype,
    drop_fraction: float,
    most: int,
    tiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def spy(*parts: Tensor) -> Tensor:
        calls.append(1)
        return tiled_attention(*parts)

    monkeypatch.setattr(attention, "tiled_attention", spy)
    monkeypatch.setitem(attention._TILED, 16, most)
    q, k, v = (numbers(2, 3, 16, 8, seed=seed, dtype=dtype) for seed in range(3))  # type: ignore[arg-type]
    assert causal_attention(q, k, v, drop_fraction=drop_fraction).dtype == dtype
    assert bool(calls) == tiled


@pytest.mark.parametrize(("time", "tiled"), [(191, False), (192, True), (512, True), (513, False)])
def test_attention_in_float32_goes_in_tiles_for_192_to_512_positions_of_64_channels(
    time: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        attention, "tiled_attention", lambda *parts: calls.append(1) or tiled_attention(*parts)
    )
    q, k, v = (numbers(1, 1, time, 64, seed=seed, dtype=torch.float32) for seed in range(3))
    assert_close(
        causal_attention(q, k, v, drop_fraction=0.0),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )
    assert bool(calls) == tiled
    calls.clear()
    causal_attention(q[:, :, -1:], k, v, drop_fraction=0.0)  # one new token
    assert not calls


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's kernel under vmap
def test_attention_in_float32_takes_no_tiles_inside_torch_func_and_stays_wide_under_autocast() -> (
    None
):
    q, k, v = (numbers(2, 1, 192, 64, seed=seed, dtype=torch.float32) for seed in range(3))
    attend = partial(causal_attention, drop_fraction=0.0)
    alone = torch.func.vmap(lambda *parts: attend(*(part[None] for part in parts))[0])(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for each in (alone, found):
        assert_close(each, expected)
