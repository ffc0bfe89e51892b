"""What a run needs of weights that are evaluated in the place of the trained ones. They are held in a twin, never swapped."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Averages(Protocol):
    """A twin of a model that is scored, sampled from and saved in its place; training never touches it."""

    @property
    def model(self) -> nn.Module:
        """The twin, as of the last `refresh`."""
        ...

    def restart(self, live: nn.Module) -> None:
        """Begin again at the model's weights, such as those that were loaded into it."""
        ...

    def update(self, applied: Tensor) -> None:
        """Follow one step of the live weights, unless `applied` (1 or 0, on the device) is 0."""
        ...

    def refresh(self, live: nn.Module) -> None:
        """Make the twin what is to be evaluated now, the live buffers included; before it is scored or saved."""
        ...


@dataclass(frozen=True)
class Twin:
    """A copy of a model, and every parameter of the model with that of the copy, as this rank holds them."""

    model: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]]

    @torch.no_grad()
    def copy_parameters(self, parameters: set[nn.Parameter] | None = None) -> None:
        """Take over these parameters of the live model, or all: frozen ones too, since no average ever moves those."""
        for live, own in self.pairs:
            if parameters is None or live in parameters:
                own.copy_(live)


def twin_of(model: nn.Module) -> Twin:
    """A copy of a model, of which nothing is trained.

    >>> twin_of(nn.Linear(1, 1)).model.weight.requires_grad
    False
    """
    copied = copy.deepcopy(model).requires_grad_(False)
    return Twin(copied, list(zip(model.parameters(), copied.parameters(), strict=True)))


def copy_buffers(live: nn.Module, twin: nn.Module) -> None:
    """Give the twin the buffers of the live model."""
    held = dict(twin.named_buffers())
    for name, buffer in live.named_buffers():
        held[name].detach().copy_(buffer.detach())
