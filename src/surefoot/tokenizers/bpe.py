"""Byte-pair encoding (https://arxiv.org/abs/1508.07909), trained on text or loaded from GPT-2's
files.

Tokenizers are byte-level (section 2.2 of the GPT-2 paper): every text can be encoded, and a token
is one or more bytes.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.config.extras import needed_for, refuse_missing
from surefoot.config.paths import local_path
from surefoot.errors import DataError
from surefoot.tokenizers.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    as_ids,
    encodable,
    parse_description,
    read_json,
)

if TYPE_CHECKING:
    import tokenizers

_WORD = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
END = "<|endoftext|>"
_GPT2_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


def tokens_by_word(
    texts: Sequence[str], encode: Callable[[list[str]], list[NDArray[Any]]], dtype: Any
) -> list[NDArray[Any]]:
    """Return the tokens of ASCII texts; `encode` is called once, with all distinct words.

    >>> tokens_by_word(
    ...     ["a bb a a"],
    ...     lambda words: [np.array([len(word)] * len(word)) for word in words],
    ...     np.uint16,
    ... )[0].tolist()
    [1, 3, 3, 3, 2, 2, 2, 2]
    """
    number: dict[str, int] = defaultdict(
        count().__next__
    )  # word -> number, in order of first appearance
    numbers = [
        np.fromiter(map(number.__getitem__, words), np.int32, len(words))
        for words in map(_WORD.findall, texts)
    ]
    tokens = encode(list(number))
    lengths = np.array([len(each) for each in tokens], dtype=np.int64)
    first = np.cumsum(lengths) - lengths
    row = np.concatenate([np.empty(0, dtype), *tokens]).astype(dtype, copy=False)
    token_arrays = []
    for chosen in numbers:
        counts = lengths[chosen]
        # the tokens of a word begin after the tokens of the previous words
        shifts = first[chosen] - (np.cumsum(counts) - counts)
        token_arrays.append(row[np.arange(counts.sum()) + np.repeat(shifts, counts)])
    return token_arrays


def splits_into_words(tokenizer: "tokenizers.Tokenizer") -> bool:
    """Return True if a byte-level tokenizer splits text exactly like GPT-2's tokenizer."""
    if tokenizer.pre_tokenizer is None or tokenizer.normalizer is not None:
        return False
    pieces = json.loads(tokenizer.pre_tokenizer.__getstate__())
    plain = {key: value for key, value in pieces.items() if key != "trim_offsets"} == _PLAIN
    return plain and all(token.special for token in tokenizer.get_added_tokens_decoder().values())


