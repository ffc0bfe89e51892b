"""Byte and character tokenizers, and the protocol of all tokenizers."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import DataError

DESCRIPTION = "the description"
_NAMES = {  # the names in a description, by kind
    "bytes": {"kind"},
    "characters": {"kind", "characters"},
    "bpe": {"kind", "tokenizer"},
    "subwords": {"kind", "tokenizer"},
}


class Tokenizer(Protocol):
    """Converter between text and tokens (integers from 0 to `vocab_size` - 1)."""

    @property
    def vocab_size(self) -> int:
        """The number of distinct tokens."""

    @property
    def eos_id(self) -> int | None:
        """The end-of-document token, or None if the tokenizer has no such token."""

    @property
    def byte_counts(self) -> NDArray[Any]:
        """The number of UTF-8 bytes of each token, (vocab_size,); 0 for `eos_id`."""

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text as a 1-dimensional unsigned array."""

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text."""

    def to_json(self) -> str:
        """Return a JSON description from which `from_json` rebuilds the tokenizer."""


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, with one token for the end of a document.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169]
    """

    vocab_size = 257
    eos_id = 256

    @property
    def byte_counts(self) -> NDArray[Any]:
        """The number of UTF-8 bytes of each token, (257,): 1 for bytes and 0 for `eos_id`."""
        return np.array([1] * 256 + [0])

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return one token per byte; raise `DataError` for half of a surrogate pair, which UTF-8
        cannot encode.
        """
        return np.frombuffer(encodable(text).encode(), dtype=np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text and skip `eos_id`; invalid UTF-8 (a cut character) becomes
        U+FFFD.
        """
        values = [token for token in as_ids(ids, self.vocab_size) if token != self.eos_id]
        return bytes(values).decode(errors="replace")

    def to_json(self) -> str:
        """Return the kind of the tokenizer as JSON."""
        return json.dumps({"kind": "bytes"})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the tokenizer from the text of `to_json`. Raises `DataError` for any other text."""
        parse_description(text, ["bytes"])
        return cls()


class CharacterTokenizer:
    """Tokenizer of a fixed set of characters; a token is the index of a character in the set.

    >>> tokenizer = CharacterTokenizer.from_text("banana")
    >>> tokenizer.characters, tokenizer.encode("nab").tolist(), tokenizer.decode([2, 0])
    ('abn', [2, 0, 1], 'na')
    """

    eos_id = None

    def __init__(self, characters: str) -> None:
        repeated = [character for character, count in Counter(characters).items() if count > 1]
        if repeated or not characters:
            what = f"{repeated[0]!r} is repeated" if repeated else "there is none"
            raise DataError(
                "characters-not-distinct",
                problem=f"a tokenizer needs at least one character, and each once: {what}",
                remedy="build it from your text: CharacterTokenizer.from_text(text)",
                repeated=repeated,
            )
        self.characters = characters
        self.vocab_size = len(characters)
        codes = _codes(characters)
        self.numbers = np.full(int(codes.max()) + 1, -1, dtype=np.int32)
        self.numbers[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Build a tokenizer of the distinct characters in a text, sorted."""
        return cls("".join(sorted(set(text))))

    @property
    def byte_counts(self) -> NDArray[Any]:
        """The number of UTF-8 bytes of each character, (vocab_size,)."""
        encoded = [character.encode(errors="surrogatepass") for character in self.characters]
        return np.array([len(one) for one in encoded])

    def encode(self, text: str) -> NDArray[Any]:
        """Return one token per character; raise `DataError` for an unknown character, with its
        position.
        """
        codes = _codes(text)
        last = len(self.numbers) - 1
        ids = np.where(codes <= last, self.numbers[np.minimum(codes, last)], -1)
        is_unknown = ids < 0
        if is_unknown.any():
            index = int(is_unknown.argmax())
            raise DataError(
                "character-unknown",
                problem=f"character {text[index]!r} at position {index} is not one of this"
                f" tokenizer's {self.vocab_size} characters",
                remedy="build the tokenizer from all the text, or use ByteTokenizer(), which"
                " encodes any text",
                character=text[index],
                position=index,
            )
        return ids.astype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text."""
        return "".join(self.characters[token] for token in as_ids(ids, self.vocab_size))

    def to_json(self) -> str:
        """Return the characters in order as JSON."""
        return json.dumps({"kind": "characters", "characters": self.characters})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the tokenizer from the text of `to_json`. Raises `DataError` for any other text."""
        description = parse_description(text, ["characters"])
        return cls(str(description["characters"]))


def parse_description(text: str, kinds: Iterable[str]) -> dict[str, Any]:
    """Parse the `to_json` result of a tokenizer of one of some kinds; raise `DataError` for any
    other text.
    """
    _, fields = read_json(text)
    if isinstance(fields, dict) and fields.get("kind") in [*kinds]:
        names = set(fields)
        if fields["kind"] == "bpe" and isinstance(fields.get("end_token"), str | None):
            names.discard("end_token")
        if names == _NAMES[fields["kind"]]:
            return fields
    expected = f"to_json() of the kind {' or '.join(kinds)}"
    raise not_a_tokenizer(DESCRIPTION, f"{text[:60]!r}; expected {expected}")


def read_json(source: str | Path) -> tuple[str, Any]:
    """Return a JSON text (or the text of a JSON file) and its parsed value; raise `DataError` if
    parsing fails.
    """
    try:
        text = source if isinstance(source, str) else source.read_text(encoding="utf-8")
        return text, json.loads(text)
    except (OSError, ValueError, RecursionError) as cause:
        where = DESCRIPTION if isinstance(source, str) else source
        raise not_a_tokenizer(where, cause) from cause


def not_a_tokenizer(source: str | Path, why: object) -> DataError:
    """Return the error for a file or a description that gives no tokenizer."""
    return DataError(
        "tokenizer-unreadable",
        problem=f"{source} cannot be read as a tokenizer: {why}",
        source=source,
    )


def _codes(text: str) -> NDArray[np.uint32]:
    # half surrogates are Python characters, and are known or unknown like other characters
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def as_ids(ids: Any, vocab_size: int) -> list[int]:
    """Convert tokens to Python integers; raise `DataError` for a token outside the vocabulary."""
    # a local import: the processes that prepare token shards start 10x faster without torch
    from torch import Tensor

    tokens = ids.tolist() if isinstance(ids, np.ndarray | Tensor) else [int(token) for token in ids]
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise outside_vocabulary(token, position, vocab_size)
    return tokens


def outside_vocabulary(
    token: int, position: int, vocab_size: int, *, path: Path | None = None
) -> DataError:
    """Return the error for a token that a vocabulary does not have."""
    error = DataError(
        "token-outside-vocabulary",
        problem=f"token {token} at position {position} is outside the vocabulary of {vocab_size}",
        reason="another tokenizer made these tokens",
        remedy="use that one",
        token=token,
        position=position,
        vocab_size=vocab_size,
        path=path,
    )
    return error if path is None else error.inside(str(path))


def encodable(text: str) -> str:
    """Return the text unchanged; raise `DataError` if the text has half a surrogate pair, which
    UTF-8 cannot encode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(
            "text-with-half-character",
            problem=f"character {problem.start} of the text is half a surrogate pair",
            reason="UTF-8 cannot encode it",
            position=problem.start,
        ) from problem
    return text
