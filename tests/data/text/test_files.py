from __future__ import annotations

import numpy as np
import pytest

from data_sets import DATA, needs
from refused import refused
from surefoot.data.text.document_tokens import encode_documents
from surefoot.errors import DataError
from surefoot.recipes.readers.text.corpora import split_documents, split_sequence, stdlib_documents
from surefoot.recipes.readers.text.documents import load_documents
from surefoot.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer


def test_a_file_is_read_as_it_is(tmp_path):
    text = "one\r\ntwo\n\nthr\u00e9e"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert load_documents(tmp_path / "a.txt") == {"a.txt": text}


def test_a_directory_is_its_text_files_sorted_by_path(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {
        "b.txt": "2",
        "a.md": "1\n",
        "sub/c.py": "3",
        "picture.png": "no",
        ".hidden": "no",
    }.items():
        (tmp_path / name).write_text(text)
    assert list(load_documents(str(tmp_path)).items()) == [
        ("a.md", "1\n"),
        ("b.txt", "2\n"),
        ("sub/c.py", "3\n"),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert load_documents(tmp_path / "a.txt") == {"a.txt": "abc"}


def test_what_is_missing_is_named(tmp_path):
    with refused("path-missing", DataError, path=tmp_path / "gone.txt"):
        load_documents(tmp_path / "gone.txt")


@pytest.mark.parametrize(("text", "code"), [("", "input-empty"), (" \n\n", "no-text")])
def test_an_empty_file_is_refused(tmp_path, text, code):
    (tmp_path / "a.txt").write_text(text)
    with refused(code, DataError):
        load_documents(tmp_path / "a.txt")


def test_a_directory_without_text_says_which_files_count(tmp_path):
    (tmp_path / "a.csv").write_text("1,2")
    with refused("no-documents-in-directory", DataError, path=tmp_path):
        load_documents(tmp_path)


def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 noir")
    with refused("text-not-utf-8", DataError, line=1, byte=4):
        load_documents(tmp_path)


def test_the_standard_library_is_large_and_always_the_same():
    documents = stdlib_documents()
    assert sum(map(len, documents.values())) > 5_000_000
    assert "class JSONEncoder" in documents["json/encoder.py"]
    assert list(documents.items()) == list(stdlib_documents().items())


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("whole", ["abcdefghijklmnopqrst", np.arange(20)])
def test_both_parts_are_the_whole_in_order(whole, fraction):
    training, held_out = split_sequence(whole, val_fraction=fraction)
    assert [*training, *held_out] == list(whole)
    assert len(held_out) == round(20 * fraction)


@pytest.mark.parametrize(
    ("whole", "fraction"),
    [("abc", 0.0), ("abc", 1.0), ("abc", 0.01), ("abc", -1), ("", 0.5), ("a", 0.5)],
)
def test_a_part_of_nothing_is_refused(whole, fraction):
    with refused("part-without-data", DataError, setting="val_fraction", value=fraction):
        split_sequence(whole, val_fraction=fraction)


def letters(*names):
    return {name: name * 100 for name in names}


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.8])
def test_whole_documents_are_held_out_until_they_make_up_the_fraction(fraction):
    training, held_out = split_documents(letters(*"abcdefghijklmnopqrst"), val_fraction=fraction)
    assert sorted([*training, *held_out]) == list(letters(*"abcdefghijklmnopqrst").values())
    assert len(held_out) == round(20 * fraction)


def test_what_is_held_out_does_not_depend_on_the_order_or_on_what_is_added():
    _, few = split_documents(letters(*"abcdefghij"), val_fraction=0.3)
    _, turned = split_documents(letters(*"jihgfedcba"), val_fraction=0.3)
    _, more = split_documents(letters(*"abcdefghijklmnopqrst"), val_fraction=0.3)
    assert set(few) == set(turned)
    assert (
        len(set(few) & set(more)) >= 2
    )  # one that was just within the fraction may have been pushed out by a new one


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 0.9])
def test_holding_out_all_or_none_of_the_documents_is_refused(fraction):
    with refused("part-without-data", DataError, value=fraction):
        split_documents(letters("a", "b"), val_fraction=fraction)


def test_a_document_that_is_most_of_the_text_is_not_held_out():
    training, held_out = split_documents(
        {"small": "s" * 1000, "large": "l" * 1_000_000}, val_fraction=0.05
    )
    assert (training, held_out) == (["l" * 1_000_000], ["s" * 1000])
    training, held_out = split_documents({"a": "a" * 900, "b": "b" * 1000}, val_fraction=0.05)
    assert held_out == ["a" * 900]  # the smallest where none is small enough
    _, held_out = split_documents(
        {str(one): "x" * (100 + one) for one in range(300)}, val_fraction=0.1
    )
    assert 0.1 <= sum(map(len, held_out)) / sum(100 + one for one in range(300)) < 0.12


def test_each_document_is_followed_by_its_end():
    assert encode_documents(["ab", "", "c"], ByteTokenizer()).tolist() == [
        97,
        98,
        256,
        256,
        99,
        256,
    ]
    assert encode_documents(["ab", "", "c"], CharacterTokenizer("abc")).tolist() == [0, 1, 2]


@needs("tinyshakespeare")
def test_tiny_shakespeare_is_read_whole():
    text = load_documents(DATA / "tinyshakespeare" / "input.txt")["input.txt"]
    assert (len(text), len(set(text))) == (1_115_394, 65)
