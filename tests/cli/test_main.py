"""What `--help` prints: an overview, then every verb's own; and what is imported for it; 4
seconds.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from command_line import output_of
from surefoot.cli.help import flags_of
from surefoot.cli.main import OVERVIEW, VERBS, main
from surefoot.cli.options import option_names
from surefoot.config.tree import flatten
from surefoot.recipes import NAMES
from surefoot.recipes.gpt.config import Config, Model


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that ends with it, such as `--help`."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


def description_of(value: object) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def options_of(verb: str) -> type[Any]:
    """The dataclass of a verb's options: the one of its file that has the verb's description."""
    module = importlib.import_module(f"surefoot.cli.{verb.replace('-', '_')}")
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    dataclasses_of_file = [kind for kind in classes if dataclasses.is_dataclass(kind)]
    (options,) = [
        kind for kind in dataclasses_of_file if f"  surefoot {verb} " in description_of(kind)
    ]
    return options


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flags_of_options(verb: str) -> set[str]:
    return {flag_of(name) for name in option_names(options_of(verb))}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_every_option_and_stands_in_the_overview(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"surefoot {verb} " in OVERVIEW
    text = printed(capsys, verb, "--help-all")
    assert text.startswith(description_of(options_of(verb)))
    assert [flag for flag in flags_of_options(verb) if f"{flag} " not in text] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_explained(verb: str) -> None:
    """In the line that follows it, which tyro prints: without one it would repeat the name."""
    *classes, _ = options_of(verb).__mro__
    for options in classes:
        lines = [line.strip() for line in inspect.getsource(options).splitlines()]
        beginnings = tuple(f"{name}: " for name in options.__annotations__)
        for line, following in pairwise(lines):
            if line.startswith(beginnings):
                assert following.startswith('"""'), line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([verb, "--help"] for verb in VERBS),
        *(["train", name, "--help"] for name in NAMES),
        *(["train", name, "--help-all"] for name in NAMES),
    ],
    ids=" ".join,
)
def test_no_line_is_wider_than_a_terminal(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, *arguments).splitlines()
    assert max(len(line) for line in lines) <= 80


def config_of(recipe: str) -> type[Any]:
    config: type[Any] = importlib.import_module(f"surefoot.recipes.{recipe}.config").Config
    return config


