"""`surefoot data`: `look` shows what recipes make of a path; `prepare` writes token shards from text
files.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from surefoot.cli.main import unknown_subcommand
from surefoot.cli.options import asks_for_help, limited, missing_argument, only_options
from surefoot.errors import Remedy, Setting, SurefootError, out_of_range


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Write token shards for --data.path from text, JSON lines (.jsonl) and
    Parquet files, gzipped or not, or from directories of such files. Each text
    file, JSON line or Parquet row is a document, followed by an end token. The
    same command continues after a stop or a kill and writes the same bytes. If
    it runs again, it checks finished shards and refuses changed inputs.

      surefoot data prepare shards/ fineweb/*.parquet --tokenizer gpt2
      surefoot train gpt --preset gpt2-124m --data.path shards/
    """

    out: Positional[Annotated[str, arg(metavar="OUT")]]
    """Directory of the shards."""
    inputs: Positional[Annotated[tuple[str, ...], arg(metavar="INPUT ...")]] = ()
    """Files, or directories of files."""
    tokenizer: str | None = None
    """gpt2, bytes, or the file or directory of a tokenizer, such as a run's directory. Required."""
    end_token: str | None = None
    """Token after each document, for a tokenizer's file or directory. Default: the one that its
    files name, or a usual one such as </s>, or none."""
    column: str = "text"
    """Key or column of the text in JSON lines and Parquet."""
    read_as: Literal["text"] | None = None
    """text: read every file as plain text, also JSON, CSV, HTML and notebooks, which are refused
    otherwise."""
    processes: int | None = limited(None, min_value=1)
    """Number of encoding processes. Does not change the shards. Default: one per core."""
    shard_tokens: int = limited(100_000_000, min_value=1)
    """Tokens per shard; at most this many are encoded again after a kill."""


def data(arguments: list[str]) -> None:
    """Run `surefoot data look` or `surefoot data prepare`."""
    if arguments[:1] == ["look"]:
        from surefoot.cli.data_look import look

        look(arguments[1:])
        return
    _prepare(arguments)


def _prepare(arguments: list[str]) -> None:
    if arguments[:1] != ["prepare"] and not asks_for_help(arguments):
        if not arguments:
            raise missing_argument("data needs a subcommand: look, or prepare", [], verb="data")
        raise unknown_subcommand(arguments[0], ("look", "prepare"), command="surefoot data")
    missing = (
        "data prepare needs an output directory and input files:"
        " surefoot data prepare OUT INPUT... --tokenizer NAME"
    )
    options = only_options(
        Prepare, arguments[1:] or arguments, verb="data prepare", missing=missing
    )
    if not options.inputs:
        raise missing_argument(missing, [], verb="data prepare")
    if options.tokenizer in (None, "bpe", "characters"):  # the last two are trained with a run
        meaning = "gpt2, bytes, or the file or directory of a tokenizer, such as a run's"
        raise out_of_range("tokenizer", options.tokenizer, meaning)
    from surefoot.recipes.gpt.corpus import named_tokenizer
    from surefoot.recipes.readers.text.prepare_shards import prepare_shards

    try:
        tokenizer = named_tokenizer(options.tokenizer, end_token=options.end_token)
        prepare_shards(
            options.out,
            options.inputs,
            tokenizer=tokenizer,
            column=options.column,
            read_as=options.read_as,
            processes=options.processes,
            shard_tokens=options.shard_tokens,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("\nstopped; the same command continues", file=sys.stderr)
        raise
    except SurefootError as problem:
        # here --column is what --data.column is in a recipe
        problem.remedies = tuple(_own_flag(remedy) for remedy in problem.remedies)
        raise


def _own_flag(remedy: Remedy) -> Remedy:
    if isinstance(remedy, Setting):
        return Setting(remedy.name.removeprefix("data."), remedy.value)
    if isinstance(remedy, tuple):
        parts = [_own_flag(part) for part in remedy]
        return tuple(part for part in parts if isinstance(part, str | Setting))
    return remedy
