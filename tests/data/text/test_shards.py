from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from refused import refused
from surefoot.data.text.shards import TokenShards, write_shards
from surefoot.errors import DataError


def test_what_was_written_is_read(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50_257, 1000)
    write_shards(tokens, tmp_path / "new" / "folder", vocab_size=50_257, shard_tokens=300)
    shards = TokenShards.open(tmp_path / "new" / "folder")
    assert np.array_equal(np.concatenate(shards.arrays), tokens)
    assert [len(array) for array in shards.arrays] == [300, 300, 300, 100]
    assert (len(shards), shards.vocab_size) == (1000, 50_257)
    shards.refuse_damaged()


def test_documents_are_written_one_after_the_other(tmp_path):
    documents = (np.arange(length) for length in (5, 0, 17, 3, 2))
    shards = write_shards(documents, tmp_path, vocab_size=20, shard_tokens=9)
    expected = np.concatenate([np.arange(length) for length in (5, 17, 3, 2)])
    assert np.array_equal(np.concatenate(shards.arrays), expected)
    assert [len(array) for array in shards.arrays] == [9, 9, 9]


@pytest.mark.parametrize(("vocab_size", "size"), [(65_536, 2), (65_537, 4)])
def test_tokens_take_two_bytes_where_they_fit(tmp_path, vocab_size, size):
    shards = write_shards(np.array([0, vocab_size - 1]), tmp_path, vocab_size=vocab_size)
    assert (tmp_path / "shard-00000.bin").stat().st_size == 2 * size
    assert shards.arrays[0].tolist() == [0, vocab_size - 1]


def test_files_are_little_endian_arrays_without_a_header(tmp_path):
    write_shards(np.array([1, 258]), tmp_path, vocab_size=300)
    assert (tmp_path / "shard-00000.bin").read_bytes() == b"\x01\x00\x02\x01"


def test_a_token_outside_the_vocabulary_is_named_with_its_position(tmp_path):
    with refused("token-outside-vocabulary", DataError, token=9, position=6, vocab_size=9):
        write_shards([np.arange(5), np.array([0, 9])], tmp_path, vocab_size=9)
    with refused("shards-unfinished", DataError, path=tmp_path):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize("tokens", [[], np.empty(0, int), [np.empty(0, int)]])
def test_writing_no_tokens_is_refused(tmp_path, tokens):
    with refused("shards-without-tokens", DataError):
        write_shards(tokens, tmp_path, vocab_size=9)


@pytest.mark.parametrize("tokens", [np.zeros(3), np.zeros((2, 2), int), [np.array([0.5])]])
def test_what_is_no_row_of_whole_numbers_is_refused(tmp_path, tokens):
    with refused("tokens-not-integers", DataError):
        write_shards(tokens, tmp_path, vocab_size=9)


def test_shards_that_exist_are_not_overwritten(tmp_path):
    write_shards(np.arange(5), tmp_path, vocab_size=9)
    with refused("shards-already-there", DataError, path=tmp_path):
        write_shards(np.arange(6), tmp_path, vocab_size=9)


def spoiled(tmp_path, change):
    write_shards(np.arange(50), tmp_path, vocab_size=50, shard_tokens=20)
    change(tmp_path / "shard-00001.bin")


@pytest.mark.parametrize(
    ("change", "code", "fields"),
    [
        (lambda file: file.unlink(), "file-unreadable", {}),
        (lambda file: file.write_bytes(b""), "file-of-wrong-size", {"size": 0}),
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "file-of-wrong-size",
            {"size": 39, "expected": 40},
        ),
        (
            lambda file: file.write_bytes(file.read_bytes() + b"x"),
            "file-of-wrong-size",
            {"size": 41},
        ),
    ],
)
def test_a_shard_of_another_size_is_named(tmp_path, change, code, fields):
    spoiled(tmp_path, change)
    with refused(code, DataError, path=tmp_path / "shard-00001.bin", **fields):
        TokenShards.open(tmp_path)


def test_a_flipped_bit_is_found_by_reading_everything(tmp_path):
    spoiled(tmp_path, lambda file: file.write_bytes(b"\x80" + file.read_bytes()[1:]))
    with refused("shard-damaged", DataError, paths=[str(tmp_path / "shard-00001.bin")]):
        TokenShards.open(tmp_path).refuse_damaged()


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="no file here whose reading is an I/O error"
)
def test_bytes_that_the_disk_does_not_give_are_damaged(tmp_path):
    shards = write_shards(np.arange(9), tmp_path, vocab_size=9)
    (tmp_path / "shard-00000.bin").unlink()
    (tmp_path / "shard-00000.bin").symlink_to("/proc/self/mem")  # no page lies at its beginning
    with refused("shard-damaged", DataError, paths=[str(tmp_path / "shard-00000.bin")]):
        shards.refuse_damaged()


def test_no_directory_and_no_index_are_told_apart(tmp_path):
    with refused("path-missing", DataError, path=tmp_path / "missing"):
        TokenShards.open(tmp_path / "missing")
    with refused("shards-unfinished", DataError, path=tmp_path):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format_version": 1, "dtype": "float64", "vocabulary": 9, "shards": []}),
        json.dumps({"format_version": 1, "dtype": "uint16", "vocabulary": 9, "shards": [3]}),
        json.dumps({"format_version": 2, "dtype": "uint16", "vocabulary": 9, "shards": []}),
        json.dumps({"format_version": 1, "dtype": "uint16", "vocabulary": 9, "shards": []}),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / "tokens.json").write_text(index)
    is_other_format = '"format_version": 2' in index
    code = "shard-format-unknown" if is_other_format else "shard-index-invalid"
    with refused(code, DataError, path=tmp_path / "tokens.json"):
        TokenShards.open(tmp_path)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "a/b.bin", "..", ""])
def test_an_index_cannot_name_files_elsewhere(tmp_path, name):
    shards = [{"name": name, "count": 1, "sha256": ""}]
    (tmp_path / "tokens.json").write_text(
        json.dumps({"format_version": 1, "dtype": "uint16", "vocabulary": 9, "shards": shards})
    )
    with refused("shard-index-invalid", DataError, path=tmp_path / "tokens.json"):
        TokenShards.open(tmp_path)


def test_fingerprint_follows_the_contents(tmp_path):
    one, same, other = (
        write_shards(np.arange(9) + add, tmp_path / name, vocab_size=20)
        for name, add in (("a", 0), ("b", 0), ("c", 1))
    )
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_one_flipped_byte_is_found_and_the_shard_named(tmp_path: Path) -> None:
    """Sizes are as they were: trained on, nobody would notice."""
    shards = write_shards(np.arange(4000) % 256, tmp_path, vocab_size=256, shard_tokens=1000)
    assert shards.refuse_damaged() == 4
    place = tmp_path / "shard-00002.bin"
    data = bytearray(place.read_bytes())
    data[77] ^= 1
    place.write_bytes(data)
    with refused("shard-damaged", DataError, paths=[str(place)]):
        TokenShards.open(tmp_path).refuse_damaged()


def test_of_a_large_set_so_many_bytes_are_read(tmp_path: Path) -> None:
    shards = write_shards(np.arange(4000) % 256, tmp_path, vocab_size=256, shard_tokens=1000)
    assert shards.refuse_damaged(max_bytes=4000) == 2  # of 8,000
