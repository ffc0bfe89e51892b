"""The compilation (`torch.compile`) of a run's models and the memory format of their images.

Channels-last convolutions are much faster on GPUs and on processors with bfloat16 instructions. The
memory format of weights is unchanged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Layout:
    """The memory format of image inputs."""

    channels_last: bool = False

    def before(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Convert images (B, C, H, W) among a model's inputs to channels last. Returns None if
        channels last is off.
        """
        if not self.channels_last:
            return None
        from surefoot.models.layers import channels_side_by_side

        converted = []
        for value in inputs:
            if isinstance(value, Tensor) and value.ndim == 4 and torch.is_floating_point(value):
                converted.append(channels_side_by_side(value))
            else:
                converted.append(value)
        return tuple(converted)


def layout(channels_last: bool, models: Iterable[nn.Module]) -> Layout:
    """Return the memory format of a run's images, and register its conversion on each model with
    convolutions.

    >>> convolution = nn.Conv2d(2, 3, 1)
    >>> layout(True, [convolution]).channels_last, convolution(torch.zeros(1, 2, 4, 5)).stride()
    (True, (60, 1, 15, 3))
    """
    chosen = Layout(channels_last)
    for model in models:
        if any(isinstance(part, nn.Conv2d) for part in model.modules()):
            model.register_forward_pre_hook(chosen.before)
    return chosen


def compiled(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Compile the models for training; their random numbers equal those of the uncompiled
    models.
    """
    # the compiler's own random numbers would depend on graph breaks, and FSDP2 breaks the graph at
    # every block
    as_uncompiled: dict[str, Any] = {"fallback_random": True}
    return {
        name: torch.compile(model, dynamic=False, options=as_uncompiled)
        for name, model in models.items()
    }


def sole_or_all(named: Mapping[str, Any]) -> Any:
    """Return the loss function's first argument: a single model called "model", otherwise a
    dictionary of all models.
    """
    if list(named) == ["model"]:
        return named["model"]
    return dict(named)
