"""The learning rates of an optimizer's parameter groups: what a run sets in each step, and what the
user's code writes between two steps.

A group has a base learning rate, and a step sets this base times the schedule's factor. If code
writes another rate, such as `group["lr"] *= 0.1` or a torch scheduler, the base becomes this rate
divided by the factor that the run last set. A rate in a tensor is never read on the host: its
version counter shows that it was written.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.errors import ConfigError

Rate = float | Tensor


@dataclass(slots=True)
class _LastValues:
    """The values with which the run last left a group."""

    rate: Any
    initial: Any  # `initial_lr`
    size: int  # number of parameters
    momentum_key: str  # "momentum" or "betas"
    version: int | None = None  # of a tensor


class _KeptTensor(NamedTuple):
    tensor: Tensor
    numbers: Tensor  # a copy
    version: int


class GroupRates:
    """The rates of one optimizer. `initial` has the base learning rates with which it was built.

    `follows` is False for a run that began before behavior 6: it overwrites what code writes.
    """

    def __init__(self, optimizer: Optimizer, initial: Sequence[float], *, follows: bool) -> None:
        self.optimizer = optimizer
        self.initial = list(initial)
        self.follows = follows
        self.bases: list[Rate] = list(initial)
        self.factors = [1.0] * len(initial)  # that the run last set
        self.used: Rate = self.initial[0]  # by the latest step, of the first group
        self._bases_used = self.bases
        self.writes = 0  # of the user's code, so far
        self.fingerprint = 0  # of the bases; equal on all ranks with equal writes
        self._last = [
            _LastValues(rate, rate, len(group["params"]), _momentum_key(group))
            for rate, group in zip(initial, optimizer.param_groups, strict=True)
        ]
        self._momentum: float | None = None  # that the run last set
        self.momenta = self._momenta_now()  # momentum or betas in the latest step, of each group
        self._restored: list[dict[str, Any]] | None = None  # values of the groups at a resume
        self._former: GroupRates | None = None  # of the optimizer that this one replaced
        if follows:
            self._give_each_group_its_tensor()

    # --- in each step -----------------------------------------------------------------------------

    def set(
        self, factors: float | Sequence[float], *, lowered: float, momentum: float | None
    ) -> None:
        """Set the rate of each group to its base times its factor times `lowered`, and its momentum
        (or Adam's beta1).
        """
        if self.follows:
            self.follow()
        groups = self.optimizer.param_groups
        of_groups = [factors] * len(groups) if isinstance(factors, int | float) else factors
        if len(of_groups) != len(groups):
            self._refuse_factors(of_groups)
        momenta: list[Any] = []
        for index, group in enumerate(groups):
            factor = of_groups[index] * lowered
            base = self.bases[index] if self.follows else group["initial_lr"]
            rate = base * factor
            if index == 0:
                self.used = rate
            last = self._last[index]
            if self.follows and isinstance(group["lr"], Tensor):
                rate = _filled(group["lr"], rate)
                last.version = rate._version
            group["lr"] = last.rate = rate
            self.factors[index] = factor
            if momentum is not None:
                _set_momentum(group, momentum)
            momenta.append(group.get(last.momentum_key))
        self.momenta = momenta
        self._momentum = momentum
        self._bases_used = self.bases

    def follow(self) -> None:
        """Take over the rates that the user's code wrote since the run set them. Reads no tensor.

        Raises `ConfigError` for what a run cannot follow.
        """
        if not self.follows:
            return
        groups = self.optimizer.param_groups
        if len(groups) != len(self._last):
            self._refuse_groups()
        written: dict[int, Rate] = {}
        for index, last in enumerate(self._last):
            group = groups[index]
            rate = group["lr"]
            initial = group["initial_lr"]
            if len(group["params"]) != last.size:
                self._refuse_groups()
            if rate is not last.rate or (
                last.version is not None and rate._version != last.version
            ):
                if not (_is_number(rate) and _is_number(last.rate) and rate == last.rate):
                    written[index] = self._base_of(rate, index)
            elif initial is not last.initial and initial != last.initial:
                written[index] = self._moved_base(initial, index)
            if self._momentum is not None:
                self._refuse_momentum(group)
        if self._former is not None:
            self._former.refuse_writes()
        if written:
            # the list of the latest step stays as it was
            self.bases = [written.get(index, base) for index, base in enumerate(self.bases)]
            self.writes += 1
            self._note()

    def refuse_writes(self) -> None:
        """Raise `ConfigError` if code writes rates of an optimizer that was replaced."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if any(rate is not last.rate for rate, last in zip(rates, self._last, strict=True)):
            raise ConfigError(
                "rate-of-replaced-optimizer",
                problem="a learning rate was written to an optimizer that the run has replaced,"
                " because parameters were unfrozen",
                remedy="take run.state.optimizers[...].optimizer anew in each step",
                setting="optimizer",
                value=type(self.optimizer).__name__,
            )

    @property
    def has_one_base(self) -> bool:
        """Whether all groups had the same base in the latest step. Waits for the device if a rate
        is in a tensor.
        """
        return len({float(base) for base in self._bases_used}) == 1

    def rates_used(self) -> list[float]:
        """Return the rate of each group in the latest step. Waits for the device if one is in a
        tensor.
        """
        bases = self._bases_used
        if not self.follows:
            bases = [group["initial_lr"] for group in self.optimizer.param_groups]
        return [float(base * factor) for base, factor in zip(bases, self.factors, strict=True)]

    def group_names(self) -> list[str]:
        """Return the key "name" of each group, or "group0", "group1" and so on."""
        groups = self.optimizer.param_groups
        names = [group.get("name") for group in groups]
        if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
            return [str(name) for name in names]
        return [f"group{index}" for index in range(len(groups))]

    def _momenta_now(self) -> list[Any]:
        return [group.get(_momentum_key(group)) for group in self.optimizer.param_groups]

    def body_factors(self) -> list[float]:
        """Return the factor of the user's code on the rate of each group in the latest step. Waits
        for the device if a rate is in a tensor.
        """
        factors = []
        for base, initial in zip(self._bases_used, self.initial, strict=True):
            factors.append(float(base / initial) if initial else 1.0)
        return factors

    # --- saving and rebuilding --------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"bases": list(self.bases), "factors": list(self.factors)}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the bases, after the values of the groups were restored."""
        if self.follows and state is not None:
            bases = list(state["bases"])
            factors = list(state["factors"])
            group_count = len(self.optimizer.param_groups)
            if len(bases) != group_count or len(factors) != group_count:
                raise ValueError(f"rates of {len(bases)} groups; this run has {group_count}")
            self.bases = bases
            self.factors = factors
        self._momentum = None
        self.used = self.optimizer.param_groups[0]["lr"]
        self._bases_used = self.bases
        self.momenta = self._momenta_now()
        self._note()

    def use_initial(self) -> None:
        """Take the rates with which the optimizer was built for those that a checkpoint restored.
        What the user's code wrote stays, as a factor on them.
        """
        bases = []
        for index, group in enumerate(self.optimizer.param_groups):
            before = group["initial_lr"]
            initial = self.initial[index]
            base = self.bases[index]
            is_written = not _is_number(base) or base != before
            bases.append(base * (initial / before) if is_written and before else initial)
            group["initial_lr"] = initial
        self.bases = bases
        self._note()

    def hold(self) -> None:
        """Keep the values of the groups, as a checkpoint restored them, for `put_back`."""
        if self.follows:
            self._restored = [_values_of(group) for group in self.optimizer.param_groups]

    def put_back(self) -> bool:
        """Restore the values of `hold`, once; return True if one differed."""
        if self._restored is None or len(self._restored) != len(self.optimizer.param_groups):
            return False
        differed = False
        with torch.no_grad():
            for group, restored in zip(self.optimizer.param_groups, self._restored, strict=True):
                for key, value in restored.items():
                    now = group.get(key)
                    if isinstance(value, _KeptTensor):
                        if now is not value.tensor or now._version != value.version:
                            differed = True
                            group[key] = value.tensor.copy_(value.numbers)
                    elif isinstance(now, Tensor) or now != value:
                        differed = True
                        group[key] = value
        self._restored = None
        self._note()
        return differed

    def carry_over(self, before: "GroupRates") -> None:
        """Take the bases of the groups whose parameters were in `before`, which this replaces."""
        former_index: dict[Tensor, int] = {}
        for index, group in enumerate(before.optimizer.param_groups):
            for parameter in group["params"]:
                former_index[parameter] = index
        bases_used = list(self.bases)
        for index, group in enumerate(self.optimizer.param_groups):
            # parameters of one group were in one group before
            former = next((former_index[p] for p in group["params"] if p in former_index), None)
            if former is not None:
                self.bases[index] = before.bases[former]
                self.factors[index] = before.factors[former]
                bases_used[index] = before._bases_used[former]
        bases_used[0] = before._bases_used[0]  # as `used`
        self._bases_used = bases_used
        self.writes = before.writes
        self.used = before.used
        self._former = before
        self._note()

    def _note(self) -> None:
        """Remember the values as the run leaves them."""
        self._last = []
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            last = _LastValues(
                rate, group["initial_lr"], len(group["params"]), _momentum_key(group)
            )
            if isinstance(rate, Tensor):
                last.version = rate._version
            self._last.append(last)
        numbers = [base if _is_number(base) else "tensor" for base in self.bases]
        self.fingerprint = crc32(repr(numbers).encode()) if numbers != self.initial else 0

    def _give_each_group_its_tensor(self) -> None:
        """Give each group a rate of its own where torch gives all of them one tensor."""
        seen: set[int] = set()
        for index, group in enumerate(self.optimizer.param_groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                if id(rate) in seen:
                    group["lr"] = rate = rate.detach().clone()
                seen.add(id(rate))
                self._last[index].rate = rate
                self._last[index].version = rate._version

    def _base_of(self, rate: Any, index: int) -> Rate:
        """Return the base of a rate that code has written."""
        factor = self.factors[index]
        name = type(self.optimizer).__name__
        if isinstance(rate, Tensor) and not isinstance(self._last[index].rate, Tensor):
            raise ConfigError(
                "rate-became-a-tensor",
                problem=f"the learning rate of {name} was a number, and your code wrote a tensor",
                reason="a step does not read tensors on the host",
                remedy="write a number, or build the optimizer with a tensor as lr",
                setting="lr",
                value=f"group {index}",
            )
        if not isinstance(rate, Tensor) and not (_is_number(rate) and 0 <= rate < math.inf):
            raise ConfigError(
                "rate-not-a-number",
                problem=f"your code wrote the learning rate {rate!r} of {name}",
                reason="it must be a finite number, at least 0",
                setting="lr",
                value=repr(rate),
            )
        if factor == 0:
            raise ConfigError(
                "rate-written-over-zero",
                problem=f"your code wrote a learning rate of {name} after a step in which the"
                " schedule's factor is 0",
                reason="the factor of the next step multiplies a base, which does not follow"
                " from this",
                remedy="write it after another step, or leave out the schedule",
                setting="lr",
                value=f"group {index}",
            )
        if isinstance(rate, Tensor):
            return rate.detach() / factor
        return float(rate) / factor

    def _moved_base(self, initial: float, index: int) -> Rate:
        """Return the base after code has written another `initial_lr`."""
        before = self._last[index].initial
        if before == 0 or before is self.bases[index] or before == self.bases[index]:
            return float(initial)
        moved: Rate = self.bases[index] * (float(initial) / before)
        return moved

    def _refuse_groups(self) -> None:
        raise ConfigError(
            "groups-changed",
            problem=f"the parameter groups of {type(self.optimizer).__name__} were changed during"
            " the run",
            reason="the run clips, averages and saves the parameters with which it was built",
            remedy="give all parameters to the optimizer, with requires_grad_(False) for those that"
            " join later: the run takes them up when they are unfrozen",
            setting="optimizer",
            value=type(self.optimizer).__name__,
        )

    def _refuse_factors(self, factors: Sequence[float]) -> None:
        raise ConfigError(
            "factors-of-former-groups",
            problem=f"the schedule has factors for {len(factors)} parameter groups, and"
            f" {type(self.optimizer).__name__} has {len(self.optimizer.param_groups)} since"
            " parameters were unfrozen",
            remedy="use a schedule with one factor for all groups, or unfreeze all parameters"
            " before Run(...)",
            setting="schedule",
            value=len(factors),
        )

    def _refuse_momentum(self, group: dict[str, Any]) -> None:
        momentum = _momentum_of(group)
        if momentum != self._momentum:
            raise ConfigError(
                "momentum-of-two",
                problem=f"your code wrote the momentum {momentum!r}, and the schedule sets it too",
                remedy="leave the momentum to one of the two: omit momentum_range",
                setting="schedule",
                value=momentum,
            )


def recorded_rates(
    optimizers: Mapping[str, GroupRates], *, has_group_factors: bool
) -> dict[str, float]:
    """Return the learning rates and momenta of the latest step, as a training record has them.
    Waits for the device if a rate is in a tensor.

    `lr` and `momentum` are those of the first group of the first optimizer. With several
    optimizers, each has a "lr/OPTIMIZER". Groups of an optimizer that may differ have a name each:
    "lr/GROUP", or "lr/OPTIMIZER/GROUP". `has_group_factors`: the schedule has factors for groups.
    """
    rates: dict[str, float] = {}
    momenta: dict[str, float] = {}
    first_name = next(iter(optimizers), None)
    for name, group_rates in optimizers.items():
        groups = group_rates.group_names()
        prefix = f"{name}/" if len(optimizers) > 1 else ""
        rates_used = group_rates.rates_used()
        if has_group_factors or not group_rates.has_one_base:
            for group, rate in zip(groups, rates_used, strict=True):
                rates[f"lr/{prefix}{group}"] = rate
        elif prefix:
            rates[f"lr/{name}"] = rates_used[0]
        rates.setdefault("lr", rates_used[0])
        momenta_used = [_momentum_number(value) for value in group_rates.momenta]
        if len(set(momenta_used)) > 1:
            for group, momentum in zip(groups, momenta_used, strict=True):
                if momentum is not None:
                    momenta[f"momentum/{prefix}{group}"] = momentum
        elif prefix and momenta_used[0] is not None:
            momenta[f"momentum/{name}"] = momenta_used[0]
        if name == first_name and momenta_used[0] is not None:
            momenta["momentum"] = momenta_used[0]
    return rates | momenta


def _momentum_number(value: Any) -> float | None:
    """Return the momentum, or Adam's beta1; None for an optimizer without momentum."""
    if isinstance(value, tuple | list):
        value = value[0]
    return float(value) if value else None


def _is_number(rate: Any) -> bool:
    if isinstance(rate, np.ndarray):
        return rate.ndim == 0 and rate.dtype.kind in "iuf"
    return isinstance(rate, int | float | np.integer | np.floating)


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group without its parameters; of a tensor also a copy."""
    values: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor):
            values[key] = _KeptTensor(value, value.detach().clone(), value._version)
        elif isinstance(value, bool | int | float | str | tuple):
            values[key] = value
    return values


@torch.no_grad()
def _filled(tensor: Tensor, rate: Rate) -> Tensor:
    return tensor.copy_(rate) if isinstance(rate, Tensor) else tensor.fill_(rate)


def _momentum_key(group: dict[str, Any]) -> str:
    return "momentum" if "momentum" in group else "betas"


def _momentum_of(group: dict[str, Any]) -> Any:
    return group["momentum"] if "momentum" in group else group["betas"][0]


def _set_momentum(group: dict[str, Any], momentum: float) -> None:
    if "momentum" in group:
        group["momentum"] = momentum
    else:
        group["betas"] = (momentum, *group["betas"][1:])
