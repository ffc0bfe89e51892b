"""Which verbs run the program that a run's config.toml names, and when they refuse to. (8 s)"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from in_one import in_one
from stated import lines_naming, numbers_in
from surefoot.cli.main import main
from surefoot.config import user_code

PROGRAM = """
import torch, surefoot as sf

def build():
    data = torch.arange(8.0)[:, None], torch.arange(8.0)[:, None]
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    return sf.Run(
        model=lambda: torch.nn.Linear(1, 1), loss=loss, train_data=data, batch_size=4, length="4 steps",
        optimizer=sf.optim.sgd(lr=0.001), splits={"all": sf.Split(data)}, save_every="2 steps", run_dir="runs/a",
        panels_fn=lambda model: [sf.report.ConfusionMatrix(title="made anew", classes=("x",), counts=((4,),))], console=False,
    )
"""
RUN = Path("runs/a")
CANARY = "from pathlib import Path; Path('canary').touch()\n"
VERBS = {
    "evaluate": ["evaluate", "runs/a"],
    "evaluate --panels": ["evaluate", "runs/a", "--panels"],
    "predict": ["predict", "runs/a", "x"],
    "replay": ["replay", "runs/a", "--step", "1"],
    "verify": ["verify", "runs/a"],
    "profile": ["profile", "runs/a", "--speedups", "none", "--steps", "4", "--peak-flops", "1e9"],
    "find-lr": ["find-lr", "runs/a", "--steps", "12"],
    "find-batch-size": ["find-batch-size", "runs/a"],
}
LOOKING = [
    ["report", "runs/a"],
    ["report", "runs/a", "--png"],
    ["diagnose", "runs/a"],
    ["export", "runs/a"],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory in which a program has made runs/a, and a copy of it as it was then."""
    place = tmp_path_factory.mktemp("made") / "here"
    file = place / "own" / "program.py"
    file.parent.mkdir(mode=0o755, parents=True)
    file.write_text(CANARY + PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "argv", ["surefoot"])
        main(["train", "own/program.py:build"])
    Path(place, "canary").unlink()
    return place, Path(shutil.copytree(place, place.with_name("as it was")))


