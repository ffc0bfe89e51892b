"""Root mean square norms: each place's channels divided by their root mean square (Zhang and Sennrich 2019, equation 4).

https://arxiv.org/abs/1910.07467. torch's own is a chain of operations on the CPU, each a pass over memory; here the backward
pass is written out, and both passes hand on the number format of the products that come next, which saves their casts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6  # nn.RMSNorm's own default depends on the input's type and is 0.008 in bfloat16


class RMSNorm(nn.Module):
    """The norm over the last dimension, with a gain for each channel or, `gains=False`, without.

    >>> [round(value, 4) for value in RMSNorm(2, gains=False)(torch.tensor([1.0, 7.0])).tolist()]
    [0.2, 1.4]
    """

    def __init__(self, width: int, *, gains: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if gains else None

    def forward(self, x: Tensor) -> Tensor:
        """The normed channels, in the type of `x`, on the CPU under autocast in autocast's."""
        y = rms_normed(x)
        return y if self.weight is None else y * self.weight

    def extra_repr(self) -> str:
        """Whether there are gains, for printing."""
        return "" if self.weight is None else f"{len(self.weight)}"


def rms_normed(x: Tensor) -> Tensor:
    """`x` divided by its root mean square over the last dimension; computed in float32."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.rms_norm(x.float(), x.shape[-1:], eps=EPSILON).to(x.dtype)
    y: Tensor = _Normed.apply(x, handed_on(x))  # type: ignore[no-untyped-call]
    return y


def handed_on(x: Tensor) -> torch.dtype:
    """The type in which a product would take `x`: autocast's, where that is on, which leaves float64 alone."""
    on = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if on else x.dtype


def reciprocal(x: Tensor) -> Tensor:
    """1 over the root mean square of the last dimension, (..., 1), in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale: Tensor = norm.square_().add_(x.shape[-1] * EPSILON).rsqrt_().mul_(math.sqrt(x.shape[-1]))
    return scale


def past_norm(outer: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """The gradient before the norm, of that after it (`outer`); overwrites `normed`, the norm's wide result.

    With y = s x, s = 1/rms(x): s (g - y mean(g y)).
    """
    along = (outer * normed).mean(dim=-1, keepdim=True)
    return normed.mul_(along).neg_().add_(outer).mul_(scale)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, given: torch.dtype) -> Tensor:
        scale = reciprocal(x)
        ctx.save_for_backward(x, scale)
        return (x * scale).to(given)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        y = x * scale
        return past_norm(outer.to(y.dtype), y, scale).to(x.dtype), None
