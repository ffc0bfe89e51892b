"""Words of thousands of letters are cut for the training of subwords, and nothing else is."""

from __future__ import annotations

import random

import pytest

from surefoot.tokenizers import BPETokenizer, SubwordTokenizer
from surefoot.tokenizers.long_words import LONGEST_WORD, count_long_words, cut_long_words
from tokenizers import pre_tokenizers

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
N = LONGEST_WORD


@pytest.mark.parametrize(
    "word", ["a", "\u00e9", "\u65e5", "-", "\U0001f600"], ids=lambda word: f"{ord(word):x}"
)
@pytest.mark.parametrize("length", [N, N + 1, 2 * N, 2 * N + 5])
def test_long_words_are_cut_every_so_many_characters(word: str, length: int) -> None:
    text = f"the cat 5{word * length}5{' ' * 9}the rat, \u00e9\n\nand {word * 3}"
    pieces = list(cut_long_words([text, "b"], WORDS))
    assert "".join(pieces) == f"{text}b"
    longest = [end - first for piece in pieces for _, (first, end) in WORDS.pre_tokenize_str(piece)]
    assert max(longest) <= N
    cuts = -(-length // N) - 1
    assert len(pieces) == 2 + cuts
    assert count_long_words([text, "b"], WORDS) == (cuts > 0)


def test_long_white_space_is_cut() -> None:
    pieces = list(cut_long_words([f"a{' ' * 3 * N}b"], WORDS))
    assert [len(piece) for piece in pieces] == [N + 1, N, N + 1]


def test_a_long_line_of_short_words_stays_whole() -> None:
    text = "\u65e5\u672c\u3001" * N + "a,b;" * N + "a1" * N
    assert list(cut_long_words([text], WORDS)) == [text]
    assert count_long_words([text], WORDS) == 0


def training_pieces(texts: list[str]) -> int:
    """The square of the word lengths that the trainer sees bounds its work."""
    return sum(
        (end - first) ** 2
        for piece in cut_long_words(texts, WORDS)
        for _, (first, end) in WORDS.pre_tokenize_str(piece)
    )


def test_the_work_of_a_word_grows_with_its_length_and_not_with_its_square() -> None:
    letters = "".join(random.Random(0).choice("ACGT") for _ in range(16 * N))
    assert training_pieces([letters]) == 4 * training_pieces([letters[: 4 * N]])


def test_a_tokenizer_of_a_long_word_is_that_of_its_pieces() -> None:
    letters = "".join(random.Random(0).choice("ACGT") for _ in range(3 * N))
    pieces = [letters[:N], letters[N : 2 * N], letters[2 * N :]]
    whole = BPETokenizer.train([f"{letters} the cat"], vocab_size=290)
    assert whole.to_json() == BPETokenizer.train([*pieces, " the cat"], vocab_size=290).to_json()
    assert whole.decode(whole.encode(letters)) == letters


@pytest.mark.parametrize("kind", [BPETokenizer, SubwordTokenizer])
def test_no_token_is_longer_than_a_piece(
    kind: type[BPETokenizer] | type[SubwordTokenizer],
) -> None:
    tokenizer = kind.train(["a" * 4 * N], vocab_size=290).tokenizer
    assert N // 2 <= max(map(len, tokenizer.get_vocab())) <= N + 1
