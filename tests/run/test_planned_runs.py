"""A run is planned when it is built, by what its directory says then; its opening refuses a directory
that says something else. 2 s.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from refused import refused
from surefoot.checkpoint import Store
from surefoot.cli.main import main
from surefoot.train.plan import Segment

X = torch.linspace(-1, 1, 64)[:, None]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    arguments: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": loss,
        "train_data": (X, 3 * X),
        "optimizer": sf.optim.sgd(lr=0.1),
        "schedule": sf.schedules.wsd(warmup="50%", cooldown="1 steps"),
        "batch_size": 16,
        "length": "8 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "precision": "auto",
    }
    return sf.Run(**(arguments | changes), run_dir=run_dir)


def test_a_run_that_began_after_this_one_was_built_is_refused(tmp_path: Path) -> None:
    late = build(tmp_path / "run", length="20 steps")
    build(tmp_path / "run", length="8 steps", stop_after="2 steps").train()
    with refused("run-began-meanwhile", sf.CheckpointError, steps=8):
        late.train()


def test_a_run_that_was_deleted_after_this_one_was_built_is_not_begun_by_its_plan(
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", length="8 steps", stop_after="2 steps").train()
    late = build(tmp_path / "run", length="20 steps")
    shutil.rmtree(tmp_path / "run")
    with refused("run-gone", sf.CheckpointError, run=str(tmp_path / "run")):
        late.train()
    assert not (tmp_path / "run").exists()


def test_a_run_that_trains_twice_goes_on_from_its_own_state(tmp_path: Path) -> None:
    run = build(tmp_path / "run", stop_after="2 steps")
    run.train()
    run.train()  # the beginning is its own
    assert run.state.step == 2
    assert run.parts.plan.is_new


@pytest.mark.parametrize(
    ("pattern", "damaged"),
    [
        ('"precision": ?"fp32"', '"precision":"fp22"'),
        ('"schedule_of_steps": ?8', '"schedule_of_steps":3'),
        ('"compile": ?false', '"compile":true'),
    ],
)
def test_a_plan_takes_nothing_from_a_damaged_checkpoint(
    pattern: str, damaged: str, tmp_path: Path
) -> None:
    with build(tmp_path / "run"):
        pass
    (state,) = (tmp_path / "run" / "checkpoints").glob("step-*/state.json")
    text, count = re.subn(pattern, damaged, state.read_text(), count=1)
    assert count == 1
    state.write_text(text)
    with refused("no-intact-checkpoint", sf.CheckpointError):
        build(tmp_path / "run").train()


def test_a_loaded_checkpoint_decides_what_auto_is_and_a_resume_compares_it(tmp_path: Path) -> None:
    build(tmp_path / "bf16", precision="bf16", stop_after="1 steps").train()
    checkpoint = Store(tmp_path / "bf16" / "checkpoints").at(0)
    build(tmp_path / "fp32", stop_after="1 steps", check_state=False).train()
    run = build(tmp_path / "fp32", check_state=False)
    run.load_checkpoint(checkpoint)
    assert run.parts.plan.precision == run.parts.plan.identity["precision"] == "bf16"
    changes = ["precision was 'fp32', now 'bf16'"]
    with refused("settings-changed", sf.CheckpointError, changes=changes):
        run.train()


def test_trial_steps_leave_the_precision_of_a_loaded_checkpoint(tmp_path: Path) -> None:
    build(tmp_path / "bf16", precision="bf16", stop_after="1 steps").train()
    run = build(None)
    run.load_checkpoint(Store(tmp_path / "bf16" / "checkpoints").at(0))
    sf.tune.find_lr(run, steps=20)
    assert run.parts.run_state.precision.name == "bf16"


def test_a_session_without_steps_leaves_a_stopped_run_a_stopped_one(tmp_path: Path) -> None:
    for _ in range(2):
        build(tmp_path / "run", stop_after="2 steps").train()
        assert sf.load(tmp_path / "run").status == "stopped"
    with build(tmp_path / "run"):
        pass
    saved = sf.load(tmp_path / "run")
    assert saved.status == "stopped"
    (early,) = [finding for finding in saved.diagnose() if finding.name == "ended-early"]
    assert early.severity == "note"  # not a warning: it was not killed


@pytest.mark.parametrize("stop_after", ["2 steps", "3 steps", "5 steps"])
def test_steps_of_several_segments_are_those_of_one(stop_after: str, tmp_path: Path) -> None:
    whole = build(None)
    whole.train()
    for changes in ({"stop_after": stop_after}, {}):
        run = build(tmp_path / "run", **changes)
        halves = (Segment(0, 3), Segment(3, 8))
        run.parts.plan = replace(run.parts.plan, segments=halves)
        # a step of the second half is taken by a task of its own
        second = replace(run.parts.task, factors=whole.parts.task.factors)
        run.parts.tasks = (replace(run.parts.task, factors=_of_first_half(whole)), second)
        run.train()
    assert run.state.step == 8
    for one, other in zip(whole.state.parameters, run.state.parameters, strict=True):
        assert torch.equal(one, other)


def _of_first_half(run: sf.Run) -> Callable[[int], float]:
    def factor(step: int) -> float:
        assert step < 3
        return run.parts.task.factors(step)

    return factor


class Leveled(torch.utils.data.Dataset[Any]):
    """Its targets are a value that other code sets."""

    level = 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / 64]), torch.tensor([self.level])


def test_a_value_that_the_builder_of_the_model_wrote_is_followed(tmp_path: Path) -> None:
    data = Leveled()

    def model() -> nn.Module:
        data.level = 1.0
        return nn.Linear(1, 1)

    run = build(tmp_path / "run", model=model, train_data=data, stop_after="4 steps")
    with run:
        for step in run:
            data.level = 2.0 + step.index
    data.level = 0.0
    resumed = build(tmp_path / "run", model=model, train_data=data)
    levels = []
    with resumed:
        for _ in resumed:
            levels.append(data.level)
    assert levels == [5.0] * 4


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import dataclass
import test_planned_runs

@dataclass
class Config:
    length: str = "4 steps"

def build(config: Config):
    return test_planned_runs.build("runs/a", length=config.length)
"""


def test_a_run_is_built_again_as_it_began_whatever_directory_its_program_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(tests=str(Path(__file__).parent)))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    main(["train", "program.py:build"])
    main(["resume", "runs/a", "--length", "8 steps"])
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved = sf.load(tmp_path / "runs" / "a")
    plan = saved.rebuild(one_process=True).parts.plan
    assert (plan.times.began.steps, plan.times.length.steps, plan.is_new) == (4, 8, False)
    assert saved.verify(say=None).exit_status == 0
