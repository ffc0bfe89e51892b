"""What is recorded of the layers of a watched step: each number worked out a second time. (4 s)"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from identities import world_runs
from in_one import in_one
from ragged import CLASSES, FEATURES, counted_targets, plain_mean, tokens
from recorded import records_of_kind
from refused import refused
from stated import lines_naming
from surefoot.data.loader import MicroBatch
from surefoot.seeding import fold, seed_generators
from surefoot.train.layer_hooks import SATURATED, Activity, observed
from surefoot.train.layer_stats import Layers, LayerWatch

SAMPLES, STEPS = 24, 4


class Net(nn.Module):
    """With a part that is never used, one that is dead, one that is used twice, and a weight that
    is tied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(FEATURES, 6, dtype=torch.float64)
        self.bend = nn.Tanh()
        self.dead = nn.Linear(6, 6, dtype=torch.float64)
        self.rectify = nn.ReLU()
        self.dropped = nn.Dropout(0.5)
        self.again = nn.Linear(6, 6, dtype=torch.float64)
        self.out = nn.Linear(6, CLASSES, dtype=torch.float64)
        self.never = nn.Linear(2, 2, dtype=torch.float64)
        self.tied = nn.Linear(6, 6, dtype=torch.float64)
        self.tied.weight = self.again.weight
        with torch.no_grad():
            self.dead.weight[2:4] = 0
            self.dead.bias[2:4] = -1  # two of six units that never fire

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.dropped(self.bend(self.into(inputs)))
        hidden = hidden + self.rectify(self.dead(hidden))
        return self.out(self.tied(self.bend(self.again(hidden))))


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": plain_mean,
        "count_fn": counted_targets,
        "train_data": tokens(SAMPLES, seed=5, dtype=torch.float64),
        "batch_size": 12,
        "micro_batch_size": 4,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.sgd(lr=0.5),
        "clip": "norm 0.01",
        "precision": "fp32",
        "device": "cpu",
        "layer_stats_every": "1 steps",
        "log_every": "1 steps",
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(settings | changes))


def layers(run_dir: Path) -> list[dict[str, Any]]:
    return records_of_kind(run_dir, "layer_stats")


@dataclass
class StepByAutograd:
    """A step's gradients, worked out once more by autograd in a copy of the model."""

    gradients: dict[str, Tensor]  # of the whole batch
    target_count: int
    first_squared: float = 0.0  # the squared norm of the gradient of the first micro-batch
    first_target_count: int = 0


@dataclass
class WatchedRun:
    model: nn.Module
    records: list[dict[str, Any]]
    steps: list[StepByAutograd]
    weights: list[dict[str, Tensor]]  # before each step, and after the last


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def step_by_autograd(weights: dict[str, Tensor], step: sf.Step, key: int) -> StepByAutograd:
    model = Net()
    model.load_state_dict(weights, strict=False)
    result = StepByAutograd(gradients={}, target_count=0)
    total = torch.zeros((), dtype=torch.float64)
    for micro_batch in step.micro_batches:
        seed_generators(fold(key, step.index, micro_batch.index))
        target_count = counted_targets(micro_batch.batch)
        loss = plain_mean(model, micro_batch.batch)
        if micro_batch.index == 0:
            result.first_target_count = target_count
            for gradient in torch.autograd.grad(
                loss, list(model.parameters()), retain_graph=True, allow_unused=True
            ):
                if gradient is not None:
                    result.first_squared += float(gradient.square().sum())
        total = total + loss * target_count
        result.target_count += target_count
    (total / result.target_count).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result.gradients[name] = parameter.grad
    return result


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """A run of which every step is watched, and worked out a second time."""
    run_dir = tmp_path_factory.mktemp("watched") / "run"
    run = build(run_dir)
    model = run.state.model
    steps = []
    weights = [weights_of(model)]
    with run:
        for step in run:
            steps.append(step_by_autograd(weights[-1], step, run.parts.task.key))
            weights.append(weights_of(model))
    return WatchedRun(model, layers(run_dir), steps, weights)


def test_each_watched_step_has_a_record(watched: WatchedRun) -> None:
    steps = [(record["step"], record["measured_step"]) for record in watched.records]
    assert steps == [(1, 0), (2, 1), (3, 2), (4, 3)]


