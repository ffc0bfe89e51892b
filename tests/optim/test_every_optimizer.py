"""What every optimizer must do in a run: resume to the same bits, skip, accumulate, average, take
its group's rate. (8 s)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from same_bits import weights
from surefoot.optim.build import build_optimizer
from surefoot.optim.kinds.kind import state_bytes
from surefoot.optim.optimizers import OptimizerSpec
from surefoot.optim.param_groups import ParameterGroup
from surefoot.optim.skip_step import skipping

SAMPLES = 32
BATCH = 4
STEPS = 8


class OfAUser(torch.optim.Optimizer):
    """Heavy ball with a counter, as somebody may write it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                ball = state.setdefault("ball", torch.zeros_like(parameter))
                state["updates"] = state.get("updates", 0) + 1
                ball.mul_(0.9).add_(parameter.grad)
                parameter.sub_(ball, alpha=group["lr"] / state["updates"])


MAKERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: sf.optim.adamw(1e-2, weight_decay=0.1),
    "adam": lambda: sf.optim.adam(1e-2, weight_decay=0.1),
    "sgd": lambda: sf.optim.sgd(1e-2, momentum=0.9, weight_decay=0.1),
    "lion": lambda: sf.optim.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: sf.optim.adafactor(1e-2, weight_decay=0.1),
    "muon": lambda: sf.optim.muon(1e-2, weight_decay=0.1),
    "nadam": lambda: sf.optim.nadam(1e-2, weight_decay=0.1),
    "radam": lambda: sf.optim.radam(1e-2, weight_decay=0.1),
    "adamw8bit": lambda: (
        pytest.importorskip("bitsandbytes") and sf.optim.adamw8bit(1e-2, weight_decay=0.1)
    ),
    "schedule_free": lambda: sf.optim.schedule_free(1e-2, weight_decay=0.1),
    "a user's": lambda: lambda groups: OfAUser(groups, lr=1e-2),
}
EVERY = pytest.mark.parametrize("name", MAKERS)
SPECS = pytest.mark.parametrize("name", [name for name in MAKERS if name != "a user's"])


