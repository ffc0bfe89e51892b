"""In-place updates that a bad step skips; the device reads the skip flag, without the host.

Torch's fused SGD kernel computes `target -= rate * (amount + decay * target)` unless its flag is
set. Nearly every update can use this kernel, in one pass and without a copy. `Restoring` handles
all other updates, by restoring copies.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError, first_line

_FUSED = ("cpu", "cuda")  # device types on which the kernel is known to honor the flag


def fused_sgd_writes(target: Tensor) -> bool:
    """Return whether torch's fused SGD updates `target`; on the CPU (torch 2.13) it skips most
    16-bit elements.

    >>> fused_sgd_writes(torch.zeros(1)), fused_sgd_writes(torch.zeros(1, dtype=torch.bfloat16))
    (True, False)
    """
    return not (target.device.type == "cpu" and target.dtype in (torch.bfloat16, torch.float16))


def subtract(
    targets: Sequence[Tensor],
    amounts: Sequence[Tensor],
    *,
    rate: float = 1.0,
    decay: float = 0.0,
    negated: bool = False,
    found_inf: Tensor | None,
) -> None:
    """Subtract rate * (amount + decay * target) from each target; if `found_inf` is 1, change no
    bit.

    `found_inf` is a float32 tensor on the targets' device; None means 0. With `negated`, rate *
    (decay * target - amount) is subtracted, as with torch's `maximize`.

    >>> weight = torch.tensor([1.0])
    >>> subtract([weight], [torch.tensor([torch.nan])], found_inf=torch.tensor(1.0)), weight
    (None, tensor([1.]))
    """
    # targets and amounts by device and dtype, because a kernel takes those of one
    batches: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
    batches = defaultdict(lambda: ([], []))
    for target, amount in zip(targets, amounts, strict=True):
        batch_targets, batch_amounts = batches[target.device, target.dtype]
        batch_targets.append(target)
        # the kernel needs the amount in its target's strides and dtype
        fits = amount.stride() == target.stride() and amount.dtype == target.dtype
        batch_amounts.append(amount if fits else torch.empty_like(target).copy_(amount))
    for (device, _), (batch_targets, batch_amounts) in batches.items():
        if device.type in _FUSED and fused_sgd_writes(batch_targets[0]):
            torch._fused_sgd_(
                batch_targets,
                batch_amounts,
                [],
                lr=rate,
                weight_decay=decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=negated,
                is_first_step=False,
                found_inf=found_inf,
            )
            continue
        for target, amount in zip(batch_targets, batch_amounts, strict=True):
            wide_target = target.to(torch.promote_types(target.dtype, torch.float32))
            wide_amount = amount.to(torch.promote_types(amount.dtype, torch.float32))
            if negated:
                change = wide_target * decay - wide_amount
            else:
                change = wide_amount + wide_target * decay
            replace(target, (wide_target - change * rate).to(target.dtype), found_inf=found_inf)


def move_towards(
    averages: Sequence[Tensor], values: Sequence[Tensor], *, share: float, found_inf: Tensor | None
) -> None:
    """Move each average toward its value by the fraction `share` of their difference; if
    `found_inf` is 1, change no bit.

    >>> mean = torch.tensor([1.0])
    >>> move_towards([mean], [torch.tensor([3.0])], share=0.25, found_inf=None), mean
    (None, tensor([1.5000]))
    """
    subtract(averages, values, rate=share, decay=1.0, negated=True, found_inf=found_inf)


def replace(target: Tensor, value: Tensor, *, found_inf: Tensor | None) -> None:
    """Copy `value`, a small or integer tensor, into `target` unless `found_inf` is 1."""
    target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value))


def read_on_cpu(number: Tensor) -> float:
    """Return a CPU scalar's value, or raise `RuntimeError`. In a step, only this and `equal_on_cpu`
    read tensors (decision 0033).

    >>> read_on_cpu(torch.tensor(0.5))
    0.5
    """
    if not number.is_cpu:
        raise RuntimeError(f"read_on_cpu received a tensor on {number.device}")
    return number.item()


def by_group(
    move: Callable[[Any, list[Tensor], dict[str, Any], Tensor | None], None],
) -> Callable[..., Any]:
    """Return an optimizer's `step` that calls `move` for the parameters with a gradient in each
    group.

    `move` gets the optimizer, these parameters, their group, and the attribute `found_inf` or None.
    `move` must change no bit if `found_inf` is 1. The optimizer's `first_state` creates missing
    state.
    """

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = self.first_state(parameter)
            if parameters:
                move(self, parameters, group, vars(self).get("found_inf"))
        return loss

    return step


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return the result of a `step` closure, called with gradients enabled as in torch's
    optimizers.
    """
    with torch.enable_grad():
        return None if closure is None else closure()


def explain_missing_closure(optimizer: Optimizer, problem: Exception) -> None:
    """Raise `ConfigError` if a failed `optimizer.step()` complained of a missing closure."""
    if "closure" in f"{type(problem).__name__} {problem}".lower():
        raise ConfigError(
            "closure-not-declared",
            problem=f"{type(optimizer).__name__}.step() needs a closure: {first_line(problem)}",
            reason="its signature gives the closure a default, so the run passed none",
            remedy="write optimizer=sf.optim.with_closure(...) around the function that builds it",
            setting="optimizer",
        ) from problem


def count_step(counters: Sequence[Tensor], *, found_inf: Tensor | None) -> None:
    """Add 1 to each step counter, unless `found_inf` is 1."""
    add_to_each(counters, torch.ones_like(counters[0]), found_inf=found_inf)


