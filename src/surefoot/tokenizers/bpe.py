"""Byte-pair encoding (https://arxiv.org/abs/1508.07909), trained on text, and tokenizers of other
projects, loaded from their files.

A tokenizer that is trained here, and GPT-2's, is byte-level (section 2.2 of the GPT-2 paper): every
text can be encoded, and a token is one or more bytes. Others may change a text (Unicode
normalization, SentencePiece's blanks); they refuse a text that they would not give back.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from surefoot.config.extras import needed_for, refuse_missing
from surefoot.config.paths import local_path
from surefoot.errors import DataError, Setting, out_of_range
from surefoot.tokenizers.end_token import end_token_beside, unknown_end_token, usual_end_token
from surefoot.tokenizers.long_words import cut_long_words
from surefoot.tokenizers.tokenizer import (
    DESCRIPTION,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    as_ids,
    encodable,
    not_a_tokenizer,
    parse_description,
    read_json,
)

if TYPE_CHECKING:
    import tokenizers

_WORD = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_PLAIN = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
# of SentencePiece, tiktoken and Mistral
_OTHER_FILES = ("tokenizer.model", "spiece.model", "qwen.tiktoken", "tekken.json")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte in a vocabulary of SentencePiece
_TYPE = re.compile(r'"type":"(\w+)"')
_SHOWN = 40  # characters of a text in a message
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
    # word -> number, in order of first appearance
    numbers: dict[str, int] = defaultdict(count().__next__)
    numbers_of_texts = []
    for text in texts:
        words = _WORD.findall(text)
        numbers_of_texts.append(np.fromiter(map(numbers.__getitem__, words), np.int32, len(words)))
    tokens_of_words = encode(list(numbers))
    lengths = np.array([len(tokens) for tokens in tokens_of_words], dtype=np.int64)
    firsts = np.cumsum(lengths) - lengths
    all_tokens = np.concatenate([np.empty(0, dtype), *tokens_of_words]).astype(dtype, copy=False)
    tokens_of_texts = []
    for numbers_of_text in numbers_of_texts:
        counts = lengths[numbers_of_text]
        # the tokens of a word begin after the tokens of the previous words
        shifts = firsts[numbers_of_text] - (np.cumsum(counts) - counts)
        places = np.arange(counts.sum()) + np.repeat(shifts, counts)
        tokens_of_texts.append(all_tokens[places])
    return tokens_of_texts


def splits_into_words(tokenizer: "tokenizers.Tokenizer") -> bool:
    """Return True if a byte-level tokenizer splits text exactly like GPT-2's tokenizer."""
    if tokenizer.pre_tokenizer is None or tokenizer.normalizer is not None:
        return False
    state = json.loads(tokenizer.pre_tokenizer.__getstate__())
    state.pop("trim_offsets", None)
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    return state == _PLAIN and all(token.special for token in added_tokens)


