"""find-lr and find-batch-size as a user types them; 6 seconds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from command_line import error_of, output_of
from forked_ranks import PROGRAM as SMALL_PROGRAM
from forked_ranks import surefoot
from in_one import in_one
from stated import numbers_by_line, numbers_in
from surefoot.cli.find_lr import tried_options, tried_run
from surefoot.cli.main import main
from surefoot.cli.profile import Profile

PROGRAM = """
from dataclasses import dataclass, field
import torch
from torch import nn
import torch.nn.functional as F
import surefoot as sf

@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1

@dataclass(frozen=True)
class Config:
    length: str = "40 steps"
    batch_size: int = 24
    micro_batch_size: int | None = None
    run_dir: str = "runs/mine"
    optimizer: Optimizer = field(default_factory=Optimizer)

def build(config: Config):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 4, generator=generator)
    return sf.Run(
        model=lambda: nn.Linear(4, 1), loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, inputs.sum(1, keepdim=True)), batch_size=config.batch_size, length=config.length,
        micro_batch_size=config.micro_batch_size, optimizer=sf.optim.sgd(lr=config.optimizer.lr), run_dir=config.run_dir, report=False,
    )

def plain():
    return build(Config(run_dir="runs/plain"))

def own_loop():
    return sf.Run(
        model=lambda: nn.Linear(4, 1), train_data=(torch.randn(9, 4),), batch_size=3, length="9 steps",
        optimizer=sf.optim.sgd(lr=0.1),
    )
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    Path("program.py").write_text(PROGRAM)


def files() -> dict[str, bytes]:
    """The contents of all files but those that Python compiled."""
    paths = [path for path in Path().rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths if "__pycache__" not in path.parts}


def test_what_a_run_has_left_where_a_recipe_would_train_is_none_of_the_recipes() -> None:
    # of a run with another tokenizer, or none
    Path("runs/gpt/checkpoints/step-00000000").mkdir(parents=True)
    Path("text.txt").write_text("to be or not to be " * 200)
    words = [
        "gpt",
        "--data.path=text.txt",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=8",
    ]
    options, flags = tried_options(Profile, words, verb="profile")
    run, names = tried_run(options, flags, verb="profile")
    assert run.parts.directory is None
    assert "model.layers" in names


def test_find_lr_prints_the_flag_to_type_and_writes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = output_of(capsys, "find-lr", "program.py:build", "--batch-size", "48")
    (flag,) = re.findall(r"^suggested  (--optimizer\.lr \S+)$", output, re.MULTILINE)
    assert files().keys() == {"program.py"}
    main(["train", "program.py:build", *flag.split()])
    assert Path("runs/mine/checkpoints/step-00000040").is_dir()


def test_find_lr_draws_where_it_is_told_and_nowhere_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--out=pictures/here", "--steps=30", "--min-lr=1e-4", "--max-lr=100"]
    output = output_of(capsys, "find-lr", "program.py:plain", *flags)
    first_numbers = [numbers[:3] for numbers in numbers_by_line(output)]
    assert [30, 1e-4, 100] in first_numbers
    # a program without settings has no flag
    assert re.search(r"^suggested  learning rate \S+$", output, re.MULTILINE)
    pictures = {"pictures/here/find-lr.svg", "pictures/here/find-lr.png"}
    assert files().keys() - pictures == {"program.py"}
    assert "pictures/here/find-lr.svg" in output


@pytest.mark.parametrize(
    ("verb", "option"), [("find-lr", "--steps INT"), ("find-batch-size", "--memory TEXT")]
)
def test_help_of_a_recipe_begins_with_the_options_of_the_verb(
    verb: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "images", "--help-all"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.index(option) < text.index("--length TEXT")


def test_another_optimizer_than_the_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.toml").write_text(
        '[program]\nkind = "recipe"\nname = "images"\n[optimizer]\nname = "adamw"\n'
    )
    message = error_of(capsys, "find-lr", "mine", "--optimizer.name", "sgd")
    assert "[setting-out-of-range]" in message


