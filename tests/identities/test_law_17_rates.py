"""Law 17: what the loop's body writes into parameter groups is seen by the next step, survives a
resume, and is shown; or it is refused by name. (9 s)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.run.body_rates import schedulers_of

STEPS = 12
RATE = 0.1


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(60, 8, generator=generator), torch.arange(60) % 3


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(8, 3),
        "loss": loss,
        "train_data": data(),
        "batch_size": 10,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.sgd(lr=RATE, momentum=0.5),
        "log_every": "1 steps",
        "console": False,
        "report": False,
        "device": "cpu",
    }
    return sf.Run(**(settings | changes))


def optimizer_of(run: sf.Run, name: str = "model") -> torch.optim.Optimizer:
    return run.state.optimizers[name].optimizer


def groups_of(run: sf.Run, name: str = "model") -> list[dict[str, Any]]:
    return optimizer_of(run, name).param_groups


def copies_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def weights(run: sf.Run) -> list[Tensor]:
    copies: list[Tensor] = []
    for model in run.state.models.values():
        copies += copies_of(model)
    return copies


def assert_same_weights(first: list[Tensor], second: list[Tensor]) -> None:
    """To the bit."""
    for tensor, other in zip(first, second, strict=True):
        assert torch.equal(tensor, other)


def written_records(run_dir: Path) -> list[Any]:
    return list(sf.load(run_dir).records("train"))


Body = Callable[[sf.Run, sf.Step], Any]


def multiply_rates(factor: float, at: int) -> Body:
    """A body that multiplies every rate after a step."""

    def body(run: sf.Run, step: sf.Step) -> None:
        if step.index == at:
            for group in groups_of(run):
                group["lr"] *= factor

    return body


def leave_alone(run: sf.Run, step: sf.Step) -> None:
    """A body that writes nothing."""


def loop(run: sf.Run, body: Body, *, opened: bool = False) -> list[float]:
    """The rate of each step, of a run whose body is called after each step."""
    rates = []
    with run:
        for step in run.steps() if opened else run:
            if opened:
                sf.forward_backward(step)
                sf.update(step)
            rates.append(step.lr)
            body(run, step)
    return rates  # type: ignore[return-value]


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True])
def test_a_rate_written_by_hand_is_that_of_the_next_step(opened: bool) -> None:
    run = build()
    rates = loop(run, multiply_rates(0.1, at=4), opened=opened)
    assert rates == [RATE] * 5 + [RATE * 0.1] * 7


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), np.array(1)])
def test_a_rate_may_be_a_number_of_numpy(number: Any) -> None:
    rates = loop(build(), lambda run, step: groups_of(run)[0].update(lr=number))
    assert rates == [RATE] + [float(number)] * 11


def test_a_rate_written_before_the_update_is_that_of_this_step() -> None:
    rates = []
    with build() as run:
        for step in run.steps():
            sf.forward_backward(step)
            if step.index == 4:
                groups_of(run)[0]["lr"] = 0.25
            sf.update(step)
            rates.append(step.lr)
    assert rates == [RATE] * 4 + [0.25] * 8


def test_a_schedule_goes_on_from_what_was_written() -> None:
    schedule = sf.schedules.cosine(warmup=3)
    scheduled = loop(build(schedule=schedule), leave_alone)

    rates = loop(build(schedule=schedule), multiply_rates(0.5, at=5))

    halved = [rate * 0.5 for rate in scheduled[6:]]
    assert rates == pytest.approx(scheduled[:6] + halved, rel=1e-15)


def test_without_writing_the_rates_are_those_of_the_schedule_to_the_bit() -> None:
    schedule = sf.schedules.one_cycle()
    run = build(schedule=schedule)
    scheduled = [RATE * run.parts.task.factors(step) for step in range(STEPS)]
    assert loop(run, leave_alone) == scheduled


def test_the_record_has_the_rate_of_the_step_and_the_factor(tmp_path: Path) -> None:
    run = build(run_dir=tmp_path / "run")
    rates = loop(run, multiply_rates(0.5, at=4))

    records = written_records(tmp_path / "run")
    assert [record["lr"] for record in records] == rates
    assert [record.get("lr_body_factor", 1.0) for record in records] == [1.0] * 5 + [0.5] * 7


def two_rates(groups: Any) -> torch.optim.Optimizer:
    weight, bias = groups[0]["params"]
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.2}], lr=RATE)


def test_the_record_has_the_factors_of_all_groups_if_they_differ(tmp_path: Path) -> None:
    def body(run: sf.Run, step: sf.Step) -> None:
        first, second = groups_of(run)
        if step.index == 2:
            first["lr"] *= 0.5
        if step.index == 4:
            second["lr"] *= 0.5

    loop(build(optimizer=two_rates, run_dir=tmp_path / "run"), body)

    records = written_records(tmp_path / "run")
    differing = {"model.param_groups[0]": 0.5, "model.param_groups[1]": 1.0}
    factors = [record.get("lr_body_factors") for record in records]
    assert factors == [None] * 3 + [differing] * 2 + [None] * 7
    assert [record.get("lr_body_factor", 1.0) for record in records] == [1.0] * 3 + [0.5] * 9


def changes_by_step(values: list[Tensor]) -> list[bool]:
    return [not torch.equal(before, after) for before, after in pairwise(values)]


def test_a_rate_written_into_one_group_of_the_second_optimizer_is_that_of_this_group() -> None:
    def joint(models: Any, batch: Any) -> Tensor:
        return loss(lambda inputs: models["b"](models["a"](inputs)), batch)

    run = build(
        model={"a": lambda: nn.Linear(8, 8), "b": lambda: nn.Linear(8, 3)},
        optimizer={"a": sf.optim.sgd(0.3), "b": two_rates},
        loss=joint,
    )
    group_of_weight, group_of_bias = groups_of(run, "b")
    weight_values = []
    bias_values = []
    with run:
        for step in run:
            weight, bias = copies_of(run.state.models["b"])
            weight_values.append(weight)
            bias_values.append(bias)
            assert group_of_weight["lr"] == RATE
            if step.index == 2:
                group_of_bias["lr"] = 0.0

    assert changes_by_step(weight_values) == [True] * 11
    assert changes_by_step(bias_values) == [True, True] + [False] * 9


@pytest.mark.parametrize("at", [3, 4, 5, 8])
@pytest.mark.parametrize("opened", [False, True])
def test_a_resume_has_the_same_bits(at: int, opened: bool, tmp_path: Path) -> None:
    schedule = sf.schedules.cosine(warmup=4)

    def body(run: sf.Run, step: sf.Step) -> None:
        multiply_rates(0.3, at)(run, step)
        if step.index == at + 1:
            for group in groups_of(run):
                group["momentum"] = 0.75
                group["weight_decay"] = 0.125

    whole = build(schedule=schedule)
    expected = loop(whole, body, opened=opened)

    stopped = build(schedule=schedule, run_dir=tmp_path / "run", stop_after="5 steps")
    rates = loop(stopped, body, opened=opened)
    resumed = build(schedule=schedule, run_dir=tmp_path / "run")
    rates += loop(resumed, body, opened=opened)

    assert rates == expected
    assert_same_weights(weights(resumed), weights(whole))
    assert groups_of(resumed)[0]["momentum"] == 0.75


def test_what_is_written_before_a_resumed_loop_leaves_the_values_of_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def session(**changes: Any) -> list[float]:
        rates = []
        with build(run_dir=tmp_path / "run", console=True, **changes) as run:
            groups_of(run)[0]["lr"] *= 0.5
            for step in run:
                rates.append(step.lr)
        return rates  # type: ignore[return-value]

    assert session(stop_after="5 steps") == [RATE * 0.5] * 5
    assert lines_naming(capfd.readouterr().out, "note: ") == []
    assert session() == [RATE * 0.5] * 7
    (note,) = lines_naming(capfd.readouterr().out, "note: ")
    assert " parameter groups " in note


# --- schedulers -----------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.1),
    "several steps": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 5]),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 4)),
    "multiplicative": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 0.9),
    "constant": partial(lr_scheduler.ConstantLR, total_iters=3),
    "linear": partial(lr_scheduler.LinearLR, total_iters=5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=9, eta_min=0.01),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=STEPS + 1),
    "in sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    ),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.StepLR(optimizer, 3)]
    ),
}


def plain_loop(build_scheduler: Any) -> tuple[list[float], list[Tensor]]:
    """The rates and weights of a loop as torch documents it."""
    model = build().state.model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5, fused=True)
    scheduler = build_scheduler(optimizer)
    batches = []
    with build() as run:
        for step in run:
            (micro_batch,) = step.micro_batches
            batches.append(micro_batch.batch)

    rates = []
    for batch in batches:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    return rates, copies_of(model)


@pytest.mark.parametrize("place", ["before", "inside"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_in_the_body_is_the_loop_of_torch_also_after_a_resume(
    name: str, place: str, tmp_path: Path
) -> None:
    """It is built before the run is opened, or after."""
    build_scheduler = SCHEDULERS[name]
    with warnings.catch_warnings(action="ignore"):  # SequentialLR of torch warns of itself
        expected_rates, expected_weights = plain_loop(build_scheduler)
    rates: list[Any] = []

    def train(**changes: Any) -> sf.Run:
        run = build(run_dir=tmp_path / "run", **changes)
        if place == "before":
            scheduler = run.register_state("scheduler", build_scheduler(optimizer_of(run)))
        with run:
            if place == "inside":
                scheduler = run.register_state("scheduler", build_scheduler(optimizer_of(run)))
            for step in run:
                rates.append(step.lr)
                scheduler.step()
        return run

    with warnings.catch_warnings(action="ignore" if name == "in sequence" else "error"):
        train(stop_after="5 steps")
        resumed = train()

    assert rates == pytest.approx(expected_rates, rel=1e-14)
    torch.testing.assert_close(weights(resumed), expected_weights, rtol=1e-6, atol=1e-7)
    if rates == expected_rates:
        assert_same_weights(weights(resumed), expected_weights)


def test_a_plateau_of_torch_in_the_body_multiplies_the_schedule() -> None:
    run = build(schedule=sf.schedules.linear())
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer_of(run), factor=0.5, patience=0)

    rates = loop(run, lambda run, step: scheduler.step(1.0))

    expected = []
    for step in range(STEPS):
        halvings = max(0, step - 1)
        expected.append(RATE * run.parts.task.factors(step) * 0.5**halvings)
    assert rates == pytest.approx(expected)


def test_an_instance_with_a_scheduler_begins_as_the_scheduler_does() -> None:
    model = build().state.model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    run = build(model=model, optimizer=optimizer)
    rates = loop(run, lambda run, step: scheduler.step())
    assert rates == [RATE * ((step + 1) / 4) for step in range(STEPS)]


def test_no_warning_for_a_scheduler_whose_optimizer_is_called_by_its_kernel() -> None:
    run = build(optimizer=sf.optim.adamw(lr=RATE))
    scheduler = lr_scheduler.StepLR(optimizer_of(run), 3)
    with warnings.catch_warnings(action="error"):
        rates = loop(run, lambda run, step: scheduler.step())
    assert rates[-1] == pytest.approx(RATE * 0.001)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"schedule": sf.schedules.cosine()}, id="schedule"),
        pytest.param(
            {
                "plateau": sf.ReduceLROnPlateau("min val/loss", patience=9),
                "splits": {"val": sf.Split(data())},
            },
            id="plateau",
        ),
    ],
)
def test_a_scheduler_that_writes_rates_of_its_own_beside_a_schedule_is_refused(
    settings: dict[str, Any],
) -> None:
    run = build(**settings)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer_of(run), 5)
    with refused("two-schedules", value="CosineAnnealingWarmRestarts"):
        loop(run, lambda run, step: scheduler.step())
    assert run.state.step <= 2


class OwnStep(lr_scheduler.StepLR):
    """A scheduler of the user with the rates of torch's."""


