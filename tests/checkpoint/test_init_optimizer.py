"""`init_optimizer`: a run that begins from another one takes the state of its optimizer along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from identities.changed_runs import CHANGED_AT, data, loss, on_two_ranks, run_in, tensors_of
from rank_processes import forks
from refused import refused
from surefoot.run.run import Run


def model(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, outputs))


PLAIN: dict[str, Any] = {"model": model, "ema": None, "schedule": None, "clip": "off"}


def begun_from(run: Path, run_dir: Path, **settings: Any) -> Run:
    return run_in(run_dir, **(PLAIN | {"init_from": run, "init_optimizer": True} | settings))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    run_in(tmp_path / "trained", stop_after=f"{CHANGED_AT} steps", **PLAIN).train()
    return tmp_path / "trained"


def optimizer_tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = tensors_of(run_dir, step)
    return {name: each for name, each in tensors.items() if name.startswith("optimizer/")}


@pytest.mark.parametrize(
    "optimizer",
    [
        sf.optim.adamw(1e-3),
        sf.optim.sgd(1e-3, momentum=0.9),
        sf.optim.lion(1e-4),
        sf.optim.muon(1e-3),
        sf.optim.adafactor(1e-3),
    ],
    ids=lambda spec: spec.name,
)
def test_moments_and_step_counts_are_taken_along(optimizer: Any, tmp_path: Path) -> None:
    before = tmp_path / "before"
    run_in(before, stop_after=f"{CHANGED_AT} steps", **PLAIN, optimizer=optimizer).train()
    begun_from(before, tmp_path / "run", optimizer=optimizer, stop_after="2 steps").train()
    expected = optimizer_tensors(before, CHANGED_AT)
    found = optimizer_tensors(tmp_path / "run", 0)
    assert found.keys() == expected.keys()
    assert expected
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_the_first_step_is_that_of_a_plain_loop_with_these_moments(
    trained: Path, tmp_path: Path
) -> None:
    run = begun_from(trained, tmp_path / "run", optimizer=sf.optim.adamw(1e-3, weight_decay=0.0))
    ids = torch.cat([torch.from_numpy(ids) for ids, _ in run.parts.pipeline.plan.micro_batches(0)])
    plain = sf.load(trained).load_model(model()).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    saved = optimizer_tensors(trained, CHANGED_AT)
    for name, parameter in plain.named_parameters():
        entries = ("exp_avg", "exp_avg_sq", "step")
        optimizer.state[parameter] = {key: saved[f"optimizer/{name}/{key}"] for key in entries}
    inputs, targets = data()
    loss(plain, [inputs[ids], targets[ids]]).backward()
    optimizer.step()

    with run:
        next(iter(run))
    for mine, theirs in zip(run.state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_run_without_the_setting_begins_anew(trained: Path, tmp_path: Path) -> None:
    begun_from(trained, tmp_path / "run", init_optimizer=False, stop_after="1 steps").train()
    assert optimizer_tensors(tmp_path / "run", 0) == {}


def test_parameters_of_another_shape_begin_anew(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def summed(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).sum(1, keepdim=True) - batch[1]).square().mean()

    begun_from(
        trained,
        tmp_path / "run",
        model=lambda: model(2),
        loss=summed,
        console=True,
        stop_after="1 steps",
    ).train()
    names = {name.split("/")[1] for name in optimizer_tensors(tmp_path / "run", 0)}
    assert names == {"0.weight", "0.bias"}
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "  optimizer: adamw" in line
    ]
    assert f"2 parameters after {CHANGED_AT} steps" in line
    assert "1.weight, 1.bias" in line


@pytest.mark.parametrize("optimizer", [sf.optim.lion(1e-4), torch.optim.SGD])
def test_another_optimizer_begins_anew(optimizer: Any, trained: Path, tmp_path: Path) -> None:
    begun_from(trained, tmp_path / "run", optimizer=optimizer, stop_after="1 steps").train()
    assert optimizer_tensors(tmp_path / "run", 0) == {}


def test_an_averaging_optimizer_begins_anew(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": sf.optim.schedule_free(1e-2), "stop_after": "4 steps"}
    run_in(tmp_path / "before", **PLAIN, **settings).train()
    begun_from(tmp_path / "before", tmp_path / "run", **settings).train()
    assert optimizer_tensors(tmp_path / "run", 0) == {}


def test_it_resumes_with_and_without_the_setting(trained: Path, tmp_path: Path) -> None:
    whole = begun_from(trained, tmp_path / "whole")
    whole.train()
    begun_from(trained, tmp_path / "run", stop_after="3 steps").train()
    begun_from(trained, tmp_path / "run", stop_after="6 steps").train()
    run_in(tmp_path / "run", **PLAIN).train()
    expected = tensors_of(tmp_path / "whole", 23)
    found = tensors_of(tmp_path / "run", 23)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_file_of_weights_has_no_optimizer(trained: Path, tmp_path: Path) -> None:
    file = trained / "checkpoints" / f"step-{CHANGED_AT:08d}" / "model.safetensors"
    with refused("initial-weights-not-in-directory", sf.CheckpointError):
        begun_from(file, tmp_path / "run").train()


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_take_it_along(parallel: str, trained: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**PLAIN, "init_from": trained, "init_optimizer": True}
    on_two_ranks(
        tmp_path / "run", **settings, parallel=parallel, micro_batch_size=4, stop_after="1 steps"
    )
    expected = optimizer_tensors(trained, CHANGED_AT)
    found = optimizer_tensors(tmp_path / "run", 0)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
