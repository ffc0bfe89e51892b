"""What each optimizer can be told: its settings with their defaults, and what is wrong with a value. Torch-free."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Setting = float | bool | str | None | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """The defaults of one optimizer: those of torch or of the paper, but for what `specs` says of it."""

    weight_decay: float
    settings: Mapping[str, Setting]


KINDS: dict[str, Kind] = {
    "adamw": Kind(0.01, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adam": Kind(0.0, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "sgd": Kind(0.0, {"momentum": 0.0, "nesterov": False}),
    "lion": Kind(0.0, {"betas": (0.9, 0.99)}),
    "adafactor": Kind(0.0, {"beta2_decay": -0.8, "clip_threshold": 1.0, "smallest_scale": 1e-3}),
    "muon": Kind(
        0.1,
        {
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "adamw_lr": None,
            "adamw_for": None,
        },
    ),
    "nadam": Kind(0.0, {"betas": (0.9, 0.999), "eps": 1e-8, "momentum_decay": 4e-3}),
    "radam": Kind(0.0, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw8bit": Kind(0.01, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "schedule-free": Kind(0.0, {"betas": (0.9, 0.999), "eps": 1e-8}),
}

OF_PARTS = {"layer_decay": (), "base_width": ("sgd", "muon", "adafactor"), "frozen": ()}
"""Settings that give parts of a model their rates, and which optimizers each does not fit."""

_Check = tuple[str, Callable[[Any], bool]]  # what is needed, and whether a value is that


def problems(name: str, *, lr: Any, weight_decay: Any, given: Mapping[str, Any]) -> list[str]:
    """A line for everything that is wrong with the settings given to the optimizer called `name`.

    >>> problems("sgd", lr=0.1, weight_decay=0.0, given={"momentum": 2.0})
    ['optimizer.momentum = 2.0: a number from 0 to below 1 is needed']
    """
    own = KINDS[name].settings
    of_parts = [key for key, unfit in OF_PARTS.items() if name not in unfit]
    found = [
        f"optimizer.{key} = {value!r} is foreign to {name}, which knows: {', '.join(['lr', 'weight_decay', *own, *of_parts])}"
        f"\n  {key} is a setting of: {', '.join(other for other, kind in KINDS.items() if key in kind.settings) or 'none'}"
        for key, value in given.items()
        if key not in own
    ]
    known = {key: value for key, value in given.items() if key in own}
    found += [
        f"optimizer.{key} = {value!r}: {needed} is needed"
        for key, value in {"lr": lr, "weight_decay": weight_decay, **known}.items()
        for needed, fits in [_CHECKS[key]]
        if not fits(value)
    ]
    if found:
        return found
    merged = {**own, **known}
    if merged.get("nesterov") and not merged["momentum"]:
        found.append("optimizer.nesterov = True needs a momentum: try --optimizer.momentum 0.9")
    if name == "schedule-free" and not merged["betas"][0]:
        found.append(
            "optimizer.betas: schedule-free needs a first one above 0, such as 0.9: it says where gradients are taken"
        )
    return found


def unknown(name: str) -> str:
    """What to say of a name that no optimizer has.

    >>> unknown("muom")
    "optimizer.name = 'muom' is unknown; did you mean muon?"
    """
    close = difflib.get_close_matches(name.replace("_", "-"), KINDS, n=1)
    meant = f"did you mean {close[0]}?" if close else f"one of: {', '.join(KINDS)}"
    return f"optimizer.name = {name!r} is unknown; {meant}"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _not_negative(value: Any) -> bool:
    return _number(value) and value >= 0


def _betas(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(_number(beta) and 0 <= beta < 1 for beta in value)


def _names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


_CHECKS: dict[str, _Check] = {
    "lr": ("a number above 0", _positive),
    "weight_decay": ("a number from 0", _not_negative),
    "eps": ("a number from 0", _not_negative),
    "momentum": ("a number from 0 to below 1", lambda value: _number(value) and 0 <= value < 1),
    "nesterov": ("true or false", lambda value: isinstance(value, bool)),
    "betas": ("a pair such as (0.9, 0.999), each at least 0 and below 1,", _betas),
    "ns_steps": (
        "a whole number from 1 to 99",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 100,
    ),
    "adamw_lr": ("a number above 0", _positive),
    "adamw_for": ("names of modules", _names),
    "beta2_decay": ("a number from -1 to below 0", lambda value: _number(value) and -1 <= value < 0),
    "clip_threshold": ("a number from 1", lambda value: _number(value) and value >= 1),
    "smallest_scale": ("a number above 0", _positive),
    "momentum_decay": ("a number from 0", _not_negative),
}
