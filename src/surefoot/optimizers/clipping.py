"""The size of a gradient, and how it is limited: by its norm, by value, or not at all. Nothing here waits for the device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Clip = tuple[Literal["norm", "value", "off"], float]


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all of them as one number on their device; 0 for none."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def scale_and_clip(gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, clip: Clip) -> None:
    """Multiply all gradients by `factor` and limit them, in one pass where one is enough.

    `factor` is 1.0 or a tensor; `norm` is that of the gradients after it. By norm: times min(1, most / (norm + 1e-6)), as
    `torch.nn.utils.clip_grad_norm_` does (Pascanu et al. 2013, section 3.2: https://arxiv.org/abs/1211.5063).
    """
    if not gradients:
        return
    kind, most = clip
    if kind == "norm":
        limit = (
            (norm + 1e-6).reciprocal_().mul_(most).clamp_(max=1.0)
        )  # most / (norm + 1e-6), without torch's Python wrapper
        factor = limit if isinstance(factor, float) else limit * factor
    if not isinstance(factor, float):
        torch._foreach_mul_(gradients, factor)
    if kind == "value":
        torch._foreach_clamp_min_(gradients, -most)
        torch._foreach_clamp_max_(gradients, most)
