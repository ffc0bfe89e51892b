"""Which optimizers may run where each rank holds some rows of every parameter, how, and why not the others.

Most look at one number at a time, and a row does not care who holds the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_ALONE = "number by number"
RUNS: dict[str, str] = {
    "adamw": _ALONE,
    "adam": _ALONE,
    "sgd": _ALONE,
    "lion": _ALONE,
    "muon": "hidden matrices are gathered whole, each by one rank, made orthogonal there and spread again",
    "nadam": _ALONE,
    "radam": _ALONE,
    "schedule-free": _ALONE,
}
"""How an optimizer of that name runs on shards."""

REFUSED: dict[str, str] = {
    "adafactor": "its means over rows and columns, and the size of its steps, need whole matrices",
    "adamw8bit": "its blocks of 256 numbers would end where a rank's rows end, and hold other numbers on other ranks",
}
"""Why an optimizer of that name does not."""

_REFUSED_TYPES = {
    "Muon": "it would make the rows of each rank orthogonal by themselves: surefoot.muon(...) gathers them",
    "Adafactor": REFUSED["adafactor"],
    "AdamW8bit": REFUSED["adamw8bit"],
    "LBFGS": "it compares whole gradients",
}


def refuse_name(name: str) -> None:
    """Raise `ConfigError` where an optimizer of that name cannot run on shards.

    >>> refuse_name("muon")
    """
    if name in REFUSED:
        raise ConfigError(_refusal(name, REFUSED[name]))


def how(optimizer: Optimizer) -> str:
    """How it runs on shards, as `surefoot plan` tells it."""
    from surefoot.optim.kinds.muon import MuonWithAdamW

    return RUNS["muon" if isinstance(optimizer, MuonWithAdamW) else "adamw"]


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer of which it is not known that it may run on shards; one of a user's own above all."""
    from torch import optim

    from surefoot.optim.kinds.lion import Lion
    from surefoot.optim.kinds.muon import MuonWithAdamW
    from surefoot.optim.kinds.schedule_free import ScheduleFree

    of_torch = (
        *(optim.AdamW, optim.Adam, optim.SGD, optim.NAdam, optim.RAdam, optim.Adagrad),
        *(optim.RMSprop, optim.Adamax, optim.ASGD, optim.Adadelta, optim.Rprop),
    )
    if type(optimizer) not in (*of_torch, Lion, MuonWithAdamW, ScheduleFree):
        kind = type(optimizer).__name__
        why = _REFUSED_TYPES.get(kind, "nobody knows whether it looks at more than one number at a time")
        raise ConfigError(_refusal(kind, why))


def _refusal(name: str, why: str) -> str:
    able = ", ".join(list(RUNS)[:-1])
    return (
        f"parallel = fsdp: {name} cannot train parts of a parameter: {why}\n"
        f"  use {able} or {list(RUNS)[-1]}, or --parallel ddp"
    )
