"""Sampling of text from a language model, or greedy decoding at temperature 0.

Shapes: B batch, T time, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from surefoot.errors import (
    ConfigError,
    DivergedError,
    Setting,
    SurefootError,
    out_of_range,
    together,
)
from surefoot.seeding import fold, untouched
from surefoot.train.evaluate import evaluation_mode

_COLDEST = 1e-6  # below this temperature, decoding is greedy, because float32 would overflow


def sample(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    use_cache: bool = False,
) -> list[int]:
    """Return the prompt `tokens` (T >= 1) followed by up to `max_new_tokens` sampled tokens;
    arguments as in `stream`.

    >>> class Counting(nn.Module):
    ...     def forward(self, tokens_BT):
    ...         return nn.functional.one_hot((tokens_BT + 1) % 10, 10).float()
    >>> sample(Counting(), [7], max_new_tokens=4, context=8, temperature=0)
    [7, 8, 9, 0, 1]
    """
    sampler = _Sampler(
        max_new_tokens, context, temperature, top_k, top_p, seed, _ends(eos_id), use_cache
    )
    return [*(int(token) for token in tokens), *sampler.stream(model, tokens)]


def stream(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    use_cache: bool = False,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` sampled tokens after the prompt `tokens` (T >= 1); stop before
    `eos_id`, which may be several tokens.

    model: maps tokens (1, T) to logits (1, T, V) on its own device, in evaluation mode. If the text
    exceeds `context` tokens, the model continues from the last `context` / 2 tokens. use_cache:
    pass only the new tokens to the model, with a cache from `model.new_cache(batch)`. temperature:
    0 selects the likeliest token. top_k: sample from the k likeliest tokens. top_p: sample from the
    smallest set of likeliest tokens with this total probability (section 3.1 of
    https://arxiv.org/abs/1904.09751). Equal seeds give equal texts. Training modes and global
    generators are restored. The host waits for the device at every token.

    >>> class Counting(nn.Module):
    ...     def forward(self, tokens_BT):
    ...         return nn.functional.one_hot((tokens_BT + 1) % 10, 10).float()
    >>> list(stream(Counting(), [7], max_new_tokens=9, context=8, temperature=0, eos_id=1))
    [8, 9, 0]
    """
    sampler = _Sampler(
        max_new_tokens, context, temperature, top_k, top_p, seed, _ends(eos_id), use_cache
    )
    return sampler.stream(model, tokens)


def sample_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    use_cache: bool = False,
    batch_size: int = 16,
) -> list[list[int]]:
    """Return each prompt followed by up to `max_new_tokens` sampled tokens, in order of the
    prompts.

    Prompts of equal length form batches. Each prompt is sampled under (seed, prompt index), so
    `batch_size` and the other prompts change a text only by rounding. See `stream` for the
    remaining arguments.

    >>> class Counting(nn.Module):
    ...     def forward(self, tokens_BT):
    ...         return nn.functional.one_hot((tokens_BT + 1) % 10, 10).float()
    >>> sample_batch(Counting(), [[7], [3, 4]], max_new_tokens=2, context=8, temperature=0)
    [[7, 8, 9], [3, 4, 5, 6]]
    """
    if batch_size < 1:
        raise out_of_range("batch_size", batch_size, "1 or more prompts, continued at once")
    sampler = _Sampler(
        max_new_tokens, context, temperature, top_k, top_p, seed, _ends(eos_id), use_cache
    )
    for prompt in prompts:
        sampler.check_prompt(prompt)
    texts = [[int(token) for token in prompt] for prompt in prompts]
    remaining = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    while remaining:
        length = len(texts[remaining[0]])
        group = [index for index in remaining[:batch_size] if len(texts[index]) == length]
        remaining = remaining[len(group) :]
        rows = [texts[index] for index in group]
        generators = [torch.Generator().manual_seed(fold(seed, index)) for index in group]
        ended: set[int] = set()
        for _ in sampler.extend(model, rows, generators):
            ended |= {nth for nth, row in enumerate(rows) if row[-1] in sampler.ends}
            if len(ended) == len(rows):
                break
        for nth in ended:  # cut at its end only now, because all rows of a batch need one length
            row = rows[nth]
            end = next(place for place in range(length, len(row)) if row[place] in sampler.ends)
            del row[end:]
    return texts


