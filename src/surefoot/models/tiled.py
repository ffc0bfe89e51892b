"""Causal attention in a narrow number format on the CPU, as products of tiles, and its backward pass.

Shapes: N rows of the batch times heads, T time (tokens), D channels of a head, t places of a tile, s places up to its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_PLACES = ContextVar("places", default=64)  # of a tile


def tiled_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Scaled dot-product attention of each place to those up to itself: Vaswani et al. 2017, section 3.2.1.

    Queries are taken 64 at a time with the keys up to the last of them, so that of all pairs above the diagonal only those
    inside a tile are computed. Weights are kept for the backward pass: T^2/2 numbers a head.
    """
    y_BHTD: Tensor = _Tiled.apply(q_BHTD, k_BHTD, v_BHTD, _PLACES.get())  # type: ignore[no-untyped-call]
    return y_BHTD


@contextmanager
def in_one_tile() -> Iterator[None]:
    """In this block all pairs of places are computed: as many operations as the definition has, for those who count them."""
    before = _PLACES.set(1 << 62)
    try:
        yield
    finally:
        _PLACES.reset(before)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, places: int) -> Tensor:
        time, channels = q_BHTD.shape[2:]
        q_NTD, k_NTD, v_NTD = (part.reshape(-1, time, channels) for part in (q_BHTD, k_BHTD, v_BHTD))
        q_NTD = q_NTD * channels**-0.5
        y_NTD = torch.empty_like(v_NTD)
        most = min(places, time)
        later_tt = torch.full((most, most), float("-inf"), dtype=q_NTD.dtype).triu_(1)
        tiles = []
        for first in range(0, time, places):
            end = min(first + places, time)
            scores_Nts = q_NTD[:, first:end] @ k_NTD[:, :end].mT
            scores_Nts[..., first:] += later_tt[: end - first, : end - first]
            tiles.append(torch.softmax(scores_Nts, dim=-1))
            y_NTD[:, first:end] = tiles[-1] @ v_NTD[:, :end]
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, *tiles)
        ctx.places = places
        return y_NTD.view(q_BHTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_NTD, k_NTD, v_NTD, *tiles = ctx.saved_tensors
        outer_NTD = outer_BHTD.reshape(q_NTD.shape)
        time, channels = q_NTD.shape[1:]
        of_q = torch.empty_like(q_NTD)
        of_k, of_v = (torch.zeros(q_NTD.shape, dtype=torch.float32) for _ in range(2))  # sums over tiles
        for first, weights_Nts in zip(range(0, time, ctx.places), tiles, strict=True):
            end = first + weights_Nts.shape[1]
            outer_NtD = outer_NTD[:, first:end]
            of_v[:, :end] += weights_Nts.mT @ outer_NtD
            of_weights_Nts = outer_NtD @ v_NTD[:, :end].mT
            of_scores_Nts = torch._softmax_backward_data(of_weights_Nts, weights_Nts, -1, weights_Nts.dtype)
            of_q[:, first:end] = of_scores_Nts @ k_NTD[:, :end]
            of_k[:, :end] += of_scores_Nts.mT @ q_NTD[:, first:end]
        of_q *= channels**-0.5
        return (
            of_q.view(outer_BHTD.shape),
            of_k.to(q_NTD.dtype).view(outer_BHTD.shape),
            of_v.to(q_NTD.dtype).view(outer_BHTD.shape),
            None,
        )
