"""Laws 2 to 4 together: a run that was saved by some ranks under one strategy goes on with others,
under another one.

Sample ids are equal, losses equal to rounding (law 2: 1e-4 in float32), and on the same ranks and
strategy every bit is. Twelve micro-batches a step, so that 1, 2, 3 or 4 ranks share them; dropout,
augmentation, an average, a value that each rank logs, and a weight that is frozen. 30 seconds.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from rank_processes import forks, on_ranks
from small_runs import FEATURES, Augmented, build
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.tensor_file import stored_in
from surefoot.tracking.jsonl import records

pytestmark = forks

STEPS, SAVED = 4, 2
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
        return (
            self.last(self.drop(torch.tanh(self.first(inputs) + self.frozen)) * self.gain)
            * self.scale
        )


def session(
    run_dir: Path, start: Start, *, until: int, disk_of_last: Any = None, **changes: Any
) -> None:
    """Train on some ranks; the sample ids of each step's micro-batches go to files beside, by
    rank.
    """
    strategy, count = start

    def train(rank: int) -> None:
        if "console" in changes:
            sys.stdout = sys.stderr = run_dir.with_name(f"{run_dir.name}-printed-{rank}").open("w")
        if disk_of_last is not None and rank == count - 1:
            changes["disk"] = disk_of_last
        settings: dict[str, Any] = {
            "model": Net,
            "batch_size": 24,
            "micro_batch_size": 2,
            "length": f"{STEPS} steps",
            "stop_after": f"{until} steps",
            "save_every": "100 steps",
            "log_every": "2 steps",
            "evaluate_every": "2 steps",
            "parallel": sf.fsdp(replicas=2) if strategy == "2 replicas" else strategy,
            "device": "cpu",
        }
        run = build(run_dir, **(settings | changes))
        with run, run_dir.with_name(f"{run_dir.name}-ids-{rank}").open("a") as file:
            for step in run:
                step.log(rank=float(rank * (step.index + 1)))
                ids = [[part.index, part.sample_ids.tolist()] for part in step.micro_batches]
                file.write(json.dumps([step.index, ids]) + "\n")

    assert on_ranks(count, train) == [0] * count


def pieces(run_dir: Path, step: int) -> int:
    """Into how many files the model of a checkpoint is divided; 1 where it is whole."""
    (path,) = (run_dir / "checkpoints").glob(f"step-{step:08d}")
    found = [file.name for file in path.glob("model*.safetensors")]
    assert found == ["model.safetensors"] or all("-of-" in name for name in found)
    assert (
        len(list(path.glob("ema*.safetensors")))
        == len(list(path.glob("optimizer*.safetensors")))
        == len(found)
    )
    if step > 0:  # the frozen weight is in the first checkpoint, whatever ranks wrote it
        (base,) = json.loads((path / "manifest.json").read_text())["bases"]
        assert (base["step"], base["tensors"]) == (0, {"ema": ["frozen"], "model": ["frozen"]})
        assert not any("frozen" in stored_in(path / name) for name in found)
    return len(found)


def seen(run_dir: Path) -> dict[int, list[list[int]]]:
    """The sample ids of each step, by micro-batch."""
    found: dict[int, dict[int, list[int]]] = {}
    for file in run_dir.parent.glob(f"{run_dir.name}-ids-*"):
        for line in file.read_text().splitlines():
            step, parts = json.loads(line)
            found.setdefault(step, {}).update(dict(parts))
    return {step: [parts[index] for index in range(12)] for step, parts in sorted(found.items())}


def told(run_dir: Path) -> list[tuple[int, str, float]]:
    names = ("loss", "val/loss")
    return [
        (record["step"], name, record[name])
        for record in records(run_dir / "metrics.jsonl")
        for name in names
        if name in record
    ]


def last(run_dir: Path) -> dict[str, dict[str, Tensor]]:
    found = Store(run_dir / "checkpoints").newest_intact()
    assert found is not None
    assert found[0].step == STEPS
    return {file: found[0].tensors(file) for file in found[0].files if file != "state"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, uninterrupted."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    session(run_dir, ("none", 1), until=STEPS)
    return run_dir


slow = pytest.mark.slow
WAYS = [
    (("fsdp", 2), ("none", 1)),
    (("fsdp", 2), ("fsdp", 3)),
    (("ddp", 2), ("fsdp", 4)),
    pytest.param(("fsdp", 3), ("ddp", 2), marks=slow),
    pytest.param(("2 replicas", 4), ("fsdp", 2), marks=slow),
    pytest.param(("none", 1), ("fsdp", 2), marks=slow),
    pytest.param(("fsdp", 2), ("fsdp", 1), marks=slow),
    pytest.param(("fsdp", 4), ("2 replicas", 4), marks=slow),
    pytest.param(("fsdp", 3), ("fsdp", 4), marks=slow),
    pytest.param(("ddp", 2), ("none", 1), marks=slow),
    pytest.param(("ddp", 2), ("ddp", 3), marks=slow),
    pytest.param(("none", 1), ("ddp", 4), marks=slow),
]


@pytest.mark.fast("fsdp-2-fsdp-3")
@pytest.mark.parametrize(("first", "then"), WAYS, ids=lambda start: "-".join(map(str, start)))
def test_a_run_goes_on_with_other_ranks_and_strategies(
    first: Start, then: Start, alone: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    session(run_dir, first, until=SAVED)
    session(run_dir, then, until=STEPS)
    divided = {"fsdp": first[1], "2 replicas": 2}
    assert (pieces(run_dir, SAVED), pieces(run_dir, STEPS)) == (
        divided.get(first[0], 1),
        {**divided, "fsdp": then[1]}.get(then[0], 1),
    )
    assert seen(run_dir) == seen(alone)
    for (step, name, value), (other_step, other_name, expected) in zip(
        told(run_dir), told(alone), strict=True
    ):
        assert (step, name) == (other_step, other_name)
        assert value == pytest.approx(expected, abs=1e-4)
    for file, tensors in last(alone).items():
        found = last(run_dir)[file]
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=1e-3
            )  # Adam amplifies rounding


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [("fsdp", 2), pytest.param(("fsdp", 3), marks=slow), pytest.param(("ddp", 2), marks=slow)],
    ids=lambda start: "-".join(map(str, start)),
)
def test_on_the_same_ranks_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    start: Start, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    session(whole, start, until=STEPS)
    for until in (1, SAVED, STEPS):
        session(parts, start, until=until)
    assert seen(whole) == seen(parts)
    assert told(whole) == told(parts)
    for file, tensors in last(whole).items():
        assert all(torch.equal(last(parts)[file][name], tensor) for name, tensor in tensors.items())
    logged = [
        [record["rank"] for record in records(out / "metrics.jsonl") if "rank" in record]
        for out in (whole, parts)
    ]
    # what was logged before a resume counts once, whatever number of ranks go on
    mean_rank = sum(range(start[1])) / start[1]
    assert (
        logged[0] == logged[1] == [mean_rank * (2 * window + 1.5) for window in range(STEPS // 2)]
    )


def test_a_missing_piece_is_passed_over_and_the_older_checkpoint_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    session(whole, ("fsdp", 2), until=STEPS, save_every=f"{SAVED} steps")
    shutil.copytree(whole, parts)
    (parts / "checkpoints" / f"step-{STEPS:08d}" / "model.00002-of-00002.safetensors").unlink()
    session(parts, ("fsdp", 2), until=STEPS)
    assert [
        line["step"] for line in json.loads((parts / "environment.json").read_text())["sessions"]
    ] == [0, SAVED]
    for file, tensors in last(whole).items():
        assert all(torch.equal(last(parts)[file][name], tensor) for name, tensor in tensors.items())


class FullOnce:
    """A disk that is full when this rank writes its piece of a step, the first time."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(Disk(), name)

    def create(self, path: Path) -> int:
        if path.parent.name.endswith(f"step-{self.step:08d}") and not self.failed:
            self.failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return Disk().create(path)


