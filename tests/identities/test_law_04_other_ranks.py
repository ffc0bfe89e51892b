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
from equal_checkpoints import newest_intact
from rank_processes import forks, on_ranks
from recorded import records_of_kind
from small_runs import FEATURES, Augmented, build
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.tensor_file import stored_in
from surefoot.tracking.jsonl import records

pytestmark = forks

STEPS = 4
SAVED = 2
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
        hidden = torch.tanh(self.first(inputs) + self.frozen)
        logits: Tensor = self.last(self.drop(hidden) * self.gain)
        return logits * self.scale


def train_on_ranks(
    run_dir: Path, start: Start, *, until: int, disk_of_last: Any = None, **changes: Any
) -> None:
    """The sample ids of each step's micro-batches go to files beside the run, by rank."""
    strategy, size = start

    def train(rank: int) -> None:
        if "console" in changes:
            sys.stdout = sys.stderr = run_dir.with_name(f"{run_dir.name}-printed-{rank}").open("w")
        if disk_of_last is not None and rank == size - 1:
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
                ids = {part.index: part.sample_ids.tolist() for part in step.micro_batches}
                file.write(json.dumps([step.index, ids]) + "\n")

    assert on_ranks(size, train) == [0] * size


def count_pieces(run_dir: Path, step: int) -> int:
    """Into how many files the model of a checkpoint is divided; 1 where it is whole."""
    checkpoint = run_dir / "checkpoints" / f"step-{step:08d}"
    names = [file.name for file in checkpoint.glob("model*.safetensors")]
    assert names == ["model.safetensors"] or all("-of-" in name for name in names)
    assert len(list(checkpoint.glob("ema*.safetensors"))) == len(names)
    assert len(list(checkpoint.glob("optimizer*.safetensors"))) == len(names)
    if step > 0:  # the frozen weight is in the first checkpoint, whatever ranks wrote it
        (base,) = json.loads((checkpoint / "manifest.json").read_text())["bases"]
        assert base["step"] == 0
        assert base["tensors"] == {"ema": ["frozen"], "model": ["frozen"]}
        for name in names:
            assert "frozen" not in stored_in(checkpoint / name)
    return len(names)


def expected_pieces(start: Start) -> int:
    strategy, size = start
    return {"fsdp": size, "2 replicas": 2}.get(strategy, 1)


def samples_by_step(run_dir: Path) -> dict[int, list[list[int]]]:
    """The sample ids of each step, by micro-batch."""
    ids_by_step: dict[int, dict[str, list[int]]] = {}
    for file in run_dir.parent.glob(f"{run_dir.name}-ids-*"):
        for line in file.read_text().splitlines():
            step, ids_of_rank = json.loads(line)
            ids_by_step.setdefault(step, {}).update(ids_of_rank)
    return {
        step: [ids[str(index)] for index in range(12)] for step, ids in sorted(ids_by_step.items())
    }


def logged_losses(run_dir: Path) -> list[tuple[int, str, float]]:
    losses = []
    for record in records(run_dir / "metrics.jsonl"):
        for name in ("loss", "val/loss"):
            if name in record:
                losses.append((record["step"], name, record[name]))
    return losses


def last_tensors(run_dir: Path) -> dict[str, dict[str, Tensor]]:
    """Those of each file of the checkpoint at the end."""
    checkpoint, _ = newest_intact(Store(run_dir / "checkpoints"))
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    return {file: checkpoint.tensors(file) for file in checkpoint.files if file != "state"}


