"""Optimizers that evaluate the loss through a closure: equal to plain loops, undone, saved,
refused. (6 s)
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks, on_ranks
from refused import refused
from same_bits import assert_same_bits, weights
from small_runs import outcome
from surefoot.errors import DivergedError
from surefoot.optim.user_optimizer import takes_closure
from surefoot.tools.plan.measure import measure, memory_and_time
from surefoot.tools.plan.summary import parameters_by_group
from with_closures import (
    CLOSURES,
    SAM,
    Twice,
    batches,
    bits,
    build,
    data,
    loss,
    losses,
    net,
    plain_losses,
    source,
)
from zygote import Zygote

EVERY = pytest.mark.parametrize("name", CLOSURES)


# --- the same numbers as torch's loop -------------------------------------------------------------


def initial_model() -> nn.Module:
    """The model with which each run here begins."""
    return build(sf.optim.sgd(0.1)).state.model


WARMUP = sf.schedules.linear(warmup="2 steps")


def plain_loop(name: str, run: sf.Run, *, max_norm: float | None) -> tuple[nn.Module, list[float]]:
    """The model and the losses of torch's loop over the batches and rates of a run."""
    model = initial_model()
    optimizer = CLOSURES[name](model.parameters())
    factors = [run.parts.task.factors(step) for step in range(8)]
    values = plain_losses(model, optimizer, batches(), max_norm=max_norm, factors=factors)
    return model, values


@EVERY
def test_losses_and_weights_are_those_of_a_plain_loop_to_the_bit(name: str) -> None:
    run = build(source(name), clip="off", schedule=WARMUP)
    model, expected = plain_loop(name, run, max_norm=None)

    assert losses(run) == expected
    assert_same_bits(weights(run), model.state_dict())


@EVERY
def test_losses_of_clipped_steps_are_those_of_a_plain_loop(name: str) -> None:
    """The norm is summed in another order, and LBFGS amplifies the difference from step to step."""
    run = build(source(name), clip="norm 0.2", schedule=WARMUP)
    _, expected = plain_loop(name, run, max_norm=0.2)

    torch.testing.assert_close(losses(run)[:4], expected[:4], rtol=1e-4, atol=1e-5)


@EVERY
def test_the_step_does_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    def trained_weights(micro_batch_size: int) -> dict[str, Tensor]:
        inputs, labels = data()
        run = build(
            source(name),
            model=lambda: net().double(),
            train_data=(inputs.double(), labels),
            micro_batch_size=micro_batch_size,
        )
        run.train()
        return weights(run)

    torch.testing.assert_close(trained_weights(2), trained_weights(8), rtol=1e-7, atol=1e-9)


@EVERY
def test_each_evaluation_has_the_samples_and_random_numbers_of_the_step(name: str) -> None:
    passes: list[tuple[float, float]] = []

    def drawing_loss(model: Any, batch: Any) -> Tensor:
        if model.training and torch.is_grad_enabled():
            passes.append((float(torch.rand(())), float(batch[0].sum())))
        return loss(model, batch)

    run = build(
        source(name), loss=drawing_loss, micro_batch_size=4, length="3 steps", check_state=False
    )
    passes_by_step = []
    with run:
        passes.clear()
        for _ in run:
            passes_by_step.append(list(passes))
            passes.clear()

    for step_passes in passes_by_step:
        assert len(step_passes) >= 4  # two micro-batches, twice or more
        assert len({*step_passes}) == 2
    assert len({*chain.from_iterable(passes_by_step)}) == 6


def test_a_closure_that_is_called_first_costs_no_further_evaluation() -> None:
    evaluations = 0

    def counted_loss(model: Any, batch: Any) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        return loss(model, batch)

    run = build(CLOSURES["twice"], loss=counted_loss, length="5 steps", check_state=False)
    with run:
        evaluations = 0
        for _ in run:
            pass

    assert evaluations == 2 * 5


