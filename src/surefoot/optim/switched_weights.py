"""Optimizers that keep other parameters for training than for evaluation, and switch between them
by `train()` and `eval()`, such as those of the package schedulefree.

Between steps the parameters are those of training. A copy of the model has those of evaluation, so
that evaluating, sampling and saving change no bit of the training. `eval()` followed by `train()`
would change them by rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.optim.ema import ModelCopy


def switches_weights(optimizer: Optimizer) -> bool:
    """Return True if an optimizer has the methods `train` and `eval`.

    >>> switches_weights(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    False
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class SwitchedWeights:
    """A model copy with the parameters that `optimizer.eval()` gives."""

    def __init__(self, model_copy: ModelCopy, optimizer: Any) -> None:
        self.model_copy = model_copy
        self.model = model_copy.model
        self.optimizer = optimizer
        self.updates = 0
        self.precise: dict[nn.Parameter, Tensor] = {}
        self._moved = True
        optimizer.train()

    def load(self, updates: int) -> None:
        """Do nothing: the copy was loaded, and the optimizer's state is loaded."""

    def restart(self, live: nn.Module) -> None:
        self._moved = True
        self.refresh(live)

    def update(self, applied: Tensor) -> None:  # noqa: ARG002
        """Record a step; a skipped one changes neither parameters nor state."""
        self._moved = True

    @torch.no_grad()
    def refresh(self, live: nn.Module) -> None:
        """Copy the parameters for evaluation, and everything else of `live`."""
        if self._moved:
            trained = [(parameter, parameter.detach().clone()) for parameter in live.parameters()]
            try:
                self.optimizer.eval()
                self.model_copy.copy_parameters()
            finally:
                self.optimizer.train()
                for parameter, before in trained:
                    parameter.copy_(before)
            self._moved = False
        averaged: set[nn.Parameter] = set()
        for group in self.optimizer.param_groups:
            averaged.update(parameter for parameter in group["params"] if parameter.requires_grad)
        self.model_copy.copy_rest(live, averaged=averaged)
