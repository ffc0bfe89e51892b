"""`surefoot predict` of a translator: a line for every line, from the run's directory alone; 6
seconds.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from command_line import error_of, output_of
from surefoot.cli.main import main

SMALL = [
    "--model.encoder-layers=1",
    "--model.decoder-layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.mlp-width=32",
    "--data.vocab-size=300",
    "--length=20 steps",
    "--evaluate-every=20 steps",
    "--report=false",
    "--batch-size=16",
    "--precision=fp32",
    "--beam-size=2",
]
SENTENCES = ["cat 12", "cat", "12 cat 7", "dog 4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("translate")
    (place / "pairs.tsv").write_text(
        "".join(f"cat {number}\tKatze {number}\n" for number in range(400))
    )
    run_dir = ["--run-dir", str(place / "run"), "--data.path", str(place / "pairs.tsv")]
    with redirect_stdout(StringIO()) as printed:
        main(["train", "translation", *run_dir, *SMALL, "--data.shared-vocab", "False"])
    (place / "printed").write_text(printed.getvalue())
    (place / "pairs.tsv").unlink()  # nothing but the run's directory is needed from here on
    return place / "run"


def translate(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    return output_of(capsys, "predict", str(run), *arguments)


def test_the_recipes_perplexity_is_of_an_unsmoothed_loss_and_no_finding_while_training(
    trained: Path,
) -> None:
    printed = (trained.parent / "printed").read_text()
    assert "val/perplexity=" in printed
    assert "smoothed-perplexity" not in printed


def test_inputs_are_answered_one_a_line_as_each_alone(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = translate(capsys, trained, *SENTENCES)
    alone = [translate(capsys, trained, sentence) for sentence in SENTENCES]
    assert together == "".join(alone)
    assert together.count("\n") == 4


def test_a_file_is_answered_by_as_many_lines(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n".join([SENTENCES[0], "", *SENTENCES[1:]]))
    first, *others = translate(capsys, trained, *SENTENCES).splitlines()
    lines = translate(capsys, trained, "--file", str(tmp_path / "in.txt")).split("\n")
    assert lines == [first, "", *others, ""]


@pytest.mark.parametrize("arguments", [[], ["-"]], ids=str)
def test_standard_input_is_answered_line_by_line(
    arguments: list[str],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expected = translate(capsys, trained, *SENTENCES)
    monkeypatch.setattr(sys, "stdin", stdin_of("\n".join(SENTENCES).encode() + b"\n"))
    assert translate(capsys, trained, *arguments) == expected


def stdin_of(data: bytes) -> TextIOWrapper:
    """Standard input that holds these bytes."""
    return TextIOWrapper(BytesIO(data), encoding="utf-8")


@pytest.mark.parametrize("arguments", [[], ["-"]], ids=str)
def test_only_a_line_feed_ends_a_line_of_standard_input_and_none_is_none(
    arguments: list[str],
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin_of(b"cat 12\rcat 7\ncat\n"))
    assert translate(capsys, trained, *arguments).count("\n") == 2
    monkeypatch.setattr(sys, "stdin", stdin_of(b"cat\n\xff\n"))
    assert "standard input, line 2 is not UTF-8" in error_of(
        capsys, "predict", str(trained), *arguments, status=3
    )
    monkeypatch.setattr(sys, "stdin", stdin_of(b""))
    assert translate(capsys, trained, *arguments) == ""


def test_white_space_around_a_sentence_changes_nothing(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate(capsys, trained, "  cat 12\t") == translate(capsys, trained, "cat 12")


def test_a_long_sentence_is_named_by_its_line_in_a_long_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("\n" * 40 + "cat " * 600)
    error = error_of(
        capsys,
        "predict",
        str(trained),
        "--file",
        str(tmp_path / "in.txt"),
        "--batch-size",
        "1",
        status=3,
    )
    assert "in.txt, line 41 has" in error


def test_what_cannot_be_translated_has_an_empty_line_among_the_answers(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad line of a thousand must not cost the other answers."""
    (tmp_path / "in.txt").write_bytes(b"cat 12\n" + b"cat " * 600 + b"\ntw\xff\ncat 7\n")
    first = translate(capsys, trained, "cat 12")
    last = translate(capsys, trained, "cat 7")
    with pytest.raises(SystemExit) as end:
        main(["predict", str(trained), "--file", str(tmp_path / "in.txt")])
    printed = capsys.readouterr()
    assert end.value.code == 3
    assert printed.out == f"{first}\n\n{last}"
    assert "in.txt, line 2 has 600 tokens" in printed.err
    assert "in.txt, line 3 is not UTF-8 text" in printed.err
    assert printed.err.endswith("[lines-not-translated]\n")


def test_an_empty_input_is_answered_by_an_empty_line(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = translate(capsys, trained, "cat 12")
    assert translate(capsys, trained, "") == "\n"
    assert translate(capsys, trained, "cat 12", "", "cat 12") == f"{answer}\n{answer}"


def test_a_file_in_utf_16_is_called_that(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("cat 12\n", encoding="utf-16")
    assert "iconv -f utf-16 -t utf-8" in error_of(
        capsys, "predict", str(trained), "--file", str(tmp_path / "in.txt"), status=3
    )


def test_the_beam_and_the_length_penalty_are_the_run_s_where_none_are_given(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = translate(capsys, trained, *SENTENCES)
    assert (
        translate(capsys, trained, *SENTENCES, "--beam-size", "2", "--length-penalty", "1.0") == own
    )
    assert translate(capsys, trained, *SENTENCES, "--batch-size", "1") == own
    assert translate(capsys, trained, *SENTENCES, "--checkpoint", "0") != own


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["x", "--beam-size", "0"], 2, "[setting-out-of-range]"),
        (["x", "--length-penalty", "-1"], 2, "[setting-out-of-range]"),
        (["cat " * 600], 3, "input 1 has 600 tokens, and the model takes 511"),
        (["--file", "no such file"], 3, "no such file cannot be read"),
        (["x", "--bean-size", "2"], 2, "[setting-unknown]"),
    ],
    ids=str,
)
def test_what_cannot_be_translated_is_one_clear_error(
    arguments: list[str], status: int, says: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, "predict", str(trained), *arguments, status=status)
    assert says in error
    assert len(error.splitlines()) <= 5


def test_a_file_that_is_no_text_is_told_by_its_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\ntw\xff\n")
    assert "in.txt, line 2 is not UTF-8 text" in error_of(
        capsys, "predict", str(trained), "--file", str(tmp_path / "in.txt"), status=3
    )


def test_nothing_to_translate_is_told_where_somebody_sits_before_a_terminal(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "[predict-without-input]" in error_of(capsys, "predict", str(trained), status=2)


def test_the_recipe_s_help_needs_no_torch() -> None:
    program = (
        "import sys\nfrom surefoot.cli.main import main\n"
        "try:\n    main(['train', 'translation', '--help-all'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--data.max-source-tokens" in done.stdout
