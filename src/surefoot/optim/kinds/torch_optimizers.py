"""Torch's own optimizers: those that have a name here, and what is known of others, which a function of the user's may build.

Fused where torch has a kernel. NAdam and RAdam count on the device where that is not the host, so that a skipped step can be
undone there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import optim
from torch.optim import Optimizer

from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.param_groups import Group, with_rates
from surefoot.optim.registry import (
    NUMBER_BY_NUMBER,
    Build,
    OptimizerKind,
    Settings,
    Shapes,
    StateBytes,
    WaysToSkip,
    copies,
)


def _fused(made: Callable[..., Optimizer]) -> Build:
    def build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
        real = all(parameter.is_floating_point() for parameter in _parameters(groups))
        return made(with_rates(groups, lr), lr=lr, fused=real, **settings)

    return build


def _capturable(made: Callable[..., Optimizer]) -> Build:
    def build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
        on_device = all(parameter.is_cuda or parameter.is_meta for parameter in _parameters(groups))
        return made(with_rates(groups, lr), lr=lr, decoupled_weight_decay=True, capturable=on_device, **settings)

    return build


def _sgd(groups: Sequence[Group], lr: float, settings: Mapping[str, Any]) -> Optimizer:
    fused = all(each.is_floating_point() and fused_sgd_writes(each) for each in _parameters(groups))
    return optim.SGD(with_rates(groups, lr), lr=lr, fused=fused, **settings)


def _parameters(groups: Sequence[Group]) -> list[Any]:
    return [parameter for group in groups for parameter in group.parameters]


def _bytes_of_sgd(optimizer: optim.SGD, shapes: Shapes) -> int:
    return copies(1 if optimizer.param_groups[0]["momentum"] else 0)(optimizer, shapes)


def _other(made: type[Optimizer], *, count: int | None = None, why_whole: str | None = None) -> OptimizerKind:
    """One without a name: how many copies of its parameters it keeps, if that is known, and why it needs whole parameters."""
    return OptimizerKind(
        made=made,
        state_bytes=None if count is None else copies(count),
        shardable=why_whole is None,
        on_shards=why_whole or NUMBER_BY_NUMBER,
        skip="fused kernel" if made is optim.Adagrad else "copies",
    )


def _named(
    name: str, made: type[Optimizer], build: Build, *, skip: WaysToSkip, state_bytes: StateBytes
) -> OptimizerKind:
    return OptimizerKind(
        name=name, made=made, build=build, takes_complex=True, state_bytes=state_bytes, shardable=True, skip=skip
    )


KINDS = (
    _named("adamw", optim.AdamW, _fused(optim.AdamW), skip="fused kernel", state_bytes=copies(2)),
    _named("adam", optim.Adam, _fused(optim.Adam), skip="fused kernel", state_bytes=copies(2)),
    _named("sgd", optim.SGD, _sgd, skip="fused kernel", state_bytes=_bytes_of_sgd),
    _named("nadam", optim.NAdam, _capturable(optim.NAdam), skip="copies", state_bytes=copies(2)),
    _named("radam", optim.RAdam, _capturable(optim.RAdam), skip="copies", state_bytes=copies(2)),
    _other(optim.Adagrad, count=1),
    _other(optim.RMSprop, count=1),
    _other(optim.Adamax),
    _other(optim.ASGD),
    _other(optim.Adadelta),
    _other(optim.Rprop),
    _other(
        optim.Muon,
        count=1,
        why_whole="it would make the rows of each rank orthogonal by themselves: surefoot.muon(...) gathers them",
    ),
    _other(
        optim.Adafactor, why_whole="its means over rows and columns, and the size of its steps, need whole matrices"
    ),
    _other(optim.LBFGS, why_whole="it compares whole gradients"),
)
