"""Ranks that hold the same weights must hold the same bits; a checksum of them is compared now and then.

A rank whose memory or processor fails, or code that changes weights on one rank only, is noticed by nothing else: its gradients
are averaged into those of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.durations import Every
from surefoot.errors import DivergedError
from surefoot.sharding import held_of, plain_tensors, saved_state
from surefoot.world import World

_AS_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of so many bytes


class Comparison:
    """After which steps ranks compare their weights, as long as one sitting lasts."""

    def __init__(self, world: World, every: Every) -> None:
        self.world, self.every = world, every
        self.compared: int | None = None  # the last of these steps

    def made(self, models: Mapping[str, nn.Module], *, done: int, last: int) -> None:
        """At a record: compare where that has fallen due, at the first record and at that of the last step; collective."""
        due = any(self.every.due(step) for step in range((self.compared or 0) + 1, done + 1))
        if due or self.compared is None or done == last:
            self.compared = done
            refuse_different(models, self.world, step=done)


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """For each tensor the sum of its numbers' bits, taken as whole numbers; any single one that differs shows. Waits once.

    >>> checksums({"a": torch.tensor([1.0, 0.0])}) == checksums({"a": torch.tensor([1.0, 1e-30])})
    False
    """
    sums = [_sum_of_bits(held.detach()) for held in tensors.values()]
    if not sums:
        return {}
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


def refuse_different(models: Mapping[str, nn.Module], world: World, *, step: int) -> None:
    """Raise `DivergedError` where ranks hold different weights or buffers, naming the first that differs; collective.

    What is spread over ranks is compared among those that hold the same rows.
    """
    own = _by_place(models)
    told = world.gathered({place: sum(sums.values()) for place, sums in own.items()})
    if not any(told[first][place] != told[rank][place] for place, first, rank in _alike(told)):
        return
    named = world.gathered(own)
    for place, first, rank in _alike(named):
        for name, value in named[first][place].items():
            if named[rank][place][name] != value:
                raise DivergedError(
                    f"after step {step} rank {rank} holds other weights than rank {first}: {name} is the first that differs\n"
                    "  likely cause: memory or a processor that fails there, or code that changes weights on one rank only\n"
                    "  checkpoints since the last comparison are not to be trusted: go on from an earlier one"
                )


def _by_place(models: Mapping[str, nn.Module]) -> dict[str, dict[str, int]]:
    """Checksums by what they are of: "" for what every rank holds whole, else which part of the tensors this rank has."""
    held: dict[str, dict[str, Tensor]] = {}
    for model, module in models.items():
        saved = [plain_tensors(key, each) for key, each in saved_state(module).items() if isinstance(each, Tensor)]
        for name, tensor in [pair for named in saved for pair in named.items()]:
            local, rows = held_of(tensor)
            place = "" if rows is None else f"part {rows.group.rank()}"
            held.setdefault(place, {})[name if len(models) == 1 else f"{model}: {name}"] = local
    return {place: checksums(tensors) for place, tensors in held.items()}


def _alike(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Pairs of ranks that hold the same: the first that holds it, and each later one."""
    first: dict[str, int] = {}
    for rank, places in enumerate(told):
        for place in places:
            if first.setdefault(place, rank) != rank:
                yield place, first[place], rank


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        return tensor.sum(dtype=torch.int64)
    return tensor.contiguous().view(_AS_WHOLE[tensor.element_size()]).sum(dtype=torch.int64)
