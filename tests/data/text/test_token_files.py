"""Token files of llm.c and of nanoGPT: what they are is said by their header, or by the user."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refused import refused
from stated import numbers_in
from surefoot.errors import CheckpointError, ConfigError, DataError
from surefoot.recipes import gpt
from surefoot.recipes.gpt.look import look
from surefoot.recipes.readers.text import token_files
from surefoot.tokenizers import BPETokenizer
from tiny_gpt import tiny_config

GPT2 = 20240520
LLAMA3 = 20240801
TOKENS = np.random.default_rng(0).integers(0, 280, 2000)


@pytest.fixture
def gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tokenizer where GPT-2's is looked for."""
    folder = tmp_path / "cache" / "surefoot" / "gpt2"
    folder.mkdir(parents=True)
    tokenizer = BPETokenizer.train(["the cat sat on the mat " * 9 + "ab cd ef gh"], vocab_size=280)
    model = json.loads(tokenizer.to_json())["tokenizer"]["model"]
    (folder / "encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{first} {second}\n" for first, second in model["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def write(path: Path, tokens: Any, magic: int = 0) -> Path:
    """As llm.c's dev/data/data_common.py writes it, or as nanoGPT's prepare.py does."""
    path.parent.mkdir(exist_ok=True)
    header = b""
    if magic:
        version = 1 if magic == GPT2 else 7
        fields = np.zeros(256, "<i4")
        fields[:3] = [magic, version, len(tokens)]
        header = fields.tobytes()
    dtype = "<u4" if magic == LLAMA3 else "<u2"
    path.write_bytes(header + np.asarray(tokens).astype(dtype).tobytes())
    return path


config = partial(tiny_config, **{"data.val_fraction": 0.25})


def training_tokens(run: Any) -> list[int]:
    return np.concatenate(run.parts.settings.train_data.arrays).tolist()


def val_tokens(run: Any) -> list[int]:
    return np.concatenate(run.parts.settings.splits["val"].data.arrays).tolist()


def data_facts(run: Any) -> list[str]:
    """What a run says of its data, fact by fact."""
    return "; ".join(run.parts.settings.data_summary).split("; ")


@pytest.fixture
def llm_c(tmp_path: Path, gpt2: Path) -> Path:
    """A file of llm.c with tokens of the small tokenizer."""
    vocab_size = BPETokenizer.load(gpt2).vocab_size
    return write(tmp_path / "data" / "a_000001.bin", TOKENS % vocab_size, GPT2)


@pytest.mark.parametrize("given", ["file", "directory"])
@pytest.mark.parametrize("named", ["not", "by name", "by path"])
def test_a_file_of_llm_c_is_read_with_gpt2_s_tokenizer(
    given: str, named: str, llm_c: Path, gpt2: Path
) -> None:
    tokenizer = BPETokenizer.load(gpt2)
    tokens = (TOKENS % tokenizer.vocab_size).tolist()
    name = {"not": None, "by name": "gpt2", "by path": str(gpt2)}[named]

    run = gpt.build(config(llm_c if given == "file" else llm_c.parent, name))

    assert training_tokens(run) == tokens[:1500]
    assert val_tokens(run) == tokens[1500:]
    assert run.parts.files["tokenizer.json"] == tokenizer.to_json()


def test_a_run_says_how_many_token_files_it_reads(llm_c: Path) -> None:
    files, end_token, *_ = data_facts(gpt.build(config(llm_c.parent, "gpt2")))

    assert files == f"1 token file of {llm_c.parent}"
    assert end_token.startswith("end token <|endoftext|>")


def test_a_run_on_token_files_is_resumed(llm_c: Path, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    gpt.build(config(llm_c, None, run_dir=run_dir, stop_after="2 steps")).train()

    resumed = gpt.build(config(llm_c, None, run_dir=run_dir))
    resumed.train()

    assert resumed.state.step == 4


def test_a_look_shows_the_tokens_as_the_model_sees_them(tmp_path: Path, gpt2: Path) -> None:
    tokenizer = BPETokenizer.load(gpt2)
    tokens = [*tokenizer.encode("the cat").tolist(), tokenizer.eos_id] * 20
    path = write(tmp_path / "a.bin", tokens, GPT2)

    shown = look(config(path, None), count=1)

    (sample,) = shown.samples
    assert shown.about[0].startswith("1 token file of")
    assert "the cat<|endoftext|>the cat" in "".join(piece.text for piece in sample)


def test_files_of_32_bits_need_their_tokenizer(tmp_path: Path, gpt2: Path) -> None:
    path = write(tmp_path / "data" / "a.bin", TOKENS % 250, LLAMA3)

    with refused("token-files-without-tokenizer", ConfigError, path=path):
        gpt.build(config(path, None))
    run = gpt.build(config(path, str(gpt2)))

    assert training_tokens(run) + val_tokens(run) == (TOKENS % 250).tolist()


@pytest.fixture
def fineweb(tmp_path: Path) -> Path:
    """Token files for training, validation and tests, and a text beside them."""
    data = tmp_path / "data"
    write(data / "fineweb_train_000002.bin", [2] * 40, GPT2)
    write(data / "fineweb_train_000001.bin", [1] * 40, GPT2)
    write(data / "fineweb_val_000000.bin", [3] * 20, GPT2)
    write(data / "fineweb_test_000000.bin", [4] * 20, GPT2)
    write(data / "eval" / "000000.bin", [5] * 20, GPT2)
    (data / "valley.txt").write_text("text beside tokens " * 9)
    return data


def test_files_that_are_called_so_are_for_validation_or_not_read(fineweb: Path, gpt2: Path) -> None:
    run = gpt.build(config(fineweb, None))

    assert training_tokens(run) == [1] * 40 + [2] * 40
    assert val_tokens(run) == [3] * 20
    facts = data_facts(run)
    assert any(fact.endswith(": 1 .txt") for fact in facts)
    assert any(": 000000.bin, fineweb_test_000000.bin, " in fact for fact in facts)
    (of_validation,) = [fact for fact in facts if fact.startswith("20.0% ")]
    assert of_validation.endswith(": fineweb_val_000000.bin")
    assert [3, BPETokenizer.load(gpt2).vocab_size] in [numbers_in(fact) for fact in facts]


def test_text_beside_token_files_is_read_with_a_tokenizer_of_text(fineweb: Path) -> None:
    run = gpt.build(config(fineweb, "bytes", **{"data.val_fraction": 0.5}))

    assert data_facts(run)[0] == f"text of {fineweb}"


@pytest.fixture
def nano_gpt(tmp_path: Path) -> Path:
    """Token files of nanoGPT, and what it has beside them."""
    data = tmp_path / "data"
    write(data / "train.bin", [1] * 40)
    write(data / "val.bin", [3] * 20)
    (data / "prepare.py").write_text("raise SystemExit('this was run')")
    (data / "meta.pkl").write_bytes(b"cos\nabort\n(tR.")  # ends a process if loaded
    (data / "readme.md").write_text("about these data")
    return data


def test_files_without_a_header_are_read_under_gpt2_s_name(nano_gpt: Path, gpt2: Path) -> None:
    run = gpt.build(config(nano_gpt, "gpt2"))

    assert training_tokens(run) == [1] * 40
    assert val_tokens(run) == [3] * 20
    assert any("1 .pkl" in fact for fact in data_facts(run))


def test_one_file_without_a_header_is_divided(nano_gpt: Path, gpt2: Path) -> None:
    run = gpt.build(config(nano_gpt / "train.bin", "gpt2"))

    assert training_tokens(run) == [1] * 30
    assert val_tokens(run) == [1] * 10


@pytest.mark.parametrize("named", ["not", "bpe", "bytes", "characters", "by path"])
def test_files_without_a_header_need_gpt2_s_name(named: str, nano_gpt: Path, gpt2: Path) -> None:
    name = {"not": None, "by path": str(gpt2)}.get(named, named)
    vocab_size = 300 if name == "bpe" else None
    path = nano_gpt / "train.bin"

    with refused("token-files-without-header", ConfigError, value=name, path=path):
        gpt.build(config(path, name, **{"data.vocab_size": vocab_size}))


@pytest.fixture
def shakespeare(tmp_path: Path) -> Path:
    """A token file without a header beside its text."""
    data = tmp_path / "shakespeare"
    write(data / "train.bin", [1] * 40)
    (data / "input.txt").write_text("the cat sat on the mat\n" * 40)
    return data


def test_text_beside_files_without_a_header_is_text(shakespeare: Path) -> None:
    kind, files, *_ = data_facts(gpt.build(config(shakespeare, "bytes")))

    assert kind == f"text of {shakespeare}"
    assert files.startswith("read 1 of 2 files")


def test_files_without_a_header_beside_text_are_read_under_gpt2_s_name(
    shakespeare: Path, gpt2: Path
) -> None:
    run = gpt.build(config(shakespeare, "gpt2"))

    assert training_tokens(run) == [1] * 30
    assert val_tokens(run) == [1] * 10


def test_weights_beside_text_are_no_tokens(shakespeare: Path, gpt2: Path) -> None:
    (shakespeare / "train.bin").rename(shakespeare / "pytorch_model.bin")

    facts = data_facts(gpt.build(config(shakespeare, "gpt2")))

    assert facts[0].startswith("text of")


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


@pytest.mark.parametrize("data", [b"", b"a", b"abc"])
def test_a_file_of_half_a_token_is_refused(data: bytes, tmp_path: Path, gpt2: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(data)

    with refused("file-of-wrong-size", DataError, size=len(data)):
        gpt.build(config(path, "gpt2"))


def test_a_token_outside_the_vocabulary_is_named(
    tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_AT_ONCE", 7)
    tokens = np.ones(100, int)
    tokens[60] = 5000
    tokens[80] = 6000
    path = write(tmp_path / "a.bin", tokens, GPT2)
    with refused("token-outside-vocabulary", DataError, path=path, token=5000, position=60):
        gpt.build(config(path, None))


@pytest.fixture
def _few_blocks_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five blocks of ten tokens of each file: of 100 tokens every second block."""
    monkeypatch.setattr(token_files, "_AT_ONCE", 10)
    monkeypatch.setattr(token_files, "_BLOCKS_CHECKED", 5)


@pytest.mark.usefixtures("_few_blocks_checked", "gpt2")
def test_of_many_tokens_evenly_spaced_blocks_are_checked_and_it_is_said(tmp_path: Path) -> None:
    tokens = np.ones(100, int)
    tokens[10:20] = 5000  # of a block that is stepped over
    write(tmp_path / "data" / "train.bin", tokens)
    write(tmp_path / "data" / "val.bin", np.ones(35, int))

    facts = data_facts(gpt.build(config(tmp_path / "data", "gpt2")))

    assert [45, 135] in [numbers_in(fact) for fact in facts]  # checked tokens, of all


@pytest.mark.usefixtures("_few_blocks_checked", "gpt2")
@pytest.mark.parametrize(("name", "position"), [("train.bin", 60), ("val.bin", 34)])
def test_tokens_of_every_file_are_checked(name: str, position: int, tmp_path: Path) -> None:
    tokens = {"train.bin": np.ones(100, int), "val.bin": np.ones(35, int)}
    tokens[name][position:] = 6000
    for file, of_file in tokens.items():
        write(tmp_path / "data" / file, of_file)

    path = tmp_path / "data" / name
    with refused("token-outside-vocabulary", DataError, path=path, token=6000, position=position):
        gpt.build(config(path.parent, "gpt2"))


@pytest.mark.usefixtures("gpt2")
def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.bin", [1] * 40, GPT2)
    other = write(tmp_path / "data" / "b.bin", [1] * 40)

    with refused("token-files-differ", DataError, path=other):
        gpt.build(config(tmp_path / "data", "gpt2"))


def test_another_tokenizer_than_that_of_the_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.bin", [1] * 40, GPT2)

    with refused("token-files-of-another-tokenizer", ConfigError, value="bytes"):
        gpt.build(config(tmp_path / "data", "bytes"))


@pytest.mark.usefixtures("gpt2")
def test_token_files_for_validation_alone_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data" / "val.bin", [1] * 40, GPT2)

    with refused("token-files-without-training", DataError):
        gpt.build(config(tmp_path / "data", "gpt2"))


@pytest.mark.usefixtures("gpt2")
def test_changed_tokens_are_noticed_at_a_resume(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    tokens = TOKENS % 250
    path = write(tmp_path / "a.bin", tokens, GPT2)
    gpt.build(config(path, None, run_dir=run_dir, stop_after="2 steps")).train()

    tokens[7] = 249 - tokens[7]
    write(path, tokens, GPT2)

    with refused("data-changed", CheckpointError):
        gpt.build(config(path, None, run_dir=run_dir)).train()
