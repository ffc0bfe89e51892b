"""Matrices made nearly orthogonal by Newton and Schulz's iteration, those of one shape together.

Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon/): singular values end between about 0.7 and 1.2. Matrices whose
rows lie on several ranks are gathered, shared out among the ranks, and sent back: two exchanges per step, in bfloat16.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.distributed.shards import Rows, shard_shape

_TOGETHER = 1 << 24  # numbers of a batch: larger matrices fill a device by themselves


@dataclass(frozen=True)
class NewtonSchulz:
    """How often to iterate X <- aX + (bA + cAA)X with A = XX^T, and with which a, b, c."""

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7


def orthogonal(matrices: Sequence[Tensor], how: Sequence[NewtonSchulz]) -> list[Tensor]:
    """Each matrix U S V^T as about U V^T, in bfloat16; `how` has one entry for each.

    Matrices of one shape, transposed ones too, are multiplied in one batch: a third less time for a small GPT's on the CPU. There
    no bit differs from torch's Muon of each alone.

    >>> (made,) = orthogonal([torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]])], [NewtonSchulz()])
    >>> [round(value, 1) for value in made.flatten().tolist()]
    [0.7, 0.0, 0.0, 0.0, 0.0, -1.1]
    """
    made: dict[int, Tensor] = {}
    for places in batches([matrix.shape for matrix in matrices], how):
        narrow = [matrices[place].bfloat16() for place in places]
        wide = [matrix.T if matrix.shape[0] > matrix.shape[1] else matrix for matrix in narrow]
        made |= zip(places, _iterated(wide, how[places[0]]), strict=True)
    return [
        made[place].T if matrix.shape[0] > matrix.shape[1] else made[place] for place, matrix in enumerate(matrices)
    ]


def batches(shapes: Sequence[Sequence[int]], how: Sequence[NewtonSchulz]) -> list[list[int]]:
    """Which matrices are multiplied in one batch, by their places: of one shape, and few enough that memory stays small.

    >>> batches([(2, 3), (4, 4), (3, 2)], [NewtonSchulz()] * 3)
    [[0, 2], [1]]
    """
    alike: dict[tuple[int, int, NewtonSchulz], list[int]] = defaultdict(list)
    for place, (shape, steps) in enumerate(zip(shapes, how, strict=True)):
        alike[(min(shape), max(shape), steps)].append(place)
    found = []
    for (height, width, _), places in alike.items():
        most = max(1, _TOGETHER // max(1, height * width))
        found += [places[first : first + most] for first in range(0, len(places), most)]
    return found


def working_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """The most memory that one of the `batches` takes: its matrices as they come, before and after a step, and two products A."""
    most = 0
    for places in batches(shapes, [NewtonSchulz()] * len(shapes)):
        height, width = min(shapes[places[0]]), max(shapes[places[0]])
        most = max(most, len(places) * height * (3 * width + 2 * height) * torch.bfloat16.itemsize)
    return most


def orthogonal_rows(updates: Sequence[Tensor], rows: Sequence[Rows], how: Sequence[NewtonSchulz]) -> list[Tensor]:
    """This rank's rows of each whole matrix made orthogonal, of its own rows (bfloat16) of each; collective."""
    group = rows[0].group
    rank, ranks = group.rank(), group.size()
    owners = shared_out(tuple(each.shape for each in rows), ranks)
    of = [[place for place, owner in enumerate(owners) if owner == other] for other in range(ranks)]
    heights = [[stop - start for start, stop in zip(each.starts, each.starts[1:], strict=False)] for each in rows]
    widths = [each.shape[1] for each in rows]

    gathered = _exchanged(
        [[updates[place] for place in places] for places in of],
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
        [[(heights[place][rank], widths[place]) for place in places] for places in of],
        empty=updates[0].new_empty(0),
        group=group,
    )
    found = dict(zip(chain.from_iterable(of), chain.from_iterable(returned), strict=True))
    return [found[place] for place in range(len(updates))]


@cache
def shared_out(shapes: tuple[tuple[int, ...], ...], ranks: int) -> tuple[int, ...]:
    """Which rank makes each matrix orthogonal, so that all have about as much to multiply: the largest first, to whom has least.

    >>> shared_out(((8, 8), (2, 2), (2, 4), (2, 4)), 2)
    (0, 1, 1, 1)
    """
    work, owners = [0] * ranks, [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -_multiplications(shapes[place])):
        owners[place] = work.index(min(work))
        work[owners[place]] += _multiplications(shapes[place])
    return tuple(owners)


def update_bytes(shapes: Sequence[tuple[int, ...]], ranks: int) -> int:
    """About the peak memory of this on one of `ranks` ranks: its rows as they come and go, and its matrices.

    These are there as they arrive, whole, orthogonal, by receivers and as they are sent. In one process: `working_bytes`.

    >>> update_bytes(((8, 8), (8, 8)), 2)
    896
    """
    if ranks == 1:
        return working_bytes(shapes)
    owned = [0] * ranks
    for shape, owner in zip(shapes, shared_out(tuple(shapes), ranks), strict=True):
        owned[owner] += prod(shape)
    return (5 * max(owned) + 2 * sum(prod(shard_shape(shape, ranks)) for shape in shapes)) * torch.bfloat16.itemsize


def _iterated(matrices: list[Tensor], how: NewtonSchulz) -> Sequence[Tensor]:
    (a, b, c), x = how.coefficients, torch.stack(matrices)
    x /= torch.stack([matrix.norm() for matrix in matrices]).clamp(min=how.eps)[:, None, None]  # then all S are below 1
    for _ in range(how.steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.unbind()


def _multiplications(shape: tuple[int, ...]) -> int:
    """Multiplications of a step of Newton and Schulz, up to a factor."""
    return shape[0] * shape[1] * min(shape)


def _exchanged(
    sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], *, empty: Tensor, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """The tensors from every rank, of these shapes, in exchange for those sent to every rank; collective."""
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
