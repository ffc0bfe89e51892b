"""Law 19 for orders whose epochs begin with a step, and for streams: a change of the batch size is
exact there too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

import surefoot as sf
from identities import changed_runs
from identities.changed_runs import (
    SAMPLES,
    assert_same_end,
    data,
    given_the_journal_of,
    loss,
    same,
    samples_read,
    weights,
)
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.checkpoint.reader import read
from surefoot.config.setting_change import SettingChange
from surefoot.run.run import Run
from surefoot.tracking.change_journal import append_changes, read_changes
from surefoot.tracking.run_reader import read_run
from surefoot.train.next_epoch import next_epoch
from surefoot.train.recorded_settings import recorded_settings


class Sentences(Dataset[Any]):
    """Samples of several lengths."""

    lengths = torch.arange(SAMPLES).remainder(7).add(2).numpy()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data()
        return inputs[index], targets[index]

    def __len__(self) -> int:
        return SAMPLES


class Shuffle(Sampler[int]):
    """A sampler of a user: another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())

    def __len__(self) -> int:
        return SAMPLES


def listed(batch_size: int = 8) -> DataLoader[Any]:
    batches = BatchSampler(Shuffle(), batch_size, drop_last=False)
    return DataLoader(Sentences(), batch_sampler=batches)


def rows() -> Iterator[tuple[Tensor, Tensor]]:
    number = 0
    while True:
        inputs = torch.tensor([number % 7, number % 5, number % 3, 1.0])
        yield inputs, inputs.sum()[None]
        number += 1


ORDERS: dict[str, dict[str, Any]] = {
    "lanes": {"order": "lanes"},
    "buckets": {
        "train_data": Sentences(),
        "batch_size": "64 tokens",
        "micro_batch_size": "32 tokens",
    },
    "lists": {"train_data": listed(), "batch_size": None},
}
LARGER: dict[str, Any] = {"lanes": 12, "buckets": "128 tokens", "lists": 12, "stream": 12}


def run_in(run_dir: Path, name: str, **settings: Any) -> Run:
    chosen: dict[str, Any] = {"length": "4 epochs"} | ORDERS.get(name, {})
    if name == "stream":
        chosen = {"train_data": sf.data.Stream(rows, start="thread"), "length": "20 steps"}
    return changed_runs.run_in(run_dir, **(chosen | settings))


def steps_per_epoch(name: str, tmp_path: Path) -> int:
    steps = run_in(tmp_path / "unused", name).parts.pipeline.plan.steps
    assert steps is not None
    return steps


def changed_run(run_dir: Path, name: str, *, at: int, **settings: Any) -> Run:
    """Return a run that was stopped after `at` steps and then changed, to go on with."""
    run_in(run_dir, name, stop_after=f"{at} steps").train()
    sf.load(run_dir).change("a test", **settings)
    return run_in(run_dir, name)


@pytest.mark.parametrize("name", [*ORDERS, "stream"])
def test_a_run_given_its_journal_from_the_start_ends_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    at = 10 if name == "stream" else 2 * steps_per_epoch(name, tmp_path)
    changed = changed_run(tmp_path / "changed", name, at=at, batch_size=LARGER[name])
    changed.train()
    assert changed.state.step > at

    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"), name)
    given.train()
    assert same(weights(given), weights(changed))


