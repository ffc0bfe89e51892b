"""A decoder-only transformer in two families: `modern` (the default) and `gpt2`.

modern: rotary positions, RMS norms, normalised queries and keys, no biases, squared ReLU or SwiGLU; where asked, an embedding
that also knows the tokens before.
gpt2: learned positions, layer norms, biases, GELU, a head that is the embedding (Radford et al. 2019, section 2.3).

Shapes: B batch, T time (tokens), C channels (width), H heads, D channels of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.activation import relu2
from surefoot.models.attention import Cache, causal_attention
from surefoot.models.dropout import Dropout
from surefoot.models.ngrams import Ngrams, table_sizes
from surefoot.models.rms_norm import RMSNorm
from surefoot.models.rotary import normed_and_rotated, rotations

LAYER_EPSILON = 1e-5  # of GPT-2's layer norms

HeadLoss = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class GPTShape:
    """The size and family of a GPT. `width` is a multiple of the `heads`, of twice the heads where positions are rotary.

    >>> GPTShape(layers=4, heads=4, width=128, context=64, vocabulary=65).parameters
    803200
    >>> GPTShape(layers=12, heads=12, width=768, context=1024, vocabulary=50257, family="gpt2", tied=True).parameters
    124439808
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dropout: float = 0.0  # fraction of units, of attention weights too
    family: Literal["modern", "gpt2"] = "modern"
    activation: Literal["relu2", "swiglu", "gelu"] | None = None  # None: gelu for gpt2, else relu2
    tied: bool = False  # the head's matrix is the embedding's
    smear: bool = False  # a learned share of the embedding of the token before
    ngrams: int = 1  # at most so many tokens have a vector together, from a table; 1: each has its embedding alone
    ngram_rows: int = 32768  # of each table, at most

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.context, self.vocabulary) < 1:
            raise ValueError(f"every size must be 1 or more: {self}")
        if self.family == "modern" and self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 x heads = {2 * self.heads}: "
                "rotary positions turn pairs of channels"
            )
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        foreign = self._foreign_to_gpt2 if self.family == "gpt2" else []
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: not in a gpt2, which has activation = 'gelu', smear = False, ngrams = 1"
            )
        if not 1 <= self.ngrams <= 4:
            raise ValueError(f"ngrams = {self.ngrams} must be 1 to 4")
        if self.ngram_rows < 1:
            raise ValueError(f"ngram_rows = {self.ngram_rows} must be 1 or more")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout} must be a fraction, at least 0 and below 1")

    @property
    def hidden(self) -> int:
        """Units between the two layers of an MLP: four widths; with SwiGLU's third matrix 8/3, in eights of units.

        Shazeer 2020, section 2 (https://arxiv.org/abs/2002.05202): two thirds, so that the number of parameters stays.
        """
        return 4 * self.width if self.activation != "swiglu" else 8 * math.ceil(self.width / 3)

    @property
    def looks_back(self) -> int:
        """How many earlier tokens the embedding of one depends on."""
        return max(int(self.smear), self.ngrams - 1)

    @property
    def _foreign_to_gpt2(self) -> list[str]:
        asked = {"activation": self.activation, "smear": self.smear, "ngrams": self.ngrams}
        own: dict[str, tuple[object, ...]] = {"activation": (None, "gelu"), "smear": (False,), "ngrams": (1,)}
        return [f"{name} = {value!r}" for name, value in asked.items() if value not in own[name]]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        width, hidden = self.width, self.hidden
        matrices = 4 * width**2 + (3 if self.activation == "swiglu" else 2) * width * hidden
        if self.family == "gpt2":
            block = matrices + (4 * width + hidden + width) + 4 * width  # biases; gains and biases of two norms
            outside = self.context * width + 2 * width
        else:
            sizes = table_sizes(longest=self.ngrams, rows=self.ngram_rows, vocabulary=self.vocabulary)
            block, outside = matrices, width * (1 + self.smear + sum(sizes))
        return (1 if self.tied else 2) * self.vocabulary * width + self.layers * block + outside


