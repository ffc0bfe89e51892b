"""What is given to `run.register_state`: optimizers, schedulers, generators, modules, metrics;
killed, they go on with every bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from module_protocols import equal_bits
from rank_processes import forks, on_ranks
from refused import refused
from same_bits import assert_same_bits
from surefoot.errors import CheckpointError

STEPS = 9


def build(run_dir: Path, **changes: Any) -> sf.Run:
    return sf.Run(
        model=lambda: nn.Linear(3, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.linspace(-1, 1, 24).view(8, 3),),
        batch_size=4,
        optimizer=sf.optim.sgd(lr=0.1),
        length=f"{STEPS} steps",
        save_every="2 steps",
        run_dir=run_dir,
        console=False,
        report=False,
        **changes,
    )


class Body:
    """What the body of a loop has of its own: a second model with optimizers, a scheduler, a
    generator, a scaler.
    """

    def __init__(
        self,
        scheduler: Callable[[Any], Any] = lambda adam: torch.optim.lr_scheduler.StepLR(adam, 2),
    ) -> None:
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.inputs = torch.arange(8.0).view(4, 2)
        with torch.no_grad():
            self.net[0].weight.fill_(0.3)  # type: ignore[operator,union-attr]
            self.net[0].bias.fill_(0.1)  # type: ignore[operator,union-attr]
        self.point = torch.tensor([3.0, -2.0], requires_grad=True)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=0.05, amsgrad=True)
        self.lbfgs = torch.optim.LBFGS([self.point], lr=0.1, max_iter=2, history_size=3)
        self.scheduler = scheduler(self.adam)
        self.generator = torch.Generator().manual_seed(5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]

    def register(self, run: sf.Run) -> None:
        for name in ("net", "point", "adam", "lbfgs", "scheduler", "generator", "scaler"):
            run.register_state(name, vars(self)[name])

    def step(self) -> None:
        noise = torch.rand(4, 2, generator=self.generator)
        self.scaler.scale(self.net(self.inputs + noise).square().sum()).backward()
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad()
        self.scheduler.step()
        self.lbfgs.step(self.closure)

    def closure(self) -> Tensor:
        self.lbfgs.zero_grad()
        loss = (1 - self.point[0]) ** 2 + 5 * (self.point[1] - self.point[0] ** 2) ** 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def train(run_dir: Path, body: Body, *, killed_at: int | None = None) -> None:
    run = build(run_dir)
    with run:
        body.register(run)
        for step in run:
            body.step()
            if step.index == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


@forks
def test_optimizers_scheduler_generator_scaler_and_module_go_on_after_kills_as_if_left_alone(
    tmp_path: Path,
) -> None:
    def train_to(killed_at: int) -> Callable[[int], None]:
        return lambda _: train(tmp_path / "run", Body(), killed_at=killed_at)

    whole = Body()
    train(tmp_path / "whole", whole)
    assert on_ranks(1, train_to(3)) == [-signal.SIGKILL]
    assert on_ranks(1, train_to(6)) == [-signal.SIGKILL]
    resumed = Body()
    train(tmp_path / "run", resumed)

    assert resumed.scaler.get_scale() == whole.scaler.get_scale() != 8.0
    assert resumed.scheduler.state_dict() == whole.scheduler.state_dict()
    assert equal_bits(resumed.generator.get_state(), whole.generator.get_state())
    assert equal_bits(resumed.point, whole.point)
    for name, tensor in whole.net.state_dict().items():
        assert equal_bits(resumed.net.state_dict()[name], tensor)
    assert repr(resumed.adam.state_dict()) == repr(whole.adam.state_dict())
    assert repr(resumed.lbfgs.state_dict()) == repr(whole.lbfgs.state_dict())


def restore(run_dir: Path, saved: Any, other: Any) -> Any:
    """Keep one object, and give another in its place to a second session, which restores it."""
    with build(run_dir, stop_after="1 steps") as first:
        first.register_state("x", saved)
        for _ in first:
            pass
    with build(run_dir) as second:
        return second.register_state("x", other)


def test_integer_keys_come_back_as_integers_in_their_order_beside_the_same_texts(
    tmp_path: Path,
) -> None:
    nested = {
        2: {"0": torch.zeros(1), 0: torch.ones(1), -1: None, 10**30: [{1: {}}]},
        "a": 1,
        1: True,
        "1": (2.5,),
    }

    restored = restore(tmp_path / "run", nested, {})

    assert repr(restored) == repr(nested)


def test_whoever_holds_a_part_of_a_kept_object_has_it_back_too(tmp_path: Path) -> None:
    def fresh(number: float) -> dict[str, Any]:
        center = torch.full((2,), number)
        return {
            "center": center,
            "of": {"n": number, "list": [center + 1, number]},
            "pair": (center + 2, number),
            "new": None,
        }

    parts = fresh(0.0)
    center = parts["center"]
    inner = parts["of"]
    entries = parts["of"]["list"]
    paired, _ = parts["pair"]
    saved = fresh(3.0) | {"new": torch.ones(1)}

    restored = restore(tmp_path / "run", saved, parts)

    assert restored is parts
    assert repr(restored) == repr(saved)
    assert center is restored["center"]
    assert inner is restored["of"]
    assert entries is restored["of"]["list"]
    assert paired is restored["pair"][0]


@pytest.mark.parametrize("key", [True, None, 1.5, (1, 2), b"x"])
def test_other_keys_are_refused_by_name(key: Any, tmp_path: Path) -> None:
    refusal = refused("not-writable-into-checkpoint", CheckpointError, name="'x/inner'")

    with build(tmp_path / "run") as run, refusal:
        run.register_state("x", {"inner": {key: 1}})


@pytest.mark.parametrize("value", [(1, 2), 3, "text", {1, 2}, None])
def test_what_could_not_be_put_back_in_place_is_refused_at_once(value: Any, tmp_path: Path) -> None:
    refusal = refused("object-not-saved", CheckpointError, setting="x")

    with build(tmp_path / "run") as run, refusal:
        run.register_state("x", value)


def sequential(adam: Any) -> Any:
    constant = torch.optim.lr_scheduler.ConstantLR(adam)
    exponential = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    return torch.optim.lr_scheduler.SequentialLR(adam, [constant, exponential], milestones=[3])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda adam: torch.optim.lr_scheduler.CosineAnnealingLR(adam, 7),
    "multi-step": lambda adam: torch.optim.lr_scheduler.MultiStepLR(adam, [2, 4, 4]),
    "restarts": lambda adam: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(adam, 3),
    "one cycle": lambda adam: torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=9),
    "lambda": lambda adam: torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 0.9**epoch),
    "sequential": sequential,
    "plateau": lambda adam: torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0),
}


class Scheduled:
    """A scheduler and its optimizer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        self.scheduler = SCHEDULERS[kind](self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.optimizer.load_state_dict(state["optimizer"])

    def steps(self, count: int) -> None:
        for number in range(count):
            self.optimizer.step()
            if self.kind == "plateau":
                self.scheduler.step(1.0 + number % 2)
            else:
                self.scheduler.step()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_of_torch_go_on_as_if_left_alone(kind: str, tmp_path: Path) -> None:
    saved = Scheduled(kind)
    saved.steps(3)
    restored = restore(tmp_path / "run", saved, Scheduled(kind))

    saved.steps(4)
    restored.steps(4)

    assert restored.scheduler.state_dict() == saved.scheduler.state_dict()
    assert restored.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]


