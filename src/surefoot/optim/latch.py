"""Which updates are not applied: those whose loss or gradient is not finite, and every later one after too many of them."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.optim.on_cpu import read_on_cpu

_LARGE = 1e38  # below it no sum of two numbers of 32 bits overflows


def skipped_where_bad(
    norm: Tensor, loss: Tensor, bad_in_a_row: Tensor, *, most: int, loss_scale: Tensor | None = None
) -> Tensor:
    """1.0 where this update is not to be applied, else 0.0, on the device; counts it in `bad_in_a_row`, the latch.

    Past `most` bad ones in a row every later one is skipped: the count then only grows. Under a `loss_scale` an overflow that
    a smaller scale may cure is skipped, and is no sign of divergence.

    >>> bad_in_a_row = torch.zeros(())
    >>> norms = (1.0, torch.inf, torch.inf, 1.0)
    >>> [float(skipped_where_bad(torch.tensor(norm), torch.tensor(2.0), bad_in_a_row, most=1)) for norm in norms]
    [0.0, 1.0, 1.0, 1.0]
    """
    here = norm.is_cpu and loss.is_cpu and bad_in_a_row.is_cpu  # the norm of no gradients is, on any device
    if here and loss_scale is None and _plainly_good(norm, loss, bad_in_a_row):
        return torch.zeros((), dtype=torch.float32)
    bad = torch.ne((probe := norm + loss) - probe, 0)  # inf - inf and NaN - NaN are NaN, which equals nothing
    skipped = (bad | (bad_in_a_row > most)).float()
    counted = 1 if loss_scale is None else torch.logical_not(bad & torch.isfinite(loss) & (loss_scale > 1))
    bad_in_a_row.add_(counted).mul_(skipped)
    return skipped


def _plainly_good(norm: Tensor, loss: Tensor, bad_in_a_row: Tensor) -> bool:
    """Whether the general arithmetic would come to 0 and leave the latch at 0: nine calls of torch for most steps."""
    return abs(read_on_cpu(norm) + read_on_cpu(loss)) < _LARGE and read_on_cpu(bad_in_a_row) == 0.0
