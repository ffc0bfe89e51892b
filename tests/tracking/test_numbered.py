"""Run directories by number: which number, chosen by whom, and what is left of it. (5 s)"""

from __future__ import annotations

import gc
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import small_runs
import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.cli.main import main
from surefoot.cli.resume import _beginning
from surefoot.cli.train import whole_commands
from surefoot.errors import Command, Setting
from surefoot.run.resume import _naming_directories
from surefoot.tracking.commands import commands, resume_command
from surefoot.tracking.numbered import choose_directory, free_directory, give_back
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import read_run

RESTARTED = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"}]
FIRST = [{}, {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}]


def build(run_dir: str | Path, **changes: Any) -> sf.Run:
    settings = {"length": "4 steps", "check_state": False, "report": False, "tensorboard": False}
    return small_runs.build(run_dir, **settings | changes)


@pytest.mark.parametrize(
    ("there", "pattern", "following", "newest"),
    [
        ([], "runs/gpt-{n}", "runs/gpt-1", "runs/gpt-1"),
        (["runs/gpt-1", "runs/gpt-4"], "runs/gpt-{n}", "runs/gpt-5", "runs/gpt-4"),
        (["runs/gpt-9", "runs/gpt-10"], "runs/gpt-{n}", "runs/gpt-11", "runs/gpt-10"),
        (["runs/gpt-1x", "runs/gpt-", "runs/a-gpt-7"], "runs/gpt-{n}", "runs/gpt-1", "runs/gpt-1"),
        (["runs/3/gpt"], "runs/{n}/gpt", "runs/4/gpt", "runs/3/gpt"),
        (["a.2+", "a.9"], "a.{n}+", "a.3+", "a.2+"),
        (["2-2", "5-6"], "{n}-{n}", "3-3", "2-2"),
    ],
)
def test_the_next_number_is_free_and_a_restart_takes_the_newest(
    there: list[str],
    pattern: str,
    following: str,
    newest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).mkdir(parents=True)
    for environment in RESTARTED:
        assert str(choose_directory(pattern, environment=environment)) == newest
    if newest != following:
        assert str(choose_directory(pattern, environment=FIRST[1])) == following


def test_no_two_processes_take_the_same_number(tmp_path: Path) -> None:
    chosen = [choose_directory(tmp_path / "a-{n}", environment=FIRST[0]) for _ in range(3)]
    assert [path.name for path in chosen] == ["a-1", "a-2", "a-3"]
    (tmp_path / "a-9").touch()  # a file is no free name
    assert choose_directory(tmp_path / "a-{n}", environment=FIRST[0]).name == "a-10"
    (tmp_path / "a-2" / "kept").touch()
    for path in chosen:
        give_back(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-10", "a-2", "a-9"]


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with refused("path-not-usable", setting="run_dir"):
        choose_directory(tmp_path / "runs" / "a-{n}", environment=FIRST[0])


@pytest.mark.parametrize(
    ("there", "directory", "free"),
    [
        ([], "runs/gpt", "runs/gpt-2"),
        (["runs/gpt", "runs/gpt-2"], "runs/gpt", "runs/gpt-3"),
        (["runs/gpt", "runs/gpt-2"], "runs/gpt-2", "runs/gpt-3"),
        (["runs/lr-1e-3"], "runs/lr-1e-3", "runs/lr-1e-3-2"),
        ([], ".", "run-2"),
    ],
)
def test_a_directory_beside_another_is_free(
    there: list[str], directory: str, free: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in there:
        Path(name).mkdir(parents=True)
    assert str(free_directory(Path(directory))) == free


# --- runs -----------------------------------------------------------------------------------------


def test_each_run_takes_a_number_and_one_that_does_not_begin_leaves_none(tmp_path: Path) -> None:
    pattern = tmp_path / "a-{n}"
    build(pattern).train()
    with pytest.raises(sf.SurefootError):
        build(pattern, micro_batch_size=7)
    run = build(pattern)
    assert run.parts.directory is not None
    assert run.parts.directory.path == tmp_path / "a-2"
    del run
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == ["a-1"]
    build(pattern).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "a-2"]


def test_the_directory_of_a_run_has_its_number(tmp_path: Path) -> None:
    for pattern in (tmp_path / "a-{n}", str(tmp_path / "b-{n}")):
        run = build(pattern)
        run.train()
        assert str(run.run_dir) == str(pattern).replace("{n}", "1")
        assert sf.load(run.run_dir).checkpoints
        with refused("run-without-number", setting="run", value=str(pattern)):
            sf.load(pattern)


@pytest.mark.parametrize("environment", RESTARTED)
def test_a_restarted_run_goes_on_to_the_same_bits(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "whole").train()
    build(tmp_path / "a-{n}").train()
    build(tmp_path / "a-{n}", stop_after="2 steps").train()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    build(tmp_path / "a-{n}").train()
    newest = "checkpoints/step-00000004/model.safetensors"
    assert (tmp_path / "a-2" / newest).read_bytes() == (tmp_path / "whole" / newest).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "a-2", "whole"]


