"""How many bytes an optimizer will keep, before its first step has made them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.memory import tensor_bytes
from surefoot.optimizers.adafactor import Adafactor
from surefoot.optimizers.adamw8bit import BLOCK, SMALLEST, AdamW8bit
from surefoot.optimizers.lion import Lion
from surefoot.optimizers.muon import MuonWithAdamW
from surefoot.optimizers.schedule_free import ScheduleFree
from surefoot.optimizers.sharded_muon import ShardedMuon

_COPIES: dict[type[Optimizer], int] = {  # of each parameter
    torch.optim.AdamW: 2,
    torch.optim.Adam: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 2,
    torch.optim.Adagrad: 1,
    torch.optim.RMSprop: 1,
    torch.optim.Muon: 1,
    ShardedMuon: 1,
    Lion: 1,
    ScheduleFree: 2,
}


def state_bytes(optimizer: Optimizer) -> int | None:
    """Bytes of state on this rank, without step counters; None for an optimizer of which that is not known.

    >>> state_bytes(Lion([torch.nn.Parameter(torch.zeros(10))]))
    40
    """
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, MuonWithAdamW):
        return sum(state_bytes(part) or 0 for part in optimizer.parts)
    if isinstance(optimizer, torch.optim.SGD):
        return tensor_bytes(parameters) if optimizer.param_groups[0]["momentum"] else 0
    if isinstance(optimizer, Adafactor):
        return sum(_rows_and_columns(parameter) * parameter.element_size() for parameter in parameters)
    if isinstance(optimizer, AdamW8bit):
        return sum(2 * _in_8_bits(parameter.numel()) for parameter in parameters)
    copies = _COPIES.get(type(optimizer))
    return None if copies is None else copies * tensor_bytes(parameters)


def _rows_and_columns(parameter: Tensor) -> int:
    if parameter.ndim < 2:
        return parameter.numel()
    return parameter.numel() // parameter.shape[-1] + parameter.numel() // parameter.shape[-2]


def _in_8_bits(numbers: int) -> int:
    return numbers * 4 if numbers < SMALLEST else numbers + 4 * -(-numbers // BLOCK)
