"""The table of shapes: complete, and enough to add one that a run, a picture and a flag know.
(3 s)
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import small_runs
import surefoot as sf
from refused import refused
from surefoot.cli.plan_schedules import schedules
from surefoot.config.durations import Length
from surefoot.recipes.optimizer_settings import Schedule as Flags
from surefoot.schedules.curves import SHAPES, Factors, Fall, Shape
from surefoot.schedules.lr_schedule import Schedule

LENGTH = Length(steps=8, samples_per_epoch=8, batch_size=1)


def late(at: Fall) -> Factors:
    """The root of what is left."""
    left = at.remaining()
    return at.along(lambda step: math.sqrt(left(step)))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "late", Shape({"warmup": 0, "min_lr_ratio": 0.0}, late))


def test_the_settings_of_every_shape_are_those_of_a_schedule_and_flags() -> None:
    taken = {name for shape in SHAPES.values() for name in shape.takes}

    assert taken == {field.name for field in dataclasses.fields(Schedule)} - {"shape"}
    assert taken == {field.name for field in dataclasses.fields(Flags)} - {"name"}


def test_a_shape_that_is_added_has_its_factors_and_may_be_joined_and_drawn(added: None) -> None:
    factor = Schedule("late", warmup=4).factors(LENGTH)

    assert [factor(step) for step in (0, 4, 7, 8)] == [0.2, 1.0, 0.5, 0.0]
    assert (
        sf.schedules.join(sf.schedules.constant(), Schedule("late"), at=4).factors(LENGTH)(7) == 0.5
    )
    assert list(schedules("late,late:min_lr_ratio=0.5", LENGTH, shared={})) == [
        "late",
        "late:min_lr_ratio=0.5",
    ]
    with refused("schedule-setting-foreign", setting="schedule.power", value=2.0):
        Schedule("late", power=2.0)


def test_a_run_with_a_shape_that_is_added_resumes_to_the_bit_and_is_not_made_longer(
    added: None, tmp_path: Path
) -> None:
    def weights(run_dir: Path, length: str = "10 steps", **changes: str) -> dict[str, torch.Tensor]:
        run = small_runs.build(
            run_dir, schedule=Schedule("late", warmup=2), length=length, **changes
        )
        run.train()
        return run.state.models["model"].state_dict()

    whole = weights(tmp_path / "whole")
    weights(tmp_path / "cut", stop_after="4 steps")
    with pytest.raises(sf.CheckpointError) as caught:
        weights(tmp_path / "cut", "20 steps")
    assert caught.value.code == "length-changed"
    assert "step 3 " in (caught.value.reason or "")  # from which on its rates differ
    resumed = weights(tmp_path / "cut")

    assert all(torch.equal(resumed[name], held) for name, held in whole.items())


def test_a_shape_that_is_added_can_be_named_by_a_flag() -> None:
    code = """
from surefoot.schedules.curves import SHAPES, Shape
SHAPES["late"] = Shape({"warmup": 0}, lambda at: lambda step: 1.0)
from surefoot.config.tree import layered
from surefoot.recipes.images.config import Config
config, _ = layered(Config, [("flag", {"schedule.name": "late"})])
print(config.schedule.spec().to_dict())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert (ended.stderr, ended.stdout) == ("", "{'shape': 'late', 'warmup': '5%'}\n")
