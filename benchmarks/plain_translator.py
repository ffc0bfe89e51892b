"""A translator as many scripts have it: torch's own encoder-decoder between an embedding and a head
that is the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Translator(nn.Module):
    """Tokens of both sides (B, S) and (B, T), 0 where they are filled up, to logits (B, T,
    vocabulary).
    """

    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab_size, width), nn.Embedding(128, width)
        self.transformer = nn.Transformer(
            width, 4, layers, layers, 4 * width, 0.0, batch_first=True
        )
        self.head = nn.Linear(width, vocab_size)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits of the token after each place of the target."""
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        source_side, target_side = (
            self.embedding(rows) + self.places(torch.arange(rows.shape[1]))
            for rows in (source, target)
        )
        hidden = self.transformer(
            source_side,
            target_side,
            tgt_mask=ahead,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        logits: Tensor = self.head(hidden)
        return logits
