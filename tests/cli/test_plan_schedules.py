"""`surefoot plan --schedules`: which schedules of which run a command line means; 5 seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from command_line import error_of, output_of
from in_one import in_one
from stated import numbers_in
from surefoot.cli.plan_schedules import schedules
from surefoot.config.durations import Length
from surefoot.config.extras import is_installed
from surefoot.recipes import images
from surefoot.schedules.curves import SHAPES
from surefoot.schedules.joined import Joined
from surefoot.schedules.lr_schedule import Schedule
from surefoot.tools.report.figures import RASTERIZER, drawn_line

LENGTH = Length(steps=1000, samples_per_epoch=100, batch_size=10)
Capture = pytest.CaptureFixture[str]
PROGRAM = """
import torch, surefoot as sf

def build():
    data = (torch.randn(40, 3), torch.randint(2, (40,)))
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return sf.Run(model=lambda: torch.nn.Linear(3, 2), loss=loss, train_data=data, batch_size=4, length="4 epochs",
        optimizer=sf.optim.sgd(lr=0.25), schedule=sf.schedules.linear(warmup="20%", min_lr_ratio=0.5), console=False)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys: Capture, *arguments: str) -> list[str]:
    return output_of(capsys, "plan", *arguments).splitlines()


@pytest.fixture
def undrawn(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `here`, and no picture is drawn: what is printed is the claim."""
    monkeypatch.setattr(
        "surefoot.tools.plan.schedule_plot.draw_traces", lambda traces, *, out, rate: [Path("none")]
    )
    return here


def error_of_plan(capsys: Capture, *arguments: str) -> list[str]:
    """The lines of an error, before which nothing was drawn."""
    message = error_of(capsys, "plan", *arguments)
    assert list(Path().glob("*.svg")) == []
    return message.splitlines()


def read_schedules(text: str, **shared: Any) -> list[Schedule | Joined]:
    return list(schedules(text, LENGTH, shared=shared).values())


@in_one
@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("cosine", sf.schedules.cosine("5%")),
        ("linear:min_lr_ratio=0.1", sf.schedules.linear("5%", min_lr_ratio=0.1)),
        (
            "linear:min_lr_ratio=0.1:warmup=30 steps",
            sf.schedules.linear("30 steps", min_lr_ratio=0.1),
        ),
        ("wsd:cooldown=30%", sf.schedules.wsd("5%", cooldown="30%")),
        ("polynomial:power=2", sf.schedules.polynomial("5%", power=2.0)),
        (
            "multistep:milestones=30%/60%:gamma=0.5",
            sf.schedules.multistep("5%", milestones=("30%", "60%"), gamma=0.5),
        ),
        (
            "cosine_restarts:cycle=20%:cycle_growth=2",
            sf.schedules.cosine_restarts("5%", cycle="20%", cycle_growth=2.0),
        ),
        ("one_cycle", sf.schedules.one_cycle()),
        ("inverse_sqrt", sf.schedules.inverse_sqrt()),
        (
            "constant+linear@50%",
            sf.schedules.join(sf.schedules.constant(50), sf.schedules.linear(), at="50%"),
        ),
        (
            "constant+linear:min_lr_ratio=0.1@600 steps",
            sf.schedules.join(
                sf.schedules.constant(50), sf.schedules.linear(min_lr_ratio=0.1), at=600
            ),
        ),
        (
            "constant+cosine@30%+linear@60%",
            sf.schedules.join(
                sf.schedules.join(sf.schedules.constant(50), sf.schedules.cosine(), at=300),
                sf.schedules.linear(),
                at=600,
            ),
        ),
        (
            "constant+cosine:warmup=10 steps@50%",
            sf.schedules.join(sf.schedules.constant(50), sf.schedules.cosine(10), at="50%"),
        ),
    ],
)
def test_a_schedule_is_read_as_it_is_written(text: str, schedule: Schedule | Joined) -> None:
    (from_text,) = read_schedules(text)
    factor = from_text.factors(LENGTH)
    expected_factor = schedule.factors(LENGTH)
    for step in range(1000):
        assert factor(step) == expected_factor(step)


def test_what_is_shared_is_taken_by_those_that_take_it_and_do_not_say_otherwise() -> None:
    constant, linear, cosine, one_cycle, wsd = read_schedules(
        "constant,linear,cosine:min_lr_ratio=0.3,one_cycle,wsd",
        warmup="10%",
        min_lr_ratio=0.1,
        cooldown="40%",
    )
    for schedule in (constant, linear, cosine, wsd):
        assert schedule.warmup == "10%"
    assert one_cycle.warmup is None
    assert minimum_ratio(constant) is None
    for schedule in (linear, one_cycle, wsd):
        assert minimum_ratio(schedule) == 0.1
    assert minimum_ratio(cosine) == 0.3
    assert isinstance(wsd, Schedule)
    assert wsd.cooldown == "40%"


def minimum_ratio(schedule: Schedule | Joined) -> float | None:
    assert isinstance(schedule, Schedule)
    return schedule.min_lr_ratio


def test_all_is_every_shape() -> None:
    shapes = [getattr(schedule, "shape", None) for schedule in read_schedules("all")]
    assert shapes == list(SHAPES)


def test_without_a_recipe_it_is_a_run_of_a_thousand_steps(here: Path, capsys: Capture) -> None:
    lines = plan(capsys, "--schedules", "cosine,linear:min_lr_ratio=0.1")
    assert numbers_in(lines[0]) == [1000]
    assert [line.split()[0] for line in lines[3:5]] == ["cosine", "linear:min_lr_ratio=0.1"]
    files = sorted(path.name for path in here.iterdir())
    if is_installed(RASTERIZER):
        assert files == ["schedules.png", "schedules.svg"]
    else:
        assert files == ["schedules.svg"]
    assert lines[-1] == drawn_line(files)


def test_length_and_common_settings_may_be_given(here: Path, capsys: Capture) -> None:
    flags = ["--length=80 steps", "--schedule.warmup=10%", "--out=x/y"]
    lines = plan(capsys, "--schedules=linear,constant", *flags)
    assert numbers_in(lines[0]) == [80]
    assert all("step 8 " in f"{line} " for line in lines[3:5])
    assert "x/y.svg" in lines[-1]
    assert (here / "x" / "y.svg").is_file()


def test_a_recipe_gives_its_length_warmup_floor_and_rate(undrawn: Path, capsys: Capture) -> None:
    flags = ["--preset=small", "--optimizer.lr=2e-3"]
    lines = plan(capsys, "gpt", "--schedules=cosine,linear:min_lr_ratio=0", *flags)
    assert numbers_in(lines[0]) == [10_000, 0.002]
    assert "0.002, step 500" in lines[3]
    assert "0.0002, step 9,999" in lines[3]
    assert "0.0002" not in lines[4]
    assert not (undrawn / "runs").exists()


def test_a_length_in_passes_is_that_of_the_recipes_data(undrawn: Path, capsys: Capture) -> None:
    flags = ["--length", "2 epochs", "--batch-size", "64"]
    lines = plan(capsys, "images", "--schedules", "constant", *flags)
    run = images.build(images.Config(length="2 epochs", batch_size=64, run_dir=None))
    steps, _ = numbers_in(lines[0])  # and the base learning rate
    assert steps == run.parts.length.steps


def test_a_run_of_ones_own_gives_what_its_schedule_has(undrawn: Path, capsys: Capture) -> None:
    (undrawn / "mine.py").write_text(PROGRAM)
    lines = plan(capsys, "--schedules", "cosine,constant", "mine.py:build")
    assert numbers_in(lines[0]) == [40, 0.25]
    cosine, constant = lines[3:5]
    *words, _ = cosine.split()
    assert " ".join(words) == "cosine step 8 0.25, step 8 0.125, step 39"
    assert constant.split()[:3] == ["constant", "step", "8"]


def test_everything_that_is_wrong_with_a_list_is_named_at_once(here: Path, capsys: Capture) -> None:
    lines = error_of_plan(
        capsys,
        "--schedules",
        "cosin,linear:min_lr_ratio=x,wsd:coldown=3%,linear:floor,linear:power=2,a+b",
    )
    codes = [line.strip() for line in lines if line.startswith("  [")]
    assert codes == [
        "[schedule-unknown]",
        "[setting-out-of-range]",
        "[setting-out-of-range]",
        "[setting-out-of-range]",
        "[schedule-setting-foreign]",
        "[schedule-unknown]",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--schedules", ""], "[schedule-unknown]"),
        (["gpt", "--schedules="], "[schedule-unknown]"),
        (["--schedules"], "[flags-not-understood]"),
        (["--schedules", "constant+linear"], "[setting-out-of-range]"),
        (["--schedules", "constant+linear@100%"], "[joined-schedule-without-steps]"),
        (["--schedules", "cosine:warmup=2000 steps"], "[schedule-warmup-too-long]"),
        (
            ["--schedules", "cosine", "--length", "3 epochs"],
            "[epochs-without-data]",
        ),
        (
            ["--schedules", "cosine", "--schedule.name", "wsd"],
            "[option-excluded]",
        ),
        (["--schedules", "cosine", "--optimizer.lr", "1"], "[setting-unknown]"),
        (["--schedules", "cosine", "gtp"], "did you mean gpt?"),
        (["--schedules", "cosine", "--shedules", "x"], "[setting-unknown]"),
    ],
)
def test_a_mistake_is_refused_and_nothing_is_drawn(
    arguments: list[str], reason: str, here: Path, capsys: Capture
) -> None:
    lines = error_of_plan(capsys, *arguments)
    assert reason in "\n".join(lines)
    assert len(lines) <= 5
