from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_sets import DATA, needs
from refused import refused
from surefoot.errors import DataError
from surefoot.tokenizers.bpe import BPETokenizer, from_json, load
from surefoot.tokenizers.tokenizer import DESCRIPTION, ByteTokenizer, CharacterTokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_give_back_every_text(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).tolist() == list(text.encode())


@given(st.text(min_size=1))
def test_characters_give_back_every_text_they_were_made_from(text):
    tokenizer = CharacterTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert ids.max() < tokenizer.vocab_size == len(set(text))


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_tokenizer_from_json_is_the_same(text):
    for tokenizer in (
        CharacterTokenizer.from_text(text),
        ByteTokenizer(),
        BPETokenizer.train([text], vocab_size=260),
    ):
        again = from_json(tokenizer.to_json())
        assert (
            type(again) is type(tokenizer) is type(type(tokenizer).from_json(tokenizer.to_json()))
        )
        assert again.to_json() == tokenizer.to_json()


@pytest.mark.parametrize(
    "ids", [[1, 0], (1, 0), np.array([1, 0], np.uint16), torch.tensor([1, 0]), iter([1, 0])]
)
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
    with refused("character-unknown", DataError, character=unknown, position=3):
        CharacterTokenizer("abcxyz").encode(f"abc{unknown}yz{unknown}")


def test_half_a_surrogate_pair_has_no_bytes():
    with refused("text-with-half-character", DataError, position=2):
        ByteTokenizer().encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 3, 1000])
def test_a_token_outside_the_vocabulary_is_named(token):
    with refused("token-outside-vocabulary", DataError, token=token, position=1):
        CharacterTokenizer("abc").decode([0, token])


@pytest.mark.parametrize("token", [-1, 257])
def test_a_number_that_is_no_byte_is_named(token):
    with refused("token-outside-vocabulary", DataError, token=token, vocab_size=257):
        ByteTokenizer().decode([0, token])


def test_an_empty_text_is_encoded():
    assert len(CharacterTokenizer("abc").encode("")) == len(ByteTokenizer().encode("")) == 0


@pytest.mark.parametrize(("characters", "repeated"), [("", []), ("abab", ["a", "b"])])
def test_a_set_that_is_none_is_refused(characters, repeated):
    with refused("characters-not-distinct", DataError, repeated=repeated):
        CharacterTokenizer(characters)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "{}",
        "[" * 100_000,
        '{"kind": "words"}',
        '{"kind": "characters"}',
        '{"kind": "bytes", "x": 1}',
    ],
)
def test_what_describes_no_tokenizer_is_refused(text):
    with refused("tokenizer-unreadable", DataError, source=DESCRIPTION):
        from_json(text)


def test_a_description_of_another_kind_is_refused():
    with refused("tokenizer-unreadable", DataError):
        ByteTokenizer.from_json(CharacterTokenizer("ab").to_json())


# --- byte pairs -----------------------------------------------------------------------------------

TEXT = "the cat sat on the mat, the rat sat on the cat; caf\u00e9 \U0001f600\n" * 5
BPE = BPETokenizer.train([TEXT], vocab_size=270)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_pairs_give_back_every_text_and_count_its_bytes(text):
    tokens = BPE.encode(text)
    assert BPE.decode(tokens) == text
    assert BPE.byte_counts[tokens].sum() == len(text.encode())


def test_byte_pairs_are_fewer_than_bytes_on_the_text_they_were_made_from():
    assert len(BPE.encode(TEXT)) < 0.5 * len(TEXT.encode())
    assert BPE.vocab_size == 270


def test_the_same_text_gives_the_same_byte_pairs():
    assert BPETokenizer.train(iter([TEXT]), vocab_size=270).to_json() == BPE.to_json()


def test_many_texts_are_encoded_as_each_alone():
    texts = ["the cat", "", TEXT]
    assert [tokens.tolist() for tokens in BPE.encode_all(texts)] == [
        BPE.encode(text).tolist() for text in texts
    ]


def test_a_text_that_looks_like_the_end_of_a_document_is_text():
    assert BPE.eos_id not in BPE.encode("<|endoftext|>")
    assert BPE.decode(BPE.encode("<|endoftext|>")) == "<|endoftext|>"


@pytest.mark.parametrize("tokenizer", [BPE, ByteTokenizer()], ids=["byte pairs", "bytes"])
def test_the_end_of_a_document_is_no_text(tokenizer):
    assert tokenizer.decode([tokenizer.eos_id, *tokenizer.encode("a"), tokenizer.eos_id]) == "a"
    assert tokenizer.byte_counts[tokenizer.eos_id] == 0


def test_a_token_added_as_it_is_counts_its_bytes():
    """What was added to a tokenizer is not written in the letters that stand for bytes."""
    tokenizer = BPETokenizer.from_json(BPE.to_json()).tokenizer
    tokenizer.add_tokens(["\u65e5\u672c"])
    made = BPETokenizer(tokenizer)
    text = f"{TEXT} \u65e5\u672c"
    assert made.byte_counts[made.encode(text)].sum() == len(text.encode())


