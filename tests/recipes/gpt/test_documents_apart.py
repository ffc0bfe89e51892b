"""Which runs of the recipe keep the documents of a window apart. (3 s)"""

from __future__ import annotations

from pathlib import Path

import pytest

from refused import refused
from surefoot.config.behavior import DOCUMENTS_APART, newest_behavior
from surefoot.recipes.gpt.config import Data
from surefoot.recipes.gpt.corpus import read_corpus

EOS = 256  # of bytes


@pytest.fixture
def texts(tmp_path: Path) -> str:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number} has some words\n" * 5)
    return str(tmp_path)


def test_documents_are_apart_where_an_end_token_stands_between_them(texts: str) -> None:
    corpus = read_corpus(Data(path=texts, tokenizer="bytes"))
    assert corpus.end_token == EOS
    assert (corpus.train == EOS).sum() > 1


def test_documents_are_joined_if_it_is_asked_for_or_nothing_ends_them(texts: str) -> None:
    joined = Data(path=texts, tokenizer="bytes", documents="joined")
    assert read_corpus(joined).end_token is None
    assert read_corpus(Data(path=texts, tokenizer="characters")).end_token is None


def test_a_run_that_began_before_stays_joined(texts: str) -> None:
    data = Data(path=texts, tokenizer="bytes")
    assert read_corpus(data, behavior=DOCUMENTS_APART - 1).end_token is None
    assert read_corpus(data, behavior=newest_behavior()).end_token == EOS


def test_documents_cannot_be_apart_without_an_end_token(texts: str) -> None:
    data = Data(path=texts, tokenizer="characters", documents="apart")
    with refused("documents-without-end-token", setting="data.documents"):
        read_corpus(data)