def test_a_full_disk_of_one_rank_is_told_and_the_run_goes_on_and_saves_again(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    often = {"save_every": "1 steps", "evaluate_every": "4 steps", "console": True}
    session(run_dir, ("fsdp", 2), until=STEPS, disk_of_last=FullOnce(1), **often)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step-00000000",
        "step-00000002",
        "step-00000003",
        "step-00000004",
    ]
    printed = [run_dir.with_name(f"{run_dir.name}-printed-{rank}").read_text() for rank in (0, 1)]
    assert printed[0].count("NOT SAVED: rank 1 on ") == 1
    assert printed[0].count("[checkpoint-not-saved]") == 1
    assert "NOT SAVED" not in printed[1]


@pytest.mark.slow
def test_scores_at_the_end_are_of_the_best_checkpoint_which_every_rank_reads(
    tmp_path: Path,
) -> None:
    data = Augmented()
    split = (data.inputs, data.labels)
    both = {"val": sf.Split(split), "test": sf.Split(split, at_end=True)}
    settings: dict[str, Any] = {"splits": both, "best": "max val/loss", "early_stopping": None}
    found = {}
    for start in (("none", 1), ("fsdp", 2)):
        run_dir = tmp_path / start[0]
        session(run_dir, start, until=STEPS, evaluate_every="2 steps", **settings)
        lines = list(records(run_dir / "metrics.jsonl"))
        (end,) = [record for record in lines if record["kind"] == "final_eval"]
        scored = {
            record["step"]: record["val/loss"] for record in lines if record["kind"] == "eval"
        }
        assert end["weights_step"] == 2  # the largest loss is the first
        assert end["test/loss"] == pytest.approx(scored[2], rel=1e-6)
        found[start] = end["test/loss"], last(run_dir)["model"]
    (alone, weights), (together, others) = found.values()
    assert together == pytest.approx(alone, rel=1e-4)
    for name, tensor in weights.items():  # the trained weights are put back afterwards
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-3)


def test_every_rank_begins_with_its_rows_of_given_weights(alone: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    export = tmp_path / "weights"
    sf.load(alone).export(export, weights="trained")
    session(run_dir, ("fsdp", 2), until=1, init_from=export)
    first = Store(run_dir / "checkpoints").at(0)
    for file in ("model", "ema"):
        assert first.tensors(file).keys() == last(alone)["model"].keys()
        assert all(
            torch.equal(first.tensors(file)[name], tensor)
            for name, tensor in last(alone)["model"].items()
        )
