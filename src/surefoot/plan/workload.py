"""A run on the meta device in numbers: weights by block, optimizer state, and the memory and operations of a pass."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from surefoot.distributed.blocks import blocks_of
from surefoot.distributed.shards import shard_shape
from surefoot.memory import tensor_bytes
from surefoot.optim.kinds.kind import state_bytes
from surefoot.optim.skip_step import update_bytes
from surefoot.plan.meta_pass import Pass
from surefoot.run.components import RunComponents


@dataclass(frozen=True)
class Spread:
    """A strategy over `world` ranks; the settings are those of `--parallel` and `--fsdp.*`, none of them "auto"."""

    kind: Literal["none", "ddp", "fsdp"]
    world: int
    replicas: int = 1  # of sharded groups: a mesh of replicas x shards
    reshard_after_forward: bool = True  # let gathered parameters go after the forward pass
    sync: Literal["last", "every"] = "last"  # gradients with which micro-batch
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    cpu_offload: bool = False  # parameters, gradients and optimizer state in the host's memory

    @property
    def shards(self) -> int:
        """The number of ranks that a parameter is cut over.

        >>> Spread("fsdp", 512, replicas=64).shards, Spread("ddp", 512).shards
        (8, 1)
        """
        return self.world // self.replicas if self.kind == "fsdp" else 1

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same numbers and add up their gradients."""
        return self.replicas if self.kind == "fsdp" else self.world

    def unit_bytes(self, unit: "Iterable[Weight]") -> int:
        """Weights that are gathered together."""
        return sum(weight.gathered_bytes(self.shards, self.gather_dtype) for weight in unit)


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, bytes of a number, and whether it is trained."""

    shape: tuple[int, ...]
    item_bytes: int = 4
    trained: bool = True

    @property
    def memory_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    def shard_bytes(self, shards: int) -> int:
        """Bytes of the first rank's rows, the largest share: FSDP2 cuts dimension 0 into chunks of ceil(n / shards).

        >>> Weight((10, 3)).shard_bytes(4), Weight((10, 3)).shard_bytes(1)
        (36, 120)
        """
        return math.prod(shard_shape(self.shape, shards)) * self.item_bytes

    def gathered_bytes(self, shards: int, gather_dtype: Literal["fp32", "bf16"]) -> int:
        """Bytes of all ranks' rows together, padded to equal size, in the format in which they are gathered.

        >>> Weight((10, 3)).gathered_bytes(4, "fp32"), Weight((10, 3)).gathered_bytes(4, "bf16")
        (144, 72)
        """
        numbers = shards * math.prod(shard_shape(self.shape, shards))
        return numbers * (min(2, self.item_bytes) if gather_dtype == "bf16" else self.item_bytes)


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and one micro-batch of one rank; nothing in it depends on the strategy."""

    outside: tuple[Weight, ...]  # the weights that belong to no block
    blocks: tuple[tuple[Weight, ...], ...]  # gathered block by block
    state_bytes: Callable[[int], int]  # of one rank, by the number of shards
    update_bytes: Callable[[int], int]  # of copies that an update makes for its time, the same way
    averages: int  # twins of the model
    buffer_bytes: int
    pass_bytes: int  # that a forward and backward pass holds at most beside weights and gradients
    flops: tuple[float, float]  # forward, and backward with what checkpointing computes again
    samples: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self.outside, *(weight for block in self.blocks for weight in block))


def workload(parts: RunComponents, passed: Pass) -> Workload:
    """The numbers for scaling, of a run on the meta device and its dry pass; unknown optimizer state counts as 0."""
    models, trained = parts.state.models, list(parts.state.optimizers.values())
    outside, blocks = units(models, parts.parallel.blocks)
    return Workload(
        outside=outside,
        blocks=blocks,
        state_bytes=lambda shards: sum(state_bytes(each.optimizer, shards=shards) or 0 for each in trained),
        update_bytes=lambda shards: max(update_bytes(each.skip, each.optimizer, shards=shards) for each in trained),
        averages=int(bool(parts.state.ema_models)),
        buffer_bytes=tensor_bytes(buffer for model in models.values() for buffer in model.buffers()),
        pass_bytes=passed.peak_bytes,
        flops=passed.flops,
        samples=passed.samples,
    )


def units(
    models: Mapping[str, nn.Module], named: Sequence[str] = ()
) -> tuple[tuple[Weight, ...], tuple[tuple[Weight, ...], ...]]:
    """The weights that belong to no block, and those of each block, as FSDP gathers them together.

    `named` are names as `blocks_of` takes them; without any the model's own are meant. A block that shares a weight with the
    outside is gathered with the surrounding modules.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    >>> outside, blocks = units({"model": nn.Sequential(*blocks, nn.Linear(4, 1))})
    >>> [weight.shape for weight in outside], [[weight.shape for weight in block] for block in blocks]
    ([(1, 4), (1,)], [[(4, 4), (4,)], [(4, 4), (4,)]])
    """
    outside: list[nn.Parameter] = []
    blocks: list[list[nn.Parameter]] = []
    for model in models.values():
        named_blocks = blocks_of(model, named or "auto").values()
        alone = [list(block.parameters()) for block in named_blocks if _is_alone(block, model)]
        inside = {parameter for block in alone for parameter in block}
        outside += [parameter for parameter in model.parameters() if parameter not in inside]
        blocks += [block for block in alone if block]
    return _weights(outside), tuple(_weights(block) for block in blocks)


def _is_alone(block: nn.Module, model: nn.Module) -> bool:
    """True where no module outside of a block holds a parameter of it."""
    others = set(model.modules()) - set(block.modules())
    return set(block.parameters()).isdisjoint(weight for each in others for weight in each.parameters(recurse=False))


def _weights(parameters: Iterable[Tensor]) -> tuple[Weight, ...]:
    return tuple(Weight(tuple(each.shape), each.element_size(), each.requires_grad) for each in parameters)
