"""The sentences of console, page, help and packages are those of their files; 10 seconds."""

from __future__ import annotations

import pytest

from texts.written import HERE, all_texts, path_of


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return all_texts()


def test_each_text_has_a_file_and_each_file_a_text(texts: dict[str, str]) -> None:
    assert {path_of(name) for name in texts} == set(HERE.glob("*.txt"))


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.txt")))
def test_a_text_has_the_sentences_of_its_file(name: str, texts: dict[str, str]) -> None:
    """After a change on purpose: `make sentences`, and read what it changes."""
    assert texts[name].splitlines() == path_of(name).read_text().splitlines()
