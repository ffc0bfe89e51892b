"""Declarations of the named optimizers, and checks of their settings, without importing torch."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.config.closest import closest
from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError, Setting, SurefootError, out_of_range

Value = float | bool | str | None | tuple[float, ...] | tuple[str, ...]
Check = tuple[str, Callable[[Any], bool]]  # a description of valid values, and a predicate
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """An optimizer's name, defaults and checks; `file` is the module with the optimizer's
    `OptimizerKind`.
    """

    name: str
    file: str
    weight_decay: float
    settings: Mapping[str, Value]
    checks: Mapping[str, Check]
    # a recipe's default lr and weight_decay, chosen among learning rates a factor of 3 apart
    # (docs/guides/optimizers.md)
    first_run: tuple[float, float]
    like_adam: bool  # True if the step size follows `lr`, whatever the gradient's scale

    @property
    def known(self) -> list[str]:
        """The names of settings that this optimizer takes, common ones included."""
        names = ["lr", "weight_decay", "decay", *self.settings, "layer_decay"]
        if self.like_adam:
            names.append("base_width")
        names.append("frozen")
        return names


# The optimizers of `optimizers.py` by name, registered when that file is imported
DECLARED: dict[str, Declaration] = {}


def declared(
    file: str,
    *,
    first_run: tuple[float, float],
    checks: Mapping[str, Check] | None = None,
    like_adam: bool = True,
) -> Callable[[Function], Function]:
    """Declare an optimizer whose settings and defaults are the keywords of the decorated function.

    `file` is its module, relative to `surefoot.optim.kinds`. `checks` are for the keywords that no
    other optimizer has.
    """

    def declare(function: Function) -> Function:
        name = function.__name__
        defaults = {}
        for keyword in inspect.signature(function).parameters.values():
            if keyword.name not in ("lr", "decay", "lr_multipliers"):
                defaults[keyword.name] = keyword.default
        weight_decay = defaults.pop("weight_decay")
        all_checks = {**_COMMON, **(checks or {})}
        own_checks = {key: all_checks[key] for key in ("lr", "weight_decay", "decay", *defaults)}
        DECLARED[name] = Declaration(
            name, file, weight_decay, defaults, own_checks, first_run, like_adam
        )
        return known_keywords(function)

    return declare


def problems(
    kind: Declaration,
    *,
    lr: Any,
    weight_decay: Any,
    decay: Any = "matrices",
    settings: Mapping[str, Any],
) -> list[SurefootError]:
    """Return one error per invalid setting of an optimizer.

    >>> import surefoot.optim.optimizers
    >>> (wrong,) = problems(declaration("sgd"), lr=0.1, weight_decay=0.0, settings={"momentum": 2})
    >>> wrong.problem
    'optimizer.momentum = 2 must be a number of at least 0 and below 1'
    """
    errors: list[SurefootError] = []
    for key, value in settings.items():
        if key not in kind.settings:
            others = [other.name for other in DECLARED.values() if key in other.settings]
            errors.append(
                ConfigError(
                    "optimizer-setting-foreign",
                    problem=f"optimizer.{key} = {value!r} is not a setting of {kind.name};"
                    f" available: {', '.join(kind.known)}",
                    reason=f"{key} is a setting of: {', '.join(others) or 'none'}",
                    setting=f"optimizer.{key}",
                    value=value,
                    optimizer=kind.name,
                )
            )
    common = {"lr": lr, "weight_decay": weight_decay, "decay": decay}
    for key, value in {**common, **settings}.items():
        if key in kind.checks:
            meaning, is_valid = kind.checks[key]
            if not is_valid(value):
                errors.append(out_of_range(f"optimizer.{key}", value, meaning))
    all_settings = {**kind.settings, **settings}
    if not errors and all_settings.get("nesterov") and not all_settings["momentum"]:
        errors.append(
            ConfigError(
                "nesterov-without-momentum",
                problem="optimizer.nesterov = True needs momentum",
                remedy=Setting("optimizer.momentum", 0.9),
                setting="optimizer.nesterov",
                value=True,
            )
        )
    return errors


def declaration(name: str) -> Declaration:
    """Return the declaration of the optimizer `name`; raise `ConfigError` for an unknown name.

    >>> import surefoot.optim.optimizers
    >>> declaration("lion").settings
    {'betas': (0.9, 0.99)}
    """
    if name in DECLARED:
        return DECLARED[name]
    close = closest(name, DECLARED)
    raise ConfigError(
        "optimizer-unknown",
        problem=f"optimizer.name = {name!r} is unknown",
        remedy=f"did you mean {close}?" if close else f"choose from {', '.join(DECLARED)}",
        setting="optimizer.name",
        value=name,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) != 2:
        return False
    return all(_is_number(beta) and 0 <= beta < 1 for beta in value)


def _are_names(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(name, str) for name in value)


def at_least(low: float, *, below: float = math.inf) -> Check:
    """Return a check that a number is at least `low` and smaller than `below`.

    >>> at_least(0, below=1)[0]
    'a number of at least 0 and below 1'
    """
    meaning = f"a number of at least {low:g}"
    if below < math.inf:
        meaning += f" and below {below:g}"
    return meaning, lambda value: _is_number(value) and low <= value < below


POSITIVE: Check = ("a number above 0", lambda value: _is_number(value) and value > 0)
FEW: Check = ("a whole number from 1 to 99", lambda value: type(value) is int and 1 <= value < 100)
NAMES: Check = ("a list of module names", _are_names)
FIRST_ABOVE_0: Check = (
    "a pair below 1 with the first above 0, which sets where gradients are computed",
    lambda value: _is_pair(value) and value[0] > 0,
)
_COMMON: dict[str, Check] = {
    "lr": POSITIVE,
    "weight_decay": at_least(0),
    "decay": ("'matrices' or 'all'", lambda value: value in ("matrices", "all")),
    "eps": at_least(0),
    "momentum": at_least(0, below=1),
    "nesterov": ("true or false", lambda value: isinstance(value, bool)),
    "betas": ("a pair such as (0.9, 0.999), each at least 0 and below 1", _is_pair),
}
