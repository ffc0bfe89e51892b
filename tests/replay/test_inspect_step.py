"""A look at one step: its numbers are those of the step, and nothing is changed by it; about 2
s.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import faulty_runs
import small_runs
import surefoot as sf
from faulty_runs import Config
from refused import refused
from surefoot.tools.replay.findings import Look
from surefoot.tools.replay.inspect_step import look
from surefoot.train.loop import Step, forward_backward, update


def upcoming(run: sf.Run, step: int = 0) -> Step:
    return Step(step, run.parts.pipeline.again(step), run.parts.task, run.parts.state)


def after(run: sf.Run, steps: int) -> Step:
    """The next step of a run after some, in memory."""
    for index in range(steps):
        step = upcoming(run, index)
        forward_backward(step)
        update(step)
    return upcoming(run, steps)


def tensors(run: sf.Run) -> dict[str, Tensor]:
    contents = run.parts.packed()
    found = {
        f"{file}/{name}": held
        for file in contents.files
        for name, held in contents.tensors(file).items()
    }
    found |= {f"buffer/{name}": held for name, held in run.state.models["model"].named_buffers()}
    return found | {
        f"grad/{place}": held.grad
        for place, held in enumerate(run.state.parameters)
        if held.grad is not None
    }


@pytest.mark.parametrize("checkpointing", ["off", "blocks", "selective"])
def test_loss_and_norm_are_those_of_the_step_bit_for_bit(checkpointing: Any) -> None:
    run = sf.Run(**settings(activation_checkpointing=checkpointing))
    step = after(run, 3)
    seen = look(step)
    forward_backward(step)
    update(step)
    assert step.loss is not None
    assert step.grad_norm is not None
    assert (seen.loss, seen.norm) == (float(step.loss), float(step.grad_norm))


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": lambda: faulty_runs.Net(Config()),
        "loss": small_runs.loss,
        "train_data": faulty_runs.data(Config())[:2],
        "batch_size": 8,
        "micro_batch_size": 4,
        "length": "9 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "ema": 0.9,
        "console": False,
    } | changes


@pytest.mark.parametrize(("fault", "samples"), [("none", 8), ("none", 0), ("magnitude", 8)])
def test_nothing_is_changed_by_a_look(fault: Any, samples: int) -> None:
    config = Config(fault=fault)
    run = sf.Run(
        **settings(model=lambda: faulty_runs.Net(config), train_data=faulty_runs.data(config)[:2])
    )
    step = after(run, faulty_runs.first_step_of(config)[0])
    modes = [module.training for module in run.state.models["model"].modules()]
    before = {name: held.clone() for name, held in tensors(run).items()}
    drawn = torch.get_rng_state()
    look(step, samples=samples)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert run.state.buffers.passes == 0
    with refused("update-without-gradient", step=step.index):
        sf.update(step)
    assert [module.training for module in run.state.models["model"].modules()] == modes
    found = tensors(run)
    assert found.keys() == before.keys()
    for name, held in before.items():
        torch.testing.assert_close(found[name], held, rtol=0, atol=0, equal_nan=True, msg=name)
    for module in run.state.models["model"].modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Counting(nn.Linear):
    """Keeps by its extra state how often it was called, where no walk through attributes sees it,
    and gives out more each time.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.passes = io.BytesIO()

    def forward(self, x: Tensor) -> Tensor:
        self.passes.write(b"x")
        return super().forward(x) * len(self.passes.getvalue())

    def get_extra_state(self) -> str:
        return self.passes.getvalue().decode()

    def set_extra_state(self, state: str) -> None:
        self.passes = io.BytesIO()
        self.passes.write(state.encode())


def test_extra_state_is_not_changed_by_a_look() -> None:
    run = linear(torch.ones(16, 2), torch.ones(16, 1), model=lambda: Counting(2, 1))
    step = after(run, 2)
    before = run.state.models["model"].get_extra_state()
    look(step, samples=8)
    assert run.state.models["model"].get_extra_state() == before != ""


def test_each_sample_is_passed_from_the_extra_state_before_the_step() -> None:
    run = linear(torch.ones(16, 2), torch.ones(16, 1), model=lambda: Counting(2, 1))
    seen = look(after(run, 1), samples=8)
    assert (
        len({sample.loss for sample in seen.samples}) == 1
    )  # all are equal, and passed one after the other


