"""Cached and fresh tokens are the same; what cannot be used is made again; the cache has a limit.
(1 s)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import surefoot as sf
from forked import Forked
from refused import refused
from surefoot.config.paths import user_cache
from surefoot.data.text import document_tokens, token_cache
from surefoot.data.text.token_cache import TextCache
from surefoot.tokenizers import BPETokenizer, ByteTokenizer, CharacterTokenizer, bpe, long_words
from surefoot.tokenizers import tokenizer as protocol

TRAINING = ["the quick brown fox jumps over the lazy dog\n" * 99, "naïve café\n" * 9, ""]
HELD_OUT = ["the lazy dog jumps\n" * 3]


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token_cache, "MIN_CHARACTERS", 1000)
    return tmp_path / "surefoot" / "tokens"


@pytest.fixture(scope="module")
def trained() -> BPETokenizer:
    return BPETokenizer.train(TRAINING, vocab_size=270)


def start(training: list[str] = TRAINING, *, vocab_size: int = 270) -> tuple[str, list[np.ndarray]]:
    text = TextCache(training, HELD_OUT)
    tokenizer = text.trained_tokenizer(vocab_size=vocab_size)
    return tokenizer.to_json(), [*text.encoded(tokenizer)]


@pytest.fixture
def fresh(trained: BPETokenizer) -> tuple[str, list[np.ndarray]]:
    return trained.to_json(), [
        sf.data.encode_documents(part, trained) for part in (TRAINING, HELD_OUT)
    ]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is trained and encoded."""
    done: list[str] = []
    train = BPETokenizer.train
    encode = token_cache.encode_documents

    def noted_train(*arguments: Any, **options: Any) -> BPETokenizer:
        done.append("trained")
        return train(*arguments, **options)

    def noted_encode(*arguments: Any) -> np.ndarray:
        done.append("encoded")
        return encode(*arguments)

    monkeypatch.setattr(BPETokenizer, "train", noted_train)
    monkeypatch.setattr(token_cache, "encode_documents", noted_encode)
    return done


ALL = ["trained", "encoded", "encoded"]


def is_same(start: tuple[str, list[np.ndarray]], other: tuple[str, list[np.ndarray]]) -> bool:
    pairs = list(zip(start[1], other[1], strict=True))
    return start[0] == other[0] and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs
    )


def test_a_cached_start_gives_the_bits_of_a_fresh_one_and_makes_nothing(
    fresh: tuple[str, list[np.ndarray]], work: list[str]
) -> None:
    assert is_same(start(), fresh)
    assert work == ALL
    assert is_same(start(), fresh)
    assert work == ALL
    assert all(tokens.flags.writeable for tokens in start()[1])


def test_a_tokenizer_that_is_there_already_uses_the_same_tokens(
    fresh: tuple[str, list[np.ndarray]], work: list[str]
) -> None:
    """As a resume does, whose tokenizer is in the run's directory."""
    saved = BPETokenizer.from_json(start()[0])
    work.clear()
    assert is_same((fresh[0], [*TextCache(TRAINING, HELD_OUT).encoded(saved)]), fresh)
    assert work == []


def test_another_text_split_or_setting_is_another_entry(work: list[str]) -> None:
    start()
    for training, vocab_size in (
        ([*TRAINING, "more"], 270),
        ([TRAINING[0] + TRAINING[1]], 270),
        (TRAINING, 271),
    ):
        work.clear()
        start(training, vocab_size=vocab_size)
        assert work == ALL
    work.clear()
    TextCache(TRAINING, HELD_OUT * 2).encoded(BPETokenizer.from_json(start()[0]))
    assert work == ["encoded"] * 2


