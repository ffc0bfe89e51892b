"""Schedules from a function and from a scheduler: torch's numbers, exact resumes, and what is
refused. (4 s)
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import surefoot as sf
from forked import Forked
from in_one import in_one
from refused import refused, refused_change
from stated import numbers_in
from surefoot.config.durations import Length
from surefoot.schedules.joined import bound
from surefoot.tools.plan.summary import learning_rates

STEPS = 12
LENGTH = Length(steps=STEPS, samples_per_epoch=100, batch_size=10)
LR = 0.05
from_function = sf.schedules.from_function
from_scheduler = sf.schedules.from_scheduler


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


def zeros() -> nn.Module:
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def build_run(**changes: Any) -> sf.Run:
    """A run in which each step sees all data."""
    settings: dict[str, Any] = {
        "model": zeros,
        "loss": squares,
        "train_data": data(),
        "batch_size": 8,
        "length": f"{STEPS} steps",
        "precision": "fp32",
        "clip": "off",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def train_weights(**changes: Any) -> Tensor:
    run = build_run(**changes)
    run.train()
    return run.state.models["model"].weight.detach()


def train_in_plain_loop(make_optimizer: Any, make_scheduler: Any) -> Tensor:
    model = zeros()
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        squares(model, data()).backward()
        optimizer.step()
        if step < STEPS - 1:
            scheduler.step()
    return model.weight.detach()


SCHEDULERS = {
    "relative": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.1),
    "recursive": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "its own lowest rate": lambda optimizer: lr_scheduler.CosineAnnealingLR(
        optimizer, STEPS, eta_min=0.01
    ),
    "its own rates and momentum": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=STEPS
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, T_mult=2),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.MultiStepLR(optimizer, [3, 7]),
        ]
    ),
}


# at least one of each class of torch.optim.lr_scheduler that depends on the step alone
OF_TORCH = {
    **SCHEDULERS,
    "by factors": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, lambda step: 1 - step / 20
    ),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 8, power=2.0),
    "of each group": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1 / (1 + step) for _ in optimizer.param_groups]
    ),
    "restarts to a rate": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 3, eta_min=0.01
    ),
    "in three phases": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=STEPS, three_phase=True
    ),
    "cyclic, rates alone": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.1, 4, mode="triangular2", cycle_momentum=False
    ),
    "chained sequence": lambda optimizer: lr_scheduler.ChainedScheduler(
        [SCHEDULERS["in sequence"](optimizer), SCHEDULERS["relative"](optimizer)],
        optimizer=optimizer,
    ),
    "of averaging": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=5),
}
OF_A_METRIC = {"ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau}
ABSTRACT = {"LRScheduler", "_LRScheduler"}


def classes_within(scheduler: Any) -> set[str]:
    """The names of its class, and of those of the schedulers that it is made of."""
    names = {type(scheduler).__name__}
    for inner in vars(scheduler).get("_schedulers", ()):
        names |= classes_within(inner)
    return names


@dataclass(frozen=True)
class Optimizer:
    """One optimizer of torch, and the same one as surefoot declares it."""

    make: Callable[..., torch.optim.Optimizer]
    declared: Any
    group: dict[str, Any]

    def momentum_of(self, optimizer: torch.optim.Optimizer) -> float:
        group = optimizer.param_groups[0]
        return group["momentum"] if "momentum" in group else group["betas"][0]


OPTIMIZERS = {
    "sgd": Optimizer(
        make=partial(torch.optim.SGD, lr=LR, momentum=0.9),
        declared=sf.optim.sgd(LR, momentum=0.9),
        group={"lr": LR, "momentum": 0.9},
    ),
    "adam": Optimizer(
        make=partial(torch.optim.Adam, lr=LR),
        declared=sf.optim.adam(LR),
        group={"lr": LR, "betas": (0.9, 0.999)},
    ),
}


def assert_taken(make_scheduler: Any, name: str) -> set[str]:
    """The table has each step's rate and momentum of a plain loop, for one group and for two."""
    classes = set[str]()
    for kind in OPTIMIZERS.values():
        for groups in (1, 2):
            classes |= assert_rates_and_momenta(make_scheduler, name, kind, groups)
    return classes