def linear(x: Tensor, y: Tensor, **changes: Any) -> sf.Run:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return sf.Run(
        **settings(
            model=lambda: nn.Sequential(nn.Linear(2, 1, bias=False)),
            loss=loss,
            train_data=(x, y),
            optimizer=sf.optim.sgd(lr=0.1),
        )
        | changes
    )


def test_a_linear_layer_in_closed_form() -> None:
    """Loss w . x - y squared: its mean, its gradient, and both of each sample by itself."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 2, generator=generator), torch.randn(8, 1, generator=generator)
    run = linear(x, y)
    seen = look(upcoming(run), samples=8)
    w = run.state.models["model"].get_parameter("0.weight").detach()
    error = x @ w.T - y
    gradients = 2 * error * x
    assert seen.loss == pytest.approx(float(error.square().mean()), rel=1e-6)
    (of_weight,) = seen.parameters
    assert (of_weight.name, of_weight.shape, of_weight.share) == ("0.weight", (1, 2), 1.0)
    assert of_weight.norm == pytest.approx(float(gradients.mean(0).norm()), rel=1e-5)
    assert of_weight.largest == pytest.approx(float(gradients.mean(0).abs().max()), rel=1e-5)
    losses = {sample.id: (sample.loss, sample.gradient_norm) for sample in seen.samples}
    assert list(losses) == error.flatten().square().argsort(descending=True).tolist()
    for sample in range(8):
        expected = (float(error[sample] ** 2), float(gradients[sample].norm()))
        assert losses[sample] == pytest.approx(expected, rel=1e-4)
    (output,) = (held.output for held in seen.modules)
    told = (output.numbers, output.mean, output.rms, output.largest)
    z = x @ w.T
    assert told == pytest.approx(
        (8, float(z.mean()), float(z.square().mean().sqrt()), float(z.abs().max())), rel=1e-5
    )
    assert seen.loss == pytest.approx(
        sum(held.loss * held.count for held in seen.micro_batches) / 8, rel=1e-6
    )


def test_counted_losses_are_means_over_what_they_count() -> None:
    """Of a loss that counts targets itself a sample's is the mean over its own."""

    def loss(model: Any, batch: Any) -> sf.Mean:
        squares = (model(batch[0]) - batch[1]).square()
        weights = batch[2]
        return sf.Mean((squares * weights).sum(), weights.sum())

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 2, generator=generator), torch.randn(8, 1, generator=generator)
    weights = torch.tensor([[0.0], [1.0]]).repeat(4, 1)
    run = linear(x, y, loss=loss, train_data=(x, y, weights))
    seen = look(upcoming(run))
    error = x @ run.state.models["model"].get_parameter("0.weight").detach().T - y
    assert seen.loss == pytest.approx(float(error[1::2].square().mean()), rel=1e-6)
    gradient = (2 * error * x)[1::2].mean(0)
    assert seen.parameters[0].norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    for sample in seen.samples:
        if sample.id % 2:
            assert sample.loss == pytest.approx(float(error[sample.id] ** 2), rel=1e-4)
            assert sample.gradient_norm == pytest.approx(
                float((2 * error * x)[sample.id].norm()), rel=1e-4
            )
        else:
            assert sample.loss is None


def test_two_models_have_their_names_before_their_parts() -> None:
    def loss(models: Any, batch: Any) -> Tensor:
        return F.mse_loss(models["right"](models["left"](batch[0])), batch[1])

    models = {"left": lambda: nn.Linear(2, 2), "right": lambda: nn.Linear(2, 1)}
    seen = look(upcoming(linear(torch.randn(8, 2), torch.randn(8, 1), loss=loss, model=models)))
    assert [held.name for held in seen.modules] == ["left", "right"]
    assert [held.name for held in seen.parameters] == [
        "left.weight",
        "left.bias",
        "right.weight",
        "right.bias",
    ]


