"""The scripts of examples/ as modules, and the plain loop that each of them replaces."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.seeding import fold, seed_generators

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def example(name: str) -> ModuleType:
    """A script as a module, whose `build` takes settings that replace the script's own."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script = module.build
    run_class = sf.Run

    def build(*args: Any, **changes: Any) -> sf.Run:
        changed = {"run_dir": None} | changes
        with patch.object(sf, "Run", lambda **settings: run_class(**(settings | changed))):
            return script(*args)

    module.build = build
    if not hasattr(module, "train"):
        module.train = lambda run: run.train()
    return module


def batches(run: sf.Run) -> list[Any]:
    """The batch of each step, which no optimizer changes."""
    with run:
        return [step.micro_batches[0].batch for step in run.steps()]


class Plain:
    """A loop of torch alone over the same batches, from the same seeds; it takes the place of a run
    in a script's `train`.

    It clears the gradients, calls the loss, goes backward, clips, and steps, in the order that the
    script says.
    """

    def __init__(
        self, run: sf.Run, inputs: list[Any], optimizers: dict[str, Callable[..., Any]]
    ) -> None:
        self.state = run.state
        self.loss = run.loss
        self.clip = run.clip
        self.inputs = inputs
        self.key = run.parts.task.key
        models = run.state.models
        self.optimizers = {
            name: build(trainable_parameters(models[name])) for name, build in optimizers.items()
        }
        self.schedulers: list[Any] = []
        self.models = models if len(models) > 1 else run.state.model
        self.losses: list[float] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def steps(self) -> Iterator[Any]:
        for index, batch in enumerate(self.inputs):
            step = SimpleNamespace(index=index, batch=batch, log=lambda **_: None)
            yield step
            for scheduler in self.schedulers:
                scheduler.step()
            self.losses.append(step.loss)

    def __iter__(self) -> Iterator[Any]:
        for step in self.steps():
            self.forward_backward(step)
            self.update(step)
            yield step

    def train(self) -> None:
        for _ in self:
            pass

    def forward_backward(self, step: Any, loss: Any = None) -> Tensor:
        loss_function = loss or self.loss

        def closure() -> Tensor:
            seed_generators(fold(self.key, step.index, 0))
            mean = loss_function(self.models, step.batch)
            if isinstance(mean, tuple):  # with outputs for metrics
                mean = mean[0]
            mean.backward()
            value: Tensor = mean.detach()
            return value

        value = closure()
        step.closure = closure
        step.loss = getattr(step, "loss", float(value))
        return value

    def update(self, step: Any, *names: str) -> None:
        for name in names or self.optimizers:
            optimizer = self.optimizers[name]
            if self.clip.startswith("norm"):
                groups = [group["params"] for group in optimizer.param_groups]
                max_norm = float(self.clip.split()[1])
                nn.utils.clip_grad_norm_([*chain.from_iterable(groups)], max_norm)
            if isinstance(optimizer, torch.optim.LBFGS):

                def clear_and_pass() -> Tensor:
                    self.clear()
                    loss: Tensor = step.closure()
                    return loss

                optimizer.step(clear_and_pass)
            else:
                optimizer.step()
        self.clear()

    def clear(self) -> None:
        for model in self.state.models.values():
            model.zero_grad()


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_plainly(module: ModuleType, plain: Plain) -> list[float]:
    """Train by the script's own `train`, or by the plain loop if it has none; return the losses."""
    with (
        patch.object(sf, "forward_backward", plain.forward_backward),
        patch.object(sf, "update", plain.update),
    ):
        module.train(plain)
    return plain.losses
