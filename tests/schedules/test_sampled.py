"""Schedules from a function and from a scheduler: torch's numbers, exact resumes, and what is
refused. (4 s)
"""

from __future__ import annotations

import os
import signal
import warnings
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


def trained(**settings: Any) -> Tensor:
    """The weights after a run in which each step sees all data."""
    fixed: dict[str, Any] = {
        "model": zeros,
        "loss": squares,
        "train_data": data(),
        "batch_size": 8,
        "length": f"{STEPS} steps",
        "precision": "fp32",
        "clip": "off",
        "console": False,
    }
    run = sf.Run(**(fixed | settings))
    run.train()
    return run.state.models["model"].weight.detach()


def plain_loop(optimizer_of: Any, scheduler_of: Any) -> Tensor:
    model = zeros()
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer)
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
    return {type(scheduler).__name__}.union(
        *map(classes_within, vars(scheduler).get("_schedulers", ()))
    )


def assert_taken(build: Any, name: str, *, optimizers: Any = ("sgd", "adam")) -> set[str]:
    """The table has each step's rate and momentum of a plain loop, for one group and for two."""
    within = set[str]()
    for kind in optimizers:
        for count in (1, 2):
            groups = [{"params": [torch.zeros(1)]} for _ in range(count)]
            optimizer: Any = (
                torch.optim.SGD(groups, lr=LR, momentum=0.9)
                if kind == "sgd"
                else torch.optim.Adam(groups, lr=LR)
            )
            own = (
                {"lr": LR, "momentum": 0.9} if kind == "sgd" else {"lr": LR, "betas": (0.9, 0.999)}
            )
            schedule = bound(from_scheduler(build), (own,) * count)
            factor = schedule.factors(LENGTH)
            momentum = schedule.momentum(LENGTH) or (lambda step: 0.9)
            with warnings.catch_warnings(action="ignore"):
                scheduler = build(optimizer)
                for step in range(STEPS):
                    group = optimizer.param_groups[0]
                    assert LR * factor(step) == pytest.approx(group["lr"], rel=1e-12, abs=1e-15), (
                        name,
                        step,
                    )
                    assert momentum(step) == pytest.approx(
                        group["momentum"] if kind == "sgd" else group["betas"][0]
                    ), name
                    if step < STEPS - 1:
                        optimizer.step()
                        scheduler.step()
            within |= classes_within(scheduler)
    return within


def assert_refused(build: Any, name: str) -> None:
    with refused("scheduler-needs-metric", value=name, argument="metrics"):
        bound(from_scheduler(build), ({"lr": LR},)).factors(LENGTH)


def test_every_scheduler_of_torch_is_taken_or_refused_by_name() -> None:
    taken = set[str]().union(*(assert_taken(build, name) for name, build in OF_TORCH.items()))
    for name, build in OF_A_METRIC.items():
        assert_refused(build, name)
    schedulers = {
        name
        for name, each in vars(lr_scheduler).items()
        if isinstance(each, type) and issubclass(each, lr_scheduler.LRScheduler)
    }
    assert schedulers == taken - {"SWALR"} | OF_A_METRIC.keys() | ABSTRACT


@in_one
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_run_with_a_scheduler_trains_what_a_plain_loop_with_it_trains(
    name: str, optimizer: str
) -> None:
    ours, theirs = {
        "sgd": (
            sf.optim.sgd(LR, momentum=0.9),
            lambda weights: torch.optim.SGD(weights, lr=LR, momentum=0.9),
        ),
        "adam": (sf.optim.adam(LR), lambda weights: torch.optim.Adam(weights, lr=LR)),
    }[optimizer]
    found = trained(optimizer=ours, schedule=from_scheduler(SCHEDULERS[name]))

    torch.testing.assert_close(found, plain_loop(theirs, SCHEDULERS[name]), rtol=1e-5, atol=1e-7)


@in_one
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_one_cycle_that_moves_the_momentum_trains_what_torch_s_trains(optimizer: str) -> None:
    ours, theirs = {
        "sgd": (
            sf.optim.sgd(LR, momentum=0.9),
            lambda weights: torch.optim.SGD(weights, lr=LR, momentum=0.9),
        ),
        "adam": (sf.optim.adam(LR), lambda weights: torch.optim.Adam(weights, lr=LR)),
    }[optimizer]
    schedule = sf.schedules.one_cycle(3, min_lr_ratio=1 / 25e4, momentum_range=(0.85, 0.95))
    expected = plain_loop(
        theirs,
        lambda made: lr_scheduler.OneCycleLR(made, LR, total_steps=STEPS, pct_start=4 / STEPS),
    )

    torch.testing.assert_close(
        trained(optimizer=ours, schedule=schedule), expected, rtol=1e-5, atol=1e-7
    )
    assert not torch.equal(
        trained(optimizer=ours, schedule=sf.schedules.one_cycle(3, min_lr_ratio=1 / 25e4)), expected
    )


