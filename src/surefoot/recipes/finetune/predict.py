"""Answers of a fine-tuned model to prompts, for `surefoot predict`. Imports no torch."""

import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import surefoot as sf
from surefoot.recipes.finetune.conversations import render, under_limits
from surefoot.recipes.finetune.forms import Message
from surefoot.recipes.finetune.template import PromptEnds
from surefoot.recipes.gpt.predict import Predict as Continue
from surefoot.recipes.gpt.predict import prompts_of
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.shared_errors import nothing_to_predict

_ANSWER = "an answer"
_UNLIMITED = 1 << 20  # tokens of a context


@dataclass(frozen=True, kw_only=True)
class Predict(Continue):
    """Options for the answer to a prompt."""

    system: str | None = None
    """Text of a system message before each prompt. Default: none."""


def answers(
    model: Any,
    tokenizer: Any,
    inputs: Sequence[str],
    options: Predict,
    *,
    context: int | None,
    ends: Sequence[int] = (),
) -> Iterator[str]:
    """Yield the answers to inputs and file lines. One input yields pieces of text; several yield
    one JSON object per line.

    Without inputs, a terminal holds a conversation. `ends` are the tokens at which the base model
    ends a text; an answer also ends where the chat template ends it.
    """
    prompts = prompts_of(inputs, options.file)
    first: list[Message] = []
    if options.system is not None:
        first.append({"role": "system", "content": options.system})
    limit = context or _UNLIMITED
    settings: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "context": limit,
        "eos_id": stop_tokens(tokenizer, ends),
        "use_cache": True,
    }
    if not prompts and sys.stdin is not None and sys.stdin.isatty():
        note(f"drawn with {options.in_words}")
        yield from conversation(model, tokenizer, first, options.max_new_tokens, settings)
        return
    if not prompts:
        what = "a prompt, which the model answers"
        raise nothing_to_predict(what, example='"What is a list?"')
    conversations = [[*first, {"role": "user", "content": prompt}] for prompt in prompts]
    texts = under_limits(
        lambda messages: render(tokenizer, messages, "the prompt", prompts_answer=True),
        conversations,
        ["the prompt"] * len(conversations),
    )
    prompt_ends = PromptEnds(tokenizer)  # it keeps what it finds in the vocabulary
    encoded = [_tokens(tokenizer, prompt_ends(text)) for text in texts]
    longest = max(map(len, encoded))
    if longest >= limit:
        raise sf.ConfigError(
            "prompt-too-long",
            problem=f"a prompt has {longest:,} tokens, and the model takes {limit:,} with the"
            " answer",
            reason="it was trained with as many positions",
            remedy="shorten the prompt",
            tokens=longest,
            context=limit,
        )
    settings["max_new_tokens"] = min(options.max_new_tokens, limit - longest)
    if len(prompts) == 1 and options.file is None:
        tokens = sf.generate.stream(with_logits(model), encoded[0], **settings)
        pieces = _pieces(tokenizer, tokens)
        note(f"drawn with {options.in_words}")
        yield from pieces
        yield "\n"
        return
    drawn = sf.generate.sample_batch(
        with_logits(model), encoded, batch_size=options.batch_size, **settings
    )
    note(f"drawn with {options.in_words}")
    for prompt, before, after in zip(prompts, encoded, drawn, strict=True):
        answer = {"prompt": prompt, "answer": decoded(tokenizer, after[len(before) :])}
        yield json.dumps(answer, ensure_ascii=False) + "\n"


def conversation(
    model: Any,
    tokenizer: Any,
    first: Sequence[Message],
    max_new_tokens: int,
    settings: dict[str, Any],
) -> Iterator[str]:
    """Yield the answers to lines of standard input, each after all earlier ones. The oldest turns
    are left out if the context is full.
    """
    yield "a conversation; Ctrl-C ends an answer, Ctrl-D the conversation\n"
    turns = list[Message]()
    logits = with_logits(model)
    limit = settings["context"]
    while True:
        yield "> "
        line = ""
        with suppress(KeyboardInterrupt):
            line = sys.stdin.readline()
        if not line:
            yield "\n"
            return
        turn: Message = {"role": "user", "content": line.strip()}
        if not turn["content"]:
            continue
        turns.append(turn)
        answer = ""
        earlier = len(turns)
        with suppress(KeyboardInterrupt):
            alone = len(prompt_tokens(tokenizer, [*first, turn]))
            if alone >= limit:
                yield (
                    f"({alone:,} tokens, and the model takes {limit:,} with the answer:"
                    " write less)\n"
                )
                turns.pop()
                continue
            tokens = prompt_tokens(tokenizer, [*first, *turns])
            while limit - len(tokens) < min(max_new_tokens, limit // 2) and len(turns) > 1:
                del turns[:2]  # a question and its answer
                tokens = prompt_tokens(tokenizer, [*first, *turns])
            if len(turns) < earlier:
                yield "(the context is full: the model no longer reads the oldest turns)\n"
            count = min(max_new_tokens, limit - len(tokens))
            drawn = sf.generate.stream(logits, tokens, **settings, max_new_tokens=count)
            for piece in _pieces(tokenizer, drawn):
                answer += piece
                yield piece
        yield "\n"
        turns.append({"role": "assistant", "content": answer.strip()})
        settings["seed"] += 1


def with_logits(model: Any) -> Any:
    """Return a model of transformers as a module from tokens (B, T) to logits (B, T, V), with a
    cache.
    """
    from torch import Tensor, nn
    from transformers import DynamicCache

    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
    keyword = "past_key_values"
    if "cache" in inspect.signature(base.forward).parameters:
        keyword = "cache"  # since transformers 5.24

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens_BT: Tensor, cache: Any = None) -> Any:
            output = self.model(
                input_ids=tokens_BT, use_cache=cache is not None, **{keyword: cache}
            )
            return output.logits

        def new_cache(self, _batch: int) -> Any:
            return DynamicCache(config=model.config)

    return Logits()


def prompt_tokens(
    tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None = None
) -> list[int]:
    """Return the tokens of messages by the chat template, with its prompt for an answer. They are
    those before the first target of a conversation in training.
    """
    text = render(tokenizer, messages, "the prompt", tools=tools, prompts_answer=True)
    return _tokens(tokenizer, PromptEnds(tokenizer)(text))


def _tokens(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)


def stop_token(tokenizer: Any) -> int | None:
    """Return the first special token that the chat template writes after an answer, or else the
    tokenizer's end token.
    """
    messages: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": _ANSWER},
    ]
    text = render(tokenizer, messages, "the prompt")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if _ANSWER in text:
        _, _, behind = text.rpartition(_ANSWER)
        for token in _tokens(tokenizer, behind):
            if token in special:
                return token
    end: int | None = tokenizer.eos_token_id
    return end


def stop_tokens(tokenizer: Any, ends: Sequence[int]) -> list[int]:
    """Return the tokens that end an answer: those of the base model, and that of the template."""
    stops = list(ends)
    end = stop_token(tokenizer)
    if end is not None and end not in stops:
        stops.append(end)
    return stops


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of an answer, without the template's white space around it."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    # a character of several bytes may be split over several tokens, and some tokenizers write a
    # space with the next token
    all_tokens = list[int]()
    printed = ""
    for token in tokens:
        all_tokens.append(token)
        text = str(tokenizer.decode(all_tokens, skip_special_tokens=True)).lstrip()
        if text.startswith(printed) and not text.endswith("\ufffd"):
            yield text[len(printed) :]
            printed = text
    whole = decoded(tokenizer, all_tokens) if all_tokens else ""
    yield whole[len(printed.rstrip()) :]