def test_find_batch_prints_flags_that_train_takes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--batch-size=32", "--memory=1 GB"]
    output = output_of(capsys, "find-batch-size", "program.py:build", *flags)
    (recommended,) = re.findall(
        r"^recommended  (--batch-size 32 --micro-batch-size \d+)$", output, re.MULTILINE
    )
    assert re.search(r"^ +32 +1 +[\d.]+ kB +[\d,]+ +[\d,]+", output, re.MULTILINE)
    assert files().keys() == {"program.py"}
    main(["train", "program.py:build", *recommended.split()])


@pytest.fixture
def trained() -> Path:
    """A run of 8 steps."""
    main(["train", "program.py:build", "--length", "8 steps"])
    return Path("runs/mine")


def test_a_finished_run_has_no_step_to_try(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["find-lr", "mine"])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert 8 in numbers_in(printed.err)
    assert printed.out == ""


def test_a_run_is_tried_at_its_checkpoint_and_stays_as_it_is(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = files()
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["find-lr", str(trained), "--checkpoint=0", "--steps=20", "--max-lr=1e-4"])
    assert end.value.code == 1  # too noisy for a suggestion
    output = capsys.readouterr().out
    numbers = numbers_by_line(output)
    last_numbers = [of_line[-1] for of_line in numbers]
    assert 0 in last_numbers  # the step where it begins
    assert [1e-4, 20, 20] in numbers  # the highest rate that it reached; of so many rates
    assert "suggested  " not in output
    assert files() == contents


def test_a_batch_size_is_found_for_the_latest_run_which_stays_as_it_is(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = files()
    assert "recommended" in output_of(capsys, "find-batch-size", "latest", "--memory", "1 GB")
    assert files() == contents


@in_one
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["find-lr"], "[argument-missing]"),
        (["find-batch-size", "--memory", "8GB"], "[argument-missing]"),
        (["find-lr", "imagse"], "did you mean images?"),
        (
            ["find-lr", "program.py:build", "--min-lr", "1", "--max-lr", "0.1"],
            "--min-lr 0.1 --max-lr 1",
        ),
        (["find-lr", "program.py:build", "--steps", "9"], "steps = 9"),
        (["find-lr", "program.py:build", "--steps", "many"], "[flags-not-understood]"),
        (["find-lr", "program.py:build", "--max-lr", "ten"], "[flags-not-understood]"),
        (
            ["find-lr", "program.py:build", "--max-lr", "nan"],
            "[setting-out-of-range]",
        ),
        (["find-lr", "program.py:build", "--min-lr"], "[flags-not-understood]"),
        (["find-lr", "program.py:build", "--mni-lr", "1e-4"], "[setting-unknown]"),
        (["find-lr", "program.py:build", "--out", "program.py"], "cannot write to program.py"),
        (["find-lr", "program.py:own_loop"], "[run-without-loss]"),
        (["find-batch-size", "program.py:own_loop"], "[run-without-loss]"),
        (["plan", "program.py:own_loop", "--world-size", "8"], "[run-without-loss]"),
        (["find-batch-size", "program.py:build", "--memory", "lots"], "memory = 'lots'"),
        (
            ["find-batch-size", "program.py:build", "--memory", "90B"],
            "even a micro-batch of 1 samples does not fit",
        ),
        (["find-batch-size", "program.py:build", "--batch-size", "0"], "[setting-out-of-range]"),
        (
            ["find-batch-size", "program.py:build", "--batch-size", "99 tokens"],
            "[batch-size-of-unknown-lengths]",
        ),
        (["find-batch-size", "program.py:build", "--memroy", "1GB"], "[setting-unknown]"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_a_mistake_is_refused_in_few_lines(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, *arguments)
    assert reason in message
    assert message.startswith("error: ")
    assert len(message.splitlines()) <= 5
    assert "Traceback" not in message


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_ranks_that_find_no_rate_end_with_status_1_and_no_error(tmp_path: Path) -> None:
    rates = ["--min-lr", "1e-12", "--max-lr", "1e-11", "--steps", "10"]
    with surefoot(tmp_path / "ranks", "find-lr", SMALL_PROGRAM, "--nproc", "2", *rates) as launched:
        assert launched.wait() == 1
        assert launched.said == ""
