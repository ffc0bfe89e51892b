"""A step that is taken and undone: copies of parameters and state are put back where it was bad, all on the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.errors import ConfigError


@dataclass(frozen=True)
class Restoring:
    """Parameters and state are copied before the step and put back after a bad one, all on the device.

    State that is made in the very step that is undone becomes what a new optimizer starts from: zeros, but
    for those of torch's optimizers that start otherwise (`_fresh`). What an optimizer keeps on the host (a
    counter in Python, a tensor on another device) cannot be undone without waiting: it is refused in the
    first step.
    """

    name: str
    parameter_bytes: int

    @property
    def description(self) -> str:
        """How, in a phrase, and the memory it takes."""
        return (
            f"by putting back copies of parameters and state of {self.name}, made before each step"
            f" (+{self.parameter_bytes:,} bytes for parameters, and its state once more)"
        )

    @torch.no_grad()
    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Step, then put back what was before where the flag says so."""
        bad = found_inf > 0
        members = [(group, parameter) for group in optimizer.param_groups for parameter in group["params"]]
        befores = [parameter.detach().clone() for _, parameter in members]
        states = [_copied(optimizer.state.get(parameter, {})) for _, parameter in members]
        numbers = [_numbers(group) for group in optimizer.param_groups]
        optimizer.step()
        if numbers != [_numbers(group) for group in optimizer.param_groups]:
            raise self._refused("numbers in its parameter groups")
        for (group, parameter), before, state in zip(members, befores, states, strict=True):
            parameter.copy_(torch.where(bad, before, parameter))
            for key, now in optimizer.state.get(parameter, {}).items():
                if not isinstance(now, Tensor):
                    self._refuse_change(key, now, state)
                elif now.device != parameter.device:
                    raise self._refused(f"state[{key!r}], a tensor on {now.device}")
                else:
                    then = state[key] if key in state else _fresh(optimizer, group, key, now)
                    now.copy_(torch.where(bad, then, now))

    def _refuse_change(self, key: str, now: Any, before: dict[str, Any]) -> None:
        plain = now is None or isinstance(now, bool | int | float | str)
        if not plain or key not in before or before[key] != now:
            raise self._refused(f"state[{key!r}], a {type(now).__name__}")

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.name} keeps {what} on the host, where a skipped step cannot be undone without waiting\n"
            f"  use a fused or capturable optimizer, such as surefoot.adamw(...), or train on the CPU"
        )


def _fresh(optimizer: Optimizer, group: dict[str, Any], key: str, like: Tensor) -> Tensor:
    """What a state entry is before the first step."""
    match optimizer, key:
        case (torch.optim.NAdam(), "mu_product") | (torch.optim.ASGD(), "mu"):
            return torch.ones_like(like)
        case (torch.optim.Rprop(), "step_size") | (torch.optim.ASGD(), "eta"):
            return torch.full_like(like, group["lr"])
    return torch.zeros_like(like)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, bool | int | float | str)}
