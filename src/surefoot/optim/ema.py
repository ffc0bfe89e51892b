"""Averaged weights for evaluation, in a copy of the model."""

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from surefoot.distributed.shards import extra_states
from surefoot.errors import ConfigError, first_line


@dataclass(frozen=True)
class ModelCopy:
    """A copy of a model, with pairs of (live parameter, copied parameter) on this rank."""

    model: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]]

    @torch.no_grad()
    def copy_parameters(self, parameters: set[nn.Parameter] | None = None) -> None:
        """Copy these parameters (None: all) from the live model, for example frozen parameters,
        which averaging never updates.
        """
        for live, own in self.pairs:
            if parameters is None or live in parameters:
                own.copy_(live)


class EmaModel(Protocol):
    """A model copy with averaged weights, which is evaluated, sampled from and saved instead of the
    trained model.
    """

    model: nn.Module  # the copy, current as of the last `refresh`
    model_copy: ModelCopy

    def restart(self, live: nn.Module) -> None:
        """Restart the average from the live model's weights, for example after they are loaded."""

    def update(self, applied: Tensor) -> None:
        """Include one step of the live weights in the average, unless `applied` (1 or 0, on the
        device) is 0.
        """

    def refresh(self, live: nn.Module) -> None:
        """Update the copy, including its buffers; call this method before the copy is evaluated or
        saved.
        """


def copy_model(model: nn.Module) -> ModelCopy:
    """Return a copy of a model with `requires_grad` off.

    >>> copy_model(nn.Linear(1, 1)).model.weight.requires_grad
    False
    """
    try:
        copied = copy.deepcopy(model).requires_grad_(False)
    except RuntimeError as problem:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, but averages need a copy of the model: {first_line(problem)}\n"
            "  one of its attributes is a tensor computed from parameters\n"
            "  leave averages (ema, schedule-free) out, or use torch.nn.utils.parametrizations.weight_norm and spectral_norm"
        ) from problem
    return ModelCopy(copied, list(zip(model.parameters(), copied.parameters(), strict=True)))


def copy_buffers(live: nn.Module, model_copy: nn.Module) -> None:
    """Copy the buffers and the modules' `get_extra_state` from the live model to the copy."""
    buffers = dict(model_copy.named_buffers())
    for name, buffer in live.named_buffers():
        buffers[name].detach().copy_(buffer.detach())
    for (_, extra), (module, _) in zip(extra_states(live), extra_states(model_copy), strict=True):
        module.set_extra_state(extra)


class Ema:
    """A model copy (`copy_model`) whose parameters are moving averages of the live model's
    parameters.

    An average after n updates is decay^n * start + (1 - decay) * (sum over k of decay^(n - k) *
    weights after update k). Evaluate, sample from or save `model`, but do not train it; `refresh`
    copies the live buffers. `trained` contains the live parameters to average; None means all
    parameters with `requires_grad`.

    >>> live = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(live.weight)
    >>> average = Ema(copy_model(live), decay=0.75)
    >>> _ = nn.init.ones_(live.weight)
    >>> average.update(torch.tensor(True)), average.model.weight.item()
    (None, 0.25)
    """

    def __init__(
        self, model_copy: ModelCopy, decay: float, *, trained: set[nn.Parameter] | None = None
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"ema = {decay!r} must be at least 0 and below 1, such as 0.999")
        self.decay, self.model_copy, self.model = decay, model_copy, model_copy.model
        # other parameters are not averaged: the average of infinite values (a mask) would be NaN
        averaged = (
            {live for live, _ in model_copy.pairs if live.requires_grad}
            if trained is None
            else trained
        )
        self._live = [live.detach() for live, _ in model_copy.pairs if live in averaged]
        self._averages = [
            average.detach() for live, average in model_copy.pairs if live in averaged
        ]
        # Adding 0 * difference changes no finite value except -0.0, so every -0.0 is removed at the
        # start
        torch._foreach_add_(self._averages, 0.0)

    def restart(self, live: nn.Module) -> None:
        self.model_copy.copy_parameters()
        torch._foreach_add_(self._averages, 0.0)
        copy_buffers(live, self.model)

    def update(self, applied: Tensor) -> None:
        difference = torch._foreach_sub(self._live, self._averages)
        torch._foreach_mul_(difference, applied.to(difference[0].dtype) * (1.0 - self.decay))
        torch._foreach_add_(self._averages, difference)

    def refresh(self, live: nn.Module) -> None:
        copy_buffers(live, self.model)
