"""Facts about each optimizer class, defined beside the class in `kinds/`; `optimizers.py` declares
its name and settings.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from surefoot.distributed.shards import shard_shape
from surefoot.errors import ConfigError, Setting
from surefoot.optim.optimizers import OPTIMIZERS
from surefoot.optim.param_groups import ParameterGroup

if TYPE_CHECKING:
    from surefoot.optim.ema import EmaModel, ModelCopy

Settings = Mapping[str, Any]
Shape = tuple[int, ...]
# per parameter: its shape on this rank, and its bytes per element
Shapes = Sequence[tuple[Shape, int]]
StateBytes = Callable[[Any, Shapes], int]

Built = Callable[[list[dict[str, Any]]], Optimizer]  # a class or function of the user

NUMBER_BY_NUMBER = "element by element"
_OF_TORCH = ("state", "param_groups", "defaults")  # attributes without optimizers inside


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """Facts about an optimizer class; a class without a `name` comes from a user's function or is
    part of another optimizer.
    """

    cls: Callable[..., Optimizer]
    name: str | None = None
    # Called with groups, base learning rate and settings. None: `cls`, with all settings as
    # keywords.
    build: Callable[[Sequence[ParameterGroup], float, Settings], Optimizer] | None = None
    takes_complex: bool = False
    # Bytes of state on this rank, without step counters. None: unknown before the first step.
    state_bytes: StateBytes | None = None
    # Temporary bytes of an update, from unsharded shapes and the number of ranks. None: the copies
    # of `skip`.
    update_bytes: Callable[[Sequence[Shape], int], int] | None = None
    shardable: bool  # True if it can train some rows of every parameter on each rank
    on_shards: str = NUMBER_BY_NUMBER  # how it trains shards, or why it cannot
    # How a bad step is skipped. "part by part": separately by each of `parts`, which get learning
    # rates, gradients and state from `hand_over` before a step; `release` frees the gradients after
    # the step.
    skip: Literal[
        "fused kernel", "own arithmetic", "own arithmetic off the CPU", "part by part", "copies"
    ]
    # Splits the groups by the type of parameters. None: groups do not change.
    split: (
        Callable[[nn.Module, Sequence[ParameterGroup], Settings, int], list[ParameterGroup]] | None
    ) = None
    # The average of the weights, which is evaluated instead of them. None: the optimizer has no
    # average.
    average: Callable[["ModelCopy", Any], "EmaModel"] | None = None


def copies(count: int) -> StateBytes:
    """Return a function for the state bytes of an optimizer with `count` state elements per
    parameter element.

    >>> copies(2)(None, [((10, 3), 4)])
    240
    """

    def state_bytes_of(_: Any, shapes: Shapes) -> int:
        return count * sum(math.prod(shape) * item_bytes for shape, item_bytes in shapes)

    return state_bytes_of


def all_kinds() -> list[OptimizerKind]:
    """Return the named kinds, in the order of `optimizers.py`, and the known unnamed kinds."""
    kinds: list[OptimizerKind] = []
    for file in dict.fromkeys(declaration.file for declaration in OPTIMIZERS.values()):
        kinds += _kinds_in(file)
    return kinds


def kind_named(name: str) -> OptimizerKind:
    """Return the kind of the optimizer `name`.

    >>> kind_named("lion").skip
    'own arithmetic'
    """
    return next(kind for kind in _kinds_in(OPTIMIZERS[name].file) if kind.name == name)


def kind_of(optimizer: Optimizer) -> OptimizerKind | None:
    """Return the kind of an optimizer, or None for an unknown class; a subclass is unknown, since
    its code may differ.
    """
    cls = type(optimizer)
    module = cls.__module__
    if module not in {_module(declaration.file) for declaration in OPTIMIZERS.values()}:
        module = _module(".torch_optimizers")
    return next((kind for kind in _kinds_in(module) if kind.cls is cls), None)


def _kinds_in(file: str) -> tuple[OptimizerKind, ...]:
    kinds: tuple[OptimizerKind, ...] = import_module(_module(file)).KINDS
    return kinds


def _module(file: str) -> str:
    """Return the full name of a declared file.

    >>> _module(".lion")
    'surefoot.optim.kinds.lion'
    """
    return resolve_name(file, package="surefoot.optim.kinds")


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers inside a user's optimizer, such as SAM's `base_optimizer` or a list of
    optimizers, by the name of the attribute, and the optimizers inside these.
    """
    return _inner(optimizer, seen={id(optimizer)})


def _inner(optimizer: Optimizer, *, seen: set[int]) -> dict[str, Optimizer]:
    is_known = kind_of(optimizer) is not None  # MuonWithAdamW hands its state to its parts
    inner: dict[str, Optimizer] = {}
    for name, attribute in vars(optimizer).items():
        candidates = {name: attribute}
        is_searched = not is_known and name not in _OF_TORCH
        if is_searched and isinstance(attribute, list | tuple | dict):
            entries = attribute.values() if isinstance(attribute, dict) else attribute
            candidates = {f"{name}.{index}": entry for index, entry in enumerate(entries)}
        for path, candidate in candidates.items():
            if isinstance(candidate, Optimizer) and id(candidate) not in seen:
                seen.add(id(candidate))
                inner[path] = candidate
    for path, direct in list(inner.items()):
        for deeper_path, deeper in _inner(direct, seen=seen).items():
            inner[f"{path}.{deeper_path}"] = deeper
    return inner


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors in the state of an optimizer and of its inner optimizers."""
    optimizers = [optimizer, *inner_optimizers(optimizer).values()]
    states = [list(each.state.values()) for each in optimizers]
    return [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]


def state_bytes(optimizer: Any, *, shards: int = 1) -> int | None:
    """Return the bytes of state, without step counters, on the first of `shards` FSDP2 ranks, or
    None for an unknown optimizer.

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
    """Return the shape and bytes per element of each parameter, or of its first shard if `shards`
    is above 1.
    """
    shapes = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shape = shard_shape(parameter.shape, shards)
            shapes.append((shape, parameter.element_size()))
    return shapes


def refuse_shards(kind: OptimizerKind | None, *, name: str) -> None:
    """Raise `ConfigError` unless an optimizer can train shards, as every elementwise optimizer can.

    >>> refuse_shards(kind_named("muon"), name="muon")
    """
    if kind is not None and kind.shardable:
        return
    reason = "its update may combine several elements of a parameter"
    if kind is not None:
        reason = kind.on_shards
    *shardable, last = [other.name for other in all_kinds() if other.name and other.shardable]
    raise ConfigError(
        "optimizer-of-whole-parameters",
        problem=f"parallel = fsdp: {name} cannot train shards of a parameter",
        reason=reason,
        remedy=[f"use {', '.join(shardable)} or {last}", Setting("parallel", "ddp")],
        setting="optimizer",
        value=name,
    )
