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
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.help import flags_of
from surefoot.cli.main import OVERVIEW, VERBS, main
from surefoot.cli.options import option_names
from surefoot.recipes import NAMES
from surefoot.recipes.gpt.config import Model


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


def options_of(verb: str) -> type[Any]:
    """The dataclass of a verb's options: the one of its file that has the verb's description."""
    module = importlib.import_module(f"surefoot.cli.{verb.replace('-', '_')}")
    own = [
        kind
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type)
    ]
    (kind,) = [
        kind for kind in own if f"  surefoot {verb} " in inspect.cleandoc(kind.__doc__ or "")
    ]
    return kind


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_every_option_and_stands_in_the_overview(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"surefoot {verb} " in OVERVIEW
    said = printed(capsys, verb, "--help-all")
    kind = options_of(verb)
    assert said.startswith(inspect.cleandoc(kind.__doc__ or ""))
    assert [name for name in option_names(kind) if f"--{name.replace('_', '-')} " not in said] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_explained(verb: str) -> None:
    """In the line that follows it, which tyro prints: without one it would repeat the name."""
    for kind in options_of(verb).__mro__[:-1]:
        lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
        fields = [
            place
            for place, line in enumerate(lines)
            if any(line.startswith(f"{n}: ") for n in kind.__annotations__)
        ]
        assert [lines[place] for place in fields if not lines[place + 1].startswith('"""')] == []


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
    assert max(len(line) for line in printed(capsys, *arguments).splitlines()) <= 80


def config_of(recipe: str) -> type[Any]:
    kind: type[Any] = importlib.import_module(f"surefoot.recipes.{recipe}.config").Config
    return kind


def flags_shown(said: str) -> list[str]:
    return re.findall(r"(?m)^  (--\S+)", said)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_recipe_shows_the_ten_settings_that_its_declaration_marks_and_how_to_see_all(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = list(flags_of(config_of(name)))
    marked = [flag.typed for flag in settings if flag.most_used]
    assert len(marked) == 10
    assert {"--preset", "--data.path", "--length", "--optimizer.lr", "--run-dir"} < {*marked}
    said = printed(capsys, "train", name, "--help")
    assert flags_shown(said) == marked
    assert f"All {len(settings)} settings: surefoot train {name} --help-all" in said
    whole = printed(capsys, "train", name, "--help-all")
    assert flags_shown(whole)[:10] == marked
    assert {flag.typed for flag in settings} < {*flags_shown(whole)}
    assert printed(capsys, "train", name, "-h") == said


@pytest.mark.parametrize("verb", ["plan", "find-lr", "find-batch-size", "profile", "submit"])
def test_another_subcommand_shows_its_options_and_names_the_help_with_all_settings(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, verb, "gpt", "--help")
    known = {f"--{option.replace('_', '-')}" for option in option_names(options_of(verb))}
    settings = {flag.typed for flag in flags_of(config_of("gpt"))}
    assert flags_shown(said)
    assert {*flags_shown(said)} & settings <= known
    assert f"surefoot {verb} gpt --help-all" in said
    whole = flags_shown(printed(capsys, verb, "gpt", "--help-all"))
    assert {*flags_shown(said)} | settings <= {*whole}


@pytest.mark.parametrize("verb", ["compare", "plan", "profile", "submit"])
def test_a_subcommand_with_many_options_shows_those_that_its_declaration_marks(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [flag for flag in flags_of(options_of(verb), switches=True) if not flag.metavar]
    marked = [flag.typed for flag in options if flag.most_used]
    said = printed(capsys, verb, "--help")
    assert 0 < len(marked) < len(options)
    assert flags_shown(said) == marked
    assert f"All {len(options)} options: surefoot {verb} --help-all" in said
    assert flags_shown(printed(capsys, verb, "--help-all")) == [flag.typed for flag in options]


def test_the_whole_help_of_a_recipe_groups_all_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = printed(capsys, "train", "gpt", "--help-all")
    headings = re.findall(r"(?m)^(\w.*):$", said)
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
    flags = flags_shown(said)
    assert len(flags) == len(set(flags))


def test_help_and_readme_name_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme.partition("## Recipes")[2].partition("## ")[0]
    assert set(re.findall(r"(?m)^\| `(\w+)", table)) == set(NAMES)
    pages = {"overview": OVERVIEW}
    for verb in ("train", "plan", "find-lr", "find-batch-size", "profile", "submit"):
        pages[verb] = printed(capsys, verb, "--help")
    pages["data look"] = printed(capsys, "data", "look", "--help")
    assert [page for page, text in pages.items() if not all(name in text for name in NAMES)] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_its_shell_can_read(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    main(["completion", shell])
    script = capsys.readouterr().out
    assert "python" not in script
    done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_flags_of_the_help(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", shell])
    script = capsys.readouterr().out
    for flag in ("help", "help-all"):
        assert re.search(rf"-l {flag} " if shell == "fish" else rf"--{flag}\b", script)


def test_bash_completes_verbs_recipes_flags_and_choices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    typed = {
        "tr": ["train"],
        "train t": ["translation"],
        "train gpt --mod": [
            f"--model.{field.name.replace('_', '-')}" for field in dataclasses.fields(Model)
        ],
        "train images --model.fam": [],
        "train gpt --model.family ": ["modern", "gpt2"],
        "train gpt --help": ["--help", "--help-all"],
        "compare gpt --pruner n": ["none"],
        "resume latest --time-l": ["--time-limit"],
        "predict latest --max-n": ["--max-new-tokens"],
    }
    words = [f"COMP_WORDS=(surefoot {re.sub(' $', ' ' + repr(''), line)})" for line in typed]
    program = "".join(
        f'{line}; COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _surefoot; echo "${{COMPREPLY[@]}}"\n'
        for line in words
    )
    done = subprocess.run(
        ["bash", "-c", f"source {tmp_path}/script\n{program}"],
        text=True,
        capture_output=True,
        check=True,
    )
    assert [line.split() for line in done.stdout.splitlines()] == list(typed.values())


def test_help_of_a_recipe_shows_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from surefoot.config.tree import flatten
    from surefoot.recipes.gpt.config import Config

    said = printed(capsys, "train", "gpt", "--help-all")
    assert [
        name for name in flatten(Config()) if not re.search(rf"--{name.replace('_', '-')}\b", said)
    ] == []
    assert "(default: 550 steps)" in said
    assert "(preset: muon)" in " ".join(said.split())
    assert "(preset: 0.014)" in printed(capsys, "train", "gpt", "--help")
    small = printed(capsys, "train", "gpt", "--preset", "small", "--help-all")
    assert "(default: adamw)" in small


HEAVY = "torch numpy tyro rich tomlkit resvg_py safetensors surefoot.run.run surefoot.config"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--help-all"], ["--version"]], ids=str)
def test_the_overview_imports_nothing_heavy(arguments: list[str]) -> None:
    """0.25 s of processor time is the aim: that of Python and a few modules of its standard
    library.
    """
    code = "import atexit, sys; atexit.register(lambda: print([m for m in sys.argv.pop().split() if m in sys.modules]))"
    code += f"; from surefoot.cli.main import main; main({arguments})"
    ended = subprocess.run(
        [sys.executable, "-c", code, HEAVY], capture_output=True, text=True, check=False
    )
    assert ended.stdout.splitlines()[-1] == "[]", ended
