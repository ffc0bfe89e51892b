"""Indexed data and samplers that the script has already split by rank. About 4 s of CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import surefoot as sf
from rank_processes import Ranks
from stream_runs import Drawn, build, row, train
from surefoot.tracking import run_reader

ROWS = 40
BATCH = 8
WHOLE = [(recorded["x"], recorded["y"]) for recorded in map(row, range(ROWS))]


def own_rank() -> tuple[int, int]:
    """The number of this rank, and of all ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Share(Sampler[int]):
    """The share of a rank in a permutation of all samples, as samplers for DDP are written."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS // self.ranks

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        permutation = torch.randperm(ROWS, generator=generator).tolist()
        return iter(permutation[self.rank :: self.ranks])


class Unequal(Share):
    """Shares of different lengths."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * BATCH, ROWS))


class OwnDistributedSampler(DistributedSampler[Any]):
    pass


def read_refusal(kind: str) -> list[Any]:
    """Build a run over data that are split by rank; return its code and fields, or nothing."""
    rank, ranks = own_rank()
    share = WHOLE[rank::ranks]
    samplers = {
        "sampler": Share(rank, ranks),
        "unequal sampler": Unequal(rank, ranks),
        "subclass": OwnDistributedSampler(WHOLE, ranks, rank),
        "whole sampler": Share(0, 1),
    }
    changes: dict[str, Any] = {"train_data": share if kind == "train_data" else WHOLE}
    if kind == "split":
        changes["splits"] = {"val": sf.Split(share)}
    if kind in samplers:
        changes["train_data"] = DataLoader(WHOLE, BATCH, sampler=samplers[kind])
        changes["batch_size"] = None
    try:
        build(None, **changes)
    except sf.SurefootError as problem:
        fields = problem.fields
        return [problem.code, fields.get("data", fields.get("sampler")), fields["rank"]]
    return []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("train_data", ["data-differs-among-ranks", "train_data", 1]),
        ("split", ["data-differs-among-ranks", "split 'val'", 1]),
        ("whole", []),
        ("sampler", ["sampler-split-by-rank", "Share", 1]),
        ("unequal sampler", ["sampler-split-by-rank", "Unequal", 1]),
        ("subclass", ["sampler-split-by-rank", "OwnDistributedSampler", 1]),
        ("whole sampler", []),
    ],
)
def test_data_that_differ_among_ranks_are_refused(
    kind: str, expected: list[Any], ranks: Ranks
) -> None:
    assert ranks(2, read_refusal, kind=kind) == [expected, expected]


def samples_of_an_epoch() -> list[int]:
    """Train an epoch over a loader with torch's sampler of each rank; return this rank's samples."""
    rank, ranks = own_rank()
    loader = DataLoader(WHOLE, BATCH // ranks, sampler=DistributedSampler(WHOLE, ranks, rank))
    run = build(
        None,
        train_data=loader,
        batch_size=None,
        micro_batch_size=BATCH // ranks,
        length="1 epochs",
        check_state=False,
    )
    samples = []
    for _, _, micro_batches in train(run):
        for sample_ids in micro_batches:
            samples += sample_ids
    return samples


def test_the_sampler_of_each_rank_that_torch_has_stands_for_the_shuffled_whole(
    ranks: Ranks,
) -> None:
    first, second = ranks(2, samples_of_an_epoch)

    assert len(first) == len(second) == ROWS // 2
    assert sorted(first + second) == list(range(ROWS))


class ByRank(Drawn):
    """Other samples on each rank."""

    def __getitem__(self, number: int) -> Any:
        rank, _ = own_rank()
        return super().__getitem__(2 * number + rank)


def count_steps_of_two_sessions(run_dir: str, behavior: int) -> list[Any]:
    """The steps of each session of a run over other samples on each rank, which began with a
    behavior; or the code of its error.
    """
    changes = {"length": "4 steps", "check_state": False, "train_data": ByRank(ROWS)}
    try:
        run_reader.newest_behavior = lambda: behavior  # type: ignore[assignment]
        first = train(build(Path(run_dir), stop_after="2 steps", **changes))
        run_reader.newest_behavior = lambda: behavior + 100  # type: ignore[assignment]
        second = train(build(Path(run_dir), **changes))
    except sf.SurefootError as problem:
        return [problem.code]
    return [len(first), len(second)]


@pytest.mark.slow
@pytest.mark.parametrize(("behavior", "expected"), [(4, [2, 2]), (5, ["data-differs-among-ranks"])])
def test_a_run_that_began_earlier_goes_on_with_samples_that_differ(
    behavior: int, expected: list[Any], ranks: Ranks, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")

    outcomes = ranks(2, count_steps_of_two_sessions, run_dir=run_dir, behavior=behavior)

    assert outcomes == [expected, expected]
