"""What a `Run` says of itself, and the only model of its state."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from refused import refused


def build(**changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 2),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
        "train_data": (torch.zeros(20, 3),),
        "batch_size": 4,
        "length": "2 epochs",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def test_a_run_shows_its_model_data_step_and_directory_in_one_line(tmp_path: Path) -> None:
    run = build(run_dir=tmp_path / "run", stop_after="3 steps", report=False)
    run.train()
    line = f"Run(Linear with 8 trainable parameters; 20 samples; step 3 of 10; {tmp_path / 'run'})"
    assert (repr(run), str(run)) == (line, line)
    assert repr(build()).endswith("step 0 of 10; no run_dir)")


def test_the_only_model_of_a_run_is_the_one_that_is_trained() -> None:
    run = build()
    assert run.state.model is run.state.models["model"]
    assert (run.rank, run.world_size) == (0, 1)


def test_one_of_several_models_is_taken_by_its_name() -> None:
    models = {name: nn.Linear(3, 2) for name in ("generator", "discriminator")}
    run = build(model=models, loss=None, optimizer=dict.fromkeys(models, sf.optim.sgd(lr=0.1)))
    with refused("several-models", models=["generator", "discriminator"]):
        _ = run.state.model


def test_a_sample_is_drawn_of_the_first_model_and_the_loss_gets_all() -> None:
    models = {"generator": nn.Linear(3, 2), "discriminator": nn.Linear(2, 1)}
    names_in_loss: list[list[str]] = []

    def loss(models: dict[str, nn.Module], batch: Any) -> torch.Tensor:
        names_in_loss.append(list(models))
        generated = models["generator"](batch[0])
        return models["discriminator"](generated).square().mean()

    run = build(
        model=models,
        loss=loss,
        optimizer=dict.fromkeys(models, sf.optim.sgd(lr=0.1)),
        length="1 steps",
        sample_fn=str,
    )
    run.train()

    assert names_in_loss[-1] == ["generator", "discriminator"]
    assert run.sample() == str(nn.Linear(3, 2))


def test_no_keyword_of_a_run_is_one_of_its_methods() -> None:
    """A field beside a method of its name would be its default, or hide it."""
    keywords = {field.name for field in dataclasses.fields(sf.Run)}
    assert {
        "train",
        "steps",
        "stop",
        "save",
        "evaluate",
        "predict",
        "sample",
        "register_state",
        "make_panels",
    } <= vars(sf.Run).keys()
    assert not keywords & (vars(sf.Run).keys() - sf.Run.__dataclass_fields__.keys())
    assert not keywords & {
        name for name, value in vars(sf.Run).items() if inspect.isfunction(value)
    }


def test_a_split_that_does_not_exist_is_refused_with_those_that_do() -> None:
    run = build(splits={"val": sf.Split((torch.ones(4, 3),))})
    assert set(run.evaluate()) == set(run.evaluate("val")) == {"val/loss"}
    with refused("unknown-split", setting="splits", value="test"):
        run.evaluate("test")


@pytest.mark.parametrize("updates", ["never", "every fourth step"])
def test_a_loop_over_steps_that_updates_nothing_is_told_so_once(
    updates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(length="24 steps", log_every="1 step", console=True)
    with run:
        for step in run.steps():
            if updates != "never" and step.index % 4 == 3:
                sf.forward_backward(step)
                sf.update(step)
    notes = [line for line in capsys.readouterr().out.splitlines() if "no weight" in line]
    assert len(notes) == (updates == "never")
