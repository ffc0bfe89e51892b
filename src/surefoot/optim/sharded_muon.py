"""Matrices of which each rank holds some rows, made orthogonal: gathered whole, shared out among the ranks, and sent back.

Orthogonalised by its rows alone a matrix would be another one. Two exchanges a step, in bfloat16, in which they are made
orthogonal anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.optim.newton_schulz import NewtonSchulz, orthogonal
from surefoot.sharding import Rows


def orthogonal_rows(updates: Sequence[Tensor], rows: Sequence[Rows], how: Sequence[NewtonSchulz]) -> list[Tensor]:
    """This rank's rows of each whole matrix made orthogonal, of its own rows (bfloat16) of each; collective."""
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
    made = orthogonal(whole, [how[place] for place in of[rank]])
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


def most_bytes_of_a_rank(shapes: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """About the most memory that this takes on one of so many ranks: its rows as they come and go, and its matrices.

    These are there as they arrive, whole, orthogonal, by receivers and as they are sent.

    >>> most_bytes_of_a_rank(((8, 8), (8, 8)), 2)
    896
    """
    owners = shared_out(shapes, ranks)
    owned = [
        sum(prod(shape) for shape, owner in zip(shapes, owners, strict=True) if owner == one) for one in range(ranks)
    ]
    rows = sum(-(-shape[0] // ranks) * shape[1] for shape in shapes)
    return (5 * max(owned) + 2 * rows) * torch.bfloat16.itemsize


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
