"""`step.log` puts the values of a name together over the steps of a record and over ranks: their
mean, sum, maximum, minimum, or the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.mean import add_logged

VALUES = (3.0, -1.0, 4.0, 1.5, -9.0, 2.0, 6.0, 5.0, 3.5, -8.0)  # of each step
WINDOWS = (VALUES[:4], VALUES[4:8], VALUES[8:])  # of each record
REDUCTIONS: dict[str, Any] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def build(run_dir: Path | str | None = None, **changes: Any) -> sf.Run:
    inputs = torch.linspace(-1, 1, 16).reshape(8, 2)
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        "train_data": (inputs, inputs.sum(1, keepdim=True)),
        "batch_size": 4,
        "micro_batch_size": 2,
        "length": "10 steps",
        "optimizer": sf.optim.sgd(lr=0.01),
        "log_every": "4 steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def log_all(step: sf.Step, value: float) -> None:
    for reduce in REDUCTIONS:
        values: dict[str, Any] = {
            f"{reduce}_of_numbers": value,
            f"{reduce}_of_tensors": torch.tensor(value),
        }
        step.log(reduce=reduce, **values)  # type: ignore[arg-type]


def as_logged(reduced: dict[str, float]) -> dict[str, float]:
    """What `log_all` makes of the value of each reduction in a record."""
    values = {}
    for reduce, value in reduced.items():
        values[f"{reduce}_of_numbers"] = value
        values[f"{reduce}_of_tensors"] = value
    return values


def expected_values() -> list[dict[str, float]]:
    """The values of each record of a run that logs `VALUES`."""
    values = []
    for window in WINDOWS:
        reduced = {reduce: function(window) for reduce, function in REDUCTIONS.items()}
        values.append(as_logged(reduced))
    return values


def logged_values(run_dir: Path | str) -> list[dict[str, float]]:
    """The values of each record, by the names that tests give them."""
    values = []
    for record in sf.load(run_dir).records("train"):
        values.append({name: record[name] for name in record if "_of_" in name})
    return values


def test_values_are_those_of_the_steps_of_a_record(tmp_path: Path) -> None:
    with build(tmp_path / "a") as run:
        for step in run:
            log_all(step, VALUES[step.index])

    assert logged_values(tmp_path / "a") == expected_values()


def test_values_of_a_loop_of_ones_own_are_those_of_the_steps_of_a_record(tmp_path: Path) -> None:
    with build(tmp_path / "a") as run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)
            log_all(step, VALUES[step.index])

    assert logged_values(tmp_path / "a") == expected_values()


def test_a_resume_in_the_middle_of_a_record_changes_nothing(tmp_path: Path) -> None:
    for stop in ("2 steps", "6 steps", "10 steps"):
        with build(tmp_path / "a", stop_after=stop) as run:
            for step in run:
                log_all(step, VALUES[step.index])

    assert logged_values(tmp_path / "a") == expected_values()


def on_rank(run_dir: str) -> None:
    with build(run_dir) as run:
        for step in run:
            log_all(step, VALUES[step.index] + run.rank)
            if run.rank == 1:
                step.log(reduce="sum", alone_of_rank=1.0)


def test_values_of_all_ranks_are_put_together(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, on_rank, run_dir=str(tmp_path / "a"))

    for values, window in zip(logged_values(tmp_path / "a"), WINDOWS, strict=True):
        assert values.pop("alone_of_rank") == len(window)
        of_both = {
            "mean": sum(window) / len(window) + 0.5,
            "sum": 2 * sum(window) + len(window),
            "max": max(window) + 1,
            "min": min(window),
            "last": window[-1],  # of rank 0
        }
        assert values == as_logged(of_both)


def test_calls_of_one_step_go_on(tmp_path: Path) -> None:
    with build(tmp_path / "a", length="1 steps") as run:
        for step in run:
            for value in (2.0, 5.0, 3.0):
                step.log(reduce="sum", sum_of_step=value)
                step.log(reduce="max", max_of_step=torch.tensor(value))
                step.log(reduce="min", min_of_step=value)
                step.log(reduce="last", last_of_step=value)
            step.log(reduce="max", max_of_step=1)

    (values,) = logged_values(tmp_path / "a")
    expected = {"sum_of_step": 10.0, "max_of_step": 5.0, "min_of_step": 2.0, "last_of_step": 3.0}
    assert values == expected


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "last"])
def test_nan_is_not_lost(tmp_path: Path, reduce: Any) -> None:
    a_of_steps = [1.0, math.nan, 1.0]
    if reduce == "last":
        a_of_steps = [1.0, 1.0, math.nan]
    with build(tmp_path / "a", length="3 steps", log_every="3 steps") as run:
        for step in run:
            step.log(reduce=reduce, a_of_steps=a_of_steps[step.index])
            step.log(reduce=reduce, b_of_calls=math.nan)
            if reduce != "last":
                step.log(reduce=reduce, b_of_calls=1.0)

    (record,) = sf.load(tmp_path / "a").records("train")
    assert math.isnan(record["a_of_steps"])
    assert math.isnan(record["b_of_calls"])


@pytest.fixture
def step() -> Iterator[sf.Step]:
    with build(length="1 steps") as run:
        yield from run


def test_a_reduction_that_is_none_is_refused(step: sf.Step) -> None:
    with refused("unknown-reduction", setting="reduce", value="'median'"):
        step.log(reduce="median", a=1.0)  # type: ignore[arg-type]
    with refused("unknown-reduction", setting="reduce", value="0.5"):
        step.log(reduce=0.5)  # type: ignore[arg-type]  # a value of this name


def test_a_mean_is_refused_by_other_reductions(step: sf.Step) -> None:
    with refused("reduced-mean", setting="reduce", value="a"):
        step.log(reduce="sum", a=sf.Mean(1.0, 2))


def test_two_reductions_in_one_step_are_refused(step: sf.Step) -> None:
    step.log(a=1.0)
    with refused("logged-two-ways", setting="reduce", value="a"):
        step.log(reduce="max", a=1.0)
    step.log(reduce="max", b=1.0)
    with refused("logged-two-ways", setting="reduce", value="b"):
        step.log(b=1.0)


def test_two_reductions_in_two_steps_of_a_record_are_refused() -> None:
    with refused("logged-two-ways", setting="reduce", value="b"), build() as run:
        for step in run:
            step.log(reduce="sum" if step.index else "mean", b=1.0)


class Calls(TorchDispatchMode):
    """The names of torch's functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_float_first", [True, False])
