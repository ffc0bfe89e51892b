"""What is spread over ranks, and how: a model and a pass over it in numbers, and a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class Spread:
    """A strategy over `world` ranks; the settings are those of `--parallel` and `--sharding.*`, none of them "auto"."""

    kind: Kind
    world: int
    replicas: int = 1  # of sharded groups: a mesh of replicas x shards
    reshard: bool = True  # let gathered parameters go after the forward pass
    synchronise: Literal["last", "every"] = "last"  # gradients with which micro-batch
    gather: Literal["fp32", "bf16"] = "fp32"
    offload: bool = False  # parameters, gradients and optimizer state in the host's memory

    @property
    def shards(self) -> int:
        """Over so many ranks a parameter is cut.

        >>> Spread("fsdp", 512, replicas=64).shards, Spread("ddp", 512).shards
        (8, 1)
        """
        return self.world // self.replicas if self.kind == "fsdp" else 1

    @property
    def copies(self) -> int:
        """So many ranks hold the same numbers, and add up their gradients."""
        return self.replicas if self.kind == "fsdp" else self.world


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, bytes of a number, and whether it is trained."""

    shape: tuple[int, ...]
    item_bytes: int = 4
    trained: bool = True

    @property
    def memory_bytes(self) -> int:
        """Of all of it."""
        return math.prod(self.shape) * self.item_bytes

    def shard_bytes(self, shards: int) -> int:
        """Of the rows that the first rank holds, which has most: FSDP2 cuts dimension 0 into chunks of ceil(n / shards).

        >>> Weight((10, 3)).shard_bytes(4), Weight((10, 3)).shard_bytes(1)
        (36, 120)
        """
        return math.prod(shard_shape(self.shape, shards)) * self.item_bytes

    def gathered_bytes(self, shards: int, gather: Literal["fp32", "bf16"]) -> int:
        """Of all ranks' rows together, padded to equal size, in the format in which they are gathered.

        >>> Weight((10, 3)).gathered_bytes(4, "fp32"), Weight((10, 3)).gathered_bytes(4, "bf16")
        (144, 72)
        """
        numbers = shards * math.prod(shard_shape(self.shape, shards))
        return numbers * (min(2, self.item_bytes) if gather == "bf16" else self.item_bytes)


def shard_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """The shape of what the first of `shards` ranks holds of a tensor.

    >>> shard_shape((10, 3), 4), shard_shape((), 4)
    ((3, 3), ())
    """
    return (-(-shape[0] // shards), *shape[1:]) if shape else ()


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and one micro-batch of one rank; nothing in it depends on the strategy.

    `outside` are the weights that belong to no block, `blocks` those that are gathered block by block. `state_bytes` and
    `update_bytes` (copies that an update makes for its time) are of one rank, by the number of shards. `pass_bytes` is what a forward
    and backward pass holds at most beside weights and gradients; `flops` are those of the forward and of the backward pass, what
    checkpointing computes again in the latter.
    """

    outside: tuple[Weight, ...]
    blocks: tuple[tuple[Weight, ...], ...]
    state_bytes: Callable[[int], int]
    update_bytes: Callable[[int], int]
    averages: int  # twins of the model
    buffer_bytes: int
    pass_bytes: int
    flops: tuple[float, float]
    samples: int

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter once."""
        return (*self.outside, *(weight for block in self.blocks for weight in block))
