"""Law 5 for what is tried on a run: find_lr and find_batch leave every bit of it as it was.
(8 s)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from refused import refused
from small_runs import Net, build
from surefoot.run.run import unchanged

Optimizers = dict[str, Any]
OPTIMIZERS: Optimizers = {
    "adamw": sf.optim.adamw(lr=1e-2, weight_decay=0.05),
    "sgd": sf.optim.sgd(0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
}
TRIED: dict[str, Callable[[sf.Run], Any]] = {
    "find_lr": lambda run: sf.tune.find_lr(run, min_lr=1e-4, max_lr=100.0, steps=12),
    "find_batch": lambda run: sf.tune.find_batch_size(run, memory="1 GB"),
}


class Buffered(Net):
    """Changes a buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return torch.as_tensor(super().forward(inputs))


def plain(held: Any) -> Any:
    """Nested values with every tensor as its bytes."""
    if isinstance(held, Tensor):
        return str(held.dtype), list(held.shape), held.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(held, dict):
        return {key: plain(value) for key, value in held.items()}
    if isinstance(held, list | tuple):
        return [plain(value) for value in held]
    return held


def everything(run: sf.Run) -> dict[str, Any]:
    """All that changes while a run goes on, and the three generators."""
    whole, state = run.parts.run_state, run.state
    models = [*state.models.values(), *(average.model for average in state.ema_models.values())]
    found: dict[str, Any] = {
        "tensors": [list(model.parameters()) + list(model.buffers()) for model in models],
        "gradients": [parameter.grad for parameter in state.parameters],
        "modes": [[part.training for part in model.modules()] for model in models],
        "step": state.step,
        "statistics": (state.buffers.passes, state.buffers.started),
        "precision": (
            whole.precision.name,
            whole.precision.tensors(),
            run.parts.plan.identity,
        ),
        "meter": (whole.meter.table(), whole.meter.logged_table()),
        "bad steps": whole.meter.skipped_in_a_row,
        "phases": (whole.clock.phase, whole.clock.window_s, whole.clock.total_s),
        "kept": (whole.user_state.objects, whole.user_state.tensors, whole.user_state.unclaimed),
        "watches": [each.state() for each in whole.watches],
        "generators": (random.getstate(), np.random.get_state()[1], torch.get_rng_state()),  # type: ignore[index]
    }
    for name, trained in state.optimizers.items():
        optimizer = trained.optimizer
        states = [
            sorted(optimizer.state[parameter].items()) if parameter in optimizer.state else None
            for parameter in trained.parameters
        ]
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        found[f"optimizer {name}"] = (states, groups, trained.bad_in_a_row)
    found["generators"][1].flags.writeable = False
    return {key: plain(value) for key, value in found.items()} | {
        "numpy": found["generators"][1].tolist()
    }


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    before["generators"][1] = after["generators"][1] = None  # NumPy's is compared as a list
    return [name for name in before if before[name] != after[name]]


@pytest.mark.slow
@in_one
@pytest.mark.parametrize("tried", TRIED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_in_its_middle_is_left_as_it_was_with_every_optimizer(
    tried: str, optimizer: str
) -> None:
    leave_as_it_was(tried, optimizer=OPTIMIZERS[optimizer])


@in_one
@pytest.mark.parametrize("tried", TRIED)
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "fp16"}, {"model": Buffered}], ids=["plain", "fp16", "buffer"]
)
def test_a_run_in_its_middle_is_left_as_it_was(tried: str, changes: dict[str, Any]) -> None:
    leave_as_it_was(tried, **changes)


def leave_as_it_was(tried: str, **changes: Any) -> None:
    run = build(None, length="9 steps", **changes)
    model = run.state.models["model"]
    with run:
        run.register_state("seen", {"noise": torch.rand(3), "steps": 2})
        for step in run:
            if step.index == 4:
                model[3].eval()
                before = everything(run)
                TRIED[tried](run)
                assert compared(before, everything(run)) == []
                model[3].train()