class Net(nn.Sequential):
    """A kernel, a matrix large enough for 8 bits, batch statistics and a head."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8)),
            nn.Conv1d(1, 4, 3),
            nn.Flatten(),
            nn.Linear(24, 180),
            nn.BatchNorm1d(180),
            nn.Tanh(),
            nn.Linear(180, 3),
        )


class Smooth(nn.Sequential):
    """The same without batch statistics, in float64."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
        )
        self.double()


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def data(*bad: int, double: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs, with a NaN in the samples that are `bad`, and labels."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    inputs[list(bad), 1] = torch.nan
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    if double:
        inputs = inputs.double()
    return inputs, labels


def build(name: str, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": data(),
        "batch_size": BATCH,
        "length": f"{STEPS} steps",
        "optimizer": MAKERS[name](),
        "schedule": sf.schedules.constant(warmup="2 steps"),
        "ema": None if name == "schedule_free" else 0.9,
        "precision": "fp32",
        "device": "cpu",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def bits(run: sf.Run) -> dict[str, bytes]:
    """Every bit of weights, buffers, averages as they would be scored, and optimizer state."""
    (average,) = run.state.ema_models.values()
    trained = run.state.optimizers["model"]
    live = run.state.models["model"]
    average.refresh(live)
    tensors = {f"model/{name}": tensor for name, tensor in live.state_dict().items()}
    tensors |= {f"average/{name}": tensor for name, tensor in average.model.state_dict().items()}
    for place, parameter in enumerate(trained.parameters):
        for key, value in trained.optimizer.state[parameter].items():
            tensors[f"optimizer/{place}/{key}"] = torch.as_tensor(value)
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


@EVERY
def test_four_steps_a_resume_and_four_more_are_eight_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = build(name)
    whole.train()
    build(name, run_dir=tmp_path / "run", stop_after="4 steps").train()
    resumed = build(name, run_dir=tmp_path / "run")
    resumed.train()

    assert resumed.state.step == STEPS
    assert bits(resumed) == bits(whole)


@cache
def first_samples() -> list[int]:
    """The first sample of each step, which does not depend on the optimizer."""
    with build("sgd") as run:
        return [int(step.micro_batches[0].sample_ids[0]) for step in run]


@EVERY
@pytest.mark.parametrize("bad_step", [0, 3])
def test_a_step_with_a_gradient_that_is_no_number_changes_no_bit(name: str, bad_step: int) -> None:
    run = build(name, train_data=data(first_samples()[bad_step]))
    states = [bits(run)]
    with run:
        for _ in run:
            states.append(bits(run))

    for step, (before, after) in enumerate(pairwise(states)):
        if step == bad_step:
            assert {key: after[key] for key in before} == before
        else:
            assert after != before
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


@EVERY
def test_steps_do_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    def trained_weights(micro_batch_size: int) -> dict[str, Tensor]:
        run = build(
            name,
            train_data=data(double=True),
            model=Smooth,
            micro_batch_size=micro_batch_size,
            clip="norm 0.5",
        )
        run.train()
        return weights(run)

    tolerance = 1e-9
    if name in ("adamw8bit", "muon"):
        # moments in 8 bits, and matrices orthogonalised in bfloat16, may round to the next number
        tolerance = 1e-4
    torch.testing.assert_close(
        trained_weights(1), trained_weights(4), rtol=tolerance, atol=tolerance
    )


@SPECS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_moved_as_those_of_32_are(name: str, dtype: torch.dtype) -> None:
    expected = change_in_one_step(name, torch.float32)
    change = change_in_one_step(name, dtype)

    assert float(expected.abs().max()) > 0.01
    assert float((change - expected).norm() / expected.norm()) < 0.1


def change_in_one_step(name: str, dtype: torch.dtype) -> Tensor:
    model = nn.Linear(64, 80, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, 0.5)
    group = ParameterGroup("all", 0.1, [model.weight], ["weight"], hidden=name == "muon")
    spec: OptimizerSpec = MAKERS[name]()
    optimizer = build_optimizer(spec, [group])
    for group_of_torch in optimizer.param_groups:
        group_of_torch["lr"] = 0.1
        if group_of_torch.get("eps") == 1e-8:
            group_of_torch["eps"] = 1e-3  # what float16 can hold
    gradient = torch.randn(80, 64, generator=torch.Generator().manual_seed(0))
    # none so small that its square is 0 in float16
    model.weight.grad = (gradient + gradient.sign()).to(dtype)

    skipping(optimizer, torch.device("cpu")).apply(optimizer, torch.tensor(0.0))

    return 0.5 - model.weight.detach().float()


@SPECS
def test_a_group_moves_by_its_own_share_of_the_rate(name: str) -> None:
    spec: OptimizerSpec = MAKERS[name]()
    model = nn.Linear(4, 4)
    is_hidden = name == "muon"
    groups = [
        ParameterGroup("all", 0.0, [model.weight], ["weight"], rate=0.25, hidden=is_hidden),
        ParameterGroup("all", 0.0, [model.bias], ["bias"]),
    ]

    rates = [group["lr"] for group in build_optimizer(spec, groups).param_groups]

    assert rates == [spec.lr * 0.25, spec.lr]


@SPECS
def test_the_memory_that_plan_announces_is_what_the_state_takes(name: str) -> None:
    run = build(name)
    optimizer = run.state.optimizers["model"].optimizer
    announced = state_bytes(optimizer)

    run.train()

    counters = ("step", "weight_sum", "mu_product")
    taken = 0
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in counters:
                taken += value.nbytes
    assert announced == taken


@SPECS
def test_what_trains_has_a_lower_loss(name: str) -> None:
    splits = {"all": sf.Split(data(), batch_size=32)}
    run = build(name, length="15 steps", batch_size=32, splits=splits)
    before = run.evaluate()["all/loss"]

    run.train()

    assert run.evaluate()["all/loss"] < before - 0.02
