"""From text to tokens and back: one token per byte, or one per character. Byte pairs are in `tokenizers/bpe.py`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import DataError


class Tokenizer(Protocol):
    """Text <-> numbers from 0 to `vocab_size` - 1."""

    @property
    def vocab_size(self) -> int:
        """How many different tokens there are."""

    @property
    def eos_id(self) -> int | None:
        """The token after a document, or None."""

    @property
    def byte_counts(self) -> NDArray[Any]:
        """For each token how many bytes of UTF-8 it stands for; 0 for `eos_id`."""

    def encode(self, text: str) -> NDArray[Any]:
        """The tokens of a text, 1-dimensional and unsigned."""

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of many texts."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens."""

    def to_json(self) -> str:
        """Everything that `from_json` needs."""


class ByteTokenizer:
    """The bytes of UTF-8, and a token for the end of a document: nothing is unknown.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    """

    vocab_size = 257
    eos_id = 256

    @property
    def byte_counts(self) -> NDArray[Any]:
        """One each."""
        return np.array([1] * 256 + [0])

    def encode(self, text: str) -> NDArray[np.uint16]:
        """One token per byte; raises `DataError` for half of a surrogate pair, which UTF-8 has no bytes for."""
        return np.frombuffer(encodable(text).encode(), dtype=np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these bytes; invalid UTF-8 (a sample may start inside a character) becomes U+FFFD, `eos_id` nothing."""
        return bytes(token for token in as_ids(ids, self.vocab_size) if token != self.eos_id).decode(errors="replace")

    def to_json(self) -> str:
        """Only its name: there is nothing to remember."""
        return json.dumps({"kind": "bytes"})

    @classmethod
    def from_json(cls, text: str) -> Self:
        parse_description(text, "bytes")
        return cls()


class CharacterTokenizer:
    """One token per character of a given set, numbered in its order.

    >>> tokenizer = CharacterTokenizer.from_text("banana")
    >>> tokenizer.characters, tokenizer.encode("nab").tolist(), tokenizer.decode([2, 0])
    ('abn', [2, 0, 1], 'na')
    """

    eos_id = None

    def __init__(self, characters: str) -> None:
        if not characters:
            raise DataError("a tokenizer of no characters: give the text it is for, CharacterTokenizer.from_text(text)")
        if len(set(characters)) < len(characters):
            twice = next(character for index, character in enumerate(characters) if character in characters[:index])
            raise DataError(
                f"the characters of a tokenizer must differ: {twice!r} is there twice; CharacterTokenizer.from_text(text) sorts them out"
            )
        self.characters, self.vocab_size = characters, len(characters)
        codes = _codes(characters)
        self.numbers = np.full(int(codes.max()) + 1, -1, dtype=np.int32)
        self.numbers[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The tokenizer of all characters that a text holds, sorted."""
        return cls("".join(sorted(set(text))))

    @property
    def byte_counts(self) -> NDArray[Any]:
        """As many as UTF-8 has for each character."""
        return np.array([len(character.encode(errors="surrogatepass")) for character in self.characters])

    def encode(self, text: str) -> NDArray[Any]:
        """One token per character; raises `DataError` for one that is not in the set, naming it and where it stands."""
        codes = _codes(text)
        ids = np.where(codes < len(self.numbers), self.numbers[np.minimum(codes, len(self.numbers) - 1)], -1)
        if (ids < 0).any():
            index = int((ids < 0).argmax())
            raise DataError(
                f"character {text[index]!r} at position {index} is not one of the {self.vocab_size} this tokenizer knows\n"
                "  make the tokenizer from all the text, or use ByteTokenizer(), which knows everything"
            )
        return ids.astype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of many texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens."""
        return "".join(self.characters[token] for token in as_ids(ids, self.vocab_size))

    def to_json(self) -> str:
        """The characters in their order."""
        return json.dumps({"kind": "characters", "characters": self.characters})

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(str(parse_description(text, "characters")["characters"]))


def parse_description(text: str, kind: str | None) -> dict[str, Any]:
    """The contents that `to_json` wrote for a tokenizer of one kind (None: of any); `DataError` for anything else."""
    needed = {"bytes": {"kind"}, "characters": {"kind", "characters"}, "bpe": {"kind", "tokenizer"}}
    _, fields = read_json(text, problem="no description of a tokenizer")
    if not isinstance(fields, dict) or fields.get("kind") not in needed or set(fields) != needed[fields["kind"]]:
        raise DataError(f"no description of a tokenizer: {text[:60]!r}; expected what to_json() gives")
    if kind is not None and fields["kind"] != kind:
        raise DataError(f"the description is of a tokenizer of {fields['kind']}, asked for was one of {kind}")
    return fields


def read_json(source: str | Path, *, problem: str) -> tuple[str, Any]:
    """A text or that of a file, and its JSON values; `DataError` with `problem` if it is not JSON."""
    try:
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        return text, json.loads(text)
    except (OSError, ValueError, RecursionError) as cause:
        raise DataError(f"{problem}: {cause}") from cause


def _codes(text: str) -> NDArray[np.uint32]:
    # half surrogates pass: they are characters to Python, and must be found unknown or known like any other
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def as_ids(ids: Any, vocab_size: int) -> list[int]:
    """Tokens as plain integers; `DataError` for one outside the vocabulary."""
    # not above: the processes that prepare token shards start in a tenth of the time without torch
    from torch import Tensor

    tokens = ids.tolist() if isinstance(ids, np.ndarray | Tensor) else [int(token) for token in ids]
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise DataError(
                f"token {token} is outside this tokenizer's vocabulary of {vocab_size}: was it trained with another one?"
            )
    return tokens


def encodable(text: str) -> str:
    """The text; `DataError` where it holds half a character, which no bytes stand for.

    >>> encodable("a")
    'a'
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(
            f"character {problem.start} of the text is half a surrogate pair: not text, and not encodable"
        ) from problem
    return text
