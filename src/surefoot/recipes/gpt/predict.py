"""Continuations of prompts by a trained language model, for `surefoot predict`."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.data.text_files import decode_utf8
from surefoot.errors import Remedy
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.shared_errors import read_inputs

_LONGEST_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Options for the continuation of a prompt."""

    max_new_tokens: int = 200
    """Maximum number of tokens to add."""
    temperature: float = 0.8
    """Sampling temperature. 0 always takes the likeliest token; values below 1 favor likely tokens.
    """
    top_k: int | None = None
    """Sample from this many of the likeliest tokens. Default: all."""
    top_p: float | None = 0.95
    """Sample from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the sampling."""
    file: str | None = None
    """A file with one prompt per line. Prompts of a file are continued in batches."""
    batch_size: int = 16
    """Number of prompts continued at once. Changes only memory and speed."""
    device: str = "auto"
    """Device of the model: "cpu", "cuda" or "mps". auto is the accelerator if there is one."""

    @property
    def in_words(self) -> str:
        """How tokens are drawn."""
        if not self.temperature:
            return "--temperature 0: always the likeliest token"
        limits = {"--top-k": self.top_k, "--top-p": self.top_p}
        flags = [f"{flag} {value:g}" for flag, value in limits.items() if value is not None]
        return " ".join([f"--temperature {self.temperature:g}", *flags, f"--seed {self.seed}"])


def continuations(
    model: Any,
    tokenizer: Any,
    inputs: Sequence[str],
    options: Predict,
    *,
    context: int,
    otherwise: str,
) -> Iterator[str]:
    """Yield the continuations of inputs and file lines, or of `otherwise`. The single input "-" is
    standard input. One input yields pieces of text; several yield one JSON object per line. Errors
    are raised before the first output."""
    prompts = prompts_of(inputs, options.file) or [otherwise]
    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    if [] in encoded:
        raise empty_prompt(f"prompt {encoded.index([]) + 1}")
    settings: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "context": context,
        "eos_id": tokenizer.eos_id,
        "use_cache": True,
    }
    if len(prompts) == 1 and options.file is None:
        # refuses settings before any output
        drawn = sf.generate.stream(model, encoded[0], **settings)
        note(f"drawn with {options.in_words}")
        yield prompts[0]
        yield from _decode(tokenizer, drawn, before=encoded[0][-1:])
        yield "\n"
        return
    continued = sf.generate.sample_batch(model, encoded, batch_size=options.batch_size, **settings)
    note(f"drawn with {options.in_words}")
    for prompt, before, after in zip(prompts, encoded, continued, strict=True):
        continuation = _continued(tokenizer, before[-1:], after[len(before) :])
        answer = {"prompt": prompt, "continuation": continuation}
        yield json.dumps(answer, ensure_ascii=False) + "\n"


def empty_prompt(which: str, *remedies: Remedy) -> sf.ConfigError:
    """Return the error for a prompt that leaves nothing to continue from."""
    empty = sf.ConfigError(
        "prompt-empty",
        problem="the prompt is empty",
        remedy=["write at least one character to continue from", *remedies],
    )
    return empty.inside(which)


def _decode(tokenizer: Any, tokens: Iterator[int], *, before: list[int]) -> Iterator[str]:
    # a character of several bytes may be split over several tokens; tokens are decoded after those
    # before them, because some kinds drop a blank at the beginning
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = _continued(tokenizer, before, pending)
        if not text.endswith("\ufffd") or len(pending) > _LONGEST_CHARACTER:
            yield text
            before = pending
            pending = []
    if pending:
        yield _continued(tokenizer, before, pending)


def _continued(tokenizer: Any, before: list[int], tokens: list[int]) -> str:
    text: str = tokenizer.decode([*before, *tokens])
    return text[len(tokenizer.decode(before)) :]


def prompts_of(inputs: Sequence[str], file: str | None) -> list[str]:
    """Return the inputs, or standard input for the single input "-", and the lines of a file.
    Raises `DataError` if it has none.
    """
    prompts = [*inputs]
    if prompts == ["-"]:
        data = b"" if sys.stdin is None else sys.stdin.buffer.read()
        prompts = [decode_utf8(data, "standard input")]
    if file is not None:
        prompts += _lines(local_path(file, setting="file"))
    return prompts


def _lines(path: Path) -> list[str]:
    text = decode_utf8(read_inputs(path), str(path))
    lines = text.replace("\r\n", "\n").split("\n")  # not at Unicode line breaks
    prompts = [line for line in lines if line]
    if not prompts:
        raise sf.DataError(
            "file-without-prompts",
            problem=f"{path} holds no prompt",
            remedy="write one per line",
            path=path,
        )
    return prompts
