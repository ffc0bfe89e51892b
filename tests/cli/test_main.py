"""What `--help` prints: an overview, then every verb's own; and what is imported for it; 4 seconds."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

from surefoot.cli.main import OVERVIEW, VERBS, main
from surefoot.cli.options import option_names


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 0
    return capsys.readouterr().out


def options_of(verb: str) -> type[Any]:
    """The dataclass of a verb's options: the one of its file that has the verb's description."""
    module = importlib.import_module(f"surefoot.cli.{verb.replace('-', '_')}")
    own = [kind for kind in vars(module).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)]
    (kind,) = [kind for kind in own if f"  surefoot {verb} " in inspect.cleandoc(kind.__doc__ or "")]
    return kind


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_every_option_and_stands_in_the_overview(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"surefoot {verb} " in OVERVIEW
    said = printed(capsys, verb, "--help")
    kind = options_of(verb)
    assert said.startswith(inspect.cleandoc(kind.__doc__ or ""))
    assert [name for name in option_names(kind) if f"--{name.replace('_', '-')} " not in said] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_explained(verb: str) -> None:
    """In the line that follows it, which tyro prints: without one it would repeat the name."""
    for kind in options_of(verb).__mro__[:-1]:
        lines = [line.strip() for line in inspect.getsource(kind).splitlines()]
        fields = [
            place for place, line in enumerate(lines) if any(line.startswith(f"{n}: ") for n in kind.__annotations__)
        ]
        assert [lines[place] for place in fields if not lines[place + 1].startswith('"""')] == []


@pytest.mark.parametrize("text", [OVERVIEW, *(inspect.cleandoc(options_of(verb).__doc__ or "") for verb in VERBS)])
def test_no_line_is_wider_than_a_terminal(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= 88


def test_help_of_a_recipe_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    from surefoot.config.tree import flatten
    from surefoot.recipes.gpt.config import Config

    said = printed(capsys, "train", "gpt", "--help")
    assert [name for name in flatten(Config()) if f"--{name.replace('_', '-')} " not in said] == []
    assert "(default: 0.05)" in said


HEAVY = "torch numpy tyro rich tomlkit matplotlib safetensors surefoot.run.run surefoot.config"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=str)
def test_the_overview_imports_nothing_heavy(arguments: list[str]) -> None:
    """0.25 s of processor time is the aim: that of Python and a few modules of its standard library."""
    code = "import atexit, sys; atexit.register(lambda: print([m for m in sys.argv.pop().split() if m in sys.modules]))"
    code += f"; from surefoot.cli.main import main; main({arguments})"
    ended = subprocess.run([sys.executable, "-c", code, HEAVY], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "[]", ended
