"""The end of a run as each recipe has it: its panels, the words, and that every command in them
works; 9 seconds.
"""

from __future__ import annotations

import io
import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from command_line import error_of, output_of
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config.toml import values
from surefoot.config.tree import layered
from surefoot.recipes import gpt, images
from surefoot.tracking.format import number
from surefoot.tracking.jsonl import records

TEXT = "die Katze saß auf der Matte, während Vögel in alten Bäumen sangen. " * 120
SETTINGS = {
    "gpt": [
        "--data.path=text.txt",
        "--data.tokenizer=bytes",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=16",
        "--cloze-questions=0",
        "--sample-tokens=4",
    ],
    "translation": [
        "--data.phrase-count=600",
        "--data.vocab-size=280",
        "--model.encoder-layers=1",
        "--model.decoder-layers=1",
        "--model.width=16",
        "--model.mlp-width=16",
        "--data.val-fraction=0.1",
        "--evaluate-every=3 steps",
    ],
    "images": ["--model.width=4", "--batch-size=8"],
}


@dataclass(frozen=True)
class Trained:
    """A directory in which all three recipes have been trained, and the last words of each."""

    directory: Path
    last_words: dict[str, str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp("trained")
    last_words = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "argv", ["surefoot"])
        Path("text.txt").write_text(TEXT)
        for recipe, settings in SETTINGS.items():
            flags = [*settings, "--length=6 steps", "--precision=fp32", "--report=false"]
            with redirect_stdout(io.StringIO()) as output:
                main(["train", recipe, *flags])
            _, end, commands = output.getvalue().partition("\nfinished: 6 steps")
            last_words[recipe] = (end + commands).strip()
        yield Trained(directory, last_words)


