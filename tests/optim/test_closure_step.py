"""Optimizers that evaluate the loss through a closure: equal to plain loops, undone, saved,
refused. (6 s)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import Ranks, on_ranks
from refused import refused
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
    weights,
)
from zygote import Zygote

EVERY = pytest.mark.parametrize("name", CLOSURES)


# --- the same numbers as torch's loop -------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_losses_and_weights_are_those_of_a_plain_loop_to_the_bit(
    name: str, max_norm: float | None
) -> None:
    clip = "off" if max_norm is None else f"norm {max_norm}"
    run = build(source(name), clip=clip, schedule=sf.schedules.linear(warmup="2 steps"))
    model = build(sf.optim.sgd(0.1)).state.model
    factors = [run.parts.task.factors(step) for step in range(8)]
    optimizer = CLOSURES[name](model.parameters())
    expected = plain_losses(model, optimizer, batches(), max_norm=max_norm, factors=factors)

    if max_norm is None:
        assert losses(run) == expected
        assert all(map(torch.equal, weights(run.state.model), weights(model)))
    else:
        # the norm is summed in another order, and LBFGS amplifies the difference from step to step
        torch.testing.assert_close(losses(run)[:4], expected[:4], rtol=1e-4, atol=1e-5)


@EVERY
def test_the_step_does_not_depend_on_how_the_batch_is_cut(name: str) -> None:
    def after(micro_batch_size: int) -> list[Tensor]:
        inputs, labels = data()
        run = build(
            source(name),
            model=lambda: net().double(),
            train_data=(inputs.double(), labels),
            micro_batch_size=micro_batch_size,
        )
        run.train()
        return weights(run.state.model)

    torch.testing.assert_close(after(2), after(8), rtol=1e-7, atol=1e-9)


@EVERY
def test_each_evaluation_has_the_samples_and_random_numbers_of_the_step(name: str) -> None:
    drawn: list[tuple[float, float]] = []

    def drawing_loss(model: Any, batch: Any) -> Tensor:
        if model.training and torch.is_grad_enabled():
            drawn.append((float(torch.rand(())), float(batch[0].sum())))
        return loss(model, batch)

    run = build(
        source(name), loss=drawing_loss, micro_batch_size=4, length="3 steps", check_state=False
    )
    by_step = []
    with run:
        drawn.clear()
        for _ in run:
            by_step.append(list(drawn))
            drawn.clear()

    assert all(len(evaluations) >= 4 for evaluations in by_step)  # two micro-batches, twice or more
    assert [len({*evaluations}) for evaluations in by_step] == [2, 2, 2]
    assert len({pair for evaluations in by_step for pair in evaluations}) == 6


def test_a_closure_that_is_called_first_costs_no_further_evaluation() -> None:
    calls = []

    def counted_loss(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model, batch)

    run = build(CLOSURES["twice"], loss=counted_loss, length="5 steps", check_state=False)
    with run:
        calls.clear()
        for _ in run:
            pass

    assert len(calls) == 2 * 5


@EVERY
def test_batch_statistics_are_those_of_the_first_evaluation(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    found = []
    for optimizer in (source(name), sf.optim.sgd(0.1)):
        run = build(optimizer, model=model, micro_batch_size=4, length="1 steps")
        run.train()
        found.append(dict(run.state.model.named_buffers()))

    assert found[0]["1.num_batches_tracked"] == 1
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])


def test_several_models_are_moved_one_after_the_other_as_in_a_plain_loop() -> None:
    def joint_loss(models: Any, batch: Any) -> Tensor:
        return loss(lambda inputs: models["head"](torch.tanh(models["trunk"](inputs))), batch)

    makers = {"trunk": lambda: nn.Linear(4, 8), "head": lambda: nn.Linear(8, 3)}

    def build_both(optimizer: Any) -> sf.Run:
        return build(optimizer, model=makers, loss=joint_loss)

    lbfgs = CLOSURES["lbfgs"]
    run = build_both({"trunk": lbfgs, "head": partial(torch.optim.NAdam, lr=0.01)})
    models = build_both(sf.optim.sgd(0.1)).state.models
    trunk = lbfgs(models["trunk"].parameters())
    head = torch.optim.NAdam(models["head"].parameters(), lr=0.01)
    expected = []
    for batch in batches():

        def closure(batch: Any = batch) -> Tensor:
            trunk.zero_grad()
            value = joint_loss(models, batch)
            value.backward()
            return value

        head.zero_grad()
        expected.append(float(closure().detach()))
        gradients = [each.grad for each in models["head"].parameters()]
        gradients = [each.clone() for each in gradients if each is not None]
        trunk.step(closure)
        for each, gradient in zip(models["head"].parameters(), gradients, strict=True):
            each.grad = gradient
        head.step()

    assert losses(run) == expected


@EVERY
def test_an_average_of_the_weights_follows_them(name: str) -> None:
    run = build(source(name), ema=0.5)
    mean = weights(run.state.model)
    with run:
        for step in run:
            decay = min(0.5, (2 + step.index) / (11 + step.index))
            mean = [
                torch.lerp(old, new, 1 - decay)
                for old, new in zip(mean, weights(run.state.model), strict=True)
            ]

    torch.testing.assert_close(weights(run.state.ema_models["model"].model), mean)


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


def poisoned(
    name: str, evaluation: int, steps: set[int], **changes: Any
) -> tuple[sf.Run, Poisoned]:
    poison = Poisoned(evaluation, steps)
    model = changes.pop(
        "model", lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    )
    run = build(source(name), loss=poison, model=model, ema=0.9, check_state=False, **changes)
    return run, poison


def each_step(run: sf.Run, poison: Poisoned) -> Iterator[sf.Step]:
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
    run, poison = poisoned(name, evaluation, {0, 3})
    states = [bits(run)]
    skipped = []
    for step in each_step(run, poison):
        states.append(bits(run))
        skipped.append(float(step.skipped))  # type: ignore[arg-type]

    assert skipped == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    for bad in (0, 3):
        changed = {key for key in states[bad] if states[bad][key] != states[bad + 1].get(key)}
        assert all(
            key.startswith("state/") for key in changed
        )  # the meter's row, and the count of bad steps
    assert all(states[step] != states[step + 1] for step in range(8))
    assert all(torch.isfinite(each).all() for each in weights(run.state.model))


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
    assert [optimizer.taken for _ in each_step(run, poison)] == [0, 1, 2, 2, 3, 4, 5, 6]


@EVERY
def test_training_goes_on_as_if_an_undone_step_had_not_been(name: str) -> None:
    run, poison = poisoned(name, 1, {2}, model=net)
    for _ in each_step(run, poison):
        pass
    model = build(sf.optim.sgd(0.1)).state.model
    plain_losses(
        model,
        CLOSURES[name](model.parameters()),
        [batch for k, batch in enumerate(batches()) if k != 2],
    )

    assert all(map(torch.equal, weights(run.state.model), weights(model)))


@pytest.mark.parametrize("evaluation", [0, 1])
def test_too_many_bad_steps_in_a_row_end_the_run_at_the_last_good_one(
    evaluation: int, tmp_path: Path
) -> None:
    poison = Poisoned(evaluation, {2, 3, 4, 5, 6})
    settings: dict[str, Any] = {
        "loss": poison,
        "max_bad_steps": 3,
        "log_every": "1 steps",
        "check_state": False,
    }
    run = build(source("lbfgs"), length="20 steps", run_dir=tmp_path / "run", **settings)
    states: list[list[Tensor]] = []

    def train() -> None:
        states.extend(weights(run.state.model) for _ in each_step(run, poison))

    with pytest.raises(DivergedError):
        train()

    assert all(map(torch.equal, states[-1], states[1]))
    assert 6 <= len(states) <= 7


def test_the_count_of_bad_steps_survives_a_resume(tmp_path: Path) -> None:
    def session(stop_after: str | None) -> sf.Run:
        poison = Poisoned(1, {1, 2, 3})
        run = build(
            source("sam"),
            loss=poison,
            run_dir=tmp_path / "run",
            stop_after=stop_after,
            check_state=False,
        )
        for step in each_step(run, poison):
            counts.append(float(run.state.optimizers["model"].bad_in_a_row))
            del step
        return run

    counts: list[float] = []
    session("3 steps")
    session(None)

    assert counts == [0, 1, 2, 3, 0, 0, 0, 0]


def test_an_exception_in_an_evaluation_leaves_the_weights_of_the_last_step() -> None:
    calls = [0]

    def failing_loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyError
        return loss(model, batch)

    run = build(source("lbfgs"), loss=failing_loss, check_state=False)
    before = weights(run.state.model)
    with run:
        calls[0] = 0
        with pytest.raises(KeyError):
            next(iter(run))

    assert all(map(torch.equal, weights(run.state.model), before))


# --- resumed --------------------------------------------------------------------------------------


@EVERY
def test_four_steps_a_resume_and_four_more_are_eight_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = build(source(name), ema=0.9)
    whole.train()
    build(source(name), ema=0.9, run_dir=tmp_path / "run", stop_after="4 steps").train()
    resumed = build(source(name), ema=0.9, run_dir=tmp_path / "run")
    resumed.train()

    expected, now = bits(whole), bits(resumed)
    assert {key for key in expected if key not in now or expected[key] != now[key]} <= {
        "state/meter/rows"
    }


def test_the_momentum_of_an_inner_optimizer_is_saved(tmp_path: Path) -> None:
    run = build(source("sam"), run_dir=tmp_path / "run", stop_after="2 steps")
    run.train()
    inner: Any = run.state.optimizers["model"].optimizer
    resumed = build(source("sam"), run_dir=tmp_path / "run", stop_after="2 steps")
    with resumed:
        again: Any = resumed.state.optimizers["model"].optimizer
    for old, new in zip(run.state.parameters, resumed.state.parameters, strict=True):
        buffers = [
            each.base_optimizer.state[p]["momentum_buffer"]
            for each, p in ((inner, old), (again, new))
        ]
        assert torch.equal(*buffers)
    assert again.base_optimizer.param_groups is again.param_groups


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

    assert [each["size"] for each in both] == [2, 2]
    for each in both:
        torch.testing.assert_close(each["losses"], alone["losses"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(each["state"], alone["state"], rtol=1e-9, atol=1e-9)


# --- what is known of an optimizer, printed, refused ----------------------------------------------


def test_an_optimizer_is_known_to_need_a_closure_by_its_type_or_signature() -> None:
    weight = nn.Parameter(torch.ones(1))

    class Optional(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    found = [
        takes_closure(each)
        for each in (torch.optim.LBFGS([weight]), Optional([weight]), Twice([weight], lr=0.1))
    ]
    assert found == [True, True, True]
    assert not any(
        takes_closure(each) for each in (torch.optim.Adagrad([weight]), SAM([weight], lr=0.1))
    )


def test_a_step_with_another_required_argument_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def step(self, temperature: float) -> None:  # type: ignore[override]
            del temperature

    with refused("optimizer-step-arguments", argument="temperature"):
        build(partial(Odd, lr=0.1))

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
    assert first.startswith("LBFGS: ")
    assert "+536 bytes " in first  # 67 numbers of 4 bytes, twice
    assert any(
        "optimizer 2.14 kB" in line for line in memory_and_time(run.parts, measure(run.parts))
    )  # 8 copies


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


def test_lbfgs_refuses_parameters_that_are_frozen_or_unfrozen_during_training() -> None:
    def train(run: sf.Run, *, requires_grad: bool) -> None:
        with run:
            for _ in run:
                next(run.state.model.parameters()).requires_grad_(requires_grad)

    with refused("lbfgs-of-other-parameters"):
        train(build(source("lbfgs")), requires_grad=False)

    def frozen_net() -> nn.Module:
        model = net()
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        return model

    with refused("lbfgs-of-other-parameters"):
        train(build(source("lbfgs"), model=frozen_net), requires_grad=True)


def test_two_evaluations_before_an_update_are_refused() -> None:
    with build(source("lbfgs")) as run:
        step = next(iter(run.steps()))
        sf.forward_backward(step)
        sf.forward_backward(step)
        with refused("closure-of-several-losses", step=step.index):
            sf.update(step)


def test_two_evaluations_before_the_second_update_of_a_step_are_refused() -> None:
    models = {"first": net, "second": net}
    run = build({"first": sf.optim.sgd(0.1), "second": source("lbfgs")}, model=models, loss=None)
    with run:
        step = next(iter(run.steps()))
        sf.forward_backward(step, lambda models, batch: loss(models["first"], batch))
        sf.update(step, "first")
        sf.forward_backward(step, lambda models, batch: loss(models["second"], batch))
        sf.forward_backward(step, lambda models, batch: models["second"](batch[0]).square().mean())
        with refused("closure-of-several-losses", step=step.index):
            sf.update(step, "second")


def test_an_inner_optimizer_with_groups_of_its_own_is_refused() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.inner = torch.optim.SGD([dict(group) for group in self.param_groups], lr=0.1)

    with refused("inner-optimizer-with-groups", attribute="inner"):
        build(Wrapper)