@in_one
@pytest.mark.parametrize("kind", ["function", "scheduler", "one cycle"])
def test_a_resume_is_bit_equal_and_one_with_other_factors_is_refused(
    kind: str, tmp_path: Path
) -> None:
    def weights(out: str, lowest: float = 0.5, **changes: str) -> Tensor:
        schedule: Any = {
            "function": from_function(lambda step: 1.0 - (1.0 - lowest) * step / 40),
            "scheduler": from_scheduler(
                lambda optimizer: lr_scheduler.OneCycleLR(
                    optimizer, 0.05, total_steps=40, base_momentum=lowest
                )
            ),
            "one cycle": sf.schedules.one_cycle(momentum_range=(lowest, 0.95)),
        }[kind]
        return trained(
            optimizer=sf.optim.adamw(LR),
            schedule=schedule,
            run_dir=tmp_path / out,
            report=False,
            **changes,
        )

    weights("cut", stop_after="4 steps")
    changed = "schedule.momentum_range" if kind == "one cycle" else "schedule.factors"
    with refused_change(changed):
        weights("cut", lowest=0.6)
    assert torch.equal(weights("cut"), weights("whole"))
    if kind == "function":  # it does not know how long the run is
        assert torch.equal(weights("cut", length="14 steps"), weights("longer", length="14 steps"))


def test_factors_of_a_function_are_those_of_every_step_and_joined_too() -> None:
    schedule = sf.schedules.join(
        from_function(lambda step: 0.1 * step), sf.schedules.constant(), at=3
    )
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
    weight, bias = params[0]["params"] if isinstance(params[0], dict) else params
    groups = [{"params": [weight]}, {"params": [bias], "lr": settings.pop("second", 0.01)}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.9, **settings)


def with_bias() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


def run_by_group(schedule: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": with_bias,
        "loss": squares,
        "train_data": data(),
        "batch_size": 8,
        "order": "sequential",
        "length": f"{STEPS} steps",
        "optimizer": in_two_groups,
        "schedule": from_scheduler(schedule) if callable(schedule) else schedule,
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
    make = partial(in_two_groups, second=second)
    expected = rates_of_torch(BY_GROUP[name], make([*with_bias().parameters()]))
    found = rates_by_group(run_by_group(BY_GROUP[name], optimizer=make))
    for step in range(STEPS):
        assert found[step] == pytest.approx(expected[step], rel=1e-12), step


def test_factors_by_group_resume_replay_and_verify(tmp_path: Path) -> None:
    whole = run_by_group(BY_GROUP["lambdas"])
    rates = rates_by_group(whole)
    directory = tmp_path / "run"
    first = rates_by_group(
        run_by_group(BY_GROUP["lambdas"], run_dir=directory, stop_after="5 steps")
    )
    others = run_by_group(
        lambda optimizer: lr_scheduler.LambdaLR(
            optimizer, [lambda step: 1 / (1 + step), lambda step: 0.8**step]
        ),
        run_dir=directory,
    )
    with refused_change("schedule.factors"):
        others.train()
    resumed = run_by_group(BY_GROUP["lambdas"], run_dir=directory)
    assert first + rates_by_group(resumed) == rates
    for one, other in zip(resumed.state.parameters, whole.state.parameters, strict=True):
        assert torch.equal(one, other)
    saved = sf.load(run_by_group(BY_GROUP["lambdas"], run_dir=directory))
    assert saved.verify().problems == []


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
    last = {
        name: [group["lr"] for group in each.optimizer.param_groups]
        for name, each in run.state.optimizers.items()
    }
    expected = {"a": [LR * 0.9**11], "b": [LR * 0.8**11, 0.01 * 0.7**11]}
    assert {name: pytest.approx(rates) for name, rates in expected.items()} == last


def test_schedules_by_group_are_joined() -> None:
    schedule = sf.schedules.join(from_scheduler(BY_GROUP["lambdas"]), sf.schedules.constant(), at=3)
    rates = rates_by_group(run_by_group(schedule))
    assert rates[:5] == [
        pytest.approx([LR / (1 + step), 0.01 * 0.9**step] if step < 3 else [LR, 0.01])
        for step in range(5)
    ]


def test_a_list_for_each_rate_is_taken_where_the_run_splits_groups_by_decay() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))

    halved = sf.optim.LRMultipliers(lambda model: {"2.bias": 0.5}, identity={"bias": 0.5})
    spec = sf.optim.adamw(LR, weight_decay=0.1, lr_multipliers=[halved])
    run = run_by_group(BY_GROUP["lambdas"], model=model, optimizer=spec)
    groups = run.state.optimizers["model"].optimizer.param_groups
    assert [group["lr"] for group in groups] == [LR, LR, LR / 2]
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


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_scheduler_of_timm_gets_the_calls_of_timms_loop(in_epochs: bool) -> None:
    made = []

    def make(optimizer: Any) -> Any:
        made.append(LikeTimm(optimizer, in_epochs=in_epochs))
        return made[-1], 300  # as create_scheduler_v2 does

    length = Length(steps=7, samples_per_epoch=25, batch_size=10)
    factor = from_scheduler(make).factors(length)
    times = [0, 0, 0, 1, 1, 2, 2] if in_epochs else range(7)
    assert [factor(step) for step in range(7)] == [0.5**time for time in times]
    updates = [call for call in made[-1].calls if call[0] == "step_update"]
    assert updates == [("step_update", step) for step in range(1, 7)]


