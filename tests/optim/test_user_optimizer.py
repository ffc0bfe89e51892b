"""Any class, function or instance of a `torch.optim.Optimizer` as `Run(optimizer=)`. (3 s)"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from same_bits import assert_same_bits, weights
from surefoot.tools.plan.summary import parameters_by_group
from with_closures import Batch, HeavyBall, batches, bits, build, data, loss, losses, net


def sgd_with_own_groups(groups: Any) -> torch.optim.Optimizer:
    """A group for each parameter."""
    (group,) = groups
    own_groups = []
    for parameter in group["params"]:
        own_groups.append({"params": [parameter], "lr": 0.1 / (1 + parameter.ndim)})
    return torch.optim.SGD(own_groups, lr=0.1)


MAKERS: dict[str, Any] = {
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "Adam": torch.optim.Adam,
    "AdamW by partial": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "ASGD": partial(torch.optim.ASGD, t0=2),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD by lambda": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adafactor": torch.optim.Adafactor,
    "of a package": HeavyBall,
    "groups of one's own": sgd_with_own_groups,
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def train_plainly(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Batch], factors: list[float]
) -> list[float]:
    """A loop as torch's documentation has it; the loss of each step."""
    values = []
    rates = [group["lr"] for group in optimizer.param_groups]
    for batch, factor in zip(steps, factors, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        values.append(float(value.detach()))
    return values


def test_every_optimizer_of_torch_is_compared_with_a_plain_loop_or_refused() -> None:
    """Muon takes only matrices: its refusal, as SparseAdam's, is below; LBFGS has a file of
    tests.
    """
    classes = set()
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer):
            classes.add(value)
    compared = set()
    for make in MAKERS.values():
        compared.add(type(make([{"params": [nn.Parameter(torch.ones(2, 2))]}])))

    others = {torch.optim.Optimizer, torch.optim.Muon, torch.optim.SparseAdam, torch.optim.LBFGS}
    assert classes == (compared - {HeavyBall}) | others


@EVERY
def test_a_run_is_the_plain_loop_to_the_bit(name: str) -> None:
    run = build(MAKERS[name], schedule=sf.schedules.linear(warmup="2 steps"))
    factors = [run.parts.task.factors(step) for step in range(8)]
    model = build(sf.optim.sgd(0.1)).state.model
    optimizer = MAKERS[name]([{"params": [*model.parameters()]}])
    expected = train_plainly(model, optimizer, batches(), factors)

    assert losses(run) == expected
    assert_same_bits(weights(run), model.state_dict())


@EVERY
def test_a_resumed_run_has_the_same_bits_and_a_bad_step_changes_none(
    name: str, tmp_path: Path
) -> None:
    inputs, labels = data()
    inputs[5, 0] = torch.nan

    def session(**changes: Any) -> sf.Run:
        return build(MAKERS[name], train_data=(inputs, labels), ema=0.9, **changes)

    whole = session()
    skipped = []
    states = [bits(whole)]
    with whole:
        for step in whole:
            states.append(bits(whole))
            skipped.append(float(step.skipped))  # type: ignore[arg-type]
    session(run_dir=tmp_path / "run", stop_after="4 steps").train()
    resumed = session(run_dir=tmp_path / "run")
    resumed.train()

    assert sum(skipped) == 2  # once in an epoch of four steps
    bad_step = skipped.index(1.0)
    before = states[bad_step]
    after = states[bad_step + 1]
    changed = [key for key in before if before[key] != after[key]]
    assert all(key.startswith("state/") for key in changed)
    bits_of_resumed = bits(resumed)
    bits_of_resumed["state/meter/rows"] = states[-1]["state/meter/rows"]  # times
    assert bits_of_resumed == states[-1]