class BPETokenizer:
    """Tokenizer based on the library `tokenizers`: byte-level BPE, or another kind that is loaded.

    A kind that may change a text (Unicode normalization, SentencePiece) decodes whatever it
    encodes, and raises `DataError` for a text that it would not give back, except for a blank at
    its beginning. `end_token` is the name of the token between documents, or None.

    >>> tokenizer = BPETokenizer.train(["low lower lowest"] * 9, vocab_size=264)
    >>> tokenizer.decode(tokenizer.encode("lower")), len(tokenizer.encode("lower")) < 5
    ('lower', True)
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", *, end_token: str | None = END) -> None:
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # encode the characters of END as text
        self.vocab_size: int = tokenizer.get_vocab_size()
        self.eos_id: int | None = None if end_token is None else tokenizer.token_to_id(end_token)
        self.end_token = end_token if self.eos_id is not None else None
        self.dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self.is_exact = _is_byte_level(tokenizer) and _keeps_text(tokenizer)
        self.by_word = self.is_exact and splits_into_words(tokenizer)

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Self:
        """Train a tokenizer of up to `vocab_size` tokens on texts; training is deterministic.

        Words of more than 4096 characters are cut for the training.
        """
        with needed_for("a byte-pair tokenizer", "tokenizers"):
            from tokenizers import pre_tokenizers, trainers

        if vocab_size < 257:
            raise out_of_range("vocab_size", vocab_size, "257 or more: the bytes and an end token")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer = _byte_level()
        tokenizer.train_from_iterator(cut_long_words(texts, tokenizer.pre_tokenizer), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path | str, *, end_token: str | None = None) -> Self:
        """Load a file from `to_json` or the library `tokenizers`, or a directory with GPT-2's
        encoder.json and vocab.bpe.

        The end token is `end_token`, or the `eos_token` of tokenizer_config.json or
        special_tokens_map.json beside the file, or a usual name such as </s>, or none. Raises
        `DataError` if the vocabulary lacks a named one.
        """
        path = local_path(path, setting="path")
        for vocabulary, merges in _GPT2_FILES:
            if (path / vocabulary).is_file() and (path / merges).is_file():
                refuse_missing("GPT-2's tokenizer", "tokenizers")
                try:
                    tokenizer = _byte_level(str(path / vocabulary), str(path / merges))
                except Exception as problem:  # the library raises nothing narrower
                    raise not_a_tokenizer(path, problem) from problem
                return cls(tokenizer, end_token=_find_end_token(tokenizer, path, end_token))
        if not path.is_file():
            raise _no_tokenizer(path)
        text, description = read_json(path)
        is_ours = isinstance(description, dict) and "kind" in description
        if is_ours:
            saved = cls.from_json(text)
            return saved if end_token is None else saved.with_end_token(end_token)
        tokenizer = _from_library(text, where=path)
        return cls(tokenizer, end_token=_find_end_token(tokenizer, path.parent, end_token))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the tokenizer from the text of `to_json`. Raises `DataError` for any other text."""
        description = parse_description(text, ["bpe"])
        tokenizer = _from_library(json.dumps(description["tokenizer"]), where=DESCRIPTION)
        end_token = description.get("end_token", END)
        is_absent = isinstance(end_token, str) and tokenizer.token_to_id(end_token) is None
        if "end_token" in description and is_absent:
            raise unknown_end_token(end_token, tokenizer, source=DESCRIPTION)
        return cls(tokenizer, end_token=end_token)

    def to_json(self) -> str:
        """Return all tokens and merges as JSON in the format of the library `tokenizers`, and the
        end token unless it is <|endoftext|>.
        """
        described = {"kind": "bpe", "tokenizer": json.loads(self.tokenizer.to_str())}
        if self.eos_id != self.tokenizer.token_to_id(END):
            described["end_token"] = self.end_token
        return json.dumps(described, ensure_ascii=False)

    def with_end_token(self, name: str | None) -> Self:
        """Return the same tokenizer with another end token; raise `DataError` if the vocabulary
        lacks it.
        """
        if name is not None and self.tokenizer.token_to_id(name) is None:
            raise unknown_end_token(name, self.tokenizer)
        return type(self)(self.tokenizer, end_token=name)

    @cached_property
    def byte_counts(self) -> NDArray[Any]:
        """The number of UTF-8 bytes of each token, (vocab_size,); 0 for `eos_id`.

        A tokenizer of the SentencePiece kind puts a blank before a text, so the first token of a
        document counts one byte too many.
        """
        vocabulary = self.tokenizer.get_vocab()
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        if _decodes_bytes(self.tokenizer):
            for token, token_id in vocabulary.items():
                counts[token_id] = len(token)  # each byte is one letter of the token
            for token_id, added in self.tokenizer.get_added_tokens_decoder().items():
                counts[token_id] = len(added.content.encode())  # added tokens are plain text
        else:
            counts += self._decoded_bytes()
            for token, token_id in vocabulary.items():
                if _BYTE_TOKEN.fullmatch(token):
                    counts[token_id] = 1
        if self.eos_id is not None:  # GPT-2's files store `eos_id` as an ordinary token
            counts[self.eos_id] = 0
        return counts

    def _decoded_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each token adds to a text that it continues."""
        anchor = self.tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        before = len(self.tokenizer.decode(anchor, skip_special_tokens=False).encode())
        rows = [[*anchor, token_id] for token_id in range(self.vocab_size)]
        texts = self.tokenizer.decode_batch(rows, skip_special_tokens=False)
        lengths = [len(text.encode(errors="surrogatepass")) - before for text in texts]
        return np.maximum(np.array(lengths, dtype=np.int64), 0)

    def encode(self, text: str) -> NDArray[Any]:
        """Return the tokens of a text; raise `DataError` if they would not give it back."""
        return self._by_library([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text; ASCII texts are encoded word by word, other texts by the
        library on all cores.
        """
        of_words = [text for text in texts if self._is_of_words(text)]
        others = [text for text in texts if not self._is_of_words(text)]
        tokens_of_words = iter(tokens_by_word(of_words, self._by_library, self.dtype))
        tokens_of_others = iter(self._by_library(others))
        rows = []
        for text in texts:
            rows.append(next(tokens_of_words if self._is_of_words(text) else tokens_of_others))
        return rows

    def _is_of_words(self, text: str) -> bool:
        """Return True for a text that may be encoded word by word."""
        return self.by_word and text.isascii()

    def _by_library(self, texts: list[str]) -> list[NDArray[Any]]:
        encoded = self.tokenizer.encode_batch_fast(
            [encodable(text) for text in texts], add_special_tokens=False
        )
        rows = [encoding.ids for encoding in encoded]
        if not self.is_exact:
            decoded = self.tokenizer.decode_batch(rows, skip_special_tokens=False)
            for text, ids, again in zip(texts, rows, decoded, strict=True):
                # a kind of SentencePiece takes a blank at the beginning for its own
                if again not in (text, text.removeprefix(" ")):
                    raise _changed_text(self.tokenizer, text, ids, again)
        return [np.array(ids, dtype=self.dtype) for ids in rows]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode tokens to text and skip `eos_id`; invalid UTF-8 (a cut character) becomes
        U+FFFD.
        """
        tokens = [token for token in as_ids(ids, self.vocab_size) if token != self.eos_id]
        return self.tokenizer.decode(tokens)


def from_json(text: str) -> Tokenizer:
    """Rebuild a tokenizer from the result of `to_json`; raise `DataError` for any other text.

    >>> from_json(CharacterTokenizer("xy").to_json()).encode("yx").tolist()
    [1, 0]
    """
    classes: dict[str, type[ByteTokenizer | CharacterTokenizer | BPETokenizer]] = {
        "bytes": ByteTokenizer,
        "characters": CharacterTokenizer,
        "bpe": BPETokenizer,
    }
    description = parse_description(text, classes)
    return classes[description["kind"]].from_json(text)


def load(path: Path | str, *, end_token: str | None = None) -> Tokenizer:
    """Load a tokenizer from a directory, or from a file written by `to_json` or the library
    `tokenizers`.

    A directory needs tokenizer.json (as in a run directory), or encoder.json and vocab.bpe of
    GPT-2; otherwise raises `DataError`. `end_token` names the token between documents. Default:
    the `eos_token` of tokenizer_config.json or special_tokens_map.json beside the file, or a usual
    name such as </s>, or none.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    >>> _ = path.write_text(CharacterTokenizer.from_text("banana").to_json())
    >>> load(path).decode([1, 0])
    'ba'
    """
    path = local_path(path, setting="path")
    inside = path / "tokenizer.json"
    file = inside if inside.is_file() else path
    if not file.is_file():
        return BPETokenizer.load(file, end_token=end_token)
    text, description = read_json(file)
    is_ours = isinstance(description, dict) and "kind" in description
    if not is_ours:
        return BPETokenizer.load(file, end_token=end_token)
    saved = from_json(text)
    if end_token is None:
        return saved
    if not isinstance(saved, BPETokenizer):
        raise DataError(
            "end-token-fixed",
            problem=f"end_token = {end_token!r}: the tokenizer of bytes or characters in {file} has"
            " no tokens with names",
            remedy=("leave out", Setting("data.end_token")),
            setting="data.end_token",
            value=end_token,
        )
    return saved.with_end_token(end_token)


def _no_tokenizer(path: Path) -> DataError:
    others = [path / name for name in _OTHER_FILES if (path / name).is_file()]
    if others:
        return DataError(
            "tokenizer-of-another-form",
            problem=f"{others[0]} is a tokenizer without a tokenizer.json beside it",
            reason="only the library `tokenizers` reads tokenizers here",
            remedy="write one: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
            path=others[0],
        )
    return DataError(
        "tokenizer-missing",
        problem=f"no tokenizer at {path}",
        remedy="give a tokenizer.json, or a directory with GPT-2's encoder.json and vocab.bpe",
        path=path,
    )


def _byte_level(*files: str) -> "tokenizers.Tokenizer":
    with needed_for("a byte-pair tokenizer", "tokenizers"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(*files) if files else models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_library(text: str, *, where: str | Path) -> "tokenizers.Tokenizer":
    with needed_for("a byte-pair tokenizer", "tokenizers"):
        from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as problem:  # the library raises nothing narrower
        raise not_a_tokenizer(where, problem) from problem
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(
            "tokenizer-drops-merges",
            problem=f"{where} drops merges at random",
            reason="the same text would have different tokens each time",
            remedy="set its dropout to null",
            source=where,
        )
    last = max(tokenizer.get_vocab().values())
    tokens = tokenizer.get_vocab_size()
    if last + 1 != tokens:
        raise DataError(
            "tokenizer-with-gaps",
            problem=f"{where} has gaps in its token numbers: {tokens} tokens, but the largest number"
            f" is {last}",
            source=where,
        )
    return tokenizer


def _find_end_token(
    tokenizer: "tokenizers.Tokenizer", folder: Path, chosen: str | None
) -> str | None:
    """Return the chosen end token, or the one in the files of a folder, or a usual one."""
    tokenizer.encode_special_tokens = True
    if chosen is not None:
        if tokenizer.token_to_id(chosen) is None:
            raise unknown_end_token(chosen, tokenizer)
        return chosen
    beside = end_token_beside(folder)
    if beside is None:
        return usual_end_token(tokenizer)
    name, source = beside
    if tokenizer.token_to_id(name) is None:
        raise unknown_end_token(name, tokenizer, source=source)
    return name


def _decodes_bytes(tokenizer: "tokenizers.Tokenizer") -> bool:
    decoder = tokenizer.decoder
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _is_byte_level(tokenizer: "tokenizers.Tokenizer") -> bool:
    normalizer = tokenizer.normalizer
    if normalizer is not None:
        described = json.loads(normalizer.__getstate__())
        is_empty = described.get("type") == "Sequence" and not described.get("normalizers")
        if not is_empty:
            return False
    return _decodes_bytes(tokenizer)


def _keeps_text(tokenizer: "tokenizers.Tokenizer") -> bool:
    """Return True if a tokenizer gives back a text with bytes, characters of all lengths in UTF-8,
    and its own added tokens.
    """
    codes = (*range(256), 0x7FF, *range(0x800, 0xD800, 0x800), *range(0x10000, 0x110000, 0x10000))
    characters = "".join(map(chr, codes))
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    added = " ".join(f" {token.content} " for token in added_tokens)
    text = f"Hello, WORLD 12 dogs\n\n  a\tb {characters}{added} end "
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(tokens.ids, skip_special_tokens=False)) == text


def _changed_text(
    tokenizer: "tokenizers.Tokenizer", text: str, ids: list[int], again: str
) -> DataError:
    """Return the error for a text that a tokenizer would not give back, with the reason."""
    shorter = min(len(text), len(again))
    place = 0  # of the first difference
    while place < shorter and text[place] == again[place]:
        place += 1
    begin = max(0, place - _SHOWN // 2)
    before = text[begin : begin + _SHOWN]
    after = again[begin : begin + _SHOWN]
    unknown_token = getattr(tokenizer.model, "unk_token", None) or "<unk>"
    unknown = tokenizer.token_to_id(str(unknown_token))
    normalizer = tokenizer.normalizer
    if unknown is not None and unknown in ids:
        reason = "it has no tokens for these characters"
    elif normalizer is not None and normalizer.normalize_str(before) != before:
        types = _TYPE.findall(normalizer.__getstate__().decode())
        names = ", ".join(dict.fromkeys(types))
        reason = f"its normalizer ({names}) writes these characters differently"
    else:
        reason = "it drops or adds characters"
    return DataError(
        "tokenizer-changes-text",
        problem=f"the tokenizer changes the text: {before!r} would come back as {after!r}"
        f" (character {place + 1})",
        reason=f"{reason}, so the model would learn another text than this one",
        remedy="use a byte-level tokenizer, such as GPT-2's, or change the text in this way before",
        place=place,
    )