class GPT(nn.Module):
    """Tokens (B, T) of whole numbers, T up to `shape.context`, to logits (B, T, V) of the token after each.

    >>> model = GPT(GPTShape(layers=1, heads=2, width=8, context=16, vocabulary=10))
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 10])
    """

    cosines: Tensor  # (context, D), where positions are rotary
    sines: Tensor

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.family == "gpt2" else None
        self.smear = nn.Parameter(torch.zeros(shape.width)) if shape.smear else None
        self.ngrams = None
        if shape.ngrams > 1:
            sizes = {"vocabulary": shape.vocabulary, "width": shape.width}
            self.ngrams = Ngrams(longest=shape.ngrams, rows=shape.ngram_rows, **sizes)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if self.positions is None:
            cos_TD, sin_TD = rotations(shape.context, shape.width // shape.heads)
            self.register_buffer("cosines", cos_TD, persistent=False)
            self.register_buffer("sines", sin_TD, persistent=False)
        if shape.family == "gpt2":
            self._initialise_gpt2()
        else:
            self._initialise_modern()

    def forward(self, tokens_BT: Tensor, cache: Cache | None = None, *, loss: HeadLoss | None = None) -> Any:
        """Logits of the next token at every place; with a cache the tokens go on from those that it holds.

        With `loss`, what that makes of the hidden states (B, T, C) and the head's matrix (V, C) instead: a loss need not hold
        all logits at once, and everything still goes through `forward`, which is what wrappers of a model wrap.
        """
        hidden_BTC = self.hidden(tokens_BT, cache)
        return self.head(hidden_BTC) if loss is None else loss(hidden_BTC, self.head.weight)

    def hidden(self, tokens_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head turns into logits, (B, T, C)."""
        before = 0 if cache is None else cache.length
        end = before + tokens_BT.shape[1]
        if end > self.shape.context:
            raise ValueError(f"{end} tokens are more than the model's context of {self.shape.context}")
        x_BTC = self._embedded(tokens_BT, cache)
        rotation = None
        if self.positions is None:
            rotation = self.cosines[before:end], self.sines[before:end]
        else:
            x_BTC = x_BTC + self.positions.weight[before:end]
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation, cache)
        normed_BTC: Tensor = self.norm(x_BTC)
        return normed_BTC

    def _embedded(self, tokens_BT: Tensor, cache: Cache | None) -> Tensor:
        """A vector for each token, which may depend on those before it; a cache knows them where they are not given."""
        time = tokens_BT.shape[1]
        if cache is not None:
            tokens_BT = cache.with_earlier(tokens_BT, keep=self.shape.looks_back)
        x_BTC: Tensor = self.embedding(tokens_BT)
        alone_BTC = x_BTC
        if self.smear is not None:
            x_BTC = x_BTC + self.smear * F.pad(alone_BTC[:, :-1], (0, 0, 1, 0))
        if self.ngrams is not None:
            x_BTC = x_BTC + self.ngrams(tokens_BT)
        return x_BTC[:, -time:]

    def new_cache(self, batch: int) -> Cache:
        """An empty cache for `batch` rows, in the type and on the device of the weights."""
        weight = self.embedding.weight
        shape = self.shape
        size = (shape.layers, batch, shape.heads, shape.context, shape.width // shape.heads)
        return Cache(size, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def _initialise_modern(self) -> None:
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
            elif isinstance(module, Ngrams):
                for vectors_NC in module.tables.parameters():
                    nn.init.zeros_(vectors_NC)
        if not self.shape.tied:
            nn.init.normal_(self.embedding.weight)
            nn.init.zeros_(self.head.weight)
            return
        # Blocks that start as identity hand the token's own embedding to the head: with a gain of 1 its own logit would be
        # 0.02 x width, and the first loss above ln V. This gain makes it 1.
        nn.init.normal_(self.embedding.weight, std=0.02)
        assert self.norm.weight is not None
        nn.init.constant_(self.norm.weight, min(1.0, 1.0 / (0.02 * self.shape.width)))
        self.head.weight = self.embedding.weight

    @torch.no_grad()
    def _initialise_gpt2(self) -> None:
        """Deviation 0.02 throughout, biases 0; what writes into the residual stream is smaller by the root of their number.

        Radford et al. 2019, section 2.3, and the code published with it.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for matrix in (block.attention.out, block.mlp.down):
                nn.init.normal_(matrix.weight, std=0.02 / math.sqrt(2 * self.shape.layers))
        if self.shape.tied:
            self.head.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then two layers at each place, both added to the residual stream."""

    def __init__(self, shape: GPTShape, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = _norm(shape, gains=False)
        self.attention = Attention(shape, layer)
        self.mlp_norm = _norm(shape, gains=False)
        self.mlp = MLP(shape)

    def forward(
        self, x_BTC: Tensor, rotation: tuple[Tensor, Tensor] | None = None, cache: Cache | None = None
    ) -> Tensor:
        """The residual stream after this block; `rotation` are the cosines and sines (T, D) of rotary positions."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotation, cache)
        y_BTC: Tensor = x_BTC + self.mlp(self.mlp_norm(x_BTC))
        return y_BTC


class Attention(nn.Module):
    """Causal self-attention; in the modern family with normalised queries and keys and rotary positions."""

    def __init__(self, shape: GPTShape, layer: int = 0) -> None:
        super().__init__()
        self.heads, self.drop_fraction, self.layer = shape.heads, shape.dropout, layer
        gpt2 = shape.family == "gpt2"
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=gpt2)
        self.out = nn.Linear(shape.width, shape.width, bias=gpt2)
        self.dropout = Dropout(shape.dropout)

    def forward(
        self, x_BTC: Tensor, rotation: tuple[Tensor, Tensor] | None = None, cache: Cache | None = None
    ) -> Tensor:
        """What each place gathers from itself and the places before it."""
        batch, time, width = x_BTC.shape
        parts_BTHD = self.qkv(x_BTC).view(batch, time, 3 * self.heads, width // self.heads)
        if rotation is None:
            q_BHTD, k_BHTD, v_BHTD = parts_BTHD.transpose(1, 2).chunk(3, dim=1)
        else:
            qk_BTHD, v_BTHD = parts_BTHD.split([2 * self.heads, self.heads], dim=2)
            q_BHTD, k_BHTD = normed_and_rotated(qk_BTHD, *rotation).chunk(2, dim=1)
            v_BHTD = v_BTHD.transpose(1, 2)
        if cache is not None:
            k_BHTD, v_BHTD = cache.extended(self.layer, k_BHTD, v_BHTD)
        drop_fraction = self.drop_fraction if self.training else 0.0
        y_BHTD = causal_attention(q_BHTD, k_BHTD, v_BHTD, drop_fraction=drop_fraction)
        y_BTC: Tensor = self.dropout(self.out(y_BHTD.transpose(1, 2).reshape(batch, time, width)))
        return y_BTC


class MLP(nn.Module):
    """Up, a nonlinearity, and down, each place by itself.

    SwiGLU: Shazeer 2020, equation 6 (https://arxiv.org/abs/2002.05202); its gate and its values come from one matrix. GELU in
    the approximation by tanh, as GPT-2 has it: Hendrycks and Gimpel 2016, section 2 (https://arxiv.org/abs/1606.08415).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        gpt2 = shape.family == "gpt2"
        self.activation = shape.activation or ("gelu" if gpt2 else "relu2")
        wide = 2 * shape.hidden if self.activation == "swiglu" else shape.hidden
        self.up = nn.Linear(shape.width, wide, bias=gpt2)
        self.down = nn.Linear(shape.hidden, shape.width, bias=gpt2)
        self.dropout = Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Each place by itself."""
        match self.activation:
            case "swiglu":
                gate, value = self.up(x_BTC).chunk(2, dim=-1)
                inner = F.silu(gate) * value
            case "gelu":
                inner = F.gelu(self.up(x_BTC), approximate="tanh")
            case _:
                inner = relu2(self.up(x_BTC))
        y_BTC: Tensor = self.dropout(self.down(inner))
        return y_BTC


def _norm(shape: GPTShape, *, gains: bool = True) -> nn.LayerNorm | RMSNorm:
    if shape.family == "gpt2":
        return nn.LayerNorm(shape.width, eps=LAYER_EPSILON)
    return RMSNorm(shape.width, gains=gains)