def test_several_models_each_with_a_class() -> None:
    def joint_loss(models: Any, batch: Any) -> Tensor:
        return loss(lambda inputs: models["head"](models["trunk"](inputs)), batch)

    makers = {"trunk": lambda: nn.Linear(4, 8), "head": lambda: nn.Linear(8, 3)}
    by_model = {"trunk": torch.optim.Adagrad, "head": partial(torch.optim.Adagrad, lr=1e-2)}
    run = build(torch.optim.Adagrad, model=makers, loss=joint_loss)
    expected = build(by_model, model=makers, loss=joint_loss)

    assert losses(run) == losses(expected)
    assert parameters_by_group(run.parts)[0].startswith("Adagrad of trunk: ")


# --- an optimizer that is already built -----------------------------------------------------------


def seeded() -> nn.Module:
    torch.manual_seed(5)
    return net()


def two_rates(model: Any) -> torch.optim.SGD:
    first = {"params": [model[0].weight], "lr": 0.3}
    others = {"params": [model[0].bias, *model[2].parameters()]}
    return torch.optim.SGD([first, others], lr=0.1, momentum=0.9)


def test_an_instance_over_the_parameters_of_the_model_is_taken() -> None:
    model = seeded()
    optimizer = two_rates(model)
    run = build(optimizer, model=model, schedule=sf.schedules.linear(warmup="2 steps"))
    factors = [run.parts.task.factors(step) for step in range(8)]
    plain_model = seeded()
    expected = train_plainly(plain_model, two_rates(plain_model), batches(), factors)

    assert losses(run) == expected
    assert run.state.optimizers["model"].optimizer is optimizer
    _, *groups = parameters_by_group(run.parts)
    assert [group.split("lr ")[1] for group in groups] == [
        "0.3, weight decay 0: 0.weight",
        "0.1, weight decay 0: 0.bias ... 2.bias",
    ]


def test_an_instance_that_was_trained_begins_again_with_its_base_rates() -> None:
    """As in a notebook, where a cell builds the run again."""
    model = seeded()
    optimizer = two_rates(model)
    build(optimizer, model=model, schedule=sf.schedules.linear(warmup="2 steps")).train()

    run = build(optimizer, model=model)

    groups = run.state.optimizers["model"].optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.3, 0.1]


def test_an_instance_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def session(**changes: Any) -> sf.Run:
        model = seeded()
        run = build(torch.optim.Adam(model.parameters(), lr=1e-2), model=model, **changes)
        run.train()
        return run

    whole = session()
    session(run_dir=tmp_path / "run", stop_after="4 steps")
    resumed = session(run_dir=tmp_path / "run")

    assert_same_bits(weights(resumed), weights(whole))


@pytest.mark.parametrize("with_frozen", [True, False])
def test_parameters_that_the_model_has_frozen_may_be_in_an_instance_or_not(
    with_frozen: bool,
) -> None:
    model = seeded()
    frozen = model.get_submodule("0").requires_grad_(False)
    trained = model if with_frozen else model.get_submodule("2")
    before = deepcopy(frozen.state_dict())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)

    build(optimizer, model=model).train()

    assert_same_bits(frozen.state_dict(), before)


def instance_on_a_rank() -> dict[str, Tensor]:
    model = seeded()
    run = build(torch.optim.NAdam(model.parameters(), lr=1e-2), model=model, micro_batch_size=4)
    run.train()
    return weights(run)


def test_an_instance_on_two_ranks_is_one_process(ranks: Ranks) -> None:
    both = ranks(2, instance_on_a_rank)
    alone = instance_on_a_rank()

    torch.testing.assert_close(both, [alone, alone], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build_model", "members", "found"),
    [
        (seeded, lambda model: seeded().parameters(), "does not train 0.weight"),
        (lambda: seeded, lambda model: model().parameters(), "does not train 0.weight"),
        (seeded, lambda model: model[2].parameters(), "does not train 0.weight"),
        (
            seeded,
            lambda model: [*model.parameters(), *seeded().parameters()],
            "trains parameters that are not the model's",
        ),
    ],
)
def test_an_instance_of_other_parameters_is_refused(
    build_model: Any, members: Any, found: str
) -> None:
    model = build_model()
    optimizer = torch.optim.SGD(members(model), lr=0.1)

    with refused("optimizer-instance-misfit", value="SGD", found=found):
        build(optimizer, model=model)