@EVERY
def test_batch_statistics_are_those_of_the_first_evaluation(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def buffers_after_a_step(optimizer: Any) -> dict[str, Tensor]:
        run = build(optimizer, model=model, micro_batch_size=4, length="1 steps")
        run.train()
        return dict(run.state.model.named_buffers())

    buffers = buffers_after_a_step(source(name))
    expected = buffers_after_a_step(sf.optim.sgd(0.1))

    assert buffers["1.num_batches_tracked"] == 1
    assert_same_bits(buffers, expected)


def test_several_models_are_moved_one_after_the_other_as_in_a_plain_loop() -> None:
    def joint_loss(models: Any, batch: Any) -> Tensor:
        return loss(lambda inputs: models["head"](torch.tanh(models["trunk"](inputs))), batch)

    makers = {"trunk": lambda: nn.Linear(4, 8), "head": lambda: nn.Linear(8, 3)}
    lbfgs = CLOSURES["lbfgs"]
    nadam = partial(torch.optim.NAdam, lr=0.01)
    run = build({"trunk": lbfgs, "head": nadam}, model=makers, loss=joint_loss)
    models = build(sf.optim.sgd(0.1), model=makers, loss=joint_loss).state.models
    trunk = lbfgs(models["trunk"].parameters())
    head = nadam(models["head"].parameters())

    expected = []
    for batch in batches():

        def closure(batch: Any = batch) -> Tensor:
            trunk.zero_grad()
            value = joint_loss(models, batch)
            value.backward()
            return value

        head.zero_grad()
        expected.append(float(closure().detach()))
        gradients = [deepcopy(parameter.grad) for parameter in models["head"].parameters()]
        trunk.step(closure)
        for parameter, gradient in zip(models["head"].parameters(), gradients, strict=True):
            parameter.grad = gradient
        head.step()

    assert losses(run) == expected


@EVERY
def test_an_average_of_the_weights_follows_them(name: str) -> None:
    run = build(source(name), ema=0.5)
    expected = weights(run)
    with run:
        for step in run:
            decay = min(0.5, (2 + step.index) / (11 + step.index))
            for key, weight in weights(run).items():
                expected[key] = torch.lerp(expected[key], weight, 1 - decay)

    average = run.state.ema_models["model"].model.state_dict()
    torch.testing.assert_close(dict(average), expected)


# --- steps that are not taken ---------------------------------------------------------------------


class Poisoned:
    """A loss that is NaN in the n-th evaluation of some steps, counted from 0."""

    def __init__(self, evaluation: int, steps: set[int]) -> None:
        self.evaluation = evaluation
        self.steps = steps
        self.seen = 0
        self.run: sf.Run | None = None

    def __call__(self, model: Any, batch: Any) -> Tensor:
        value = loss(model, batch)
        if self.run is None:
            return value
        is_bad = self.run.state.step in self.steps and self.seen >= self.evaluation
        self.seen += 1
        return value * torch.nan if is_bad else value


def net_with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def train_poisoned(run: sf.Run, poison: Poisoned) -> Iterator[sf.Step]:
    with run:
        poison.run = run
        for step in run:
            poison.seen = 0
            yield step


@EVERY
@pytest.mark.parametrize("evaluation", [0, 1])
def test_a_step_with_an_evaluation_that_is_not_finite_changes_no_bit(
    name: str, evaluation: int
) -> None:
    poison = Poisoned(evaluation, {0, 3})
    run = build(source(name), loss=poison, model=net_with_norm, ema=0.9, check_state=False)
    states = [bits(run)]
    skipped = []
    for step in train_poisoned(run, poison):
        states.append(bits(run))
        skipped.append(float(step.skipped))  # type: ignore[arg-type]

    assert skipped == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for step, (before, after) in enumerate(pairwise(states)):
        changed = [key for key in before if before[key] != after.get(key)]
        assert changed != []
        if skipped[step]:  # the meter's row, and the count of bad steps
            assert all(key.startswith("state/") for key in changed)
    assert all(weight.isfinite().all() for weight in weights(run).values())


def test_an_undone_step_is_not_counted_in_the_optimizer_s_own_numbers() -> None:
    class Counted(Twice):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.taken = 0

        def step(self, closure: Any) -> Tensor:  # type: ignore[override]
            self.taken += 1
            return super().step(closure)

    poison = Poisoned(1, {0, 3})
    run = build(Counted, loss=poison, check_state=False)
    optimizer: Any = run.state.optimizers["model"].optimizer

    taken = [optimizer.taken for _ in train_poisoned(run, poison)]

    assert taken == [0, 1, 2, 2, 3, 4, 5, 6]


@EVERY
def test_training_goes_on_as_if_an_undone_step_had_not_been(name: str) -> None:
    poison = Poisoned(1, {2})
    run = build(source(name), loss=poison, check_state=False)
    for _ in train_poisoned(run, poison):
        pass

    model = initial_model()
    all_batches = batches()
    plain_losses(model, CLOSURES[name](model.parameters()), [*all_batches[:2], *all_batches[3:]])
    assert_same_bits(weights(run), model.state_dict())


@pytest.mark.parametrize("evaluation", [0, 1])
def test_too_many_bad_steps_in_a_row_end_the_run_at_the_last_good_one(
    evaluation: int, tmp_path: Path
) -> None:
    poison = Poisoned(evaluation, {2, 3, 4, 5, 6})
    run = build(
        source("lbfgs"),
        loss=poison,
        length="20 steps",
        run_dir=tmp_path / "run",
        max_bad_steps=3,
        log_every="1 steps",
        check_state=False,
    )
    states = []

    def train() -> None:
        for _ in train_poisoned(run, poison):
            states.append(weights(run))

    with pytest.raises(DivergedError):
        train()

    assert 6 <= len(states) <= 7
    assert_same_bits(states[-1], states[1])


def test_the_count_of_bad_steps_survives_a_resume(tmp_path: Path) -> None:
    counts: list[float] = []

    def session(stop_after: str | None) -> None:
        poison = Poisoned(1, {1, 2, 3})
        run = build(
            source("sam"),
            loss=poison,
            run_dir=tmp_path / "run",
            stop_after=stop_after,
            check_state=False,
        )
        for _ in train_poisoned(run, poison):
            counts.append(float(run.state.optimizers["model"].bad_in_a_row))

    session("3 steps")
    session(None)

    assert counts == [0, 1, 2, 3, 0, 0, 0, 0]


def test_an_exception_in_an_evaluation_leaves_the_weights_of_the_last_step() -> None:
    evaluations = 0

    def failing_loss(model: Any, batch: Any) -> Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3:
            raise KeyError
        return loss(model, batch)

    run = build(source("lbfgs"), loss=failing_loss, check_state=False)
    before = weights(run)
    with run:
        evaluations = 0
        with pytest.raises(KeyError):
            next(iter(run))

    assert_same_bits(weights(run), before)


# --- resumed --------------------------------------------------------------------------------------


@EVERY
def test_four_steps_a_resume_and_four_more_are_eight_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = build(source(name), ema=0.9)
    whole.train()
    build(source(name), ema=0.9, run_dir=tmp_path / "run", stop_after="4 steps").train()
    resumed = build(source(name), ema=0.9, run_dir=tmp_path / "run")
    resumed.train()

    bits_of_whole = bits(whole)
    bits_of_resumed = bits(resumed)
    bits_of_resumed["state/meter/rows"] = bits_of_whole["state/meter/rows"]  # times
    assert bits_of_resumed == bits_of_whole


def test_the_momentum_of_an_inner_optimizer_is_saved(tmp_path: Path) -> None:
    stopped = build(source("sam"), run_dir=tmp_path / "run", stop_after="2 steps")
    stopped.train()
    resumed = build(source("sam"), run_dir=tmp_path / "run", stop_after="2 steps")
    with resumed:
        sam: Any = resumed.state.optimizers["model"].optimizer

    assert_same_bits(inner_momentum(resumed), inner_momentum(stopped))
    assert sam.base_optimizer.param_groups is sam.param_groups


def inner_momentum(run: sf.Run) -> dict[str, Tensor]:
    sam: Any = run.state.optimizers["model"].optimizer
    momentum = {}
    for name, parameter in run.state.model.named_parameters():
        momentum[name] = sam.base_optimizer.state[parameter]["momentum_buffer"]
    return momentum


@pytest.mark.fast("[45]-lbfgs")
@pytest.mark.parametrize("name", ["lbfgs", "sam"])
@pytest.mark.parametrize("kills", [[45], [4, 38, 9]], ids=str)
def test_killed_inside_a_closure_a_run_ends_with_the_same_bits(
    name: str, kills: list[int], ranks: Ranks, tmp_path: Path
) -> None:
    killed_and_resumed(Zygote(ranks), name, kills, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kill"), [("lbfgs", 23), ("sam", 12), ("of a package", 7)])
def test_two_ranks_killed_in_a_step_end_with_the_same_bits(
    name: str, kill: int, ranks: Ranks, tmp_path: Path
) -> None:
    killed_and_resumed(Zygote(ranks, 2), name, [kill], tmp_path)


def killed_and_resumed(zygote: Zygote, name: str, kills: list[int], tmp_path: Path) -> None:
    """Each kill is before that pass of a session; the last session begins from the optimizer state
    of several steps.
    """
    assert zygote.run(tmp_path / "whole", optimizer=name) == 0
    for at in kills:
        assert zygote.run(tmp_path / "killed", optimizer=name, waits=True, **{"pass": at}) == -9
    assert max((tmp_path / "killed" / "checkpoints").glob("step-*")).name >= "step-00000004"
    assert zygote.run(tmp_path / "killed", optimizer=name) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


# --- two ranks ------------------------------------------------------------------------------------


def on_a_rank(name: str, micro_batch_size: int) -> dict[str, Any]:
    inputs, labels = data()
    run = build(
        source(name),
        model=lambda: nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        ).double(),
        train_data=(inputs.double(), labels),
        micro_batch_size=micro_batch_size,
        clip="norm 0.5",
    )
    values = losses(run)
    return {"losses": values, "state": run.state.model.state_dict(), "size": run.world_size}


@pytest.mark.fast("lbfgs", "sam")
@EVERY
def test_two_ranks_are_one_process(name: str, ranks: Ranks) -> None:
    alone = on_a_rank(name, 4)

    both = ranks(2, on_a_rank, name=name, micro_batch_size=4)

    for rank in both:
        assert rank["size"] == 2
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rank["state"], alone["state"], rtol=1e-9, atol=1e-9)


