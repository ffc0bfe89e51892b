"""The configuration, blocks, attention, residual sums and MLPs of an encoder-decoder transformer.

Shapes: B batch, S time of the source, T time of the target, C channels (width), H heads, D channels
of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from surefoot.models.attention import Cache, causal_attention, masked_attention, rotate
from surefoot.models.layers import Dropout, RMSNorm, check_shape, relu2, rotary_problem


@dataclass(frozen=True)
class Seq2SeqConfig:
    """The sizes and parts of an encoder-decoder. `width` is a multiple of `heads`, or of 2 x
    `heads` with rotary positions.

    norm_placement: "pre" normalizes before each part, and trains without a long warm-up (Xiong et
    al. 2020, section 4: https://arxiv.org/abs/2002.04745). "post" normalizes after each part
    (Vaswani 2017, section 3.1: https://arxiv.org/abs/1706.03762). norm: "rms" subtracts no mean and
    adds no bias (Zhang and Sennrich 2019, section 4: https://arxiv.org/abs/1910.07467). positions:
    "sinusoidal" adds sines and cosines (Vaswani 2017, section 3.5). "rotary" rotates queries and
    keys of self-attention (Su et al. 2021, section 3.2.2: https://arxiv.org/abs/2104.09864).
    activation: "relu2" is the square of ReLU (So et al. 2021, section 4.2:
    https://arxiv.org/abs/2109.08668). qk_norm: RMS norms of each head's queries and keys (Henry et
    al. 2020, section 3: https://arxiv.org/abs/2010.04245). zero_init_residual: output layers of
    residual branches start at zero, so that blocks start as the identity (Goyal et al. 2017,
    section 5.1: https://arxiv.org/abs/1706.02677). `zero_init_residual` needs norm_placement "pre".

    >>> Seq2SeqConfig(
    ...     encoder_layers=3, decoder_layers=3, heads=4, width=256, mlp_width=1024, vocab_size=8000
    ... ).parameters
    7578624
    >>> sizes = {"heads": 8, "width": 512, "mlp_width": 2048, "vocab_size": 37000}
    >>> base = Seq2SeqConfig(encoder_layers=6, decoder_layers=6, **sizes, norm_placement="post")
    >>> base.parameters  # "65 x 10^6" in table 3 there
    63082496
    """

    encoder_layers: int
    decoder_layers: int
    heads: int
    width: int
    mlp_width: int  # hidden units of an MLP
    vocab_size: int  # of the target, and of the source if `source_vocab_size` is None
    source_vocab_size: int | None = None  # None: one vocabulary and one embedding for both sides
    context: int = 512  # maximum length of either side in tokens
    dropout: float = 0.0  # fraction of units of the embeddings and of each part's output
    attention_dropout: float = 0.0  # fraction of attention weights; slow on the CPU
    activation_dropout: float = 0.0  # fraction of the hidden units of an MLP
    norm_placement: Literal["pre", "post"] = "pre"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    activation: Literal["relu", "gelu", "relu2"] = "relu"
    zero_init_residual: bool = False
    tie_embeddings: bool = True  # the head shares the weight of the target's embedding

    def __post_init__(self) -> None:
        sizes = [
            self.encoder_layers,
            self.decoder_layers,
            self.heads,
            self.width,
            self.mlp_width,
            self.context,
            self.vocab_size,
        ]
        if self.source_vocab_size is not None:
            sizes.append(self.source_vocab_size)
        check_shape((min(sizes) >= 1, f"every size must be 1 or more: {self}"))
        width = self.width
        heads = self.heads
        positions = self.positions
        check_shape(
            (width % heads == 0, f"width = {width} must be a multiple of heads = {heads}"),
            (
                width % 2 == 0 or positions != "sinusoidal",
                f"width = {width} must be even: sinusoidal positions use pairs of channels",
            ),
            (width % (2 * heads) == 0 or positions != "rotary", rotary_problem(width, heads)),
            (
                not self.zero_init_residual or self.norm_placement == "pre",
                "zero_init_residual needs norm_placement = 'pre': with a norm after each sum, no block starts as the identity",
            ),
        )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            fraction = getattr(self, name)
            problem = f"{name} = {fraction} must be a fraction, at least 0 and below 1"
            check_shape((0.0 <= fraction < 1.0, problem))

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        width = self.width
        attention = 4 * width**2 + 4 * width
        if self.qk_norm:
            attention += 2 * width // self.heads
        mlp = 2 * width * self.mlp_width + self.mlp_width + width
        norm = width if self.norm == "rms" else 2 * width
        encoder = self.encoder_layers * (attention + mlp + 2 * norm)
        decoder = self.decoder_layers * (2 * attention + mlp + 3 * norm)
        ends = 2 * norm if self.norm_placement == "pre" else 0
        places = 2 * self.context * width if self.positions == "learned" else 0
        target_tables = 1 if self.tie_embeddings else 2
        rows = (self.source_vocab_size or 0) + target_tables * self.vocab_size
        return encoder + decoder + ends + places + rows * width


Rotation = tuple[Tensor, Tensor]  # cosines and sines (T, D) of rotary positions
KeysValues = tuple[Tensor, Tensor]  # of the source (B, H, S, D)


class EncoderBlock(nn.Module):
    """An encoder layer: self-attention to all unpadded source positions, then an MLP."""

    def __init__(self, shape: Seq2SeqConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(shape)
        self.attention_sum = Sum(shape)
        self.mlp = MLP(shape)
        self.mlp_sum = Sum(shape)

    def forward(self, x_BSC: Tensor, mask_B11S: Tensor, rotation: Rotation | None = None) -> Tensor:
        x_BSC = self.attention_sum(x_BSC, lambda y_BSC: self.attention(y_BSC, mask_B11S, rotation))
        return self.mlp_sum(x_BSC, self.mlp)


class DecoderBlock(nn.Module):
    """A decoder layer: causal self-attention, cross-attention to the source, then an MLP."""

    def __init__(self, shape: Seq2SeqConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention = SelfAttention(shape, layer)
        self.attention_sum = Sum(shape)
        self.cross = CrossAttention(shape)
        self.cross_sum = Sum(shape)
        self.mlp = MLP(shape)
        self.mlp_sum = Sum(shape)

    def forward(
        self,
        x_BTC: Tensor,
        memory: Tensor | KeysValues,
        mask_B11S: Tensor,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run the block; `memory` is the encoded source (B, S, C), or its keys and values. With a
        cache, T counts hypotheses.
        """
        x_BTC = self.attention_sum(
            x_BTC, lambda y_BTC: self.attention(y_BTC, None, rotation, cache)
        )
        keys_values = self.cross.keys_values(memory) if isinstance(memory, Tensor) else memory
        x_BTC = self.cross_sum(x_BTC, lambda y_BTC: self.cross(y_BTC, *keys_values, mask_B11S))
        return self.mlp_sum(x_BTC, self.mlp)


class Sum(nn.Module):
    """A residual sum of the input and a part's output, with a norm before the part or after the
    sum.
    """

    def __init__(self, shape: Seq2SeqConfig) -> None:
        super().__init__()
        self.pre = shape.norm_placement == "pre"
        self.norm = norm_of(shape)
        self.dropout = Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x_BTC + self.dropout(part(self.norm(x_BTC)))
        return self.norm(x_BTC + self.dropout(part(x_BTC)))


class SelfAttention(nn.Module):
    """Self-attention."""

    def __init__(self, shape: Seq2SeqConfig, layer: int = 0) -> None:
        super().__init__()
        self.heads = shape.heads
        self.drop_fraction = shape.attention_dropout
        self.layer = layer
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.query_norm = channel_norm(shape)
        self.key_norm = channel_norm(shape)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(
        self,
        x_BTC: Tensor,
        mask_B11S: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attend where the mask is true, or causally without a mask. With a cache, T counts
        hypotheses of one position each.
        """
        shape = x_BTC.shape
        if cache is not None:
            x_BTC = x_BTC.flatten(0, 1)[:, None]
        q_BTC, k_BTC, v_BTC = self.qkv(x_BTC).chunk(3, dim=-1)
        q_BHTD = _normed(_by_head(q_BTC, self.heads), self.query_norm)
        k_BHTD = _normed(_by_head(k_BTC, self.heads), self.key_norm)
        v_BHTD = _by_head(v_BTC, self.heads)
        if rotation is not None:
            q_BHTD = rotate(q_BHTD, *rotation)
            k_BHTD = rotate(k_BHTD, *rotation)
        if cache is not None:
            k_BHTD, v_BHTD = cache.extended(self.layer, k_BHTD, v_BHTD)
        drop_fraction = self.drop_fraction if self.training else 0.0
        if mask_B11S is None:
            y_BHTD = causal_attention(q_BHTD, k_BHTD, v_BHTD, drop_fraction=drop_fraction)
        else:
            y_BHTD = masked_attention(
                q_BHTD, k_BHTD, v_BHTD, mask=mask_B11S, drop_fraction=drop_fraction
            )
        return self.out(y_BHTD.transpose(1, 2).reshape(shape))


class CrossAttention(nn.Module):
    """Cross-attention from target positions to source positions."""

    def __init__(self, shape: Seq2SeqConfig) -> None:
        super().__init__()
        self.heads = shape.heads
        self.drop_fraction = shape.attention_dropout
        self.query = nn.Linear(shape.width, shape.width)
        self.key_value = nn.Linear(shape.width, 2 * shape.width)
        self.query_norm = channel_norm(shape)
        self.key_norm = channel_norm(shape)
        self.out = nn.Linear(shape.width, shape.width)

    def keys_values(self, memory_BSC: Tensor) -> KeysValues:
        """Return the keys and values (B, H, S, D) of the encoded source."""
        k_BSC, v_BSC = self.key_value(memory_BSC).chunk(2, dim=-1)
        k_BHSD = _normed(_by_head(k_BSC, self.heads), self.key_norm)
        return k_BHSD, _by_head(v_BSC, self.heads)

    def forward(self, x_BTC: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask_B11S: Tensor) -> Tensor:
        """Attend from each target position to the source positions whose mask is True."""
        q_BHTD = _normed(_by_head(self.query(x_BTC), self.heads), self.query_norm)
        drop_fraction = self.drop_fraction if self.training else 0.0
        y_BHTD = masked_attention(
            q_BHTD, k_BHSD, v_BHSD, mask=mask_B11S, drop_fraction=drop_fraction
        )
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """An MLP on each position: up projection, activation, dropout, down projection."""

    def __init__(self, shape: Seq2SeqConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, shape.mlp_width)
        self.dropout = Dropout(shape.activation_dropout)
        self.down = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x_BTC))))


def norm_of(shape: Seq2SeqConfig) -> nn.LayerNorm | RMSNorm:
    """Return the normalization of a layer's channels."""
    return RMSNorm(shape.width) if shape.norm == "rms" else nn.LayerNorm(shape.width, eps=1e-5)


def channel_norm(shape: Seq2SeqConfig) -> RMSNorm | None:
    """Return the normalization of queries and keys, or None if the model has none."""
    return RMSNorm(shape.width // shape.heads) if shape.qk_norm else None


def _normed(x_BHTD: Tensor, norm: RMSNorm | None) -> Tensor:
    # the gain may be wider than autocast's dtype
    if norm is None:
        return x_BHTD
    return norm(x_BHTD).to(x_BHTD.dtype)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "relu2": relu2,
}


def _by_head(x_BTC: Tensor, heads: int) -> Tensor:
    return x_BTC.view(*x_BTC.shape[:2], heads, -1).transpose(1, 2)
