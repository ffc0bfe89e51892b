"""Causal and masked attention, rotary positions, and a cache of keys and values.

Shapes: B batch, T time (tokens), S time including the cache, H heads, D channels of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask

from surefoot.models.documents import attention_in_blocks
from surefoot.models.layers import dropout, past_norm, reciprocal, rms_norm

_PLACES = ContextVar("places", default=64)  # positions per tile
# positions, by bits of a value: with more, attention weights take too much memory
_TILED = {16: 1024, 32: 512}
# positions times channels of a head: with fewer, torch's kernel in float32 is as fast
_LEAST_WIDE = 192 * 64
_WRITTEN_OUT = 64  # positions: with more, the kernel in float32 is faster (benchmarks/kernels.py)


def tiled_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_B1TT: Tensor | None = None
) -> Tensor:
    """Compute causal attention (Vaswani et al. 2017, section 3.2.1) in tiles of 64 queries;
    backward needs T^2/2 values per head. A mask is added to the scores, and hides later positions
    too.
    """
    return _Tiled.apply(  # type: ignore[no-untyped-call]
        q_BHTD, k_BHTD, v_BHTD, mask_B1TT, _PLACES.get()
    )


@contextmanager
def in_one_tile() -> Iterator[None]:
    """Compute all pairs of positions in this `with` block, so that the operation count matches the
    definition.
    """
    before = _PLACES.set(1 << 62)
    try:
        yield
    finally:
        _PLACES.reset(before)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTD: Tensor,
        k_BHTD: Tensor,
        v_BHTD: Tensor,
        mask_B1TT: Tensor | None,
        places: int,
    ) -> Tensor:
        batch, heads, time, channels = q_BHTD.shape
        q_NTD = q_BHTD.reshape(-1, time, channels) * channels**-0.5
        k_NTD = k_BHTD.reshape(-1, time, channels)
        v_NTD = v_BHTD.reshape(-1, time, channels)
        y_NTD = torch.empty_like(v_NTD)
        size = min(places, time)
        later_tt = torch.full((size, size), float("-inf"), dtype=q_NTD.dtype).triu_(1)
        if mask_B1TT is not None:
            mask_B1TT = mask_B1TT.to(q_NTD.dtype)
        tiles = []
        for first in range(0, time, places):
            end = min(first + places, time)
            scores_Nts = q_NTD[:, first:end] @ k_NTD[:, :end].mT
            if mask_B1TT is None:
                scores_Nts[..., first:] += later_tt[: end - first, : end - first]
            else:
                scores_BHts = scores_Nts.view(batch, heads, end - first, end)
                scores_BHts += mask_B1TT[:, :, first:end, :end]
            tiles.append(torch.softmax(scores_Nts, dim=-1))
            y_NTD[:, first:end] = tiles[-1] @ v_NTD[:, :end]
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, *tiles)
        ctx.places = places
        return y_NTD.view(q_BHTD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_BHTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_NTD, k_NTD, v_NTD, *tiles = ctx.saved_tensors
        outer_NTD = outer_BHTD.reshape(q_NTD.shape)
        time, channels = q_NTD.shape[1:]
        of_q = torch.empty_like(q_NTD)
        of_k = torch.zeros(q_NTD.shape, dtype=torch.float32)  # a sum over tiles, as `of_v`
        of_v = torch.zeros(q_NTD.shape, dtype=torch.float32)
        for first, weights_Nts in zip(range(0, time, ctx.places), tiles, strict=True):
            end = first + weights_Nts.shape[1]
            outer_NtD = outer_NTD[:, first:end]
            of_v[:, :end] += weights_Nts.mT @ outer_NtD
            of_weights_Nts = outer_NtD @ v_NTD[:, :end].mT
            of_scores_Nts = torch._softmax_backward_data(
                of_weights_Nts, weights_Nts, -1, weights_Nts.dtype
            )
            of_q[:, first:end] = of_scores_Nts @ k_NTD[:, :end]
            of_k[:, :end] += of_scores_Nts.mT @ q_NTD[:, first:end]
        of_q *= channels**-0.5
        return (
            of_q.view(outer_BHTD.shape),
            of_k.to(q_NTD.dtype).view(outer_BHTD.shape),
            of_v.to(q_NTD.dtype).view(outer_BHTD.shape),
            None,
            None,
        )


class Cache:
    """Keys and values of past tokens, so that only new tokens are computed. `size`: (layers, B, H,
    max tokens, D).
    """

    def __init__(
        self, size: tuple[int, int, int, int, int], *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty(size, device=device, dtype=dtype)
        self.length = 0
        # the last tokens (B, at most `keep`)
        self.earlier = torch.empty(size[1], 0, dtype=torch.long, device=device)

    def with_earlier(self, tokens_BT: Tensor, *, keep: int) -> Tensor:
        """Prepend the last `keep` earlier tokens (or all, if fewer) to the new tokens, and store
        the last `keep` of the result.
        """
        if not keep:
            return tokens_BT
        tokens_BS = torch.cat([self.earlier, tokens_BT], dim=1)
        self.earlier = tokens_BS[:, -keep:]
        return tokens_BS

    def extended(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of one layer, and return all of them (B, H, S, D); the last layer
        advances `length`.
        """
        end = self.length + k_BHTD.shape[2]
        self.keys[layer, :, :, self.length : end] = k_BHTD
        self.values[layer, :, :, self.length : end] = v_BHTD
        if layer == len(self.keys) - 1:
            self.length = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows, in this order; a row may occur several times."""
        self.earlier = self.earlier[rows_B]
        self.keys = self._selected(self.keys, rows_B)
        self.values = self._selected(self.values, rows_B)

    def _selected(self, tensor: Tensor, rows_B: Tensor) -> Tensor:
        layers, _, *size = tensor.shape
        selected = tensor.new_empty(layers, len(rows_B), *size)
        # the unfilled part is not copied
        selected[:, :, :, : self.length] = tensor[:, rows_B, :, : self.length]
        return selected


def causal_attention(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    drop_fraction: float,
    document_mask: Tensor | BlockMask | None = None,
) -> Tensor:
    """Compute causal scaled dot-product attention in the dtype of `v_BHSD`. The queries belong to
    the last T of S positions. `document_mask` (see `documents.document_mask`) keeps documents
    apart.

    On the CPU, torch 2.13's backward pass in bfloat16 is 2 to 17 times slower than in float32
    (heads of 32 or 64 channels, up to 256 tokens). `tiled_attention` in bfloat16 is about twice as
    fast as torch's kernel in float32, and in float32 1.2 to 1.5 times as fast for 192 to 512
    positions (benchmarks/kernels.py). With attention dropout, the CPU computes in bfloat16 for up
    to 64 positions, and in float32 for more.
    """
    if isinstance(document_mask, BlockMask):
        return attention_in_blocks(q_BHTD, k_BHSD, v_BHSD, document_mask)
    if document_mask is not None:
        return masked_attention(
            q_BHTD, k_BHSD, v_BHSD, mask=document_mask, causal=True, drop_fraction=drop_fraction
        )
    time = q_BHTD.shape[2]
    so_far = k_BHSD.shape[2]
    causal = bool(time == so_far)  # torch.export has symbols
    mask_TS = None
    if not causal and time > 1:
        all_TS = torch.ones(time, so_far, dtype=torch.bool, device=q_BHTD.device)
        mask_TS = all_TS.tril(so_far - time)
    return masked_attention(
        q_BHTD, k_BHSD, v_BHSD, mask=mask_TS, causal=causal, drop_fraction=drop_fraction
    )


def masked_attention(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    mask: Tensor | None,
    causal: bool = False,
    drop_fraction: float,
) -> Tensor:
    """Compute scaled dot-product attention with a mask, of the shape (T, S), (B, 1, T, S), or (B, 1,
    1, S) for all queries of a row.

    As in torch, a boolean mask is true where a query sees a key, and one of numbers is added to the
    scores. With `causal`, a query sees no later key, and a mask hides later keys too. Every row needs at least one true position. The result has the dtype of `v_BHSD`;
    `causal_attention` describes the kernels.
    """
    dtype = v_BHSD.dtype
    by_torch = causal and mask is None
    if not v_BHSD.is_cpu:
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=drop_fraction, is_causal=by_torch
        )
    so_far, channels = k_BHSD.shape[2:]
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    may_tile = causal and not drop_fraction and not torch.compiler.is_compiling()
    if is_narrow and may_tile and so_far <= _TILED[16]:
        return tiled_attention(q_BHTD.to(dtype), k_BHSD.to(dtype), v_BHSD, mask)
    with torch.autocast("cpu", enabled=False):
        if is_narrow and so_far <= _WRITTEN_OUT:
            if by_torch:
                mask = torch.ones(so_far, so_far, dtype=torch.bool).tril()
            return _written_out(
                q_BHTD.to(dtype), k_BHSD.to(dtype), v_BHSD, mask=mask, drop_fraction=drop_fraction
            )
        wide = torch.promote_types(dtype, torch.float32)
        q_BHTD = q_BHTD.to(wide)
        k_BHSD = k_BHSD.to(wide)
        v_BHSD = v_BHSD.to(wide)
        is_worth_tiles = so_far <= _TILED[32] and so_far * channels >= _LEAST_WIDE
        if may_tile and is_worth_tiles and dtype == torch.float32 and not _is_transformed():
            return tiled_attention(q_BHTD, k_BHSD, v_BHSD, mask)
        if mask is not None and mask.is_floating_point():
            mask = mask.to(wide)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=drop_fraction, is_causal=by_torch
        )
    return y_BHTD.to(dtype)


def _is_transformed() -> bool:
    # functorch cannot transform a function of our own
    return torch._C._functorch.maybe_current_level() is not None


def _written_out(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, mask: Tensor | None, drop_fraction: float
) -> Tensor:
    scores_BHTS = (q_BHTD * q_BHTD.shape[-1] ** -0.5) @ k_BHSD.transpose(-2, -1)
    if mask is not None and mask.is_floating_point():
        scores_BHTS = scores_BHTS + mask
    elif mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
    weights_BHTS = torch.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(v_BHSD.dtype)
    if drop_fraction:
        weights_BHTS = dropout(weights_BHTS, drop_fraction)
    return weights_BHTS @ v_BHSD


def rotations(context: int, channels: int, *, theta: float | None = None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, D) of the angles by which position t rotates the channel pairs
    (i, i + D/2), with base `theta`. None: 10,000.

    The sines of the first half are negated, so that a rotation is
    `x * cosines + swapped halves of x * sines`. With `theta`, the frequencies are rounded as in
    transformers' LlamaRotaryEmbedding.
    """
    exponents_d = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies_d = 10000.0**-exponents_d if theta is None else 1.0 / theta**exponents_d
    angles_Td = torch.outer(torch.arange(context, dtype=torch.float32), frequencies_d)
    cos_Td = angles_Td.cos()
    sin_Td = angles_Td.sin()
    return torch.cat([cos_Td, cos_Td], dim=1), torch.cat([-sin_Td, sin_Td], dim=1)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair of channels by its position's angle: dot products of rotated vectors depend
    only on the distance of positions.
    """
    return x_BHTD * cos_TD + x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1) * sin_TD


def rotate_only(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate queries or keys (B, T, H, D), and return (B, H, T, D). The computation is in
    float32.
    """
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    return rotate(x_BTHD.transpose(1, 2).to(wide), cos_TD, sin_TD).to(x_BTHD.dtype)


