"""How many bytes an optimizer will keep, before its first step has made them; and for the time of an update."""

import math
from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from surefoot.distributed.shards import shard_shape
from surefoot.optim.registry import Composite, Shapes, kind_of
from surefoot.optim.skip_step import PartByPart, Skip
from surefoot.optim.undo_step import Restoring


def state_bytes(optimizer: Optimizer, *, shards: int = 1) -> int | None:
    """Bytes of state on this rank, without step counters; None for an optimizer of which that is not known.

    With `shards` those of the first of so many ranks that each hold some rows of every parameter, as FSDP2 spreads them.

    >>> import torch
    >>> from surefoot.optim.kinds.lion import Lion
    >>> lion = Lion([torch.nn.Parameter(torch.zeros(10))])
    >>> state_bytes(lion), state_bytes(lion, shards=4)
    (40, 12)
    """
    if isinstance(optimizer, Composite):
        return sum(state_bytes(part, shards=shards) or 0 for part in optimizer.parts)
    kind = kind_of(optimizer)
    known = None if kind is None else kind.state_bytes
    return None if known is None else known(optimizer, _shapes(optimizer, shards))


def restored_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Bytes of the copies that a way to skip makes for the time of an update, on the first of so many ranks.

    >>> import torch
    >>> from surefoot.optim.skip_step import skipping
    >>> adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(10))], fused=True)
    >>> restored_bytes(skipping(adamw, torch.device("cpu")), adamw)
    0
    """
    if isinstance(skip, PartByPart):
        return max(restored_bytes(own, part, shards=shards) for part, own in skip.parts)
    if not isinstance(skip, Restoring):
        return 0
    weights = sum(math.prod(shape) * item_bytes for shape, item_bytes in _shapes(optimizer, shards))
    return weights + (state_bytes(optimizer, shards=shards) or 0)


def update_bytes(skip: Skip, optimizer: Optimizer, *, shards: int = 1) -> int:
    """Bytes that an update takes for its time, on the first of so many ranks: `restored_bytes`, and what Muon multiplies.

    >>> import torch
    >>> from surefoot.optim.kinds.muon import BatchedMuon
    >>> from surefoot.optim.skip_step import skipping
    >>> muon = BatchedMuon([torch.nn.Parameter(torch.zeros(8, 32))])
    >>> update_bytes(skipping(muon, torch.device("meta")), muon)
    1792
    """
    if isinstance(skip, PartByPart):
        return max(update_bytes(own, part, shards=shards) for part, own in skip.parts)
    kind = kind_of(optimizer)
    if kind is None or kind.update_bytes is None:
        return restored_bytes(skip, optimizer, shards=shards)
    return kind.update_bytes([tuple(parameter.shape) for parameter in _parameters(optimizer)], shards)


def _shapes(optimizer: Optimizer, shards: int) -> Shapes:
    return [(shard_shape(held.shape, shards), held.element_size()) for held in _parameters(optimizer)]


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
