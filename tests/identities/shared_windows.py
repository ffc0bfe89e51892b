"""Windows that several documents share, and the same windows with other documents around one."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 30
LENGTHS = [40, 1, 23, 32]  # tokens of each document
WINDOW = sum(LENGTHS)
SECOND = slice(40, 41)
THIRD = slice(41, 64)


def window(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and documents (B, T) of two windows."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(VOCABULARY, (2, WINDOW), generator=generator)
    documents_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return tokens_BT, documents_T.expand(2, -1)


def with_others(tokens_BT: Tensor, kept: slice) -> Tensor:
    """Return the window with other documents around the one that is kept."""
    others_BT, _ = window(seed=1)
    others_BT[:, kept] = tokens_BT[:, kept]
    return others_BT