def norm_and_rotate(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Normalize queries or keys (B, T, H, D) to norm sqrt(D), rotate them, and return (B, H, T, D).
    The computation is in float32.
    """
    if not x_BTHD.is_cpu or torch.compiler.is_compiling():
        return rotate(rms_norm(x_BTHD.float()).transpose(1, 2), cos_TD, sin_TD).to(x_BTHD.dtype)
    return _NormAndRotate.apply(x_BTHD, cos_TD, sin_TD)  # type: ignore[no-untyped-call]


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        wide = torch.promote_types(x_BTHD.dtype, torch.float32)
        x_BHTD = x_BTHD.transpose(1, 2).to(wide, memory_format=torch.contiguous_format, copy=True)
        scale_BHT1 = reciprocal(x_BHTD)
        y_BHTD = _turned(x_BHTD.mul_(scale_BHT1), cos_TD, sin_TD).to(x_BTHD.dtype)
        ctx.save_for_backward(y_BHTD, scale_BHT1, cos_TD, sin_TD)
        return y_BHTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_BHTD: Tensor) -> tuple[Tensor, None, None]:
        y_BHTD, scale_BHT1, cos_TD, sin_TD = ctx.saved_tensors
        dtype = y_BHTD.dtype
        wide = scale_BHT1.dtype
        # a rotation preserves dot products, so the norm's gradient may be computed before the
        # inverse rotation
        outer_BHTD = past_norm(outer_BHTD.to(wide), y_BHTD.to(wide, copy=True), scale_BHT1)
        inner_BTHD = _turned(outer_BHTD, cos_TD, -sin_TD).transpose(1, 2)
        return inner_BTHD.to(dtype, memory_format=torch.contiguous_format), None, None


def _turned(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    return (x_BHTD * cos_TD).addcmul_(x_BHTD.roll(x_BHTD.shape[-1] // 2, dims=-1), sin_TD)