def assert_rates_and_momenta(
    make_scheduler: Any, name: str, kind: Optimizer, groups: int
) -> set[str]:
    optimizer = kind.make([{"params": [torch.zeros(1)]} for _ in range(groups)])
    schedule = bound(from_scheduler(make_scheduler), (kind.group,) * groups)
    factor = schedule.factors(LENGTH)
    momentum = schedule.momentum(LENGTH) or (lambda step: 0.9)

    with warnings.catch_warnings(action="ignore"):
        scheduler = make_scheduler(optimizer)
        for step in range(STEPS):
            rate = optimizer.param_groups[0]["lr"]
            assert LR * factor(step) == pytest.approx(rate, rel=1e-12, abs=1e-15), (name, step)
            assert momentum(step) == pytest.approx(kind.momentum_of(optimizer)), (name, step)
            if step < STEPS - 1:
                optimizer.step()
                scheduler.step()
    return classes_within(scheduler)


def assert_refused(make_scheduler: Any, name: str) -> None:
    with refused("scheduler-needs-metric", value=name, argument="metrics"):
        bound(from_scheduler(make_scheduler), ({"lr": LR},)).factors(LENGTH)


def test_every_scheduler_of_torch_is_taken_or_refused_by_name() -> None:
    taken = set[str]()
    for name, make_scheduler in OF_TORCH.items():
        taken |= assert_taken(make_scheduler, name)
    for name, make_scheduler in OF_A_METRIC.items():
        assert_refused(make_scheduler, name)

    of_torch = set()
    for name, value in vars(lr_scheduler).items():
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler):
            of_torch.add(name)
    assert of_torch == taken - {"SWALR"} | OF_A_METRIC.keys() | ABSTRACT


@in_one
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_with_a_scheduler_trains_what_a_plain_loop_with_it_trains(
    name: str, optimizer: str
) -> None:
    kind = OPTIMIZERS[optimizer]
    make_scheduler = SCHEDULERS[name]
    expected = train_in_plain_loop(kind.make, make_scheduler)

    weights = train_weights(optimizer=kind.declared, schedule=from_scheduler(make_scheduler))

    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@in_one
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_cycle_that_moves_the_momentum_trains_what_torch_s_trains(optimizer: str) -> None:
    def make_scheduler(optimizer: torch.optim.Optimizer) -> lr_scheduler.OneCycleLR:
        return lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=4 / STEPS)

    kind = OPTIMIZERS[optimizer]
    moving = sf.schedules.one_cycle(3, min_lr_ratio=1 / 25e4, momentum_range=(0.85, 0.95))
    constant = sf.schedules.one_cycle(3, min_lr_ratio=1 / 25e4)
    expected = train_in_plain_loop(kind.make, make_scheduler)

    weights = train_weights(optimizer=kind.declared, schedule=moving)
    other_weights = train_weights(optimizer=kind.declared, schedule=constant)

    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    assert not torch.equal(other_weights, expected)


def falling_factors(lowest: float) -> sf.schedules.Schedule:
    return from_function(lambda step: 1.0 - (1.0 - lowest) * step / 40)


def cycle_of_torch(lowest: float) -> sf.schedules.Schedule:
    return from_scheduler(
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=40, base_momentum=lowest
        )
    )


def cycle_of_momentum(lowest: float) -> sf.schedules.Schedule:
    return sf.schedules.one_cycle(momentum_range=(lowest, 0.95))


def train_saved(run_dir: Path, schedule: sf.schedules.Schedule, **changes: str) -> Tensor:
    return train_weights(
        optimizer=sf.optim.adamw(LR), schedule=schedule, run_dir=run_dir, report=False, **changes
    )