def test_a_scheduler_that_inherits_its_rates_goes_with_a_schedule() -> None:
    run = build(schedule=sf.schedules.linear())
    scheduler = OwnStep(optimizer_of(run), 3)
    rates = loop(run, lambda run, step: scheduler.step())
    expected = [RATE * (1 - step / STEPS) * 0.1 ** (step // 3) for step in range(STEPS)]
    assert rates == pytest.approx(expected)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that leaves its update to another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_a_scheduler_over_an_inner_optimizer_is_looked_at_too() -> None:
    run = build(
        optimizer=lambda groups: Wrapper(torch.optim.SGD(groups, lr=RATE)),
        schedule=sf.schedules.cosine(),
    )
    scheduler = lr_scheduler.LambdaLR(optimizer_of(run).inner, lambda step: 0.7**step)
    with refused("two-schedules", value="LambdaLR"):
        loop(run, lambda run, step: scheduler.step())


class WithoutModule:
    """An object of another program in this process, whose class was made without a module."""

    def step(self) -> None: ...


WithoutModule.__module__ = None  # type: ignore[assignment]


def test_schedulers_are_found_beside_objects_of_any_class() -> None:
    other = WithoutModule()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    assert schedulers_of([optimizer]) == [scheduler]
    assert type(other).__module__ is None


def test_a_scheduler_that_no_checkpoint_holds_is_refused_where_one_is_saved(
    tmp_path: Path,
) -> None:
    def train(**changes: Any) -> None:
        run = build(**changes)
        scheduler = lr_scheduler.ExponentialLR(optimizer_of(run), 0.9)
        loop(run, lambda run, step: scheduler.step())

    with refused("scheduler-not-registered", value="ExponentialLR"):
        train(run_dir=tmp_path / "run")
    train(run_dir=tmp_path / "unchecked", check_state=False)
    train()


class Warmup:
    """A scheduler of the user, without a class of torch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.adam = optimizer
        self.calls = 0

    def step(self) -> None:
        self.calls += 1
        for group in self.adam.param_groups:
            group["lr"] = RATE * self.calls / STEPS

    def state_dict(self) -> Any:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_scheduler_of_ones_own_that_is_registered_goes_on_after_a_resume(tmp_path: Path) -> None:
    def train(**changes: Any) -> list[float]:
        run = build(run_dir=tmp_path / "run", **changes)
        scheduler = run.register_state("warmup", Warmup(optimizer_of(run)))
        return loop(run, lambda run, step: scheduler.step())

    rates = train(stop_after="5 steps") + train()
    assert rates == [RATE] + [RATE * step / STEPS for step in range(1, STEPS)]


def test_a_scheduler_of_ones_own_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    run = build(run_dir=tmp_path / "run")
    scheduler = Warmup(optimizer_of(run))
    with refused("scheduler-not-registered", value="Warmup"):
        loop(run, lambda run, step: scheduler.step())


def test_a_scheduler_that_nobody_steps_has_no_part_in_a_rate_written_by_hand(
    tmp_path: Path,
) -> None:
    run = build(run_dir=tmp_path / "run", schedule=sf.schedules.linear())
    step_every = lr_scheduler.StepLR(optimizer_of(run), 1)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer_of(run), STEPS)
    warmup = Warmup(optimizer_of(run))

    rates = loop(run, multiply_rates(0.5, at=4))

    assert rates[5] == pytest.approx(RATE * 0.5 * (1 - 5 / STEPS))
    assert step_every.last_epoch == 0
    assert cosine.last_epoch == 0
    assert warmup.calls == 0


def test_a_scheduler_that_is_stepped_after_a_rate_was_written_by_hand_is_looked_at() -> None:
    run = build(schedule=sf.schedules.linear())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer_of(run), STEPS)

    def body(run: sf.Run, step: sf.Step) -> None:
        multiply_rates(0.5, at=2)(run, step)
        if step.index >= 5:
            scheduler.step()

    with refused("two-schedules", value="CosineAnnealingLR"):
        loop(run, body)
    assert run.state.step == 6


# --- tensors, momentum, groups --------------------------------------------------------------------


class NoReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where the host reads a tensor."""

    def __torch_dispatch__(
        self, function: Any, kinds: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        assert "_local_scalar_dense" not in str(function)
        return function(*arguments, **(named or {}))


def build_with_tensor_rate(**changes: Any) -> sf.Run:
    optimizer = partial(torch.optim.SGD, lr=torch.tensor(RATE), momentum=0.5)
    return build(optimizer=optimizer, schedule=sf.schedules.linear(), **changes)


def test_a_rate_in_a_tensor_is_followed_also_after_a_resume(tmp_path: Path) -> None:
    def loop_with_tensor_rate(run: sf.Run) -> list[float]:
        rates = []
        first_tensor = None
        with run:
            for step in run:
                rate = groups_of(run)[0]["lr"]
                first_tensor = rate if first_tensor is None else first_tensor
                assert rate is first_tensor, "it is written in place"
                rates.append(float(rate))
                if step.index == 4:
                    rate.mul_(0.1)
        return rates

    whole = build_with_tensor_rate()
    rates = loop_with_tensor_rate(whole)
    loop_with_tensor_rate(build_with_tensor_rate(run_dir=tmp_path / "run", stop_after="6 steps"))
    resumed = build_with_tensor_rate(run_dir=tmp_path / "run")
    loop_with_tensor_rate(resumed)

    expected = [RATE * whole.parts.task.factors(step) for step in range(STEPS)]
    expected[5:] = [rate * 0.1 for rate in expected[5:]]
    assert rates == pytest.approx(expected, rel=1e-6)
    records = written_records(tmp_path / "run")
    assert [record["lr"] for record in records] == pytest.approx(expected, rel=1e-6)
    assert_same_weights(weights(resumed), weights(whole))


def test_a_rate_in_a_tensor_is_set_without_a_read() -> None:
    trained = build_with_tensor_rate().state.optimizers["model"]
    (group,) = trained.optimizer.param_groups
    group["lr"].mul_(0.5)
    with NoReads():
        trained.rates.set(0.5, lowered=1.0, momentum=None)
    assert float(group["lr"]) == pytest.approx(RATE * 0.25)


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (lambda groups: groups[0].update(lr=math.nan), "rate-not-a-number"),
        (lambda groups: groups[0].update(lr=-0.1), "rate-not-a-number"),
        (lambda groups: groups[0].update(lr=np.array([0.1])), "rate-not-a-number"),
        (lambda groups: groups[0].update(lr=torch.tensor(0.1)), "rate-became-a-tensor"),
    ],
)
def test_a_rate_that_cannot_be_followed_is_refused(write: Any, code: str) -> None:
    with refused(code, setting="lr"):
        loop(build(), lambda run, step: write(groups_of(run)))


def test_a_rate_written_where_the_factor_is_0_is_refused() -> None:
    schedule = sf.schedules.from_function(lambda step: min(step, 3) / 3)
    with refused("rate-written-over-zero"):
        loop(build(schedule=schedule), lambda run, step: groups_of(run)[0].update(lr=0.1))


def test_a_group_that_the_body_adds_is_refused() -> None:
    def body(run: sf.Run, step: sf.Step) -> None:
        optimizer_of(run).add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    with refused("groups-changed", value="SGD"):
        loop(build(), body)


def test_a_momentum_that_the_schedule_sets_too_is_refused() -> None:
    schedule = sf.schedules.one_cycle(momentum_range=(0.5, 0.9))
    with refused("momentum-of-two", value=0.25):
        loop(build(schedule=schedule), lambda run, step: groups_of(run)[0].update(momentum=0.25))


def unfreeze_bias(run: sf.Run, step: sf.Step) -> None:
    if step.index == 4:
        run.state.model.bias.requires_grad_(True)


def half_frozen() -> nn.Module:
    model = nn.Linear(8, 3)
    model.bias.requires_grad_(False)
    return model


def test_a_rate_survives_the_unfreezing_of_parameters() -> None:
    def body(run: sf.Run, step: sf.Step) -> None:
        unfreeze_bias(run, step)
        multiply_rates(0.5, at=4)(run, step)

    assert loop(build(model=half_frozen), body) == [RATE] * 5 + [RATE * 0.5] * 7


def test_a_rate_written_into_a_replaced_optimizer_is_refused() -> None:
    run = build(model=half_frozen)
    (replaced_group,) = groups_of(run)

    def body(run: sf.Run, step: sf.Step) -> None:
        unfreeze_bias(run, step)
        if step.index == 6:
            replaced_group["lr"] *= 0.5

    with refused("rate-of-replaced-optimizer"):
        loop(run, body)


def test_a_scheduler_of_a_replaced_optimizer_is_refused() -> None:
    run = build(model=half_frozen)
    scheduler = lr_scheduler.StepLR(optimizer_of(run), 3)

    def body(run: sf.Run, step: sf.Step) -> None:
        unfreeze_bias(run, step)
        scheduler.step()

    with refused("scheduler-of-replaced-optimizer"):
        loop(run, body)


# --- ranks, replay and verify ---------------------------------------------------------------------


def train_with_same_rates() -> Any:
    run = build(micro_batch_size=5)
    rates = loop(run, multiply_rates(0.5, at=3))
    return rates, [weight.tolist() for weight in weights(run)]


def train_with_other_rates() -> tuple[str, int]:
    """The code of the error, and the step at which it came."""
    run = build(micro_batch_size=5)
    with pytest.raises(sf.SurefootError) as caught:
        loop(run, multiply_rates(0.5 - 0.1 * run.rank, at=3))
    return caught.value.code, run.state.step


def test_a_rate_that_all_ranks_write_is_that_of_one_process(ranks: Ranks) -> None:
    first, second = ranks(2, train_with_same_rates)
    assert first == second == train_with_same_rates()


def test_rates_that_differ_on_ranks_are_refused_on_all_of_them(ranks: Ranks) -> None:
    (code, step), (other_code, other_step) = ranks(2, train_with_other_rates)
    assert "rates-differ-on-ranks" in (code, other_code)
    assert step == other_step == 4


@pytest.fixture
def saved_with_halved_rate(tmp_path: Path) -> Any:
    """A run whose body has halved the rate after step 4."""
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "schedule": sf.schedules.linear()}
    run = build(save_every="2 steps", keep_last=9, **settings)
    loop(run, multiply_rates(0.5, at=4))
    return sf.load(build(**settings))


def test_verify_says_which_steps_it_cannot_repeat(saved_with_halved_rate: Any) -> None:
    verdict = saved_with_halved_rate.verify()

    assert verdict.problems == []
    (unproved,) = [line for line in verdict.not_proved if line.startswith("steps 4 to 6: ")]
    assert unproved.count("learning rates") == 1
    assert [12] in [numbers_in(line) for line in verdict.proved]  # records with their rates


def test_replay_takes_the_rate_that_the_body_has_written(saved_with_halved_rate: Any) -> None:
    replayed = saved_with_halved_rate.replay(step=7)
    assert replayed.learning_rate == pytest.approx(RATE * 0.5 * (1 - 7 / STEPS))


def test_a_run_of_an_older_behavior_overwrites_rates_as_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("surefoot.tracking.run_reader.newest_behavior", lambda: 1)
        stopped = build(run_dir=tmp_path / "run", stop_after="6 steps")
        assert loop(stopped, multiply_rates(0.1, at=2)) == [RATE] * 6

    resumed = build(run_dir=tmp_path / "run")
    assert loop(resumed, multiply_rates(0.1, at=8)) == [RATE] * 6
