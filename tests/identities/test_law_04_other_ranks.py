"""Laws 2 to 4 together: a run that was saved by some ranks under one strategy goes on with others, under another one.

Sample ids are equal, losses equal to rounding (law 2: 1e-4 in float32), and on the same ranks and strategy every bit is. Twelve
micro-batches a step, so that 1, 2, 3 or 4 ranks share them; dropout, augmentation, an average, a value that each rank logs,
and a weight that is frozen. 30 seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked_ranks import forks, on_ranks
from small_runs import FEATURES, build
from surefoot.checkpoint import Store
from surefoot.sinks import records

pytestmark = forks

STEPS, SAVED = 6, 3
Start = tuple[str, int]  # a strategy, and so many ranks


class Net(nn.Module):
    """Five rows, three, one, none: as few as there are ranks, or fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.drop = nn.Dropout(0.25)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(inputs) + self.frozen)) * self.gain) * self.scale


def sitting(out: Path, start: Start, *, until: int, **changes: Any) -> None:
    """Train on some ranks; the sample ids of each step's micro-batches go to files beside, by rank."""
    strategy, count = start

    def train(rank: int) -> None:
        run = build(
            out,
            model=Net,
            batch_size=24,
            micro_batch_size=2,
            length=f"{STEPS} steps",
            stop_after=f"{until} steps",
            save_every="100 steps",
            log_every="2 steps",
            evaluate_every="3 steps",
            parallel=strategy,
            device="cpu",
            **changes,
        )
        with run, out.with_name(f"{out.name}-ids-{rank}").open("a") as file:
            for step in run:
                step.log(rank=float(rank))
                ids = [[part.index, part.ids.tolist()] for part in step.micro_batches]
                file.write(json.dumps([step.index, ids]) + "\n")

    assert on_ranks(count, train) == [0] * count


def seen(out: Path) -> dict[int, list[list[int]]]:
    """The sample ids of each step, by micro-batch."""
    found: dict[int, dict[int, list[int]]] = {}
    for file in out.parent.glob(f"{out.name}-ids-*"):
        for line in file.read_text().splitlines():
            step, parts = json.loads(line)
            found.setdefault(step, {}).update(dict(parts))
    return {step: [parts[index] for index in range(12)] for step, parts in sorted(found.items())}


def told(out: Path) -> list[tuple[int, str, float]]:
    names = ("loss", "held-out/loss")
    return [
        (record["step"], name, record[name])
        for record in records(out / "metrics.jsonl")
        for name in names
        if name in record
    ]


def last(out: Path) -> dict[str, dict[str, Tensor]]:
    found = Store(out / "checkpoints").newest_intact()
    assert found is not None
    assert found[0].step == STEPS
    return {file: found[0].tensors(file) for file in found[0].files if file != "state"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, uninterrupted."""
    out = tmp_path_factory.mktemp("alone") / "run"
    sitting(out, ("none", 1), until=STEPS)
    return out


WAYS: list[tuple[Start, Start]] = [
    (("ddp", 2), ("none", 1)),
    (("ddp", 2), ("ddp", 3)),
    (("none", 1), ("ddp", 4)),
]


@pytest.mark.parametrize(("first", "then"), WAYS, ids=lambda start: "-".join(map(str, start)))
def test_a_run_goes_on_with_other_ranks_and_strategies(first: Start, then: Start, alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sitting(out, first, until=SAVED)
    sitting(out, then, until=STEPS)
    assert seen(out) == seen(alone)
    for (step, name, value), (other_step, other_name, expected) in zip(told(out), told(alone), strict=True):
        assert (step, name) == (other_step, other_name)
        assert value == pytest.approx(expected, abs=1e-4)
    for file, tensors in last(alone).items():
        found = last(out)[file]
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3)  # Adam amplifies rounding


@pytest.mark.parametrize("start", [("ddp", 2)], ids=lambda start: "-".join(map(str, start)))
def test_on_the_same_ranks_a_resumed_run_has_the_bits_of_an_uninterrupted_one(start: Start, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sitting(whole, start, until=STEPS)
    for until in (1, SAVED, STEPS):
        sitting(parts, start, until=until)
    assert seen(whole) == seen(parts)
    assert told(whole) == told(parts)
    for file, tensors in last(whole).items():
        assert all(torch.equal(last(parts)[file][name], tensor) for name, tensor in tensors.items())
    logged = [
        [record["rank"] for record in records(out / "metrics.jsonl") if "rank" in record] for out in (whole, parts)
    ]
    assert logged[0] == logged[1] == [sum(range(start[1])) / start[1]] * (STEPS // 2)