class BPETokenizer:
    """Byte-level BPE tokenizer based on the library `tokenizers`.

    >>> tokenizer = BPETokenizer.train(["low lower lowest"] * 9, vocab_size=264)
    >>> tokenizer.decode(tokenizer.encode("lower")), len(tokenizer.encode("lower")) < 5
    ('lower', True)
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self.tokenizer, tokenizer.encode_special_tokens = (
            tokenizer,
            True,
        )  # encode the characters of END as text
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.eos_id: int | None = tokenizer.token_to_id(END)
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.by_word = splits_into_words(tokenizer)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Self:
        """Train a tokenizer of up to `vocab_size` tokens on texts; training is deterministic."""
        with needed_for("a byte-pair tokenizer", "tokenizers"):
            from tokenizers import pre_tokenizers, trainers

        if vocab_size < 257:
            raise DataError(
                f"vocab_size = {vocab_size}: byte pairs need at least 257 tokens, the 256 bytes and an end token"
            )
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer = _byte_level()
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load a file from `to_json` or the library `tokenizers`, or a directory with GPT-2's
        encoder.json and vocab.bpe.
        """
        path = local_path(path, setting="path")
        for vocabulary, merges in _GPT2_FILES:
            if (path / vocabulary).is_file() and (path / merges).is_file():
                refuse_missing("GPT-2's tokenizer", "tokenizers")
                try:
                    return cls(_byte_level(str(path / vocabulary), str(path / merges)))
                except Exception as problem:  # the library raises nothing narrower
                    raise DataError(
                        f"{path} does not contain GPT-2's tokenizer: {problem}"
                    ) from problem
        if not path.is_file():
            raise DataError(
                f"no tokenizer at {path}\n"
                "  give a tokenizer.json, or a directory with GPT-2's encoder.json and vocab.bpe"
            )
        text, description = read_json(path, problem=f"{path} is not a tokenizer")
        is_ours = isinstance(description, dict) and "kind" in description
        return cls.from_json(text) if is_ours else cls(_from_library(text, where=str(path)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the tokenizer from the text of `to_json`. Raises `DataError` for any other text."""
        return cls(
            _from_library(
                json.dumps(parse_description(text, "bpe")["tokenizer"]), where="the description"
            )
        )

    def to_json(self) -> str:
        """Return all tokens and merges as JSON in the format of the library `tokenizers`."""
        return json.dumps(
            {"kind": "bpe", "tokenizer": json.loads(self.tokenizer.to_str())}, ensure_ascii=False
        )

    @property
    def byte_counts(self) -> NDArray[Any]:
        """The number of UTF-8 bytes of each token, (vocab_size,); 0 for `eos_id`."""
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self.tokenizer.get_vocab().items():
            counts[token_id] = len(token)  # each byte is one letter of the token
        for token_id, added in self.tokenizer.get_added_tokens_decoder().items():
            counts[token_id] = len(added.content.encode())  # added tokens are plain text
        if self.eos_id is not None:  # GPT-2's files store `eos_id` as an ordinary token
            counts[self.eos_id] = 0
        return counts

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text."""
        return np.array(
            self.tokenizer.encode(encodable(text), add_special_tokens=False).ids, dtype=self.dtype
        )

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text; ASCII texts are encoded word by word, other texts by the
        library on all cores.
        """
        plain = [self.by_word and text.isascii() for text in texts]
        by_word = iter(tokens_by_word([*compress(texts, plain)], self._by_library, self.dtype))
        by_library = iter(
            self._by_library(
                [text for text, is_plain in zip(texts, plain, strict=True) if not is_plain]
            )
        )
        return [next(by_word if is_plain else by_library) for is_plain in plain]

    def _by_library(self, texts: list[str]) -> list[NDArray[Any]]:
        encoded = self.tokenizer.encode_batch_fast(
            [encodable(text) for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text and skip `eos_id`; invalid UTF-8 (a cut character) becomes
        U+FFFD.
        """
        return self.tokenizer.decode(
            [token for token in as_ids(ids, self.vocab_size) if token != self.eos_id]
        )


def from_json(text: str) -> Tokenizer:
    """Rebuild a tokenizer from the result of `to_json`; raise `DataError` for any other text.

    >>> from_json(CharacterTokenizer("xy").to_json()).encode("yx").tolist()
    [1, 0]
    """
    kinds: dict[str, type[ByteTokenizer | CharacterTokenizer | BPETokenizer]] = {
        "bytes": ByteTokenizer,
        "characters": CharacterTokenizer,
        "bpe": BPETokenizer,
    }
    return kinds[parse_description(text, None)["kind"]].from_json(text)


def load(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a directory, or from a file written by `to_json` or the library
    `tokenizers`.

    A directory needs tokenizer.json (as in a run directory), or encoder.json and vocab.bpe of
    GPT-2; otherwise raises `DataError`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    >>> _ = path.write_text(CharacterTokenizer.from_text("banana").to_json())
    >>> load(path).decode([1, 0])
    'ba'
    """
    path = local_path(path, setting="path")
    inside = path / "tokenizer.json"
    file = inside if inside.is_file() else path
    text, description = (
        read_json(file, problem=f"{file} is not a tokenizer") if file.is_file() else ("", None)
    )
    return (
        from_json(text)
        if isinstance(description, dict) and "kind" in description
        else BPETokenizer.load(file)
    )


def _byte_level(*files: str) -> "tokenizers.Tokenizer":
    with needed_for("a byte-pair tokenizer", "tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(*files) if files else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_library(text: str, *, where: str) -> "tokenizers.Tokenizer":
    with needed_for("a byte-pair tokenizer", "tokenizers"):
        from tokenizers import Tokenizer, decoders

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as problem:  # the library raises nothing narrower
        raise DataError(f"{where} is not a tokenizer: {problem}") from problem
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    is_byte_level = (
        isinstance(tokenizer.decoder, decoders.ByteLevel) and tokenizer.normalizer is None
    )
    if not is_byte_level or not _keeps_text(tokenizer):
        raise DataError(
            f"{where} is not a byte-level tokenizer that decodes every text exactly\n"
            "  use one like GPT-2's, such as the tokenizer of a run with tokenizer bpe"
        )
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(
            f"{where} drops merges at random: the same text would have different tokens each time\n  set its dropout to null"
        )
    last, tokens = max(tokenizer.get_vocab().values()), tokenizer.get_vocab_size()
    if last + 1 != tokens:
        raise DataError(
            f"{where} has gaps in its token numbers: {tokens} tokens, but the largest number is {last}"
        )
    return tokenizer


def _keeps_text(tokenizer: "tokenizers.Tokenizer") -> bool:
    codes = (*range(256), 0x7FF, *range(0x800, 0xD800, 0x800), *range(0x10000, 0x110000, 0x10000))
    added = " ".join(
        f" {token.content} " for token in tokenizer.get_added_tokens_decoder().values()
    )
    text = f"Hello, WORLD 12 dogs\n\n  a\tb {''.join(map(chr, codes))}{added} end "
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(tokens.ids, skip_special_tokens=False)) == text