@in_one
@pytest.mark.parametrize(
    ("make_schedule", "setting"),
    [
        (falling_factors, "schedule.factors"),
        (cycle_of_torch, "schedule.factors"),
        (cycle_of_momentum, "schedule.momentum_range"),
    ],
)
def test_a_resume_is_bit_equal_and_one_with_other_factors_is_refused(
    make_schedule: Any, setting: str, tmp_path: Path
) -> None:
    whole = train_saved(tmp_path / "whole", make_schedule(0.5))
    train_saved(tmp_path / "cut", make_schedule(0.5), stop_after="4 steps")

    with refused_change(setting):
        train_saved(tmp_path / "cut", make_schedule(0.6))
    assert torch.equal(train_saved(tmp_path / "cut", make_schedule(0.5)), whole)


def test_a_run_with_a_function_goes_on_to_more_steps(tmp_path: Path) -> None:
    """The function does not know how long the run is."""
    schedule = falling_factors(0.5)
    longer = train_saved(tmp_path / "longer", schedule, length="14 steps")

    train_saved(tmp_path / "run", schedule)

    assert torch.equal(train_saved(tmp_path / "run", schedule, length="14 steps"), longer)


def test_factors_of_a_function_are_those_of_every_step_and_joined_too() -> None:
    rising = from_function(lambda step: 0.1 * step)
    schedule = sf.schedules.join(rising, sf.schedules.constant(), at=3)

    factor = schedule.factors(LENGTH)

    assert [factor(step) for step in range(5)] == [0.0, 0.1, 0.2, 1.0, 1.0]


# --- a factor for each group ----------------------------------------------------------------------

BY_GROUP: dict[str, Any] = {
    "lambdas": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step]
    ),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, [lambda step: 0.9, lambda step: 0.5]
    ),
    "one cycle of two rates": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.2, 0.02], total_steps=STEPS, cycle_momentum=False
    ),
    "its own lowest rate": SCHEDULERS["its own lowest rate"],
    "averaging": lambda optimizer: SWALR(optimizer, swa_lr=[0.03, 0.004], anneal_epochs=5),
}


def in_two_groups(params: Any, **settings: Any) -> torch.optim.Optimizer:
    """One group for each of two parameters, with rates of their own."""
    if isinstance(params[0], dict):
        params = params[0]["params"]
    weight, bias = params
    groups = [{"params": [weight]}, {"params": [bias], "lr": settings.pop("second", 0.01)}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, **settings)


def with_bias() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def run_by_group(schedule: Any, **changes: Any) -> sf.Run:
    """A run with a schedule, or with a function that makes a scheduler."""
    if callable(schedule):
        schedule = from_scheduler(schedule)
    settings: dict[str, Any] = {
        "model": with_bias,
        "loss": squares,
        "train_data": data(),
        "batch_size": 8,
        "order": "sequential",
        "length": f"{STEPS} steps",
        "optimizer": in_two_groups,
        "schedule": schedule,
        "console": False,
        "report": False,
        "device": "cpu",
    }
    return sf.Run(**(settings | changes))


def rates_by_group(run: sf.Run) -> list[list[float]]:
    rates = []
    with run:
        for _ in run:
            groups = run.state.optimizers["model"].optimizer.param_groups
            rates.append([group["lr"] for group in groups])
    return rates


