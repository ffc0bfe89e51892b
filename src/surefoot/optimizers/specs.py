"""What an optimizer is to be, before there is a model: a name and numbers to be printed, saved and compared.

Importing this file does not import torch; `OptimizerSpec.build` does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigError
from surefoot.optimizers.rates import Rates, misfits

if TYPE_CHECKING:
    import torch

    from surefoot.optimizers.groups import Group

Setting = float | bool | tuple[float, ...]

_SETTINGS: dict[str, dict[str, Setting]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "sgd": {"momentum": 0.0, "nesterov": False},
}
_WEIGHT_DECAY = {"adamw": 0.01, "sgd": 0.0}


@dataclass(frozen=True)
class OptimizerSpec:
    """One of torch's optimizers with its numbers; made by `adamw`, `sgd` or, from configuration, `named`."""

    name: str
    lr: float
    weight_decay: float
    settings: Mapping[str, Setting] = field(default_factory=dict)
    rates: tuple[Rates, ...] = ()  # of parts of the model

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """The optimizer over these groups, each with its own weight decay and rate; fused unless one is complex."""
        import torch

        parameters = [parameter for group in groups for parameter in group.parameters]
        fused = all(parameter.is_floating_point() for parameter in parameters)
        held = [
            {"params": group.parameters, "weight_decay": group.decay, "lr": self.lr * group.rate} for group in groups
        ]
        settings: dict[str, Any] = dict(self.settings)
        match self.name:
            case "adamw":
                return torch.optim.AdamW(held, lr=self.lr, fused=fused, **settings)
            case "sgd":
                return torch.optim.SGD(held, lr=self.lr, fused=fused, **settings)
        raise ConfigError(_unknown_name(self.name))

    def described(self) -> dict[str, Any]:
        """Everything that must agree for an exact resume, as JSON values.

        >>> sgd(0.1, momentum=0.9).described()
        {'name': 'sgd', 'lr': 0.1, 'weight_decay': 0.0, 'momentum': 0.9, 'nesterov': False}
        """
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()}
        rates = {"rates": [dict(rate.described) for rate in self.rates]} if self.rates else {}
        return {"name": self.name, "lr": self.lr, "weight_decay": self.weight_decay, **plain, **rates}


def adamw(
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    rates: Rates | Sequence[Rates] = (),
) -> OptimizerSpec:
    """Adam with decoupled weight decay: Loshchilov and Hutter 2019, algorithm 2 (https://arxiv.org/abs/1711.05101).

    As torch's: the decay of a step is lr * weight_decay, so it follows the schedule. `rates`: those of parts of the model, such
    as `layer_decay(0.75)`.

    >>> adamw(3e-4).weight_decay
    0.01
    """
    return named("adamw", lr=lr, weight_decay=weight_decay, settings={"betas": betas, "eps": eps}, rates=rates)


def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    rates: Rates | Sequence[Rates] = (),
) -> OptimizerSpec:
    """Stochastic gradient descent, with momentum as torch has it: buffer = momentum * buffer + gradient.

    The rate multiplies the buffer; Sutskever et al. 2013, equations 1 and 2, have it inside instead:
    https://proceedings.mlr.press/v28/sutskever13.html

    >>> dict(sgd(0.1, momentum=0.9).settings)
    {'momentum': 0.9, 'nesterov': False}
    """
    return named(
        "sgd", lr=lr, weight_decay=weight_decay, settings={"momentum": momentum, "nesterov": nesterov}, rates=rates
    )


def named(
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    settings: Mapping[str, Setting | None] | None = None,
    rates: Rates | Sequence[Rates] = (),
) -> OptimizerSpec:
    """The optimizer called `name`; a setting that is None has the optimizer's own default.

    Raises one `ConfigError` with all problems; a setting that only other optimizers know is one of them.

    >>> named("sgd", lr=0.1, settings={"momentum": 0.9, "betas": None}).described()["momentum"]
    0.9
    """
    if name not in _SETTINGS:
        raise ConfigError(_unknown_name(name))
    own = _SETTINGS[name]
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    decay = _WEIGHT_DECAY[name] if weight_decay is None else weight_decay
    problems = [
        f"optimizer.{key} = {value!r} is foreign to {name}, which knows: lr, weight_decay, {', '.join(own)}"
        for key, value in given.items()
        if key not in own
    ]
    problems += [
        f"optimizer.{key} = {value!r}: {wanted} is needed"
        for key, value in {"lr": lr, "weight_decay": decay, **given}.items()
        if key in own or key in ("lr", "weight_decay")
        if (wanted := _wanted(key, value)) is not None
    ]
    merged = {**own, **{key: value for key, value in given.items() if key in own}}
    if merged.get("nesterov") and not merged.get("momentum"):
        problems.append("optimizer.nesterov = True needs a momentum: try --optimizer.momentum 0.9")
    several = tuple(rates) if isinstance(rates, Sequence) else (rates,)
    problems += misfits(several, name)
    if problems:
        raise ConfigError("\n".join(problems))
    plain = {key: tuple(value) if isinstance(value, Sequence) else value for key, value in merged.items()}
    return OptimizerSpec(name, lr=lr, weight_decay=decay, settings=plain, rates=several)


def _wanted(key: str, value: Any) -> str | None:
    """What a setting should have been; None where it is that."""
    match key:
        case "lr":
            return None if _number(value) and value > 0 else "a number above 0"
        case "weight_decay" | "eps":
            return None if _number(value) and value >= 0 else "a number from 0"
        case "momentum":
            return None if _number(value) and 0 <= value < 1 else "a number from 0 to below 1"
        case "betas":
            fits = isinstance(value, Sequence) and len(value) == 2 and all(_number(b) and 0 <= b < 1 for b in value)
            return None if fits else "two numbers from 0 to below 1"
        case "nesterov":
            return None if isinstance(value, bool) else "true or false"
    return None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _unknown_name(name: str) -> str:
    close = difflib.get_close_matches(name, _SETTINGS, n=1)
    meant = f"did you mean {close[0]}?" if close else f"one of: {', '.join(_SETTINGS)}"
    return f"optimizer.name = {name!r} is unknown; {meant}"
