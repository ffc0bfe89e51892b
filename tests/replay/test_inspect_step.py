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


def next_step(run: sf.Run, step: int = 0) -> Step:
    return Step(step, run.parts.pipeline.again(step), run.parts.task, run.parts.state)


def step_after(run: sf.Run, steps: int) -> Step:
    """The next step of a run that has made some, in memory."""
    for index in range(steps):
        step = next_step(run, index)
        forward_backward(step)
        update(step)
    return next_step(run, steps)


def all_tensors(run: sf.Run) -> dict[str, Tensor]:
    """Copies of what a checkpoint would have, and of buffers and gradients."""
    tensors: dict[str, Tensor] = {}
    checkpoint = run.parts.packed()
    for file in checkpoint.files:
        for name, tensor in checkpoint.tensors(file).items():
            tensors[f"{file}/{name}"] = tensor.clone()
    for name, buffer in run.state.models["model"].named_buffers():
        tensors[f"buffer/{name}"] = buffer.clone()
    for place, parameter in enumerate(run.state.parameters):
        if parameter.grad is not None:
            tensors[f"grad/{place}"] = parameter.grad.clone()
    return tensors


@pytest.mark.parametrize("checkpointing", ["off", "blocks", "selective"])
def test_loss_and_norm_are_those_of_the_step_bit_for_bit(checkpointing: Any) -> None:
    run = sf.Run(**settings(activation_checkpointing=checkpointing))
    step = step_after(run, 3)

    seen = look(step)

    forward_backward(step)
    update(step)
    assert step.loss is not None
    assert step.grad_norm is not None
    assert seen.loss == float(step.loss)
    assert seen.norm == float(step.grad_norm)


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
    inputs, labels, _ = faulty_runs.data(config)
    run = sf.Run(**settings(model=lambda: faulty_runs.Net(config), train_data=(inputs, labels)))
    first_bad_step, _ = faulty_runs.first_step_of(config)
    step = step_after(run, first_bad_step)
    modules = list(run.state.models["model"].modules())
    modes_before = [module.training for module in modules]
    tensors_before = all_tensors(run)
    random_state_before = torch.get_rng_state()

    look(step, samples=samples)

    assert torch.equal(torch.get_rng_state(), random_state_before)
    assert run.state.buffers.passes == 0
    with refused("update-without-gradient", step=step.index):
        sf.update(step)
    assert [module.training for module in modules] == modes_before
    torch.testing.assert_close(all_tensors(run), tensors_before, rtol=0, atol=0, equal_nan=True)
    for module in modules:
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
    step = step_after(run, 2)
    before = run.state.models["model"].get_extra_state()
    assert before

    look(step, samples=8)

    assert run.state.models["model"].get_extra_state() == before


def test_each_sample_is_passed_from_the_extra_state_before_the_step() -> None:
    """All are equal, and passed one after the other."""
    run = linear(torch.ones(16, 2), torch.ones(16, 1), model=lambda: Counting(2, 1))
    seen = look(step_after(run, 1), samples=8)
    losses = [sample.loss for sample in seen.samples]
    assert losses == [losses[0]] * 8


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
    """The loss is (w . x - y) squared: its mean, its gradient, and both of each sample by itself."""
    x, y = random_samples()
    run = linear(x, y)
    seen = look(next_step(run), samples=8)

    w = run.state.models["model"].get_parameter("0.weight").detach()
    outputs = x @ w.T
    errors = outputs - y
    losses = errors.square()
    gradients = 2 * errors * x
    gradient = gradients.mean(0)

    assert seen.loss == pytest.approx(float(losses.mean()), rel=1e-6)
    loss_sum = sum(micro_batch.loss * micro_batch.count for micro_batch in seen.micro_batches)
    assert seen.loss == pytest.approx(loss_sum / 8, rel=1e-6)

    (weight,) = seen.parameters
    assert weight.name == "0.weight"
    assert weight.shape == (1, 2)
    assert weight.share == 1.0
    assert weight.norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert weight.largest == pytest.approx(float(gradient.abs().max()), rel=1e-5)

    largest_first = losses.flatten().argsort(descending=True).tolist()
    assert [sample.id for sample in seen.samples] == largest_first
    for sample in seen.samples:
        assert sample.loss == pytest.approx(float(losses[sample.id]), rel=1e-4)
        norm = float(gradients[sample.id].norm())
        assert sample.gradient_norm == pytest.approx(norm, rel=1e-4)

    (module,) = seen.modules
    assert module.output.numbers == 8
    assert module.output.mean == pytest.approx(float(outputs.mean()), rel=1e-5)
    assert module.output.rms == pytest.approx(float(outputs.square().mean().sqrt()), rel=1e-5)
    assert module.output.largest == pytest.approx(float(outputs.abs().max()), rel=1e-5)


