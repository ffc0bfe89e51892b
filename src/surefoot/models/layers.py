"""Layers that several models share: squared ReLU, dropout, RMS norm, positions, and the memory
format of images.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# of hidden states (B, T, C) and the head's matrix (V, C)
HeadLoss = Callable[[Tensor, Tensor], Any]


def check_shape(*claims: tuple[bool, str]) -> None:
    """Raise `ValueError` with the message of the first claim that is false.

    It is no `ConfigError`, as models are plain torch and import nothing of surefoot. A recipe
    refuses such settings as `model-shape-impossible`.

    >>> check_shape((True, "one"), (False, "width = 3 must be even"))
    Traceback (most recent call last):
    ValueError: width = 3 must be even
    """
    for holds, problem in claims:
        if not holds:
            raise ValueError(problem)


def rotary_problem(width: int, heads: int) -> str:
    """Return the message for a width that rotary positions cannot divide."""
    return f"width = {width} must be a multiple of 2 x heads = {2 * heads}: rotary positions rotate pairs of channels"


def relu2(x: Tensor) -> Tensor:
    """Square positive values and zero the others: So et al. 2021, section 4.2
    (https://arxiv.org/abs/2109.08668).

    The dtype stays that of `x`, although autocast would compute the power in float32.

    >>> relu2(torch.tensor([-2.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if x.is_cpu and not torch.compiler.is_compiling():
        return _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return F.relu(x).square()


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        above = F.relu(x)
        ctx.save_for_backward(above)
        return above * above

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (above,) = ctx.saved_tensors
        return (outer * above).mul_(2)


def swiglu(x: Tensor) -> Tensor:
    """Multiply SiLU of the first half of the channels by the second half: Shazeer 2020, equation 6
    (https://arxiv.org/abs/2002.05202).

    >>> round(swiglu(torch.tensor([2.0, 3.0])).item(), 4)
    5.2848
    """
    if x.is_cpu and not torch.compiler.is_compiling():
        return _SwiGLU.apply(x)  # type: ignore[no-untyped-call]
    gate, linear = x.chunk(2, dim=-1)
    return F.silu(gate) * linear


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        above = F.silu(gate)
        ctx.save_for_backward(x, above)
        return above * linear

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        x, above = ctx.saved_tensors
        gate, linear = x.chunk(2, dim=-1)
        inner = torch.empty_like(x)  # both halves are written in place: no copy joins them
        of_gate, of_linear = inner.chunk(2, dim=-1)
        torch.mul(outer, above, out=of_linear)
        torch.ops.aten.silu_backward.grad_input(outer * linear, gate, grad_input=of_gate)
        return inner


_STEPS = 1 << 16  # each unit uses 16 random bits, so the drop fraction has a resolution of 1/65,536


class Dropout(nn.Module):
    """Dropout that zeroes a fraction of units and scales the others by 1/(1 - fraction) (Srivastava
    et al. 2014, section 4).

    On the CPU, each 64-bit draw of torch's generator decides 4 units; this is 2 to 3 times as fast
    as `nn.Dropout`. Other devices and compiled code use `F.dropout`.

    >>> Dropout(0.5).eval()(torch.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, drop_fraction: float) -> None:
        super().__init__()
        check_shape(
            (
                0.0 <= drop_fraction < 1.0,
                f"drop_fraction = {drop_fraction} must be at least 0 and below 1",
            )
        )
        self.drop_fraction = drop_fraction

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop_fraction:
            return dropout(x, self.drop_fraction)
        return x

    def extra_repr(self) -> str:
        return f"p={self.drop_fraction}"


def dropout(x: Tensor, drop_fraction: float) -> Tensor:
    """Zero a random fraction of the elements of `x`, and scale the others so that the expected
    value does not change.
    """
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.dropout(x, drop_fraction)
    return _DropoutFunction.apply(x, drop_fraction)  # type: ignore[no-untyped-call]


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop_fraction: float) -> Tensor:
        draw_count = -(-x.numel() // 4)  # rounded up
        draws = torch.empty(draw_count, dtype=torch.int64).random_(-(1 << 63), None)
        steps = min(round(drop_fraction * _STEPS), _STEPS - 1)
        mask = draws.view(torch.int16)[: x.numel()].view(x.shape) >= steps - _STEPS // 2
        ctx.save_for_backward(mask)
        ctx.scale = _STEPS / (_STEPS - steps)
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return outer * mask * ctx.scale, None


EPSILON = 1e-6  # nn.RMSNorm's own default depends on the input's type and is 0.008 in bfloat16


class RMSNorm(nn.Module):
    """RMS normalization over the last dimension, with a learned gain per channel unless
    `gains=False`. `eps` is added to the mean square.

    >>> [round(value, 4) for value in RMSNorm(2, gains=False)(torch.tensor([1.0, 7.0])).tolist()]
    [0.2, 1.4]
    """

    def __init__(self, width: int, *, gains: bool = True, eps: float = EPSILON) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if gains else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`; the result has the dtype of `x`, or autocast's dtype on a CPU under
        autocast.
        """
        y = rms_norm(x, eps=self.eps)
        return y if self.weight is None else y * self.weight

    def extra_repr(self) -> str:
        return "" if self.weight is None else f"{len(self.weight)}"


def rms_norm(x: Tensor, *, eps: float = EPSILON) -> Tensor:
    """Divide `x` by its root mean square over the last dimension, computed in float32."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    dtype = x.dtype
    # autocast's dtype saves a cast in the next matrix product; autocast leaves float64 alone
    if torch.is_autocast_enabled("cpu") and dtype != torch.float64:
        dtype = torch.get_autocast_dtype("cpu")
    return _RMSNormFunction.apply(x, dtype, eps)  # type: ignore[no-untyped-call]


def reciprocal(x: Tensor, *, eps: float = EPSILON) -> Tensor:
    """Return 1 / RMS over the last dimension, shape (..., 1), in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().add_(x.shape[-1] * eps).rsqrt_().mul_(math.sqrt(x.shape[-1]))


def past_norm(outer: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x for y = s x, given the gradient `outer` (g) of y: s (g - y mean(g
    y)). Overwrites `normed` (y).
    """
    along = normed.mul_((outer * normed).mean(dim=-1, keepdim=True))
    return torch.sub(outer, along, out=along).mul_(scale)


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, eps: float) -> Tensor:
        scale = reciprocal(x, eps=eps)
        ctx.save_for_backward(x, scale)
        return (x * scale).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        y = x * scale
        return past_norm(outer.to(y.dtype), y, scale).to(x.dtype), None, None


def check_context(tokens: int, context: int) -> None:
    """Raise `ConfigError` for more tokens than the model has positions."""
    check_shape((tokens <= context, f"{tokens} tokens exceed the model's context of {context}"))


class Positions(nn.Module):
    """Position embeddings: sines and cosines with wavelengths from 2 pi to 20,000 pi, or learned
    vectors.
    """

    table: Tensor  # (T, C)

    def __init__(self, context: int, width: int, *, learned: bool) -> None:
        super().__init__()
        if learned:
            self.table = nn.Parameter(torch.empty(context, width).normal_(std=width**-0.5))
        else:
            self.register_buffer("table", waves(context, width), persistent=False)

    def forward(self, first: int, end: int) -> Tensor:
        """Return the vectors (T, C) of positions `first` to `end` - 1."""
        check_context(end, len(self.table))
        return self.table[first:end]


def waves(context: int, width: int) -> Tensor:
    """Return sinusoidal positions (T, C), with sines at even and cosines at odd channels: Vaswani
    et al. 2017, section 3.5.

    >>> waves(2, 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    frequencies_c = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_Tc = torch.outer(torch.arange(context, dtype=torch.float64), frequencies_c)
    return torch.stack([angles_Tc.sin(), angles_Tc.cos()], dim=2).flatten(1).float()


def channels_side_by_side(images_BCHW: Tensor) -> Tensor:
    """Convert images to torch's memory format `channels_last`, which convolutions preserve.

    `Tensor.contiguous` leaves the strides of single-channel images, which match both memory
    formats. Convolutions then return the contiguous format, in which pooling is several times
    slower on a CPU (torch 2.13). This function sets the strides explicitly.

    >>> channels_side_by_side(torch.zeros(2, 1, 4, 5)).stride()
    (20, 1, 5, 1)
    """
    if images_BCHW.shape[1] != 1:
        return images_BCHW.contiguous(memory_format=torch.channels_last)
    batch, _, height, width = images_BCHW.shape
    return images_BCHW.reshape(batch, height, width, 1).permute(0, 3, 1, 2)
