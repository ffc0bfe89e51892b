"""Prompts that a trained language model continues: `surefoot predict` for recipes that generate text."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.data.text.files import decode_utf8

_LONGEST_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, kw_only=True)
class Predict:
    """How a prompt is continued."""

    max_new_tokens: int = 200
    """Number of tokens to add, at most."""
    temperature: float = 0.8
    """0 always takes the likeliest token. Below 1, likely tokens become likelier."""
    top_k: int | None = None
    """Choose among this many of the likeliest tokens. Default: all."""
    top_p: float | None = 0.95
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    file: str | None = None
    """A file with one prompt in each line; they are answered together."""
    batch_size: int = 16
    """Number of prompts of a file that are continued at once. Changes memory and speed only."""
    device: str = "auto"
    """Where the model runs: "cpu", "cuda" or "mps". auto is the accelerator if there is one."""


def continuations(
    model: Any, tokenizer: Any, inputs: Sequence[str], options: Predict, *, context: int, otherwise: str
) -> Iterator[str]:
    """The continuations of the inputs and the lines of `options.file`, or of `otherwise` by default.

    "-" alone is standard input. In pieces: of one input as it grows, of several one JSON object a line. Errors come first.
    """
    if list(inputs) == ["-"]:
        inputs = [decode_utf8(b"" if sys.stdin is None else sys.stdin.buffer.read(), "standard input")]
    from_file = [] if options.file is None else _lines(local_path(options.file, setting="file"))
    prompts = [*inputs, *from_file] or [otherwise]
    encoded = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    if [] in encoded:
        raise sf.ConfigError(f"prompt {encoded.index([]) + 1} is empty: give at least one character to go on from")
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    settings |= {
        "max_new_tokens": options.max_new_tokens,
        "context": context,
        "eos_id": tokenizer.eos_id,
        "use_cache": True,
    }
    if len(prompts) == 1 and options.file is None:
        drawn = sf.generate.stream(model, encoded[0], **settings)  # which refuses settings before anything is shown
        yield prompts[0]
        yield from _decode(tokenizer, drawn)
        yield "\n"
        return
    continued = sf.generate.sample_batch(model, encoded, batch_size=options.batch_size, **settings)
    for prompt, before, after in zip(prompts, encoded, continued, strict=True):
        answer = {"prompt": prompt, "continuation": tokenizer.decode(after[len(before) :])}
        yield json.dumps(answer, ensure_ascii=False) + "\n"


def _decode(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Text as soon as it is whole: a character of several bytes may be spread over several tokens."""
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if not text.endswith("\ufffd") or len(pending) > _LONGEST_CHARACTER:
            yield text
            pending = []
    if pending:
        yield tokenizer.decode(pending)


def _lines(path: Path) -> list[str]:
    try:
        text = decode_utf8(path.read_bytes(), str(path))
    except OSError as problem:
        raise sf.DataError(f"cannot read prompts from {path}: {problem}") from problem
    prompts = [line for line in text.replace("\r\n", "\n").split("\n") if line]  # not at every line break of Unicode
    if not prompts:
        raise sf.DataError(f"{path} holds no prompt: write one a line")
    return prompts