def test_a_float_beside_a_tensor_is_written_on_its_device(is_float_first: bool) -> None:
    """A copy from the host would wait for the device."""
    values: list[Any] = [torch.zeros((), device="meta"), 1.0]
    if is_float_first:
        values.reverse()
    logged: dict[str, Any] = {}
    with Calls() as calls:
        for value in values:
            add_logged(logged, {"a": value}, reduce="max")

    assert logged["a"].number.device.type == "meta"
    of_interest = [name for name in calls.names if "full" in name or "maximum" in name]
    assert of_interest == ["aten.full.default", "aten.maximum.default"]


def scored(model: nn.Module, batch: Any) -> tuple[Any, dict[str, sf.Mean]]:
    loss = F.mse_loss(model(batch[0]), batch[1])
    return loss, {"accuracy": sf.Mean(1.0, 2)}


def test_a_metric_of_the_loss_is_not_replaced() -> None:
    with refused("logged-name-of-the-loss", name="accuracy"), build(loss=scored) as run:
        for step in run:
            step.log(accuracy=1.0)


def test_a_metric_of_a_later_loss_does_not_replace_a_value() -> None:
    with refused("logged-name-of-the-loss", name="accuracy"), build(loss=scored) as run:
        for step in run.steps():
            step.log(accuracy=1.0)
            sf.forward_backward(step, scored)


def test_metrics_of_two_losses_are_added(tmp_path: Path) -> None:
    with build(tmp_path / "a", loss=scored) as run:
        for step in run.steps():
            sf.forward_backward(step, scored)
            sf.forward_backward(step, scored)
            sf.update(step)

    assert {record["accuracy"] for record in sf.load(tmp_path / "a").records("train")} == {0.5}
