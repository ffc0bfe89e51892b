"""Files of questions in a gpt run and for `surefoot evaluate --questions`: the same scores both
ways, and no bit of the run; 8 seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from in_one import in_one
from stated import lines_naming, numbers_in
from surefoot.cli.main import main
from surefoot.recipes import gpt
from surefoot.recipes.gpt.questions import named_files, question_split
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records

SENTENCE = "the cat sat on a mat and the dog ran to it while birds sang in old trees by the river"
WORDS = SENTENCE.split()
SMALL = [
    "--data.path=text.txt",
    "--data.tokenizer=bytes",
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=64",
    "--length=6 steps",
    "--cloze-questions=0",
    "--sample-tokens=0",
    "--run-dir=runs/a",
    "--evaluate-every=6 steps",
    "--report=false",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    generator = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(generator.choice(WORDS, size=words))

    Path("text.txt").write_text(text(3000))
    swag = []
    for place in range(30):
        endings = [text(3) for _ in range(4)]
        swag.append({"ctx": text(9), "endings": endings, "label": place % 4})
    last = [{"context": text(9), "continuation": "the"} for _ in range(20)]
    write_lines(Path("swag.jsonl"), swag)
    write_lines(Path("last.jsonl"), last)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*flags: str) -> None:
    main(["train", "gpt", *SMALL, *flags])


def evaluate(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, float]:
    """The scores that `surefoot evaluate` prints."""
    capsys.readouterr()
    main(["evaluate", "a", *flags])
    scores = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, value = line.split()[1].partition("=")
        scores[name] = float(value)
    return scores


def last_evaluation() -> dict[str, float]:
    """The scores of the last evaluation of the run, as they are printed."""
    evaluations = [
        record for record in records(Path("runs/a/metrics.jsonl")) if record["kind"] == "eval"
    ]
    return evaluations[-1]


def as_printed(value: float) -> float:
    return float(number(value))


def test_a_file_is_scored_while_training_as_it_is_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("--multiple-choice", "hellaswag=swag.jsonl", "last.jsonl")
    while_training = last_evaluation()
    Path("text.txt").unlink()  # a file alone needs no training data

    scores = evaluate(capsys, "--questions", "hellaswag=swag.jsonl", "--questions=last=last.jsonl")

    assert scores.keys() == {
        "hellaswag/acc",
        "hellaswag/acc_norm",
        "hellaswag/acc_per_byte",
        "last/acc",
        "last/loss",
        "last/perplexity",
    }
    for name, score in scores.items():
        assert score == as_printed(while_training[name])
    perplexity = np.exp(while_training["last/loss"])
    assert while_training["last/perplexity"] == pytest.approx(perplexity, rel=1e-9)


def test_averaged_weights_are_scored_where_the_run_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("--multiple-choice", "last.jsonl", "--ema=0.5")
    scores = evaluate(capsys, "--questions", "last=last.jsonl")
    assert scores["last/loss"] == as_printed(last_evaluation()["last/loss"])


def test_a_file_alone_is_called_after_itself_in_both_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("--multiple-choice", "last.jsonl")
    scores = evaluate(capsys, "--questions", "last.jsonl")
    assert scores["last/loss"] == as_printed(last_evaluation()["last/loss"])


def test_files_are_scored_in_the_precision_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions = list[str]()
    score = sf.evaluate

    def noting(*arguments: Any, precision: str, **settings: Any) -> dict[str, float]:
        precisions.append(precision)
        return score(*arguments, precision=precision, **settings)

    monkeypatch.setattr(sf, "evaluate", noting)
    train()
    newest, *_ = sf.checkpoint.Store(Path("runs/a/checkpoints")).newest_intact()
    of_run = newest.state["identity"]["precision"]

    evaluate(capsys, "--questions", "last=last.jsonl")
    in_fp32 = evaluate(capsys, "--questions", "last=last.jsonl", "--precision=fp32")
    in_bf16 = evaluate(capsys, "--questions", "last=last.jsonl", "--precision=bf16")

    assert precisions == [of_run, "fp32", "bf16"]
    assert in_fp32["last/loss"] != in_bf16["last/loss"]


def test_a_fixed_part_of_a_file_is_asked_and_changes_no_weight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def weights(run: str) -> bytes:
        return Path(f"runs/{run}/checkpoints/step-00000006/model.safetensors").read_bytes()

    train("--multiple-choice", "last.jsonl", "--multiple-choice-questions=7")
    train("--run-dir=runs/b")
    scores = evaluate(capsys, "--split", "last")  # the run's own part of it, not the whole

    assert weights("a") == weights("b")
    assert scores["last/loss"] == as_printed(last_evaluation()["last/loss"])


def test_one_split_of_a_run_is_scored_alone(capsys: pytest.CaptureFixture[str]) -> None:
    train("--multiple-choice", "swag.jsonl")
    scores = evaluate(capsys, "--split", "val")
    assert {name.partition("/")[0] for name in scores} == {"val"}


def test_what_cannot_be_scored_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    train()

    @in_one
    @pytest.mark.parametrize(
        ("flag", "values", "status", "words"),
        [
            ("--split", ["nothing"], 2, "[setting-out-of-range]"),
            ("--split", ["swag.jsonl"], 2, "[setting-out-of-range]"),
            ("--questions", ["missing.jsonl"], 3, "no file missing.jsonl"),
            ("--questions", ["=swag.jsonl"], 2, "[split-without-name]"),
            ("--questions", ["a=swag.jsonl", "a=last.jsonl"], 2, "[split-named-twice]"),
            ("--questions", ["last=swag.jsonl", "last.jsonl"], 2, "[split-named-twice]"),
            ("--questions", ["a=missing.jsonl"], 3, "no file missing.jsonl"),
            ("--questions", ["a=text.txt"], 3, "[line-not-json]"),
        ],
    )
    def check_refusal(
        flag: str, values: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = []
        for value in values:
            arguments += [flag, value]
        with pytest.raises(SystemExit) as end:
            main(["evaluate", "a", *arguments])
        message = capsys.readouterr().err
        assert end.value.code == status
        assert words in message
        assert len(message.splitlines()) <= 5

    check_refusal(capsys=capsys)


@pytest.mark.parametrize("given", [["a=b", "a=c"], ["=b"], ["a="], ["val=b"], ["x/y=b"], [""]])
def test_names_that_no_split_can_have_are_refused(given: list[str]) -> None:
    with pytest.raises(sf.ConfigError) as error:
        named_files(given, taken=("val",))
    assert error.value.code in ("split-without-name", "split-named-twice")
    assert error.value.fields["setting"] == "multiple_choice"


def test_how_many_questions_are_cut_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    question_split("last", Path("last.jsonl"), tokenizer=sf.tokenizers.ByteTokenizer(), context=18)
    (note,) = lines_naming(capsys.readouterr().err, "note: last: ")
    assert numbers_in(note) == [20, 20, 18]  # cut, of all; tokens of the context


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("swag", sf.metrics.multiple_choice_accuracy),
        ("last", sf.metrics.continuation_accuracy),
    ],
)
def test_the_scores_of_a_gpt_need_no_other_logits_than_those_of_endings(
    name: str, metric: Any
) -> None:
    torch.manual_seed(0)
    shape = sf.models.GPTConfig(
        layers=1, heads=2, width=16, context=64, vocab_size=257, family="gpt2"
    )
    model = sf.models.GPT(shape)
    split = question_split(
        name, Path(f"{name}.jsonl"), tokenizer=sf.tokenizers.ByteTokenizer(), context=64
    )

    of_endings = sf.evaluate(model, split)
    of_all_logits = sf.evaluate(model, sf.Split(split.data, metrics=metric, loss=False))

    for score, value in of_all_logits.items():
        assert of_endings[score] == pytest.approx(value, rel=1e-6)


def test_no_questions_of_a_file_are_refused_with_all_else_that_is_wrong() -> None:
    wrong = gpt.Config(multiple_choice=("cloze=a",), multiple_choice_questions=0)
    with pytest.raises(sf.ConfigError) as caught:
        gpt.build(wrong)
    codes = {problem.code for problem in caught.value.problems}
    assert {"setting-out-of-range", "split-named-twice"} <= codes
