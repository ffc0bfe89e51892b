"""The parts of a GPT: configuration, attention, MLP, and n-gram embeddings.

Shapes: B batch, T time (tokens), C channels (width), H heads, D channels of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from surefoot.models.attention import Cache, causal_attention, norm_and_rotate, rotate_only
from surefoot.models.documents import is_of_document
from surefoot.models.layers import (
    EPSILON,
    Dropout,
    RMSNorm,
    check_shape,
    relu2,
    rotary_problem,
    swiglu,
)

# 2^32 over the golden ratio: Knuth 1998, The Art of Computer Programming 3, section 6.4
_FACTOR = 0x9E3779B1


class Ngrams(nn.Module):
    """The sum of embeddings of the last 2, 3, ... `longest` tokens. All embeddings start at zero.

    Each length has a table of at most `rows` rows. If a length has more n-grams than rows, hashed
    n-grams share rows (Svenstrup et al. 2017, section 3: https://arxiv.org/abs/1709.03933). The
    first token is preceded by a token outside the vocabulary.

    >>> ngrams = Ngrams(longest=2, rows=30, vocab_size=4, width=8)
    >>> ngrams.rows(torch.tensor([[3, 1, 2]]), length=2).tolist()
    [[19, 8, 11]]
    """

    def __init__(self, *, longest: int, rows: int, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.sizes = table_sizes(longest=longest, rows=rows, vocab_size=vocab_size)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in self.sizes)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the sum (B, T, C) of the embeddings of all n-grams that end at each position. With
        the documents of the tokens, no n-gram reaches into another document.
        """
        vectors_BTC = [
            table(self.rows(tokens_BT, length=length, documents_BT=documents_BT))
            for length, table in enumerate(self.tables, start=2)
        ]
        if len(vectors_BTC) == 1:
            return vectors_BTC[0]
        return torch.stack(vectors_BTC).sum(dim=0)

    def rows(self, tokens_BT: Tensor, *, length: int, documents_BT: Tensor | None = None) -> Tensor:
        """Return the table row (B, T) of the n-gram of this length that ends at each position."""
        size = self.sizes[length - 2]
        symbols = self.vocab_size + 1
        keys_BT = tokens_BT.long()  # 32-bit keys would overflow and select other rows
        for back in range(1, length):
            earlier_BT = torch.full_like(tokens_BT, self.vocab_size)
            earlier_BT[:, back:] = tokens_BT[:, :-back]
            if documents_BT is not None:
                is_same_BT = is_of_document(documents_BT, back=back)
                earlier_BT = torch.where(is_same_BT, earlier_BT, self.vocab_size)
            keys_BT = keys_BT * symbols + earlier_BT
        if size == symbols**length:
            return keys_BT  # each n-gram has a row of its own
        return (keys_BT * _FACTOR >> 16) % size


def table_sizes(*, longest: int, rows: int, vocab_size: int) -> list[int]:
    """Return the number of rows of the table of each n-gram length, starting with 2 tokens.

    >>> table_sizes(longest=3, rows=32768, vocab_size=65)
    [4356, 32768]
    """
    return [min(rows, (vocab_size + 1) ** length) for length in range(2, longest + 1)]


LAYER_EPSILON = 1e-5  # of GPT-2's layer norms


@dataclass(frozen=True)
class Family:
    """What the GPTs of a family have in common."""

    positions: Literal["rotary", "learned"]
    norm: Literal["rms", "layer"]
    block_gains: bool  # the norms in blocks have learned gains
    qk_norm: bool  # queries and keys are normalized
    biases: bool
    activations: tuple[str, ...]  # the first is the default
    settings: tuple[str, ...] = ()  # settings of a `GPTConfig` that other families may lack


FAMILIES = {
    "modern": Family(
        positions="rotary",
        norm="rms",
        block_gains=False,
        qk_norm=True,
        biases=False,
        activations=("relu2", "swiglu", "gelu"),
        settings=("smear", "ngrams"),
    ),
    # Radford et al. 2019, section 2.3
    "gpt2": Family(
        positions="learned",
        norm="layer",
        block_gains=True,
        qk_norm=False,
        biases=True,
        activations=("gelu",),
    ),
    # Touvron et al. 2023, section 2.2 (https://arxiv.org/abs/2302.13971); grouped queries:
    # Ainslie et al. 2023 (https://arxiv.org/abs/2305.13245)
    "llama": Family(
        positions="rotary",
        norm="rms",
        block_gains=True,
        qk_norm=False,
        biases=False,
        activations=("swiglu",),
        settings=("kv_heads", "mlp_width", "rope_theta", "norm_eps"),
    ),
}


@dataclass(frozen=True)
class GPTConfig:
    """The size and family of a GPT. `width` is a multiple of `heads`, or of 2 x `heads` in families
    with rotary positions (modern, llama).

    >>> GPTConfig(layers=4, heads=4, width=128, context=64, vocab_size=65).parameters
    803200
    >>> GPTConfig(
    ...     layers=12,
    ...     heads=12,
    ...     width=768,
    ...     context=1024,
    ...     vocab_size=50257,
    ...     family="gpt2",
    ...     tie_embeddings=True,
    ... ).parameters
    124439808
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab_size: int
    dropout: float = 0.0  # fraction of units and of attention weights
    family: Literal["modern", "gpt2", "llama"] = "modern"
    # None: relu2 for modern, gelu for gpt2, swiglu for llama
    activation: Literal["relu2", "swiglu", "gelu"] | None = None
    tie_embeddings: bool = False  # the head shares the embedding's weight
    # number of previous tokens (True: 1); a learned fraction of their embeddings is added
    smear: bool | int = False
    ngrams: int = 1  # length of the longest n-gram with an embedding; 1: single tokens only
    ngram_buckets: int = 32768  # maximum rows of each n-gram table
    kv_heads: int | None = None  # heads of keys and values; each serves as many heads of queries
    mlp_width: int | None = None  # hidden units of an MLP
    rope_theta: float = 10_000.0  # base of rotary positions
    norm_eps: float = EPSILON  # added to the mean square in RMS norms

    def __post_init__(self) -> None:
        names = ", ".join(FAMILIES)
        check_shape((self.family in FAMILIES, f"family = {self.family!r} is not one of {names}"))
        sizes = [self.layers, self.heads, self.width, self.context, self.vocab_size]
        sizes += [self.key_heads, self.hidden]
        check_shape((min(sizes) >= 1, f"every size must be 1 or more: {self}"))
        foreign = self._settings_of_other_families()
        values = {name: getattr(self, name) for name in foreign}
        check_shape(
            (
                self.parts.positions != "rotary" or self.width % (2 * self.heads) == 0,
                rotary_problem(self.width, self.heads),
            ),
            (
                self.width % self.heads == 0,
                f"width = {self.width} must be a multiple of heads = {self.heads}",
            ),
            (
                not foreign,
                f"{_listed(values)}: family = {self.family!r} has only {_listed(foreign)}",
            ),
            (
                self.heads % self.key_heads == 0,
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}",
            ),
            (self.rope_theta > 0, f"rope_theta = {self.rope_theta} must be above 0"),
            (self.norm_eps > 0, f"norm_eps = {self.norm_eps} must be above 0"),
            (self.smear >= 0, f"smear = {self.smear} must be a number of tokens, 0 or more"),
            (1 <= self.ngrams <= 4, f"ngrams = {self.ngrams} must be from 1 to 4"),
            (self.ngram_buckets >= 1, f"ngram_buckets = {self.ngram_buckets} must be 1 or more"),
            (
                0.0 <= self.dropout < 1.0,
                f"dropout = {self.dropout} must be a fraction, at least 0 and below 1",
            ),
        )

    def _settings_of_other_families(self) -> dict[str, object]:
        """Return what this family has instead of each setting that only others have."""
        foreign: dict[str, object] = {}
        if self.mlp_activation not in self.parts.activations:
            foreign["activation"] = self.parts.activations[0]
        for family in FAMILIES.values():
            for name in family.settings:
                default = type(self).__dataclass_fields__[name].default
                if name not in self.parts.settings and getattr(self, name) != default:
                    foreign[name] = default
        return foreign

    def to_dict(self) -> dict[str, Any]:
        """Return the settings; those of the llama family only if they differ from their defaults,
        so that other families are described as before there was llama.
        """
        described = asdict(self)
        for name in FAMILIES["llama"].settings:
            if described[name] == type(self).__dataclass_fields__[name].default:
                del described[name]
        return described

    @property
    def parts(self) -> Family:
        """What all models of the family have in common."""
        return FAMILIES[self.family]

    @property
    def mlp_activation(self) -> str:
        """The activation inside an MLP."""
        return self.activation or self.parts.activations[0]

    @property
    def key_heads(self) -> int:
        """The number of heads of keys, and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """The hidden units of an MLP: `mlp_width`, or 4 x width, or 8/3 x width with SwiGLU's third
        matrix (Shazeer 2020, section 2).
        """
        if self.mlp_width is not None:
            return self.mlp_width
        if self.mlp_activation == "swiglu":
            return 8 * math.ceil(self.width / 3)
        return 4 * self.width

    @property
    def looks_back(self) -> int:
        """The number of earlier tokens that a token's embedding depends on."""
        return max(int(self.smear), self.ngrams - 1)

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        width = self.width
        hidden = self.hidden
        mlp_matrices = 3 if self.mlp_activation == "swiglu" else 2
        key_width = width // self.heads * self.key_heads
        block = 2 * width**2 + 2 * width * key_width + mlp_matrices * width * hidden
        sizes = table_sizes(
            longest=self.ngrams, rows=self.ngram_buckets, vocab_size=self.vocab_size
        )
        outside = width * (1 + self.smear + sum(sizes))  # the last norm has gains
        if self.parts.block_gains:
            block += 2 * width
        if self.parts.biases:
            block += 4 * width + hidden + width
        if self.parts.norm == "layer":  # biases of norms
            block += 2 * width
            outside += width
        if self.parts.positions == "learned":
            outside += self.context * width
        embeddings = 1 if self.tie_embeddings else 2
        return embeddings * self.vocab_size * width + self.layers * block + outside


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in settings.items())