@pytest.mark.parametrize("name", ["lanes", "stream"])
def test_a_changed_run_is_the_loop_that_one_would_write(name: str, tmp_path: Path) -> None:
    at = 16
    plain: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "optimizer": sf.optim.sgd(lr=1e-2),
        "schedule": sf.schedules.constant(),
        "clip": "off",
    }
    linear = nn.Linear(4, 1)
    untrained = run_in(tmp_path / "unused", name, **plain).state.model
    linear.load_state_dict(untrained.state_dict())
    run_in(tmp_path / "run", name, stop_after=f"{at} steps", **plain).train()
    sf.load(tmp_path / "run").change(batch_size=12)
    run = run_in(tmp_path / "run", name, **plain)
    run.train()

    batches = batches_of_lanes() if name == "lanes" else batches_of_stream(at=at, last=20)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-2)
    assert len(batches) == run.state.step
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(linear, [inputs, targets]).backward()
        optimizer.step()
    for mine, theirs in zip(run.state.model.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def batches_of_lanes() -> list[tuple[Tensor, Tensor]]:
    """Return the batches of two epochs of 8 lanes, and of two of 12."""
    inputs, targets = data()
    batches = []
    for lane_count in (8, 8, 12, 12):
        lanes = [lane.tolist() for lane in torch.arange(SAMPLES).tensor_split(lane_count)]
        for step in range(len(lanes[0])):
            ids = [lane[step] for lane in lanes if step < len(lane)]
            batches.append((inputs[ids], targets[ids]))
    return batches


def batches_of_stream(*, at: int, last: int) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of 8 rows up to a step, and of 12 rows from there on."""
    source = rows()
    batches = []
    for step in range(last):
        read_now = [next(source) for _ in range(8 if step < at else 12)]
        inputs, targets = zip(*read_now, strict=True)
        batches.append((torch.stack(inputs), torch.stack(targets)))
    return batches


@pytest.mark.parametrize("name", ORDERS)
def test_every_sample_is_seen_once_an_epoch_before_and_after(name: str, tmp_path: Path) -> None:
    steps = steps_per_epoch(name, tmp_path)
    before = run_in(tmp_path / "before", name).parts.pipeline.plan
    run = changed_run(tmp_path / "run", name, at=2 * steps, batch_size=LARGER[name])
    after = run.parts.pipeline.plan
    length = run.parts.length

    assert length.steps == 2 * steps + 2 * after.steps
    assert length.epochs == 4.0
    for epoch in range(4):
        plan = before if epoch < 2 else after
        begin = epoch * steps if epoch < 2 else 2 * steps + (epoch - 2) * after.steps
        seen = samples_read(plan, range(begin, begin + plan.steps))
        assert sorted(sample for _, sample in seen) == list(range(SAMPLES))
        assert {number for number, _ in seen} == {epoch}


def test_a_record_ends_each_epoch_before_and_after(tmp_path: Path) -> None:
    changed_run(tmp_path, "lanes", at=16, batch_size=12).train()
    ends = [record["step"] for record in sf.load(tmp_path).records("epoch")]
    assert ends == [8, 16, 21, 26]


def test_rows_of_a_stream_that_were_read_are_read(tmp_path: Path) -> None:
    run = changed_run(tmp_path, "stream", at=5, batch_size=12)
    plan = run.parts.pipeline.plan
    tape = run.parts.pipeline.tape
    assert tape is not None
    with run:
        assert tape.recorder is not None
        assert tape.recorder.stop == tape.samples == 220  # rows that the run reads
        for _ in run:
            pass
    read_rows = [row for _, row in samples_read(plan, range(5, 20))]
    assert read_rows == list(range(5 * 8, 5 * 8 + 15 * 12))
    assert run.parts.length.epochs == 1.0
    saved = read(tmp_path / "checkpoints" / "step-00000020").saved
    assert saved.tape is not None
    assert saved.tape["rows"] == 220


@pytest.mark.parametrize("batch_size", [4, 60])
@pytest.mark.parametrize("name", ["lanes", "stream"])
def test_a_changed_run_that_stops_in_each_epoch_resumes_to_the_same_bits(
    name: str, batch_size: int, tmp_path: Path
) -> None:
    at = 8
    whole = changed_run(tmp_path / "whole", name, at=at, batch_size=batch_size)
    whole.train()
    stopped = changed_run(tmp_path / "stopped", name, at=at, batch_size=batch_size)
    for step in range(at, whole.state.step + 1):
        stopped = run_in(tmp_path / "stopped", name, stop_after=f"{step} steps")
        stopped.train()
    assert stopped.state.step == whole.state.step
    assert same(weights(stopped), weights(whole))


@forks
@pytest.mark.parametrize("name", ["lanes", "stream"])
def test_two_ranks_that_are_given_the_journal_train_as_those_that_were_changed(
    name: str, tmp_path: Path
) -> None:
    of_ranks: dict[str, Any] = {"micro_batch_size": 4}
    if name == "stream":
        of_ranks["train_data"] = sf.data.Stream(rows)
    changed = tmp_path / "changed"
    train_on_two_ranks(changed, name, stop_after="8 steps", **of_ranks)
    append_changes(changed, [SettingChange(0, 8, "batch_size", 8, 12)])
    train_on_two_ranks(changed, name, stop_after="11 steps", **of_ranks)
    train_on_two_ranks(changed, name, **of_ranks)

    given = given_the_journal_of(changed, tmp_path / "given")
    train_on_two_ranks(given, name, **of_ranks)
    assert_same_end(given, changed, step=sf.load(changed).step)


def train_on_two_ranks(run_dir: Path, name: str, **settings: Any) -> None:
    statuses = on_ranks(2, lambda _: run_in(run_dir, name, **settings).train())
    assert statuses == [0, 0]


@pytest.mark.parametrize("name", ORDERS)
def test_a_change_within_an_epoch_holds_from_the_next_one_on(name: str, tmp_path: Path) -> None:
    steps = steps_per_epoch(name, tmp_path)
    later = changed_run(tmp_path / "later", name, at=steps + 1, batch_size=LARGER[name])
    changes = read_changes(tmp_path / "later")
    assert [change.from_step for change in changes] == [2 * steps]
    assert later.parts.plan.timeline.until == 2 * steps
    later.train()

    there = changed_run(tmp_path / "there", name, at=2 * steps, batch_size=LARGER[name])
    there.train()
    assert same(weights(later), weights(there))


def test_another_change_of_the_next_epoch_takes_the_place_of_the_first(tmp_path: Path) -> None:
    changed_run(tmp_path, "lanes", at=5, batch_size=12)
    sf.load(tmp_path).change(batch_size=12)  # as it is then
    assert len(read_changes(tmp_path)) == 1
    sf.load(tmp_path).change(batch_size=20)
    first, second = read_changes(tmp_path)
    assert (first.was, first.now, second.was, second.now) == (8, 12, 12, 20)
    assert first.from_step == second.from_step == 8
    run = run_in(tmp_path, "lanes")
    run.train()
    assert run.state.step == 8 + 3 * 3


def test_a_batch_size_that_is_taken_back_before_it_held_leaves_no_trace(tmp_path: Path) -> None:
    changed_run(tmp_path / "run", "lanes", at=5, batch_size=12)
    sf.load(tmp_path / "run").change(batch_size=8, micro_batch_size=8)
    run = run_in(tmp_path / "run", "lanes")
    run.train()
    whole = run_in(tmp_path / "whole", "lanes")
    whole.train()
    assert same(weights(run), weights(whole))

    sf.load(tmp_path / "run").change(batch_size=12, length="6 epochs")
    assert read_changes(tmp_path / "run")[-1].from_step == 32


def test_what_can_change_at_once_does_so(tmp_path: Path) -> None:
    changed_run(tmp_path, "lanes", at=5, batch_size=12, **{"optimizer.lr": 1e-3})
    assert [(change.setting, change.from_step) for change in read_changes(tmp_path)] == [
        ("optimizer.lr", 5),
        ("batch_size", 8),
    ]
    sf.load(tmp_path).change(clip="norm 0.5")  # before one that is still to come
    run_in(tmp_path, "lanes").train()
    assert [record["step"] for record in sf.load(tmp_path).records("epoch")] == [8, 13, 18, 23]


def test_micro_batches_in_tokens_wait_too_and_others_do_not(tmp_path: Path) -> None:
    steps = steps_per_epoch("buckets", tmp_path)
    run = changed_run(tmp_path / "buckets", "buckets", at=1, micro_batch_size="64 tokens")
    (change,) = read_changes(tmp_path / "buckets")
    assert change.from_step == steps
    run.train()
    assert run.parts.length.epochs == 4.0

    changed_run(tmp_path / "lanes", "lanes", at=1, micro_batch_size=4).train()
    (change,) = read_changes(tmp_path / "lanes")
    assert change.from_step == 1


def test_a_change_behind_the_last_step_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path, "lanes", stop_after="25 steps").train()
    with refused("change-after-last-step", step=32):
        sf.load(tmp_path).change(batch_size=12)
    assert read_changes(tmp_path) == ()
    sf.load(tmp_path).change(batch_size=12, length="5 epochs")
    run = run_in(tmp_path, "lanes")
    run.train()
    assert run.state.step == 32 + 5


def test_a_second_change_counts_its_epochs_from_the_first_one_on(tmp_path: Path) -> None:
    changed_run(tmp_path, "lanes", at=7, batch_size=12, length="5 epochs")
    run_in(tmp_path, "lanes", stop_after="10 steps").train()
    sf.load(tmp_path).change(batch_size=30)
    assert [change.from_step for change in read_changes(tmp_path)] == [7, 8, 13]
    run = run_in(tmp_path, "lanes")
    run.train()
    assert run.state.step == 8 + 5 + 3 * 2
    assert run.parts.length.epochs == 5.0


def test_a_run_without_a_checkpoint_since_the_change_does_not_know_its_next_epoch(
    tmp_path: Path,
) -> None:
    changed_run(tmp_path, "buckets", at=1, batch_size="128 tokens")
    files = read_run(tmp_path)
    assert files.state is not None
    begin = files.changes[-1].from_step
    recorded = recorded_settings(files)
    assert next_epoch(recorded, files.state, 1) == begin
    assert next_epoch(recorded, files.state, begin) == begin
    with refused("epochs-not-saved-yet", begin=begin):
        next_epoch(recorded, files.state, begin + 1)


@pytest.mark.parametrize("name", ["lanes", "buckets"])
def test_the_epochs_of_an_older_checkpoint_follow_from_its_settings(
    name: str, tmp_path: Path
) -> None:
    run_in(tmp_path, name, stop_after="3 steps").train()
    files = read_run(tmp_path)
    assert files.state is not None
    steps = files.state.whole_epochs
    assert steps is not None
    older = replace(files.state, whole_epochs=None)
    assert next_epoch(recorded_settings(files), older, 3) == steps["steps"]


@pytest.mark.parametrize("name", ORDERS)
def test_a_journal_that_changes_within_an_epoch_is_refused_with_the_next_one(
    name: str, tmp_path: Path
) -> None:
    steps = steps_per_epoch(name, tmp_path)
    run = run_in(tmp_path / "run", name, stop_after=f"{steps + 1} steps")
    was = run.parts.of_program["batch_size"]
    run.train()
    append_changes(tmp_path / "run", [SettingChange(0, steps + 1, "batch_size", was, LARGER[name])])
    with refused("batch-size-changes-within-epoch", step=steps + 1, next_epoch=2 * steps):
        run_in(tmp_path / "run", name)


def test_a_journal_from_the_start_is_refused_before_a_step_is_trained(tmp_path: Path) -> None:
    append_changes(tmp_path, [SettingChange(0, 11, "batch_size", 8, 12)])
    with refused("batch-size-changes-within-epoch", step=11, next_epoch=16):
        run_in(tmp_path, "lanes")
    assert [path.name for path in tmp_path.iterdir()] == ["changes.jsonl"]


def test_more_lanes_than_samples_to_come_are_refused_before_the_steps_until_then(
    tmp_path: Path,
) -> None:
    with refused("lanes-exceed-samples", value=SAMPLES + 1):
        changed_run(tmp_path, "lanes", at=5, batch_size=SAMPLES + 1)
    sf.load(tmp_path).change(batch_size=12)
    run_in(tmp_path, "lanes").train()


def test_a_length_that_was_changed_before_counts(tmp_path: Path) -> None:
    run_in(tmp_path, "lanes", stop_after="25 steps").train()
    sf.load(tmp_path).change(length="5 epochs")
    sf.load(tmp_path).change(batch_size=12)
    run = run_in(tmp_path, "lanes")
    run.train()
    assert run.state.step == 32 + 5


@pytest.mark.parametrize("name", ["lanes", "stream"])
def test_a_body_changes_the_batch_size(name: str, tmp_path: Path) -> None:
    run = run_in(tmp_path / "changed", name)
    with run:
        for step in run:
            if step.index == 4:
                run.change("batch_size", 12)
    (change,) = read_changes(tmp_path / "changed")
    assert change.from_step == (5 if name == "stream" else 8)

    given = run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"), name)
    given.train()
    assert given.state.step == run.state.step
    assert same(weights(given), weights(run))


@forks
@pytest.mark.parametrize("name", ["lanes", "buckets", "stream"])
def test_a_changed_run_that_is_killed_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"save_every": "3 steps"}
    if name == "stream":
        kept["train_data"] = sf.data.Stream(rows)
    at = 10 if name == "stream" else steps_per_epoch(name, tmp_path)
    whole = changed_run(tmp_path / "whole", name, at=at, batch_size=LARGER[name])
    whole.train()

    changed_run(tmp_path / "killed", name, at=at, batch_size=LARGER[name])
    for step in (at, at + 1, at + 4, at + 6):

        def killed(_: int, step: int = step) -> None:
            run = run_in(tmp_path / "killed", name, **kept)
            with run:
                for each in run:
                    if each.index >= step:
                        os.kill(os.getpid(), signal.SIGKILL)

        assert on_ranks(1, killed) == [-signal.SIGKILL]
    resumed = run_in(tmp_path / "killed", name, **kept)
    resumed.train()
    assert resumed.state.step == whole.state.step
    assert same(weights(resumed), weights(whole))


@pytest.mark.parametrize("name", [*ORDERS, "stream"])
def test_a_changed_run_is_verified_and_its_steps_are_replayed(name: str, tmp_path: Path) -> None:
    at = 10 if name == "stream" else 2 * steps_per_epoch(name, tmp_path)
    run_dir = tmp_path / "run"
    changed_run(run_dir, name, at=at, batch_size=LARGER[name]).train()
    records = {record["step"]: record for record in sf.load(run_dir).records("train")}
    saved = sf.load(run_in(run_dir, name))
    for step in (at - 1, at, at + 2):
        assert saved.replay(step).look.loss == records[step + 1]["loss"]

    verdict = sf.load(run_in(run_dir, name)).verify(steps="all")
    assert verdict.problems == []
    assert any(window.problems == [] for window in verdict.outcomes)


def heavy_rows() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for inputs, target in rows():
        yield inputs, target, torch.zeros(2000)


def test_a_tape_that_drops_rows_drops_none_that_a_resume_reads(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"length": "150 steps", "save_every": "2 steps"}
    small: dict[str, Any] = {
        "train_data": sf.data.Stream(heavy_rows, start="thread", tape_size="1 MB"),
        **settings,
    }
    changed = tmp_path / "changed"
    run_in(changed, "stream", stop_after="40 steps", **small).train()
    sf.load(changed).change(batch_size=4)
    for stop in (60, 90, 150):
        run = run_in(changed, "stream", stop_after=f"{stop} steps", **small)
        run.train()
    tape = run.parts.pipeline.tape
    assert tape is not None
    first = tape.first_step(4)
    assert 40 < first < 150
    assert tape.first_kept() <= 40 * 8 + (first - 40) * 4 < tape.first_kept() + 4
    assert run_in(changed, "stream", **small).parts.pipeline.first() is not None  # of step 0

    given = run_in(given_the_journal_of(changed, tmp_path / "given"), "stream", **settings)
    given.train()
    assert same(weights(given), weights(run))


class Windows(Dataset[Any]):
    """Samples of one length, so that tokens are samples."""

    lengths = 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data()
        return inputs[index], targets[index]

    def __len__(self) -> int:
        return SAMPLES


def test_tokens_of_samples_of_one_length_are_read_on_behind_those_that_were_read(
    tmp_path: Path,
) -> None:
    tokens: dict[str, Any] = {"train_data": Windows(), "batch_size": "32 tokens"}
    before = run_in(tmp_path / "unused", "", **tokens).parts.pipeline.plan
    run_in(tmp_path / "run", "", stop_after="5 steps", **tokens).train()
    sf.load(tmp_path / "run").change(batch_size="48 tokens")
    run = run_in(tmp_path / "run", "", **tokens)
    after = run.parts.pipeline.plan
    assert samples_read(before, range(5)) + samples_read(after, range(5, 15)) == samples_read(
        before, range(20)
    )
    assert run.parts.length.steps == 5 + -(-(4 * SAMPLES - 5 * 8) // 12)
    run.train()


class OwnBatches(Sampler[list[int]]):
    """A batch sampler of a user."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(first, first + 6)) for first in range(0, SAMPLES, 6)])

    def __len__(self) -> int:
        return SAMPLES // 6


def test_batches_that_a_sampler_lists_keep_their_size(tmp_path: Path) -> None:
    own: dict[str, Any] = {
        "train_data": DataLoader(Sentences(), batch_sampler=OwnBatches()),
        "batch_size": None,
    }
    run_in(tmp_path, "", stop_after="10 steps", **own).train()
    with refused("batch-size-fixed"):
        sf.load(tmp_path).change(batch_size=12)
    append_changes(tmp_path, [SettingChange(0, 10, "batch_size", 6, 12)])
    with refused("batch-size-cannot-change", value=12):
        run_in(tmp_path, "", **own)