def test_an_instance_with_its_state_on_another_device_is_refused() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weight = next(model.parameters())
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight, device="meta")

    found = "has its state on another device than cpu"
    with refused("optimizer-instance-misfit", found=found):
        build(optimizer, model=model)


def test_an_instance_is_not_rebuilt_when_parameters_are_unfrozen() -> None:
    model = seeded()
    frozen = model.get_submodule("0").requires_grad_(False)
    optimizer = torch.optim.SGD(model.get_submodule("2").parameters(), lr=0.1)
    run = build(optimizer, model=model)

    def train() -> None:
        with run:
            for _ in run:
                frozen.requires_grad_(True)

    with refused("optimizer-instance-misfit", found="cannot be rebuilt"):
        train()


# --- what does not fit ----------------------------------------------------------------------------


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class NeedsRate(torch.optim.SGD):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, lr=rate)


@pytest.mark.parametrize(
    ("optimizer", "code", "cure"),
    [
        (NoRate, "group-without-rate", '{"lr": lr}'),
        (NoRate([nn.Parameter(torch.ones(1))]), "group-without-rate", '{"lr": lr}'),
        (sf.optim.with_closure(NeedsRate), "optimizer-arguments", "partial(NeedsRate"),
        (NeedsRate, "optimizer-arguments", "partial(NeedsRate"),
        (
            lambda params: torch.optim.SGD([weight for weight in params if weight.ndim > 1]),
            "optimizer-groups-as-parameters",
            'groups[0]["params"]',
        ),
        (lambda params: "adam", "optimizer-of-another-class", "torch.optim.Optimizer"),
        (partial(torch.optim.AdamW, lr=-1.0), "optimizer-rejects-settings", "valid values"),
        (torch.optim.Muon, "optimizer-rejects-settings", "sf.optim.muon(lr=1e-2)"),
        (torch.optim.SparseAdam, "optimizer-of-sparse-gradients", "sf.optim.adam"),
        (sf.optim.adamw, "optimizer-function-itself", "sf.optim.adamw(lr=1e-3)"),
        ("adamw", "not-an-optimizer", "functools.partial"),
    ],
)
def test_what_builds_no_optimizer_is_refused_with_what_to_write(
    optimizer: Any, code: str, cure: str
) -> None:
    with refused(code) as caught:
        build(optimizer)

    assert cure in str(caught.value.remedies[0])


def test_a_closure_is_declared_around_what_builds_an_optimizer() -> None:
    instance: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    with refused("closure-of-no-function", value="SGD"):
        sf.optim.with_closure(instance)


class Scaled(torch.optim.SGD):
    """Its constructor keeps one setting to itself, and its step calls a closure if it gets one."""

    def __init__(self, params: Any, scale: float = 1.0, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.scale = scale

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        super().step()


@pytest.mark.parametrize(
    ("then", "text"),
    [
        (partial(Scaled, scale=2.0), "optimizer.attributes.scale was 1.0, now 2.0"),
        (partial(Scaled, weight_decay=np.float32(0.5)), "optimizer.weight_decay was 0, now 0.5"),
        (sf.optim.with_closure(Scaled), "optimizer.closure was absent, now True"),
    ],
)
def test_a_resume_with_another_setting_of_an_optimizer_is_refused(
    then: Any, text: str, tmp_path: Path
) -> None:
    build(Scaled, run_dir=tmp_path / "run", stop_after="1 steps").train()

    with refused("settings-changed", sf.CheckpointError) as caught:
        build(then, run_dir=tmp_path / "run").train()

    assert text in caught.value.fields["changes"]


def test_a_sparse_embedding_is_refused_by_name() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))

    with refused("embedding-sparse", module="0"):
        build(torch.optim.Adagrad, model=model)