@pytest.mark.parametrize(
    ("optimizer", "tried"),
    [
        ("adamw", "find_lr"),
        pytest.param("adamw", "find_batch", marks=pytest.mark.slow),
        *(
            pytest.param(name, "find_lr", marks=pytest.mark.slow)
            for name in OPTIMIZERS
            if name != "adamw"
        ),
        pytest.param("sgd", "find_batch", marks=pytest.mark.slow),
    ],
)
def test_training_afterwards_is_that_of_a_run_that_tried_nothing(
    tried: str, optimizer: str, tmp_path: Path
) -> None:
    def trained(run_dir: Path, *, trying: bool) -> tuple[dict[str, Any], list[float]]:
        run = build(run_dir, length="10 steps", optimizer=OPTIMIZERS[optimizer])
        if trying:
            assert compared(everything(run), (TRIED[tried](run), everything(run))[1]) == []
            assert not run_dir.exists()
        drawn = []
        with run:
            for step in run:
                if trying and step.index == 6:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()  # of a checkpoint of the run's own
                    files = {
                        path: path.stat().st_mtime_ns
                        for path in run_dir.rglob("*")
                        if path.is_file()
                    }
                    TRIED[tried](run)
                    assert {
                        path: path.stat().st_mtime_ns
                        for path in run_dir.rglob("*")
                        if path.is_file()
                    } == files
                drawn.append(random.random() + float(np.random.rand()) + float(torch.rand(())))
        found = everything(run)
        return {name: found[name] for name in ("tensors", "optimizer model", "step")}, drawn

    assert trained(tmp_path / "a", trying=True) == trained(tmp_path / "b", trying=False)


def test_a_resumed_run_keeps_what_was_not_asked_for_yet(tmp_path: Path) -> None:
    first = build(tmp_path / "run", length="8 steps", stop_after="4 steps")
    first.register_state("seen", {"noise": torch.ones(3)})
    first.train()
    run = build(tmp_path / "run", length="8 steps")
    with run:
        sf.tune.find_lr(run, steps=10)
        assert torch.equal(
            run.register_state("seen", {"noise": torch.zeros(3)})["noise"], torch.ones(3)
        )


def test_a_run_that_is_not_open_is_tried_from_the_weights_that_it_would_start_with(
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", length="4 steps").train()
    plainly = build(None, init_from=tmp_path / "run")
    with plainly:
        opened = sf.tune.find_lr(plainly, steps=10)
    run = build(None, init_from=tmp_path / "run")
    before = everything(run)
    assert sf.tune.find_lr(run, steps=10).losses.tolist() == opened.losses.tolist()
    assert compared(before, everything(run)) == []
    assert sf.tune.find_lr(build(None), steps=10).losses.tolist() != opened.losses.tolist()


def test_an_error_while_trying_leaves_the_run_as_it_was() -> None:
    run = build(None)
    before = everything(run)

    def failing() -> None:
        with unchanged(run) as parts:
            for parameter in parts.state.parameters:
                parameter.data.zero_()
                parameter.grad = torch.ones_like(parameter)
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert compared(before, everything(run)) == []


@pytest.mark.parametrize("tried", TRIED)
def test_runs_that_cannot_be_tried_are_refused(tried: str) -> None:
    with refused("run-without-loss"):
        TRIED[tried](build(None, loss=None, splits=None, early_stopping=None))
    run = build(None)
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            with refused("run-in-the-middle-of-a-step", step=0):
                TRIED[tried](run)
            sf.update(step)
            break


def test_a_model_may_be_one_of_several() -> None:
    def loss(models: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(models["head"](models["body"](batch[0])), batch[1])

    run = build(
        None,
        model={"body": lambda: nn.Linear(8, 16), "head": lambda: nn.Linear(16, 3)},
        optimizer={"head": sf.optim.sgd(0.1), "body": sf.optim.adamw(0.01)},
        loss=loss,
        splits=None,
        early_stopping=None,
    )
    before = everything(run)
    assert len(sf.tune.find_lr(run, steps=10, max_lr=1.0).rates) > 4
    assert sf.tune.find_batch_size(run, memory="1 GB").largest.size == 8
    assert compared(before, everything(run)) == []


def test_the_time_that_trying_takes_belongs_to_no_phase_of_the_run() -> None:
    passes: SimpleQueue[None] = SimpleQueue()  # a number of our own would be put back

    def slow(model: Any, batch: Any) -> Tensor:
        passes.put(None)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    run = build(None, loss=slow, length="3 steps", splits=None, early_stopping=None)
    clock = run.parts.run_state.clock
    clock.now, clock.since = lambda: float(passes.qsize()), 0.0
    with run:
        for step in run:
            if step.index == 2:
                continue
            before = passes.qsize() - clock.since
            sf.tune.find_lr(run, steps=10)
            assert passes.qsize() - clock.since == before
    assert (
        sum(clock.total_s.values()) + sum(clock.window_s.values()) <= 3 * 2
    )  # passes of the run's own steps
    assert passes.qsize() > 40