def test_gradient_norms_are_those_of_the_whole_batch_before_clipping(watched: WatchedRun) -> None:
    for record, step in zip(watched.records, watched.steps, strict=True):
        expected = {name: float(gradient.norm()) for name, gradient in step.gradients.items()}
        assert record["grad_norm"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_weight_norms_are_from_before_the_update_and_a_tied_weight_counts_once(
    watched: WatchedRun,
) -> None:
    for record, weights in zip(watched.records, watched.weights[:-1], strict=True):
        expected = {name: float(weight.norm()) for name, weight in weights.items()}
        assert record["weight_norm"] == pytest.approx(expected)
    assert "again.weight" in watched.records[0]["weight_norm"]
    assert "tied.weight" not in watched.records[0]["weight_norm"]


def test_update_norms_are_what_the_step_changed(watched: WatchedRun) -> None:
    for record, (before, after) in zip(watched.records, pairwise(watched.weights), strict=True):
        changed = {name: float((after[name] - before[name]).norm()) for name in before}
        assert record["update_norm"] == pytest.approx(changed, rel=1e-9, abs=1e-15)
        assert record["update_norm"]["out.weight"] > 0


def test_zero_rows_are_the_units_without_a_gradient(watched: WatchedRun) -> None:
    for record, step in zip(watched.records, watched.steps, strict=True):
        expected = {}
        for name, gradient in step.gradients.items():
            if gradient.ndim > 1:
                expected[name] = float((gradient == 0).all(1).double().mean())
        assert record["zero_grad_row_fraction"] == pytest.approx(expected)
    assert watched.records[0]["zero_grad_row_fraction"]["dead.weight"] == pytest.approx(2 / 6)


def test_the_noise_is_of_the_first_micro_batch_and_of_the_whole_batch(watched: WatchedRun) -> None:
    for record, step in zip(watched.records, watched.steps, strict=True):
        squared = sum(float(gradient.square().sum()) for gradient in step.gradients.values())
        expected = {
            "small_count": step.first_target_count,
            "small_squared": step.first_squared,
            "big_count": step.target_count,
            "big_squared": squared,
        }
        assert record["grad_noise"] == pytest.approx(expected)


def test_parameters_without_a_gradient_are_named(watched: WatchedRun) -> None:
    for record in watched.records:
        assert record["never_updated"] == ["never.weight", "never.bias"]
    assert "never.weight" not in watched.records[0]["grad_norm"]
    assert watched.records[0]["update_norm"]["never.weight"] == 0


def test_modules_are_measured_where_they_stand_and_no_dropout_is(watched: WatchedRun) -> None:
    record = watched.records[0]
    measured = {"into", "bend", "dead", "rectify", "again", "out", "tied"}
    assert set(record["activation_rms"]) == measured
    assert set(record["saturated_fraction"]) == {"bend", "rectify"}
    assert record["saturated_fraction"]["rectify"] >= 2 / 6


def test_no_hook_stays(watched: WatchedRun) -> None:
    for module in watched.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("at", [0, 2])
def test_no_hook_stays_after_an_error_in_the_loss(at: int) -> None:
    calls = []

    def broken(model: Any, batch: Any) -> Tensor:
        calls.append(1)
        model(batch[0])
        if len(calls) > at:
            raise ZeroDivisionError
        return plain_mean(model, batch)

    run = build(None, loss=broken)
    with pytest.raises(ZeroDivisionError):
        run.train()

    for module in run.state.model.modules():
        assert not module._forward_hooks


def test_the_numbers_do_not_depend_on_how_the_batch_is_cut(tmp_path: Path) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()

    names = (
        "grad_norm",
        "weight_norm",
        "update_norm",
        "zero_grad_row_fraction",
        "saturated_fraction",
        "activation_rms",
    )
    inputs, targets = tokens(SAMPLES, seed=5, dtype=torch.float64)
    targets[:, 0] = 0  # a micro-batch without any target is not passed at all
    changes: dict[str, Any] = {"model": plain, "train_data": (inputs, targets)}
    build(tmp_path / "cut", micro_batch_size=2, **changes).train()
    build(tmp_path / "whole", micro_batch_size=12, **changes).train()

    for cut, whole in zip(layers(tmp_path / "cut"), layers(tmp_path / "whole"), strict=True):
        for name in names:
            assert cut[name] == pytest.approx(whole[name], rel=1e-9)
        assert "grad_noise" in cut
        assert "grad_noise" not in whole  # which has nothing smaller


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Sigmoid()) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks).double()
        self.out = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return self.out(inputs)


@pytest.mark.parametrize("how", ["blocks", "selective"])
def test_what_is_computed_again_is_not_counted_twice(how: str, tmp_path: Path) -> None:
    build(tmp_path / "kept", model=Blocks, activation_checkpointing="off").train()
    build(tmp_path / "again", model=Blocks, activation_checkpointing=how).train()

    again = layers(tmp_path / "again")
    assert again == layers(tmp_path / "kept")
    assert {"blocks.0", "blocks.0.0", "blocks.2.1", "out"} <= set(again[0]["activation_rms"])


