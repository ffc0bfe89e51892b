"""What "auto" chooses on the CPU: measured once, stored with the run, and without a trace in it. 5 s."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot import pace, plan
from surefoot.checkpoint import Store


class Net(nn.Sequential):
    """Large enough to be asked about, with dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 400))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(out: Path | None = None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(64, 16, generator=generator), torch.randint(400, (64,), generator=generator))
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train": data,
        "batch_size": 16,
        "length": "6 steps",
        "optimizer": sf.adamw(lr=1e-3),
        "out": out,
        "console": False,
    }
    return sf.Run(**(arguments | changes))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds that a pass seems to take in each format."""
    seconds = {"fp32": 1.0, "bf16": 0.5}
    real = pace.passed

    def passed(parts: Any, micro_batch: Any) -> tuple[float, int, float]:
        _, targets, value = real(parts, micro_batch)
        return seconds[parts.whole.precision.name], targets, value

    monkeypatch.setattr(pace, "passed", passed)
    return seconds


@pytest.mark.parametrize(
    ("fp32_s", "chosen"), [(2.0, "bf16"), (1.3, "bf16"), (1.1, "fp32"), (1.0, "fp32"), (0.5, "fp32")]
)
def test_bf16_is_chosen_where_it_is_clearly_quicker(fp32_s: float, chosen: str, quick: dict[str, float]) -> None:
    quick |= {"fp32": fp32_s, "bf16": 1.0}
    run = built()
    run.train()
    assert run.parts.whole.precision.name == run.parts.described["precision"] == chosen


@pytest.mark.parametrize("chosen", ["fp32", "bf16"])
def test_a_run_with_auto_is_bit_equal_to_one_with_what_it_chose(chosen: str, quick: dict[str, float]) -> None:
    quick |= {"fp32": 1.0, "bf16": 1.0} | {chosen: 0.1}
    auto, named = built(), built(precision=chosen)
    auto.train()
    named.train()
    for one, other in zip(
        auto.state.models["model"].state_dict().values(), named.state.models["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_resumed_run_computes_as_it_began_whatever_would_be_measured_now(
    tmp_path: Path, quick: dict[str, float]
) -> None:
    whole = built(precision="bf16")
    whole.train()
    built(tmp_path / "run", stop_after="2 steps").train()
    quick |= {"fp32": 0.1, "bf16": 1.0}
    resumed = built(tmp_path / "run")
    resumed.train()
    assert resumed.parts.whole.precision.name == "bf16"
    for one, other in zip(whole.state.parameters, resumed.state.parameters, strict=True):
        assert torch.equal(one, other)
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    again = built()
    again.load(newest[0])
    assert again.parts.whole.precision.name == "bf16"  # and is scored as it was


def test_naming_the_other_format_at_resume_is_refused(tmp_path: Path, quick: dict[str, float]) -> None:
    built(tmp_path / "run", stop_after="2 steps").train()
    with pytest.raises(sf.CheckpointError, match="precision was 'bf16', now 'fp32'"):
        built(tmp_path / "run", precision="fp32").train()


def test_measuring_leaves_no_trace(quick: dict[str, float]) -> None:
    run = built()
    before = {name: held.clone() for name, held in run.state.models["model"].state_dict().items()}
    drawn = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index, union-attr]
    assert pace.settle_precision(run.parts) == "auto: 2.0 times as fast as fp32"
    for name, held in run.state.models["model"].state_dict().items():
        assert torch.equal(held, before[name])
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in run.state.parameters)
    assert random.getstate() == drawn[0]
    assert np.random.get_state()[1].tolist() == drawn[1]  # type: ignore[index, union-attr]
    assert torch.equal(torch.get_rng_state(), drawn[2])
    assert pace.settle_precision(run.parts) is None  # settled


def test_bf16_that_overflows_is_not_chosen(quick: dict[str, float]) -> None:
    def overflowing(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        return value * float("inf") if torch.is_autocast_enabled("cpu") else value

    run = built(loss=overflowing)
    assert pace.settle_precision(run.parts) == "auto: the loss is not finite in bf16"
    assert run.parts.whole.precision.name == "fp32"


def test_a_loss_that_fails_fails_in_its_first_step_where_it_is_explained(tmp_path: Path) -> None:
    wrong = (torch.randn(64, 16), torch.full((64,), 500))
    with pytest.raises(sf.DataError, match="target 500 is out of range at step 0"):
        built(tmp_path / "run", train=wrong).train()


def test_small_models_and_loops_of_ones_own_are_not_asked(quick: dict[str, float]) -> None:
    small = built(model=lambda: nn.Linear(16, 400))
    assert pace.settle_precision(small.parts) is None
    assert (small.parts.whole.precision.name, small.parts.whole.precision.open) == ("fp32", False)
    own = built(loss=None)
    assert pace.settle_precision(own.parts) is None
    assert own.parts.whole.precision.name == "fp32"


def test_the_header_and_the_plan_say_what_was_chosen_and_why(
    quick: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    built(console=True).train()
    assert "device  cpu, bf16 (auto: 2.0 times as fast as fp32)" in capsys.readouterr().out
    chosen = str(plan.sections(built().parts)[-1])
    assert "precision bf16 (auto: 2.0 times as fast as fp32)" in chosen
