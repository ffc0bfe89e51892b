"""How a bad step is skipped: parameters and optimizer state stay as they were, and the host is not told.

There are three ways; `skipping` chooses one by what the optimizer is able to do, and it can describe itself.
A zeroed gradient is no skipped step: momentum, decay and the step counter would move on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.errors import ConfigError
from surefoot.optim.adamw_fused import straight_to_kernel
from surefoot.optim.batched_muon import BatchedMuon
from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.adafactor import Adafactor
from surefoot.optim.kinds.adamw8bit import AdamW8bit
from surefoot.optim.kinds.lion import Lion
from surefoot.optim.kinds.muon import MuonWithAdamW
from surefoot.optim.kinds.schedule_free import ScheduleFree
from surefoot.optim.on_cpu import read_on_cpu


class Skip(Protocol):
    """One way to take an optimizer's step, or not."""

    @property
    def description(self) -> str:
        """A phrase that says how, and what it costs."""
        ...

    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Step where `found_inf` (float32, on the device) is 0; where 1, no bit of anything changes."""
        ...


def skipping(optimizer: Optimizer, device: torch.device) -> Skip:
    """The way for this optimizer on this device; an optimizer that cannot skip there is refused by name.

    Fused AdamW, Adam, SGD and Adagrad and those of this folder are told; others are not called on the CPU, and undone
    elsewhere. On the meta device (a run on paper) it is as on CUDA.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> skipping(torch.optim.AdamW([weight], fused=True), torch.device("cpu")).description
    'inside the fused AdamW kernel'
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the loss several times within a step; surefoot's step evaluates it once\n"
            "  use another optimizer, such as surefoot.adamw(...)"
        )
    if isinstance(optimizer, torch.optim.SGD) and not _writes(optimizer):
        raise ConfigError(
            "torch's fused SGD leaves weights of 16 bits on the CPU as they are\n"
            "  build it with SGD(..., fused=False), or keep the weights in float32"
        )
    if isinstance(optimizer, MuonWithAdamW):
        return PartByPart(tuple((part, skipping(part, device)) for part in optimizer.parts))
    own = (Lion, Adafactor, AdamW8bit, ScheduleFree, BatchedMuon)
    branching = type(optimizer) is BatchedMuon and device.type == "cpu"  # which spares the copies that its way makes
    if type(optimizer) in own and not branching:  # a subclass may do more
        return InsideKernel(name, kernel="its own arithmetic, which writes nothing then")
    if _takes_found_inf(optimizer, device):
        _make_momentum_buffers(optimizer)
        return straight_to_kernel(optimizer) or InsideKernel(name)
    if device.type == "cpu":
        return BranchOnCpu(name)
    if any(group.get("capturable") is False for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} counts its steps on the host, which is not told of a step skipped on {device.type}\n"
            f"  build it with {name}(..., capturable=True)"
        )
    if _is_dampened_sgd(optimizer):
        raise ConfigError(
            f"SGD with dampening takes its first step unlike all others, and whether {device.type} skipped it"
            " the host is not told\n  leave dampening out: a smaller lr does the same"
        )
    return Restoring(name, parameter_bytes=sum(p.numel() * p.element_size() for _, p in _members(optimizer)))


@dataclass(frozen=True)
class InsideKernel:
    """The optimizer reads the flag itself, on the device: no copy of anything, no wait."""

    name: str
    kernel: str | None = None  # None: torch's fused one

    @property
    def description(self) -> str:
        """How, in a phrase."""
        return f"inside {self.kernel or f'the fused {self.name} kernel'}"

    def apply(self, optimizer: Any, found_inf: Tensor) -> None:
        """Hand the flag to the kernel, as `torch.amp.GradScaler` does."""
        optimizer.found_inf = found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # a later step by hand must not find it


@dataclass(frozen=True)
class PartByPart:
    """Each part of a composite optimizer in its own way."""

    parts: tuple[tuple[Optimizer, Skip], ...]

    @property
    def description(self) -> str:
        """How, in a phrase."""
        return ", and ".join(dict.fromkeys(skip.description for _, skip in self.parts))

    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Step or skip every part."""
        assert isinstance(optimizer, MuonWithAdamW)
        optimizer.hand_over()
        for part, skip in self.parts:
            skip.apply(part, found_inf)
        optimizer.let_go()


@dataclass(frozen=True)
class BranchOnCpu:
    """A plain branch, on the one device where reading a number waits for nothing."""

    name: str

    @property
    def description(self) -> str:
        """How, in a phrase."""
        return f"by not calling {self.name} (a branch on the CPU, which waits for nothing there)"

    def apply(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Step or do not."""
        step_unless_on_cpu(optimizer, found_inf)


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
        befores = [parameter.detach().clone() for _, parameter in _members(optimizer)]
        states = [_copied(optimizer.state.get(parameter, {})) for _, parameter in _members(optimizer)]
        numbers = [_numbers(group) for group in optimizer.param_groups]
        optimizer.step()
        if numbers != [_numbers(group) for group in optimizer.param_groups]:
            raise self._refused("numbers in its parameter groups")
        for (group, parameter), before, state in zip(_members(optimizer), befores, states, strict=True):
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


def step_unless_on_cpu(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Take the step unless the flag is set, which must be on the CPU."""
    if read_on_cpu(found_inf) == 0:
        optimizer.step()


def _takes_found_inf(optimizer: Optimizer, device: torch.device) -> bool:
    """True where torch's kernel honours the flag; a subclass may do more than its parent's kernel."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        return False
    if device.type not in ("cpu", "cuda", "meta") or not all(group["fused"] for group in optimizer.param_groups):
        return False
    return not _is_dampened_sgd(optimizer)


def _writes(optimizer: torch.optim.SGD) -> bool:
    return all(
        fused_sgd_writes(parameter)
        for group in optimizer.param_groups
        if group["fused"]
        for parameter in group["params"]
    )


def _is_dampened_sgd(optimizer: Optimizer) -> bool:
    """True where the first applied step differs from all others: its gradient is not dampened."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
    return any(group["momentum"] and group["dampening"] for group in groups)


def _make_momentum_buffers(optimizer: Optimizer) -> None:
    """Start SGD's momentum from zeros, which without dampening is what its first step amounts to.

    Left to itself the fused SGD (torch 2.13) makes its buffers in the first step from uninitialised memory,
    and leaves them so where that step is skipped; and it fails where a parameter has its first gradient in a
    later step.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _fresh(optimizer: Optimizer, group: dict[str, Any], key: str, like: Tensor) -> Tensor:
    """What a state entry is before the first step."""
    match optimizer, key:
        case (torch.optim.NAdam(), "mu_product") | (torch.optim.ASGD(), "mu"):
            return torch.ones_like(like)
        case (torch.optim.Rprop(), "step_size") | (torch.optim.ASGD(), "eta"):
            return torch.full_like(like, group["lr"])
    return torch.zeros_like(like)


def _members(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """Every parameter with its group."""
    return ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, bool | int | float | str)}
