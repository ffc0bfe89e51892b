"""A decoder-only transformer: rotary positions, RMS norms before each part, query-key norms, squared ReLU, no biases.

Shapes: B batch, T time (tokens), C channels (width), H heads, D channels of a head, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """The size of a GPT; `width` must be a multiple of twice the `heads`."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"width = {self.width} must be a multiple of 2 x heads = {2 * self.heads}: rotary positions turn pairs of channels")


class GPT(nn.Module):
    """tokens (B, T), T up to `shape.context`, to logits (B, T, V) of the token after each."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        cos_TD, sin_TD = rotations(shape.context, shape.width // shape.heads)
        self.register_buffer("cos_TD", cos_TD, persistent=False)
        self.register_buffer("sin_TD", sin_TD, persistent=False)
        self._initialise()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        time = tokens_BT.shape[1]
        if time > self.shape.context:
            raise ValueError(f"{time} tokens are more than the model's context of {self.shape.context}")
        cos_TD, sin_TD = self.get_buffer("cos_TD")[:time], self.get_buffer("sin_TD")[:time]
        x_BTC = self.dropout(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TD, sin_TD)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV

    def _initialise(self) -> None:
        """Matrices by fan-in; what writes into the residual stream starts at zero, so that every block starts as identity.

        Zero-initialised residual branches: Goyal et al. 2017, section 5.1 (https://arxiv.org/abs/1706.02677). An untied head
        starts at zero too, so that the first loss is ln V; a tied one shares the embedding's small values.
        """
        nn.init.normal_(self.embedding.weight, std=0.02 if self.shape.tied else 1.0)
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.attention.qkv, block.mlp.up):
                nn.init.normal_(linear.weight, std=1.0 / math.sqrt(self.shape.width))
            for linear in (block.attention.out, block.mlp.down):
                nn.init.zeros_(linear.weight)
        if self.shape.tied:
            self.head.weight = self.embedding.weight
        else:
            nn.init.zeros_(self.head.weight)


class Block(nn.Module):
    """Attention, then two layers at each place, both added to the residual stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """The residual stream after this block."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD)
        x_BTC = x_BTC + self.mlp(self.mlp_norm(x_BTC))
        return x_BTC


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys.

    Query-key norms: Henry et al. 2020, section 3 (https://arxiv.org/abs/2010.04245).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.drop_fraction = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.query_norm, self.key_norm = (nn.RMSNorm(shape.width // shape.heads) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """What each place gathers from itself and the places before it."""
        batch, time, width = x_BTC.shape
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in self.qkv(x_BTC).split(width, dim=2)
        )
        q_BHTD = rotated(self.query_norm(q_BHTD), cos_TD, sin_TD)
        k_BHTD = rotated(self.key_norm(k_BHTD), cos_TD, sin_TD)
        y_BHTD = causal_attention(q_BHTD, k_BHTD, v_BHTD, drop_fraction=self.drop_fraction if self.training else 0.0)
        y_BTC: Tensor = self.dropout(self.out(y_BHTD.transpose(1, 2).reshape(batch, time, width)))
        return y_BTC


class MLP(nn.Module):
    """Up to four times the width, squared ReLU (So et al. 2021, section 4.2: https://arxiv.org/abs/2109.08668), and down."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Each place by itself."""
        y_BTC: Tensor = self.dropout(self.down(F.relu(self.up(x_BTC)).square()))
        return y_BTC


def causal_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, drop_fraction: float) -> Tensor:
    """Scaled dot-product attention over the places up to each; on the CPU always in float32.

    torch 2.13's backward pass in bfloat16 on the CPU is 2 to 17 times slower than in float32 for heads of 32 or 64 channels
    and up to 256 tokens, which makes whole autocast runs slower than float32 ones.
    """
    dtype = v_BHTD.dtype
    if q_BHTD.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD.float(), k_BHTD.float(), v_BHTD.float(), dropout_p=drop_fraction, is_causal=True
            )
        return y_BHTD.to(dtype)
    return F.scaled_dot_product_attention(q_BHTD.to(dtype), k_BHTD.to(dtype), v_BHTD, dropout_p=drop_fraction, is_causal=True)


def rotations(context: int, channels: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, D) of the angles by which place t turns the pairs of channels (i, i + D/2).

    Su et al. 2021, section 3.2.2 (https://arxiv.org/abs/2104.09864), with the base 10,000.
    """
    frequencies_d = 10000.0 ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles_Td = torch.outer(torch.arange(context, dtype=torch.float32), frequencies_d)
    angles_TD = torch.cat([angles_Td, angles_Td], dim=1)
    return angles_TD.cos(), angles_TD.sin()


def rotated(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Each pair of channels turned by its place's angle: products of two such depend only on the distance."""
    first, second = x_BHTD.chunk(2, dim=-1)
    turned: Tensor = x_BHTD * cos_TD + torch.cat([-second, first], dim=-1) * sin_TD
    return turned
