"""Token files of llm.c and of nanoGPT: what they are is said by their header, or by the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refused import refused
from stated import numbers_in
from surefoot.config.tree import layered
from surefoot.errors import CheckpointError, ConfigError, DataError
from surefoot.recipes import gpt
from surefoot.recipes.gpt.look import look
from surefoot.recipes.readers.text import token_files
from surefoot.tokenizers import BPETokenizer

GPT2, LLAMA3 = 20240520, 20240801
TOKENS = np.random.default_rng(0).integers(0, 280, 2000)


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tokenizer where GPT-2's is looked for."""
    folder = tmp_path / "cache" / "surefoot" / "gpt2"
    folder.mkdir(parents=True)
    trained = BPETokenizer.train(["the cat sat on the mat " * 9 + "ab cd ef gh"], vocab_size=280)
    described = json.loads(trained.to_json())["tokenizer"]["model"]
    (folder / "encoder.json").write_text(json.dumps(described["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in described["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write(path: Path, tokens: Any, magic: int = 0, *, version: int | None = None) -> Path:
    """As llm.c's dev/data/data_common.py writes it, or as nanoGPT's prepare.py does."""
    path.parent.mkdir(exist_ok=True)
    header = b""
    if magic:
        fields = np.zeros(256, "<i4")
        known = 1 if magic == GPT2 else 7
        fields[:3] = magic, known if version is None else version, len(tokens)
        header = fields.tobytes()
    dtype = "<u4" if magic == LLAMA3 else "<u2"
    path.write_bytes(header + np.asarray(tokens).astype(dtype).tobytes())
    return path


def config(path: Path, tokenizer: str | None, **changes: Any) -> gpt.Config:
    small = {
        "run_dir": None,
        "length": "4 steps",
        "evaluate_every": "4 steps",
        "data.path": str(path),
        "data.tokenizer": tokenizer,
        "data.vocab_size": None,
        "data.val_fraction": 0.25,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.context": 8,
        "sample_tokens": 0,
        "cloze_questions": 0,
        "report": False,
    }
    return layered(gpt.Config, [("test", small | changes)])[0]


def parts(run: Any) -> tuple[list[int], list[int]]:
    settings = run.parts.settings
    return (
        np.concatenate(settings.train_data.arrays).tolist(),
        np.concatenate(settings.splits["val"].data.arrays).tolist(),
    )


def said(run: Any) -> str:
    return "; ".join(run.parts.settings.data_summary)


def test_a_file_of_llm_c_is_trained_on_with_gpt2_s_tokenizer(tmp_path: Path, gpt2: Path) -> None:
    path = write(tmp_path / "data" / "a_000001.bin", TOKENS, GPT2)
    tokenizer = BPETokenizer.load(gpt2)
    tokens = TOKENS % tokenizer.vocab_size
    write(path, tokens, GPT2)
    for where in (path, path.parent):
        for name in (None, "gpt2", str(gpt2)):
            run = gpt.build(config(where, name))
            assert parts(run) == (tokens[:1500].tolist(), tokens[1500:].tolist())
            assert run.parts.files["tokenizer.json"] == tokenizer.to_json()
    assert said(run).startswith(f"1 token file of {path.parent}; end token <|endoftext|>")
    run = gpt.build(config(path, None, run_dir=str(tmp_path / "run"), stop_after="2 steps"))
    run.train()
    again = gpt.build(config(path, None, run_dir=str(tmp_path / "run")))
    again.train()
    assert again.state.step == 4


def test_a_look_shows_the_tokens_as_the_model_sees_them(tmp_path: Path, gpt2: Path) -> None:
    tokenizer = BPETokenizer.load(gpt2)
    tokens = [*tokenizer.encode("the cat").tolist(), tokenizer.eos_id] * 20
    path = write(tmp_path / "a.bin", tokens, GPT2)
    shown = look(config(path, None), count=1)
    assert shown.about[0].startswith("1 token file of")
    assert "the cat<|endoftext|>the cat" in "".join(piece.text for piece in shown.samples[0])


def test_files_of_32_bits_need_their_tokenizer(tmp_path: Path, gpt2: Path) -> None:
    path = write(tmp_path / "data" / "a.bin", TOKENS % 250, LLAMA3)
    with refused("token-files-without-tokenizer", ConfigError, path=path):
        gpt.build(config(path, None))
    train, held_out = parts(gpt.build(config(path, str(gpt2))))
    assert [*train, *held_out] == (TOKENS % 250).tolist()


def test_files_that_are_called_so_are_for_validation_or_not_read(
    tmp_path: Path, gpt2: Path
) -> None:
    data = tmp_path / "data"
    write(data / "fineweb_train_000002.bin", [2] * 40, GPT2)
    write(data / "fineweb_train_000001.bin", [1] * 40, GPT2)
    write(data / "fineweb_val_000000.bin", [3] * 20, GPT2)
    write(data / "fineweb_test_000000.bin", [4] * 20, GPT2)
    write(data / "eval" / "000000.bin", [5] * 20, GPT2)
    (data / "valley.txt").write_text("text beside tokens " * 9)
    run = gpt.build(config(data, None))
    assert parts(run) == ([1] * 40 + [2] * 40, [3] * 20)
    facts = said(run).split("; ")
    assert any(fact.endswith(": 1 .txt") for fact in facts)
    assert any(": 000000.bin, fineweb_test_000000.bin, " in fact for fact in facts)
    (of_validation,) = [fact for fact in facts if fact.startswith("20.0% ")]
    assert of_validation.endswith(": fineweb_val_000000.bin")
    assert [3, BPETokenizer.load(gpt2).vocab_size] in [numbers_in(fact) for fact in facts]
    text = gpt.build(config(data, "bytes", **{"data.val_fraction": 0.5}))
    assert text.parts.settings.data_summary[0].startswith(f"text of {data}")


def test_files_without_a_header_need_gpt2_s_name(tmp_path: Path, gpt2: Path) -> None:
    train = write(tmp_path / "data" / "train.bin", [1] * 40)
    write(tmp_path / "data" / "val.bin", [3] * 20)
    (tmp_path / "data" / "prepare.py").write_text("raise SystemExit('this was run')")
    (tmp_path / "data" / "meta.pkl").write_bytes(b"cos\nabort\n(tR.")  # ends a process if loaded
    (tmp_path / "data" / "readme.md").write_text("about these data")
    run = gpt.build(config(tmp_path / "data", "gpt2"))
    assert parts(run) == ([1] * 40, [3] * 20)
    assert "1 .pkl" in said(run)
    assert parts(gpt.build(config(train, "gpt2"))) == ([1] * 30, [1] * 10)
    for name in (None, "bpe", "bytes", "characters", str(gpt2)):
        vocabulary = {"data.vocab_size": 300 if name == "bpe" else None}
        with refused("token-files-without-header", ConfigError, value=name, path=train):
            gpt.build(config(train, name, **vocabulary))


def test_text_beside_files_without_a_header_is_text(tmp_path: Path, gpt2: Path) -> None:
    data = tmp_path / "shakespeare"
    write(data / "train.bin", [1] * 40)
    (data / "input.txt").write_text("the cat sat on the mat\n" * 40)
    run = gpt.build(config(data, "bytes"))
    assert run.parts.settings.data_summary[0].startswith(f"text of {data}; read 1 of 2 files")
    assert parts(gpt.build(config(data, "gpt2"))) == ([1] * 30, [1] * 10)
    (data / "train.bin").rename(data / "pytorch_model.bin")
    assert gpt.build(config(data, "gpt2")).parts.settings.data_summary[0].startswith("text of")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (lambda header, tokens: header + tokens[:-2], "file-of-wrong-size"),
        (lambda header, tokens: header + tokens + b"\0\0", "file-of-wrong-size"),
        (lambda header, _: header, "file-of-wrong-size"),
        (lambda header, _: header[:500], "file-of-wrong-size"),
        (
            lambda header, tokens: header[:4] + b"\5\0\0\0" + header[8:] + tokens,
            "token-file-version",
        ),
    ],
)
@pytest.mark.parametrize("magic", [GPT2, LLAMA3])
def test_a_damaged_file_is_refused(
    content: Any, code: str, magic: int, tmp_path: Path, gpt2: Path
) -> None:
    path = write(tmp_path / "a.bin", TOKENS % 250, magic)
    data = path.read_bytes()
    path.write_bytes(content(data[:1024], data[1024:]))
    with refused(code, DataError, path=path):
        gpt.build(config(path, str(gpt2)))


def test_a_file_of_half_a_token_is_refused(tmp_path: Path, gpt2: Path) -> None:
    for data in (b"", b"a", b"abc"):
        path = tmp_path / "train.bin"
        path.write_bytes(data)
        with refused("file-of-wrong-size", DataError, size=len(data)):
            gpt.build(config(path, "gpt2"))


def test_a_token_outside_the_vocabulary_is_named(
    tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_AT_ONCE", 7)
    tokens = np.ones(100, int)
    tokens[60], tokens[80] = 5000, 6000
    path = write(tmp_path / "a.bin", tokens, GPT2)
    with refused("token-outside-vocabulary", DataError, path=path, token=5000, position=60):
        gpt.build(config(path, None))


def test_of_many_tokens_evenly_spaced_blocks_of_every_file_are_checked(
    tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_AT_ONCE", 10)
    monkeypatch.setattr(token_files, "_BLOCKS_CHECKED", 5)
    tokens = np.ones(100, int)
    tokens[10:20] = 5000  # of a block that is stepped over
    train = write(tmp_path / "data" / "train.bin", tokens)
    val = write(tmp_path / "data" / "val.bin", np.ones(35, int))
    facts = said(gpt.build(config(train.parent, "gpt2"))).split("; ")
    assert [45, 135] in [numbers_in(fact) for fact in facts]  # checked tokens, of all
    tokens[60:80] = 6000
    write(train, tokens)
    with refused("token-outside-vocabulary", DataError, path=train, token=6000, position=60):
        gpt.build(config(train.parent, "gpt2"))
    write(train, np.ones(100, int))
    write(val, [1] * 34 + [7000])
    with refused("token-outside-vocabulary", DataError, path=val, token=7000, position=34):
        gpt.build(config(train.parent, "gpt2"))


def test_files_of_two_kinds_are_refused(tmp_path: Path, gpt2: Path) -> None:
    write(tmp_path / "data" / "a.bin", [1] * 40, GPT2)
    other = write(tmp_path / "data" / "b.bin", [1] * 40)
    with refused("token-files-differ", DataError, path=other):
        gpt.build(config(tmp_path / "data", "gpt2"))
    other.unlink()
    with refused("token-files-of-another-tokenizer", ConfigError, value="bytes"):
        gpt.build(config(tmp_path / "data", "bytes"))
    (tmp_path / "data" / "a.bin").rename(tmp_path / "data" / "val.bin")
    with refused("token-files-without-training", DataError):
        gpt.build(config(tmp_path / "data", "gpt2"))


def test_changed_tokens_are_noticed_at_a_resume(tmp_path: Path, gpt2: Path) -> None:
    path = write(tmp_path / "a.bin", TOKENS % 250, GPT2)
    gpt.build(config(path, None, run_dir=str(tmp_path / "run"), stop_after="2 steps")).train()
    changed = TOKENS % 250
    changed[7] = 249 - changed[7]
    write(path, changed, GPT2)
    with refused("data-changed", CheckpointError):
        gpt.build(config(path, None, run_dir=str(tmp_path / "run"))).train()
