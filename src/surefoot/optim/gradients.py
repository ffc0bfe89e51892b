"""What becomes of gradients between backward and the optimizer: their size and their end; their limit is in `clipping.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError


def present(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients that there are, in the order of their parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor], *, factor: Tensor | float) -> Tensor:
    """The 2-norm over all of them after they are multiplied by `factor` (1.0 or a tensor), on their device; 0 for none."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(gradients)) if len(gradients) > 1 else gradients[0]
    )
    return norm if isinstance(factor, float) else norm * factor


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
