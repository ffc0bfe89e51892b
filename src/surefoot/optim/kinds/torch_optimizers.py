"""Torch's own optimizers: the optimizers that a run can name, and others that a user's function may
build.

Optimizers are fused if torch has a kernel. NAdam and RAdam count steps on a CUDA device, so that a
skipped step can be undone.
"""

from collections.abc import Callable, Sequence

from torch import optim
from torch.optim import Optimizer

from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.kind import (
    NUMBER_BY_NUMBER,
    OptimizerKind,
    Settings,
    Shapes,
    StateBytes,
    copies,
)
from surefoot.optim.param_groups import ParameterGroup, with_rates


def _named_kind(
    name: str, cls: Callable[..., Optimizer], *, fused: bool, state_bytes: StateBytes
) -> OptimizerKind:
    def build(groups: Sequence[ParameterGroup], lr: float, settings: Settings) -> Optimizer:
        parameters = [parameter for group in groups for parameter in group.parameters]
        if fused:
            has_kernel = all(parameter.is_floating_point() for parameter in parameters)
            if cls is optim.SGD:
                has_kernel = has_kernel and all(map(fused_sgd_writes, parameters))
            flags = {"fused": has_kernel}
        else:
            is_on_device = all(parameter.is_cuda or parameter.is_meta for parameter in parameters)
            flags = {"capturable": is_on_device, "decoupled_weight_decay": True}
        return cls(with_rates(groups, lr), lr=lr, **flags, **settings)

    return OptimizerKind(
        name=name,
        cls=cls,
        build=build,
        takes_complex=True,
        state_bytes=state_bytes,
        shardable=True,
        skip="fused kernel" if fused else "copies",
    )


def _unnamed_kind(
    cls: type[Optimizer], *, count: int | None = None, why_whole: str | None = None
) -> OptimizerKind:
    return OptimizerKind(
        cls=cls,
        state_bytes=None if count is None else copies(count),
        shardable=why_whole is None,
        on_shards=why_whole or NUMBER_BY_NUMBER,
        skip="fused kernel" if cls is optim.Adagrad else "copies",
    )


def _sgd_state_bytes(sgd: optim.SGD, shapes: Shapes) -> int:
    has_momentum = bool(sgd.param_groups[0]["momentum"])
    return copies(1 if has_momentum else 0)(sgd, shapes)


def _lbfgs_state_bytes(lbfgs: optim.LBFGS, shapes: Shapes) -> int:
    history_size = lbfgs.param_groups[0]["history_size"]
    # pairs of vectors, a direction and a gradient
    return copies(2 * history_size + 2)(lbfgs, shapes)


KINDS = (
    _named_kind("adamw", optim.AdamW, fused=True, state_bytes=copies(2)),
    _named_kind("adam", optim.Adam, fused=True, state_bytes=copies(2)),
    _named_kind("sgd", optim.SGD, fused=True, state_bytes=_sgd_state_bytes),
    _named_kind("nadam", optim.NAdam, fused=False, state_bytes=copies(2)),
    _named_kind("radam", optim.RAdam, fused=False, state_bytes=copies(2)),
    _unnamed_kind(optim.Adagrad, count=1),
    _unnamed_kind(optim.RMSprop, count=1),
    _unnamed_kind(optim.Adamax),
    _unnamed_kind(optim.ASGD),
    _unnamed_kind(optim.Adadelta),
    _unnamed_kind(optim.Rprop),
    _unnamed_kind(
        optim.Muon,
        count=1,
        why_whole="it would orthogonalize each rank's rows separately; sf.optim.muon(...) gathers them",
    ),
    _unnamed_kind(
        optim.Adafactor,
        why_whole="its row and column means, and its step sizes, need whole matrices",
    ),
    OptimizerKind(
        cls=optim.LBFGS,
        state_bytes=_lbfgs_state_bytes,
        shardable=False,
        on_shards="it compares whole gradients",
        skip="copies",
    ),
)
