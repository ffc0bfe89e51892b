"""How many bytes an optimizer will keep, before its first step has made them; and for the time of an update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.optim.batched_muon import BatchedMuon
from surefoot.optim.kinds.adafactor import Adafactor
from surefoot.optim.kinds.adamw8bit import BLOCK, SMALLEST, AdamW8bit
from surefoot.optim.kinds.lion import Lion
from surefoot.optim.kinds.muon import MuonWithAdamW
from surefoot.optim.kinds.schedule_free import ScheduleFree
from surefoot.optim.newton_schulz import working_bytes
from surefoot.optim.sharded_muon import most_bytes_of_a_rank
from surefoot.optim.skip_step import PartByPart, Restoring, Skip
from surefoot.scaling.workload import shard_shape

_COPIES: dict[type[Optimizer], int] = {  # of each parameter
    torch.optim.AdamW: 2,
    torch.optim.Adam: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.Adagrad: 1,
    torch.optim.RMSprop: 1,
    torch.optim.Muon: 1,
    BatchedMuon: 1,
    Lion: 1,
    ScheduleFree: 2,
}


def state_bytes(optimizer: Optimizer, *, shards: int = 1) -> int | None:
    """Bytes of state on this rank, without step counters; None for an optimizer of which that is not known.

    With `shards` those of the first of so many ranks that each hold some rows of every parameter, as FSDP2 spreads them.

    >>> lion = Lion([torch.nn.Parameter(torch.zeros(10))])
    >>> state_bytes(lion), state_bytes(lion, shards=4)
    (40, 12)
    """
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, MuonWithAdamW):
        return sum(state_bytes(part, shards=shards) or 0 for part in optimizer.parts)
    shapes = [shard_shape(parameter.shape, shards) for parameter in parameters]
    if isinstance(optimizer, Adafactor):
        sizes = zip(shapes, parameters, strict=True)
        return sum(_rows_and_columns(shape) * parameter.element_size() for shape, parameter in sizes)
    if isinstance(optimizer, AdamW8bit):
        return sum(2 * _in_8_bits(math.prod(shape)) for shape in shapes)
    copies = _COPIES.get(type(optimizer))
    if isinstance(optimizer, torch.optim.SGD):
        copies = 1 if optimizer.param_groups[0]["momentum"] else 0
    return None if copies is None else copies * _bytes(parameters, shards)


def restored_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Bytes of the copies that a way to skip makes for the time of an update, on the first of so many ranks.

    >>> from surefoot.optim.skip_step import skipping
    >>> adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10))], fused=True)
    >>> restored_bytes(skipping(adamw, torch.device("cpu")), adamw)
    0
    """
    if isinstance(skip, PartByPart):
        return max(restored_bytes(own, part, shards=shards) for part, own in skip.parts)
    if not isinstance(skip, Restoring):
        return 0
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return _bytes(parameters, shards) + (state_bytes(optimizer, shards=shards) or 0)


def update_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Bytes that an update takes for its time, on the first of so many ranks: `restored_bytes`, and what Muon multiplies.

    >>> from surefoot.optim.skip_step import skipping
    >>> muon = BatchedMuon([torch.nn.Parameter(torch.zeros(8, 32))])
    >>> update_bytes(skipping(muon, torch.device("meta")), muon)
    1792
    """
    if isinstance(skip, PartByPart):
        return max(update_bytes(own, part, shards=shards) for part, own in skip.parts)
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    if not isinstance(optimizer, BatchedMuon):
        return restored_bytes(skip, optimizer, shards=shards)
    if shards == 1:
        return working_bytes(shapes)
    return most_bytes_of_a_rank(tuple(map(tuple, shapes)), shards)


def _bytes(parameters: Iterable[Tensor], shards: int) -> int:
    once = {id(parameter): parameter for parameter in parameters}.values()
    return sum(math.prod(shard_shape(held.shape, shards)) * held.element_size() for held in once)


def _rows_and_columns(shape: Sequence[int]) -> int:
    numbers = math.prod(shape)
    return numbers if len(shape) < 2 or not numbers else numbers // shape[-1] + numbers // shape[-2]


def _in_8_bits(numbers: int) -> int:
    return numbers * 4 if numbers < SMALLEST else numbers + 4 * -(-numbers // BLOCK)
