"""What becomes of gradients between backward and the optimizer: their size, their limit, their end. Nothing waits for the device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError

Clip = tuple[Literal["norm", "value", "off"], float]


def gradient_norm(gradients: list[Tensor], *, factor: Tensor | float) -> Tensor:
    """The 2-norm over all of them after they are multiplied by `factor` (1.0 or a tensor), on their device; 0 for none."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm if isinstance(factor, float) else norm * factor


def scale_and_clip(gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, clip: Clip) -> None:
    """Multiply all gradients by `factor` and limit them, in one pass where one is enough.

    `factor` is 1.0 or a tensor; `norm` is that of the gradients after it. By norm: times min(1, most / (norm + 1e-6)), as
    `torch.nn.utils.clip_grad_norm_` does (Pascanu et al. 2013, section 3.2: https://arxiv.org/abs/1211.5063).
    """
    if not gradients:
        return
    kind, most = clip
    if kind == "norm":
        # most / (norm + 1e-6), without torch's Python wrapper
        limit = (norm + 1e-6).reciprocal_().mul_(most).clamp_(max=1.0)
        factor = limit if isinstance(factor, float) else limit * factor
    if not isinstance(factor, float):
        torch._foreach_mul_(gradients, factor)
    if kind == "value":
        torch._foreach_clamp_min_(gradients, -most)
        torch._foreach_clamp_max_(gradients, most)


def clear(parameters: list[nn.Parameter]) -> None:
    """Let every gradient go. None, not zeros: a parameter that a step does not use must not decay or coast in it."""
    for parameter in parameters:
        parameter.grad = None


def refuse_unused(parameters: list[nn.Parameter], *, step: int) -> None:
    """Raise `ConfigError` where a step ends with gradients that no update took: the next step would add its own to them."""
    if any(parameter.grad is not None for parameter in parameters):
        clear(parameters)
        raise ConfigError(
            f"step {step} ended with gradients that no update used, and they would leak into the next step\n"
            "  call update(step) after forward_backward(step), or set them to None where they are not wanted"
        )