def test_another_version_of_the_library_or_of_the_code_is_another_entry(
    work: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tokenizers

    start()
    work.clear()
    monkeypatch.setattr(tokenizers, "__version__", "0.0.1")
    start()
    assert work == ALL
    for module in (token_cache, bpe, long_words, protocol, document_tokens):
        work.clear()
        changed = tmp_path / Path(str(module.__file__)).name
        changed.write_text(Path(str(module.__file__)).read_text() + "\n")
        monkeypatch.setattr(module, "__file__", str(changed))
        start()
        assert work == ALL, module


def test_bytes_and_characters_need_no_library_and_hash_no_text(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr(token_cache, "sha256", None)
    for tokenizer in (
        ByteTokenizer(),
        CharacterTokenizer.from_text("".join([*TRAINING, *HELD_OUT])),
    ):
        tokens = TextCache(TRAINING, HELD_OUT).encoded(tokenizer)[0]
        assert np.array_equal(tokens, sf.data.encode_documents(TRAINING, tokenizer))
    assert not directory.exists()


def test_without_the_library_byte_pairs_are_refused_with_the_line_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused("package-not-usable", modules=["tokenizers"]):
        start()


def damaged(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return {
        "empty": b"",
        "cut": content[:-9],
        "flipped": bytes(flipped),
        "foreign": b"#!/bin/sh\n" * 9,
    }


@pytest.mark.parametrize("how", damaged(b"0123456789"))
def test_a_damaged_or_foreign_file_is_made_again(
    how: str, directory: Path, fresh: tuple[str, list[np.ndarray]], work: list[str]
) -> None:
    start()
    intact = {path: path.read_bytes() for path in directory.iterdir()}
    work.clear()
    for path, content in intact.items():
        path.write_bytes(damaged(content)[how])
    assert is_same(start(), fresh)
    assert work == ALL
    assert {path: path.read_bytes() for path in directory.iterdir()} == intact


def test_an_entry_under_the_name_of_another_or_of_another_user_is_made_again(
    directory: Path, fresh: tuple[str, list[np.ndarray]], work: list[str]
) -> None:
    start([*TRAINING, "more"])
    others = sorted(directory.iterdir(), key=lambda path: path.stat().st_size)
    start()
    own = sorted(set(directory.iterdir()) - set(others), key=lambda path: path.stat().st_size)
    for path, other in zip(own, others, strict=True):
        shutil.copy(other, path)
    work.clear()
    assert is_same(start(), fresh)
    assert work == ALL
    if os.name == "posix" and os.geteuid() == 0:
        work.clear()
        for path in own:
            os.chown(path, 12345, 12345)
        assert is_same(start(), fresh)
        assert work == ALL


@pytest.mark.skipif(os.name != "posix", reason="modes and owners of POSIX")
def test_what_others_can_write_is_not_read_and_a_directory_of_others_is_left_alone(
    directory: Path, fresh: tuple[str, list[np.ndarray]], work: list[str]
) -> None:
    start()
    for mode in (0o620, 0o602):
        work.clear()
        for path in directory.iterdir():
            path.chmod(mode)
        assert is_same(start(), fresh)
        assert work == ALL
        assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())
    before = {path: path.stat().st_ino for path in directory.iterdir()}
    owners = [
        (0o770, os.getuid()),
        (0o707, os.getuid()),
        *([(0o700, 12345)] if os.geteuid() == 0 else []),
    ]
    for mode, owner in owners:
        work.clear()
        directory.chmod(mode)
        os.chown(directory, owner, -1)
        assert is_same(start(), fresh)
        assert work == ALL
        assert {path: path.stat().st_ino for path in directory.iterdir()} == before


def test_an_entry_is_in_memory_twice_at_most(
    trained: BPETokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is read: as the bytes of the file and as arrays. While it is written, the bytes are
    the only copy.
    """
    arrays = [np.zeros(1_000_000, np.uint16)] * 2
    monkeypatch.setattr(token_cache, "encode_documents", lambda *_: arrays[0])
    for copies in (1, 2):  # written, then read
        tracemalloc.start()
        TextCache(TRAINING, HELD_OUT).encoded(trained)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (copies + 0.2) * 2 * arrays[0].nbytes


def test_a_directory_that_cannot_be_written_or_is_full_costs_only_time(
    tmp_path: Path,
    directory: Path,
    fresh: tuple[str, list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        assert is_same(start(), fresh)
        assert list(directory.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert is_same(start(), fresh)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home directory
    monkeypatch.chdir(tmp_path)
    assert is_same(start(), fresh)
    assert not (tmp_path / "~").exists()
    assert capfd.readouterr() == ("", "")


def test_two_processes_may_make_the_same_entry_at_once(
    directory: Path, fresh: tuple[str, list[np.ndarray]], work: list[str], tmp_path: Path
) -> None:
    ready, go = os.pipe()

    def as_child() -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not exist after a fork
        os.close(go)
        os.read(ready, 1)  # until the writing end is closed
        assert is_same(start(), fresh)

    with (tmp_path / "output").open("w") as output:
        children = [Forked(as_child, stdout=output, stderr=subprocess.STDOUT) for _ in range(2)]
        with children[0], children[1]:
            os.close(go)
            assert [child.wait() for child in children] == [0, 0], (tmp_path / "output").read_text()
    os.close(ready)
    assert {path.suffix for path in directory.iterdir()} == {".tokens"}
    assert is_same(start(), fresh)
    assert work == []


def test_what_cannot_be_written_is_not_copied_first(
    directory: Path, fresh: tuple[str, list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[object] = []
    monkeypatch.setattr("safetensors.numpy.save", saved.append)
    with monkeypatch.context() as patched:
        patched.setattr(token_cache, "MAX_BYTES", 100)
        assert is_same(start(), fresh)
    assert not directory.exists()
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    assert is_same(start(), fresh)
    assert saved == []


def test_the_least_recently_used_entries_and_abandoned_files_go(
    directory: Path, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    (tokens, tokenizer) = sorted(directory.iterdir(), key=lambda path: -path.stat().st_size)
    start([*TRAINING, "more"])
    newer = set(directory.iterdir()) - {tokens, tokenizer}
    for path in newer:
        os.utime(path, (2e9, 2e9))
    abandoned = directory / "a.partial"
    recent = directory / "b.partial"
    for path, age_s in ((abandoned, 2e9), (recent, 0)):
        path.touch()
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age_s))
    os.utime(tokens, (1e9, 1e9))
    other = directory.parent / "gpt2"
    other.mkdir()
    (other / "vocab.bpe").touch()
    monkeypatch.setattr(
        token_cache, "MAX_BYTES", sum(path.stat().st_size for path in directory.iterdir()) + 1_000
    )
    start([*TRAINING, "even more"])
    assert not tokens.exists()
    assert not abandoned.exists()
    assert recent.exists()
    assert all(path.exists() for path in newer)
    assert (other / "vocab.bpe").exists()
    total = sum(path.stat().st_size for path in directory.iterdir())
    assert total <= token_cache.MAX_BYTES
    work.clear()
    start([*TRAINING, "more"])
    assert work == []


def test_files_are_for_the_user_alone_and_a_small_text_has_none(
    directory: Path, trained: BPETokenizer
) -> None:
    assert TextCache(["small"], ["text"]).encoded(trained)[0].tolist() == [
        *trained.encode("small"),
        trained.eos_id,
    ]
    assert not directory.exists()
    start()
    if os.name == "posix":
        assert directory.stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())


def test_the_directory_is_the_usual_one_of_each_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, as the specification says
    for system, expected in (("linux", ".cache"), ("darwin", "Library/Caches")):
        monkeypatch.setattr("sys.platform", system)
        assert user_cache("tokens") == Path("/home/ada", expected, "surefoot", "tokens")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/c/Local")
    assert user_cache("gpt2") == Path("/c/Local/surefoot/gpt2")
    monkeypatch.setenv("XDG_CACHE_HOME", "/fast")
    assert user_cache("gpt2") == Path("/fast/surefoot/gpt2")


def test_a_cache_that_is_switched_off_reads_and_writes_nothing(
    work: list[str], directory: Path
) -> None:
    text = TextCache(TRAINING, HELD_OUT, enabled=False)
    text.encoded(text.trained_tokenizer(vocab_size=270))
    assert (work, text.directory, directory.exists()) == (ALL, None, False)
    for _ in range(2):
        text = TextCache(TRAINING, HELD_OUT)
        text.encoded(text.trained_tokenizer(vocab_size=270))
        assert text.directory == directory
    work.clear()
    text = TextCache(TRAINING, HELD_OUT, enabled=False)
    text.encoded(text.trained_tokenizer(vocab_size=270))
    assert (work, text.directory) == (ALL, None)


def test_the_directory_of_a_cache_that_cannot_be_written_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    text = TextCache(TRAINING, HELD_OUT)
    text.trained_tokenizer(vocab_size=270)
    assert text.directory is None
