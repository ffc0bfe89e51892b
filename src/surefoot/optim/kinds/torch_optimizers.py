"""Torch's own optimizers: the optimizers that a run can name, and others that a user's function may
build.

Optimizers are fused if torch has a kernel. NAdam and RAdam count steps on a CUDA device, so that a
skipped step can be undone.
"""

from collections.abc import Callable, Sequence

from torch import optim
from torch.optim import Optimizer

from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.kind import NUMBER_BY_NUMBER, OptimizerKind, Settings, StateBytes, copies
from surefoot.optim.param_groups import Group, with_rates


def _named_kind(
    name: str, cls: Callable[..., Optimizer], *, fused: bool, state_bytes: StateBytes
) -> OptimizerKind:
    def build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
        parameters = [parameter for group in groups for parameter in group.parameters]
        flags = {
            "capturable": all(each.is_cuda or each.is_meta for each in parameters),
            "decoupled_weight_decay": True,
        }
        if fused:
            real = all(each.is_floating_point() for each in parameters)
            flags = {
                "fused": real and (cls is not optim.SGD or all(map(fused_sgd_writes, parameters)))
            }
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


KINDS = (
    _named_kind("adamw", optim.AdamW, fused=True, state_bytes=copies(2)),
    _named_kind("adam", optim.Adam, fused=True, state_bytes=copies(2)),
    _named_kind(
        "sgd",
        optim.SGD,
        fused=True,
        state_bytes=lambda sgd, shapes: copies(bool(sgd.param_groups[0]["momentum"]))(sgd, shapes),
    ),
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
        cls=optim.LBFGS,  # `history_size` pairs, a direction and a gradient
        state_bytes=lambda lbfgs, shapes: copies(2 * lbfgs.param_groups[0]["history_size"] + 2)(
            lbfgs, shapes
        ),
        shardable=False,
        on_shards="it compares whole gradients",
        skip="copies",
    ),
)
