"""`verify` and `replay` of runs whose settings were changed on record: every step is repeated with
the settings that it had. (10 s)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli.main import _verb
from surefoot.tools.verify.rerun import plan_windows
from surefoot.tools.verify.verdict import Verdict, Window

FIRST, SECOND, END = 6, 14, 20


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def run_in(run_dir: Path, **settings: Any) -> sf.Run:
    inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    chosen: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": (inputs, inputs.sum(1, keepdim=True)),
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.1),
        "schedule": sf.schedules.cosine("10%"),
        "clip": "norm 1.0",
        "batch_size": 8,
        "length": f"{END} steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "log_every": "1 steps",
        "save_every": "3 steps",
        "keep_last": 100,
        "run_dir": run_dir,
    }
    return sf.Run(**(chosen | settings))


def changed_twice(run_dir: Path, **settings: Any) -> sf.Run:
    run_in(run_dir, stop_after=f"{FIRST} steps", **settings).train()
    sf.load(run_dir).change(**{"batch_size": 16, "optimizer.lr": 1e-3, "clip": "value 0.1"})
    run_in(run_dir, stop_after=f"{SECOND} steps", **settings).train()
    sf.load(run_dir).change(
        **{"batch_size": 4, "schedule": "linear", "optimizer.betas": [0.8, 0.9]}
    )
    run = run_in(run_dir, **settings)
    run.train()
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "changed"
    changed_twice(run_dir)
    return run_dir


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def windows_of(verdict: Verdict) -> list[tuple[int, int]]:
    return [(outcome.window.start, outcome.window.stop) for outcome in verdict.outcomes]


def test_all_steps_of_all_settings_are_repeated_bit_for_bit(changed: Path) -> None:
    verdict = sf.load(run_in(changed)).verify(steps="all")
    assert verdict.problems == []
    assert windows_of(verdict) == [(0, FIRST), (FIRST, SECOND), (SECOND, END)]
    assert all(outcome.exact for outcome in verdict.outcomes)
    records = [step for outcome in verdict.outcomes for step in outcome.records]
    assert records == list(range(1, END + 1))
    assert verdict.whole
    assert not [line for line in verdict.not_proved if line.startswith("steps ")]


@pytest.mark.parametrize("step", [2, FIRST, FIRST + 1, SECOND, SECOND + 1, END])
def test_a_record_that_was_changed_is_found_under_any_settings(step: int, changed: Path) -> None:
    file = changed / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] == "train" and record["step"] == step:
            lines[number] = json.dumps(record | {"loss": record["loss"] * 1.5})
    file.write_text("\n".join([*lines, ""]))
    verdict = sf.load(run_in(changed)).verify(steps="all")
    assert (step, "loss") in {(problem.step, problem.quantity) for problem in verdict.problems}


def test_no_window_crosses_a_change(changed: Path) -> None:
    verdict = sf.load(run_in(changed)).verify(steps=4, windows=100)
    assert verdict.problems == []
    for start, stop in windows_of(verdict):
        assert not any(start < begin < stop for begin in (FIRST, SECOND))
    begins = {
        max(begin for begin in (0, FIRST, SECOND) if begin <= start)
        for start, _ in windows_of(verdict)
    }
    assert begins == {0, FIRST, SECOND}


@pytest.mark.parametrize("seed", range(20))
def test_windows_lie_within_segments_whatever_is_drawn(seed: int) -> None:
    begins = [0, 40, 55]
    starts = [0, 10, 30, 40, 50, 55, 80]
    points = [*range(5, 101, 5)]
    for window in plan_windows(starts, points, steps=20, windows=4, seed=seed, begins=begins):
        assert not any(window.start < begin < window.stop for begin in begins)
    whole = plan_windows(starts, points, steps=None, windows=1, begins=begins)
    assert whole == [Window(0, 40), Window(40, 55), Window(55, 100)]


def test_targets_are_compared_with_the_batch_size_of_their_step(changed: Path) -> None:
    file = changed / "metrics.jsonl"
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] == "train" and record["step"] == 8:
            assert record["targets"] == 16
            lines[number] = json.dumps(record | {"targets": 8.0})
    file.write_text("\n".join([*lines, ""]))
    verdict = sf.load(run_in(changed)).verify(steps="all")
    assert (8, "targets") in {(problem.step, problem.quantity) for problem in verdict.problems}


def test_a_model_that_cannot_be_built_again_leaves_the_earlier_steps_unproved(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    run_in(tmp_path, model=model(), stop_after="6 steps").train()
    sf.load(tmp_path).change(batch_size=16)
    run = run_in(tmp_path, model=model())
    run.train()
    verdict = sf.load(run).verify(steps="all")
    assert verdict.problems == []
    assert windows_of(verdict) == [(6, END)]
    assert not verdict.whole
    of_steps = [line for line in verdict.not_proved if line.startswith("steps ")]
    assert [line.partition(":")[0] for line in of_steps] == ["steps 0 to 6"]


def test_a_gap_costs_the_steps_from_a_checkpoint_with_its_own_settings(changed: Path) -> None:
    for step in (FIRST, FIRST + 3):
        shutil.rmtree(changed / "checkpoints" / f"step-{step:08d}")
    verdict = sf.load(run_in(changed)).verify(steps="all")
    assert verdict.problems == []
    (gap,) = [line for line in verdict.not_proved if line.startswith(f"steps {FIRST} to")]
    assert "no checkpoint precedes them" in gap


@pytest.mark.parametrize("step", [1, FIRST, FIRST + 2, SECOND, END - 1])
def test_a_run_that_was_passed_replays_each_step_with_its_settings(
    step: int, changed: Path
) -> None:
    records = {record["step"]: record for record in sf.load(changed).records("train")}
    saved = sf.load(run_in(changed))
    assert saved.replay(step).look.loss == records[step + 1]["loss"]


def test_the_command_repeats_all_steps_of_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "digits")
    _verb(
        [
            "train",
            "images",
            "--length",
            "12 steps",
            "--stop-after",
            "4 steps",
            "--batch-size",
            "8",
            "--report",
            "False",
            "--tensorboard",
            "False",
            "--log-every",
            "1 steps",
            "--run-dir",
            run,
        ]
    )
    _verb(["resume", run, "--change", "batch_size=16", "--change", "optimizer.lr=1e-4"])
    capsys.readouterr()
    _verb(["verify", run, "--all", "--json"])
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["problems"] == []
    assert verdict["whole"]
    assert [(window["start"], window["stop"]) for window in verdict["windows"]] == [(0, 4), (4, 12)]


@pytest.mark.parametrize("checkpoint", [3, 6, 9, "newest"])
def test_a_checkpoint_is_evaluated_with_the_precision_and_the_average_of_its_step(
    checkpoint: int | str, tmp_path: Path
) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    scored: dict[str, Any] = {
        "splits": {"val": sf.Split((inputs, inputs.sum(1, keepdim=True)))},
        "evaluate_every": "3 steps",
        "length": "12 steps",
    }
    run_in(tmp_path, stop_after="6 steps", **scored).train()
    sf.load(tmp_path).change(precision="bf16", ema=0.5)
    run_in(tmp_path, **scored).train()
    saved = sf.load(run_in(tmp_path, **scored))
    recorded = {record["step"]: record["val/loss"] for record in saved.records("eval")}
    step = 12 if checkpoint == "newest" else checkpoint
    assert saved.evaluate("val", checkpoint=checkpoint)["val/loss"] == recorded[step]


def test_the_command_evaluates_a_checkpoint_with_the_average_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    _verb(
        [
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
            "--stop-after",
            "4 steps",
            "--evaluate-every",
            "2 steps",
            "--run-dir",
            run,
        ]
    )
    _verb(["resume", run, "--change", "ema=0.5", "--stop-after", "8 steps"])
    capsys.readouterr()
    _verb(["evaluate", run, "--checkpoint", "4"])
    assert "val/loss" in capsys.readouterr().out