def test_scales_of_layers_in_groups_are_factors_by_group() -> None:
    def scaled(params: Any) -> torch.optim.Optimizer:
        weight, bias = params[0]["params"]
        groups = [{"params": [weight], "lr_scale": 0.25}, {"params": [bias], "lr_scale": 1.0}]
        return torch.optim.SGD(groups, lr=LR)

    run = run_by_group(partial(LikeTimm, in_epochs=False), optimizer=scaled)
    assert rates_by_group(run)[2] == pytest.approx([LR / 16, LR / 4])


def test_schedulers_of_timm_itself() -> None:
    factory = pytest.importorskip("timm.scheduler.scheduler_factory")
    length = Length(steps=20, samples_per_epoch=50, batch_size=10)
    for name in ("cosine", "tanh", "step", "multistep", "poly", "wsd"):
        for on_epochs in (True, False):
            settings = {
                "sched": name,
                "num_epochs": 4,
                "decay_epochs": 1,
                "decay_milestones": [1, 3],
                "warmup_epochs": 1,
                "step_on_epochs": on_epochs,
                "updates_per_epoch": 5,
            }
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
            scheduler, _ = factory.create_scheduler_v2(optimizer, **settings)
            expected = []
            for epoch in range(4):
                for update in range(5):
                    expected.append(optimizer.param_groups[0]["lr"])
                    scheduler.step_update(num_updates=epoch * 5 + update + 1)
                scheduler.step(epoch + 1)
            make = partial(factory.create_scheduler_v2, **settings)
            factor = bound(from_scheduler(make), ({"lr": LR},)).factors(length)
            assert [LR * factor(step) for step in range(20)] == pytest.approx(expected), name
    with refused("scheduler-needs-metric", value="PlateauLRScheduler"):
        make = partial(factory.create_scheduler_v2, sched="plateau")
        bound(from_scheduler(make), ({"lr": LR},)).factors(length)


def unfit(optimizer: Any) -> Any:
    optimizer.param_groups[0]["betas"] = (0.9, 0.5)
    return lr_scheduler.StepLR(optimizer, 5)