@pytest.mark.parametrize(
    "tokenizer",
    [BPE, ByteTokenizer(), CharacterTokenizer("ab")],
    ids=["byte pairs", "bytes", "characters"],
)
def test_a_tokenizer_of_any_kind_is_read_from_its_file_or_the_directory_of_a_run(
    tokenizer, tmp_path
):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_json())
    assert load(file).to_json() == load(tmp_path).to_json() == tokenizer.to_json()
    BPE.tokenizer.save(str(file))  # as the library writes it
    assert load(tmp_path).to_json() == BPE.to_json()


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"kind": "words"}', '{"model": 3}', "[" * 100_000]
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with refused("tokenizer-unreadable", DataError):
        load(tmp_path)
    with refused("tokenizer-missing", DataError, path=tmp_path / "nowhere"):
        load(tmp_path / "nowhere")


def changed(**changes):
    """What the library would write of a tokenizer with some of its parts changed."""
    text = json.loads(json.dumps(json.loads(BPE.to_json())["tokenizer"]))
    for name, value in changes.items():
        if name == "model":
            text["model"] |= value
        else:
            text[name] = value
    return json.dumps(text)


def without_letters():
    """No letter of its alphabet stands for the bytes of capital letters."""
    text = json.loads(changed())
    vocabulary = {
        token: one
        for token, one in text["model"]["vocab"].items()
        if not (len(token) == 1 and token.isupper())
    }
    text["model"] |= {
        "vocab": {token: place for place, token in enumerate(vocabulary)},
        "merges": [],
    }
    text["added_tokens"] = []
    return json.dumps(text)


def with_a_hole():
    text = json.loads(changed())
    last = max(text["model"]["vocab"], key=text["model"]["vocab"].get)
    text["model"]["vocab"][last] += 5
    return json.dumps(text)


WITH_PREFIX = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": True,
}
STRIPPING = {
    "id": 270,
    "content": "<x>",
    "single_word": False,
    "lstrip": True,
    "rstrip": True,
    "normalized": False,
    "special": False,
}


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (changed(pre_tokenizer=None), "the cat"),
        (changed(pre_tokenizer=WITH_PREFIX), "the cat"),
        (changed(added_tokens=[STRIPPING]), "the <x> cat"),
        (without_letters(), "The cat"),
        (changed(normalizer={"type": "Lowercase"}), "The cat"),
        (changed(normalizer={"type": "NFC"}), "cafe\u0301"),
    ],
    ids=["no pre-tokenizer", "prefix space", "strips", "no alphabet", "lower case", "NFC"],
)
def test_a_text_that_a_tokenizer_would_change_is_refused(description, text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(description)
    tokenizer = load(tmp_path)
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_all(["", text])):
        with refused("tokenizer-changes-text", DataError):
            encode(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (changed(model={"dropout": 0.1}), "tokenizer-drops-merges"),
        (with_a_hole(), "tokenizer-with-gaps"),
    ],
    ids=["dropout", "a hole"],
)
def test_a_tokenizer_without_one_encoding_is_refused(text, code, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(text)
    with refused(code, DataError, source=file):
        load(tmp_path)


def test_what_a_tokenizer_would_cut_or_fill_is_left_whole(tmp_path):
    limited = BPETokenizer.from_json(BPE.to_json()).tokenizer
    limited.enable_truncation(4)
    limited.enable_padding(length=50)
    (tmp_path / "tokenizer.json").write_text(limited.to_str())
    read = load(tmp_path)
    assert read.encode(TEXT).tolist() == BPE.encode(TEXT).tolist()
    assert [len(tokens) for tokens in read.encode_all(["the", TEXT])] == [
        len(BPE.encode("the")),
        len(BPE.encode(TEXT)),
    ]


def test_the_end_of_a_document_of_gpt2_s_files_is_no_text_either(tmp_path):
    """There it is an ordinary token, which nobody added."""
    vocabulary = json.loads(BPE.to_json())["tokenizer"]["model"]["vocab"]
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    tokenizer = load(tmp_path)
    assert tokenizer.eos_id is not None
    assert tokenizer.byte_counts[tokenizer.eos_id] == 0
    assert tokenizer.byte_counts[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


def test_bytes_of_characters_are_those_of_utf8():
    tokenizer = CharacterTokenizer.from_text(TEXT)
    assert tokenizer.byte_counts[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())


@needs("gpt2-bpe")
def test_gpt2_s_files_give_gpt2_s_tokens(tmp_path):
    tokenizer = BPETokenizer.load(DATA / "gpt2-bpe")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)
    assert tokenizer.encode("Hello world, it's").tolist() == [15496, 995, 11, 340, 338]
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    assert (
        BPETokenizer.load(tmp_path / "tokenizer.json").encode(TEXT).tolist()
        == tokenizer.encode(TEXT).tolist()
    )


def test_a_tokenizer_of_the_library_is_loaded(tmp_path):
    BPE.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        BPETokenizer.load(tmp_path / "tokenizer.json").encode(TEXT).tolist()
        == BPE.encode(TEXT).tolist()
    )


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[" * 100_000])
def test_what_is_no_tokenizer_is_named(content, tmp_path):
    file = tmp_path / "tokenizer.json"
    if content is None:
        expected = refused("tokenizer-missing", DataError, path=file)
    else:
        file.write_text(content)
        expected = refused("tokenizer-unreadable", DataError, source=file)
    with expected:
        BPETokenizer.load(file)


def test_too_few_byte_pairs_are_refused():
    with refused("setting-out-of-range", setting="vocab_size", value=256):
        BPETokenizer.train([TEXT], vocab_size=256)
