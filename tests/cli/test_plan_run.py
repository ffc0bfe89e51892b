"""`surefoot plan RUN`: what is still to come in an existing run, from its files alone. (10 s)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.cli.main import _verb
from surefoot.tools.plan.rest_of_run import read_rest

TRAIN = [
    "train",
    "images",
    "--length",
    "20 steps",
    "--batch-size",
    "8",
    "--report",
    "False",
    "--tensorboard",
    "False",
    "--log-every",
    "1 steps",
]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    _verb([*TRAIN, "--stop-after", "4 steps", "--run-dir", str(run)])
    _verb(
        [
            "resume",
            str(run),
            "--change",
            "optimizer.lr=1e-4",
            "--change",
            "batch_size=16",
            "--stop-after",
            "9 steps",
        ]
    )
    _verb(
        [
            "resume",
            str(run),
            "--change",
            "schedule.name=linear",
            "--change",
            "length=30 steps",
            "--stop-after",
            "12 steps",
        ]
    )
    return run


def test_steps_samples_settings_and_rates_are_those_that_the_run_will_have(changed: Path) -> None:
    rest = read_rest(changed)
    assert (rest.step, rest.length) == (12, 30)
    assert rest.to_come == []
    assert rest.settings["batch_size"] == 16
    assert rest.settings["schedule"]["shape"] == "linear"
    assert rest.settings["length"] == "30 steps"
    assert rest.course is not None
    assert rest.course.samples(12, 30) == 18 * 16
    assert rest.course.samples(0, 30) == 4 * 8 + 26 * 16
    assert rest.course.samples(2, 5) == 2 * 8 + 16


def test_the_origin_of_a_changed_setting_is_its_change(changed: Path) -> None:
    lines = {
        line.split(" = ")[0].strip(): line for line in read_rest(changed).lines() if " = " in line
    }
    for name, step in {"optimizer.lr": 4, "batch_size": 4, "schedule": 9, "length": 9}.items():
        assert f"[changed at step {step}, was " in lines[name]
    for name in ("clip", "optimizer.weight_decay", "precision"):
        assert "changed" not in lines[name]


def test_changes_that_are_to_come_are_listed_and_not_in_force(
    changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "given"
    _verb(
        [
            *TRAIN,
            "--stop-after",
            "2 steps",
            "--run-dir",
            str(run),
            "--changes",
            str(changed / "changes.jsonl"),
        ]
    )
    rest = read_rest(run)
    assert [change.from_step for change in rest.to_come] == [4, 4, 9, 9]
    assert rest.settings["batch_size"] == 8
    assert rest.length == 30
    assert rest.course is not None
    planned = [rest.course.rate(step) for step in range(30)]
    traced = rest.trace()
    assert traced is not None
    trace, base = traced
    assert (trace.factors * base).tolist() == pytest.approx(planned)

    capsys.readouterr()
    _verb(["plan", str(run)])
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if "from step" in line]) == 4
    _verb(["resume", str(run)])
    recorded = [record["lr"] for record in sf.load(run).records("train")]
    assert recorded == pytest.approx(planned)
    assert "all 30 steps" in read_rest(run).lines()[0]


def test_the_schedule_is_drawn_through_the_changes(changed: Path, tmp_path: Path) -> None:
    _verb(["plan", str(changed), "--schedules", "--out", str(tmp_path / "rates")])
    assert (tmp_path / "rates.svg").read_text().startswith("<svg")


def test_a_recipe_is_no_run_even_if_one_has_its_name(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.cli.plan_run import names_a_run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gpt").mkdir(parents=True)
    (tmp_path / "runs" / "gpt" / "config.toml").write_text("")
    (tmp_path / "runs" / "mine").symlink_to(changed)
    assert not names_a_run(["gpt"])
    assert not names_a_run(["a.py:build"])
    assert not names_a_run([])
    assert names_a_run(["mine"])
    assert names_a_run([str(changed)])


def test_a_run_without_a_checkpoint_has_no_rest(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[program]\nkind = "script"\n')
    with refused("plan-without-checkpoint", sf.CheckpointError):
        _verb(["plan", str(tmp_path)])


def test_options_of_other_plans_are_refused(changed: Path) -> None:
    with pytest.raises(sf.ConfigError):
        _verb(["plan", str(changed), "--world-size", "8"])


def test_neither_torch_nor_the_program_is_loaded(changed: Path) -> None:
    code = (
        "import sys; from surefoot.cli.main import _verb; _verb(sys.argv[1:]);"
        "assert not {'torch', 'surefoot.recipes.images.recipe'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, "plan", str(changed)], check=True)


def test_the_origins_of_a_recipe_are_those_of_its_file(changed: Path) -> None:
    origins = read_rest(changed).origins
    assert origins["clip"] == "default"
    assert origins["length"] == "flag"
    assert origins["precision"] in ("auto", "default")