@in_one
@pytest.mark.parametrize(
    ("schedule", "cure"),
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
def test_what_is_no_schedule_is_refused_with_what_to_write(schedule: Any, cure: str) -> None:
    with refused("schedule-of-another-form", setting="schedule") as refusal:
        trained(optimizer=sf.optim.adamw(LR), schedule=schedule)
    (remedy,) = refusal.value.remedies
    assert cure in remedy


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
        trained(optimizer=sf.optim.adamw(LR), schedule=schedule)


def test_a_plateau_within_a_chain_is_refused_with_the_setting_for_it() -> None:
    def chain(optimizer: Any) -> Any:
        return lr_scheduler.ChainedScheduler([lr_scheduler.ReduceLROnPlateau(optimizer)])

    with refused("scheduler-not-built") as caught:
        trained(optimizer=sf.optim.adamw(LR), schedule=from_scheduler(chain))
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
        trained(optimizer=optimizer, schedule=sf.schedules.one_cycle(momentum_range=(0.8, 0.9)))


def of_two(models: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squares(models["first"], batch) + squares(models["second"], batch)


@in_one
@pytest.mark.parametrize("name", ["relative", "in sequence", "its own rates and momentum"])
def test_several_optimizers_share_one_schedule(name: str) -> None:
    """As in a plain loop, in which one torch optimizer has both groups."""
    optimizers = {"first": sf.optim.adam(LR), "second": sf.optim.adam(LR)}
    models = {"first": zeros, "second": zeros}
    settings: dict[str, Any] = {
        "train_data": data(),
        "batch_size": 8,
        "length": f"{STEPS} steps",
        "console": False,
    }
    schedule = from_scheduler(SCHEDULERS[name])
    run = sf.Run(model=models, loss=of_two, optimizer=optimizers, schedule=schedule, **settings)
    run.train()
    expected = plain_loop(lambda weights: torch.optim.Adam(weights, lr=LR), SCHEDULERS[name])
    for model in run.state.models.values():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=1e-7)
    mixed = {"first": sf.optim.sgd(LR, momentum=0.9), "second": sf.optim.adam(LR / 10)}
    cycle = from_scheduler(SCHEDULERS["its own rates and momentum"])
    with refused("scheduler-not-built") as caught:
        sf.Run(model=models, loss=of_two, optimizer=mixed, schedule=cycle, **settings).train()
    assert "cycle_momentum=False" in caught.value.remedies[0]


def test_a_killed_run_ends_with_the_same_bits_and_plan_replay_and_verify_know_the_rates(
    tmp_path: Path,
) -> None:
    def build(name: str, **changes: Any) -> sf.Run:
        settings: dict[str, Any] = {
            "model": zeros,
            "loss": squares,
            "train_data": data(),
            "batch_size": 8,
            "length": f"{STEPS} steps",
            "optimizer": sf.optim.adamw(LR),
            "schedule": from_scheduler(SCHEDULERS["its own rates and momentum"]),
            "save_every": "3 steps",
            "log_every": "1 steps",
            "console": False,
            "report": False,
            "run_dir": tmp_path / name,
        }
        return sf.Run(**(settings | changes))

    def killed() -> None:
        with build("killed") as run:
            for step in run:
                if step.index == 7:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

    build("whole").train()
    with open(os.devnull, "w") as nowhere:
        process = Forked(killed, stdout=nowhere)
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints" / "step-00000003").exists()
    other = from_scheduler(SCHEDULERS["relative"])
    with refused_change("schedule.factors"):
        build("killed", schedule=other).train()
    resumed = build("killed")
    resumed.train()
    whole = sf.load(build("whole"))
    assert torch.equal(resumed.state.model.weight, whole.load_model(zeros()).weight)

    rates = []
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=LR)
    scheduler = SCHEDULERS["its own rates and momentum"](optimizer)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step() if len(rates) < STEPS else None
    planned = "\n".join(learning_rates(build("whole").parts))
    assert all(f"{rates[step]:.4g}" in planned for step in (0, STEPS // 2, STEPS - 1))
    assert [each["lr"] for each in whole.records("train")] == pytest.approx(rates)
    assert f"learning rate {rates[5]:.3g}"[:18] in str(whole.replay(step=5))
    verdict = whole.verify()
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
    for name, arguments in OF_TRANSFORMERS.items():
        assert_taken(
            lambda optimizer, name=name, own=arguments: getattr(optimization, name)(
                optimizer=optimizer, **own
            ),
            name,
        )
    for name, scheduler in of_a_metric.items():
        assert_refused(getattr(optimization, name), scheduler)
    names = {name for name in vars(optimization) if name.startswith("get_") and "schedule" in name}
    assert names == OF_TRANSFORMERS.keys() | of_a_metric.keys()
    for kind in optimization.SchedulerType:  # of `TrainingArguments.lr_scheduler_type`
        assert optimization.TYPE_TO_SCHEDULER_FUNCTION[kind].__name__ in names


def one_cycle(total_steps: int) -> sf.schedules.Schedule:
    return sf.schedules.from_scheduler(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=total_steps
        )
    )


def test_a_scheduler_planned_for_fewer_steps_is_refused_with_the_number_to_write() -> None:
    length = Length(steps=12, samples_per_epoch=8, batch_size=1)
    with refused("scheduler-failed", planned_steps=10, steps=12):
        one_cycle(10).factors(length)


def test_a_scheduler_planned_for_more_steps_is_noted() -> None:
    length = Length(steps=12, samples_per_epoch=8, batch_size=1)
    notes = [one_cycle(steps).resolved(length).note for steps in (12, 20)]
    assert notes[0] is None
    assert numbers_in(str(notes[1]))[:2] == [20, 12]  # planned steps, those of the run
