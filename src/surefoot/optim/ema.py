"""Weights that are evaluated instead of the trained ones, in a copy of the model; a moving average of them."""

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.distributed.shards import extra_states
from surefoot.errors import ConfigError, first_line


class EmaModel(Protocol):
    """A copy of a model that is evaluated, sampled from and saved in its place; training never touches it."""

    model: nn.Module  # the copy, as of the last `refresh`

    def restart(self, live: nn.Module) -> None:
        """Begin again at the model's weights, such as those that were loaded into it."""

    def update(self, applied: Tensor) -> None:
        """Follow one step of the live weights, unless `applied` (1 or 0, on the device) is 0."""

    def refresh(self, live: nn.Module) -> None:
        """Bring the copy up to date, the live buffers included; called before it is evaluated or saved."""


@dataclass(frozen=True)
class ModelCopy:
    """A copy of a model, and every parameter of the model with that of the copy, as this rank holds them."""

    model: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]]

    @torch.no_grad()
    def copy_parameters(self, parameters: set[nn.Parameter] | None = None) -> None:
        """Take over these parameters of the live model, or all: no average ever moves frozen ones."""
        for live, own in self.pairs:
            if parameters is None or live in parameters:
                own.copy_(live)


def copy_model(model: nn.Module) -> ModelCopy:
    """A copy of a model that is never trained.

    >>> copy_model(nn.Linear(1, 1)).model.weight.requires_grad
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
    return ModelCopy(copied, list(zip(model.parameters(), copied.parameters(), strict=True)))


def copy_buffers(live: nn.Module, model_copy: nn.Module) -> None:
    """Give the copy the buffers of the live model, and the state of its modules' `get_extra_state`."""
    buffers = dict(model_copy.named_buffers())
    for name, buffer in live.named_buffers():
        buffers[name].detach().copy_(buffer.detach())
    for (_, extra), (module, _) in zip(extra_states(live), extra_states(model_copy), strict=True):
        module.set_extra_state(extra)


class Ema:
    """A copy of a model (`copy_model`), whose parameters are moving averages of the model's.

    After n updates they are decay^n * start + (1 - decay) * (sum over k of decay^(n - k) * weights after update k). `model` is the
    copy: score it, sample from it, save it, but do not train it. Its buffers are those of the live model as of the last `refresh`.
    `trained` are the parameters that are averaged; None: those that have `requires_grad` now.

    >>> live = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(live.weight)
    >>> average = Ema(copy_model(live), decay=0.75)
    >>> _ = nn.init.ones_(live.weight)
    >>> average.update(torch.tensor(True)), average.model.weight.item()
    (None, 0.25)
    """

    def __init__(self, model_copy: ModelCopy, decay: float, *, trained: set[nn.Parameter] | None = None) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ema = {decay!r}: a number from 0 to below 1 is needed, such as 0.999")
        self.decay, self.model_copy, self.model = decay, model_copy, model_copy.model
        # all others stay as they are: the average of an infinite one (a mask) would not be a number
        averaged = {live for live, _ in model_copy.pairs if live.requires_grad} if trained is None else trained
        self._live = [live.detach() for live, _ in model_copy.pairs if live in averaged]
        self._averages = [average.detach() for live, average in model_copy.pairs if live in averaged]
        # Adding 0 * difference changes no finite number but -0.0: none may be there at the start, and so none is later
        torch._foreach_add_(self._averages, 0.0)

    def restart(self, live: nn.Module) -> None:
        self.model_copy.copy_parameters()
        torch._foreach_add_(self._averages, 0.0)
        copy_buffers(live, self.model)

    def update(self, applied: Tensor) -> None:
        """Move the averages towards the live weights; if `applied` (on the device) is 0, no bit of them changes."""
        difference = torch._foreach_sub(self._live, self._averages)
        torch._foreach_mul_(difference, applied.to(difference[0].dtype) * (1.0 - self.decay))
        torch._foreach_add_(self._averages, difference)

    def refresh(self, live: nn.Module) -> None:
        copy_buffers(live, self.model)
