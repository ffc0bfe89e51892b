"""Ten mistakes in settings, and whether what is said makes the next try right: what is typed next
is taken from the message; 10 seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import error_of
from surefoot.cli.main import main
from surefoot.cli.options import ProgramOptions
from surefoot.cli.settings import program_settings
from surefoot.program import find_program
from surefoot.recipes import NAMES

SMALL = [
    "--data.path=text.txt",
    "--model.width=16",
    "--model.context=8",
    "--model.layers=1",
    "--model.heads=2",
    "--data.vocab-size=280",
    "--cloze-questions=0",
    "--sample-tokens=0",
    "--length=4 steps",
    "--run-dir=runs/a",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    Path("text.txt").write_text("to be or not to be, that is the question\n" * 60)


def error_of_train(capsys: pytest.CaptureFixture[str], flags: list[str]) -> str:
    """The error of a mistake, before which nothing was written."""
    message = error_of(capsys, "train", "gpt", *SMALL, *flags)
    assert message.startswith("error: ")
    lines = [line for line in message.splitlines() if not line.startswith("  [")]
    assert len(lines) <= 12
    assert "Traceback" not in message
    assert not Path("runs").exists()
    return message


# what is typed, what is taken from the message to type next, and how it becomes a flag
MISTAKES = [
    ("--optimiser.lr=1e-3", r"try: (--optimizer\.lr)\n", "{}=1e-3"),
    ("--warmup=2 steps", r"try: (--schedule\.warmup)\n", "{}=2 steps"),
    (
        "--batch-size=12 --micro-batch-size=5",
        r"try: --micro-batch-size (\d+)",
        "--batch-size=12 --micro-batch-size={}",
    ),
    ("--evaluate-every=2", r"--evaluate-every '([^']+)'", "--evaluate-every={}"),
    ("--schedule.warmup=40 steps", r"try: --schedule\.warmup (5%)", "--schedule.warmup={}"),
    ("--clip=1.0", r"try: --clip '([^']+)'", "--clip={}"),
    ("--preset=tiney", r"did you mean (\w+)\?", "--preset={}"),
    (
        "--optimizer.min-scale=0.1",
        r"a setting of: (\w+)",
        "--optimizer.name={} --optimizer.min-scale=0.1",
    ),
    ("--save-every=ten minutes", r"or --save-every '([^']+)'\n", "--save-every={}"),
    ("--schedule.min-lr-ratio=50", r"from (0) to 1", "--schedule.min-lr-ratio={}"),
    ("--ema=1.5", r"(0) or more and below 1", "--ema={}"),
]


@pytest.mark.fast(
    "--optimiser.lr=1e-3",
    "--batch-size=12",
    "--evaluate-every=2",
    "--clip=1.0",
    "--preset=tiney",
)
@pytest.mark.parametrize(
    ("typed", "pattern", "next_try"),
    MISTAKES,
    ids=[typed.split()[0] for typed, _, _ in MISTAKES],
)
def test_the_next_try_is_right(
    typed: str, pattern: str, next_try: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of_train(capsys, flags_in(typed))
    cure = re.search(pattern, message)
    assert cure is not None, message

    main(["train", "gpt", *SMALL, *flags_in(next_try.format(cure[1]))])

    assert Path("runs/a/checkpoints/step-00000004").is_dir()


def flags_in(text: str) -> list[str]:
    """The flags of a text; a value may have a space."""
    return re.split(r" (?=--)", text)


def test_several_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--optimizer.lr=-1",
        "--schedule.warmup=150%",
        "--log-every=often",
        "--model.heads=3",
        "--keep-last=0",
        "--ema=nan",
    ]
    message = error_of_train(capsys, flags)
    for name in ("optimizer.lr", "schedule.warmup", "log_every", "heads", "keep_last", "ema"):
        assert name in message


def test_a_directory_that_holds_another_run_is_refused_naming_what_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "gpt", *SMALL])
    files = files_of_runs()
    changes = ["--optimizer.lr=1e-4", "--batch-size=4"]
    message = error_of(capsys, "train", "gpt", *SMALL, *changes, status=4)
    assert "optimizer.lr was 0.014, now 0.0001" in message
    assert "batch_size was 16, now 4" in message
    assert files_of_runs() == files


def files_of_runs() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}


PRESETS = []
for recipe in NAMES:
    PRESETS += [(recipe, ["--preset", preset]) for preset in find_program(recipe).names["PRESETS"]]
UNSET = [
    "val_tokens",
    "model.activation",
    "model.ngram_buckets",
    "optimizer.momentum",
    "optimizer.adamw_lr",
    "preset",
]


def settings_of_recipe(name: str, *flags: str, file: str | None = None) -> Any:
    options = ProgramOptions(what=name, config=file)
    config, _ = program_settings(find_program(name), options, list(flags), verb="train")
    return config


def settings_in_file(name: str, text: str) -> Any:
    """The settings of a recipe that this text of config.toml gives."""
    Path("written.toml").write_text(text)
    return settings_of_recipe(name, file="written.toml")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *((name, []) for name in NAMES),
        *PRESETS,
        *(("gpt", [f"--{setting}", "None"]) for setting in UNSET),
        ("gpt", ["--model.ngrams", "1"]),
        ("gpt", ["--model.family", "gpt2", "--optimizer.name", "sgd"]),
        ("translation", ["--preset", "base", "--data.vocab-size", "None"]),
    ],
    ids=str,
)
def test_the_file_of_a_run_gives_the_same_settings(name: str, flags: list[str]) -> None:
    program = find_program(name)
    config, origins = program_settings(program, ProgramOptions(what=name), flags, verb="train")
    text = program.config_text(config, origins, program.described)
    assert settings_in_file(name, text) == config


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_of_a_script_names_no_preset_and_commands_start_from_tiny(
    name: str,
) -> None:
    program = find_program(name)
    assert program.config is not None
    config = program.config()
    assert config.preset is None
    assert settings_of_recipe(name, "--preset", "None") == config

    tiny = settings_of_recipe(name, "--preset", "tiny")
    assert tiny.preset == "tiny"
    assert settings_of_recipe(name) == tiny

    text = program.config_text(config, {}, program.described)
    assert settings_in_file(name, text) == config


def test_only_values_of_the_preset_that_are_unset_stand_in_the_file_as_none() -> None:
    program = find_program("gpt")
    config, origins = program_settings(
        program, ProgramOptions(what="gpt"), ["--val-tokens", "None"], verb="train"
    )
    text = program.config_text(config, origins, program.described)
    lines = [line for line in text.splitlines() if '"None"' in line]
    assert lines == ['val_tokens = "None" # flag']
