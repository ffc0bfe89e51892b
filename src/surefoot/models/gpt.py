"""A decoder-only transformer: rotary positions, RMS norms before each part, query-key norms, squared ReLU, no biases.

Shapes: B batch, T time (tokens), C channels (width), H heads, D channels of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6  # of every norm; nn.RMSNorm's own default depends on the input's type and is 0.008 in bfloat16


@dataclass(frozen=True)
class GPTShape:
    """The size of a GPT; `width` must be a multiple of twice the `heads`.

    >>> GPTShape(layers=4, heads=4, width=128, context=64, vocabulary=65).parameters
    804480
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dropout: float = 0.0  # fraction of units, of attention weights too
    tied: bool = False  # the head's matrix is the embedding's

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.context, self.vocabulary) < 1:
            raise ValueError(f"every size must be 1 or more: {self}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 x heads = {2 * self.heads}: "
                "rotary positions turn pairs of channels"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout} must be a fraction, at least 0 and below 1")

    @property
    def parameters(self) -> int:
        """How many numbers are trained: embedding, head, and in each block 12 width^2 in matrices and 4 norms' gains."""
        block = 12 * self.width**2 + 2 * self.width + 2 * (self.width // self.heads)
        return (1 if self.tied else 2) * self.vocabulary * self.width + self.layers * block + self.width


class GPT(nn.Module):
    """Tokens (B, T) of whole numbers, T up to `shape.context`, to logits (B, T, V) of the token after each.

    >>> model = GPT(GPTShape(layers=1, heads=2, width=8, context=16, vocabulary=10))
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 10])
    """

    cosines: Tensor  # (context, D)
    sines: Tensor

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        cos_TD, sin_TD = rotations(shape.context, shape.width // shape.heads)
        self.register_buffer("cosines", cos_TD, persistent=False)
        self.register_buffer("sines", sin_TD, persistent=False)
        self._initialise()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at every place."""
        logits_BTV: Tensor = self.head(self.hidden(tokens_BT))
        return logits_BTV

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the head turns into logits, (B, T, C); for a loss that never holds all logits at once."""
        time = tokens_BT.shape[1]
        if time > self.shape.context:
            raise ValueError(f"{time} tokens are more than the model's context of {self.shape.context}")
        cos_TD, sin_TD = self.cosines[:time], self.sines[:time]
        x_BTC = self.dropout(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC, cos_TD, sin_TD)
        normed_BTC: Tensor = self.norm(x_BTC)
        return normed_BTC

    @torch.no_grad()
    def _initialise(self) -> None:
        """Matrices by fan-in; what writes into the residual stream starts at zero, so that every block starts as identity.

        Zero-initialised residual branches: Goyal et al. 2017, section 5.1 (https://arxiv.org/abs/1706.02677). The head starts
        at zero too, so that the first loss is exactly ln V.
        """
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.qkv.weight, std=self.shape.width**-0.5)
                nn.init.zeros_(module.out.weight)
            elif isinstance(module, MLP):
                nn.init.normal_(module.up.weight, std=self.shape.width**-0.5)
                nn.init.zeros_(module.down.weight)
        if not self.shape.tied:
            nn.init.normal_(self.embedding.weight)
            nn.init.zeros_(self.head.weight)
            return
        # Blocks that start as identity hand the token's own embedding to the head: with a gain of 1 its own logit would be
        # 0.02 x width, and the first loss above ln V. This gain makes it 1.
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.constant_(self.norm.weight, min(1.0, 1.0 / (0.02 * self.shape.width)))
        self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then two layers at each place, both added to the residual stream."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=EPSILON)
        self.mlp = MLP(shape)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """The residual stream after this block."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), cos_TD, sin_TD)
        y_BTC: Tensor = x_BTC + self.mlp(self.mlp_norm(x_BTC))
        return y_BTC


class Attention(nn.Module):
    """Causal self-attention with normalised queries and keys.

    Query-key norms: Henry et al. 2020, section 3 (https://arxiv.org/abs/2010.04245).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.drop_fraction = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.query_norm = nn.RMSNorm(shape.width // shape.heads, eps=EPSILON)
        self.key_norm = nn.RMSNorm(shape.width // shape.heads, eps=EPSILON)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """What each place gathers from itself and the places before it."""
        batch, time, width = x_BTC.shape
        parts_BTHD = self.qkv(x_BTC).view(batch, time, 3 * self.heads, width // self.heads).chunk(3, dim=2)
        q_BHTD, k_BHTD, v_BHTD = (part_BTHD.transpose(1, 2) for part_BTHD in parts_BTHD)
        q_BHTD = rotated(normed(q_BHTD, self.query_norm), cos_TD, sin_TD)
        k_BHTD = rotated(normed(k_BHTD, self.key_norm), cos_TD, sin_TD)
        drop_fraction = self.drop_fraction if self.training else 0.0
        y_BHTD = causal_attention(q_BHTD, k_BHTD, v_BHTD, drop_fraction=drop_fraction)
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


def normed(x_BHTD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm` in the type of its gain: autocast hands it bfloat16, which its fused kernel refuses with a warning."""
    y_BHTD: Tensor = norm(x_BHTD.to(norm.weight.dtype))
    return y_BHTD


def causal_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, drop_fraction: float) -> Tensor:
    """Scaled dot-product attention over the places up to each, in the type of `v_BHTD`; computed in float32 on the CPU.

    torch 2.13's backward pass in bfloat16 on the CPU is 2 to 17 times slower than in float32 for heads of 32 or 64 channels
    and up to 256 tokens, which makes whole autocast runs slower than float32 ones.
    """
    dtype = v_BHTD.dtype
    if v_BHTD.device.type != "cpu":
        return F.scaled_dot_product_attention(
            q_BHTD.to(dtype), k_BHTD.to(dtype), v_BHTD, dropout_p=drop_fraction, is_causal=True
        )
    wide = torch.promote_types(dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD.to(wide), k_BHTD.to(wide), v_BHTD.to(wide), dropout_p=drop_fraction, is_causal=True
        )
    return y_BHTD.to(dtype)


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
