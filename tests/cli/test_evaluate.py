"""The end of a run as each recipe has it: its panels, the words, and that every command in them
works; 9 seconds.
"""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config.tree import layered
from surefoot.recipes import gpt, images, translation
from surefoot.tracking.format import number

TEXT = "die Katze saß auf der Matte, während Vögel in alten Bäumen sangen. " * 120
SETTINGS = {
    "gpt": [
        *("--data.path=text.txt", "--data.tokenizer=bytes", "--model.layers=1", "--model.width=16"),
        *("--model.heads=2", "--model.context=16", "--cloze-questions=0", "--sample-tokens=4"),
    ],
    "translation": [
        *(
            "--data.phrase-count=600",
            "--data.vocab-size=280",
            "--model.encoder-layers=1",
            "--model.decoder-layers=1",
        ),
        *(
            "--model.width=16",
            "--model.mlp-width=16",
            "--data.val-fraction=0.1",
            "--evaluate-every=3 steps",
        ),
    ],
    "images": ["--model.width=4", "--batch-size=8"],
}


@dataclass
class Ended:
    """A directory in which all three recipes have been trained, and what the end of each said."""

    place: Path
    said: dict[str, str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    place = tmp_path_factory.mktemp("ended")
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["surefoot"])
        Path("text.txt").write_text(TEXT)
        for recipe, settings in SETTINGS.items():
            with redirect_stdout(io.StringIO()) as out:
                main(
                    [
                        "train",
                        recipe,
                        "--length=6 steps",
                        "--precision=fp32",
                        "--report=false",
                        *settings,
                    ]
                )
            lines = out.getvalue().splitlines()
            begun = next(
                number for number, line in enumerate(lines) if line.startswith("finished: 6 steps")
            )
            said[recipe] = "\n".join(lines[begun:])
        yield Ended(place, said)


