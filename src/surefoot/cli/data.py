"""`surefoot data ...`: token shards from text."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from surefoot.cli.flags import configured
from surefoot.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """How text becomes token shards."""

    tokenizer: str
    """gpt2, bytes, or a tokenizer's file or directory (a run's has one)."""
    column: str = "text"
    """JSON lines and Parquet: the key or column that holds the text."""
    processes: int | None = None
    """How many processes encode; changes no byte. Absent: one for each core."""
    shard_tokens: int = 100_000_000
    """Tokens of a shard; also how much is done again after a kill, at most."""


def data(arguments: list[str]) -> None:
    """`surefoot data prepare OUT INPUT... --tokenizer NAME [settings]`: text into token shards, or on with what was begun."""
    if arguments[:1] != ["prepare"]:
        said = f"no {arguments[0]!r}" if arguments else "data what?"
        raise ConfigError(f"{said}: surefoot data prepare OUT INPUT... --tokenizer NAME")
    rest = arguments[1:]
    places = next((place for place, argument in enumerate(rest) if argument.startswith("--")), len(rest))
    named, flags = rest[:places], rest[places:]
    if len(named) < 2 and "--help" not in flags:
        raise ConfigError("which text, and where to? surefoot data prepare OUT INPUT... --tokenizer NAME")
    verb = "surefoot data prepare OUT INPUT..."
    if not any(flag.startswith(("--token", "--help")) for flag in flags):
        raise ConfigError(
            "--tokenizer is missing: what turns the text into tokens\n"
            "  gpt2, bytes, or a tokenizer's file or directory (a run's, say): --tokenizer NAME"
        )
    asked = configured(Prepare, [], flags, verb=verb)[0]
    if asked.tokenizer in ("bpe", "characters"):
        raise ConfigError(
            f"--tokenizer {asked.tokenizer} is trained on text first: surefoot train gpt ... --out RUN does, and then\n"
            "  name that run's: --tokenizer RUN"
        )
    from surefoot.data.prepare import prepare_shards
    from surefoot.recipes.corpus import named_tokenizer

    try:
        prepare_shards(
            named[0],
            named[1:],
            tokenizer=named_tokenizer(asked.tokenizer),
            column=asked.column,
            processes=asked.processes,
            shard_tokens=asked.shard_tokens,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        raise