# --- what is known of an optimizer, printed, refused ----------------------------------------------


def test_an_optimizer_is_known_to_need_a_closure_by_its_type_or_signature() -> None:
    weight = nn.Parameter(torch.ones(1))

    class Optional(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert takes_closure(torch.optim.LBFGS([weight]))
    assert takes_closure(Optional([weight]))
    assert takes_closure(Twice([weight], lr=0.1))
    assert not takes_closure(torch.optim.Adagrad([weight]))
    assert not takes_closure(SAM([weight], lr=0.1))


def test_a_step_with_another_required_argument_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def step(self, temperature: float) -> None:  # type: ignore[override]
            del temperature

    with refused("optimizer-step-arguments", argument="temperature"):
        build(partial(Odd, lr=0.1))


def test_a_closure_that_is_passed_by_name_alone_is_refused() -> None:
    class ByName(torch.optim.SGD):
        def step(self, *, closure: Any) -> None:  # type: ignore[override]
            closure()

    with refused("optimizer-step-arguments", argument="closure"):
        build(partial(ByName, lr=0.1))


def test_a_closure_that_the_signature_hides_is_explained() -> None:
    with refused("closure-not-declared"):
        build(CLOSURES["sam"]).train()


def test_plan_prints_the_way_a_step_is_undone_and_the_memory() -> None:
    run = build(source("lbfgs"))

    first, *_ = parameters_by_group(run.parts)
    memory = memory_and_time(run.parts, measure(run.parts))

    assert first.startswith("LBFGS: ")
    assert "+536 bytes " in first  # 67 numbers of 4 bytes, twice
    assert any("optimizer 2.14 kB" in line for line in memory)  # 8 copies


@pytest.mark.parametrize(
    "changes", [{"precision": "fp16"}, {"compile": True}, {"clip": "auto 0.9"}], ids=str
)
def test_settings_that_do_not_fit_a_closure_are_refused_by_name(changes: dict[str, Any]) -> None:
    ((setting, value),) = changes.items()
    with refused("setting-with-closure", setting=setting, value=value, optimizer="LBFGS"):
        build(torch.optim.LBFGS, **changes)


def test_shards_do_not_fit_a_closure_and_are_refused_by_name() -> None:
    def refuse(_: int) -> None:  # in a process of its own, which keeps its process group
        with refused("optimizer-of-whole-parameters", value="LBFGS"):
            build(torch.optim.LBFGS, parallel="fsdp")

    assert on_ranks(1, refuse) == [0]


def test_compile_auto_stays_off() -> None:
    run = build(torch.optim.LBFGS, compile="auto", length="1 steps")
    run.train()
    assert run.parts.plan.identity["compile"] is False


def train_switching(run: sf.Run, *, requires_grad: bool) -> None:
    """Freeze or unfreeze the first parameter after each step."""
    first = next(run.state.model.parameters())
    with run:
        for _ in run:
            first.requires_grad_(requires_grad)


def test_lbfgs_refuses_parameters_that_are_frozen_during_training() -> None:
    with refused("lbfgs-of-other-parameters"):
        train_switching(build(source("lbfgs")), requires_grad=False)


def test_lbfgs_refuses_parameters_that_are_unfrozen_during_training() -> None:
    def frozen_net() -> nn.Module:
        model = net()
        next(model.parameters()).requires_grad_(False)
        return model

    with refused("lbfgs-of-other-parameters"):
        train_switching(build(source("lbfgs"), model=frozen_net), requires_grad=True)


def test_two_evaluations_before_an_update_are_refused() -> None:
    with build(source("lbfgs")) as run:
        step = next(iter(run.steps()))
        sf.forward_backward(step)
        sf.forward_backward(step)
        with refused("closure-of-several-losses", step=step.index):
            sf.update(step)


def test_two_evaluations_before_the_second_update_of_a_step_are_refused() -> None:
    models = {"first": net, "second": net}
    optimizers = {"first": sf.optim.sgd(0.1), "second": source("lbfgs")}

    def loss_of_first(models: Any, batch: Any) -> Tensor:
        return loss(models["first"], batch)

    def loss_of_second(models: Any, batch: Any) -> Tensor:
        return loss(models["second"], batch)

    with build(optimizers, model=models, loss=None) as run:
        step = next(iter(run.steps()))
        sf.forward_backward(step, loss_of_first)
        sf.update(step, "first")
        sf.forward_backward(step, loss_of_second)
        sf.forward_backward(step, loss_of_second)
        with refused("closure-of-several-losses", step=step.index):
            sf.update(step, "second")


def test_an_inner_optimizer_with_groups_of_its_own_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            copied_groups = [dict(group) for group in self.param_groups]
            self.inner = torch.optim.SGD(copied_groups, lr=0.1)

    with refused("inner-optimizer-with-groups", attribute="inner"):
        build(Wrapper)
