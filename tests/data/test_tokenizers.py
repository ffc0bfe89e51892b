from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.tokenizers import ByteTokenizer, CharacterTokenizer, tokenizer_from_json
from surefoot.errors import DataError


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_give_back_every_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == list(text.encode())


@given(st.text(min_size=1))
def test_characters_give_back_every_text_they_were_made_from(text):
    tokenizer = CharacterTokenizer.of(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert ids.max() < tokenizer.vocabulary == len(set(text))


@given(st.text(min_size=1))
def test_a_tokenizer_from_json_is_the_same(text):
    for tokenizer in (CharacterTokenizer.of(text), ByteTokenizer()):
        again = tokenizer_from_json(tokenizer.to_json())
        assert type(again) is type(tokenizer) is type(type(tokenizer).from_json(tokenizer.to_json()))
        assert again.to_json() == tokenizer.to_json()


@pytest.mark.parametrize("ids", [[1, 0], (1, 0), np.array([1, 0], np.uint16), torch.tensor([1, 0]), iter([1, 0])])
def test_anything_that_holds_numbers_is_decoded(ids):
    assert CharacterTokenizer("xy").decode(ids) == "yx"


def test_tokens_can_be_written_to():
    for tokenizer in (ByteTokenizer(), CharacterTokenizer("abc")):
        tokens = tokenizer.encode("abc")
        tokens[0] = 1
        assert tokens[0] == 1


def test_a_sample_that_starts_inside_a_character_is_shown_all_the_same():
    assert ByteTokenizer().decode([0xA9, 104]) == "\ufffdh"


@pytest.mark.parametrize("unknown", ["?", "\u00e9", "\U0001f600", "\x00"])
def test_an_unknown_character_is_named_with_its_position(unknown):
    with pytest.raises(DataError) as caught:
        CharacterTokenizer("abcxyz").encode(f"abc{unknown}yz{unknown}")
    assert f"character {unknown!r} at position 3" in str(caught.value)


def test_half_a_surrogate_pair_has_no_bytes():
    with pytest.raises(DataError, match="character 2 of the text is half a surrogate pair"):
        ByteTokenizer().encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 3, 1000])
def test_a_token_outside_the_vocabulary_is_named(token):
    with pytest.raises(DataError, match=f"token {token} is outside"):
        CharacterTokenizer("abc").decode([0, token])


@pytest.mark.parametrize("token", [-1, 256])
def test_a_number_that_is_no_byte_is_named(token):
    with pytest.raises(DataError, match=f"token {token} is outside"):
        ByteTokenizer().decode([0, token])


def test_an_empty_text_is_encoded():
    assert len(CharacterTokenizer("abc").encode("")) == len(ByteTokenizer().encode("")) == 0


@pytest.mark.parametrize(("characters", "what"), [("", "no characters"), ("aba", "'a' is there twice")])
def test_a_set_that_is_none_is_refused(characters, what):
    with pytest.raises(DataError, match=what):
        CharacterTokenizer(characters)


@pytest.mark.parametrize(
    "text", ["", "3", "{}", '{"kind": "words"}', '{"kind": "characters"}', '{"kind": "bytes", "x": 1}']
)
def test_what_describes_no_tokenizer_is_refused(text):
    with pytest.raises(DataError, match="no description of a tokenizer"):
        tokenizer_from_json(text)


def test_a_description_of_another_kind_is_refused():
    with pytest.raises(DataError, match="of characters, asked for was one of bytes"):
        ByteTokenizer.from_json(CharacterTokenizer("ab").to_json())
