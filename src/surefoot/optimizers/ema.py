"""An exponential moving average of a model's weights, held in a second model and never swapped with the first."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError


class Ema:
    """A twin whose parameters are, after n updates, decay^n * start + (1 - decay) * sum of decay^(n - k) * weights k.

    `model` is that twin: score it, sample from it, save it, but do not train it. Its buffers are those of the live model as
    of the last `copy_buffers` (batch statistics are averages already). Costs one more copy of the model on its device.

    >>> live = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(live.weight)
    >>> average = Ema(live, decay=0.75)
    >>> _ = nn.init.ones_(live.weight)
    >>> average.update(torch.tensor(True)), average.model.weight.item()
    (None, 0.25)
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ema = {decay!r}: a number from 0 to below 1 is needed, such as 0.999")
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._live = [parameter.detach() for parameter in model.parameters()]
        self._averages = [parameter.detach() for parameter in self.model.parameters()]
        # Adding 0 * difference changes no bit of any finite number but -0.0, so there must be none at the start;
        # a sum is -0.0 only where both terms are, so there is none later either.
        torch._foreach_add_(self._averages, 0.0)

    def update(self, applied: Tensor) -> None:
        """Move the averages towards the live weights; where `applied` (0 or 1, or a boolean, on the device) is 0, by nothing.

        Bit-exactly nothing, as long as the weights are finite. Waits for nothing.
        """
        difference = torch._foreach_sub(self._live, self._averages)
        torch._foreach_mul_(difference, applied * (1.0 - self.decay))
        torch._foreach_add_(self._averages, difference)

    def copy_buffers(self, live: nn.Module) -> None:
        """Take over the buffers of the live model; to be called before the twin is scored or saved."""
        twin = dict(self.model.named_buffers())
        for name, buffer in live.named_buffers():
            twin[name].detach().copy_(buffer.detach())