def flags_in(text: str) -> list[str]:
    """The flags that a help explains, in its order."""
    return re.findall(r"(?m)^  (--\S+)", text)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_recipe_shows_the_ten_settings_that_its_declaration_marks_and_how_to_see_all(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = list(flags_of(config_of(name)))
    marked = [flag.typed for flag in settings if flag.most_used]
    assert len(marked) == 10
    assert {"--preset", "--data.path", "--length", "--optimizer.lr", "--run-dir"} < set(marked)

    short = printed(capsys, "train", name, "--help")
    assert flags_in(short) == marked
    assert f"All {len(settings)} settings: surefoot train {name} --help-all" in short
    assert printed(capsys, "train", name, "-h") == short

    flags = flags_in(printed(capsys, "train", name, "--help-all"))
    assert flags[:10] == marked
    assert {flag.typed for flag in settings} < set(flags)


@pytest.mark.parametrize("verb", ["plan", "find-lr", "find-batch-size", "profile", "submit"])
def test_another_subcommand_shows_its_options_and_names_the_help_with_all_settings(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {flag.typed for flag in flags_of(config_of("gpt"))}

    short = printed(capsys, verb, "gpt", "--help")
    flags = set(flags_in(short))
    assert flags != set()
    assert flags & settings <= flags_of_options(verb)
    assert f"surefoot {verb} gpt --help-all" in short

    all_flags = set(flags_in(printed(capsys, verb, "gpt", "--help-all")))
    assert flags | settings <= all_flags


@pytest.mark.parametrize("verb", ["compare", "plan", "profile", "submit"])
def test_a_subcommand_with_many_options_shows_those_that_its_declaration_marks(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [flag for flag in flags_of(options_of(verb), switches=True) if not flag.metavar]
    marked = [flag.typed for flag in options if flag.most_used]
    assert 0 < len(marked) < len(options)

    short = printed(capsys, verb, "--help")
    assert flags_in(short) == marked
    assert f"All {len(options)} options: surefoot {verb} --help-all" in short

    all_flags = flags_in(printed(capsys, verb, "--help-all"))
    assert all_flags == [flag.typed for flag in options]


def test_the_whole_help_of_a_recipe_groups_all_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "train", "gpt", "--help-all")
    headings = re.findall(r"(?m)^(\w.*):$", text)
    groups = [
        "how long",
        "batches",
        "optimization",
        "precision and speed",
        "evaluation",
        "records",
        "checkpoints",
        "processes",
    ]
    assert headings[0] == "most used"
    assert [name for name in headings if name in groups] == groups
    flags = flags_in(text)
    assert len(flags) == len(set(flags))


def test_the_readme_has_a_row_for_every_recipe() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    _, _, section = readme.partition("## Recipes")
    table, _, _ = section.partition("## ")
    assert set(re.findall(r"(?m)^\| `(\w+)", table)) == set(NAMES)


def test_the_overview_names_every_recipe() -> None:
    assert [name for name in NAMES if name not in OVERVIEW] == []


@pytest.mark.parametrize(
    "command",
    ["train", "plan", "find-lr", "find-batch-size", "profile", "submit", "data look"],
)
def test_the_help_of_a_subcommand_names_every_recipe(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *command.split(), "--help")
    assert [name for name in NAMES if name not in text] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_its_shell_can_read(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = output_of(capsys, "completion", shell)
    assert "python" not in script
    process = subprocess.run(
        [shell, "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert process.stderr == ""
    assert process.returncode == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_flags_of_the_help(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = output_of(capsys, "completion", shell)
    for flag in ("help", "help-all"):
        pattern = rf"-l {flag} " if shell == "fish" else rf"--{flag}\b"
        assert re.search(pattern, script)


def test_bash_completes_verbs_recipes_flags_and_choices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = tmp_path / "script"
    script.write_text(output_of(capsys, "completion", "bash"))
    flags_of_model = [flag_of(f"model.{field.name}") for field in dataclasses.fields(Model)]
    completions = {
        "tr": ["train"],
        "train t": ["translation"],
        "train gpt --mod": flags_of_model,
        "train images --model.fam": [],
        "train gpt --model.family ": ["modern", "gpt2", "llama"],
        "train gpt --help": ["--help", "--help-all"],
        "compare gpt --pruner n": ["none"],
        "resume latest --time-l": ["--time-limit"],
        "predict latest --max-n": ["--max-new-tokens"],
    }
    program = f"source {script}\n"
    for line in completions:
        next_word = "''" if line.endswith(" ") else ""  # a word of which nothing is typed
        program += f"COMP_WORDS=(surefoot {line}{next_word})\n"
        program += "COMP_CWORD=$((${#COMP_WORDS[@]}-1))\n"
        program += '_surefoot; echo "${COMPREPLY[@]}"\n'

    process = subprocess.run(["bash", "-c", program], text=True, capture_output=True, check=True)

    printed_words = [line.split() for line in process.stdout.splitlines()]
    assert dict(zip(completions, printed_words, strict=True)) == completions


def test_help_of_a_recipe_shows_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "train", "gpt", "--help-all")
    flags = [flag_of(name) for name in flatten(Config())]
    assert [flag for flag in flags if not re.search(rf"{flag}\b", text)] == []
    assert "(default: 550 steps)" in text


def test_help_of_a_recipe_shows_the_values_of_the_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    everything = printed(capsys, "train", "gpt", "--help-all")
    assert "(preset: muon)" in " ".join(everything.split())
    assert "(preset: 0.014)" in printed(capsys, "train", "gpt", "--help")
    small = printed(capsys, "train", "gpt", "--preset", "small", "--help-all")
    assert "(default: adamw)" in small


HEAVY = [
    "torch",
    "numpy",
    "tyro",
    "rich",
    "tomlkit",
    "resvg_py",
    "safetensors",
    "surefoot.run.run",
    "surefoot.config",
]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--help-all"], ["--version"]], ids=str)
def test_the_overview_imports_nothing_heavy(arguments: list[str]) -> None:
    """0.25 s of processor time is the aim: that of Python and a few modules of its standard
    library.
    """
    program = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules]))
from surefoot.cli.main import main
main({arguments})
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert process.stdout.splitlines()[-1] == "[]", process
