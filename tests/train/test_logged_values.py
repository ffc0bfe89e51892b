"""`step.log` puts the values of a name together over the steps of a record and over ranks: their
mean, sum, maximum, minimum, or the last.
"""

from __future__ import annotations

import math
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

STEPS, EVERY = 10, 4
WINDOWS = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))  # steps of each record
VALUES = (3.0, -1.0, 4.0, 1.5, -9.0, 2.0, 6.0, 5.0, 3.5, -8.0)
OF: dict[str, Any] = {
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
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.sgd(lr=0.01),
        "log_every": f"{EVERY} steps",
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
        "run_dir": run_dir,
    }
    return sf.Run(**(settings | changes))


def log_all(step: sf.Step, value: float) -> None:
    for reduce in OF:
        step.log(
            reduce=reduce,  # type: ignore[arg-type]
            **{f"{reduce}_of_numbers": value, f"{reduce}_of_tensors": torch.tensor(value)},
        )


def expected(record: int) -> dict[str, float]:
    values = [VALUES[step] for step in WINDOWS[record]]
    return {
        f"{reduce}_of_{kind}": function(values)
        for reduce, function in OF.items()
        for kind in ("numbers", "tensors")
    }


def logged(run_dir: Path | str) -> list[dict[str, float]]:
    records = sf.load(run_dir).records("train")
    return [{name: record[name] for name in record if "_of_" in name} for record in records]


@pytest.mark.parametrize("is_opened", [False, True])
def test_values_are_those_of_the_steps_of_a_record(tmp_path: Path, is_opened: bool) -> None:
    with build(tmp_path / "a") as run:
        for step in run.steps() if is_opened else run:
            if is_opened:
                sf.forward_backward(step)
                sf.update(step)
            log_all(step, VALUES[step.index])
    assert logged(tmp_path / "a") == [expected(record) for record in range(3)]


def test_a_resume_in_the_middle_of_a_record_changes_nothing(tmp_path: Path) -> None:
    for stop in ("2 steps", "6 steps", "10 steps"):
        with build(tmp_path / "a", stop_after=stop) as run:
            for step in run:
                log_all(step, VALUES[step.index])
    assert logged(tmp_path / "a") == [expected(record) for record in range(3)]


def on_rank(run_dir: str) -> None:
    with build(run_dir) as run:
        for step in run:
            log_all(step, VALUES[step.index] + run.rank)
            if run.rank == 1:
                step.log(reduce="sum", alone_of_rank=1.0)


def test_values_of_all_ranks_are_put_together(tmp_path: Path, ranks: Ranks) -> None:
    ranks(2, on_rank, run_dir=str(tmp_path / "a"))
    for record, values in enumerate(logged(tmp_path / "a")):
        steps = WINDOWS[record]
        own = [VALUES[step] for step in steps]
        alone = values.pop("alone_of_rank")
        assert alone == len(steps)
        of_ranks = {
            "mean": OF["mean"](own) + 0.5,
            "sum": 2 * sum(own) + len(own),
            "max": max(own) + 1,
            "min": min(own),
            "last": own[-1],  # of rank 0
        }
        assert values == {
            f"{reduce}_of_{kind}": value
            for reduce, value in of_ranks.items()
            for kind in ("numbers", "tensors")
        }


def test_calls_of_one_step_go_on(tmp_path: Path) -> None:
    with build(tmp_path / "a", length="1 steps") as run:
        for step in run:
            for value in (2.0, 5.0, 3.0):
                step.log(reduce="sum", sum_of_step=value)
                step.log(reduce="max", max_of_step=torch.tensor(value))
                step.log(reduce="min", min_of_step=value)
                step.log(reduce="last", last_of_step=value)
            step.log(reduce="max", max_of_step=1)
    assert logged(tmp_path / "a") == [
        {"sum_of_step": 10.0, "max_of_step": 5.0, "min_of_step": 2.0, "last_of_step": 3.0}
    ]


@pytest.mark.parametrize("reduce", ["sum", "max", "min", "last"])
def test_nan_is_not_lost(tmp_path: Path, reduce: Any) -> None:
    with build(tmp_path / "a", length="3 steps", log_every="3 steps") as run:
        for step in run:
            is_nan = step.index == (2 if reduce == "last" else 1)
            step.log(reduce=reduce, a_of_steps=math.nan if is_nan else 1.0)
            step.log(reduce=reduce, b_of_calls=math.nan)
            if reduce != "last":
                step.log(reduce=reduce, b_of_calls=1.0)
    (record,) = sf.load(tmp_path / "a").records("train")
    assert math.isnan(record["a_of_steps"])
    assert math.isnan(record["b_of_calls"])


def test_what_is_unclear_is_refused() -> None:
    with build(length="1 steps") as run:
        for step in run:
            with refused("unknown-reduction", setting="reduce", value="'median'"):
                step.log(reduce="median", a=1.0)  # type: ignore[arg-type]
            with refused("unknown-reduction", setting="reduce", value="0.5"):
                step.log(reduce=0.5)  # type: ignore[arg-type]  # a value of this name
            with refused("reduced-mean", setting="reduce", value="a"):
                step.log(reduce="sum", a=sf.Mean(1.0, 2))
            step.log(b=1.0)
            with refused("logged-two-ways", setting="reduce", value="b"):
                step.log(reduce="max", b=1.0)
            step.log(reduce="max", c=1.0)
            with refused("logged-two-ways", setting="reduce", value="c"):
                step.log(c=1.0)


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
    assert [name for name in calls.names if "full" in name or "maximum" in name] == [
        "aten.full.default",
        "aten.maximum.default",
    ]


def scored(model: nn.Module, batch: Any) -> tuple[Any, dict[str, sf.Mean]]:
    loss = F.mse_loss(model(batch[0]), batch[1])
    return loss, {"accuracy": sf.Mean(1.0, 2)}


def test_a_metric_of_the_loss_is_not_replaced() -> None:
    with refused("logged-name-of-the-loss", name="accuracy"), build(loss=scored) as run:
        for step in run:
            step.log(accuracy=1.0)
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