def rates_of_torch(make: Any, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    rates = []
    scheduler = make(optimizer)
    with warnings.catch_warnings(action="ignore"):
        for step in range(STEPS):
            rates.append([group["lr"] for group in optimizer.param_groups])
            if step < STEPS - 1:
                scheduler.step()
    return rates


@in_one
@pytest.mark.parametrize("second", [0.01, LR])
@pytest.mark.parametrize("name", BY_GROUP)
def test_each_group_has_the_rates_that_torch_gives_it(name: str, second: float) -> None:
    make_optimizer = partial(in_two_groups, second=second)
    optimizer = make_optimizer([*with_bias().parameters()])
    expected = rates_of_torch(BY_GROUP[name], optimizer)

    rates = rates_by_group(run_by_group(BY_GROUP[name], optimizer=make_optimizer))

    for step in range(STEPS):
        assert rates[step] == pytest.approx(expected[step], rel=1e-12), step


def test_factors_by_group_resume_and_verify(tmp_path: Path) -> None:
    def other_lambdas(optimizer: torch.optim.Optimizer) -> lr_scheduler.LambdaLR:
        return lr_scheduler.LambdaLR(
            optimizer, [lambda step: 1 / (1 + step), lambda step: 0.8**step]
        )

    make_scheduler = BY_GROUP["lambdas"]
    whole = run_by_group(make_scheduler)
    expected = rates_by_group(whole)
    run_dir = tmp_path / "run"
    rates = rates_by_group(run_by_group(make_scheduler, run_dir=run_dir, stop_after="5 steps"))

    with refused_change("schedule.factors"):
        run_by_group(other_lambdas, run_dir=run_dir).train()
    resumed = run_by_group(make_scheduler, run_dir=run_dir)
    rates += rates_by_group(resumed)

    assert rates == expected
    assert all(map(torch.equal, resumed.state.parameters, whole.state.parameters))
    verdict = sf.load(run_by_group(make_scheduler, run_dir=run_dir)).verify()
    assert verdict.problems == []


def test_one_scheduler_has_a_factor_for_each_group_of_several_optimizers() -> None:
    def joint(models: Any, batch: Any) -> Tensor:
        return squares(lambda inputs: models["b"](models["a"](inputs)), batch)

    def three(optimizer: Any) -> Any:
        assert len(optimizer.param_groups) == 3
        powers = [lambda step: 0.9**step, lambda step: 0.8**step, lambda step: 0.7**step]
        return lr_scheduler.LambdaLR(optimizer, powers)

    one_group = partial(torch.optim.SGD, lr=LR)
    run = run_by_group(
        three,
        model={"a": lambda: nn.Linear(3, 3, bias=False), "b": with_bias},
        optimizer={"a": one_group, "b": in_two_groups},
        loss=joint,
    )

    run.train()

    assert last_rates(run, "a") == pytest.approx([LR * 0.9**11])
    assert last_rates(run, "b") == pytest.approx([LR * 0.8**11, 0.01 * 0.7**11])


def last_rates(run: sf.Run, model: str) -> list[float]:
    return [group["lr"] for group in run.state.optimizers[model].optimizer.param_groups]


def test_schedules_by_group_are_joined() -> None:
    schedule = sf.schedules.join(from_scheduler(BY_GROUP["lambdas"]), sf.schedules.constant(), at=3)

    rates = rates_by_group(run_by_group(schedule))

    for step in range(3):
        assert rates[step] == pytest.approx([LR / (1 + step), 0.01 * 0.9**step])
    for step in (3, 4):
        assert rates[step] == pytest.approx([LR, 0.01])


def test_a_list_for_each_rate_is_taken_where_the_run_splits_groups_by_decay() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))

    halved = sf.optim.LRMultipliers(lambda model: {"2.bias": 0.5}, identity={"bias": 0.5})
    spec = sf.optim.adamw(LR, weight_decay=0.1, lr_multipliers=[halved])
    run = run_by_group(BY_GROUP["lambdas"], model=model, optimizer=spec)

    assert last_rates(run, "model") == [LR, LR, LR / 2]
    assert rates_by_group(run)[4] == pytest.approx([LR / 5, LR / 5, LR / 2 * 0.9**4])


