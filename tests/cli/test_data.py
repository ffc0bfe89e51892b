"""`surefoot data prepare` as it is typed, and a run on what it made; 6 seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tokenizers
from in_one import in_one
from surefoot.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    lines = [json.dumps({"body": "to be or not to be, that is the question"}) for _ in range(99)]
    Path("a.jsonl").write_text("\n".join(lines))
    lossy = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")
    )
    lossy.save("lossy.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nowhere"))


def test_shards_are_made_and_trained_on_with_the_tokenizer_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(
        [
            "data",
            "prepare",
            "shards",
            "a.jsonl",
            "--tokenizer",
            "bytes",
            "--column=body",
            "--processes=1",
        ]
    )
    said = capsys.readouterr()
    assert said.err == "1 file: 1 .jsonl\n4,059 tokens in 1 shard in shards\n"
    assert said.out == ""
    small = [
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--sample-tokens=0",
    ]
    main(
        [
            "train",
            "gpt",
            "--data.path=shards",
            "--length=3 steps",
            "--cloze-questions=0",
            "--run-dir=runs/a",
            *small,
        ]
    )
    assert Path("runs/a/tokenizer.json").read_text() == Path("shards/tokenizer.json").read_text()
    main(
        [
            "data",
            "prepare",
            "more",
            "a.jsonl",
            "--tokenizer=runs/a",
            "--column=body",
            "--processes=1",
        ]
    )
    assert Path("more/shard-00000.bin").read_bytes() == Path("shards/shard-00000.bin").read_bytes()


@in_one
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
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
def test_mistakes_are_told_in_a_few_lines(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", *arguments])
    said = capsys.readouterr().err
    assert end.value.code == status, said
    assert says in said
    assert len(said.splitlines()) <= 5
    assert "--data." not in said  # which this verb does not have


def test_neither_the_verb_nor_its_processes_import_torch() -> None:
    code = "import sys; from surefoot.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [
        sys.executable,
        "-c",
        code,
        "data",
        "prepare",
        "out",
        "a.jsonl",
        "--tokenizer=bytes",
        "--column=body",
    ]
    ended = subprocess.run([*command, "--processes=1"], check=True, capture_output=True, text=True)
    assert ended.stdout == "False\n"


def test_a_damaged_shard_stops_a_run_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "data",
            "prepare",
            "shards",
            "a.jsonl",
            "--tokenizer",
            "bytes",
            "--column=body",
            "--processes=1",
        ]
    )
    data = bytearray(Path("shards/shard-00000.bin").read_bytes())
    data[100] ^= 1
    Path("shards/shard-00000.bin").write_bytes(data)
    with pytest.raises(SystemExit) as end:
        main(
            [
                "train",
                "gpt",
                "--data.path=shards",
                "--run-dir=runs/a",
                "--length=2 steps",
                "--model.layers=1",
            ]
        )
    said = capsys.readouterr().err
    assert end.value.code == 3
    assert "shards/shard-00000.bin is damaged" in said
    assert "surefoot data prepare shards" in said
    assert not Path("runs/a").exists()


def test_ctrl_c_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("surefoot.recipes.readers.text.prepare_shards.prepare_shards", stopped)
    with pytest.raises(SystemExit) as end:
        main(["data", "prepare", "shards", "a.jsonl", "--tokenizer", "bytes"])
    assert end.value.code == 130
    (line,) = capsys.readouterr().err.strip().splitlines()  # and no traceback
    assert " same command " in line