@pytest.fixture
def program(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that has made runs/a, and writes a file whenever it runs from now on; each test has
    them as they were.
    """
    place, kept = made
    shutil.rmtree(place)
    shutil.copytree(kept, place)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    return place / "own" / "program.py"


def left_with(arguments: list[str]) -> object:
    try:
        main(arguments)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("arguments", VERBS.values(), ids=VERBS)
def test_a_changed_program_is_refused_unless_it_is_asked_for(
    arguments: list[str], program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text(program.read_text() + "\n# changed\n")
    capsys.readouterr()
    assert left_with(arguments) == 2
    assert "[program-not-trusted]" in capsys.readouterr().err
    assert not Path("canary").exists()
    left_with([*arguments, "--run-changed-program"])
    assert Path("canary").exists()


@pytest.mark.parametrize("arguments", VERBS.values(), ids=VERBS)
def test_an_unchanged_program_is_run_without_a_question(
    arguments: list[str], program: Path
) -> None:
    left_with(arguments)
    assert Path("canary").exists()


def test_a_program_of_the_same_text_that_lies_inside_the_run_is_refused(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = Path("runs/a/program.py").resolve()
    inside.write_text(program.read_text())
    config = Path("runs/a/config.toml")
    config.write_text(config.read_text().replace(str(program), str(inside)))
    assert left_with(["evaluate", "runs/a"]) == 2
    assert "[program-not-trusted]" in capsys.readouterr().err
    assert not Path("canary").exists()
    main(["evaluate", "runs/a", "--run-changed-program"])
    assert Path("canary").exists()


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
@pytest.mark.parametrize("place", ["own", "own/program.py"])
def test_a_program_that_others_may_write_is_refused(
    mode: int, place: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(place).chmod(mode)
    assert left_with(["evaluate", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert "[program-not-trusted]" in said
    assert str(Path(place).resolve()) in said
    assert not Path("canary").exists()


def test_a_directory_above_that_others_may_change_is_refused_and_a_sticky_one_is_not(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    above = program.parents[1]
    above.chmod(0o1777)
    assert left_with(["evaluate", "runs/a"]) == 0
    above.chmod(0o777)
    assert left_with(["evaluate", "runs/a"]) == 2
    said = capsys.readouterr().err
    assert "[program-not-trusted]" in said
    assert f" {above}\n" in said


def test_a_group_may_write_if_it_is_the_users_own(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = program.stat()
    program.chmod(0o664)
    monkeypatch.setattr("os.getgid", lambda: status.st_gid)
    monkeypatch.setattr("os.getuid", lambda: status.st_gid)
    assert user_code._written_by_others(program, run=RUN) is None
    monkeypatch.setattr("os.getgid", lambda: status.st_gid + 1)
    assert user_code._written_by_others(program, run=RUN) == program


def test_what_belongs_to_another_user_may_be_written_by_others(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getuid", lambda: program.stat().st_uid + 1)
    if program.stat().st_uid == 0:  # what is root's nobody else changes
        assert user_code._written_by_others(program, run=RUN) is None
    else:
        assert user_code._written_by_others(program, run=RUN) == program


def test_root_trusts_itself_and_the_owner_of_the_run_and_nobody_else(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {program: 1000, RUN: 1000}
    stat = Path.stat

    def of_another(path: Path, **how: bool) -> os.stat_result:
        fields = list(stat(path, **how))
        fields[4] = owners.get(path, 0)
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", of_another)
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert user_code._written_by_others(program, run=RUN) is None
    owners[RUN] = 0
    assert user_code._written_by_others(program, run=RUN) == program


@in_one
@pytest.mark.parametrize(
    "arguments", [*VERBS.values(), ["resume", "runs/a"]], ids=[*VERBS, "resume"]
)
@pytest.mark.parametrize(
    "name", ["/proc/self/cwd/runs/a/evil.py:build", "evil.py:build", "evil.py", "nonesuch"]
)
def test_a_recipe_that_is_a_file_is_never_run(
    arguments: list[str], name: str, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("evil.py", "runs/a/evil.py"):
        Path(place).write_text(CANARY + PROGRAM)
    Path("runs/a/config.toml").write_text(
        f'absent = []\n[program]\nkind = "recipe"\nrecipe = "{name}"\n'
    )
    capsys.readouterr()
    assert left_with(arguments) == 2
    assert "[recipe-of-other-version]" in capsys.readouterr().err
    assert not Path("canary").exists()


@pytest.mark.parametrize("arguments", LOOKING, ids=" ".join)
@pytest.mark.fast(
    "True-report runs/a", "True-report runs/a --png", "True-diagnose runs/a", "True-export runs/a"
)
@pytest.mark.parametrize("changed", [False, True])
def test_looking_at_a_run_executes_nothing_of_its_authors(
    arguments: list[str], changed: bool, program: Path
) -> None:
    program.write_text(program.read_text() + "\n# changed\n" * changed)
    Path("runs/a/panels.json").unlink()
    left_with(arguments)
    assert not Path("canary").exists()


def test_the_panels_of_a_killed_run_are_made_by_evaluate_and_shown_by_report(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/a/panels.json").unlink()
    main(["report", "runs/a"])
    assert "note" not in capsys.readouterr().out  # it has made all its steps, so it may have none
    records = Path("runs/a/metrics.jsonl")
    records.write_text(
        "".join(line for line in records.read_text().splitlines(True) if "event" not in line)
    )
    main(["report", "runs/a"])
    assert ": surefoot evaluate runs/a --panels" in capsys.readouterr().out
    assert "made anew" not in Path("runs/a/report.html").read_text()
    main(["evaluate", "runs/a", "--panels"])
    (written,) = lines_naming(capsys.readouterr().out, ": surefoot report runs/a")
    assert numbers_in(written)[-1] == 4  # the step of the weights
    main(["report", "runs/a"])
    assert "note" not in capsys.readouterr().out
    assert "made anew" in Path("runs/a/report.html").read_text()
    assert left_with(["evaluate", "runs/a", "--panels", "--split", "all"]) == 2


@pytest.mark.slow
def test_a_comparison_goes_on_only_with_the_program_that_it_began_with(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text(
        CANARY
        + "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    lr: float = 0.001\n    run_dir: str = 'x'\n"
        + PROGRAM.replace("build()", "build(config: Config)")
        .replace("lr=0.001", "lr=config.lr")
        .replace('"runs/a"', "config.run_dir")
    )
    main(["compare", "own/program.py:build", "--vary", "lr=0.001,0.002", "--out", "compared"])
    Path("canary").unlink()
    program.write_text(program.read_text() + "\n# changed\n")
    assert left_with(["compare", "compared"]) == 2
    assert "[program-not-trusted]" in capsys.readouterr().err
    assert left_with(["compare", "compared/lr=0.001", "compared/lr=0.002", "--paired"]) == 0
    assert not Path("canary").exists()
