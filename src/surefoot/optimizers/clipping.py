"""The size of a gradient, and how it is limited: by its norm, by value, or not at all. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import ConfigError

Clip = tuple[Literal["norm", "value", "off"], float]


def clipping(text: str) -> Clip:
    """What "norm 1.0", "value 0.5" or "off" asks for.

    >>> clipping("norm 1.0")
    ('norm', 1.0)
    """
    match text.split():
        case ["off"]:
            return "off", 0.0
        case ["norm" | "value" as kind, number]:
            try:
                most = float(number)
            except ValueError:
                most = 0.0
            if 0.0 < most < float("inf"):
                return ("norm", most) if kind == "norm" else ("value", most)
    raise ConfigError(f"clip = {text!r} is not understood: write 'norm 1.0', 'value 0.5' or 'off'")


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all of them as one number on their device; 0 for none."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def scale_and_clip(gradients: Sequence[Tensor], *, factor: Tensor | float, norm: Tensor, clip: Clip) -> None:
    """Multiply all gradients by `factor` and limit them, in one pass where one is enough.

    `norm` is that of the gradients after `factor`. By norm: times min(1, most / (norm + 1e-6)), as
    `torch.nn.utils.clip_grad_norm_` does (Pascanu et al. 2013, section 3.2: https://arxiv.org/abs/1211.5063).
    """
    if not gradients:
        return
    kind, most = clip
    if kind == "norm":
        factor = (most / (norm + 1e-6)).clamp(max=1.0) * factor
    if not isinstance(factor, float):
        torch._foreach_mul_(gradients, factor)
    if kind == "value":
        torch._foreach_clamp_min_(gradients, -most)
        torch._foreach_clamp_max_(gradients, most)