def test_factors_by_group_do_not_go_with_further_groups() -> None:
    def frozen_head() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 1), nn.LayerNorm(1))
        model[0].requires_grad_(False)
        model[1].weight.requires_grad_(True)
        return model

    halved = sf.optim.LRMultipliers(lambda model: {"1.bias": 0.5}, identity={"bias": 0.5})
    spec = sf.optim.adamw(LR, weight_decay=0.1, lr_multipliers=[halved])
    lowest = SCHEDULERS["its own lowest rate"]
    run = run_by_group(lowest, model=frozen_head, optimizer=spec)
    with refused("factors-of-former-groups"), run:
        for _ in run:
            run.state.model[0].requires_grad_(True)  # type: ignore[index]


# --- schedulers of timm ---------------------------------------------------------------------------


class LikeTimm:
    """A scheduler with the calls of timm's: `step(epoch)` after an epoch, `step_update` after an
    update.
    """

    def __init__(self, optimizer: Any, *, in_epochs: bool) -> None:
        self.optimizer = optimizer
        self.in_epochs = in_epochs
        self.calls = list[Any]()
        self.bases = [group["lr"] for group in optimizer.param_groups]
        self._set(0)

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(("step", epoch))
        if self.in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls.append(("step_update", num_updates))
        if not self.in_epochs:
            self._set(num_updates)

    def _set(self, time: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.bases, strict=True):
            group["lr"] = base * group.get("lr_scale", 1.0) * 0.5**time


@pytest.mark.parametrize(
    ("in_epochs", "times"), [(False, [0, 1, 2, 3, 4, 5, 6]), (True, [0, 0, 0, 1, 1, 2, 2])]
)
def test_a_scheduler_of_timm_gets_the_calls_of_timms_loop(
    in_epochs: bool, times: list[int]
) -> None:
    schedulers = list[LikeTimm]()

    def make_scheduler(optimizer: Any) -> Any:
        schedulers.append(LikeTimm(optimizer, in_epochs=in_epochs))
        return schedulers[-1], 300  # as create_scheduler_v2 does

    length = Length(steps=7, samples_per_epoch=25, batch_size=10)
    factor = from_scheduler(make_scheduler).factors(length)

    assert [factor(step) for step in range(7)] == [0.5**time for time in times]
    updates = [number for name, number in schedulers[-1].calls if name == "step_update"]
    assert updates == [1, 2, 3, 4, 5, 6]


def test_scales_of_layers_in_groups_are_factors_by_group() -> None:
    def scaled(params: Any) -> torch.optim.Optimizer:
        weight, bias = params[0]["params"]
        groups = [{"params": [weight], "lr_scale": 0.25}, {"params": [bias], "lr_scale": 1.0}]
        return torch.optim.SGD(groups, lr=LR)

    run = run_by_group(partial(LikeTimm, in_epochs=False), optimizer=scaled)
    assert rates_by_group(run)[2] == pytest.approx([LR / 16, LR / 4])


FOUR_EPOCHS = Length(steps=20, samples_per_epoch=50, batch_size=10)


@in_one
@pytest.mark.parametrize("name", ["cosine", "tanh", "step", "multistep", "poly", "wsd"])
@pytest.mark.parametrize("on_epochs", [True, False])
def test_schedulers_of_timm_itself(name: str, on_epochs: bool) -> None:
    factory = pytest.importorskip("timm.scheduler.scheduler_factory")
    make_scheduler = partial(
        factory.create_scheduler_v2,
        sched=name,
        num_epochs=4,
        decay_epochs=1,
        decay_milestones=[1, 3],
        warmup_epochs=1,
        step_on_epochs=on_epochs,
        updates_per_epoch=5,
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
    scheduler, _ = make_scheduler(optimizer)
    expected = []
    for epoch in range(4):
        for update in range(5):
            expected.append(optimizer.param_groups[0]["lr"])
            scheduler.step_update(num_updates=epoch * 5 + update + 1)
        scheduler.step(epoch + 1)

    factor = bound(from_scheduler(make_scheduler), ({"lr": LR},)).factors(FOUR_EPOCHS)

    assert [LR * factor(step) for step in range(20)] == pytest.approx(expected)


def test_a_scheduler_of_timm_that_needs_a_metric_is_refused() -> None:
    factory = pytest.importorskip("timm.scheduler.scheduler_factory")
    make_scheduler = partial(factory.create_scheduler_v2, sched="plateau")

    with refused("scheduler-needs-metric", value="PlateauLRScheduler"):
        bound(from_scheduler(make_scheduler), ({"lr": LR},)).factors(FOUR_EPOCHS)


def unfit(optimizer: Any) -> Any:
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)
    return lr_scheduler.StepLR(optimizer, 5)


