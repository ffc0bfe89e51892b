"""`del run` frees the model, the optimizer and the run at once, without a garbage collection.
(3 s)
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import surefoot as sf

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3


class Rows:
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class BodyError(Exception):
    """An exception in the body."""


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
        "loss": loss,
        "train_data": (X, Y),
        "batch_size": 6,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=0.1),
        "run_dir": run_dir,
        "console": False,
        "report": False,
    }
    return sf.Run(**settings | changes)


def train(run: sf.Run) -> None:
    run.train()


def train_twice(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == 1:
                break
        for _ in run:
            pass


def make_own_steps(run: sf.Run) -> None:
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)


def fail(run: sf.Run) -> None:
    with suppress(BodyError), run:
        for _ in run:
            raise BodyError


def fail_in_own_steps(run: sf.Run) -> None:
    with suppress(BodyError), run:
        for step in run.steps():
            sf.forward_backward(step)
            raise BodyError


def interrupt(run: sf.Run) -> None:
    with suppress(KeyboardInterrupt), run:
        for _ in run:
            raise KeyboardInterrupt


def break_off(run: sf.Run) -> None:
    with run:
        iterator = iter(run)
        next(iterator)


def evaluate(run: sf.Run) -> None:
    run.train()
    run.evaluate()
    run.sample()


def nothing(run: sf.Run) -> None: ...


def step_lr(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


FULL = {
    "splits": {"val": sf.Split((X, Y), metrics=sf.metrics.accuracy)},
    "evaluate_every": "1 steps",
    "best": "min val/loss",
    "early_stopping": sf.EarlyStopping("min val/loss", patience=9),
    "sample_fn": lambda _: "text",
    "ema": 0.9,
    "layer_stats_every": "1 steps",
    "schedule": sf.schedules.cosine(warmup="1 steps"),
}
WAYS: dict[str, tuple[Callable[[sf.Run], None], dict[str, Any]]] = {
    "never trained": (nothing, {}),
    "trained": (train, {}),
    "trained in two loops": (train_twice, {}),
    "with own steps": (make_own_steps, {}),
    "after an exception": (fail, {}),
    "after an exception in own steps": (fail_in_own_steps, {}),
    "interrupted": (interrupt, {}),
    "an iterator that was broken off": (break_off, {}),
    "with all there is": (evaluate, FULL),
    "with a console": (train, {"console": True}),
    "with a page": (train, {"report": True}),
    "with micro-batches": (train, {"micro_batch_size": 2}),
    "with workers": (train, {"train_data": Rows(), "workers": 1}),
    "of a loader": (train, {"train_data": DataLoader(Rows(), batch_size=6), "batch_size": None}),
    "weighted": (train, {"order": sf.data.Weighted([1.0] * 24)}),
    "SGD": (train, {"optimizer": sf.optim.sgd(lr=0.1)}),
    "schedule-free": (train, {"optimizer": sf.optim.schedule_free(lr=0.1)}),
    "of torch": (train, {"optimizer": torch.optim.RMSprop}),
    "with a closure": (train, {"optimizer": torch.optim.LBFGS}),
    "with torch's scheduler": (train, {"schedule": sf.schedules.from_scheduler(step_lr)}),
}


@pytest.fixture(scope="module", autouse=True)
def _all_imported() -> None:
    build().train()  # what is imported late


@pytest.fixture(autouse=True)
def _no_collection(_all_imported: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def references_of(run: sf.Run) -> dict[str, Any]:
    """Weak references to a run, its models, optimizers and averages."""
    references: dict[str, Any] = {"run": weakref.ref(run)}
    for name, model in run.state.models.items():
        references[f"model {name}"] = weakref.ref(model)
    for name, trained in run.state.optimizers.items():
        references[f"optimizer {name}"] = weakref.ref(trained.optimizer)
    for name, average in run.state.ema_models.items():
        references[f"average {name}"] = weakref.ref(average.model)
    return references


def alive(references: dict[str, Any]) -> list[str]:
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_deleted_run_is_gone(way: str, tmp_path: Path) -> None:
    use, settings = WAYS[way]
    run = build(tmp_path, **settings)
    references = references_of(run)
    use(run)
    del run
    assert alive(references) == []


@pytest.mark.fast("never trained", "trained", "after an exception in own steps")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_deleted_run_without_a_directory_is_gone(way: str) -> None:
    use, settings = WAYS[way]
    run = build(None, **settings)
    references = references_of(run)
    use(run)
    del run
    assert alive(references) == []


def test_several_models_are_gone() -> None:
    run = sf.Run(
        model={"a": lambda: nn.Linear(4, 3), "b": lambda: nn.Linear(4, 3)},
        train_data=(X, Y),
        batch_size=6,
        length="3 steps",
        optimizer={"a": sf.optim.adamw(lr=0.1), "b": sf.optim.sgd(lr=0.1)},
        ema=0.9,
        console=False,
        report=False,
    )
    references = references_of(run)
    with run:
        for step in run.steps():
            sf.forward_backward(step, lambda models, batch: loss(models["a"], batch))
            sf.update(step, "a")
            sf.forward_backward(step, lambda models, batch: loss(models["b"], batch))
            sf.update(step, "b")
    del run, step
    assert alive(references) == []


def test_unfrozen_parameters_rebuild_the_optimizer_and_are_gone() -> None:
    run = build()
    references = references_of(run)
    run.state.model[1].requires_grad_(False)
    with run:
        for step in run:
            run.state.model[1].requires_grad_(step.index > 0)
    del run, step
    assert alive(references) == []


def steps_of_run(run: sf.Run) -> list[sf.Step]:
    """Three steps that the run makes."""
    steps = []
    with run:
        for step in run:
            steps.append(step)
            if step.index == 2:
                break
    return steps


def steps_of_own_loop(run: sf.Run) -> list[sf.Step]:
    steps = []
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)
            steps.append(step)
            if step.index == 2:
                break
    return steps


@pytest.mark.parametrize("three_steps", [steps_of_run, steps_of_own_loop])
def test_a_step_that_is_kept_keeps_its_numbers_and_no_model(
    three_steps: Callable[[sf.Run], list[sf.Step]],
) -> None:
    run = build()
    references = references_of(run)
    steps = three_steps(run)
    assert steps[0].state.step == run.state.step == 3
    losses = [float(step.loss) for step in steps if step.loss is not None]

    del run

    assert alive(references) == []
    assert [step.index for step in steps] == [0, 1, 2]
    assert len(losses) == 3
    assert [float(step.loss) for step in steps if step.loss is not None] == losses
    assert len(steps[0].micro_batches[0].sample_ids) == 6


def test_a_saved_run_is_gone(tmp_path: Path) -> None:
    run = build(tmp_path)
    references = references_of(run)
    run.train()
    saved = sf.load(run)
    saved.verify(say=None)
    saved.replay(step=2)
    saved.evaluate()
    del run, saved
    assert alive(references) == []


@pytest.mark.fast("torch.optim.RMSprop")
@pytest.mark.parametrize("optimizer", ["sf.optim.sgd(lr=0.1)", "torch.optim.RMSprop"])
def test_the_first_run_of_a_process_is_gone(optimizer: str) -> None:
    """The first step of torch's optimizers imports much, and exceptions in there keep its stack."""
    script = f"""
import gc, weakref, torch, surefoot as sf
run = sf.Run(model=lambda: torch.nn.Linear(2, 1), loss=lambda m, b: m(b[0]).square().mean(),
             train_data=(torch.ones(8, 2),), batch_size=4, length="2 steps",
             optimizer={optimizer}, console=False)
gc.disable()
model = weakref.ref(run.state.model)
run.train()
del run
print(model() is None)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True"]
