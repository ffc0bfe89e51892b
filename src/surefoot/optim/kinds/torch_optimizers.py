"""Torch's own optimizers: those with a name here, and others that a user's function may build.

Fused where torch has a kernel. NAdam and RAdam count on the device where that is not the host, so that a skipped step can be
undone there.
"""

from collections.abc import Callable, Sequence

from torch import optim
from torch.optim import Optimizer

from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.kind import NUMBER_BY_NUMBER, OptimizerKind, Settings, StateBytes, copies
from surefoot.optim.param_groups import Group, with_rates


def _named(name: str, made: Callable[..., Optimizer], *, fused: bool, state_bytes: StateBytes) -> OptimizerKind:
    """One with a name, and a flag that is set if it fits all parameters."""

    def build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
        parameters = [parameter for group in groups for parameter in group.parameters]
        flags = {"capturable": all(each.is_cuda or each.is_meta for each in parameters), "decoupled_weight_decay": True}
        if fused:
            real = all(each.is_floating_point() for each in parameters)
            flags = {"fused": real and (made is not optim.SGD or all(map(fused_sgd_writes, parameters)))}
        return made(with_rates(groups, lr), lr=lr, **flags, **settings)

    return OptimizerKind(
        name=name,
        made=made,
        build=build,
        takes_complex=True,
        state_bytes=state_bytes,
        shardable=True,
        skip="fused kernel" if fused else "copies",
    )


def _other(made: type[Optimizer], *, count: int | None = None, why_whole: str | None = None) -> OptimizerKind:
    """One without a name: how many copies of its parameters it keeps, if that is known, and why it needs whole parameters."""
    return OptimizerKind(
        made=made,
        state_bytes=None if count is None else copies(count),
        shardable=why_whole is None,
        on_shards=why_whole or NUMBER_BY_NUMBER,
        skip="fused kernel" if made is optim.Adagrad else "copies",
    )


KINDS = (
    _named("adamw", optim.AdamW, fused=True, state_bytes=copies(2)),
    _named("adam", optim.Adam, fused=True, state_bytes=copies(2)),
    _named(
        "sgd",
        optim.SGD,
        fused=True,
        state_bytes=lambda sgd, shapes: copies(bool(sgd.param_groups[0]["momentum"]))(sgd, shapes),
    ),
    _named("nadam", optim.NAdam, fused=False, state_bytes=copies(2)),
    _named("radam", optim.RAdam, fused=False, state_bytes=copies(2)),
    _other(optim.Adagrad, count=1),
    _other(optim.RMSprop, count=1),
    _other(optim.Adamax),
    _other(optim.ASGD),
    _other(optim.Adadelta),
    _other(optim.Rprop),
    _other(
        optim.Muon,
        count=1,
        why_whole="it would make the rows of each rank orthogonal by themselves: surefoot.optim.muon(...) gathers them",
    ),
    _other(
        optim.Adafactor, why_whole="its means over rows and columns, and the size of its steps, need whole matrices"
    ),
    _other(optim.LBFGS, why_whole="it compares whole gradients"),
)
