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
from surefoot.run.resume import _naming_commands
from surefoot.tracking.commands import commands, resume_command
from surefoot.tracking.numbered import choose_directory, free_directory, give_back
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import read_run

RESTARTED = [{"TORCHELASTIC_RESTART_COUNT": "1"}, {"SLURM_RESTART_COUNT": "2"}]
FIRST_STARTS = [{}, {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "0"}]


def build(run_dir: str | Path, **changes: Any) -> sf.Run:
    settings = {"length": "4 steps", "check_state": False, "report": False, "tensorboard": False}
    return small_runs.build(run_dir, **settings | changes)


@pytest.mark.parametrize(
    ("directories", "pattern", "following", "newest"),
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
    directories: list[str],
    pattern: str,
    following: str,
    newest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in directories:
        Path(name).mkdir(parents=True)
    for environment in RESTARTED:
        assert str(choose_directory(pattern, environment=environment)) == newest
    if newest != following:
        assert str(choose_directory(pattern, environment=FIRST_STARTS[1])) == following


def test_no_two_processes_take_the_same_number(tmp_path: Path) -> None:
    pattern = tmp_path / "a-{n}"
    chosen = [choose_directory(pattern, environment={}) for _ in range(3)]
    assert [path.name for path in chosen] == ["a-1", "a-2", "a-3"]


def test_a_file_is_no_free_name(tmp_path: Path) -> None:
    (tmp_path / "a-9").touch()
    assert choose_directory(tmp_path / "a-{n}", environment={}).name == "a-10"


def test_a_directory_is_given_back_unless_there_is_something_in_it(tmp_path: Path) -> None:
    pattern = tmp_path / "a-{n}"
    chosen = [choose_directory(pattern, environment={}) for _ in range(3)]
    (tmp_path / "a-2" / "file").touch()
    for directory in chosen:
        give_back(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["a-2"]


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with refused("path-not-usable", setting="run_dir"):
        choose_directory(tmp_path / "runs" / "a-{n}", environment=FIRST_STARTS[0])


@pytest.mark.parametrize(
    ("directories", "directory", "free"),
    [
        ([], "runs/gpt", "runs/gpt-2"),
        (["runs/gpt", "runs/gpt-2"], "runs/gpt", "runs/gpt-3"),
        (["runs/gpt", "runs/gpt-2"], "runs/gpt-2", "runs/gpt-3"),
        (["runs/lr-1e-3"], "runs/lr-1e-3", "runs/lr-1e-3-2"),
        ([], ".", "run-2"),
    ],
)
def test_a_directory_beside_another_is_free(
    directories: list[str],
    directory: str,
    free: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in directories:
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


@pytest.mark.parametrize("kind", [Path, str])
def test_the_directory_of_a_run_has_its_number(kind: type[str | Path], tmp_path: Path) -> None:
    run = build(kind(tmp_path / "a-{n}"))
    run.train()
    assert str(run.run_dir) == str(tmp_path / "a-1")
    assert sf.load(run.run_dir).checkpoints


@pytest.mark.parametrize("kind", [Path, str])
def test_a_run_without_its_number_is_not_loaded(kind: type[str | Path], tmp_path: Path) -> None:
    pattern = kind(tmp_path / "a-{n}")
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
    command, _, _ = line.partition("  # ")
    assert command.endswith("train.py --out runs/a-1")
    output = capsys.readouterr().out
    assert f"resume     {line}\n" in output
    assert f"resume with:  {line}" in output

    commands_of_page = commands(read_run(Path("runs/a-1")), finished=False)
    run_dirs = [text.rpartition("train.py --out ")[2] for text in commands_of_page.values()]
    assert run_dirs.count("runs/a-1") == 1  # resumes it
    assert len([run_dir for run_dir in run_dirs if "{n}" in run_dir]) == 1  # begins again


def test_the_directory_is_named_where_the_command_of_a_script_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    assert 'run_dir="runs/a-1"' in resume_command(Path("runs/a-1"), numbered="runs/a-{n}")


@pytest.mark.parametrize("words", [[], ["--stop-after", "2 steps"], ["--stop_after=2 steps"]])
def test_what_resumes_a_script_does_not_stop_again_at_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
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
    commands_of_page = commands(read_run(Path("run")), finished=False)
    assert len(commands_of_page) == 3
    assert [text for text in commands_of_page.values() if "stop-after" in text] == []


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


def run_command(*words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["surefoot", *words])
        main([*words])


def directories() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


# one takes the pattern as a setting, one has it in its program
NUMBERED = [["program.py:build", "--run-dir", "runs/a-{n}"], ["program.py:fixed"]]


def test_the_same_command_begins_another_run(program: Path) -> None:
    for _ in range(2):
        for arguments in NUMBERED:
            run_command("train", *arguments)
    assert directories() == ["a-1", "a-2", "b-1", "b-2"]
    assert sf.load("runs/a-2").path == Path("runs/a-2")


def test_a_numbered_run_is_resumed_and_evaluated_where_it_is(program: Path) -> None:
    for arguments in NUMBERED:
        run_command("train", *arguments)
    for run in ("runs/a-1", "runs/b-1"):
        run_command("resume", run)
        assert len(read_run(Path(run)).sessions) == 1  # it is finished
        run_command("evaluate", run)
    assert directories() == ["a-1", "b-1"]


@pytest.mark.parametrize("arguments", NUMBERED)
def test_a_plan_takes_no_number(arguments: list[str], program: Path) -> None:
    run_command("plan", *arguments)
    gc.collect()
    assert not Path("runs").exists() or directories() == []


def command_of_refusal(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The words of the command that is printed when this one is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        run_command(*words)
    assert end.value.code == 4
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    (line,) = [line for line in lines if line.startswith("type: surefoot train")]
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
    run_command("train", "program.py:build", "--seed", "0")

    surefoot, *command = command_of_refusal(*words, capsys=capsys)

    assert surefoot == "surefoot"
    assert "runs/a-2" in command
    run_command(*command)
    assert directories() == ["a", "a-2"]
    newest = max(Path("runs/a-2/checkpoints").iterdir())
    identity = json.loads((newest / "state.json").read_text())["identity"]
    assert (identity["seed"], identity["length"]) != (0, "4 steps")


@pytest.mark.parametrize(
    ("run_dir", "trained", "free"), [("a", "a", "a-2"), ("b-{n}", "b-1", "b-{n}")]
)
def test_a_refused_change_in_a_script_names_a_free_directory(
    run_dir: str, trained: str, free: str, tmp_path: Path
) -> None:
    build(tmp_path / run_dir).train()
    with refused("settings-changed", sf.CheckpointError) as error:
        build(tmp_path / trained, seed=1).train()
    another, (_, weights) = error.value.remedies
    assert another == Setting("run_dir", str(tmp_path / free))
    assert weights == Setting("init_from", str(tmp_path / trained))


def test_a_remedy_with_a_list_stays_as_it_is(tmp_path: Path) -> None:
    of_list = Setting("split_files", ["a", "b"])
    with pytest.raises(sf.CheckpointError) as error, _naming_commands(RunDirectory(tmp_path), {}):
        raise sf.CheckpointError(
            "settings-changed", problem="", reason="", remedy=[of_list], changes=[]
        )
    assert error.value.remedies == (of_list,)


def test_a_program_that_sets_its_directory_is_told_to_set_another(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = PROGRAM.replace("runs/b-{n}", "runs/b")
    program.write_text(fixed)
    run_command("train", "program.py:fixed")
    program.write_text(fixed.replace('length="4 steps", **', 'length="4 steps", seed=1, **'))
    with pytest.raises(SystemExit):
        run_command("train", "program.py:fixed")
    message = capsys.readouterr().err
    assert ': run_dir="runs/b-2"' in message
    assert "--init-from" not in message


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