def test_a_module_that_is_computed_again_inside_of_the_loss_is_seen_once() -> None:
    layer = nn.Linear(3, 3)
    activity = Activity({"layer": layer})
    inputs = torch.randn(5, 3, requires_grad=True)
    with activity:
        whole = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        outputs = torch.utils.checkpoint.checkpoint(whole, inputs, use_reentrant=False)
        torch.autograd.grad(outputs.sum(), inputs)

    assert activity.by_module["layer"].numbers == 15


def test_parts_in_evaluation_mode_have_no_hooks() -> None:
    part = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with Activity(dict(part.named_modules())):
        assert not any(module._forward_hooks for module in part.modules())


@in_one
@pytest.mark.parametrize("kind", list(SATURATED), ids=lambda kind: kind.__name__)
def test_flat_is_where_the_derivative_is_nearly_none(kind: Any) -> None:
    module = kind()
    inputs = torch.linspace(-12, 12, 4801, dtype=torch.float64, requires_grad=True)
    outputs = module(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs)

    saturated = SATURATED[kind](module, inputs.detach(), outputs.detach())

    assert saturated is not None
    assert bool(saturated.any())
    assert float(slope[saturated].abs().max()) < 0.0134
    ends = (inputs < -8) | (inputs > 8)
    flat_ends = ends & (slope.abs() < 1e-3)
    assert bool(saturated[flat_ends].all())


def test_what_an_activation_overwrites_is_not_asked_for() -> None:
    module = nn.SiLU(inplace=True)
    inputs = torch.full((4,), -9.0)

    assert SATURATED[nn.SiLU](module, inputs, module(inputs)) is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
def test_parameters_of_every_kind_of_number_are_measured(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(FEATURES, CLASSES).to(dtype))
            self.bias = nn.Parameter(torch.zeros(CLASSES))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = inputs.to(self.weight.dtype) @ self.weight
            if dtype.is_complex:
                outputs = outputs.real
            return outputs.float() + self.bias

    run = build(tmp_path / "run", model=Other, train_data=tokens(SAMPLES, seed=5), length="1 steps")
    weight = run.state.model.get_parameter("weight")
    before = weight.detach().clone()
    run.train()
    update = weight.detach() - before

    (record,) = layers(tmp_path / "run")
    wide = torch.promote_types(dtype, torch.float32)
    assert record["weight_norm"]["weight"] == pytest.approx(float(before.to(wide).norm()), rel=1e-6)
    assert record["update_norm"]["weight"] == pytest.approx(float(update.to(wide).norm()), rel=1e-3)
    assert record["zero_grad_row_fraction"] == {"weight": 0.0}


def test_a_step_that_is_skipped_updates_nothing_and_says_so(tmp_path: Path) -> None:
    inputs, targets = tokens(SAMPLES, seed=5, dtype=torch.float64)
    inputs[3] = math.inf
    build(
        tmp_path / "run",
        train_data=(inputs, targets),
        batch_size=24,
        micro_batch_size=4,
        length="1 steps",
    ).train()

    (record,) = layers(tmp_path / "run")
    assert set(record["update_norm"].values()) == {0.0}
    assert not math.isfinite(record["grad_norm"]["into.weight"])
    (line,) = lines_naming((tmp_path / "run/metrics.jsonl").read_text(), '"layer_stats"')
    raw = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert raw["grad_norm"]["into.weight"] is None
    assert "grad_norm/into.weight" in raw["nonfinite"]


def test_under_a_loss_scale_gradients_are_as_they_would_be_without(tmp_path: Path) -> None:
    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    changes: dict[str, Any] = {
        "model": small,
        "train_data": tokens(SAMPLES, seed=5),
        "optimizer": sf.optim.sgd(lr=1e-9),
    }
    build(tmp_path / "fp32", precision="fp32", **changes).train()
    build(tmp_path / "fp16", precision="fp16", **changes).train()

    plain = layers(tmp_path / "fp32")[-1]
    scaled = layers(tmp_path / "fp16")[-1]
    assert scaled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.02)
    assert scaled["grad_noise"] == pytest.approx(plain["grad_noise"], rel=0.04)


