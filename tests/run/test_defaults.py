"""What a `Run` does unless it is asked for more: the arithmetic of a plain loop, 20 records, a save
each minute; 2 seconds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from surefoot.checkpoint.filesystem import Disk
from surefoot.config.durations import Length, log_interval

SAMPLES = 67  # batches of 13 do not divide it


def loss(model: nn.Module, batch: Any) -> Tensor:
    return 5 * F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Linear(33, 3))


def steep_run(optimizer: Any, **settings: Any) -> sf.Run:
    """A run whose gradients have norms above 1, so that clipping would show."""
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(SAMPLES, 8, generator=generator),
        torch.randint(3, (SAMPLES,), generator=generator),
    )
    required = {
        "model": network,
        "loss": loss,
        "train_data": data,
        "batch_size": 13,
        "length": "3 epochs",
    }
    return sf.Run(
        **required | {"optimizer": optimizer, "device": "cpu", "console": False} | settings
    )


@pytest.mark.parametrize(
    ("optimizer", "torch_optimizer"),
    [
        (
            sf.optim.sgd(lr=0.3, momentum=0.9),
            lambda them: torch.optim.SGD(them, lr=0.3, momentum=0.9, fused=True),
        ),
        (sf.optim.adam(lr=1e-2), lambda them: torch.optim.Adam(them, lr=1e-2, fused=True)),
        (
            lambda them: torch.optim.AdamW(them, lr=1e-2),
            lambda them: torch.optim.AdamW(them, lr=1e-2),
        ),
    ],
    ids=["sgd", "adam", "torch.optim.AdamW"],
)
def test_a_run_with_defaults_trains_what_a_plain_loop_trains_to_the_bit(
    optimizer: Any, torch_optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    run = steep_run(optimizer)
    plain = copy.deepcopy(run.state.models["model"])
    own = torch_optimizer(plain.parameters())
    norms = []
    for step in iterated(run):
        own.zero_grad()
        value = loss(plain, step.micro_batches[0].batch)
        value.backward()
        own.step()
        assert step.loss is not None
        assert step.loss.item() == value.item()
        assert step.grad_norm is not None
        norms.append(step.grad_norm.item())
    assert max(norms) > 2  # or clipping would not have shown
    for name, tensor in run.state.models["model"].state_dict().items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


def iterated(run: sf.Run) -> Any:
    with run:
        yield from run


@pytest.mark.parametrize("steps", [1, 19, 20, 21, 39, 999, 1000, 1001, 5000])
def test_a_run_of_any_length_leaves_20_records_or_one_for_each_step(steps: int) -> None:
    interval = log_interval(
        "auto", length=Length(steps=steps, samples_per_epoch=100, batch_size=10)
    )
    due = [done for done in range(1, steps + 1) if interval.due(done) or done == steps]
    assert len(due) >= min(steps, 20)
    assert all(later - sooner <= 50 for sooner, later in pairwise(due))
    if steps >= 1000:
        assert due[:3] == [10, 50, 100]


class Clock(Disk):
    """Seconds, which pass as a test lets them; and a disk on which each checkpoint takes some of
    them.
    """

    def __init__(self, save_s: float) -> None:
        self.save_s = save_s
        self.time_s = 1000.0

    def __call__(self) -> float:
        return self.time_s

    def rename(self, old: Path, new: Path) -> None:  # type: ignore[override]
        if new.name.startswith("step-"):
            self.time_s += self.save_s
        os.rename(old, new)


def saves_s(directory: Path, *, save_s: float, **settings: Any) -> list[float]:
    """When a run of 20 minutes saved, in seconds from its start: steps take 10 s, a save
    `save_s`.
    """
    clock = Clock(save_s)
    run = steep_run(
        sf.optim.sgd(lr=0.1),
        length="120 steps",
        run_dir=directory,
        report=False,
        disk=clock,
        **settings,
    )
    saving = run.parts.checkpointing
    assert saving is not None
    saving.now = saving.writer.now = clock
    begun_s: list[float] = []
    with run:
        start_s = clock.time_s
        for _ in run:
            # the save in flight, or the clock would stand where the thread happens to be
            saving.wait()
            if saving.started_at - start_s not in (0.0, -save_s, *begun_s):
                begun_s.append(saving.started_at - start_s)
            clock.time_s += 10.0
    return begun_s


def test_a_cheap_save_is_made_each_minute_and_the_disk_holds_no_more_for_it(tmp_path: Path) -> None:
    times_s = saves_s(tmp_path, save_s=0.0)
    assert times_s == [60.0 * minute for minute in range(1, 20)]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 4  # keep_last and the first


def test_a_save_that_costs_a_hundredth_of_a_minute_is_made_every_five(tmp_path: Path) -> None:
    times_s = saves_s(tmp_path, save_s=0.625)
    assert [later - sooner for sooner, later in pairwise(times_s)] == pytest.approx(
        [300.625] * (len(times_s) - 1), abs=10
    )
    assert len(times_s) == 3


def test_a_save_every_of_ones_own_does_not_follow_the_cost(tmp_path: Path) -> None:
    assert saves_s(tmp_path, save_s=0.0, save_every="5 min") == [300.0, 600.0, 900.0]
