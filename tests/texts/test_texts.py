"""The sentences of console, page, help and packages are those of their files; 10 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.config.paths import write_whole
from texts import written
from texts.written import HERE, all_texts, path_of, write


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return all_texts()


def test_each_text_has_a_file_and_each_file_a_text(texts: dict[str, str]) -> None:
    assert {path_of(name) for name in texts} == set(HERE.glob("*.txt"))


def test_texts_that_are_interrupted_leave_whole_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_until_b(path: Path, text: bytes) -> None:
        if path.name == "b.txt":
            raise KeyboardInterrupt
        write_whole(path, text)

    write({"a": "before\n", "b": "before\n", "old": "before\n"}, tmp_path)
    monkeypatch.setattr(written, "write_whole", write_until_b)

    with pytest.raises(KeyboardInterrupt):
        write({"a": "after\n", "b": "after\n"}, tmp_path)

    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"a.txt": "after\n", "b.txt": "before\n", "old.txt": "before\n"}


def test_writing_removes_the_files_of_texts_that_are_no_more(tmp_path: Path) -> None:
    write({"a": "before\n", "old": "before\n"}, tmp_path)

    write({"a": "after\n", "b": "after\n"}, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "b.txt"}


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.txt")))
def test_a_text_has_the_sentences_of_its_file(name: str, texts: dict[str, str]) -> None:
    """After a change on purpose: `make sentences`, and read what it changes."""
    assert texts[name].splitlines() == path_of(name).read_text().splitlines()