@pytest.mark.slow
def test_metrics_go_on_with_state_that_their_state_dict_leaves_out(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip(
        "torchmetrics", reason="torchmetrics is no part of this installation"
    )

    def fresh() -> Any:
        kinds = {
            "mean": torchmetrics.MeanMetric(),
            "cat": torchmetrics.CatMetric(),
            "sum": torchmetrics.SumMetric(),
        }
        return torchmetrics.MetricCollection(kinds)

    saved = fresh()
    for value in (1.0, 4.0):
        saved(torch.tensor(value))
    restored = restore(tmp_path / "run", saved, fresh())

    saved(torch.tensor(7.0))
    restored(torch.tensor(7.0))

    assert repr(restored.compute()) == repr(saved.compute())
    assert restored.compute()["mean"] == 4.0


class Versioned(nn.Linear):
    """Takes a state without its version for one in which weights were turned."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *more: Any) -> None:
        if versions.get("version") != 2:
            state[prefix + "weight"] = state[prefix + "weight"].t()
        super()._load_from_state_dict(state, prefix, versions, *more)


def test_a_kept_module_comes_back_with_the_versions_of_its_parts(tmp_path: Path) -> None:
    saved = nn.Sequential(Versioned(3, 3))

    restored = restore(tmp_path / "run", saved, nn.Sequential(Versioned(3, 3)))

    assert_same_bits(restored.state_dict(), saved.state_dict())


class Forgets:
    """Takes back one of its two numbers."""

    def __init__(self, *, tensor: bool, wrong: str = "forgets") -> None:
        self.first = 0.5
        self.second = 0.5
        self.tensor = tensor
        self.wrong = wrong

    def state_dict(self) -> dict[str, Any]:
        second = torch.tensor(self.second) if self.tensor else self.second
        return {"first": self.first, "second": second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.wrong == "raises":
            raise KeyError("third")
        self.first = state["first"]


@pytest.mark.parametrize(
    ("tensor", "wrong", "named"),
    [
        (False, "forgets", "numbers"),
        (True, "forgets", "x/second"),
        (True, "raises", "KeyError: 'third'"),
    ],
)
def test_an_object_that_does_not_take_its_state_back_is_refused(
    tensor: bool, wrong: str, named: str, tmp_path: Path
) -> None:
    saved = Forgets(tensor=tensor)
    saved.first = 1.5
    saved.second = 1.5

    with refused("saved-state-not-restored", CheckpointError) as caught:
        restore(tmp_path / "run", saved, Forgets(tensor=tensor, wrong=wrong))

    assert named in caught.value.fields["difference"]
