"""Attention over earlier places or unpadded ones: the product itself, and a cache of keys and values.

Shapes: B batch, T time (tokens), S time so far (with what a cache holds), H heads, D channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.models.dropout import dropped
from surefoot.models.tiled import tiled_attention

_TILED = 1024  # places: with more, their weights take too much memory
_WRITTEN_OUT = 64  # places: with more, the kernel in float32 is faster (benchmarks/kernels.py)


class Cache:
    """Keys and values of the tokens seen so far, so that each new token costs one place and not all of them.

    `size` is (layers, B, H, the most tokens, D).
    """

    def __init__(self, size: tuple[int, int, int, int, int], *, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty(size, device=device, dtype=dtype)
        self.length = 0
        self.earlier = torch.empty(size[1], 0, dtype=torch.long, device=device)  # the last tokens (B, few)

    def with_earlier(self, tokens_BT: Tensor, *, keep: int) -> Tensor:
        """The tokens after the last `keep` of those before them, or what there is of them; then it keeps the last of all."""
        if not keep:
            return tokens_BT
        tokens_BS = torch.cat([self.earlier, tokens_BT], dim=1)
        self.earlier = tokens_BS[:, -keep:]
        return tokens_BS

    def extended(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values (B, H, S, D) of one layer, the new ones taken in; `length` moves on after the last layer."""
        end = self.length + k_BHTD.shape[2]
        self.keys[layer, :, :, self.length : end] = k_BHTD
        self.values[layer, :, :, self.length : end] = v_BHTD
        if layer == len(self.keys) - 1:
            self.length = end
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def select(self, rows_B: Tensor) -> None:
        """Go on with these rows, in this order; one may be there several times."""
        self.earlier = self.earlier[rows_B]
        layers, _, heads, most, channels = self.keys.shape
        size = (layers, len(rows_B), heads, most, channels)
        before, self.keys, self.values = (
            (self.keys, self.values),
            self.keys.new_empty(size),
            self.values.new_empty(size),
        )
        for held, kept in zip(before, (self.keys, self.values), strict=True):
            kept[:, :, :, : self.length] = held[:, rows_B, :, : self.length]  # what is not filled yet is not copied


def causal_attention(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, drop_fraction: float) -> Tensor:
    """Scaled dot-product attention over the places up to each, in the type of `v_BHSD`. The queries are of the last T of S places.

    torch 2.13's backward pass in bfloat16 on the CPU is 2 to 17 times slower than in float32 for heads of 32 or 64 channels
    and up to 256 tokens, which makes whole autocast runs slower than float32 ones. So on the CPU bfloat16 is written out as
    products: of tiles (`tiled.py`), about twice as fast as torch's kernel in float32 (benchmarks/kernels.py); whole
    where weights are dropped and places few; and else computed in float32.
    """
    time, so_far = q_BHTD.shape[2], k_BHSD.shape[2]
    causal = time == so_far
    mask_TS = None
    if not causal and time > 1:
        mask_TS = torch.ones(time, so_far, dtype=torch.bool, device=q_BHTD.device).tril(so_far - time)
    return _attention(q_BHTD, k_BHSD, v_BHSD, mask=mask_TS, causal=causal, drop_fraction=drop_fraction)


def masked_attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, mask_B11S: Tensor, drop_fraction: float
) -> Tensor:
    """Scaled dot-product attention over the places where `mask_B11S` is true, the same for all queries of a row.

    Every row needs one such place. In the type of `v_BHSD`, and computed as in `causal_attention`.
    """
    return _attention(q_BHTD, k_BHSD, v_BHSD, mask=mask_B11S, causal=False, drop_fraction=drop_fraction)


def _attention(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, mask: Tensor | None, causal: bool, drop_fraction: float
) -> Tensor:
    if not v_BHSD.is_cpu:
        return F.scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=drop_fraction, is_causal=causal
        )
    narrow, so_far = v_BHSD.dtype in (torch.bfloat16, torch.float16), k_BHSD.shape[2]
    if narrow and causal and not drop_fraction and so_far <= _TILED and not torch.compiler.is_compiling():
        return tiled_attention(q_BHTD.to(v_BHSD.dtype), k_BHSD.to(v_BHSD.dtype), v_BHSD)
    computed = v_BHSD.dtype if narrow and so_far <= _WRITTEN_OUT else torch.promote_types(v_BHSD.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q, k, v = (part.to(computed) for part in (q_BHTD, k_BHSD, v_BHSD))
        if computed == v_BHSD.dtype and narrow:
            if causal:
                mask = torch.ones(so_far, so_far, dtype=torch.bool).tril()
            return _written_out(q, k, v, mask=mask, drop_fraction=drop_fraction)
        y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop_fraction, is_causal=causal)
    return y_BHTD.to(v_BHSD.dtype)


def _written_out(
    q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, mask: Tensor | None, drop_fraction: float
) -> Tensor:
    """The product as its definition has it, the softmax in float32: Vaswani et al. 2017, section 3.2.1."""
    scores_BHTS = (q_BHTD * q_BHTD.shape[-1] ** -0.5) @ k_BHSD.transpose(-2, -1)
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, float("-inf"))
    weights_BHTS = torch.softmax(scores_BHTS, dim=-1, dtype=torch.float32).to(v_BHSD.dtype)
    if drop_fraction:
        weights_BHTS = dropped(weights_BHTS, drop_fraction)
    return weights_BHTS @ v_BHSD
