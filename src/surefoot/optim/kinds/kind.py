"""Facts about each class of optimizers: how it is built, its state, how it runs on shards and skips a step.

Each `OptimizerKind` stands beside its class in a file of `kinds/`; its name and settings are declared in `optimizers.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from surefoot.distributed.shards import shard_shape
from surefoot.errors import ConfigError
from surefoot.optim.ema import EmaModel, ModelCopy
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.optim.param_groups import Group

Settings = Mapping[str, Any]
Shape = tuple[int, ...]
Shapes = Sequence[tuple[Shape, int]]  # of each parameter its shape on this rank, and the bytes of one of its numbers
StateBytes = Callable[[Any, Shapes], int]

NUMBER_BY_NUMBER = "number by number"


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One optimizer. Without a `name` it is one that a function of the user's may build, or a part of another."""

    cls: Callable[..., Optimizer]  # its class
    name: str | None = None
    # From groups, the base rate and settings. None: `made`, with all settings as keywords.
    build: Callable[[Sequence[Group], float, Settings], Optimizer] | None = None
    takes_complex: bool = False  # whether it trains complex parameters
    # Bytes of state on this rank, without step counters. None: not known before its first step.
    state_bytes: StateBytes | None = None
    # Bytes that an update takes for its time, of whole shapes and a number of ranks. None: what `skip` copies.
    update_bytes: Callable[[Sequence[Shape], int], int] | None = None
    shardable: bool  # whether it may run where each rank holds some rows of every parameter
    on_shards: str = NUMBER_BY_NUMBER  # how it does, or why it may not
    # How it leaves a bad step undone. "part by part": as each of its `parts`, which `hand_over` gives rates, gradients and state
    # for a step, and `let_go` frees after it.
    skip: Literal["fused kernel", "own arithmetic", "own arithmetic off the CPU", "part by part", "copies"]
    # Cuts the groups by what parameters are. None: they stay as they are.
    split: Callable[[nn.Module, Sequence[Group], Settings], list[Group]] | None = None
    # A mean of the weights that it keeps, which is evaluated in their place. None: it keeps none.
    average: Callable[[ModelCopy, Any], EmaModel] | None = None


def copies(count: int) -> StateBytes:
    """The state bytes of an optimizer that keeps `count` numbers for each one of a parameter.

    >>> copies(2)(None, [((10, 3), 4)])
    240
    """
    return lambda _, shapes: count * sum(math.prod(shape) * item_bytes for shape, item_bytes in shapes)


def all_kinds() -> list[OptimizerKind]:
    """Those with a name, in the order of `optimizers.py`, and other known ones of torch."""
    files = dict.fromkeys(declaration.file for declaration in OPTIMIZERS.values())
    return [kind for file in files for kind in import_module(file, package="surefoot.optim.kinds").KINDS]


def kind_named(name: str) -> OptimizerKind:
    """The optimizer that is declared under this name.

    >>> kind_named("lion").skip
    'own arithmetic'
    """
    return next(kind for kind in all_kinds() if kind.name == name)


def kind_of(optimizer: Optimizer) -> OptimizerKind | None:
    """The kind of an optimizer; None for any other class. A subclass is another class, since it may do more."""
    return next((kind for kind in all_kinds() if kind.cls is type(optimizer)), None)


def state_bytes(optimizer: Any, *, shards: int = 1) -> int | None:
    """Bytes of state on this rank, without step counters; None for an unknown optimizer.

    With `shards` those of the first of as many ranks that each hold some rows of every parameter, as FSDP2 spreads them.

    >>> import torch
    >>> from surefoot.optim.kinds.lion import Lion
    >>> lion = Lion([torch.nn.Parameter(torch.zeros(10))])
    >>> state_bytes(lion), state_bytes(lion, shards=4)
    (40, 12)
    """
    kind = kind_of(optimizer)
    if kind is not None and kind.skip == "part by part":
        return sum(state_bytes(part, shards=shards) or 0 for part in optimizer.parts)
    if kind is None or kind.state_bytes is None:
        return None
    return kind.state_bytes(optimizer, shapes_of(optimizer, shards))


def shapes_of(optimizer: Optimizer, shards: int) -> Shapes:
    """Shape and bytes per number of each parameter, or of its part if there are several shards."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(shard_shape(each.shape, shards), each.element_size()) for each in parameters]


def refuse_shards(kind: OptimizerKind | None, *, name: str) -> None:
    """Raise `ConfigError` unless an optimizer is known to run on shards; most do, as they look at one number at a time.

    >>> refuse_shards(kind_named("muon"), name="muon")
    """
    if kind is not None and kind.shardable:
        return
    why = "nobody knows whether it looks at more than one number at a time" if kind is None else kind.on_shards
    *able, last = [each.name for each in all_kinds() if each.name and each.shardable]
    raise ConfigError(
        f"parallel = fsdp: {name} cannot train parts of a parameter: {why}\n"
        f"  use {', '.join(able)} or {last}, or --parallel ddp"
    )
