"""Sentence pairs as tokens, and the subword tokenizer that makes them; 4 seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.loader import in_order
from surefoot.errors import DataError
from surefoot.recipes.readers.pairs.pairs import TokenPairs
from surefoot.tokenizers.subwords import BEGIN, END, PADDING, SubwordTokenizer

generator = np.random.default_rng(3)
SOURCES = [generator.integers(3, 90, size=size) for size in (4, 1, 9, 2, 5)]
TARGETS = [generator.integers(3, 90, size=size) for size in (3, 6, 1, 2, 5)]
TEXTS = [
    "Two young, White males are outside.",
    "Zwei junge weiße Männer",
    "it's 1.234,56 € on 12/05",
    "lower lowest low",
] * 20


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[0], [3, 1], [4, 2, 0, 1, 3], [2, 2]], ids=str)
def test_a_batch_holds_each_row_with_begin_end_and_padding_behind(ids):
    pairs = TokenPairs(SOURCES, TARGETS)

    source_BS, target_BT = pairs.gather(np.array(ids), np.zeros(len(ids), dtype=np.int64))

    assert source_BS.tolist() == pad([[*SOURCES[sample], END] for sample in ids])
    assert target_BT.tolist() == pad([[BEGIN, *TARGETS[sample], END] for sample in ids])
    assert source_BS.dtype == target_BT.dtype == torch.int64


def pad(rows):
    longest = max(map(len, rows))
    return [row + [PADDING] * (longest - len(row)) for row in rows]


def test_lengths_are_the_places_that_a_model_computes():
    pairs = TokenPairs(SOURCES, TARGETS)
    source_BS, target_BT = pairs.gather(np.arange(5), np.zeros(5, dtype=np.int64))
    assert pairs.lengths[:, 0].tolist() == (source_BS != PADDING).sum(dim=1).tolist()
    assert pairs.lengths[:, 1].tolist() == (target_BT[:, 1:] != PADDING).sum(dim=1).tolist()


def test_pairs_over_a_length_are_left_out_and_counted():
    # with the end: five tokens
    pairs = TokenPairs(SOURCES, TARGETS, max_source_tokens=6, max_target_tokens=6)

    source_BS, _ = pairs.gather(np.array([1]), np.array([0]))

    assert len(pairs) == 3
    assert pairs.left_out == 2
    assert pairs.lengths.tolist() == [[5, 4], [3, 3], [6, 6]]
    assert source_BS.tolist() == [[*SOURCES[3], END]]


def test_limits_that_leave_nothing_are_refused():
    with refused("pairs-all-too-long", DataError, pairs=5):
        TokenPairs(SOURCES, TARGETS, max_source_tokens=2, max_target_tokens=2)


def test_limits_that_cannot_be_are_refused():
    with refused("setting-out-of-range", setting="max_target_tokens", value=1):
        TokenPairs(SOURCES, TARGETS, max_target_tokens=1)


def test_a_source_without_target_is_refused():
    with refused("pairs-incomplete", DataError, sources=5, targets=4):
        TokenPairs(SOURCES, TARGETS[:-1])


def test_a_run_can_read_them():
    pairs = TokenPairs(SOURCES, TARGETS)

    micro_batches = list(in_order(pairs, batch_size=2, seed=0, device=torch.device("cpu")))

    assert check_samples(pairs, seed=0) == 5
    assert [len(micro_batch.batch[0]) for micro_batch in micro_batches] == [2, 2, 1]


def test_other_targets_are_seen_in_the_fingerprint():
    pairs = fingerprint(TokenPairs(SOURCES, TARGETS))
    other_pairs = fingerprint(TokenPairs(SOURCES, SOURCES))

    assert pairs["sha256"] != other_pairs["sha256"]


def test_moving_a_boundary_between_rows_is_seen_in_the_fingerprint():
    pairs = fingerprint(TokenPairs([[3, 4], [5]], [[3], [3]]))
    other_pairs = fingerprint(TokenPairs([[3], [4, 5]], [[3], [3]]))

    assert pairs != other_pairs


# --- subwords -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request):
    return SubwordTokenizer.train(TEXTS, vocab_size=330, kind=request.param)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "Männer, 1.234,56 €!",
        "\n\t 日本語 😀 \x00\x7f é",
        "<end> <padding><begin>",
        "it's",
        "\u00a0nbsp",
    ],
)
def test_every_text_comes_back_as_it_was(text, tokenizer):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.min(initial=3) >= 3
    assert tokenizer.decode([BEGIN, *ids, END, PADDING, PADDING]) == text


def test_every_character_comes_back_as_it_was(tokenizer):
    codes = [
        *range(0x800),
        *range(0x800, 0xD800, 0x80),
        *range(0x10000, 0x110000, 0x8000),
    ]
    text = "".join(map(chr, codes))

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_first_word_is_the_word_that_it_is_elsewhere(tokenizer):
    assert tokenizer.encode("low low low").tolist() == [*tokenizer.encode("low")] * 3


def test_digits_stand_alone(tokenizer):
    assert len(tokenizer.encode("123456").tolist()) >= 6


def test_a_saved_tokenizer_is_the_same(tokenizer):
    loaded = SubwordTokenizer.from_json(tokenizer.to_json())

    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.to_json() == tokenizer.to_json()
    for text in TEXTS:
        assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_tokenizer_in_every_process(kind):
    words = [f"word{number % 7}{number * number % 11} un{number % 5}seen" for number in range(69)]
    texts = [" ".join(words[start : start + 9]) for start in range(60)]
    program = (
        "import json, sys; from surefoot.tokenizers.subwords import SubwordTokenizer as S\n"
        f"print(S.train(json.load(sys.stdin), vocab_size=400, kind={kind!r}).to_json())"
    )
    here = SubwordTokenizer.train(texts, vocab_size=400, kind=kind).to_json()

    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )

    assert elsewhere.stdout.rstrip("\n") == here


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with refused("setting-out-of-range", setting="vocab_size", value=258):
        SubwordTokenizer.train(TEXTS, vocab_size=258)


@pytest.mark.parametrize(
    "wrong", ["{", "[]", '{"kind": "bytes"}', '{"kind": "subwords", "tokenizer": {}}']
)
def test_what_is_no_tokenizer_is_refused(wrong):
    with refused("tokenizer-unreadable", DataError):
        SubwordTokenizer.from_json(wrong)


def test_a_tokenizer_with_an_unknown_key_is_refused(tokenizer):
    values = json.loads(tokenizer.to_json())

    with refused("tokenizer-unreadable", DataError):
        SubwordTokenizer.from_json(json.dumps({**values, "more": 1}))


def test_a_missing_file_of_a_tokenizer_is_refused(tmp_path):
    with refused("tokenizer-unreadable", DataError, source=tmp_path / "none.json"):
        SubwordTokenizer.load(tmp_path / "none.json")


def test_half_a_character_is_refused(tokenizer):
    with refused("text-with-half-character", DataError, position=0):
        tokenizer.encode("\ud800")


def test_a_token_outside_the_vocabulary_is_refused(tokenizer):
    with refused("token-outside-vocabulary", DataError, token=tokenizer.vocab_size):
        tokenizer.decode([tokenizer.vocab_size])