def train_numbered(run_dir: str) -> str:
    run = build(run_dir)
    run.train()
    assert run.parts.directory is not None
    return str(run.parts.directory.path)


def test_rank_0_chooses_for_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "a-1").mkdir()
    chosen = ranks(2, train_numbered, run_dir=str(tmp_path / "a-{n}"))
    assert chosen == [str(tmp_path / "a-2")] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "a-2"]


def test_the_header_and_the_page_name_what_resumes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", "runs/a-{n}"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    build("runs/a-{n}", console=True, stop_after="2 steps").train()
    line = resume_command(Path("runs/a-1"), numbered="runs/a-{n}", stops=True)
    assert line.partition("  # ")[0].endswith("train.py --out runs/a-1")
    said = capsys.readouterr().out
    assert f"resume     {line}\n" in said
    assert f"resume with:  {line}" in said
    shown = commands(read_run(Path("runs/a-1")), finished=False)
    ends = [text.rpartition("train.py --out ")[2] for text in shown.values()]
    assert ends.count("runs/a-1") == 1  # goes on
    assert len([end for end in ends if "{n}" in end]) == 1  # begins again
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert 'run_dir="runs/a-1"' in resume_command(Path("runs/a-1"), numbered="runs/a-{n}")


def test_what_resumes_a_script_does_not_stop_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--stop-after", "2 steps"], ["--stop_after=2 steps"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *words, "--seed", "1"])
        monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
        command, _, remark = resume_command(Path("run"), stops=True).partition("  # ")
        assert command.endswith("train.py --seed 1")
        assert ("stop_after" in remark) == (words == [])
        assert "#" not in resume_command(Path("run"))


def test_the_page_repeats_no_stop_of_an_earlier_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--stop-after", "2 steps", "--seed", "1"])
    build("run", stop_after="2 steps").train()
    shown = commands(read_run(Path("run")), finished=False)
    assert len(shown) == 3
    assert [text for text in shown.values() if "stop-after" in text] == []


# --- the command line -----------------------------------------------------------------------------

