"""Torch's own optimizers: those that have a name here, and what is known of others, which a function of the user's may build.

Fused where torch has a kernel. NAdam and RAdam count on the device where that is not the host, so that a skipped step can be
undone there.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, optim
from torch.optim import Optimizer

from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.kind import (
    NUMBER_BY_NUMBER,
    Build,
    OptimizerKind,
    Settings,
    Shapes,
    StateBytes,
    WaysToSkip,
    copies,
)
from surefoot.optim.param_groups import Group, with_rates


def _build(made: Callable[..., Optimizer], flag: str, fits: Callable[[Tensor], bool], **fixed: bool) -> Build:
    """With a flag that is set where it fits all parameters."""

    def build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
        flags = {**fixed, flag: all(fits(parameter) for group in groups for parameter in group.parameters)}
        return made(with_rates(groups, lr), lr=lr, **flags, **settings)

    return build


def _fused(made: type[Optimizer]) -> Build:
    return _build(
        made, "fused", lambda held: held.is_floating_point() and (made is not optim.SGD or fused_sgd_writes(held))
    )


def _capturable(made: type[Optimizer]) -> Build:
    return _build(made, "capturable", lambda held: held.is_cuda or held.is_meta, decoupled_weight_decay=True)


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


def _bytes_of_sgd(optimizer: optim.SGD, shapes: Shapes) -> int:
    return copies(bool(optimizer.param_groups[0]["momentum"]))(optimizer, shapes)


KINDS = (
    _named("adamw", optim.AdamW, _fused(optim.AdamW), skip="fused kernel", state_bytes=copies(2)),
    _named("adam", optim.Adam, _fused(optim.Adam), skip="fused kernel", state_bytes=copies(2)),
    _named("sgd", optim.SGD, _fused(optim.SGD), skip="fused kernel", state_bytes=_bytes_of_sgd),
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
