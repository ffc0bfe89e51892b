"""Vectors of whole n-grams beside a token's embedding, from hashed tables.

Shapes: B batch, T time (tokens), C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FACTOR = 0x9E3779B1  # 2^32 over the golden ratio: Knuth 1998, The Art of Computer Programming 3, section 6.4


class Ngrams(nn.Module):
    """A vector of the last two tokens as one, of the last three, up to the last `longest`; added up. All start at zero.

    Each length has a table. Where a table of at most `rows` holds every n-gram, each has a row of its own; else some share one
    (Svenstrup et al. 2017, section 3, with one hash function: https://arxiv.org/abs/1709.03933). Before the first token
    stands one that is not in the vocabulary.

    >>> ngrams = Ngrams(longest=2, rows=30, vocabulary=4, width=8)
    >>> ngrams.rows(torch.tensor([[3, 1, 2]]), length=2).tolist()
    [[19, 8, 11]]
    """

    def __init__(self, *, longest: int, rows: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        sizes = table_sizes(longest=longest, rows=rows, vocabulary=vocabulary)
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The sum (B, T, C) of the vectors of the n-grams that end at each place."""
        vectors_BTC = [table(self.rows(tokens_BT, length=length)) for length, table in enumerate(self.tables, start=2)]
        return torch.stack(vectors_BTC).sum(dim=0) if len(vectors_BTC) > 1 else vectors_BTC[0]

    def rows(self, tokens_BT: Tensor, *, length: int) -> Tensor:
        """Which row of its table (B, T) the n-gram of this length has that ends at each place."""
        table = self.tables[length - 2]
        assert isinstance(table, nn.Embedding)
        symbols = self.vocabulary + 1
        keys_BT = tokens_BT.long()  # of 32 bits they would overflow, and give other rows
        for back in range(1, length):
            keys_BT = keys_BT * symbols + before(tokens_BT, back, fill=self.vocabulary)
        if table.num_embeddings == symbols**length:
            return keys_BT
        return (keys_BT * _FACTOR >> 16) % table.num_embeddings


def table_sizes(*, longest: int, rows: int, vocabulary: int) -> list[int]:
    """How many rows the table of each length has, from two tokens on.

    >>> table_sizes(longest=3, rows=32768, vocabulary=65)
    [4356, 32768]
    """
    return [min(rows, (vocabulary + 1) ** length) for length in range(2, longest + 1)]


def before(tokens_BT: Tensor, back: int, *, fill: int) -> Tensor:
    """The token `back` places before each, and `fill` where there is none.

    >>> before(torch.tensor([[5, 6, 7]]), 2, fill=-1).tolist()
    [[-1, -1, 5]]
    """
    earlier_BT = torch.full_like(tokens_BT, fill)
    earlier_BT[:, back:] = tokens_BT[:, :-back]
    return earlier_BT
