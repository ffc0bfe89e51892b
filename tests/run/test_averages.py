"""Averages of weights in runs: what is evaluated, saved, exported and loaded, also after a resume
and on several ranks. (10 s)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import averaged_runs
import surefoot as sf
from averaged_runs import INPUTS, LABELS, Student, Student16, build, trained
from rank_processes import Ranks
from refused import refused
from surefoot.checkpoint import Store
from surefoot.config.averaging import Averaging
from surefoot.optim.ema import Ema, copy_model


def newest(run_dir: Path) -> sf.checkpoint.Checkpoint:
    chosen = Store(run_dir / "checkpoints").newest_intact()
    assert chosen is not None
    return chosen[0]


def assert_same_tensors(one: sf.checkpoint.Checkpoint, other: sf.checkpoint.Checkpoint) -> None:
    assert one.files.keys() == other.files.keys()
    for file in other.files:
        tensors = one.tensors(file)
        for name, expected in other.tensors(file).items():
            assert torch.equal(tensors[name], expected), f"{file}: {name}"


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
def test_what_the_body_moves_is_evaluated_saved_and_exported_as_it_is(
    optimizer: str, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", optimizer=optimizer)
    live = run.state.model
    saved = newest(tmp_path / "run").tensors("ema")
    sf.load(run).export(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    loaded = sf.load(tmp_path / "run").load_model(Student)
    for tensors in (saved, exported, loaded.state_dict()):
        assert torch.equal(tensors["target.weight"], live.target.weight)
        assert torch.equal(tensors["shift"], live.shift)
        assert not torch.equal(tensors["online.weight"], live.online.weight)

    by_hand = Student()
    by_hand.load_state_dict(saved)
    by_hand.scratch = live.scratch
    by_hand.temperature = live.temperature
    expected = F.cross_entropy(by_hand(INPUTS[:20]), LABELS[:20]).item()
    assert run.evaluate()["val/loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "schedule_free"])
def test_evaluations_change_no_average(optimizer: str, tmp_path: Path) -> None:
    trained(tmp_path / "often", optimizer=optimizer, evaluate_every="1 steps")
    trained(tmp_path / "once", optimizer=optimizer, evaluate_every="12 steps")

    average = newest(tmp_path / "often").tensors("ema")
    for name, expected in newest(tmp_path / "once").tensors("ema").items():
        assert torch.equal(average[name], expected), name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema_start": "6 steps"},
        {"ema_start": "1 epochs", "ema_every": "2 steps"},
        {"ema_ramp": False},
        {"optimizer": "schedule_free"},
    ],
    ids=str,
)
def test_a_resume_goes_on_with_the_same_average(changes: dict[str, Any], tmp_path: Path) -> None:
    """Of 16-bit weights, before and after the average begins."""
    changes = {"model": Student16, "unsaved": False} | changes
    trained(tmp_path / "whole", **changes)
    for stop in ("3 steps", "7 steps", "12 steps"):
        trained(tmp_path / "parts", stop_after=stop, **changes)

    whole = newest(tmp_path / "whole")
    parts = newest(tmp_path / "parts")
    assert ("ema_float32" in whole.files) == ("optimizer" not in changes)
    assert_same_tensors(parts, whole)
    assert whole.saved.average_updates == parts.saved.average_updates


def test_an_average_of_a_run_is_that_of_its_weights(tmp_path: Path) -> None:
    """With a start, an interval and a skipped step, by an average that is called by hand."""
    run = build(None, ema=0.7, ema_start="3 steps", ema_every="2 steps")
    expected = Ema(copy_model(run.state.model), Averaging(0.7, start=3, every=2))
    expected.model_copy.pairs[:] = zip(
        run.state.model.parameters(), expected.model.parameters(), strict=True
    )
    with run:
        for step in run:
            assert step.skipped is not None
            expected.update(1.0 - step.skipped)

    (average,) = run.state.ema_models.values()
    average.refresh(run.state.model)
    expected.refresh(run.state.model)
    assert average.updates == 12
    assert torch.equal(average.model.online.weight, expected.model.online.weight)
    assert not torch.equal(average.model.online.weight, run.state.model.online.weight)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def test_an_interval_counts_the_updates_of_its_model() -> None:
    """One that is updated in every fifth step is averaged too."""

    def of_first(models: Any, batch: Any) -> Tensor:
        return F.cross_entropy(models["first"](batch[0]), batch[1])

    def of_second(models: Any, batch: Any) -> Tensor:
        return F.cross_entropy(models["second"](batch[0]), batch[1])

    run = build(
        None,
        model={"first": Pair, "second": Pair},
        loss=None,
        splits=None,
        length="22 steps",
        ema=0.9,
        ema_every="2 steps",
    )
    start = run.state.models["second"].layer.weight.detach().clone()
    weights = []
    with run:
        for step in run.steps():
            sf.forward_backward(step, of_first)
            sf.update(step, "first")
            if step.index % 5 == 0:
                sf.forward_backward(step, of_second)
                sf.update(step, "second")
                weights.append(run.state.models["second"].layer.weight.detach().clone())

    averages = run.state.ema_models
    assert averages["first"].updates == 22
    assert averages["second"].updates == 5
    expected = start * 2 / 11 + weights[1] * 9 / 11
    expected = expected * 3 / 12 + weights[3] * 9 / 12
    torch.testing.assert_close(averages["second"].model.layer.weight, expected)


@pytest.mark.parametrize(
    ("name", "value"), [("ema_ramp", False), ("ema_start", "2 steps"), ("ema_every", "2 steps")]
)
def test_a_setting_of_an_average_without_one_is_refused(name: str, value: Any) -> None:
    with refused("average-setting-without-average", setting=name, value=value):
        build(None, ema=None, **{name: value})


def test_other_settings_of_the_average_are_refused_at_a_resume(tmp_path: Path) -> None:
    trained(tmp_path / "run", ema_every="2 steps", stop_after="2 steps")
    for changes in ({}, {"ema_every": "2 steps", "ema_start": "2 steps"}):
        with pytest.raises(sf.CheckpointError):
            trained(tmp_path / "run", **changes)
    trained(tmp_path / "run", ema_every="2 steps")


@pytest.mark.fast("fsdp-16")
@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_averages_on_ranks_are_those_of_one_process(
    ranks: Ranks, parallel: str, bits: int, tmp_path: Path
) -> None:
    settings = {"bits": bits, "ema_every": "2 steps"}
    (alone,) = ranks(1, averaged_runs.trained_on_ranks, run_dir=str(tmp_path / "alone"), **settings)
    together = ranks(
        2,
        averaged_runs.trained_on_ranks,
        run_dir=str(tmp_path / "two"),
        parallel=parallel,
        **settings,
    )

    files, atol, rtol_of_score = ["ema"], 1e-6, 1e-5
    if bits == 16:
        files, atol, rtol_of_score = ["ema", "ema_float32"], 0.02, 2e-2
    of_one = newest(tmp_path / "alone")
    of_two = newest(tmp_path / "two")
    assert of_two.files.keys() == of_one.files.keys()
    for file in files:
        torch.testing.assert_close(of_two.tensors(file), of_one.tensors(file), rtol=1e-5, atol=atol)
    for scores in together:
        assert scores["val/loss"] == pytest.approx(alone["val/loss"], rel=rtol_of_score)


def test_the_best_weights_that_are_evaluated_at_the_end_change_no_average(tmp_path: Path) -> None:
    """Of 16-bit weights, whose averages are rounded when they are evaluated."""
    at_end = sf.Split((INPUTS[20:], LABELS[20:]), at_end=True)
    split = sf.Split((INPUTS[:20], LABELS[:20]))
    settings: dict[str, Any] = {"model": Student16, "unsaved": False, "best": "max val/loss"}
    ends = trained(tmp_path / "ends", splits={"val": split, "test": at_end}, **settings)
    never = trained(tmp_path / "never", splits={"val": split}, **settings)
    (average,) = ends.state.ema_models.values()
    (other,) = never.state.ema_models.values()
    for one, two in zip(average.precise.values(), other.precise.values(), strict=True):
        assert torch.equal(one, two)
    assert torch.equal(average.model.online.weight, other.model.online.weight)

    saved = sf.load(ends)
    best = saved.load_model(Student16, checkpoint="best")
    with torch.no_grad():
        score = float(F.cross_entropy(best(INPUTS[20:]), LABELS[20:]))
    assert saved.metrics["test/loss"] == pytest.approx(score, rel=1e-6)


def unfreeze(run: sf.Run, index: int) -> None:
    if index == 4:
        run.state.model.target.requires_grad_(True)
    if index == 8:
        run.state.model.online.requires_grad_(False)


def test_parameters_frozen_and_unfrozen_later_are_resumed_with_their_averages(
    tmp_path: Path,
) -> None:
    def train(run_dir: Path, *, stop_after: str) -> None:
        with build(run_dir, model=Student16, stop_after=stop_after) as run:
            for step in run:
                unfreeze(run, step.index)

    train(tmp_path / "whole", stop_after="12 steps")
    for stop in ("3 steps", "7 steps", "12 steps"):
        train(tmp_path / "parts", stop_after=stop)

    whole = newest(tmp_path / "whole")
    averaged = {"online.weight", "online.bias", "target.weight", "target.bias"}
    assert set(whole.tensors("ema_float32")) == averaged
    assert_same_tensors(newest(tmp_path / "parts"), whole)


def test_averages_of_16_bits_go_on_with_another_number_of_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    settings = {"bits": 16, "ema": 0.99, "unsaved": False}
    ranks(1, averaged_runs.trained_on_ranks, run_dir=str(tmp_path / "alone"), **settings)
    parts = settings | {"run_dir": str(tmp_path / "parts")}
    ranks(2, averaged_runs.trained_on_ranks, parallel="fsdp", stop_after="5 steps", **parts)
    of_two = newest(tmp_path / "parts").tensors("ema_float32")
    shapes = {name: tuple(tensor.shape) for name, tensor in of_two.items()}
    assert shapes == {"online.weight": (3, 6), "online.bias": (3,)}

    ranks(1, averaged_runs.trained_on_ranks, **parts)

    end = newest(tmp_path / "parts")
    expected = newest(tmp_path / "alone").tensors("ema_float32")
    assert end.saved.average_updates == {"model": 12}
    torch.testing.assert_close(end.tensors("ema_float32"), expected, rtol=0.02, atol=0.005)


def test_steps_of_a_run_with_averages_of_16_bits_are_verified(tmp_path: Path) -> None:
    run = build(tmp_path / "run", model=Student16, ema_every="2 steps", save_every="4 steps")
    run.train()

    assert sf.load(run).verify(steps="all", say=None).exit_status == 0


@pytest.mark.parametrize("name", ["added", "target"])
def test_a_module_with_parameters_that_the_body_sets_is_refused_by_the_run(name: str) -> None:
    def train() -> None:
        with build(None) as run:
            for _ in run:
                run.state.model.add_module(name, nn.Linear(6, 3).requires_grad_(False))
                run.evaluate()

    with refused("parameters-replaced", names=[f"{name}.weight", f"{name}.bias"]):
        train()


def test_a_module_without_parameters_that_the_body_sets_is_evaluated(tmp_path: Path) -> None:
    class Noisy(Student):
        def __init__(self) -> None:
            super().__init__()
            self.last: nn.Module = nn.Identity()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(super().forward(inputs))

    run = build(tmp_path, model=Noisy, ema=0.0, ema_ramp=False)
    with run:
        for step in run:
            if step.index == 1:
                run.state.model.last = nn.Softsign()

    model = run.state.model.eval()
    with torch.no_grad():
        expected = F.cross_entropy(model(INPUTS[:20]), LABELS[:20]).item()
    assert run.evaluate()["val/loss"] == pytest.approx(expected, rel=1e-6)
