"""Functions in files of the user's own: what is found, and how all that can be wrong with such a
file is told; 1 second.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from refused import refused
from stated import lines_naming
from surefoot.config import user_code
from surefoot.errors import DataError


def named(file: Path) -> object:
    return user_code.names_in(file, function="build", form="def build() -> None")["build"]


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_what_a_file_defines_is_found_and_no_module_is_hidden(tmp_path: Path) -> None:
    import random

    (tmp_path / "random.py").write_text("def build(): return 7\n")
    assert named(tmp_path / "random.py")() == 7  # type: ignore[operator]
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("x = 1\n\ndef build(:\n", 3),
        ("\nimport a_module_that_nobody_has\n", 2),
        ("import json\njson.loads('')\n", 2),
        ("assert False\n", 1),
    ],
)
def test_a_file_that_fails_is_told_with_its_line(content: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    with refused("program-fails", path=str(tmp_path / "mine.py"), line=line):
        named(tmp_path / "mine.py")


@pytest.mark.parametrize("content", ["x = 1\n", "build = 1\n"])
def test_a_file_without_the_function_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content)
    with refused("function-missing", function="build"):
        named(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere.py", "program-missing"), ("mine.txt", "program-missing")]
)
def test_what_is_no_file_of_python_is_refused(name: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("def build(): pass\n")
    with refused(code, path=tmp_path / name):
        named(tmp_path / name)


def test_a_program_that_trains_when_it_is_imported_is_refused_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch, surefoot as sf\n"
        "run = sf.Run(model=lambda: torch.nn.Linear(2, 1), loss=lambda model, batch: model(batch[0]).mean(),\n"
        "             train_data=(torch.ones(8, 2),), batch_size=4, length='2 steps',\n"
        "             optimizer=sf.optim.sgd(lr=0.1), run_dir='runs/mine')\n"
        "def build(): return run\n"
        "if __name__ != 'guarded': run.train()\n"
    )
    with refused("program-trains-at-import", path=tmp_path / "mine.py"):
        named(tmp_path / "mine.py")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "guarded.py").write_text((tmp_path / "mine.py").read_text())
    named(tmp_path / "guarded.py")().train()  # type: ignore[operator]
    assert (tmp_path / "runs" / "mine").exists()


def test_what_a_file_refuses_itself_stays_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import surefoot as sf\nraise sf.DataError('no such corpus')\n"
    )
    with pytest.raises(DataError, match=r"^no such corpus$"):
        named(tmp_path / "mine.py")


def test_only_a_changed_file_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    was = user_code.digest(file)
    user_code.note_changed(file, was=was)
    user_code.note_changed(tmp_path / "nowhere.py", was=was)
    assert capsys.readouterr().out == ""
    file.write_text("x = 2\n")
    user_code.note_changed(file, was=was)
    assert len(lines_naming(capsys.readouterr().out, f"note: {file} ")) == 1
