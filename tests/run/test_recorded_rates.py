"""Every learning rate and momentum of a run is in its records, by name: that of each group in the
latest step, as torch's own groups have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.run_charts import charts
from surefoot.tools.report.series import read_reported_run
from surefoot.tracking.record import BY_OPTIMIZER

STEPS = 6
INPUTS = torch.linspace(-1, 1, 24).reshape(12, 2)


def together(models: Any, batch: Any) -> Tensor:
    if isinstance(models, nn.Module):
        outputs = models(batch[0])
    else:
        outputs = models["a"](batch[0]) + models["b"](batch[0])
    return F.mse_loss(outputs, batch[1])


def build(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": together,
        "train_data": (INPUTS, INPUTS.sum(1, keepdim=True)),
        "batch_size": 4,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "log_every": "1 steps",
        "device": "cpu",
        "console": False,
        "tensorboard": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def two_models(a: Any, b: Any) -> dict[str, Any]:
    models = {"a": lambda: nn.Linear(2, 1), "b": lambda: nn.Linear(2, 1)}
    return {"model": models, "optimizer": {"a": a, "b": b}}


def groups_with(**values: Any) -> Any:
    """An optimizer of two groups, the second of which has these values."""

    def build_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        weight, bias = groups[0]["params"]
        first = {"params": [weight]}
        second = {"params": [bias], **values}
        if "name" in values:
            first["name"] = "trunk"
        return torch.optim.SGD([first, second], lr=0.1, momentum=0.5)

    return build_sgd


def recorded(run_dir: Path) -> list[dict[str, float]]:
    """The rates and momenta of each training record, by name."""
    rates = []
    for record in sf.load(run_dir).records("train"):
        rates.append({name: value for name, value in record.items() if is_rate(name)})
    return rates


def is_rate(name: str) -> bool:
    return name in ("lr", "momentum") or name.startswith(BY_OPTIMIZER)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"lr": 0.1}),
        ({"optimizer": sf.optim.adamw(lr=0.1)}, {"lr": 0.1, "momentum": 0.9}),
        ({"optimizer": sf.optim.sgd(lr=0.1, momentum=0.0)}, {"lr": 0.1}),
        (
            two_models(sf.optim.sgd(lr=0.1), sf.optim.adam(lr=0.1)),
            {"lr": 0.1, "lr/a": 0.1, "lr/b": 0.1, "momentum/b": 0.9},
        ),
        (
            two_models(sf.optim.sgd(lr=0.1), groups_with(lr=0.01, name="head")),
            {
                "lr": 0.1,
                "lr/a": 0.1,
                "lr/b/trunk": 0.1,
                "lr/b/head": 0.01,
                "momentum/b": 0.5,
            },
        ),
        (
            {"optimizer": groups_with(lr=0.01)},
            {"lr": 0.1, "lr/group0": 0.1, "lr/group1": 0.01, "momentum": 0.5},
        ),
        (
            {"optimizer": groups_with(momentum=0.0)},
            {"lr": 0.1, "momentum": 0.5, "momentum/group0": 0.5},
        ),
    ],
    ids=["one", "adamw", "no momentum", "two", "named groups", "groups", "momentum of a group"],
)
def test_rates_and_momenta_have_names_where_they_are_several(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, float]
) -> None:
    build(tmp_path / "a", **changes).train()
    assert recorded(tmp_path / "a") == [expected] * STEPS


def steps_of_run(run: sf.Run) -> Iterator[sf.Step]:
    yield from run


def steps_of_ones_own(run: sf.Run) -> Iterator[sf.Step]:
    for step in run.steps():
        sf.forward_backward(step)
        sf.update(step)
        yield step


@pytest.mark.parametrize("steps", [steps_of_run, steps_of_ones_own])
def test_each_record_has_the_rates_that_its_step_used(
    tmp_path: Path, steps: Callable[[sf.Run], Iterator[sf.Step]]
) -> None:
    """Also where the body changes the groups after the step, and where the schedule does."""
    optimizers = two_models(sf.optim.adamw(lr=0.1), groups_with(lr=0.01))
    cycle = sf.schedules.one_cycle(momentum_range=(0.7, 0.9))
    run = build(tmp_path / "a", **optimizers, schedule=cycle)
    first, *_ = run.state.optimizers["a"].optimizer.param_groups
    group0, group1 = run.state.optimizers["b"].optimizer.param_groups
    used = []
    with run:
        for _ in steps(run):
            used.append(
                {
                    "lr": first["lr"],
                    "lr/a": first["lr"],
                    "lr/b/group0": group0["lr"],
                    "lr/b/group1": group1["lr"],
                    "momentum": first["betas"][0],
                    "momentum/a": first["betas"][0],
                    "momentum/b": group0["momentum"],
                }
            )
            group1["lr"] *= 0.5

    assert recorded(tmp_path / "a") == used
    assert len({rates["momentum/b"] for rates in used}) > 2


def test_a_scheduler_of_the_body_shows_the_momentum_of_the_step_before_it(tmp_path: Path) -> None:
    run = build(tmp_path / "a", optimizer=sf.optim.sgd(lr=0.1, momentum=0.9))
    momenta = []
    with run:
        for _ in run:
            group = run.state.optimizers["model"].optimizer.param_groups[0]
            momenta.append(group["momentum"])
            group["momentum"] *= 0.5

    assert [rates["momentum"] for rates in recorded(tmp_path / "a")] == momenta


def test_a_resume_goes_on_with_the_same_names(tmp_path: Path) -> None:
    changes = two_models(groups_with(lr=0.01), sf.optim.adamw(lr=0.2))
    changes["schedule"] = sf.schedules.cosine(warmup="2 steps")
    build(tmp_path / "whole", **changes).train()
    build(tmp_path / "cut", stop_after="3 steps", **changes).train()
    build(tmp_path / "cut", **changes).train()

    assert recorded(tmp_path / "cut") == recorded(tmp_path / "whole")


def test_a_value_that_the_body_logs_under_such_a_name_stays(tmp_path: Path) -> None:
    """As in loops of 0.1.0, which recorded the further rates themselves."""
    run = build(tmp_path / "a", optimizer=sf.optim.adamw(lr=0.1))
    with run:
        for step in run:
            step.log(momentum=7.0, ms_per_step=8.0)

    record = sf.load(tmp_path / "a").records("train")[-1]
    assert (record["momentum"], record["ms_per_step"]) == (7.0, 8.0)


def charts_of(run_dir: Path) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts(read_reported_run(run_dir))}


def test_the_page_draws_every_rate(tmp_path: Path) -> None:
    changes = two_models(sf.optim.sgd(lr=0.1), groups_with(lr=0.01))
    build(tmp_path / "a", **changes, schedule=sf.schedules.one_cycle()).train()

    drawn = charts_of(tmp_path / "a")
    rates = recorded(tmp_path / "a")
    lines = drawn["learning-rate"].lines
    assert [line.name for line in lines] == ["a", "b/group0", "b/group1"]
    for line in lines:
        expected = [(step, values[f"lr/{line.name}"]) for step, values in enumerate(rates, start=1)]
        assert [*line.points] == expected
    assert "momentum" not in drawn  # it is constant


def test_tensorboard_shows_every_rate(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = two_models(sf.optim.sgd(lr=0.1), groups_with(lr=0.01))
    cycle = sf.schedules.one_cycle()
    build(tmp_path / "a", **changes, schedule=cycle, tensorboard=True).train()

    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    for name in ("lr/a", "lr/b/group0", "lr/b/group1"):
        scalars = [event.value for event in events.Scalars(f"train/{name}")]
        assert scalars == pytest.approx([rates[name] for rates in recorded(tmp_path / "a")])


def test_the_page_draws_a_momentum_that_changes(tmp_path: Path) -> None:
    cycle = sf.schedules.one_cycle(momentum_range=(0.7, 0.9))
    build(tmp_path / "a", optimizer=sf.optim.adamw(lr=0.1), schedule=cycle).train()

    (line,) = charts_of(tmp_path / "a")["momentum"].lines
    momenta = [rates["momentum"] for rates in recorded(tmp_path / "a")]
    assert [value for _, value in line.points] == momenta


def test_the_milliseconds_of_a_step_are_those_of_its_phases(tmp_path: Path) -> None:
    build(tmp_path / "a", log_every="3 steps").train()
    record = sf.load(tmp_path / "a").records("train")[-1]
    took_s = record["training_s"] + record["data_wait_s"]
    assert record["ms_per_step"] == 1000 * took_s / 3
