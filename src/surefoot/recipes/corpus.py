"""A text as tokens: which tokenizer, what is trained on and what is held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import surefoot as sf

TOKENIZER = "tokenizer.json"  # in the run's directory
_LEAST_VOCABULARY = 257  # the bytes, and an end


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to score, and the tokenizer that made them."""

    training: Any
    held_out: Any
    tokenizer: Any

    @property
    def targets_per_byte(self) -> float:
        """Held-out tokens to predict for each byte of text; turns nats per token into bits per byte."""
        arrays = self.held_out.arrays if isinstance(self.held_out, sf.TokenShards) else [self.held_out]
        counts = self.tokenizer.byte_counts
        targets = sum(max(0, len(array) - 1) for array in arrays)
        return targets / max(1, sum(int(counts[array[1:]].sum()) for array in arrays))


def corpus(
    path: str | None, *, tokenizer: str, vocabulary: int | None, held_out_fraction: float, saved: Path | None
) -> Corpus:
    """The text at `path` (None: Python's standard library; a directory of token shards as it is), in tokens.

    `saved` is the tokenizer that a run wrote when it began: where it exists, that one is used, so that a run goes on with
    the tokens it has learned. Raises `DataError` for what cannot be read, `ConfigError` for what is not meant.
    """
    if path is not None and (Path(path) / "tokens.json").is_file():
        return _of_shards(Path(path), tokenizer=tokenizer, held_out_fraction=held_out_fraction)
    documents = sf.stdlib_documents() if path is None else sf.load_documents(path)
    training, held_out = sf.held_out_documents(documents, held_out_fraction=held_out_fraction)
    if saved is not None and saved.is_file():
        made = saved_tokenizer(saved)
    elif tokenizer == "bpe":
        made = sf.BpeTokenizer.trained(training, vocabulary=2048 if vocabulary is None else vocabulary)
    elif tokenizer == "characters":
        made = sf.CharacterTokenizer.of("".join(documents.values()))
    elif tokenizer == "bytes":
        made = sf.ByteTokenizer()
    else:
        made = _from_files(tokenizer)
    return Corpus(sf.encode_documents(training, made), sf.encode_documents(held_out, made), made)


def refuse_foreign_vocabulary(tokenizer: str, vocabulary: int | None) -> None:
    """Raise `ConfigError` where a size is given that the tokenizer has itself."""
    if vocabulary is not None and vocabulary < _LEAST_VOCABULARY and tokenizer == "bpe":
        raise sf.ConfigError(f"data.vocabulary = {vocabulary}: byte pairs need {_LEAST_VOCABULARY} tokens at least")
    if vocabulary is not None and tokenizer != "bpe":
        raise sf.ConfigError(
            f"data.vocabulary = {vocabulary} is for tokenizers that are trained here (bpe); {tokenizer!r} has its own\n"
            "  leave it out, or: --data.tokenizer bpe"
        )


def saved_tokenizer(path: Path) -> Any:
    """The tokenizer of a run; `CheckpointError` where its file is damaged."""
    try:
        return sf.tokenizer_from_json(path.read_text(encoding="utf-8"))
    except (sf.DataError, OSError, ValueError) as problem:
        raise sf.CheckpointError(f"{path} is damaged: {problem}") from problem


def _from_files(tokenizer: str) -> Any:
    if tokenizer != "gpt2":
        return sf.BpeTokenizer.load(tokenizer)
    place = Path.home() / ".cache" / "surefoot" / "gpt2"
    if not place.is_dir():
        raise sf.DataError(
            f"GPT-2's tokenizer is not at {place}\n"
            "  put its encoder.json and vocab.bpe there, or name their directory: --data.tokenizer DIR"
        )
    return sf.BpeTokenizer.load(place)


def _of_shards(path: Path, *, tokenizer: str, held_out_fraction: float) -> Corpus:
    shards = sf.TokenShards.open(path)
    made = sf.ByteTokenizer() if tokenizer == "bytes" else None
    if made is None:
        if tokenizer in ("bpe", "characters"):
            raise sf.ConfigError(
                f"{path} holds tokens, not text: --data.tokenizer must name what made them: gpt2, bytes, or a file"
            )
        made = _from_files(tokenizer)
    if made.vocabulary < shards.vocabulary:
        raise sf.ConfigError(
            f"{path} was written for {shards.vocabulary} different tokens, --data.tokenizer {tokenizer} has {made.vocabulary}"
        )
    training, held_out = shards.divided(held_out_fraction)
    return Corpus(training, held_out, made)
