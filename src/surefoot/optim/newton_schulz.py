"""Matrices made nearly orthogonal by Newton and Schulz's iteration, those of one shape together.

Jordan et al. 2024, Muon (https://kellerjordan.github.io/posts/muon/): singular values end between about 0.7 and 1.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TOGETHER = 1 << 24  # numbers of a batch: larger matrices fill a device by themselves


@dataclass(frozen=True)
class NewtonSchulz:
    """How often to iterate X <- aX + (bA + cAA)X with A = XX^T, and with which a, b, c."""

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7


def orthogonal(matrices: Sequence[Tensor], how: Sequence[NewtonSchulz]) -> list[Tensor]:
    """Each matrix U S V^T as about U V^T, in bfloat16; `how` has one entry for each.

    Matrices of one shape, transposed ones too, are multiplied in one batch: a third less time for a small GPT's on the CPU, and
    as many fewer kernels elsewhere. On the CPU no bit differs from what torch's Muon makes of each alone.

    >>> (made,) = orthogonal([torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -4.0]])], [NewtonSchulz()])
    >>> [round(value, 1) for value in made.flatten().tolist()]
    [0.7, 0.0, 0.0, 0.0, 0.0, -1.1]
    """
    made: dict[int, Tensor] = {}
    for places in batches([matrix.shape for matrix in matrices], how):
        wide = [_wide(matrices[place].bfloat16()) for place in places]
        made |= zip(places, _iterated(wide, how[places[0]]), strict=True)
    return [
        made[place].T if matrix.shape[0] > matrix.shape[1] else made[place] for place, matrix in enumerate(matrices)
    ]


def batches(shapes: Sequence[Sequence[int]], how: Sequence[NewtonSchulz]) -> list[list[int]]:
    """Which matrices are multiplied in one batch, by their places: of one shape, up to so many that memory stays small.

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
    sizes = []
    for places in batches(shapes, [NewtonSchulz()] * len(shapes)):
        height, width = min(shapes[places[0]]), max(shapes[places[0]])
        sizes.append(len(places) * height * (3 * width + 2 * height) * torch.bfloat16.itemsize)
    return max(sizes, default=0)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _iterated(matrices: list[Tensor], how: NewtonSchulz) -> Sequence[Tensor]:
    a, b, c = how.coefficients
    x = torch.stack(matrices)
    x /= torch.stack([matrix.norm() for matrix in matrices]).clamp(min=how.eps)[:, None, None]  # then all S are below 1
    for _ in range(how.steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.unbind()
