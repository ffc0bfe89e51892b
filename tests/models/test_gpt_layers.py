"""Vectors of n-grams: which rows they have, what they know, and what a cache knows for them. 1
s.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig, Ngrams


def test_every_pair_has_a_row_of_its_own_where_the_table_holds_them_all() -> None:
    ngrams = Ngrams(longest=2, rows=1000, vocab_size=5, width=4)
    pairs = torch.tensor(list(itertools.product(range(5), repeat=2)))
    rows = ngrams.rows(pairs, length=2)
    starts = rows[:, 0].unique()
    ends = rows[:, 1].unique()
    assert len(starts) == 5  # the first token of a row has nothing before it
    assert len(ends) == 25
    assert not set(starts.tolist()) & set(ends.tolist())
    assert int(rows.max()) < 36 == ngrams.tables[0].num_embeddings


def test_ngrams_that_share_rows_are_spread_evenly() -> None:
    ngrams = Ngrams(longest=3, rows=512, vocab_size=40, width=4)
    triples = torch.tensor(list(itertools.product(range(40), repeat=3)))
    counts = torch.bincount(ngrams.rows(triples, length=3)[:, 2], minlength=512)
    # 125 n-grams a row; at random the deviation is the root of that
    assert 0.5 * 125**0.5 < float(counts.double().std()) < 2 * 125**0.5
    assert int(counts.min()) > 60


@pytest.mark.parametrize(("longest", "back"), [(2, 1), (3, 2), (4, 3)])
def test_an_embedding_depends_on_as_many_tokens_as_it_says_and_no_more(
    longest: int, back: int
) -> None:
    shape = GPTConfig(
        layers=1, heads=2, width=8, context=16, vocab_size=10, ngrams=longest, ngram_buckets=64
    )
    assert shape.looks_back == back
    torch.manual_seed(0)
    ngrams = Ngrams(longest=longest, rows=100_000, vocab_size=10, width=8)
    tokens = torch.randint(10, (1, 12))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10

    differs = (ngrams(tokens) != ngrams(changed)).any(dim=2)[0]

    assert differs.nonzero().flatten().tolist() == list(range(5, 6 + back))


def test_they_start_at_zero_so_that_the_first_loss_does_not_know_them() -> None:
    shape = GPTConfig(
        layers=1, heads=2, width=8, context=16, vocab_size=10, ngrams=3, ngram_buckets=64
    )
    assert not any(table.weight.any() for table in GPT(shape).ngrams.tables)


SMALLEST = {"layers": 1, "heads": 2, "width": 8, "context": 16, "vocab_size": 10}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"smear": -1}, "^smear = -1 .* 0 "),
        ({"ngrams": 0}, "^ngrams = 0 .* 1 to 4$"),
        ({"ngrams": 2, "ngram_buckets": 0}, "^ngram_buckets = 0 .* 1 "),
        ({"ngrams": 2, "family": "gpt2"}, "^ngrams = 2: family = 'gpt2' "),
        (
            {"activation": "swiglu", "smear": True, "family": "gpt2"},
            "^activation = 'swiglu', smear = True: family = 'gpt2' ",
        ),
        (
            {"activation": "gelu", "ngrams": 2, "family": "llama"},
            "^activation = 'gelu', ngrams = 2: family = 'llama' has only activation = 'swiglu'",
        ),
        (
            {"kv_heads": 2, "rope_theta": 5e5, "mlp_width": 9, "norm_eps": 1e-5},
            "^kv_heads = 2, mlp_width = 9, rope_theta = 500000.0, norm_eps = 1e-05: .* 'modern' ",
        ),
        ({"family": "llama", "kv_heads": 3}, "^heads = 2 .* kv_heads = 3$"),
        ({"family": "llama", "kv_heads": 0}, "every size"),
        ({"family": "llama", "mlp_width": 0}, "every size"),
        ({"family": "llama", "rope_theta": 0.0}, "^rope_theta = 0.0 "),
        ({"family": "llama", "norm_eps": -1e-6}, "^norm_eps = -1e-06 "),
        ({"family": "llama", "heads": 8}, "^width = 8 .* rotary"),
        ({"family": "mamba"}, "^family = 'mamba' is not one of modern, gpt2, llama$"),
    ],
)
def test_what_cannot_be_is_refused_and_all_that_is_foreign_to_a_family_at_once(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        GPTConfig(**{**SMALLEST, **wrong})  # type: ignore[arg-type]


def test_a_description_has_the_settings_of_llama_only_where_they_are_set() -> None:
    """So that a run of an older version is resumed: it compares its description with this one."""
    shape = GPTConfig(**SMALLEST)
    llama = replace(shape, family="llama", kv_heads=1, rope_theta=5e5)
    new = {"kv_heads": 1, "rope_theta": 5e5}
    assert llama.to_dict() == {**shape.to_dict(), "family": "llama", **new}
    assert shape.to_dict().keys() == {
        *SMALLEST,
        "dropout",
        "family",
        "activation",
        "tie_embeddings",
        "smear",
        "ngrams",
        "ngram_buckets",
    }
    assert GPTConfig(**llama.to_dict()) == llama


def test_tokens_of_32_bits_have_the_rows_of_those_of_64() -> None:
    ngrams = Ngrams(longest=4, rows=97, vocab_size=50257, width=2)
    tokens = torch.randint(50257, (2, 20), generator=torch.Generator().manual_seed(0))
    for length in (2, 3, 4):
        narrow = ngrams.rows(tokens.int(), length=length)
        wide = ngrams.rows(tokens, length=length)
        assert torch.equal(narrow, wide)