def add_to_each(counters: Sequence[Tensor], amount: Tensor, *, found_inf: Tensor | None) -> None:
    """Add `amount`, a 0-dimensional tensor on the device, to each counter, unless `found_inf` is
    1.
    """
    if found_inf is not None:
        amount = amount * torch.rsub(found_inf, 1.0)
    # a list, because torch would read a single tensor on the host
    torch._foreach_add_(list(counters), [amount] * len(counters))


@dataclass(frozen=True)
class Restoring:
    """A skip method that copies parameters and state on the device before each step and restores
    them after a bad step.

    State created in the skipped step gets the values of a new optimizer. Host state (a Python
    counter, a tensor on another device) cannot be restored without waiting for the device. The
    first step raises `ConfigError` for host state.
    """

    name: str
    parameter_bytes: int
    inner: tuple[Optimizer, ...] = ()  # the optimizers inside of the optimizer

    @property
    def description(self) -> str:
        return (
            f"by restoring copies of {self.name}'s parameters and state, taken before each step"
            f" (+{self.parameter_bytes:,} bytes for parameters, plus the size of the state)"
        )

    @torch.no_grad()
    def apply(self, optimizer: Optimizer, found_inf: Tensor, step: Any = None) -> None:  # noqa: ARG002
        """Step, and restore parameters and state on the device if `found_inf` is 1. This needs a
        copy of both, also of the state of inner optimizers.
        """
        bad = found_inf > 0
        group_of: dict[Tensor, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                group_of[parameter] = group
        optimizers = [optimizer, *self.inner]
        parameters = [(parameter, parameter.detach().clone()) for parameter in group_of]
        states = list(map(_copied_state, optimizers))
        tensors, numbers = _beside_state(optimizers)
        copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
        try:
            optimizer.step()
        except Exception as problem:
            explain_missing_closure(optimizer, problem)
            raise
        tensors_now, numbers_now = _beside_state(optimizers)
        if numbers_now != numbers or len(tensors_now) != len(tensors):
            raise self._refused("values in its parameter groups or attributes")
        for now, (tensor, version, copy) in zip(tensors_now, copies, strict=True):
            if now is tensor and now._version == version:
                continue
            if now.device != bad.device:
                raise self._refused(f"a tensor on {now.device} in its groups or attributes")
            now.copy_(torch.where(bad, copy, now))
        for parameter, copy in parameters:
            parameter.copy_(torch.where(bad, copy, parameter))
        for own_optimizer, state_before in zip(optimizers, states, strict=True):
            for owner, state in _entries(own_optimizer):
                group = group_of.get(owner, optimizer.param_groups[0])
                self._restore(own_optimizer, group, state, state_before.get(owner, {}), bad=bad)

    def _restore(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        state: dict[str, Any],
        before: dict[str, Any],
        *,
        bad: Tensor,
    ) -> None:
        """Restore the state of one parameter, or state that all parameters share."""
        for key, now in state.items():
            if isinstance(now, Tensor):
                if now.device != bad.device:
                    raise self._refused(f"state[{key!r}] (a tensor on {now.device})")
                then = before[key] if key in before else _fresh(optimizer, group, key, now)
                now.copy_(torch.where(bad, then, now))
                continue
            is_plain = isinstance(now, bool | int | float | str | None)
            if not is_plain or key not in before or before[key] != now:
                raise self._refused(f"state[{key!r}] (of type {type(now).__name__})")

    def _refused(self, what: str) -> ConfigError:
        instead = "adamw"
        if "ScheduleFree" in self.name:
            instead = "schedule_free"
        return ConfigError(
            "optimizer-state-on-host",
            problem=f"{self.name} stores {what} on the host, where a skipped step cannot be undone"
            " without waiting",
            remedy="use a fused or capturable optimizer, such as"
            f" sf.optim.{instead}(...), or train on the CPU",
            setting="optimizer",
            value=self.name,
            what=what,
        )


_OF_TORCH = ("state", "param_groups", "defaults", "_warned_capturable_if_run_uncaptured")
_SHARED = "shared"  # stands for the parameter of state that all parameters share


def _entries(optimizer: Optimizer) -> list[tuple[Any, dict[str, Any]]]:
    """Return the state of each parameter, and then the state that all of them share."""
    entries: list[tuple[Any, dict[str, Any]]] = []
    shared: dict[str, Any] = {}
    states: dict[Any, Any] = optimizer.state
    for key, value in states.items():
        if isinstance(key, Tensor):
            entries.append((key, value))
        else:
            shared[key] = value
    entries.append((_SHARED, shared))
    return entries


def _copied_state(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    copies: dict[Any, dict[str, Any]] = {}
    for owner, state in _entries(optimizer):
        copies[owner] = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
    return copies


def _fresh(optimizer: Optimizer, group: dict[str, Any], key: str, like: Tensor) -> Tensor:
    match optimizer, key:
        case (torch.optim.NAdam(), "mu_product") | (torch.optim.ASGD(), "mu"):
            return torch.ones_like(like)
        case (torch.optim.Rprop(), "step_size") | (torch.optim.ASGD(), "eta"):
            return torch.full_like(like, group["lr"])
    return torch.zeros_like(like)


def _beside_state(optimizers: Sequence[Optimizer]) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors and the numbers in parameter groups, and in attributes of the user's
    classes.
    """
    places: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            places.append({key: value for key, value in group.items() if key != "params"})
        if type(optimizer).__module__.partition(".")[0] not in ("torch", "surefoot"):
            attributes = vars(optimizer).items()
            places.append({name: value for name, value in attributes if name not in _OF_TORCH})
    tensors = []
    numbers = []
    for leaf in pytree.tree_leaves(places):
        if isinstance(leaf, bool | int | float | str):
            numbers.append(leaf)
        elif isinstance(leaf, Tensor) and not isinstance(leaf, torch.nn.Parameter):
            tensors.append(leaf)
    return tensors, numbers
