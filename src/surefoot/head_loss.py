"""Cross-entropy of a linear head that never holds all its logits: each piece's gradient is made while its logits are at hand.

The logits of a batch are often the largest tensor of a training step, and a plain loss passes over them six times or more.
Here a few hundred rows of them at a time stay in the processor's cache (Hsu et al. 2024, section 3.2, with the gradient made
in the forward pass: https://arxiv.org/abs/2410.10989).

Shapes: N targets, D channels, V classes; a piece of them has n rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_PIECE = 256  # rows; a quarter to twice as many are as quick


def summed_cross_entropy(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """The sum in nats over all targets (none ignored) of the cross-entropy of `hidden @ head.T`; float32 or better.

    Products are computed in the type of `hidden`, or that of autocast; everything else as `F.cross_entropy` computes it, and
    equal to it to rounding. Cannot be differentiated twice.

    >>> float(summed_cross_entropy(torch.ones(5, 3), torch.zeros(4, 3), torch.zeros(5, dtype=torch.long)))
    6.931471824645996
    """
    device = hidden_ND.device.type
    computed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    total: Tensor = _Summed.apply(hidden_ND, head_VD, targets_N, label_smoothing, computed)  # type: ignore[no-untyped-call]
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, label_smoothing: float, computed: torch.dtype
    ) -> Tensor:
        wide = torch.promote_types(computed, torch.float32)
        hidden, head = hidden_ND.detach().to(computed), head_VD.detach().to(computed)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden, of_head = torch.empty_like(hidden), torch.zeros_like(head_VD, dtype=wide)
        spread, right = (
            label_smoothing / len(head),
            1.0 - label_smoothing,
        )  # probability of every class, and on top of it
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, len(hidden), _PIECE):
                piece_nD = hidden[first : first + _PIECE]
                targets_n1 = targets_N[first : first + _PIECE, None]
                logits_nV = (piece_nD @ head.T).to(wide)
                normaliser_n1 = logits_nV.logsumexp(dim=1, keepdim=True)
                total += normaliser_n1.sum() - right * logits_nV.gather(1, targets_n1).sum()
                if label_smoothing:
                    total -= spread * logits_nV.sum()
                gradient_nV = logits_nV.sub_(normaliser_n1).exp_()  # the probabilities, less what they should be
                if label_smoothing:
                    gradient_nV -= spread
                gradient_nV.scatter_add_(1, targets_n1, torch.full_like(normaliser_n1, -right))
                narrow_nV = gradient_nV.to(computed)
                of_hidden[first : first + _PIECE] = narrow_nV @ head
                of_head += narrow_nV.T @ piece_nD
        ctx.save_for_backward(of_hidden, of_head)
        ctx.types = hidden_ND.dtype, head_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_hidden, of_head = ctx.saved_tensors
        of_hidden_type, of_head_type = ctx.types
        return (of_hidden * outer).to(of_hidden_type), (of_head * outer).to(of_head_type), None, None, None