class Block(nn.Module):
    """Attention, then an MLP, both added to the residual stream."""

    def __init__(self, shape: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = norm(shape, gains=shape.parts.block_gains)
        self.attention = Attention(shape, layer)
        self.mlp_norm = norm(shape, gains=shape.parts.block_gains)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_BTC: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        document_mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        """Return the residual stream after this block; `rotation` holds the cosines and sines (T,
        D) of rotary positions, or (B, 1, T, D).
        """
        inner_BTC = self.attention_norm(x_BTC)
        x_BTC = x_BTC + self.attention(inner_BTC, rotation, cache, document_mask)
        return x_BTC + self.mlp(self.mlp_norm(x_BTC))


class Attention(nn.Module):
    """Causal self-attention. The modern family normalizes queries and keys and rotates them by
    their positions; llama rotates them, and several heads of queries may share one of keys and
    values.
    """

    def __init__(self, shape: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.heads = shape.heads
        self.key_heads = shape.key_heads
        self.rotated = norm_and_rotate if shape.parts.qk_norm else rotate_only
        self.drop_fraction = shape.dropout
        self.layer = layer
        has_bias = shape.parts.biases
        qkv_width = shape.width // shape.heads * (self.heads + 2 * self.key_heads)
        self.qkv = nn.Linear(shape.width, qkv_width, bias=has_bias)
        self.out = nn.Linear(shape.width, shape.width, bias=has_bias)
        self.dropout = Dropout(shape.dropout)

    def forward(
        self,
        x_BTC: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        document_mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        """Return causal self-attention of x_BTC, in its shape. With `cache`, x_BTC continues the
        cached tokens. A `document_mask` keeps the documents of a window apart.
        """
        batch, time, width = x_BTC.shape
        heads = self.heads
        key_heads = self.key_heads
        parts_BTHD = self.qkv(x_BTC).view(batch, time, heads + 2 * key_heads, width // heads)
        if rotation is None:
            by_head_BHTD = parts_BTHD.transpose(1, 2)
            q_BHTD, k_BHTD, v_BHTD = by_head_BHTD.split([heads, key_heads, key_heads], dim=1)
        else:
            qk_BTHD, v_BTHD = parts_BTHD.split([heads + key_heads, key_heads], dim=2)
            qk_BHTD = self.rotated(qk_BTHD, *rotation)
            q_BHTD, k_BHTD = torch.split(qk_BHTD, [heads, key_heads], dim=1)
            v_BHTD = v_BTHD.transpose(1, 2)
        if cache is not None:
            k_BHTD, v_BHTD = cache.extended(self.layer, k_BHTD, v_BHTD)
        if key_heads < heads:
            k_BHTD = k_BHTD.repeat_interleave(heads // key_heads, dim=1)
            v_BHTD = v_BHTD.repeat_interleave(heads // key_heads, dim=1)
        drop_fraction = self.drop_fraction if self.training else 0.0
        y_BHTD = causal_attention(
            q_BHTD, k_BHTD, v_BHTD, drop_fraction=drop_fraction, document_mask=document_mask
        )
        return self.dropout(self.out(y_BHTD.transpose(1, 2).reshape(x_BTC.shape)))


class MLP(nn.Module):
    """An MLP on each position: up projection, activation, down projection.

    SwiGLU (Shazeer 2020, equation 6: https://arxiv.org/abs/2002.05202) computes gate and values by
    one matrix. GELU is approximated by tanh as in GPT-2 (Hendrycks and Gimpel 2016, section 2:
    https://arxiv.org/abs/1606.08415).
    """

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        has_bias = shape.parts.biases
        self.activation = shape.mlp_activation
        up_width = 2 * shape.hidden if self.activation == "swiglu" else shape.hidden
        self.up = nn.Linear(shape.width, up_width, bias=has_bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=has_bias)
        self.dropout = Dropout(shape.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        match self.activation:
            case "swiglu":
                inner = swiglu(self.up(x_BTC))
            case "gelu":
                inner = F.gelu(self.up(x_BTC), approximate="tanh")
            case _:
                inner = relu2(self.up(x_BTC))
        return self.dropout(self.down(inner))


def norm(shape: GPTConfig, *, gains: bool = True) -> nn.LayerNorm | RMSNorm:
    """Return the normalization of the model's family, over the channels."""
    if shape.parts.norm == "layer":
        return nn.LayerNorm(shape.width, eps=LAYER_EPSILON)
    return RMSNorm(shape.width, gains=gains, eps=shape.norm_eps)