def assert_same_bits(run_dir: Path, other_dir: Path) -> None:
    files = last_tensors(run_dir)
    others = last_tensors(other_dir)
    assert files.keys() == others.keys()
    for file, tensors in files.items():
        assert tensors.keys() == others[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(others[file][name], tensor), (file, name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, uninterrupted."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    train_on_ranks(run_dir, ("none", 1), until=STEPS)
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

    train_on_ranks(run_dir, first, until=SAVED)
    train_on_ranks(run_dir, then, until=STEPS)

    assert count_pieces(run_dir, SAVED) == expected_pieces(first)
    assert count_pieces(run_dir, STEPS) == expected_pieces(then)
    assert samples_by_step(run_dir) == samples_by_step(alone)
    for logged, expected in zip(logged_losses(run_dir), logged_losses(alone), strict=True):
        *place, loss = logged
        *expected_place, expected_loss = expected
        assert place == expected_place
        assert loss == pytest.approx(expected_loss, abs=1e-4)
    tensors = last_tensors(run_dir)
    for file, expected_tensors in last_tensors(alone).items():
        # Adam amplifies rounding
        torch.testing.assert_close(tensors[file], expected_tensors, rtol=0, atol=1e-3)


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
    resumed = tmp_path / "resumed"
    train_on_ranks(whole, start, until=STEPS)
    for until in (1, SAVED, STEPS):
        train_on_ranks(resumed, start, until=until)

    assert samples_by_step(resumed) == samples_by_step(whole)
    assert logged_losses(resumed) == logged_losses(whole)
    assert_same_bits(resumed, whole)
    # what was logged before a resume counts once, whatever number of ranks go on
    _, size = start
    mean_rank = sum(range(size)) / size
    expected = [mean_rank * 1.5, mean_rank * 3.5]  # of steps 1 and 2, and of 3 and 4
    assert logged_ranks(whole) == expected
    assert logged_ranks(resumed) == expected


def logged_ranks(run_dir: Path) -> list[float]:
    return [record["rank"] for record in records(run_dir / "metrics.jsonl") if "rank" in record]


def test_a_missing_piece_is_passed_over_and_the_older_checkpoint_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    damaged = tmp_path / "damaged"
    train_on_ranks(whole, ("fsdp", 2), until=STEPS, save_every=f"{SAVED} steps")
    shutil.copytree(whole, damaged)
    (damaged / "checkpoints" / f"step-{STEPS:08d}" / "model.00002-of-00002.safetensors").unlink()

    train_on_ranks(damaged, ("fsdp", 2), until=STEPS)

    sessions = json.loads((damaged / "environment.json").read_text())["sessions"]
    assert [session["step"] for session in sessions] == [0, SAVED]
    assert_same_bits(damaged, whole)


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

    train_on_ranks(
        run_dir,
        ("fsdp", 2),
        until=STEPS,
        disk_of_last=FullOnce(step=1),
        save_every="1 steps",
        evaluate_every="4 steps",
        console=True,
    )

    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert saved == ["step-00000000", "step-00000002", "step-00000003", "step-00000004"]
    printed_on_0 = (tmp_path / "run-printed-0").read_text()
    printed_on_1 = (tmp_path / "run-printed-1").read_text()
    assert printed_on_0.count("NOT SAVED: rank 1 on ") == 1
    assert printed_on_0.count("[checkpoint-not-saved]") == 1
    assert "NOT SAVED" not in printed_on_1


@pytest.mark.slow
def test_scores_at_the_end_are_of_the_best_checkpoint_which_every_rank_reads(
    tmp_path: Path,
) -> None:
    data = Augmented()
    split = (data.inputs, data.labels)
    splits = {"val": sf.Split(split), "test": sf.Split(split, at_end=True)}

    def train(run_dir: Path, start: Start) -> float:
        """Returns the score at the end."""
        train_on_ranks(
            run_dir, start, until=STEPS, splits=splits, best="max val/loss", early_stopping=None
        )
        (end,) = records_of_kind(run_dir, "final_eval")
        evaluations = records_of_kind(run_dir, "eval")
        (best,) = [record for record in evaluations if record["step"] == 2]
        assert end["weights_step"] == 2  # the largest loss is the first
        assert end["test/loss"] == pytest.approx(best["val/loss"], rel=1e-6)
        return float(end["test/loss"])

    score_alone = train(tmp_path / "alone", ("none", 1))
    score_together = train(tmp_path / "together", ("fsdp", 2))

    assert score_together == pytest.approx(score_alone, rel=1e-4)
    # the trained weights are put back afterwards
    weights_alone = last_tensors(tmp_path / "alone")["model"]
    weights_together = last_tensors(tmp_path / "together")["model"]
    torch.testing.assert_close(weights_together, weights_alone, rtol=0, atol=1e-3)


def test_every_rank_begins_with_its_rows_of_given_weights(alone: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    export = tmp_path / "weights"
    sf.load(alone).export(export, weights="trained")
    train_on_ranks(run_dir, ("fsdp", 2), until=1, init_from=export)

    first = Store(run_dir / "checkpoints").at(0)
    given = last_tensors(alone)["model"]
    for file in ("model", "ema"):
        torch.testing.assert_close(first.tensors(file), given, rtol=0, atol=0)
