"""Tokenizers that normalize or are of the SentencePiece kind: exact where they encode, else refused
with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from refused import refused
from surefoot.errors import DataError
from surefoot.tokenizers import BPETokenizer, from_json, load
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = "the cat sat on the mat;  the rat\n\tsat caf\u00e9 \u65e5\u672c \U0001f600\n" * 3


def nfc_of_bytes() -> Tokenizer:
    """As Qwen's."""
    tokenizer = BPETokenizer.train([TEXT], vocab_size=280).tokenizer
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def empty_normalizer() -> Tokenizer:
    """As DeepSeek's."""
    tokenizer = BPETokenizer.train([TEXT], vocab_size=280).tokenizer
    tokenizer.normalizer = normalizers.Sequence([])
    return tokenizer


def with_byte_tokens(model: str) -> Tokenizer:
    """As Llama 2's (BPE) and its relatives: blanks are letters, unknown characters are bytes."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *tokens]
    if model == "bpe":
        trained = Tokenizer(models.BPE())
        trained.normalizer = normalizers.Replace(" ", "\u2581")
        trained.train_from_iterator(
            ["the cat sat on the mat"], trainers.BpeTrainer(vocab_size=40, show_progress=False)
        )
        described = json.loads(trained.to_str())["model"]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        for token in sorted(described["vocab"], key=described["vocab"].get):
            vocabulary.setdefault(token, len(vocabulary))
        merges = [tuple(pair) for pair in described["merges"]]
        tokenizer = Tokenizer(
            models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
    else:
        letters = ["\u2581", *"thecasonmr;", "\u2581the", "\u2581sat"]
        scores = [(token, 0.0) for token in tokens] + [(letter, -2.0) for letter in letters]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def loaded(tokenizer: Tokenizer, folder: Path) -> BPETokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    read = load(folder)
    assert isinstance(read, BPETokenizer)
    return read


KINDS = {
    "NFC": nfc_of_bytes,
    "empty": empty_normalizer,
    "sentencepiece bpe": lambda: with_byte_tokens("bpe"),
    "sentencepiece unigram": lambda: with_byte_tokens("unigram"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_give_back_a_text_with_the_library_s_tokens(kind: str, tmp_path: Path) -> None:
    library = KINDS[kind]()
    tokenizer = loaded(library, tmp_path)
    tokens = tokenizer.encode(TEXT)
    assert tokens.tolist() == library.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.encode_all([TEXT, ""])[0].tolist() == tokens.tolist()
    assert tokenizer.eos_id is not None
    again = from_json(tokenizer.to_json())
    assert again.encode(TEXT).tolist() == tokens.tolist()
    assert again.eos_id == tokenizer.eos_id


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_tokens_are_those_of_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = loaded(KINDS[kind](), tmp_path)
    count = tokenizer.byte_counts[tokenizer.encode(TEXT)].sum()
    blank_at_the_beginning = "sentencepiece" in kind
    assert count == len(TEXT.encode()) + blank_at_the_beginning
    assert tokenizer.byte_counts[tokenizer.eos_id] == 0


def words() -> Tokenizer:
    return Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))


def collapsing() -> Tokenizer:
    """As T5's: white space of any kind and length is one blank."""
    tokenizer = with_byte_tokens("unigram")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), tokenizer.normalizer]
    )
    return tokenizer


def trimming() -> Tokenizer:
    tokenizer = BPETokenizer.train([TEXT], vocab_size=280).tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text", "place", "reason"),
    [
        (nfc_of_bytes, "cafe\u0301 noir", 3, "its normalizer (NFC)"),
        (collapsing, "the cat\nsat", 7, "its normalizer (Sequence, Replace, Prepend)"),
        (words, "b", 0, "it has no tokens"),
        (trimming, "the cat", 3, "it drops or adds characters"),
    ],
)
def test_a_text_that_would_come_back_changed_is_refused_with_the_reason(
    tokenizer: object, text: str, place: int, reason: str, tmp_path: Path
) -> None:
    read = loaded(tokenizer(), tmp_path)  # type: ignore[operator]
    with refused("tokenizer-changes-text", DataError, place=place) as caught:
        read.encode_all(["", text])
    assert caught.value.reason is not None
    assert caught.value.reason.startswith(reason)


def test_a_blank_at_the_beginning_is_the_one_that_sentencepiece_adds(tmp_path: Path) -> None:
    """As with Llama's newer files: the end of a document that is cut for validation begins so."""
    library = with_byte_tokens("bpe")
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = loaded(library, tmp_path)
    tokens = tokenizer.encode(" the cat")
    assert tokens.tolist() == tokenizer.encode("the cat").tolist()
    assert tokenizer.byte_counts[tokens].sum() == len(" the cat")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    with refused("tokenizer-changes-text", DataError):
        loaded(trimming(), tmp_path).encode("  the")
