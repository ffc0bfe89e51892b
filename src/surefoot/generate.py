"""Text from a model that predicts the next token: sampling, or the likeliest token at each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def sample(
    model: Any, tokens: Sequence[int], *, count: int, context: int, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> list[int]:
    """`tokens` (at least one) and `count` more after them.

    model: (1, T) to logits (1, T, V); it is called with at most the last `context` tokens, in the mode it is in. Temperature
    0 takes the likeliest token; `top_k` leaves only so many to choose from. Draws from a generator of its own, so the
    global ones stay as they are; the same seed gives the same text.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    held = list(tokens)
    for _ in range(count):
        logits_V = model(torch.tensor([held[-context:]], device=device))[0, -1].float()
        if temperature == 0:
            following = logits_V.argmax()
        else:
            if top_k is not None:
                least = logits_V.topk(min(top_k, len(logits_V))).values[-1]
                logits_V = logits_V.masked_fill(logits_V < least, float("-inf"))
            chances_V = torch.softmax(logits_V / temperature, dim=0).cpu()
            following = torch.multinomial(chances_V, 1, generator=generator)[0]
        held.append(int(following))
    return held
