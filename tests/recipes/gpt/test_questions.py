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
]
SMALL += [
    "--model.context=64",
    "--length=6 steps",
    "--cloze-questions=0",
    "--sample-tokens=0",
    "--run-dir=runs/a",
]
SMALL += ["--evaluate-every=6 steps", "--report=false"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    generator = np.random.default_rng(0)

    def text(words: int) -> str:
        return " ".join(generator.choice(WORDS, size=words))

    Path("text.txt").write_text(text(3000))
    swag = [
        {"ctx": text(9), "endings": [text(3) for _ in range(4)], "label": place % 4}
        for place in range(30)
    ]
    last = [{"context": text(9), "continuation": "the"} for _ in range(20)]
    for name, held in (("swag", swag), ("last", last)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in held))


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {name: float(value) for name, _, value in (line[1].partition("=") for line in lines)}


def logged() -> dict[str, float]:
    return [record for record in records(Path("runs/a/metrics.jsonl")) if record["kind"] == "eval"][
        -1
    ]


def test_a_file_is_scored_while_training_as_it_is_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "gpt", *SMALL, "--multiple-choice", "hellaswag=swag.jsonl", "last.jsonl"])
    capsys.readouterr()
    Path("text.txt").unlink()  # a file alone needs no training data
    main(["evaluate", "a", "--questions", "hellaswag=swag.jsonl", "--questions=last=last.jsonl"])
    found = printed(capsys)
    before = logged()
    assert {*found} == {
        "hellaswag/acc",
        "hellaswag/acc_norm",
        "hellaswag/acc_per_byte",
        "last/acc",
        "last/loss",
        "last/perplexity",
    }
    assert found == {name: float(number(before[name])) for name in found}
    assert before["last/perplexity"] == pytest.approx(np.exp(before["last/loss"]), rel=1e-9)


def test_averaged_weights_are_scored_where_the_run_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "gpt", *SMALL, "--multiple-choice", "last.jsonl", "--ema=0.5"])
    capsys.readouterr()
    main(["evaluate", "a", "--questions", "last=last.jsonl"])
    assert printed(capsys)["last/loss"] == float(number(logged()["last/loss"]))


def test_a_file_alone_is_called_after_itself_in_both_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "gpt", *SMALL, "--multiple-choice", "last.jsonl"])
    capsys.readouterr()
    main(["evaluate", "a", "--questions", "last.jsonl"])
    assert printed(capsys)["last/loss"] == float(number(logged()["last/loss"]))


def test_files_are_scored_in_the_precision_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(*arguments: Any, precision: str, **settings: Any) -> dict[str, float]:
        asked.append(precision)
        return scores(*arguments, precision=precision, **settings)

    asked = list[str]()
    scores = sf.evaluate
    monkeypatch.setattr(sf, "evaluate", noted)
    main(["train", "gpt", *SMALL])
    capsys.readouterr()
    settled = (
        sf.checkpoint.Store(Path("runs/a/checkpoints"))
        .newest_intact()[0]
        .state["identity"]["precision"]
    )
    found = {}
    for flags in ([], ["--precision=fp32"], ["--precision=bf16"]):
        main(["evaluate", "a", "--questions", "last=last.jsonl", *flags])
        found[*flags] = printed(capsys)["last/loss"]
    assert asked == [settled, "fp32", "bf16"]
    assert found["--precision=fp32",] != found["--precision=bf16",]


def test_a_fixed_part_of_a_file_is_asked_and_changes_no_weight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(
        ["train", "gpt", *SMALL, "--multiple-choice", "last.jsonl", "--multiple-choice-questions=7"]
    )
    main(["train", "gpt", *SMALL, "--run-dir=runs/b"])
    weights = [
        Path(f"runs/{run}/checkpoints/step-00000006/model.safetensors").read_bytes() for run in "ab"
    ]
    assert weights[0] == weights[1]
    capsys.readouterr()
    main(["evaluate", "a", "--split", "last"])  # the run's own part of it, not the whole
    assert printed(capsys)["last/loss"] == float(number(logged()["last/loss"]))


def test_one_split_of_a_run_is_scored_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "gpt", *SMALL, "--multiple-choice", "swag.jsonl"])
    capsys.readouterr()
    main(["evaluate", "a", "--split", "val"])
    assert {name.partition("/")[0] for name in printed(capsys)} == {"val"}


def test_what_cannot_be_scored_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "gpt", *SMALL])

    @in_one
    @pytest.mark.parametrize(
        ("flag", "names", "status", "says"),
        [
            ("--split", ["nothing"], 2, "[setting-out-of-range]"),
            (
                "--split",
                ["swag.jsonl"],
                2,
                "[setting-out-of-range]",
            ),
            ("--questions", ["missing.jsonl"], 3, "no file missing.jsonl"),
            ("--questions", ["=swag.jsonl"], 2, "[split-without-name]"),
            ("--questions", ["a=swag.jsonl", "a=last.jsonl"], 2, "[split-named-twice]"),
            ("--questions", ["last=swag.jsonl", "last.jsonl"], 2, "[split-named-twice]"),
            ("--questions", ["a=missing.jsonl"], 3, "no file missing.jsonl"),
            ("--questions", ["a=text.txt"], 3, "[line-not-json]"),
        ],
    )
    def refused(
        flag: str, names: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            main(["evaluate", "a", *(part for name in names for part in (flag, name))])
        said = capsys.readouterr().err
        assert end.value.code == status
        assert says in said
        assert len(said.splitlines()) <= 5

    refused(capsys=capsys)


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


def test_the_scores_of_a_gpt_need_no_other_logits_than_those_of_endings() -> None:
    torch.manual_seed(0)
    shape = sf.models.GPTConfig(
        layers=1, heads=2, width=16, context=64, vocab_size=257, family="gpt2"
    )
    model = sf.models.GPT(shape)
    for name, score in (
        ("swag", sf.metrics.multiple_choice_accuracy),
        ("last", sf.metrics.continuation_accuracy),
    ):
        split = question_split(
            name, Path(f"{name}.jsonl"), tokenizer=sf.tokenizers.ByteTokenizer(), context=64
        )
        whole = sf.evaluate(model, sf.Split(split.data, metrics=score, loss=False))
        found = sf.evaluate(model, split)
        assert {key: found[key] for key in whole} == pytest.approx(whole, rel=1e-6)


def test_no_questions_of_a_file_are_refused_with_all_else_that_is_wrong() -> None:
    wrong = gpt.Config(multiple_choice=("cloze=a",), multiple_choice_questions=0)
    with pytest.raises(sf.ConfigError) as caught:
        gpt.build(wrong)
    codes = {problem.code for problem in caught.value.problems}
    assert {"setting-out-of-range", "split-named-twice"} <= codes
