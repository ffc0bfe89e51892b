"""Ten mistakes in settings, and whether what is said makes the next try right: what is typed next
is taken from the message; 10 seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

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
]
SMALL += [
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


def attempt(capsys: pytest.CaptureFixture[str], flags: list[str]) -> str:
    """What is said of the mistake; nothing may have been written."""
    with pytest.raises(SystemExit) as end:
        main(["train", "gpt", *SMALL, *flags])
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert said.startswith("error: ")
    assert len([line for line in said.splitlines() if not line.startswith("  [")]) <= 12
    assert "Traceback" not in said
    assert not Path("runs").exists()
    return said


@pytest.mark.fast(
    "--optimiser.lr=1e-3-",
    "--batch-size=12-",
    "--evaluate-every=2-",
    "--clip=1.0-",
    "--preset=tiney-",
)
@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        # what is taken from the message to type next, and how it becomes a flag
        (["--optimiser.lr=1e-3"], (r"try: (--optimizer\.lr)\n", "{}=1e-3")),
        (["--warmup=2 steps"], (r"try: (--schedule\.warmup)\n", "{}=2 steps")),
        (
            ["--batch-size=12", "--micro-batch-size=5"],
            (r"try: --micro-batch-size (\d+)", "--batch-size=12 --micro-batch-size={}"),
        ),
        (["--evaluate-every=2"], (r"--evaluate-every '([^']+)'", "--evaluate-every={}")),
        (["--schedule.warmup=40 steps"], (r"try: --schedule\.warmup (5%)", "--schedule.warmup={}")),
        (["--clip=1.0"], (r"try: --clip '([^']+)'", "--clip={}")),
        (["--preset=tiney"], (r"did you mean (\w+)\?", "--preset={}")),
        (
            ["--optimizer.min-scale=0.1"],
            (r"a setting of: (\w+)", "--optimizer.name={} --optimizer.min-scale=0.1"),
        ),
        (["--save-every=ten minutes"], (r"or --save-every '([^']+)'\n", "--save-every={}")),
        (["--schedule.min-lr-ratio=50"], (r"from (0) to 1", "--schedule.min-lr-ratio={}")),
        (["--ema=1.5"], (r"(0) or more and below 1", "--ema={}")),
    ],
    ids=lambda case: case[0] if isinstance(case, list) else "",
)
def test_the_next_try_is_right(
    flags: list[str], cure: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = attempt(capsys, flags)
    pattern, next_try = cure
    found = re.search(pattern, said)
    assert found, said
    typed = next_try.format(found[1])
    main(["train", "gpt", *SMALL, *(re.split(r" (?=--)", typed))])
    assert Path("runs/a/checkpoints/step-00000004").is_dir()


def test_several_at_once_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--optimizer.lr=-1",
        "--schedule.warmup=150%",
        "--log-every=often",
        "--model.heads=3",
        "--keep-last=0",
        "--ema=nan",
    ]
    said = attempt(capsys, flags)
    for name in ("optimizer.lr", "schedule.warmup", "log_every", "heads", "keep_last", "ema"):
        assert name in said


def test_a_directory_that_holds_another_run_is_refused_naming_what_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["train", "gpt", *SMALL])
    before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
    with pytest.raises(SystemExit) as end:
        main(["train", "gpt", *SMALL, "--optimizer.lr=1e-4", "--batch-size=4"])
    said = capsys.readouterr().err
    assert end.value.code == 4
    assert "optimizer.lr was 0.014, now 0.0001" in said
    assert "batch_size was 16, now 4" in said
    assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before


PRESETS = [
    (name, ["--preset", preset]) for name in NAMES for preset in find_program(name).names["PRESETS"]
]
UNSET = [
    "val_tokens",
    "model.activation",
    "model.ngram_buckets",
    "optimizer.momentum",
    "optimizer.adamw_lr",
    "preset",
]


def read_again(name: str, text: str) -> object:
    Path("again.toml").write_text(text)
    return program_settings(
        find_program(name), ProgramOptions(what=name, config="again.toml"), [], verb="train"
    )[0]


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
    assert read_again(name, text) == config


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_of_a_script_names_no_preset_and_commands_start_from_tiny(
    name: str,
) -> None:
    program = find_program(name)
    assert program.config is not None
    config = program.config()
    options = ProgramOptions(what=name)
    assert config == program_settings(program, options, ["--preset", "None"], verb="train")[0]
    named = program_settings(program, options, ["--preset", "tiny"], verb="train")[0]
    assert named == program_settings(program, options, [], verb="train")[0]
    assert (config.preset, named.preset) == (None, "tiny")
    assert read_again(name, program.config_text(config, {}, program.described)) == config


def test_only_values_of_the_preset_that_are_unset_stand_in_the_file_as_none() -> None:
    program = find_program("gpt")
    config, origins = program_settings(
        program, ProgramOptions(what="gpt"), ["--val-tokens", "None"], verb="train"
    )
    text = program.config_text(config, origins, program.described)
    assert [line for line in text.splitlines() if '"None"' in line] == [
        'val_tokens = "None" # flag'
    ]
