"""A run on the meta device: weights by block, optimizer state, and the memory and operations of a
pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from surefoot.distributed.blocks import blocks_of
from surefoot.distributed.shards import shard_shape
from surefoot.distributed.strategy import is_exact
from surefoot.distributed.tree_sum import sums_in_memory
from surefoot.memory import tensor_bytes
from surefoot.optim.kinds.kind import state_bytes
from surefoot.optim.skip_step import update_bytes
from surefoot.run.components import RunComponents
from surefoot.tools.plan.meta_pass import Pass


@dataclass(frozen=True)
class Spread:
    """A parallel strategy over `world` ranks. The fields are the settings `--parallel` and
    `--fsdp.*` without "auto".
    """

    kind: Literal["none", "ddp", "fsdp"]
    world: int
    replicas: int = 1  # of sharded groups: a mesh of replicas x shards
    reshard_after_forward: bool = True  # free gathered parameters after the forward pass
    # the micro-batches whose backward pass reduces gradients
    sync: Literal["last", "every"] = "last"
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    cpu_offload: bool = False  # parameters, gradients and optimizer state in host memory
    exact_sums: bool = False

    @property
    def shards(self) -> int:
        """The number of ranks that share a parameter.

        >>> Spread("fsdp", 512, replicas=64).shards, Spread("ddp", 512).shards
        (8, 1)
        """
        return self.world // self.replicas if self.kind == "fsdp" else 1

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same elements and all-reduce their gradients."""
        return self.replicas if self.kind == "fsdp" else self.world

    def pending_sums(self, micro_batches: int) -> int:
        """Return how many sums of gradients a rank holds during a pass, if each rank computes
        `micro_batches` per step.

        >>> (
        ...     Spread("ddp", 4, exact_sums=True).pending_sums(4),
        ...     Spread("fsdp", 4, sync="every", exact_sums=True).pending_sums(4),
        ... )
        (2, 2)
        """
        if not is_exact(self.kind, self.sync, exact=self.exact_sums):
            return 0
        return sums_in_memory(self.shares_of_copies(micro_batches), each=self.shards)

    def shares_of_copies(self, micro_batches: int) -> list[range]:
        """Return the micro-batches of each model copy, if each rank computes `micro_batches` per
        step.
        """
        own = micro_batches * self.shards
        return [range(copy * own, (copy + 1) * own) for copy in range(self.world // self.shards)]

    def unit_bytes(self, unit: "Iterable[Weight]") -> int:
        """Return the bytes of weights that FSDP gathers as one unit."""
        return sum(weight.gathered_bytes(self.shards, self.gather_dtype) for weight in unit)


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, bytes per element, and whether the parameter is trained."""

    shape: tuple[int, ...]
    item_bytes: int = 4
    trained: bool = True

    @property
    def memory_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    def shard_bytes(self, shards: int) -> int:
        """Return the bytes of rank 0's rows, the largest shard. FSDP2 splits dimension 0 into
        chunks of ceil(n / shards).

        >>> Weight((10, 3)).shard_bytes(4), Weight((10, 3)).shard_bytes(1)
        (36, 120)
        """
        return math.prod(shard_shape(self.shape, shards)) * self.item_bytes

    def gathered_bytes(self, shards: int, gather_dtype: Literal["fp32", "bf16"]) -> int:
        """Return the bytes of all ranks' rows, padded to equal size, in the dtype of the gather.

        >>> Weight((10, 3)).gathered_bytes(4, "fp32"), Weight((10, 3)).gathered_bytes(4, "bf16")
        (144, 72)
        """
        item_bytes = self.item_bytes
        if gather_dtype == "bf16":
            item_bytes = min(2, item_bytes)
        return shards * math.prod(shard_shape(self.shape, shards)) * item_bytes


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and one micro-batch of one rank, independent of the strategy."""

    outside: tuple[Weight, ...]  # the weights outside of blocks
    blocks: tuple[tuple[Weight, ...], ...]  # gathered block by block
    state_bytes: Callable[[int], int]  # of one rank, by the number of shards
    # of temporary copies during an update, by the number of shards
    update_bytes: Callable[[int], int]
    averages: int  # averaged copies of the model
    buffer_bytes: int
    pass_bytes: int  # peak of a forward and backward pass without weights and gradients
    flops: tuple[float, float]  # forward; backward with checkpoint recomputation
    samples: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        weights = list(self.outside)
        for block in self.blocks:
            weights += block
        return tuple(weights)


def workload(parts: RunComponents, passed: Pass) -> Workload:
    """Return the workload of a run on the meta device, given its dry pass. Unknown optimizer state
    counts as 0.
    """
    models = parts.state.models
    optimizers = list(parts.state.optimizers.values())
    outside, blocks = units(models, parts.plan.parallel.blocks)
    buffers: list[Tensor] = []
    for model in models.values():
        buffers += model.buffers()
    return Workload(
        outside=outside,
        blocks=blocks,
        state_bytes=lambda shards: sum(
            state_bytes(trained.optimizer, shards=shards) or 0 for trained in optimizers
        ),
        update_bytes=lambda shards: max(
            update_bytes(trained.skip, trained.optimizer, shards=shards) for trained in optimizers
        ),
        averages=int(bool(parts.state.ema_models)),
        buffer_bytes=tensor_bytes(buffers),
        pass_bytes=passed.peak_bytes,
        flops=passed.flops,
        samples=passed.samples,
    )


def units(
    models: Mapping[str, nn.Module], named: Sequence[str] = ()
) -> tuple[tuple[Weight, ...], tuple[tuple[Weight, ...], ...]]:
    """Return the weights outside of blocks and the weights of each block, as FSDP gathers them.

    `named` is passed to `blocks_of`. A block that shares a weight with the outside is gathered with
    the surrounding modules.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    >>> outside, blocks = units({"model": nn.Sequential(*blocks, nn.Linear(4, 1))})
    >>> (
    ...     [weight.shape for weight in outside],
    ...     [[weight.shape for weight in block] for block in blocks],
    ... )
    ([(1, 4), (1,)], [[(4, 4), (4,)], [(4, 4), (4,)]])
    """
    outside: list[nn.Parameter] = []
    blocks: list[list[nn.Parameter]] = []
    for model in models.values():
        named_blocks = blocks_of(model, named or "auto").values()
        alone = [list(block.parameters()) for block in named_blocks if _is_alone(block, model)]
        inside = set().union(*alone)
        outside += [parameter for parameter in model.parameters() if parameter not in inside]
        blocks += [block for block in alone if block]
    return _weights(outside), tuple(_weights(block) for block in blocks)


def _is_alone(block: nn.Module, model: nn.Module) -> bool:
    weights = set(block.parameters())
    outside = set(model.modules()) - set(block.modules())
    return all(weights.isdisjoint(module.parameters(recurse=False)) for module in outside)


def _weights(parameters: Iterable[Tensor]) -> tuple[Weight, ...]:
    return tuple(
        Weight(tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        for parameter in parameters
    )
