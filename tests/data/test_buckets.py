"""Batches by a budget of tokens: every sample once an epoch, never over the budget, a function of
(seed, step). 3 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from refused import refused
from surefoot.data.buckets import Buckets
from surefoot.data.loader import Feed

CPU = torch.device("cpu")


def lengths_of(
    samples: int, *, longest: int = 40, sides: int = 2, seed: int = 0
) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(seed).integers(1, longest + 1, (samples, sides))
    return drawn.astype(np.int64)


def batches(plan: Buckets, epoch: int) -> list[list[int]]:
    """The micro-batches of an epoch."""
    ids = list[list[int]]()
    for step in range(epoch * plan.steps, (epoch + 1) * plan.steps):
        ids += [ids_of_micro_batch.tolist() for ids_of_micro_batch, _ in plan.micro_batches(step)]
    return ids


def count_places(lengths: np.ndarray[Any, Any], batches: Iterable[Any]) -> int:
    """The tokens of batches, with those that fill them."""
    return sum(len(batch) * int(lengths[batch].max(axis=0).sum()) for batch in batches)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=120),
    tokens=st.integers(30, 200),
    pieces=st.integers(1, 4),
    seed=st.integers(0, 3),
)
def test_every_epoch_holds_every_sample_once_and_no_batch_is_over_the_budget(
    lengths: list[int], tokens: int, pieces: int, seed: int
) -> None:
    plan = Buckets(seed, lengths=np.array(lengths), tokens=tokens, pieces=pieces)

    for epoch in (0, 2):
        of_epoch = batches(plan, epoch)
        assert sorted(itertools.chain(*of_epoch)) == list(range(len(lengths)))
        for batch in of_epoch:
            longest = max((lengths[sample] for sample in batch), default=0)
            assert len(batch) * longest <= tokens


@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_all_steps_have_as_many_micro_batches_and_only_an_epochs_last_ones_are_empty(
    pieces: int,
) -> None:
    plan = Buckets(1, lengths=lengths_of(500), tokens=400, pieces=pieces)

    sizes = [[len(ids) for ids, _ in plan.micro_batches(step)] for step in range(plan.steps)]

    assert {len(of_step) for of_step in sizes} == {pieces}
    *before_last, last = sizes
    assert all(min(of_step) > 0 for of_step in before_last)
    assert last == sorted(last, key=lambda size: size == 0)


@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_batches_depends_on_the_lengths_alone(seed: int) -> None:
    lengths = lengths_of(300)
    steps = Buckets(0, lengths=lengths, tokens=300, pieces=1).steps

    plan = Buckets(seed, lengths=lengths, tokens=300, pieces=1)

    assert plan.steps == steps
    for epoch in (0, 1, 7):
        assert len(batches(plan, epoch)) == steps


def test_a_step_does_not_depend_on_which_were_asked_for_before() -> None:
    lengths = lengths_of(400)
    plan = Buckets(3, lengths=lengths, tokens=256, pieces=2)
    far = 5 * plan.steps + 3
    expected = Buckets(3, lengths=lengths, tokens=256, pieces=2).micro_batches(far)

    for step in range(far):
        plan.micro_batches(step)

    for (ids, epochs), (ids_asked_first, _) in zip(plan.micro_batches(far), expected, strict=True):
        assert ids.tolist() == ids_asked_first.tolist()
        assert set(epochs.tolist()) == {5}


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0)])
def test_epochs_and_seeds_batch_other_samples_together_in_another_order(
    seed: int, epoch: int
) -> None:
    lengths = lengths_of(400)
    first = batches(Buckets(0, lengths=lengths, tokens=300, pieces=1), 0)

    other = batches(Buckets(seed, lengths=lengths, tokens=300, pieces=1), epoch)

    assert other != first
    together = {*map(frozenset, first)} & {*map(frozenset, other)}
    assert len(together) < len(first) / 4


def test_the_padding_that_is_told_is_that_of_the_batches() -> None:
    lengths = lengths_of(300)
    plan = Buckets(0, lengths=lengths, tokens=200, pieces=1)

    places = count_places(lengths, batches(plan, 0))

    assert plan.padded_fraction(0) == pytest.approx(1 - lengths.sum() / places)


def test_padding_is_a_fraction_of_that_of_random_batches() -> None:
    lengths = np.repeat(lengths_of(3000, sides=1), 2, axis=1)  # both sides are as long
    plan = Buckets(0, lengths=lengths, tokens=1000, pieces=1)
    random_batches = np.random.default_rng(0).permutation(len(lengths)).reshape(-1, 50)

    padded_fraction = 1 - lengths.sum() / count_places(lengths, random_batches)

    assert plan.padded_fraction(0) < 0.1 * padded_fraction


def test_a_sample_longer_than_the_budget_is_named() -> None:
    with refused("sample-exceeds-micro-batch", sf.DataError, sample=2, length=50, tokens=49):
        Buckets(0, lengths=np.array([3, 4, 50, 6]), tokens=49, pieces=1)


class Sentences:
    """Rows of tokens of several lengths; a target is the token after each."""

    def __init__(self, samples: int = 90) -> None:
        self.lengths = lengths_of(samples, longest=12, sides=1)[:, 0] + 1
        generator = torch.Generator().manual_seed(5)
        self.rows = list[Tensor]()
        for length in self.lengths.tolist():
            self.rows.append(torch.randint(1, 9, (length,), generator=generator))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> Tensor:
        return self.rows[sample]


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(9, 8), nn.Dropout(0.2), nn.Linear(8, 9))


def loss(model: nn.Module, batch: Tensor) -> sf.Mean:
    targets = batch[:, 1:].masked_fill(batch[:, 1:] == 0, -100)
    return sf.losses.cross_entropy(model(batch[:, :-1]), targets)


def build(run_dir: Path | None = None, **changes: Any) -> sf.Run:
    arguments: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": Sentences(),
        "collate_fn": padded,
        "batch_size": "96 tokens",
        "micro_batch_size": "32 tokens",
        "length": "3 epochs",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(arguments | changes))


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_are_read_as_planned_by_any_number_of_workers(workers: int) -> None:
    data = Sentences()
    plan = Buckets(0, lengths=data.lengths, tokens=32, pieces=3)
    feed = Feed(data, plan, seed=0, device=CPU, workers=workers, collate=padded)
    feed.start(0, stop=plan.steps)
    try:
        steps = [feed.micro_batches(step) for step in range(plan.steps)]
    finally:
        feed.close()

    for step, micro_batches in enumerate(steps):
        for micro_batch, (ids, _) in zip(micro_batches, plan.micro_batches(step), strict=True):
            assert micro_batch.sample_ids.tolist() == ids.tolist()
            if len(ids):
                expected = padded([data[sample] for sample in ids.tolist()])
                assert torch.equal(micro_batch.batch, expected)
            else:
                assert micro_batch.batch is None
                assert micro_batch.count == 0


def test_the_loss_of_a_step_is_the_mean_over_all_targets_of_its_ragged_micro_batches() -> None:
    run = build(model=lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)), length="1 epochs")

    with run:
        for step in run.steps():
            losses = list[Tensor]()
            for micro_batch in step.micro_batches:
                if micro_batch.count:
                    losses.append(losses_of_targets(run.state.model, micro_batch.batch))
            mean = float(torch.cat(losses).mean())
            assert float(sf.forward_backward(step)) == pytest.approx(mean, rel=1e-5)
            sf.update(step)


@torch.no_grad()
def losses_of_targets(model: nn.Module, rows: Tensor) -> Tensor:
    """The loss of each target that is no filling."""
    targets = rows[:, 1:]
    logits = model(rows[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, targets, reduction="none")[targets != 0].double()


@pytest.mark.fast("7")
@pytest.mark.parametrize("stopped_at", [1, 7, 13])
def test_a_resumed_run_by_tokens_is_bit_equal_to_the_uninterrupted_one(
    stopped_at: int, tmp_path: Path
) -> None:
    whole = build(tmp_path / "whole")
    whole.train()

    build(tmp_path / "cut", stop_after=f"{stopped_at} steps").train()
    resumed = build(tmp_path / "cut")
    resumed.train()

    assert resumed.state.step == whole.state.step == 3 * whole.parts.pipeline.plan.steps  # type: ignore[attr-defined]
    assert all(map(torch.equal, resumed.state.parameters, whole.state.parameters))


@in_one
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"batch_size": "96 tokens", "micro_batch_size": 32},
            "batch-sizes-in-two-units",
        ),
        (
            {"batch_size": "96 tokens", "micro_batch_size": "36 tokens"},
            'micro_batch_size="32 tokens", or micro_batch_size="48 tokens"',
        ),
        ({"batch_size": "96 words"}, "setting-out-of-range"),
        ({"batch_size": "0 tokens"}, "setting-out-of-range"),
        (
            {"batch_size": 8.0, "micro_batch_size": None},
            "setting-of-wrong-type",
        ),
        (
            {"batch_size": "96 tokens", "train_data": (torch.zeros(4, 3),)},
            "[batch-size-of-unknown-lengths]",
        ),
        ({"batch_size": "9 tokens", "micro_batch_size": None}, "[sample-exceeds-micro-batch]"),
        ({"batch_size": "9_ tokens"}, "[setting-out-of-range]"),
        ({"compile": True}, "batches sized in tokens change shape in almost every step"),
        (
            {
                "batch_size": "8 tokens",
                "micro_batch_size": None,
                "train_data": sf.data.TrainWindows(np.arange(90), context=9, seed=0),
            },
            "micro-batch-shorter-than-sample",
        ),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_what_to_type(
    sizes: dict[str, Any], words: str
) -> None:
    with pytest.raises(sf.SurefootError) as caught:
        build(**sizes)
    assert words in str(caught.value)


def test_a_record_counts_the_samples_of_batches_by_tokens(tmp_path: Path) -> None:
    run = build(tmp_path / "run", length="1 epochs", log_every="1 steps")

    run.train()

    counts = [record["samples"] for record in sf.load(tmp_path / "run").records("train")]
    assert sum(counts) == run.parts.pipeline.plan.samples
    assert len(set(counts)) > 1


def test_a_budget_of_tokens_is_a_number_of_windows_where_all_are_of_one_length() -> None:
    windows = sf.data.TrainWindows(np.arange(1000) % 9, context=16, seed=0)

    def train(batch_size: int | str, micro_batch_size: int | str) -> sf.Run:
        run = build(
            loss=lambda model, batch: sf.losses.cross_entropy(model(batch[0]), batch[1]),
            train_data=windows,
            collate_fn=None,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            length="5 steps",
        )
        run.train()
        return run

    by_tokens = train("200 tokens", "100 tokens")
    by_windows = train(12, 6)

    assert by_tokens.parts.plan.identity["batch_size"] == 12
    assert all(map(torch.equal, by_tokens.state.parameters, by_windows.state.parameters))


@pytest.mark.parametrize(
    "lengths",
    [
        np.ones(4, np.int64),
        np.ones(200, np.int64),
        np.zeros(90, np.int64),
        np.ones(90),
        np.ones((90, 2, 2), np.int64),
        [],
    ],
    ids=["too few", "too many", "nothing", "fractions", "three dimensions", "none"],
)
def test_lengths_that_cannot_be_those_of_the_samples_are_refused(lengths: Any) -> None:
    data = Sentences()
    data.lengths = lengths
    with refused("lengths-not-of-samples", sf.DataError, samples=90):
        build(train_data=data)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_lengths_may_be_a_list_or_a_tensor(kind: Any) -> None:
    data = Sentences()
    data.lengths = kind(data.lengths.tolist())
    of_array = build().parts.pipeline.plan

    plan = build(train_data=data).parts.pipeline.plan

    for (ids, _), (expected, _) in zip(
        plan.micro_batches(3), of_array.micro_batches(3), strict=True
    ):
        assert ids.tolist() == expected.tolist()
