"""A decoder-only transformer in three families: `modern` (the default), `gpt2` and `llama`.

modern: rotary positions, RMS norms, normalized queries and keys, no biases, squared ReLU or SwiGLU.
`gpt2`: learned positions, layer norms, biases, GELU, tied embeddings (Radford et al. 2019, section
2.3). `llama`: rotary positions, RMS norms with gains, SwiGLU, no biases, and queries that may share
keys and values, as transformers' LlamaForCausalLM (Touvron et al. 2023, section 2.2). Shapes: B
batch, T time (tokens), C channels (width), H heads, D channels of a head, V
vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from surefoot.models.attention import Cache, rotations
from surefoot.models.documents import (
    check_documents,
    document_mask,
    is_of_document,
    places_in_documents,
)
from surefoot.models.gpt_layers import MLP, Attention, Block, GPTConfig, Ngrams, norm
from surefoot.models.layers import Dropout, HeadLoss, check_context


class GPT(nn.Module):
    """A GPT that maps integer tokens (B, T), T up to `shape.context`, to next-token logits (B, T,
    V).

    >>> model = GPT(GPTConfig(layers=1, heads=2, width=8, context=16, vocab_size=10))
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 10])
    """

    turns: Tensor  # cosines and sines (2, context, D), if positions are rotary

    def __init__(self, shape: GPTConfig) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.positions: nn.Embedding | None = None
        if shape.parts.positions == "learned":
            self.positions = nn.Embedding(shape.context, shape.width)
        self.smear: nn.Parameter | None = None
        if shape.smear:
            self.smear = nn.Parameter(torch.zeros(shape.smear * shape.width))
        self.ngrams: Ngrams | None = None
        if shape.ngrams > 1:
            self.ngrams = Ngrams(
                longest=shape.ngrams,
                rows=shape.ngram_buckets,
                vocab_size=shape.vocab_size,
                width=shape.width,
            )
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = norm(shape)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        if self.positions is None:
            theta = shape.rope_theta if shape.family == "llama" else None
            turns = rotations(shape.context, shape.width // shape.heads, theta=theta)
            self.register_buffer("turns", torch.stack(turns), persistent=False)
        match shape.family:
            case "modern":
                self._initialize_modern()
            case "gpt2":
                self._initialize_gpt2()
            case "llama":
                self._initialize_llama()
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        *,
        documents: Tensor | None = None,
        loss: HeadLoss | None = None,
    ) -> Any:
        """Return next-token logits at every position; with a cache, the tokens continue the cached
        tokens.

        `documents` (B, T) are the numbers of the documents that share a window: equal integers
        within a document. Each document is then computed as if it stood alone: its tokens see only
        their own document, and its positions begin at 0.

        With `loss`, return `loss(hidden states, head's weight)` instead. Such a loss need not hold
        all logits at once, and runs inside the `forward` that wrappers of the model call.
        """
        hidden_BTC = self.hidden(tokens_BT, cache, documents=documents)
        return self.head(hidden_BTC) if loss is None else loss(hidden_BTC, self.head.weight)

    def hidden(
        self,
        tokens_BT: Tensor,
        cache: Cache | None = None,
        *,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, C) that the head takes."""
        before = 0 if cache is None else cache.length
        end = before + tokens_BT.shape[1]
        check_context(end, self.shape.context)
        x_BTC = self._embedded(tokens_BT, cache, documents)
        places: Tensor | slice = slice(before, end)
        mask = None
        if documents is not None:
            check_documents(documents, tokens_BT, cache)
            places = places_in_documents(documents)
            mask = self._document_mask(documents)
        rotation = None
        if self.positions is None:
            rotation = self._rotation(places)
        else:
            x_BTC = x_BTC + self.positions.weight[places]
        x_BTC = self.dropout(x_BTC)
        for block in self.blocks:
            x_BTC = block(x_BTC, rotation, cache, mask)
        return self.norm(x_BTC)

    def _rotation(self, places: Tensor | slice) -> tuple[Tensor, Tensor]:
        cosines = self.turns[0, places]
        sines = self.turns[1, places]
        if isinstance(places, Tensor):  # (B, T, D), for all heads
            return cosines.unsqueeze(1), sines.unsqueeze(1)
        return cosines, sines

    def _document_mask(self, documents_BT: Tensor) -> Tensor | BlockMask:
        return document_mask(
            documents_BT,
            channels=self.shape.width // self.shape.heads,
            drop_fraction=self.shape.dropout if self.training else 0.0,
        )

    def _embedded(
        self, tokens_BT: Tensor, cache: Cache | None, documents_BT: Tensor | None = None
    ) -> Tensor:
        time = tokens_BT.shape[1]
        if cache is not None:
            tokens_BT = cache.with_earlier(tokens_BT, keep=self.shape.looks_back)
        x_BTC: Tensor = self.embedding(tokens_BT)
        if self.smear is not None:
            earlier_BTC = x_BTC
            for back, share_C in enumerate(self.smear.view(-1, self.shape.width), start=1):
                earlier_BTC = F.pad(earlier_BTC[:, :-1], (0, 0, 1, 0))
                if documents_BT is not None:
                    is_same_BT1 = is_of_document(documents_BT, back=back).unsqueeze(-1)
                    earlier_BTC = torch.where(is_same_BT1, earlier_BTC, 0.0)
                x_BTC = x_BTC + share_C * earlier_BTC
        if self.ngrams is not None:
            x_BTC = x_BTC + self.ngrams(tokens_BT, documents_BT)
        return x_BTC[:, -time:]

    def new_cache(self, batch: int) -> Cache:
        """Return an empty cache for `batch` rows, with the dtype and device of the weights."""
        weight = self.embedding.weight
        shape = self.shape
        size = (shape.layers, batch, shape.key_heads, shape.context, shape.width // shape.heads)
        return Cache(size, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def _initialize_modern(self) -> None:
        # output layers of 0 make blocks the identity (https://arxiv.org/abs/1706.02677, section
        # 5.1), and the first loss ln V
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
        # equal shares would hide the order of the previous tokens
        if self.smear is not None and self.shape.smear > 1:
            nn.init.normal_(self.smear, std=0.5)
        if not self.shape.tie_embeddings:
            nn.init.normal_(self.embedding.weight)
            nn.init.zeros_(self.head.weight)
            return
        # identity blocks pass a token's embedding to the tied head: this gain lowers the token's
        # own logit from 0.02 x width to 1
        nn.init.normal_(self.embedding.weight, std=0.02)
        assert self.norm.weight is not None
        nn.init.constant_(self.norm.weight, min(1.0, 1.0 / (0.02 * self.shape.width)))

    @torch.no_grad()
    def _initialize_gpt2(self) -> None:
        # output layers of residual branches are scaled by 1 / sqrt(number of branches): Radford et
        # al. 2019
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, matrix in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(matrix, std=0.02 / math.sqrt(2 * self.shape.layers))

    @torch.no_grad()
    def _initialize_llama(self) -> None:
        # `initializer_range` of transformers' LlamaConfig; the papers do not say it
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
