"""`surefoot data ...`: token shards from text."""

import sys
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from surefoot.cli.options import by_flag, limited, only_options
from surefoot.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Write the tokens of text files and JSON lines (.jsonl), gzipped or not, and of
    Parquet, and of directories of them, as shards for --data.path. A text file is one
    document, a line of JSON or a row of Parquet one each; an end token follows
    each. Stopped or killed, the same command goes on, to the same bytes; run once
    more, it checks them. Inputs that have changed since are refused.

      surefoot data prepare shards/ fineweb/*.parquet --tokenizer gpt2
      surefoot train gpt --preset gpt2-124m --data.path shards/
    """

    out: Positional[Annotated[str, arg(metavar="OUT")]]
    """Directory of the shards."""
    inputs: Positional[Annotated[tuple[str, ...], arg(metavar="INPUT ...")]] = ()
    """Files, or directories of them."""
    tokenizer: str | None = None
    """gpt2, bytes, or a tokenizer's file or directory (a run's has one); it must be given."""
    column: str = "text"
    """JSON lines and Parquet: the key or column that holds the text."""
    processes: int | None = limited(None, least=1)
    """How many processes encode; changes no byte. Absent: one for each core."""
    shard_tokens: int = limited(100_000_000, least=1)
    """Tokens of a shard; also how much is done again after a kill, at most."""


def data(arguments: list[str]) -> None:
    """Make shards of tokens out of text (`data prepare`)."""
    form = "surefoot data prepare OUT INPUT... --tokenizer NAME"
    if arguments[:1] != ["prepare"] and "help" not in dict(by_flag(arguments)):
        raise ConfigError(f"no {arguments[0]!r}: {form}" if arguments else f"data what?: {form}")
    missing = f"which text, and where to? {form}"
    asked = only_options(Prepare, arguments[1:] or arguments, verb="data prepare", missing=missing)
    if not asked.inputs:
        raise ConfigError(missing)
    if asked.tokenizer is None:
        raise ConfigError(
            "--tokenizer is missing: what turns the text into tokens\n"
            "  gpt2, bytes, or a tokenizer's file or directory (a run's, say): --tokenizer NAME"
        )
    if asked.tokenizer in ("bpe", "characters"):
        raise ConfigError(
            f"--tokenizer {asked.tokenizer} is trained on text first: surefoot train gpt ... --run-dir RUN does, and then\n"
            "  name that run's: --tokenizer RUN"
        )
    from surefoot.data.text.prepare_shards import prepare_shards
    from surefoot.recipes.gpt.corpus import named_tokenizer

    try:
        prepare_shards(
            asked.out,
            asked.inputs,
            tokenizer=named_tokenizer(asked.tokenizer),
            column=asked.column,
            processes=asked.processes,
            shard_tokens=asked.shard_tokens,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        raise
