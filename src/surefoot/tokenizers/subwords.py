"""Subword tokenizers for translation: BPE or a unigram model, trained on text; decoding restores
every text exactly.

Both models represent each byte by a letter (section 2.2 of the GPT-2 paper). Each digit is a token;
a text begins with a space.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.config.extras import needed_for
from surefoot.config.paths import local_path, read_regular
from surefoot.errors import out_of_range
from surefoot.tokenizers.long_words import cut_long_words
from surefoot.tokenizers.tokenizer import (
    DESCRIPTION,
    as_ids,
    encodable,
    not_a_tokenizer,
    parse_description,
)

if TYPE_CHECKING:
    import tokenizers

Kind = Literal["bpe", "unigram"]

PADDING = 0  # of rows
BEGIN = 1  # of a target
END = 2  # of a source or target
_SPECIAL = ["<padding>", "<begin>", "<end>"]


class SubwordTokenizer:
    """Subword tokenizer based on the library `tokenizers`; tokens 0, 1 and 2 are padding, begin and
    end.

    >>> tokenizer = SubwordTokenizer.train(["low lower lowest"] * 9, vocab_size=270)
    >>> tokenizer.decode(tokenizer.encode("lower")), len(tokenizer.encode("lower")) < 5
    ('lower', True)
    """

    min_vocab_size = 256 + len(_SPECIAL)
    """The smallest vocabulary size: 256 bytes, padding, begin and end."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # encode the characters <end> as text
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.kind: Kind = "bpe" if type(tokenizer.model).__name__ == "BPE" else "unigram"

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int, kind: Kind = "bpe") -> Self:
        """Train a tokenizer of up to `vocab_size` tokens on texts; small texts give fewer tokens.

        `kind` is "bpe" (https://arxiv.org/abs/1508.07909) or "unigram"
        (https://arxiv.org/abs/1804.10959).
        """
        with needed_for("a subword tokenizer", "tokenizers"):
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        smallest = cls.min_vocab_size
        if vocab_size < smallest:
            meaning = f"{smallest} or more: the bytes, padding, begin and end"
            raise out_of_range("vocab_size", vocab_size, meaning)
        arguments: dict[str, Any] = {
            "vocab_size": vocab_size,
            "special_tokens": _SPECIAL,
            "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
            "show_progress": False,
        }
        trainer: Any
        if kind == "bpe":
            tokenizer = Tokenizer(models.BPE())
            trainer = trainers.BpeTrainer(**arguments)
        else:
            tokenizer = Tokenizer(models.Unigram())
            trainer = trainers.UnigramTrainer(**arguments)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        with_blanks = (f" {text}" for text in texts)
        words = cut_long_words(with_blanks, tokenizer.pre_tokenizer)
        tokenizer.train_from_iterator(words, trainer)
        return cls(tokenizer if kind == "bpe" else _repeatable(tokenizer))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild a tokenizer from the result of `to_json`; raise `DataError` for any other
        text.
        """
        with needed_for("a subword tokenizer", "tokenizers"):
            from tokenizers import Tokenizer

        fields = parse_description(text, ["subwords"])
        try:
            tokenizer = Tokenizer.from_str(json.dumps(fields["tokenizer"]))
        except Exception as problem:  # the library raises nothing narrower
            raise not_a_tokenizer(DESCRIPTION, problem) from problem
        if [tokenizer.id_to_token(index) for index in range(len(_SPECIAL))] != _SPECIAL:
            raise not_a_tokenizer(DESCRIPTION, f"its first tokens are not {', '.join(_SPECIAL)}")
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Load a tokenizer from a file written by `to_json`."""
        try:
            content = read_regular(local_path(path, setting="path"), limit=200_000_000)
            return cls.from_json(content.decode())
        except (OSError, UnicodeDecodeError) as problem:
            raise not_a_tokenizer(path, problem) from problem

    def to_json(self) -> str:
        """Return all tokens, with merges or weights, as JSON in the format of the library
        `tokenizers`.
        """
        description = {"kind": "subwords", "tokenizer": json.loads(self.tokenizer.to_str())}
        return json.dumps(description, ensure_ascii=False)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the tokens of a text, without begin and end."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the tokens of each text, encoded on all cores, without begin and end."""
        encoded = self.tokenizer.encode_batch_fast(
            [f" {encodable(text)}" for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text and skip padding, begin and end; invalid UTF-8 becomes U+FFFD."""
        tokens = [token for token in as_ids(ids, self.vocab_size) if token > END]
        return self.tokenizer.decode(tokens).removeprefix(" ")


def _repeatable(tokenizer: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
    """Return a unigram tokenizer without what its training, which is not deterministic, left to
    chance: the order of the tokens, the last digits of weights, and the weights of pruned letters.
    """
    description = json.loads(tokenizer.to_str())
    model = description["model"]
    weights = {token: round(weight, 6) for token, weight in model["vocab"][len(_SPECIAL) :]}
    lowest = min((weight for token, weight in weights.items() if len(token) > 1), default=0.0)
    for letter, weight in weights.items():
        if weight < lowest:
            weights[letter] = lowest - 1.0
    by_weight = sorted(weights, key=lambda token: (-weights[token], token))
    special = [[token, 0.0] for token in _SPECIAL]
    model["vocab"] = special + [[token, weights[token]] for token in by_weight]
    return type(tokenizer).from_str(json.dumps(description))