@in_one
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: 1.0, "from_function(fn)"),
        (lr_scheduler.StepLR, "from_scheduler(fn)"),
        (
            lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 3),
            "from_scheduler(lambda optimizer: StepLR(optimizer, ...))",
        ),
        (sf.schedules.cosine, "schedule=sf.schedules.cosine(...)"),
        (lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)])), "plateau="),
        (lr_scheduler.ReduceLROnPlateau, "plateau="),
        (sf.ReduceLROnPlateau("min val/loss", patience=3), "plateau="),
        ("cosine", "sf.schedules.cosine(...)"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_to_write(schedule: Any, words: str) -> None:
    with refused("schedule-of-another-form", setting="schedule") as refusal:
        build_run(optimizer=sf.optim.adamw(LR), schedule=schedule)
    (remedy,) = refusal.value.remedies
    assert words in remedy


@in_one
@pytest.mark.parametrize(
    ("schedule", "code", "fields"),
    [
        (
            from_function(lambda step: 1.0 if step < 5 else -0.1),
            "schedule-factor-invalid",
            {"value": -0.1, "step": 5},
        ),
        (
            from_function(lambda step: None),
            "schedule-factor-invalid",
            {"value": None, "step": 0},
        ),
        (from_function(lambda step: "0.5"), "schedule-factor-invalid", {"value": "0.5", "step": 0}),
        (from_function(lambda step: float("nan")), "schedule-factor-invalid", {"step": 0}),
        (from_function(lambda step: 1 / (3 - step)), "schedule-function-failed", {"step": 3}),
        (
            from_scheduler(lr_scheduler.ReduceLROnPlateau),
            "scheduler-needs-metric",
            {"value": "ReduceLROnPlateau"},
        ),
        (
            from_scheduler(lambda optimizer: optimizer.param_groups),
            "scheduler-without-step",
            {"value": "list"},
        ),
        (
            from_scheduler(lambda _: lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 3)),
            "scheduler-of-another-optimizer",
            {"value": "StepLR"},
        ),
        (
            from_scheduler(
                lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS - 2)
            ),
            "scheduler-failed",
            {"step": 11, "steps": 12, "planned_steps": 10},
        ),
        (
            from_scheduler(lambda optimizer: lr_scheduler.StepLR(optimizer=optimizer)),
            "scheduler-not-built",
            {},
        ),
        (from_scheduler(unfit), "scheduler-changes-setting", {"setting": "betas"}),
        (
            sf.schedules.join(
                sf.schedules.one_cycle(momentum_range=(0.8, 0.9)), sf.schedules.constant()
            ),
            "joined-schedule-changes-momentum",
            {},
        ),
    ],
)
def test_a_schedule_that_fails_is_refused_before_the_first_step(
    schedule: Any, code: str, fields: dict[str, Any]
) -> None:
    with refused(code, **fields):
        train_weights(optimizer=sf.optim.adamw(LR), schedule=schedule)


