"""`surefoot predict`: what a trained model says, from the run's directory alone; 4 seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from command_line import error_of, output_of
from surefoot.cli.main import main

SMALL = [
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
    "--data.vocab-size=280",
    "--length=20 steps",
    "--evaluate-every=10 steps",
    "--report=false",
    "--cloze-questions=0",
    "--ema=0.9",
]
TEXT = "the cat sat on the mat, café au lait; " * 300


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predict")
    text = place / "text.txt"
    text.write_text(TEXT)
    main(["train", "gpt", *SMALL, "--run-dir", str(place / "run"), "--data.path", str(text)])
    text.unlink()  # nothing but the run's directory is needed from here on
    return place / "run"


def predict(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    return output_of(capsys, "predict", str(run), *arguments)


def predict_lines(
    capsys: pytest.CaptureFixture[str], run: Path, *arguments: str
) -> list[dict[str, str]]:
    """The answers to several prompts."""
    return [json.loads(line) for line in predict(capsys, run, *arguments).split("\n")[:-1]]


def test_a_prompt_is_continued_and_the_same_seed_gives_the_same_text(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["the cat", "--max-new-tokens", "30"]
    text = predict(capsys, trained, *arguments)
    assert text.startswith("the cat")
    assert len(text.encode()) > 30  # a token may be a byte of a character
    assert predict(capsys, trained, *arguments) == text
    assert predict(capsys, trained, *arguments, "--seed", "1") != text


def test_prompts_of_a_file_are_answered_one_a_line_as_each_alone(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["the cat", "on the", "café", "mat, the"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    flags = ["--max-new-tokens", "12", "--temperature", "0"]

    answers = predict_lines(capsys, trained, "--file", str(tmp_path / "prompts.txt"), *flags)

    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer["prompt"] == prompt
        alone = predict(capsys, trained, prompt, *flags).removesuffix("\n")
        assert prompt + answer["continuation"] == alone
    assert predict_lines(capsys, trained, *prompts, *flags) == answers


def test_a_prompt_may_come_from_standard_input(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"the cat"), encoding="utf-8"))
    flags = ["--max-new-tokens", "5"]
    assert predict(capsys, trained, "-", *flags) == predict(capsys, trained, "the cat", *flags)


def test_without_a_prompt_it_says_what_the_run_sampled(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(capsys, trained, "--max-new-tokens", "5").startswith("\n")


def test_characters_of_several_tokens_come_out_whole(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from surefoot.recipes.gpt.predict import _decode
    from surefoot.tokenizers.tokenizer import ByteTokenizer

    pieces = list(_decode(ByteTokenizer(), iter("aé😀\ufffdb".encode()), before=[]))
    assert "".join(pieces) == "aé😀\ufffdb"
    assert pieces[:3] == ["a", "é", "😀"]


def test_the_best_checkpoint_or_that_of_a_step_can_be_asked(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-new-tokens", "20"]
    newest = predict(capsys, trained, "the", *flags)
    assert predict(capsys, trained, "the", *flags, "--checkpoint", "20") == newest
    assert predict(capsys, trained, "the", *flags, "--checkpoint", "0") != newest


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["the", "--temperature", "-1"], "[setting-out-of-range]"),
        (["the", "--top-p", "2"], "[setting-out-of-range]"),
        (["the", "--max-new-tokns", "5"], "[setting-unknown]"),
        ([""], "[prompt-empty]"),
        (["the", "--checkpoint", "last"], "[checkpoint-unknown]"),
        (["the", "--checkpoint", "\u00b2"], "[checkpoint-unknown]"),
    ],
)
def test_a_mistake_is_refused(
    arguments: list[str], code: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code in error_of(capsys, "predict", str(trained), *arguments)


def test_a_file_of_prompts_that_is_missing_is_a_data_error(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere.txt" in error_of(
        capsys, "predict", str(trained), "--file", "nowhere.txt", status=3
    )


def test_a_file_without_a_prompt_is_a_data_error(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not be answered with the default prompt."""
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "[file-without-prompts]" in error_of(
        capsys, "predict", str(trained), "--file", str(tmp_path / "empty.txt"), status=3
    )


def test_the_device_is_that_of_now_and_not_of_the_training(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a GPU's is used on a machine without one."""
    copy = Path(shutil.copytree(trained, tmp_path / "copy"))
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace('device = "auto"', 'device = "cuda"'))
    assert 'device = "cuda"' in (copy / "config.toml").read_text()
    flags = ["--max-new-tokens", "5", "--device", "cpu"]
    text = predict(capsys, trained, "the cat", *flags)
    assert predict(capsys, copy, "the cat", *flags) == text


def test_a_prompt_ends_at_a_line_end_and_nowhere_else(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_bytes("one\u2028and\x0cmore\r\ntwo\x85\n".encode())
    flags = ["--file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "1"]
    prompts = [answer["prompt"] for answer in predict_lines(capsys, trained, *flags)]
    assert prompts == ["one\u2028and\x0cmore", "two\x85"]


def test_wrong_settings_are_refused_before_the_prompt_is_shown(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["predict", str(trained), "the", "--max-new-tokens", "-1"])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(trained: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from surefoot.cli.main import main; main()",
        "predict",
        str(trained),
        "the",
    ]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b"drawn with --temperature 0.8 --top-p 0.95 --seed 0\n"
    assert process.wait() == 0


def test_a_checkpoint_is_not_a_run_and_what_to_type_is_said(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "checkpoints" / "step-00000020"
    message = error_of(capsys, "predict", str(checkpoint), "the")
    assert f" {trained}, " in message
    assert "--checkpoint 20" in message


def test_a_program_that_predicts_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("program.py").write_text(
        "import torch, surefoot as sf\n"
        "def build():\n"
        "    return sf.Run(model=lambda: torch.nn.Linear(1, 1), loss=lambda model, batch: model(batch[0]).square().mean(),\n"
        "                  train_data=(torch.ones(9, 1),), batch_size=3, length='2 steps',\n"
        "                  optimizer=sf.optim.adamw(lr=0.1), run_dir='runs/a')\n"
    )
    main(["train", "program.py:build"])
    message = error_of(capsys, "predict", "a", "x")
    assert "[program-without-predict]" in message
    assert "sf.load('runs/a').load_model(model)" in message