PROGRAM = """
from dataclasses import dataclass
from small_runs import build as small
QUICK = {"check_state": False, "report": False, "tensorboard": False}
@dataclass(frozen=True)
class Config:
    run_dir: str = "runs/a"
    seed: int = 0
    length: str = "4 steps"
def build(config: Config):
    return small(config.run_dir, seed=config.seed, length=config.length, **QUICK)
def fixed():
    return small("runs/b-{n}", length="4 steps", **QUICK)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def typed(*words: str) -> None:
    before = sys.argv
    sys.argv = ["surefoot", *words]
    try:
        main([*words])
    finally:
        sys.argv = before


def directories() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def test_the_same_command_begins_another_run_and_each_is_resumed(program: Path) -> None:
    for _ in range(2):
        typed("train", "program.py:build", "--run-dir", "runs/a-{n}")
        typed("train", "program.py:fixed")
    assert directories() == ["a-1", "a-2", "b-1", "b-2"]
    assert sf.load("runs/a-2").path == Path("runs/a-2")
    for name in ("a-1", "b-1"):  # a program that sets {n} itself is built again where it is
        typed("resume", f"runs/{name}")
        assert len(read_run(Path("runs", name)).sessions) == 1  # it is finished
        typed("evaluate", f"runs/{name}")
    typed("plan", "program.py:build", "--run-dir", "runs/a-{n}")
    typed("plan", "program.py:fixed")
    gc.collect()
    assert [name for name in directories() if any(Path("runs", name).iterdir())] == [
        "a-1",
        "a-2",
        "b-1",
        "b-2",
    ]


def refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the command that a refusal of a command prints, in words."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        typed(*words)
    assert end.value.code == 4
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line.strip() for line in lines if line.strip().startswith("type: surefoot train")]
    return shlex.split(line.removeprefix("type: "))


@pytest.mark.parametrize(
    "words",
    [
        ["train", "program.py:build", "--seed", "1"],
        ["train", "program.py:build", "--seed", "1", "--run-dir", "runs/a"],
        ["train", "program.py:build", "--run-dir=runs/a", "--seed=1"],
        ["train", "program.py:build", "--length", "2 steps"],
        ["resume", "runs/a", "--seed", "1"],
    ],
)
def test_a_refused_change_prints_a_command_that_trains_in_a_free_directory(
    words: list[str], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("train", "program.py:build", "--seed", "0")
    command = refusal(*words, capsys=capsys)
    assert "runs/a-2" in command
    typed(*command[1:])
    assert directories() == ["a", "a-2"]
    newest = max(Path("runs/a-2/checkpoints").iterdir())
    identity = json.loads((newest / "state.json").read_text())["identity"]
    assert (identity["seed"], identity["length"]) != (0, "4 steps")


def test_a_refused_change_in_a_script_names_a_free_directory(tmp_path: Path) -> None:
    build(tmp_path / "a").train()
    build(tmp_path / "b-{n}").train()
    for there, free in (("a", "a-2"), ("b-1", "b-{n}")):
        with refused("settings-changed", sf.CheckpointError) as error:
            build(tmp_path / there, seed=1).train()
        another, (_, weights) = error.value.remedies
        assert another == Setting("run_dir", str(tmp_path / free))
        assert weights == Setting("init_from", str(tmp_path / there))


def test_a_remedy_with_a_list_stays_as_it_is(tmp_path: Path) -> None:
    of_list = Setting("split_files", ["a", "b"])
    with pytest.raises(sf.CheckpointError) as error, _naming_directories(RunDirectory(tmp_path)):
        raise sf.CheckpointError("settings-changed", problem="", reason="", remedy=[of_list])
    assert error.value.remedies == (of_list,)


def test_a_program_that_sets_its_directory_is_told_to_set_another(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = PROGRAM.replace("runs/b-{n}", "runs/b")
    program.write_text(fixed)
    typed("train", "program.py:fixed")
    program.write_text(fixed.replace('length="4 steps", **', 'length="4 steps", seed=1, **'))
    with pytest.raises(SystemExit):
        typed("train", "program.py:fixed")
    said = capsys.readouterr().err
    assert ': run_dir="runs/b-2"' in said
    assert "--init-from" not in said


def test_a_setting_that_a_program_does_not_take_is_no_flag() -> None:
    @dataclass(frozen=True)
    class Config:
        run_dir: str = "runs/a"
        seed: int = 0

    weights = ("start from its weights:", Setting("init_from", "runs/a"))
    accepted = ("to resume with this change:", Setting("accept_change", "loss"))
    remedy = [Setting("run_dir", "runs/b"), weights, accepted, Setting("seed", 1)]
    problem = sf.CheckpointError("settings-changed", problem="", remedy=remedy)
    with pytest.raises(sf.CheckpointError) as error, whole_commands(["a.py:build"], Config()):
        raise problem
    another, changed, *others = error.value.remedies
    assert another == Command("surefoot train a.py:build --run-dir runs/b")
    assert changed[-1] == 'init_from="runs/a"'
    assert others == [accepted, Setting("seed", 1)]


def test_a_command_for_another_run_repeats_no_stop_of_the_first_session(tmp_path: Path) -> None:
    command = ["surefoot", "train", "gpt", "--stop-after", "2 steps", "--seed", "1"]
    environment = {"sessions": [{"command": command}]}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    assert _beginning(tmp_path, but=[]) == ["gpt", "--seed", "1"]