def random_samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 2, generator=generator), torch.randn(8, 1, generator=generator)


def test_counted_losses_are_means_over_what_they_count() -> None:
    """Of a loss that counts targets itself a sample's is the mean over its own."""

    def loss(model: Any, batch: Any) -> sf.Mean:
        squares = (model(batch[0]) - batch[1]).square()
        weights = batch[2]
        return sf.Mean((squares * weights).sum(), weights.sum())

    x, y = random_samples()
    weights = torch.tensor([[0.0], [1.0]]).repeat(4, 1)  # samples of odd number count
    run = linear(x, y, loss=loss, train_data=(x, y, weights))
    seen = look(next_step(run))

    w = run.state.models["model"].get_parameter("0.weight").detach()
    errors = x @ w.T - y
    losses = errors.square()
    gradients = 2 * errors * x
    assert seen.loss == pytest.approx(float(losses[1::2].mean()), rel=1e-6)
    (weight,) = seen.parameters
    assert weight.norm == pytest.approx(float(gradients[1::2].mean(0).norm()), rel=1e-5)
    for sample in seen.samples:
        is_counted = sample.id % 2 == 1
        if is_counted:
            assert sample.loss == pytest.approx(float(losses[sample.id]), rel=1e-4)
            norm = float(gradients[sample.id].norm())
            assert sample.gradient_norm == pytest.approx(norm, rel=1e-4)
        else:
            assert sample.loss is None


def test_two_models_have_their_names_before_their_parts() -> None:
    def loss(models: Any, batch: Any) -> Tensor:
        return F.mse_loss(models["right"](models["left"](batch[0])), batch[1])

    models = {"left": lambda: nn.Linear(2, 2), "right": lambda: nn.Linear(2, 1)}
    run = linear(torch.randn(8, 2), torch.randn(8, 1), loss=loss, model=models)

    seen = look(next_step(run))

    assert [module.name for module in seen.modules] == ["left", "right"]
    parameters = [parameter.name for parameter in seen.parameters]
    assert parameters == ["left.weight", "left.bias", "right.weight", "right.bias"]


def test_a_batch_that_cannot_be_cut_is_looked_at_whole() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        inputs, targets = zip(*samples, strict=True)
        return {"x": torch.cat(inputs), "y": torch.stack(targets)}

    def loss(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"].view(-1, 2)), batch["y"])

    x, y = random_samples()
    x[5, 0] = math.inf
    run = linear(x, y, collate_fn=collate, loss=loss, count_fn=lambda batch: len(batch["y"]))

    seen = look(next_step(run))

    assert len(seen.notes) == 1  # that it cannot be split
    assert seen.first is not None
    assert seen.first.what == "inputs"
    assert seen.first.name == "batch['x']"
    assert seen.first.samples == ()
    (weight,) = seen.parameters
    assert weight.nonfinite == 2  # inf - inf is NaN for the other column


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_are_told_without_the_loss_scale(precision: str) -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))
    y = x.sum(1, keepdim=True)
    in_fp32 = look(next_step(linear(x, y, precision="fp32")))

    run = linear(x, y, precision=precision)
    loss_scale = run.parts.run_state.precision.loss_scale
    if loss_scale is not None:
        loss_scale.scale.fill_(1024.0)
    seen = look(next_step(run))

    (weight,) = seen.parameters
    assert weight.norm == pytest.approx(in_fp32.parameters[0].norm, rel=0.02)
    assert seen.norm == pytest.approx(in_fp32.norm, rel=0.02)
    expected = {sample.id: sample.gradient_norm for sample in in_fp32.samples}
    assert {sample.id for sample in seen.samples} == expected.keys()
    for sample in seen.samples:
        assert sample.gradient_norm == pytest.approx(expected[sample.id], rel=0.05, abs=0.02)


