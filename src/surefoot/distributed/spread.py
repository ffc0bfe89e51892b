"""The choice of what the ranks of a run exchange in a step: nothing, or by DDP or FSDP2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from surefoot.config.batch_size import Batching
from surefoot.config.parallel import Strategy
from surefoot.distributed.strategy import Alone, Called, Ranks
from surefoot.distributed.world import World

if TYPE_CHECKING:
    from surefoot.distributed.fsdp import Fsdp  # its torch imports take seconds


def spread(
    models: Mapping[str, nn.Module],
    forwards: Mapping[str, Any],
    *,
    world: World,
    parallel: Strategy,
    sizes: Batching,
    shares: list[range],
    exact: bool,
    fsdp: "Fsdp | None" = None,
) -> tuple[Ranks, dict[str, Any]]:
    """Return the strategy of a step (`fsdp` if sharded) and the loss's callables by name.
    `forwards` are models, compiled or not.

    `shares` has the micro-batches of each rank.
    """
    nominal = sizes.batch_size if sizes.pieces > 1 else None
    called = {name: Called(model, forwards[name]) for name, model in models.items()}
    if fsdp is not None:
        fsdp.called = called
        return fsdp, dict(called)
    if parallel.kind == "ddp" and world.size > 1:
        from surefoot.distributed.ddp import Ddp
        from surefoot.distributed.exact_ddp import ExactDdp, leave_graphs_whole

        if exact:
            leave_graphs_whole(forwards)
            return ExactDdp(shares, world, parallel, nominal, called), dict(called)
        return Ddp(world, parallel, nominal, called), dict(called)
    return Alone(nominal if exact else None, exact=exact), dict(forwards)