@pytest.fixture
def there(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> Ended:
    monkeypatch.chdir(ended.place)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    return ended


# --- the last words -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", SETTINGS)
def test_the_end_of_a_run_is_one_sentence_and_one_line_for_each_command(
    recipe: str, ended: Ended
) -> None:
    assert all(len(line) <= 80 for line in ended.said[recipe].splitlines())
    how, *commands = ended.said[recipe].replace("\n  ", " ").splitlines()
    assert re.fullmatch(
        rf"(\d findings?: [^:]+: surefoot diagnose runs/{recipe}\n)?"
        rf"use it: surefoot predict runs/{recipe}.*\nevaluate it: surefoot evaluate runs/{recipe}.*",
        "\n".join(commands),
    )
    score = {"gpt": "val/loss", "translation": "val/bleu", "images": "val/loss"}[recipe]
    assert re.search(rf"; {score} ((fell|rose) from [\d.]+ at step \d to )?[\d.]+", how)


@pytest.mark.parametrize("recipe", SETTINGS)
def test_every_command_in_it_works(
    recipe: str, there: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        shlex.split(found) for found in re.findall(r"surefoot ([^;\n]+)", there.said[recipe])
    ]
    assert [command[0] for command in commands if command[0] != "diagnose"] == [
        "predict",
        "evaluate",
    ]
    inputs = [part for part in commands[-2][2:] if part not in ("--checkpoint", "best")]
    assert len(inputs) == (0 if recipe == "gpt" else 1)
    for command in commands:
        main(command)
        assert capsys.readouterr().out


def test_numbers_have_the_digits_that_the_run_has_printed(
    there: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["evaluate", "runs/gpt"])
    printed = dict(re.findall(r" (\S+)=(\S+)", capsys.readouterr().out))
    lines = (there.place / "runs/gpt/metrics.jsonl").read_text().splitlines()
    scores = [record for record in map(json.loads, lines) if record["kind"] == "eval"][-1]
    for name in ("val/loss", "val/perplexity"):
        assert printed[name] == number(scores[name])


def test_a_run_that_was_stopped_says_how_to_go_on_and_that_works(
    there: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        *SETTINGS["images"],
        "--length=6 steps",
        "--run-dir=runs/stopped",
        "--precision=fp32",
    ]
    main(["train", "images", *settings, "--stop-after=4 steps"])
    *_, how, following = capsys.readouterr().out.splitlines()
    assert how.startswith("stopped ")
    assert numbers_in(how)[:2] == [4, 6]
    assert following.endswith(":  surefoot resume runs/stopped")
    main(shlex.split(following.partition("surefoot ")[2]))
    assert "finished: 6 steps" in capsys.readouterr().out
    assert sf.load("runs/stopped").panels() is not None


@pytest.mark.slow
def test_what_is_wrong_is_named_once_more_at_the_end(
    there: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "--data.path=text.txt",
        *SETTINGS["gpt"][1:],
        "--run-dir=runs/wrong",
        "--precision=fp32",
    ]
    main(
        [
            "train",
            "gpt",
            *settings,
            "--length=120 steps",
            "--log-every=1 steps",
            "--optimizer.lr=1e-9",
        ]
    )
    end = capsys.readouterr().out.partition("\nfinished: 120 steps")[2].replace("\n  ", " ")
    named = re.search(
        r"^(\d) findings?: ([^:\n]+): surefoot diagnose runs/wrong$", end, flags=re.MULTILINE
    )
    assert named is not None
    wrong = [one for one in sf.load("runs/wrong").diagnose() if one.severity != "note"]
    assert int(named[1]) == len(wrong) > 0
    assert named[2].startswith(wrong[0].name)


# --- the panels of the recipes --------------------------------------------------------------------


def panel(recipe: str, place: int = 0) -> Any:
    shown = sf.load(Path("runs") / recipe).panels()
    assert shown is not None
    assert shown.step == 6
    return shown.panels[place]


def test_gpt_tints_held_out_text_with_the_losses_that_its_evaluation_has(there: Ended) -> None:
    text = panel("gpt")
    assert text.text in TEXT
    assert 250 <= len(text.text.encode()) <= 320
    run = gpt.build(layered(gpt.Config, [("test", config("gpt"))])[0])
    run.load_checkpoint(sf.checkpoint.Store(Path("runs/gpt/checkpoints")).at(6))
    windows = run.parts.evaluator.splits["val"].data
    tokens = np.frombuffer(text.text.encode(), dtype=np.uint8).astype(np.int64)
    held_out = windows.arrays[0].astype(np.int64)
    begun = next(
        place
        for place in range(0, len(held_out), 16)
        if np.array_equal(held_out[place:][: len(tokens)], tokens)
    )
    inputs, targets = windows.gather(
        np.arange(begun // 16, (begun + len(tokens) - 1) // 16), np.zeros(1, dtype=np.int64)
    )
    with torch.no_grad():
        logits = run.state.models["model"].eval()(inputs)
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    assert text.pieces[0] == (text.text[0], None)
    left = losses.tolist()
    for piece, value in text.pieces[1:]:
        of_piece = left[: len(piece.encode())]
        left = left[len(piece.encode()) :]
        assert value == pytest.approx(math.fsum(of_piece), rel=1e-5)
    assert left == []


def test_translation_shows_sentences_of_the_validation_part_with_their_bleu(there: Ended) -> None:
    from sacrebleu import sentence_bleu

    found = panel("translation")
    groups = [one.group for one in found.examples]
    assert groups == ["best"] * 5 + ["worst"] * 5 + ["random"] * 5
    run = translation.build(layered(translation.Config, [("test", config("translation"))])[0])
    settings = layered(translation.Config, [("test", config("translation"))])[0]
    phrases = sf.data.cldr_phrases("en", "de", count=settings.data.phrase_count, seed=0)
    _, held_out = sf.data.split_pairs(phrases, val_fraction=0.1)
    assert all((one.source, one.reference) in held_out for one in found.examples)
    assert run.parts.settings.panels_fn is not None
    for one in found.examples:
        assert one.score == pytest.approx(sentence_bleu(one.output, [one.reference]).score)


def test_images_show_the_confusion_that_the_records_have_and_the_largest_losses(
    there: Ended,
) -> None:
    confusion, wrong = panel("images"), panel("images", 1)
    lines = [
        json.loads(line) for line in Path("runs/images/metrics.jsonl").read_text().splitlines()
    ]
    last = [line for line in lines if "val/confusion" in line][-1]
    assert [list(row) for row in confusion.counts] == last["val/confusion"]
    assert len(wrong.images) == 16
    losses = [one.loss for one in wrong.images]
    assert losses == sorted(losses, reverse=True)
    assert all(one.label in "0123456789" for one in wrong.images)


def test_the_example_of_a_run_is_predicted_as_what_was_held_out(
    there: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["predict", "images", "runs/images/example.png", "--top-k", "10", "--checkpoint", "6"])
    said = {
        line.split()[1]: float(line.split()[0]) for line in capsys.readouterr().out.splitlines()
    }
    run = images.build(layered(images.Config, [("test", config("images"))])[0])
    run.load_checkpoint(sf.checkpoint.Store(Path("runs/images/checkpoints")).at(6))
    picture, _ = run.parts.evaluator.splits["val"].data[0]
    with torch.no_grad():
        chances = run.state.models["model"].eval()(picture[None])[0].softmax(dim=0)
    assert [said[str(digit)] for digit in range(10)] == pytest.approx(chances.tolist(), abs=1e-4)


def config(recipe: str) -> dict[str, Any]:
    from surefoot.config.toml import values

    return values((Path("runs") / recipe / "config.toml").read_text())


# --- made anew ------------------------------------------------------------------------------------


def panels_made_anew(run: str) -> sf.report.Panels | None:
    """Those that `evaluate --panels` writes for a run that has left none."""
    Path(run, "panels.json").unlink(missing_ok=True)
    main(["evaluate", run, "--panels"])
    return sf.load(run).panels()


def test_panels_made_anew_of_the_newest_checkpoint_are_those_that_were_written(
    there: Ended,
) -> None:
    """Of gpt the best is the newest, here."""
    written = sf.load("runs/gpt").panels()
    assert panels_made_anew("runs/gpt") == written


def test_panels_made_anew_are_of_the_best_checkpoint(there: Ended) -> None:
    watched = sf.checkpoint.Store(Path("runs/images/checkpoints")).at(6).state["monitor"]
    shown = panels_made_anew("runs/images")
    assert shown is not None
    assert shown.step == watched["step"]


def test_of_a_program_without_panels_none_can_be_made(
    there: Ended, capsys: pytest.CaptureFixture[str]
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
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "runs/plain", "--panels"])
    assert end.value.code == 2
    assert "[panels-without-function]" in capsys.readouterr().err


def test_of_a_run_whose_data_are_gone_it_is_said(
    there: Ended,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["evaluate", str(there.place / "runs" / "gpt"), "--panels"])
    assert end.value.code == 3
    assert "[path-missing]" in capsys.readouterr().err