def test_samples_are_described_by_the_function_of_the_run() -> None:
    run = linear(*random_samples())
    seen = look(next_step(run), samples=2, describe=lambda batch: f"of {len(batch[0])}")
    assert [sample.shown for sample in seen.samples] == ["of 1", "of 1"] + [None] * 6


def test_an_error_of_the_function_that_describes_samples_is_shown_in_its_place() -> None:
    def fail(batch: Any) -> str:
        raise KeyError("nothing")

    seen = look(next_step(linear(*random_samples())), samples=1, describe=fail)
    assert "describe_fn failed: KeyError" in str(seen.samples[0].shown)


def test_where_no_samples_are_asked_for_there_are_none() -> None:
    assert look(next_step(linear(*random_samples())), samples=0).samples == []


def test_a_fault_that_batch_statistics_spread_is_traced_to_its_sample() -> None:
    """After the normalisation every row is NaN: halving the samples tells whose fault that is."""

    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            big = torch.where(x.abs() > 50, x.square() * 1e36, x)
            if self.training:
                big = big - big.mean(dim=0)
            return big

    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(3))
    x[6] = 90.0
    run = linear(
        x,
        torch.zeros(8, 1),
        model=lambda: nn.Sequential(Spread(), nn.Linear(2, 1)),
        micro_batch_size=8,
    )

    seen = look(next_step(run))

    assert seen.first is not None
    assert seen.first.what == "output"
    assert seen.first.name == "0"
    assert seen.first.samples == (6,)


def test_json_holds_what_is_not_finite_as_null_with_its_name() -> None:
    config = Config(fault="sample")
    first_bad_step, _ = faulty_runs.first_step_of(config)
    seen = look(step_after(faulty_runs.build(config), first_bad_step))
    text = json.dumps(seen.to_dict(), allow_nan=False)
    assert json.loads(text)["nonfinite"] == {"loss": "nan", "norm": "nan"}


def test_a_step_without_a_loss_of_its_own_is_refused() -> None:
    """As one of a sharded model."""
    run = linear(*random_samples())
    step = next_step(run)
    without_loss = replace(run.parts.task, loss=None)
    with refused("sharded-step-not-inspected"):
        look(Step(step.index, step.micro_batches, without_loss, step.state))


def test_a_step_without_a_fault_has_no_first() -> None:
    seen: Look = look(next_step(linear(*random_samples())))
    assert seen.first is None
    assert seen.finite
    assert seen.notes == []


@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
def test_what_is_computed_again_is_not_looked_at_twice(checkpointing: Any) -> None:
    plain = look(step_after(sf.Run(**settings(activation_checkpointing="off")), 1))
    again = look(step_after(sf.Run(**settings(activation_checkpointing=checkpointing)), 1))
    assert again.modules == plain.modules
    assert {module.calls for module in again.modules} == {2}  # once in each micro-batch


def test_what_an_optimizer_notes_of_absent_gradients_is_taken_back() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 1)
            self.idle = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    run = linear(*random_samples(), model=Idle, optimizer=sf.optim.adamw(lr=0.1))
    groups = run.state.optimizers["model"].optimizer.param_groups
    names_before = [set(group) for group in groups]

    seen = look(next_step(run))

    assert [parameter.name for parameter in seen.parameters] == ["used.weight", "used.bias"]
    assert [set(group) for group in groups] == names_before
