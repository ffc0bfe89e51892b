"""From an optimizer's name, groups and settings to the optimizer: torch's where it has one, else one of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.errors import ConfigError
from surefoot.optim.in_place import fused_sgd_writes
from surefoot.optim.kinds.adafactor import Adafactor
from surefoot.optim.kinds.adamw8bit import AdamW8bit
from surefoot.optim.kinds.lion import Lion
from surefoot.optim.kinds.muon import MuonWithAdamW
from surefoot.optim.kinds.schedule_free import ScheduleFree
from surefoot.optim.param_groups import Group
from surefoot.optim.validation import Setting, unknown


def built(name: str, groups: Sequence[Group], *, lr: float, settings: Mapping[str, Setting]) -> Optimizer:
    """The optimizer over these groups: each has its decay, and `lr` times its own rate; fused where torch has that.

    NAdam and RAdam count on the device where that is not the host, so that a skipped step can be undone there.
    """
    _refuse_gaps(groups)
    parameters = [parameter for group in groups for parameter in group.parameters]
    real = all(parameter.is_floating_point() for parameter in parameters)
    on_device = all(parameter.is_cuda or parameter.is_meta for parameter in parameters)
    held: list[dict[str, Any]] = [
        {"params": group.parameters, "weight_decay": group.decay, "lr": lr * group.rate} for group in groups
    ]
    own: dict[str, Any] = dict(settings)
    match name:
        case "adamw":
            return torch.optim.AdamW(held, lr=lr, fused=real, **own)
        case "adam":
            return torch.optim.Adam(held, lr=lr, fused=real, **own)
        case "sgd":
            fused = real and all(fused_sgd_writes(parameter) for parameter in parameters)
            return torch.optim.SGD(held, lr=lr, fused=fused, **own)
        case "nadam":
            return torch.optim.NAdam(held, lr=lr, decoupled_weight_decay=True, capturable=on_device, **own)
        case "radam":
            return torch.optim.RAdam(held, lr=lr, decoupled_weight_decay=True, capturable=on_device, **own)
    if not real:
        raise ConfigError(f"optimizer.name = {name!r} cannot train complex parameters: use adamw, adam or sgd")
    return _of_this_folder(name, groups, held, lr=lr, own=own)


def _refuse_gaps(groups: Sequence[Group]) -> None:
    """Raise `ConfigError` for parameters with other numbers between theirs: fused kernels walk memory and would take those."""
    named = [pair for group in groups for pair in zip(group.names, group.parameters, strict=True)]
    gaps = [name for name, parameter in named if not _lies_whole(parameter)]
    if gaps:
        more = f" and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        raise ConfigError(
            f"the numbers of {gaps[0]}{more} do not lie together in memory: a part of a larger tensor?\n"
            "  give the model a copy of its own: nn.Parameter(part.clone())"
        )


def _lies_whole(tensor: Tensor) -> bool:
    """True where a tensor fills its stretch of memory, in whatever order of its dimensions."""
    numbers = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != numbers:
            return False
        numbers *= size
    return True


def _of_this_folder(
    name: str, groups: Sequence[Group], held: list[dict[str, Any]], *, lr: float, own: dict[str, Any]
) -> Optimizer:
    match name:
        case "lion":
            return Lion(held, lr=lr, **own)
        case "adafactor":
            return Adafactor(held, lr=lr, **own)
        case "adamw8bit":
            return AdamW8bit(held, lr=lr, **own)
        case "schedule-free":
            return ScheduleFree(held, lr=lr, **own)
        case "muon":
            of_adamw, _ = own.pop("adamw_lr"), own.pop("adamw_for")
            for group, made in zip(groups, held, strict=True):
                made["hidden"] = group.hidden
                if of_adamw is not None and not group.hidden:
                    made["lr"] = of_adamw * group.rate
            return MuonWithAdamW(held, lr=lr, **own)
    raise ConfigError(unknown(name))