def test_a_resume_remembers_which_parameters_have_had_a_gradient(tmp_path: Path) -> None:
    """A part that is used in the first step alone."""

    class Once(nn.Module):
        is_used = True

        def __init__(self) -> None:
            super().__init__()
            self.always = nn.Linear(FEATURES, CLASSES).double()
            self.once = nn.Linear(FEATURES, CLASSES).double()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.always(inputs)
            if self.is_used:
                outputs = outputs + self.once(inputs)
            return outputs

    changes: dict[str, Any] = {"model": Once, "optimizer": sf.optim.sgd(lr=0.1)}
    build(tmp_path / "run", stop_after="2 steps", **changes).train()
    Once.is_used = False
    build(tmp_path / "run", accept_change="loss", **changes).train()

    recorded = layers(tmp_path / "run")
    assert len(recorded) == STEPS
    assert "once.weight" not in recorded[-1]["grad_norm"]
    assert recorded[-1]["never_updated"] == []


def test_only_steps_that_are_due_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(
        tmp_path / "run", layer_stats_every="3 steps", log_every="2 steps", length="8 steps"
    )
    watched_steps: list[int] = []

    class Noted(LayerWatch):
        def __init__(self, index: int, layers: Layers) -> None:
            watched_steps.append(index)
            super().__init__(index, layers)

    monkeypatch.setattr("surefoot.train.layer_stats.LayerWatch", Noted)
    run.train()

    assert watched_steps == [2, 5]
    assert [record["measured_step"] for record in layers(tmp_path / "run")] == [2, 5]


def test_without_watch_every_nothing_is_watched(tmp_path: Path) -> None:
    build(tmp_path / "run", layer_stats_every=None).train()
    assert layers(tmp_path / "run") == []


def test_what_is_no_duration_is_refused() -> None:
    with refused("duration-not-understood", setting="layer_stats_every", value="often"):
        build(None, layer_stats_every="often")


def test_a_compiled_model_is_watched_without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.run.build.compiled", dict)  # whatever was made of the models
    run = build(None, compile=True)
    with run:
        assert run.session is not None
        assert run.session.watches.layers.modules == {}


def test_modules_that_are_compiled_by_themselves_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[1].compile(backend="eager")
    assert list(observed(model)) == ["0", "2"]


def test_which_parameters_have_had_a_gradient_is_known_after_a_resume(tmp_path: Path) -> None:
    stopped = build(tmp_path / "run", stop_after="4 steps")
    stopped.train()
    with build(tmp_path / "run") as resumed:
        assert resumed.state.step == 4
        updated = resumed.parts.run_state.updated_parameters

    assert updated == stopped.parts.run_state.updated_parameters
    assert updated != set()


def test_of_several_models_names_begin_with_theirs(tmp_path: Path) -> None:
    def of_both(models: Any, batch: Any) -> Tensor:
        outputs = models["first"](batch[0]) + models["second"](batch[0])
        return F.cross_entropy(outputs.movedim(2, 1), batch[1])

    def linear() -> nn.Module:
        return nn.Linear(FEATURES, CLASSES).double()

    build(tmp_path / "run", model={"first": linear, "second": linear}, loss=of_both).train()

    record = layers(tmp_path / "run")[0]
    parameters = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(record["grad_norm"]) == parameters
    assert set(record["activation_rms"]) == {"first.Linear", "second.Linear"}
    assert "grad_noise" not in record  # of which of the two optimizers would it be?


def test_a_loop_of_ones_own_is_watched_where_it_updates(tmp_path: Path) -> None:
    run = build(tmp_path / "run", loss=None)
    with run:
        for step in run.steps():
            sf.forward_backward(step, plain_mean)
            sf.update(step)
            if step.index == 2:
                break
    build(tmp_path / "other").train()

    assert layers(tmp_path / "run") == layers(tmp_path / "other")[:3]


def test_the_gan_of_the_examples_is_watched(tmp_path: Path) -> None:
    world_runs.of_example(name="gan", run_dir=str(tmp_path / "run"), layer_stats_every="2 steps")

    recorded = layers(tmp_path / "run")
    assert [record["measured_step"] for record in recorded] == [1, 3, 5]
    assert min(recorded[0]["update_norm"].values()) > 0
    assert recorded[0]["never_updated"] == []


def test_a_repeated_micro_batch_is_not_measured() -> None:
    """Under FSDP, a rank with one micro-batch less repeats its last one, with no targets."""
    layer = nn.Linear(2, 2)
    ids = np.arange(4)
    first = MicroBatch((torch.ones(4, 2),), 4, 0, ids, ids)
    padding = MicroBatch((torch.ones(4, 2),), 4, 1, ids, ids, is_padding=True)
    layers: Any = SimpleNamespace(parameters={}, modules={"layer": layer}, local_times=None)
    watch = LayerWatch(0, layers)

    loss = watch.over(lambda model, batch: model(*batch).mean(), [first, padding])
    loss(layer, first.batch)
    loss(layer, padding.batch)

    assert watch.activity.by_module["layer"].numbers == 8
