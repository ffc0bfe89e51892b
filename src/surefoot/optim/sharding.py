"""Which optimizers may run where each rank holds some rows of every parameter, how, and why not the others.

Most look at one number at a time, and a row does not care who holds the next one.
"""

from __future__ import annotations

from torch.optim import Optimizer

from surefoot.errors import ConfigError
from surefoot.optim.registry import NUMBER_BY_NUMBER, all_kinds, kind_named, kind_of


def refuse_name(name: str) -> None:
    """Raise `ConfigError` where an optimizer of that name cannot run on shards.

    >>> refuse_name("muon")
    """
    kind = kind_named(name)
    if not kind.shardable:
        raise _refusal(name, kind.on_shards)


def how(optimizer: Optimizer) -> str:
    """How it runs on shards, as `surefoot plan` tells it."""
    kind = kind_of(optimizer)
    return NUMBER_BY_NUMBER if kind is None else kind.on_shards


def refuse_optimizer(optimizer: Optimizer) -> None:
    """Raise `ConfigError` for an optimizer of which it is not known that it may run on shards; one of a user's own above all."""
    kind, made = kind_of(optimizer), type(optimizer).__name__
    if kind is None or not kind.shardable:
        reasons = {each.made.__name__: each.on_shards for each in all_kinds() if not each.shardable}
        raise _refusal(made, reasons.get(made, "nobody knows whether it looks at more than one number at a time"))


def _refusal(name: str, why: str) -> ConfigError:
    *able, last = [kind.name for kind in all_kinds() if kind.name and kind.shardable]
    return ConfigError(
        f"parallel = fsdp: {name} cannot train parts of a parameter: {why}\n"
        f"  use {', '.join(able)} or {last}, or --parallel ddp"
    )
