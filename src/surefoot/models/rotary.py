"""Rotary positions: Su et al. 2021, section 3.2.2 (https://arxiv.org/abs/2104.09864), after query-key norms.

Query-key norms: Henry et al. 2020, section 3 (https://arxiv.org/abs/2010.04245), by their root mean square, without gains.

Shapes: B batch, T time (tokens), H heads, D channels of a head, d half of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.models.rms_norm import past_norm, reciprocal, rms_normed


def rotations(context: int, channels: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D) of the angles by which place t turns the pairs of channels (i, i + D/2), with the base 10,000.

    The sines of the first half are negative: with them a turn is `x * cosines + halves exchanged * sines`.
    """
    frequencies_d = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles_Td = torch.outer(torch.arange(context, dtype=torch.float32), frequencies_d)
    cos_Td, sin_Td = angles_Td.cos(), angles_Td.sin()
    return torch.cat([cos_Td, cos_Td], dim=1), torch.cat([-sin_Td, sin_Td], dim=1)


def rotated(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Each pair of channels turned by its place's angle: products of two such depend only on the distance."""
    turned: Tensor = x_BHTD * cos_TD + x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1) * sin_TD
    return turned


def normed_and_rotated(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Queries or keys or both (B, T, H, D), as attention takes them (B, H, T, D): each of norm sqrt(D), and turned.

    In the type of `x_BTHD`; computed in float32.
    """
    if not x_BTHD.is_cpu or torch.compiler.is_compiling():
        wide_BHTD = rms_normed(x_BTHD.float()).transpose(1, 2)
        return rotated(wide_BHTD, cos_TD, sin_TD).to(x_BTHD.dtype)
    y_BHTD: Tensor = _NormedAndRotated.apply(x_BTHD, cos_TD, sin_TD)  # type: ignore[no-untyped-call]
    return y_BHTD


class _NormedAndRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_BTHD.dtype, torch.float32)  # those of weights in bfloat16 too
        x_BHTD = x_BTHD.transpose(1, 2).to(wide, memory_format=torch.contiguous_format, copy=True)
        scale_BHT1 = reciprocal(x_BHTD)
        y_BHTD = _turned(x_BHTD.mul_(scale_BHT1), cos_TD, sin_TD).to(x_BTHD.dtype)
        ctx.save_for_backward(y_BHTD, scale_BHT1, cos_TD, sin_TD)
        return y_BHTD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer_BHTD: Tensor) -> tuple[Tensor, None, None]:
        y_BHTD, scale_BHT1, cos_TD, sin_TD = ctx.saved_tensors
        given, wide = y_BHTD.dtype, scale_BHT1.dtype
        # a turn changes no product of two vectors, so the norm's gradient may be taken before turning back
        outer_BHTD = past_norm(outer_BHTD.to(wide), y_BHTD.to(wide, copy=True), scale_BHT1)
        inner_BTHD = _turned(outer_BHTD, cos_TD, -sin_TD).transpose(1, 2)
        return inner_BTHD.to(given, memory_format=torch.contiguous_format), None, None


def _turned(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    exchanged_BHTD = x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1)
    return (x_BHTD * cos_TD).addcmul_(exchanged_BHTD, sin_TD)