def _ends(eos_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_id is None:
        return frozenset()
    if isinstance(eos_id, Collection):
        return frozenset(map(int, eos_id))
    return frozenset([int(eos_id)])


def logits_not_finite(tokens: int) -> DivergedError:
    """Return the error of a model whose logits after so many tokens are not finite."""
    return DivergedError(
        "logits-not-finite",
        problem=f"the model's logits after {tokens} tokens are not finite",
        reason="its weights or activations overflowed",
        remedy=[
            "use an earlier checkpoint",
            ("train with a lower", Setting("optimizer.lr")),
        ],
        tokens=tokens,
    )


@dataclass(frozen=True)
class _Sampler:
    max_new_tokens: int
    context: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    ends: frozenset[int]
    use_cache: bool

    def stream(self, model: nn.Module, tokens: Sequence[int] | Tensor) -> Iterator[int]:
        self.check_prompt(tokens)  # now, and not with the first token

        def drawn() -> Iterator[int]:
            row = [int(token) for token in tokens]
            for _ in self.extend(model, [row], [torch.Generator().manual_seed(self.seed)]):
                if row[-1] in self.ends:
                    return
                yield row[-1]

        return drawn()

    def check_prompt(self, tokens: Sequence[int] | Tensor) -> None:
        problems: list[SurefootError] = []

        def claim(is_met: bool, setting: str, meaning: str) -> None:
            if not is_met:
                problems.append(out_of_range(setting, getattr(self, setting), meaning))

        if not len(tokens):
            problems.append(
                ConfigError(
                    "prompt-empty",
                    problem="the prompt is empty",
                    remedy="give at least one token, for example a line break",
                )
            )
        claim(0 <= self.seed < 1 << 64, "seed", "a number from 0 to 2**64 - 1")
        claim(self.max_new_tokens >= 0, "max_new_tokens", "0 or more tokens to add")
        claim(self.context >= 1, "context", "1 or more tokens that the model sees at once")
        claim(
            0 <= self.temperature < float("inf"),
            "temperature",
            "0 for the most likely token, or a positive number such as 0.8",
        )
        claim(
            self.top_k is None or self.top_k >= 1,
            "top_k",
            "1 or more, or None to sample from all tokens",
        )
        claim(
            self.top_p is None or 0 < self.top_p <= 1,
            "top_p",
            "a probability above 0 and up to 1, such as 0.9, or None",
        )
        if problems:
            raise together(problems)

    def extend(
        self, model: nn.Module, rows: list[list[int]], generators: Sequence[torch.Generator]
    ) -> Iterator[None]:
        # the training modes of the model are restored at every `yield`
        step = _NextLogits(model, context=self.context, use_cache=self.use_cache)
        for _ in range(self.max_new_tokens):
            with torch.no_grad(), untouched(), evaluation_mode([model]):
                logits_BV = step.next_logits(rows)
            for row, logits_V, generator in zip(rows, logits_BV, generators, strict=True):
                row.append(self._token(logits_V, generator))
            yield

    def _token(self, logits_V: Tensor, generator: torch.Generator) -> int:
        if self.temperature < _COLDEST:
            return int(logits_V.argmax())
        candidates = torch.arange(len(logits_V))
        if self.top_k is not None:  # ties are cut too: exactly `top_k` candidates stay
            logits_V, candidates = logits_V.topk(min(self.top_k, len(logits_V)))
        chances_V = torch.softmax((logits_V - logits_V.max()) / self.temperature, dim=0)
        if self.top_p is not None:
            ordered_V, order = chances_V.sort(descending=True, stable=True)
            # `cumsum - ordered` is the total probability of likelier tokens: the first token always
            # stays
            count = int((ordered_V.cumsum(0) - ordered_V < self.top_p).sum())
            chances_V = ordered_V[:count]
            candidates = candidates[order[:count]]
        return int(candidates[torch.multinomial(chances_V, 1, generator=generator)])


class _NextLogits:
    def __init__(self, model: nn.Module, *, context: int, use_cache: bool) -> None:
        self.model = model
        self.context = context
        self.use_cache = use_cache
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.first = 0  # start of the model's window
        self.cached = 0  # end of the cached tokens
        self.cache: Any = None

    def next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        length = len(rows[0])
        if self.cached == 0:
            self.first = max(0, length - self.context)
        elif length - self.first > self.context:
            # halve the window: a window of the last `context` tokens would move at every token and
            # invalidate the cache
            self.first = length - max(1, self.context // 2)
            self.cache = None
        start = self.first if self.cache is None else self.cached
        if self.use_cache and self.cache is None:
            self.cache = cast("Any", self.model).new_cache(len(rows))
        tokens_BT = torch.tensor([row[start:] for row in rows], device=self.device)
        logits_BTV = self.model(tokens_BT, self.cache) if self.use_cache else self.model(tokens_BT)
        self.cached = length
        logits_BV: Tensor = logits_BTV[:, -1].float().cpu()
        if not logits_BV.isfinite().all():
            raise logits_not_finite(length)
        return logits_BV
