"""`surefoot data prepare` as it is typed, and a run on what it made; 6 seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tokenizers
from command_line import error_of
from in_one import in_one
from surefoot.cli.main import main

PREPARE = [
    "data",
    "prepare",
    "shards",
    "a.jsonl",
    "--tokenizer=bytes",
    "--column=body",
    "--processes=1",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    lines = [json.dumps({"body": "to be or not to be, that is the question"}) for _ in range(99)]
    Path("a.jsonl").write_text("\n".join(lines))
    words = tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save("lossy.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))


def test_shards_are_made_and_trained_on_with_the_tokenizer_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(PREPARE)
    printed = capsys.readouterr()
    assert printed.err == "1 file: 1 .jsonl\n4,059 tokens in 1 shard in shards\n"
    assert printed.out == ""

    flags = [
        "--data.path=shards",
        "--run-dir=runs/a",
        "--length=3 steps",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--sample-tokens=0",
        "--cloze-questions=0",
    ]
    main(["train", "gpt", *flags])
    assert Path("runs/a/tokenizer.json").read_text() == Path("shards/tokenizer.json").read_text()

    flags = ["--tokenizer=runs/a", "--column=body", "--processes=1"]
    main(["data", "prepare", "more", "a.jsonl", *flags])
    assert Path("more/shard-00000.bin").read_bytes() == Path("shards/shard-00000.bin").read_bytes()


def test_the_tokenizer_may_be_that_of_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    main(PREPARE)
    flags = ["--tokenizer=shards", "--column=body", "--processes=1"]
    main(["data", "prepare", "more", "a.jsonl", *flags])
    assert Path("more/shard-00000.bin").read_bytes() == Path("shards/shard-00000.bin").read_bytes()


@in_one
@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ([], 2, "[argument-missing]"),
        (["get"], 2, "[subcommand-unknown]"),
        (["prepare", "out"], 2, "[argument-missing]"),
        (["prepare", "out", "a.jsonl"], 2, "[setting-out-of-range]"),
        (["prepare", "out", "a.jsonl", "--tokenizer=bpe"], 2, "[setting-out-of-range]"),
        (["prepare", "out", "a.jsonl", "--tokeniser=bytes"], 2, "[setting-unknown]"),
        (["prepare", "out", "a.jsonl", "--tokenizer=gpt2"], 3, "instead of gpt2"),
        (
            ["prepare", "out", "a.jsonl", "--tokenizer=lossy.json", "--column=body"],
            3,
            "[tokenizer-changes-text]",
        ),
        (["prepare", "out", "a.jsonl", "--tokenizer=missing"], 3, "no tokenizer at missing"),
        (
            ["prepare", "out", "a.jsonl", "--tokenizer=bytes", "--processes=1"],
            3,
            "a.jsonl, line 1 has no 'text'",
        ),
        (["prepare", "out", "b.jsonl", "--tokenizer=bytes"], 3, "no file or directory b.jsonl"),
    ],
    ids=str,
)
def test_a_mistake_is_refused_in_a_few_lines(
    arguments: list[str], status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, "data", *arguments, status=status)
    assert reason in message
    assert len(message.splitlines()) <= 5
    assert "--data." not in message  # which this verb does not have


def test_neither_the_verb_nor_its_processes_import_torch() -> None:
    program = f"""
import sys
from surefoot.cli.main import main
main({PREPARE})
print("torch" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert process.stdout == "False\n"


def test_a_damaged_shard_stops_a_run_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    main(PREPARE)
    shard = Path("shards/shard-00000.bin")
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)

    flags = ["--data.path=shards", "--run-dir=runs/a", "--length=2 steps", "--model.layers=1"]
    message = error_of(capsys, "train", "gpt", *flags, status=3)

    assert "shards/shard-00000.bin is damaged" in message
    assert "surefoot data prepare shards" in message
    assert not Path("runs/a").exists()


def test_ctrl_c_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press_ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    prepare_shards = "surefoot.recipes.readers.text.prepare_shards.prepare_shards"
    monkeypatch.setattr(prepare_shards, press_ctrl_c)
    message = error_of(capsys, *PREPARE, status=130)
    (line,) = message.strip().splitlines()  # and no traceback
    assert " same command " in line
