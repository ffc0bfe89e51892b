"""Text from a model that predicts the next token: sampling, or the likeliest token at each place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from surefoot.errors import ConfigError, DivergedError
from surefoot.seeding import untouched


def sample(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    count: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """`tokens` (T, at least one) and `count` more after them.

    model: (1, T) to logits (1, T, V); called in evaluation mode with at most the last `context` tokens, on its own device.
    Temperature 0 takes the likeliest token; below 1 likely ones become likelier. `top_k` leaves only so many to choose
    from. Draws from a generator of its own on the CPU, so the same seed gives the same text, and leaves the modes of the
    modules and the global generators as they were: sampling is not noticed by training. Waits for the device at every token.

    >>> class Counting(nn.Module):
    ...     def forward(self, tokens_BT):
    ...         return nn.functional.one_hot((tokens_BT + 1) % 10, 10).float()
    >>> sample(Counting(), [7], count=4, context=8, temperature=0)
    [7, 8, 9, 0, 1]
    """
    _check(tokens, count=count, context=context, temperature=temperature, top_k=top_k)
    generator = torch.Generator().manual_seed(seed)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    held = tokens.tolist() if isinstance(tokens, Tensor) else [int(token) for token in tokens]
    with torch.no_grad(), untouched(), _evaluating(model):
        for _ in range(count):
            logits_V = model(torch.tensor([held[-context:]], device=device))[0, -1].float().cpu()
            if not logits_V.isfinite().all():
                raise DivergedError(
                    f"the model's logits after {len(held)} tokens are not finite: its weights or activations overflowed.\n"
                    "  Sample from an earlier checkpoint, or train with a lower optimizer.lr"
                )
            held.append(_chosen(logits_V, temperature=temperature, top_k=top_k, generator=generator))
    return held


def _chosen(logits_V: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    candidates = torch.arange(len(logits_V))
    if top_k is not None:  # by place, not by value: of equal logits no more than `top_k` stay
        logits_V, candidates = logits_V.topk(min(top_k, len(logits_V)))
    chances_V = torch.softmax((logits_V - logits_V.max()) / temperature, dim=0)
    return int(candidates[torch.multinomial(chances_V, 1, generator=generator)])


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards each in its own again: a frozen part may have been in it before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(tokens: Sequence[int] | Tensor, *, count: int, context: int, temperature: float, top_k: int | None) -> None:
    problems = []
    if len(tokens) == 0:
        problems.append("no token to start from: give at least one, for example that of a line break")
    if count < 0:
        problems.append(f"count = {count}: give the number of tokens to add, 0 or more")
    if context < 1:
        problems.append(f"context = {context}: give the number of tokens the model sees at once, 1 or more")
    if not temperature >= 0 or temperature == float("inf"):
        problems.append(
            f"temperature = {temperature}: give 0 for the likeliest token, or a positive number such as 0.8"
        )
    if top_k is not None and top_k < 1:
        problems.append(f"top_k = {top_k}: give 1 or more, or leave it out to choose from all tokens")
    if problems:
        raise ConfigError("cannot sample: " + "\n  ".join(problems))
