"""What a run needs of weights that are evaluated in the place of the trained ones. They are held in a twin, never swapped."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError, first_line
from surefoot.sharding import extra_states


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
    try:
        copied = copy.deepcopy(model).requires_grad_(False)
    except RuntimeError as problem:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, and averages are held in a copy of it: {first_line(problem)}\n"
            "  a tensor that is computed from parameters is one of its attributes\n"
            "  leave averages (ema, schedule-free) out; or take torch.nn.utils.parametrizations.weight_norm and spectral_norm"
        ) from problem
    return Twin(copied, list(zip(model.parameters(), copied.parameters(), strict=True)))


def copy_buffers(live: nn.Module, twin: nn.Module) -> None:
    """Give the twin the buffers of the live model, and what its modules keep by `get_extra_state`."""
    held = dict(twin.named_buffers())
    for name, buffer in live.named_buffers():
        held[name].detach().copy_(buffer.detach())
    for (_, extra), (module, _) in zip(extra_states(live), extra_states(twin), strict=True):
        module.set_extra_state(extra)