@pytest.fixture
def here(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The three runs, in whose directory commands are typed."""
    monkeypatch.chdir(trained.directory)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    return trained


def last_scores(recipe: str, name: str) -> Any:
    """The score of this name in the newest record of an evaluation."""
    metrics = records(Path("runs", recipe, "metrics.jsonl"))
    *_, newest = [record for record in metrics if record["kind"] == "eval"]
    return newest[name]


# --- the last words -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SETTINGS)
def test_the_end_of_a_run_is_one_sentence_and_one_line_for_each_command(
    recipe: str, trained: Trained
) -> None:
    words = trained.last_words[recipe]
    assert max(len(line) for line in words.splitlines()) <= 80
    sentence, *commands = words.replace("\n  ", " ").splitlines()
    score = {"gpt": "val/loss", "translation": "val/bleu", "images": "val/loss"}[recipe]
    assert re.search(rf"; {score} ((fell|rose) from [\d.]+ at step \d to )?[\d.]+", sentence)
    *diagnose, predict, evaluate = commands
    for command in diagnose:
        assert re.fullmatch(rf"\d findings?: [^:]+: surefoot diagnose runs/{recipe}", command)
    assert len(diagnose) <= 1
    assert predict.startswith(f"use it: surefoot predict runs/{recipe}")
    assert evaluate.startswith(f"evaluate it: surefoot evaluate runs/{recipe}")


@pytest.mark.parametrize(("recipe", "input_count"), [("gpt", 0), ("translation", 1), ("images", 1)])
def test_every_command_in_it_works(
    recipe: str, input_count: int, here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(r"surefoot ([^;\n]+)", here.last_words[recipe])
    words_of_commands = [shlex.split(command) for command in commands]
    verbs = [words[0] for words in words_of_commands]
    assert verbs in (["predict", "evaluate"], ["diagnose", "predict", "evaluate"])
    _, _, *arguments = words_of_commands[-2]
    inputs = [word for word in arguments if word not in ("--checkpoint", "best")]
    assert len(inputs) == input_count
    for words in words_of_commands:
        assert output_of(capsys, *words) != ""


def test_numbers_have_the_digits_that_the_run_has_printed(
    here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = dict(re.findall(r" (\S+)=(\S+)", output_of(capsys, "evaluate", "runs/gpt")))
    for name in ("val/loss", "val/perplexity"):
        assert printed[name] == number(last_scores("gpt", name))


def test_a_run_that_was_stopped_names_the_command_that_resumes_it(
    here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *SETTINGS["images"],
        "--length=6 steps",
        "--run-dir=runs/stopped",
        "--precision=fp32",
        "--stop-after=4 steps",
    ]
    *lines, command = output_of(capsys, "train", "images", *flags).splitlines()
    (sentence,) = [line for line in lines if line.startswith("stopped ")]
    assert numbers_in(sentence)[:2] == [4, 6]
    assert command.endswith(":  surefoot resume runs/stopped")
    assert "finished: 6 steps" in output_of(capsys, "resume", "runs/stopped")
    assert sf.load("runs/stopped").panels() is not None


@pytest.mark.slow
def test_what_is_wrong_is_named_once_more_at_the_end(
    here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *SETTINGS["gpt"],
        "--run-dir=runs/wrong",
        "--precision=fp32",
        "--length=120 steps",
        "--log-every=1 steps",
        "--optimizer.lr=1e-9",
    ]
    output = output_of(capsys, "train", "gpt", *flags)
    _, _, end = output.partition("\nfinished: 120 steps")
    findings = re.search(
        r"^(\d) findings?: ([^:\n]+): surefoot diagnose runs/wrong$",
        end.replace("\n  ", " "),
        flags=re.MULTILINE,
    )
    assert findings is not None
    problems = [
        finding for finding in sf.load("runs/wrong").diagnose() if finding.severity != "note"
    ]
    assert int(findings[1]) == len(problems) > 0
    assert findings[2].startswith(problems[0].name)


# --- the panels of the recipes --------------------------------------------------------------------


def panels_of(recipe: str) -> tuple[Any, ...]:
    panels = sf.load(Path("runs") / recipe).panels()
    assert panels is not None
    assert panels.step == 6
    return panels.panels


def load_end(recipe: ModuleType) -> sf.Run:
    """The run of a recipe's settings, with the weights of step 6."""
    name = recipe.__name__.rpartition(".")[2]
    config, _ = layered(
        recipe.Config, [("test", values(Path("runs", name, "config.toml").read_text()))]
    )
    run: sf.Run = recipe.build(config)
    run.load_checkpoint(sf.checkpoint.Store(Path("runs", name, "checkpoints")).at(6))
    return run


def find_tokens(tokens: np.ndarray, text: np.ndarray, *, window: int) -> int:
    """The window at whose beginning these tokens begin."""
    for place in range(len(text) // window):
        if np.array_equal(text[place * window :][: len(tokens)], tokens):
            return place
    raise AssertionError("the tokens are not at the beginning of a window")


def test_gpt_tints_held_out_text_with_the_losses_that_its_evaluation_has(here: Trained) -> None:
    context = 16
    (panel,) = panels_of("gpt")
    text = panel.text.encode()
    assert panel.text in TEXT
    assert 250 <= len(text) <= 320
    run = load_end(gpt)
    windows = run.parts.evaluator.splits["val"].data
    tokens = np.frombuffer(text, dtype=np.uint8)
    first = find_tokens(tokens, windows.arrays[0], window=context)
    numbers = np.arange(first, first + (len(tokens) - 1) // context)
    inputs, targets, documents = windows.gather(numbers, np.zeros(1, dtype=np.int64))
    with torch.no_grad():
        logits = run.state.models["model"].eval()(inputs, documents=documents)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )

    first_piece, *pieces = panel.pieces

    assert first_piece == (panel.text[0], None)
    position = 0
    for piece, value in pieces:
        end = position + len(piece.encode())
        assert value == pytest.approx(math.fsum(losses[position:end].tolist()), rel=1e-5)
        position = end
    assert position == len(losses)


def test_translation_shows_sentences_of_the_validation_part_with_their_bleu(
    here: Trained,
) -> None:
    from sacrebleu import sentence_bleu

    phrases = sf.data.cldr_phrases("en", "de", count=600, seed=0)
    _, held_out = sf.data.split_pairs(phrases, val_fraction=0.1)

    (panel,) = panels_of("translation")

    groups = [example.group for example in panel.examples]
    assert groups == ["best"] * 5 + ["worst"] * 5 + ["random"] * 5
    for example in panel.examples:
        assert (example.source, example.reference) in held_out
        bleu = sentence_bleu(example.output, [example.reference]).score
        assert example.score == pytest.approx(bleu)


def test_images_show_the_confusion_that_the_records_have(here: Trained) -> None:
    confusion, _ = panels_of("images")
    counts = [list(row) for row in confusion.counts]
    assert counts == last_scores("images", "val/confusion")


def test_images_show_those_with_the_largest_losses(here: Trained) -> None:
    _, grid = panels_of("images")
    losses = [image.loss for image in grid.images]
    assert len(losses) == 16
    assert losses == sorted(losses, reverse=True)
    assert all(image.label in "0123456789" for image in grid.images)


def test_the_example_of_a_run_is_predicted_as_the_first_that_was_held_out(
    here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--top-k=10", "--checkpoint=6"]
    output = output_of(capsys, "predict", "images", "runs/images/example.png", *flags)
    run = load_end(images)
    picture, _ = run.parts.evaluator.splits["val"].data[0]
    with torch.no_grad():
        (logits,) = run.state.models["model"].eval()(picture[None])

    printed = {}
    for line in output.splitlines():
        probability, digit, *_ = line.split()
        printed[digit] = float(probability)
    expected = logits.softmax(dim=0).tolist()
    assert [printed[str(digit)] for digit in range(10)] == pytest.approx(expected, abs=1e-4)


# --- made anew ------------------------------------------------------------------------------------


def panels_made_anew(run: str) -> sf.report.Panels | None:
    """Those that `evaluate --panels` writes for a run that has left none."""
    Path(run, "panels.json").unlink(missing_ok=True)
    main(["evaluate", run, "--panels"])
    return sf.load(run).panels()


def test_panels_made_anew_of_the_newest_checkpoint_are_those_that_were_written(
    here: Trained,
) -> None:
    """Of gpt the best is the newest, here."""
    written = sf.load("runs/gpt").panels()
    assert panels_made_anew("runs/gpt") == written


def test_panels_made_anew_are_of_the_best_checkpoint(here: Trained) -> None:
    monitor = sf.checkpoint.Store(Path("runs/images/checkpoints")).at(6).state["monitor"]
    panels = panels_made_anew("runs/images")
    assert panels is not None
    assert panels.step == monitor["step"]


def test_of_a_program_without_panels_none_can_be_made(
    here: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("program.py").write_text(
        "import torch, surefoot as sf\n"
        "def build():\n"
        "    data = torch.zeros(8, 2), torch.zeros(8, 1)\n"
        "    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()\n"
        "    return sf.Run(model=lambda: torch.nn.Linear(2, 1), loss=loss, train_data=data, batch_size=4, length='2 steps',\n"
        "                  optimizer=sf.optim.sgd(lr=0.1), run_dir='runs/plain')\n"
    )
    main(["train", "program.py:build"])
    message = error_of(capsys, "evaluate", "runs/plain", "--panels")
    assert "[panels-without-function]" in message


def test_panels_of_a_run_whose_data_are_gone_are_refused(
    here: Trained,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = str(here.directory / "runs" / "gpt")
    message = error_of(capsys, "evaluate", run_dir, "--panels", status=3)
    assert "[path-missing]" in message
