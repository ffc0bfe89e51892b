"""An encoder-decoder transformer, and its incremental decoding.

Shapes: B sources, K hypotheses each, S source time, T target time, C width, H heads, D channels of
a head, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.models.attention import Cache, rotations
from surefoot.models.layers import Dropout, HeadLoss, Positions, check_context
from surefoot.models.seq2seq_layers import (
    CrossAttention,
    DecoderBlock,
    EncoderBlock,
    Rotation,
    SelfAttention,
    Seq2SeqConfig,
    norm_of,
)

PADDING = 0


class Seq2Seq(nn.Module):
    """An encoder-decoder that maps integer source tokens (B, S) and target tokens (B, T) to
    next-token logits (B, T, V).

    Each row of the source needs at least one token that is not padding.

    >>> shape = Seq2SeqConfig(
    ...     encoder_layers=1, decoder_layers=1, heads=2, width=8, mlp_width=16, vocab_size=10
    ... )
    >>> Seq2Seq(shape)(torch.ones(3, 5, dtype=torch.long), torch.ones(3, 4, dtype=torch.long)).shape
    torch.Size([3, 4, 10])
    """

    turns: Tensor  # cosines and sines (2, T, D), if positions are rotary

    def __init__(self, shape: Seq2SeqConfig) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.source_embedding = self.embedding
        if shape.source_vocab_size is not None:
            self.source_embedding = nn.Embedding(shape.source_vocab_size, shape.width)
        self.source_positions: Positions | None = None
        self.target_positions: Positions | None = None
        if shape.positions == "rotary":
            turns = torch.stack(rotations(shape.context, shape.width // shape.heads))
            self.register_buffer("turns", turns, persistent=False)
        else:
            is_learned = shape.positions == "learned"
            self.source_positions = Positions(shape.context, shape.width, learned=is_learned)
            self.target_positions = Positions(shape.context, shape.width, learned=is_learned)
        self.dropout = Dropout(shape.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(shape) for _ in range(shape.encoder_layers))
        self.decoder = nn.ModuleList(
            DecoderBlock(shape, layer) for layer in range(shape.decoder_layers)
        )
        is_pre = shape.norm_placement == "pre"  # after "post", a sum is normalized already
        self.encoder_norm = norm_of(shape) if is_pre else nn.Identity()
        self.decoder_norm = norm_of(shape) if is_pre else nn.Identity()
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self._initialize()

    def forward(self, source_BS: Tensor, target_BT: Tensor, *, loss: HeadLoss | None = None) -> Any:
        """Return the logits (B, T, V) of the token after each target position.

        With `loss`, return `loss(hidden states, head's weight)` instead, which allows a loss that
        skips the head on padding.
        """
        memory_BSC, mask_B11S = self.encoded(source_BS)
        x_BTC = self.dropout(self.embedded(target_BT))
        rotation = self.rotation(0, target_BT.shape[1])
        for block in self.decoder:
            x_BTC = block(x_BTC, memory_BSC, mask_B11S, rotation)
        hidden_BTC = self.decoder_norm(x_BTC)
        return self.head(hidden_BTC) if loss is None else loss(hidden_BTC, self.head.weight)

    def encoded(self, source_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's output (B, S, C), and the source's mask (B, 1, 1, S), false at
        padding.
        """
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
        """Return embeddings (B, T, C) of target tokens at positions from `first` on; attention
        applies rotary positions.
        """
        x_BTC: Tensor = self.embedding(target_BT) * math.sqrt(self.shape.width)
        if self.target_positions is not None:
            x_BTC = x_BTC + self.target_positions(first, first + target_BT.shape[1])
        return x_BTC

    def rotation(self, first: int, end: int) -> Rotation | None:
        """Return cosines and sines (T, D) of positions `first` to `end` - 1; None if positions are
        not rotary.
        """
        if self.shape.positions != "rotary":
            return None
        check_context(end, self.shape.context)
        return self.turns[0, first:end], self.turns[1, first:end]

    @torch.no_grad()
    def _initialize(self) -> None:
        # matrices: Glorot and Bengio 2010, equation 16; embeddings: Vaswani et al. 2017, section
        # 3.4
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
        if self.shape.zero_init_residual:
            for name, matrix in self.named_parameters():
                if name.endswith((".down.weight", ".out.weight")):
                    nn.init.zeros_(matrix)
            if self.shape.tie_embeddings:
                # with identity blocks, this gain makes the logit of a token's own embedding 1
                gains = self.get_parameter("decoder_norm.weight")
                nn.init.constant_(gains, self.shape.width**-0.5)
        if self.shape.tie_embeddings:
            self.head.weight = self.embedding.weight


class Decoding:
    """Incremental decoding of K hypotheses for each of B sources (B, S), one token at a time, up to
    `max_tokens` tokens.

    Keys and values of a source are computed once for all its hypotheses. The caller sets evaluation
    mode and disables gradients.

    >>> import torch
    >>> from surefoot.models.seq2seq import Seq2SeqConfig
    >>> model = Seq2Seq(
    ...     Seq2SeqConfig(
    ...         encoder_layers=1, decoder_layers=1, heads=2, width=8, mlp_width=16, vocab_size=10
    ...     )
    ... )
    >>> decoding = Decoding(model, torch.ones(3, 5, dtype=torch.long), hypotheses=2, max_tokens=7)
    >>> decoding.logits(torch.ones(3, 2, dtype=torch.long)).shape
    torch.Size([3, 2, 10])
    """

    def __init__(
        self, model: Seq2Seq, source_BS: Tensor, *, hypotheses: int, max_tokens: int
    ) -> None:
        self.model = model
        self.hypotheses = hypotheses
        memory_BSC, self.mask_B11S = model.encoded(source_BS)
        self.blocks = [block for block in model.decoder if isinstance(block, DecoderBlock)]
        self.memories = [block.cross.keys_values(memory_BSC) for block in self.blocks]
        shape = model.shape
        size = (
            shape.decoder_layers,
            len(source_BS) * hypotheses,
            shape.heads,
            max_tokens,
            shape.width // shape.heads,
        )
        self.cache = Cache(size, device=memory_BSC.device, dtype=self.memories[0][0].dtype)

    def logits(self, tokens_BK: Tensor) -> Tensor:
        """Append one token to each hypothesis, and return the logits (B, K, V) of the next
        token.
        """
        position = self.cache.length
        embedded_N1C = self.model.embedded(tokens_BK.reshape(-1, 1), first=position)
        x_BKC = embedded_N1C.view(*tokens_BK.shape, -1)
        rotation = self.model.rotation(position, position + 1)
        for block, memory in zip(self.blocks, self.memories, strict=True):
            x_BKC = block(x_BKC, memory, self.mask_B11S, rotation, self.cache)
        return self.model.head(self.model.decoder_norm(x_BKC))

    def select(self, sources_B: Tensor, parents_BK: Tensor) -> None:
        """Keep only these sources; hypothesis k of source b continues the source's hypothesis
        `parents_BK[b, k]` (0 to K - 1).
        """
        self.cache.select((sources_B[:, None] * self.hypotheses + parents_BK).flatten())
        self.hypotheses = parents_BK.shape[1]
        if len(sources_B) < len(self.mask_B11S):
            self.mask_B11S = self.mask_B11S[sources_B]
            self.memories = [
                (k_BHSD[sources_B], v_BHSD[sources_B]) for k_BHSD, v_BHSD in self.memories
            ]
