"""What the modern family computes on the CPU in its own way: norms, rotations, squared ReLU,
SwiGLU, tiles of attention. 2 s.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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


def query_key_value(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(numbers(*shape, seed=seed, dtype=dtype) for seed in range(3))


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
    outer = found.detach().roll(1, dims=-1)
    (gradient,) = gradients(found, [x], outer)

    (expected,) = gradients(rms_norm(x), [x], outer.float())
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
    wide_turns = tuple(part.float() for part in turns)
    wide = rotate(rms_norm(x_BTHD.float()).transpose(1, 2), *wide_turns)
    assert_close(norm_and_rotate(x_BTHD, *turns).float(), wide, rtol=2**-8, atol=1e-7)


@in_one
@pytest.mark.parametrize("tiles", [nullcontext, in_one_tile])
@pytest.mark.parametrize("time", [1, 63, 64, 65, 200])
def test_attention_in_tiles_and_its_gradients_are_torchs(
    time: int, tiles: Callable[[], AbstractContextManager[None]]
) -> None:
    inputs = [tensor.requires_grad_() for tensor in query_key_value(2, 3, time, 8)]
    outer = numbers(2, 3, time, 8, seed=3, dtype=torch.float32)

    with tiles():
        found = tiled_attention(*inputs)

    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # sums of up to 200 products in another order
    found_gradients = gradients(found, inputs, outer)
    assert_close(found_gradients, gradients(expected, inputs, outer), rtol=1e-4, atol=1e-5)


@pytest.fixture
def tiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions for which attention went in tiles."""
    calls: list[int] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append(q.shape[2])
        return tiled_attention(q, k, v, mask)

    monkeypatch.setattr(attention, "tiled_attention", noting)
    return calls


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
    tiled_calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention._TILED, 16, most)
    q, k, v = query_key_value(2, 3, 16, 8, dtype=dtype)

    output = causal_attention(q, k, v, drop_fraction=drop_fraction)

    assert output.dtype == dtype
    assert tiled_calls == ([16] if tiled else [])


@pytest.mark.parametrize(("time", "tiled"), [(191, False), (192, True), (512, True), (513, False)])
def test_attention_in_float32_goes_in_tiles_for_192_to_512_positions_of_64_channels(
    time: int, tiled: bool, tiled_calls: list[int]
) -> None:
    q, k, v = query_key_value(1, 1, time, 64)

    output = causal_attention(q, k, v, drop_fraction=0.0)

    assert_close(output, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert tiled_calls == ([time] if tiled else [])


def test_attention_of_one_new_token_takes_no_tiles(tiled_calls: list[int]) -> None:
    q, k, v = query_key_value(1, 1, 192, 64)
    causal_attention(q[:, :, -1:], k, v, drop_fraction=0.0)
    assert tiled_calls == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's kernel under vmap
def test_attention_in_float32_takes_no_tiles_inside_torch_func(tiled_calls: list[int]) -> None:
    q, k, v = query_key_value(2, 1, 192, 64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q[None], k[None], v[None], drop_fraction=0.0)[0]

    output = torch.func.vmap(attend)(q, k, v)

    assert_close(output, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert tiled_calls == []


def test_attention_in_float32_stays_wide_under_autocast() -> None:
    q, k, v = query_key_value(2, 1, 192, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = causal_attention(q, k, v, drop_fraction=0.0)
    assert_close(output, F.scaled_dot_product_attention(q, k, v, is_causal=True))