def test_a_plateau_within_a_chain_is_refused_with_the_setting_for_it() -> None:
    def chain(optimizer: Any) -> Any:
        return lr_scheduler.ChainedScheduler([lr_scheduler.ReduceLROnPlateau(optimizer)])

    with refused("scheduler-not-built") as caught:
        train_weights(optimizer=sf.optim.adamw(LR), schedule=from_scheduler(chain))
    (remedy,) = caught.value.remedies
    assert "Run(plateau=sf.ReduceLROnPlateau" in remedy


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: from_function(lambda: 1.0), "step"),  # type: ignore[arg-type, misc]
        (lambda: from_function(3), "step"),  # type: ignore[arg-type]
        (lambda: from_scheduler(lr_scheduler.StepLR), "optimizer"),
        (
            lambda: from_scheduler(SCHEDULERS["relative"](torch.optim.SGD([torch.zeros(1)]))),
            "optimizer",
        ),
    ],
)
def test_what_is_no_function_of_one_argument_is_refused(build: Any, argument: str) -> None:
    with refused("schedule-not-a-function", argument=argument):
        build()


@in_one
@pytest.mark.parametrize(
    "optimizer",
    [sf.optim.sgd(LR), sf.optim.adafactor(LR), sf.optim.schedule_free(LR)],
    ids=lambda spec: spec.name,
)
def test_an_optimizer_whose_momentum_cannot_move_is_refused_by_name(optimizer: Any) -> None:
    with refused("schedule-without-momentum"):
        train_weights(
            optimizer=optimizer, schedule=sf.schedules.one_cycle(momentum_range=(0.8, 0.9))
        )


def build_run_of_two(optimizers: dict[str, Any], schedule: Any) -> sf.Run:
    def loss(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(models["first"], batch) + squares(models["second"], batch)

    models = {"first": zeros, "second": zeros}
    return build_run(model=models, loss=loss, optimizer=optimizers, schedule=schedule)


@in_one
@pytest.mark.parametrize("name", ["relative", "in sequence", "its own rates and momentum"])
def test_several_optimizers_share_one_schedule(name: str) -> None:
    """As in a plain loop, in which one torch optimizer has both groups."""
    optimizers = {"first": sf.optim.adam(LR), "second": sf.optim.adam(LR)}
    expected = train_in_plain_loop(OPTIMIZERS["adam"].make, SCHEDULERS[name])

    run = build_run_of_two(optimizers, from_scheduler(SCHEDULERS[name]))
    run.train()

    for model in run.state.models.values():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=1e-7)


def test_a_momentum_that_one_of_several_optimizers_has_not_is_refused() -> None:
    optimizers = {"first": sf.optim.sgd(LR, momentum=0.9), "second": sf.optim.adam(LR / 10)}
    cycle = from_scheduler(SCHEDULERS["its own rates and momentum"])

    with refused("scheduler-not-built") as caught:
        build_run_of_two(optimizers, cycle).train()
    assert "cycle_momentum=False" in caught.value.remedies[0]


def build_saved(run_dir: Path, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "optimizer": sf.optim.adamw(LR),
        "schedule": from_scheduler(SCHEDULERS["its own rates and momentum"]),
        "save_every": "3 steps",
        "log_every": "1 steps",
        "report": False,
        "run_dir": run_dir,
    }
    return build_run(**(settings | changes))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build_saved(run_dir).train()
    return run_dir


