"""Muon where each rank holds some rows of every matrix: torch's arithmetic on the gathered whole, shared out among the ranks.

Orthogonalised by its rows alone a matrix would be another one. Each rank gathers some matrices whole, makes them orthogonal and
sends the rows back: two exchanges a step, in bfloat16, which torch's Muon computes in anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from surefoot.optimizers.guarded import replace
from surefoot.sharding import Rows, Shard


class ShardedMuon(Optimizer):
    """`torch.optim.Muon` (2.13) on `Shard`s of matrices, to the bit; momentum stays with its rows. A step is collective.

    An attribute `found_inf` of 1 makes a step change no bit; it must be the same on every rank.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        settings |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or none where `found_inf` says so."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = vars(self).get("found_inf")
        held = [(shard, group) for group in self.param_groups for shard in group["params"] if shard.grad is not None]
        if not held:
            return loss
        updates = [self._momentum_moved(shard, group, found_inf) for shard, group in held]
        directions = _orthogonal(updates, [shard.rows for shard, _ in held], [group for _, group in held])
        for (shard, group), direction in zip(held, directions, strict=True):
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], torch.Size(shard.rows.shape))
            moved = shard.mul(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-rate)
            replace(shard, moved, found_inf=found_inf)
        return loss

    def _momentum_moved(self, shard: Shard, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
        """The rows of what is to be made orthogonal; moves the momentum."""
        state, gradient = self.state[shard], shard.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        moved = state["momentum_buffer"].lerp(gradient, 1 - group["momentum"])
        replace(state["momentum_buffer"], moved, found_inf=found_inf)
        update: Tensor = gradient.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        return update.to(torch.bfloat16)


def _orthogonal(updates: Sequence[Tensor], rows: Sequence[Rows], groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """This rank's rows of each whole matrix made orthogonal; collective."""
    group = rows[0].group
    rank, ranks = group.rank(), group.size()
    owners = shared_out(tuple(each.shape for each in rows), ranks)
    of = [[place for place, owner in enumerate(owners) if owner == other] for other in range(ranks)]
    heights = [[stop - start for start, stop in zip(each.starts, each.starts[1:], strict=False)] for each in rows]
    widths = [each.shape[1] for each in rows]

    gathered = _exchanged(
        [[updates[place] for place in of[other]] for other in range(ranks)],
        [[(heights[place][other], widths[place]) for place in of[rank]] for other in range(ranks)],
        empty=updates[0].new_empty(0),
        group=group,
    )
    whole = [torch.cat([part[nth] for part in gathered]) for nth in range(len(of[rank]))]
    made = [
        _zeropower_via_newtonschulz(matrix, groups[p]["ns_coefficients"], groups[p]["ns_steps"], groups[p]["eps"])
        for matrix, p in zip(whole, of[rank], strict=True)
    ]
    returned = _exchanged(
        [
            [torch.split(matrix, heights[place])[other] for matrix, place in zip(made, of[rank], strict=True)]
            for other in range(ranks)
        ],
        [[(heights[place][rank], widths[place]) for place in of[other]] for other in range(ranks)],
        empty=updates[0].new_empty(0),
        group=group,
    )
    found = {place: part for other in range(ranks) for place, part in zip(of[other], returned[other], strict=True)}
    return [found[place] for place in range(len(updates))]


@cache
def shared_out(shapes: tuple[tuple[int, ...], ...], ranks: int) -> tuple[int, ...]:
    """Which rank makes each matrix orthogonal, so that all have about as much to multiply: the largest first, to whom has least.

    >>> shared_out(((8, 8), (2, 2), (2, 4), (2, 4)), 2)
    (0, 1, 1, 1)
    """
    work = [0] * ranks
    owners = [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -_multiplications(shapes[place])):
        owners[place] = work.index(min(work))
        work[owners[place]] += _multiplications(shapes[place])
    return tuple(owners)


def _multiplications(shape: tuple[int, ...]) -> int:
    """Of a step of Newton and Schulz, but for a factor."""
    return shape[0] * shape[1] * min(shape)


def _exchanged(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], *, empty: Tensor, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """What every rank sends to this one, of these shapes, for what this one sends to every rank; collective."""
    if group.size() == 1:
        return sent
    given = [torch.cat([empty, *(part.reshape(-1) for part in parts)]) for parts in sent]
    sizes = [[height * width for height, width in parts] for parts in shapes]
    taken = [sum(parts) for parts in sizes]
    out = empty.new_empty(sum(taken))
    dist.all_to_all_single(out, torch.cat(given), taken, [len(part) for part in given], group)
    return [
        [part.view(shape) for part, shape in zip(torch.split(whole, parts), shaped, strict=True)]
        for whole, parts, shaped in zip(torch.split(out, taken), sizes, shapes, strict=True)
    ]
