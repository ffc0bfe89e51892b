"""An encoder-decoder transformer: one sequence of tokens in, another one out (Vaswani et al. 2017).

Token 0 fills rows up to one length, on both sides; no real token has that number. Every real place gives the same numbers
however far its row was filled up and whatever stands in the other rows.

Shapes: B batch, S time of the source, T time of the target, C channels (width), H heads, D channels of a head, V vocabulary,
K hypotheses for one source.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from surefoot.models.dropout import Dropout
from surefoot.models.rotary import rotations
from surefoot.models.seq2seq_blocks import (
    MLP,
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    Positions,
    Rotation,
    SelfAttention,
    norm_of,
)

PADDING = 0

HeadLoss = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Seq2SeqShape:
    """The size of an encoder-decoder and what it is made of. `width` is a multiple of the `heads`.

    norm: where the norms stand: "pre", before each part, which trains without a long warm-up (Xiong et al. 2020,
    section 4: https://arxiv.org/abs/2002.04745), or "post", after it, as in Vaswani et al. 2017, section 3.1
    (https://arxiv.org/abs/1706.03762). norm_kind: "layer", or "rms", which takes no mean away and adds no bias (Zhang and
    Sennrich 2019, section 4: https://arxiv.org/abs/1910.07467).

    positions: "sinusoidal" (section 3.5 of Vaswani et al.; none to learn, so that places which few sentences reach are known
    too), "learned", or "rotary": each side's attention to itself turns its queries and keys (Su et al. 2021, section 3.2.2:
    https://arxiv.org/abs/2104.09864).

    activation: "relu2" is the square of ReLU (So et al. 2021, section 4.2: https://arxiv.org/abs/2109.08668). query_key_norm:
    RMS norms of each head's queries and keys (Henry et al. 2020, section 3: https://arxiv.org/abs/2010.04245). zero_start:
    what writes into the residual stream starts at zero, so that each block starts as identity (Goyal et al. 2017, section
    5.1: https://arxiv.org/abs/1706.02677); for norm "pre".

    >>> Seq2SeqShape(encoder_layers=3, decoder_layers=3, heads=4, width=256, hidden=1024, vocabulary=8000).parameters
    7578624
    >>> base = Seq2SeqShape(encoder_layers=6, decoder_layers=6, heads=8, width=512, hidden=2048, vocabulary=37000, norm="post")
    >>> base.parameters  # "65 x 10^6" in table 3 there
    63082496
    """

    encoder_layers: int
    decoder_layers: int
    heads: int
    width: int
    hidden: int  # units between the two layers of an MLP
    vocabulary: int  # of the target, and of the source where `source_vocabulary` is None
    source_vocabulary: int | None = None  # None: one vocabulary and one embedding for both sides
    context: int = 512  # the most places of either side
    dropout: float = 0.0  # fraction of units of the embeddings and of what each part adds
    attention_dropout: float = 0.0  # fraction of attention weights; slow on the CPU
    activation_dropout: float = 0.0  # fraction of units between the layers of an MLP
    norm: Literal["pre", "post"] = "pre"
    norm_kind: Literal["layer", "rms"] = "layer"
    query_key_norm: bool = False
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    activation: Literal["relu", "gelu", "relu2"] = "relu"
    zero_start: bool = False
    tied: bool = True  # the head's matrix is the target's embedding

    def __post_init__(self) -> None:
        sizes = (self.encoder_layers, self.decoder_layers, self.heads, self.width, self.hidden, self.context)
        source = self.vocabulary if self.source_vocabulary is None else self.source_vocabulary
        if min(*sizes, self.vocabulary, source) < 1:
            raise ValueError(f"every size must be 1 or more: {self}")
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} must be a multiple of heads = {self.heads}")
        if self.width % 2 and self.positions == "sinusoidal":
            raise ValueError(f"width = {self.width} must be even: sinusoidal positions come in pairs of channels")
        if self.width % (2 * self.heads) and self.positions == "rotary":
            raise ValueError(
                f"width = {self.width} must be a multiple of 2 x heads = {2 * self.heads}: rotary positions turn pairs of channels"
            )
        if self.zero_start and self.norm == "post":
            raise ValueError("zero_start is for norm = 'pre': with a norm after each sum no block starts as identity")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} = {getattr(self, name)} must be a fraction, at least 0 and below 1")

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        width = self.width
        attention = 4 * width**2 + 4 * width + (2 * width // self.heads if self.query_key_norm else 0)
        mlp = 2 * width * self.hidden + self.hidden + width
        norm = width if self.norm_kind == "rms" else 2 * width
        encoder = self.encoder_layers * (attention + mlp + 2 * norm)
        decoder = self.decoder_layers * (2 * attention + mlp + 3 * norm)
        ends = 2 * norm if self.norm == "pre" else 0
        places = 2 * self.context * width if self.positions == "learned" else 0
        tables = (self.source_vocabulary or 0) + (1 if self.tied else 2) * self.vocabulary
        return encoder + decoder + ends + places + tables * width


class Seq2Seq(nn.Module):
    """Source tokens (B, S) and target tokens (B, T), both of whole numbers, to logits (B, T, V) of the target token after each.

    Each row of the source needs one token that is not padding.

    >>> shape = Seq2SeqShape(encoder_layers=1, decoder_layers=1, heads=2, width=8, hidden=16, vocabulary=10)
    >>> Seq2Seq(shape)(torch.ones(3, 5, dtype=torch.long), torch.ones(3, 4, dtype=torch.long)).shape
    torch.Size([3, 4, 10])
    """

    cosines: Tensor  # (T, D), where positions are rotary
    sines: Tensor

    def __init__(self, shape: Seq2SeqShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        own = shape.source_vocabulary
        self.source_embedding = self.embedding if own is None else nn.Embedding(own, shape.width)
        rotary = shape.positions == "rotary"
        self.source_positions = None if rotary else Positions(shape)
        self.target_positions = None if rotary else Positions(shape)
        if rotary:
            cos_TD, sin_TD = rotations(shape.context, shape.width // shape.heads)
            self.register_buffer("cosines", cos_TD, persistent=False)
            self.register_buffer("sines", sin_TD, persistent=False)
        self.dropout = Dropout(shape.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(shape, layer) for layer in range(shape.decoder_layers))
        last = shape.norm == "pre"
        self.encoder_norm = norm_of(shape) if last else nn.Identity()
        self.decoder_norm = norm_of(shape) if last else nn.Identity()
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._initialise()

    def forward(self, source_BS: Tensor, target_BT: Tensor, *, loss: HeadLoss | None = None) -> Any:
        """Logits of the token after each place of the target.

        With `loss`, what that makes of the hidden states (B, T, C) and the head's matrix (V, C) instead: much of a small
        model's time goes into its head, and a loss need not compute it where rows are filled up.
        """
        memory_BSC, mask_B11S = self.encoded(source_BS)
        x_BTC = self.dropout(self.embedded(target_BT))
        rotation = self.rotation(0, target_BT.shape[1])
        for block in self.decoder:
            x_BTC = block(x_BTC, memory_BSC, mask_B11S, rotation)
        hidden_BTC = self.decoder_norm(x_BTC)
        return self.head(hidden_BTC) if loss is None else loss(hidden_BTC, self.head.weight)

    def encoded(self, source_BS: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder makes of the source (B, S, C), and where that has a meaning: (B, 1, 1, S), false at padding."""
        mask_B11S = (source_BS != PADDING)[:, None, None]
        x_BSC = self.source_embedding(source_BS) * math.sqrt(self.shape.width)
        if self.source_positions is not None:
            x_BSC = x_BSC + self.source_positions(0, source_BS.shape[1])
        x_BSC = self.dropout(x_BSC)
        rotation = self.rotation(0, source_BS.shape[1])
        for block in self.encoder:
            x_BSC = block(x_BSC, mask_B11S, rotation)
        return self.encoder_norm(x_BSC), mask_B11S

    def embedded(self, target_BT: Tensor, *, first: int = 0) -> Tensor:
        """Target tokens with their positions, from place `first` on; rotary ones are told in `rotation`."""
        x_BTC: Tensor = self.embedding(target_BT) * math.sqrt(self.shape.width)
        if self.target_positions is not None:
            x_BTC = x_BTC + self.target_positions(first, first + target_BT.shape[1])
        return x_BTC

    def rotation(self, first: int, end: int) -> Rotation | None:
        """Cosines and sines (T, D) of the places from `first` up to `end`; None where positions are not rotary."""
        if self.shape.positions != "rotary":
            return None
        if end > self.shape.context:
            raise ValueError(f"{end} tokens are more than the model's context of {self.shape.context}")
        return self.cosines[first:end], self.sines[first:end]

    @torch.no_grad()
    def _initialise(self) -> None:
        """Matrices by Glorot and Bengio 2010, equation 16, each of several in one tensor by itself; biases 0.

        Embeddings have a deviation of width**-0.5: multiplied by its root they are as large as positions (Vaswani et al.
        2017, section 3.4), and as a head they give logits of unit size. Where blocks start as identity, a tied head is handed
        a token's own embedding, whose logit would be sqrt(width): a gain of width**-0.5 of the last norm makes it 1.
        """
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.shape.width**-0.5)
            elif isinstance(module, nn.Linear) and module is not self.head:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, SelfAttention | CrossAttention):
                stacked = module.qkv if isinstance(module, SelfAttention) else module.key_value
                for matrix in torch.split(stacked.weight, self.shape.width):
                    nn.init.xavier_uniform_(matrix)
        nn.init.normal_(self.head.weight, std=self.shape.width**-0.5)
        if self.shape.zero_start:
            for module in self.modules():
                if isinstance(module, SelfAttention | CrossAttention):
                    nn.init.zeros_(module.out.weight)
                elif isinstance(module, MLP):
                    nn.init.zeros_(module.down.weight)
            if self.shape.tied:
                nn.init.constant_(dict(self.decoder_norm.named_parameters())["weight"], self.shape.width**-0.5)
        if self.shape.tied:
            self.head.weight = self.embedding.weight