def test_a_batch_that_cannot_be_cut_is_looked_at_whole() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.cat([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def loss(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"].view(-1, 2)), batch["y"])

    x, y = torch.randn(8, 2), torch.randn(8, 1)
    x[5, 0] = math.inf
    run = linear(x, y, collate_fn=collate, loss=loss, count_fn=lambda batch: len(batch["y"]))
    seen = look(upcoming(run))
    assert len(seen.notes) == 1  # that it cannot be split
    assert seen.first is not None
    assert (seen.first.what, seen.first.name, seen.first.samples) == ("inputs", "batch['x']", ())
    assert [held.nonfinite for held in seen.parameters] == [
        2
    ]  # inf - inf is NaN for the other column


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_are_told_without_the_loss_scale(precision: str) -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    plain, scaled = (
        linear(x, x.sum(1, keepdim=True), precision=name) for name in ("fp32", precision)
    )
    if scaled.parts.run_state.precision.loss_scale is not None:
        scaled.parts.run_state.precision.loss_scale.scale.fill_(1024.0)
    one, other = look(upcoming(plain)), look(upcoming(scaled))
    assert other.parameters[0].norm == pytest.approx(one.parameters[0].norm, rel=0.02)
    assert other.norm == pytest.approx(one.norm, rel=0.02)
    for sample, same in zip(
        sorted(one.samples, key=by_id), sorted(other.samples, key=by_id), strict=True
    ):
        assert same.gradient_norm == pytest.approx(sample.gradient_norm, rel=0.05, abs=0.02)


def by_id(sample: Any) -> int:
    return int(sample.id)


def test_samples_are_described_by_the_function_of_the_run() -> None:
    run = linear(torch.randn(8, 2), torch.randn(8, 1))
    seen = look(upcoming(run), samples=2, describe=lambda batch: f"of {len(batch[0])}")
    assert [sample.shown for sample in seen.samples] == ["of 1", "of 1"] + [None] * 6

    def failing(batch: Any) -> str:
        raise KeyError("nothing")

    seen = look(upcoming(run), samples=1, describe=failing)
    assert "describe_fn failed: KeyError" in str(seen.samples[0].shown)
    assert look(upcoming(run), samples=0).samples == []


def test_a_fault_that_batch_statistics_spread_is_traced_to_its_sample() -> None:
    """After the normalisation every row is NaN: halving the samples tells whose fault that is."""

    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            big = torch.where(x.abs() > 50, x.square() * 1e36, x)
            return big - big.mean(dim=0) if self.training else big

    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(3))
    x[6] = 90.0
    run = linear(
        x,
        torch.zeros(8, 1),
        model=lambda: nn.Sequential(Spread(), nn.Linear(2, 1)),
        micro_batch_size=8,
    )
    seen = look(upcoming(run))
    assert seen.first is not None
    assert (seen.first.what, seen.first.name, seen.first.samples) == ("output", "0", (6,))


def test_json_holds_what_is_not_finite_as_null_with_its_name() -> None:
    config = Config(fault="sample")
    run = faulty_runs.build(config)
    plain = look(after(run, faulty_runs.first_step_of(config)[0])).to_dict()
    text = json.dumps(plain, allow_nan=False)
    assert json.loads(text)["nonfinite"] == {"loss": "nan", "norm": "nan"}


def test_sharded_models_are_refused() -> None:
    run = linear(torch.randn(8, 2), torch.randn(8, 1))
    step = upcoming(run)
    with refused("sharded-step-not-inspected"):
        look(replace_task(run, step))


def replace_task(run: sf.Run, step: Step) -> Step:
    return Step(step.index, step.micro_batches, replace(run.parts.task, loss=None), step.state)


def test_a_step_without_a_fault_has_no_first() -> None:
    seen: Look = look(upcoming(linear(torch.randn(8, 2), torch.randn(8, 1))))
    assert (seen.first, seen.finite, seen.notes) == (None, True, [])


@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
def test_what_is_computed_again_is_not_looked_at_twice(checkpointing: Any) -> None:
    plain, again = (
        look(after(sf.Run(**settings(activation_checkpointing=how)), 1))
        for how in ("off", checkpointing)
    )
    assert again.modules == plain.modules
    assert {held.calls for held in again.modules} == {2}  # once in each micro-batch


def test_what_an_optimizer_notes_of_absent_gradients_is_taken_back() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    run = linear(torch.randn(8, 2), torch.randn(8, 1), model=Idle, optimizer=sf.optim.adamw(lr=0.1))
    groups = [dict(group) for group in run.state.optimizers["model"].optimizer.param_groups]
    seen = look(upcoming(run))
    assert [held.name for held in seen.parameters] == ["used.weight", "used.bias"]
    found = run.state.optimizers["model"].optimizer.param_groups
    assert [group.keys() for group in found] == [group.keys() for group in groups]
