"""Squared ReLU: So et al. 2021, section 4.2 (https://arxiv.org/abs/2109.08668)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    """The square of what is above 0, in the type of `x`: autocast would raise a power in float32.

    >>> relu2(torch.tensor([-2.0, 3.0])).tolist()
    [0.0, 9.0]
    """
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.relu(x).square()
    y: Tensor = _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return y


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        above = F.relu(x)
        ctx.save_for_backward(above)
        return above * above

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Tensor:
        (above,) = ctx.saved_tensors
        inner: Tensor = outer * above
        return inner.mul_(2)
