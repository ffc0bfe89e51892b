"""What is trained: two models so small that the loop around them shows, and data for them, made up
and held in memory.

B batch, T tokens, C channels, H heads, D channels of a head, V tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, FEATURES, CLASSES, BATCH = 4096, 32, 10, 32
VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, WINDOWS = 65, 32, 64, 2, 2, 8


@dataclass(frozen=True)
class Work:
    """A model and its samples. `model()` has the same first weights each time; `loss` takes its
    outputs and the targets.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    batch_size: int


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # without a bias: the keys' has no gradient but rounding, which AdamW makes a step of
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Causal, of several heads."""
        heads = self.inward(x_BTC).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-2, -3)
        q_BHTD, k_BHTD, v_BHTD = heads.unbind()
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.outward(mixed_BHTD.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.second_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm(x_BTC))
        return x_BTC + self.mlp(self.second_norm(x_BTC))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """As one would write it for a first try: learned positions, LayerNorm, GELU, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits of the next token at each place."""
        x_BTC = self.tokens(tokens_BT) + self.places.weight
        return self.head(self.norm(self.blocks(x_BTC)))  # type: ignore[no-any-return]


def mlp() -> Work:
    """32-64-10, batches of 32 rows."""
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=made)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=made)
    return Work(lambda: _as_always(MLP), F.cross_entropy, inputs, targets, BATCH)


def gpt() -> Work:
    """2 layers of width 64, batches of 8 windows of 32 tokens."""
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].contiguous()

    def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    return Work(lambda: _as_always(GPT), loss, inputs, targets, WINDOWS)


def _as_always(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()