def test_a_killed_run_ends_with_the_same_bits(whole_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def train_until_killed() -> None:
        with build_saved(run_dir) as run:
            for step in run:
                if step.index == 7:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

    with open(os.devnull, "w") as nowhere:
        process = Forked(train_until_killed, stdout=nowhere)
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (run_dir / "checkpoints" / "step-00000003").exists()

    with refused_change("schedule.factors"):
        build_saved(run_dir, schedule=from_scheduler(SCHEDULERS["relative"])).train()
    resumed = build_saved(run_dir)
    resumed.train()

    whole_model = sf.load(build_saved(whole_run)).load_model(zeros())
    assert torch.equal(resumed.state.model.weight, whole_model.weight)


def test_plan_records_replay_and_verify_know_the_rates(whole_run: Path) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=LR)
    make_scheduler = SCHEDULERS["its own rates and momentum"]
    rates = [rate for (rate,) in rates_of_torch(make_scheduler, optimizer)]
    saved = sf.load(build_saved(whole_run))

    planned = "\n".join(learning_rates(build_saved(whole_run).parts))
    for step in (0, STEPS // 2, STEPS - 1):
        assert f"{rates[step]:.4g}" in planned

    assert [record["lr"] for record in saved.records("train")] == pytest.approx(rates)
    assert f"learning rate {rates[5]:.3g}"[:18] in str(saved.replay(step=5))
    verdict = saved.verify()
    assert verdict.sound
    assert [12] in [numbers_in(line) for line in verdict.proved]  # records with their rates


# arguments of the schedules of transformers that depend on the step alone
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "get_adafactor_schedule": {},
    "get_constant_schedule": {},
    "get_constant_schedule_with_warmup": {"num_warmup_steps": 3},
    "get_cosine_schedule_with_warmup": {"num_warmup_steps": 3, "num_training_steps": STEPS},
    "get_cosine_with_hard_restarts_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": STEPS,
        "num_cycles": 2,
    },
    "get_cosine_with_min_lr_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": STEPS,
        "min_lr": 1e-3,
    },
    "get_cosine_with_min_lr_schedule_with_warmup_lr_rate": {
        "num_warmup_steps": 3,
        "num_training_steps": STEPS,
        "min_lr_rate": 0.1,
        "warmup_lr_rate": 0.2,
    },
    "get_inverse_sqrt_schedule": {"num_warmup_steps": 3},
    "get_linear_schedule_with_warmup": {"num_warmup_steps": 3, "num_training_steps": STEPS},
    "get_polynomial_decay_schedule_with_warmup": {
        "num_warmup_steps": 3,
        "num_training_steps": STEPS,
    },
    "get_wsd_schedule": {"num_warmup_steps": 3, "num_training_steps": STEPS, "num_decay_steps": 4},
    "get_scheduler": {"name": "cosine", "num_warmup_steps": 3, "num_training_steps": STEPS},
}


@pytest.mark.slow
def test_schedulers_of_transformers_are_reproduced() -> None:
    """Each of `get_*schedule*` has the table of a plain loop, or needs a metric; importing
    transformers takes seconds.
    """
    optimization: Any = pytest.importorskip("transformers.optimization")
    of_a_metric = {
        "get_reduce_on_plateau_schedule": "ReduceLROnPlateau",
        "get_greedy_schedule": "GreedyLR",
    }
    names = {name for name in vars(optimization) if name.startswith("get_") and "schedule" in name}

    for name, arguments in OF_TRANSFORMERS.items():
        make_scheduler = getattr(optimization, name)
        # by keyword: the first argument of `get_scheduler` is a name
        assert_taken(
            lambda optimizer, make=make_scheduler, arguments=arguments: make(
                optimizer=optimizer, **arguments
            ),
            name,
        )
    for name, scheduler in of_a_metric.items():
        assert_refused(getattr(optimization, name), scheduler)
    assert names == OF_TRANSFORMERS.keys() | of_a_metric.keys()
    for kind in optimization.SchedulerType:  # of `TrainingArguments.lr_scheduler_type`
        assert optimization.TYPE_TO_SCHEDULER_FUNCTION[kind].__name__ in names


def one_cycle_of_torch(total_steps: int) -> sf.schedules.Schedule:
    return from_scheduler(
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
    )


def test_a_scheduler_planned_for_fewer_steps_is_refused_with_the_number_to_write() -> None:
    with refused("scheduler-failed", planned_steps=10, steps=STEPS):
        one_cycle_of_torch(10).factors(LENGTH)


def test_a_scheduler_planned_for_more_steps_is_noted() -> None:
    note = one_cycle_of_torch(20).resolved(LENGTH).note

    assert numbers_in(str(note))[:2] == [20, STEPS]  # planned steps, those of the run


def test_a_scheduler_planned_for_the_steps_of_the_run_has_no_note() -> None:
    assert one_cycle_of_torch(STEPS).resolved(LENGTH).note is None
