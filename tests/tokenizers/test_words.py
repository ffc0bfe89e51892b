"""Texts taken apart into words give the tokens that the library gives them. (1 s)"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.tokenizers.bpe import END, BPETokenizer, splits_into_words, tokens_by_word
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

TEXT = "it's we'll they've I'm he'd don't you're 12 dogs, 3.5 cats;  and\n\n\tdef f(x):\r\n        return 'so' + \"s\"  \x1c\x0b\x00 end\n"
TOKENIZER = BPETokenizer.train([TEXT * 3], vocab_size=330)


@given(
    st.lists(
        st.text(
            st.one_of(
                st.sampled_from(" \n\t\r\x0b\x0c'aZs0l!_\x1c\x7f"), st.characters(max_codepoint=127)
            )
        )
    )
)
def test_a_text_of_ascii_has_the_tokens_that_the_library_gives_it(texts):
    whole = TOKENIZER._by_library(texts)
    by_word = tokens_by_word(texts, TOKENIZER._by_library, TOKENIZER.dtype)
    assert [each.tolist() for each in by_word] == [each.tolist() for each in whole]
    assert {each.dtype for each in by_word} <= {np.dtype(TOKENIZER.dtype)}


def test_texts_of_ascii_and_others_come_in_the_order_in_which_they_were_given():
    texts = [TEXT, "äöü 東京 ½ x\u00a0y", "", END, "größer 's", TEXT[::-1]]
    assert TOKENIZER.by_word
    assert [each.tolist() for each in TOKENIZER.encode_all(texts)] == [
        TOKENIZER.encode(text).tolist() for text in texts
    ]


def test_each_word_is_encoded_once():
    asked: list[list[str]] = []

    def encode(words):
        asked.append(words)
        return TOKENIZER._by_library(words)

    tokens_by_word(["a b a b", " b a"], encode, np.uint16)
    assert asked == [["a", " b", " a"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda made: setattr(
            made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
        lambda made: setattr(
            made,
            "pre_tokenizer",
            pre_tokenizers.Sequence([made.pre_tokenizer, pre_tokenizers.Digits()]),
        ),
        lambda made: setattr(made, "normalizer", normalizers.Lowercase()),
        lambda made: made.add_tokens([AddedToken("def f", special=False)]),
        lambda made: (
            setattr(made, "model", models.BPE())
            or setattr(made, "pre_tokenizer", pre_tokenizers.Whitespace())
        ),
    ],
)
def test_a_tokenizer_that_takes_texts_apart_otherwise_is_left_to_the_library(change):
    made = Tokenizer.from_str(TOKENIZER.tokenizer.to_str())
    assert splits_into_words(made)
    change(made)
    assert not splits_into_words(made)
