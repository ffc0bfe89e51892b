"""Law 19: a run goes on with more data, from the next epoch or at once."""

from __future__ import annotations

import os
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from identities import changed_runs
from identities.changed_runs import (
    assert_same_end,
    given_the_journal_of,
    loss,
    same,
    samples_read,
    weights,
)
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.config.data_change import data_changes
from surefoot.config.setting_change import SettingChange
from surefoot.run.run import Run
from surefoot.tracking.change_journal import append_changes, read_changes
from surefoot.tracking.numbered import built_again

FEW = 60
MANY = 90
AT = 10  # after 80 samples: 20 of the second epoch
BEGINS = {"at once": 10, "next epoch": 15}


def data(samples: int) -> tuple[Tensor, Tensor]:
    return changed_runs.data(samples, seed=samples)


def run_in(run_dir: Path, samples: int = FEW, **settings: Any) -> Run:
    of_data: dict[str, Any] = {"train_data": data(samples), "length": "5 epochs"}
    return changed_runs.run_in(run_dir, **(of_data | settings))


def changed_run(run_dir: Path, when: str, **settings: Any) -> Run:
    """Return a run whose data have changed, and that stands where the new ones begin."""
    run_in(run_dir, stop_after=f"{AT} steps", **settings).train()
    sf.load(run_dir).change("a test", data=when)
    if BEGINS[when] > AT:
        stop_at_new_data(run_dir, **settings)
    return run_in(run_dir, MANY, **settings)


def stop_at_new_data(run_dir: Path, **settings: Any) -> None:
    """Train with the data of before until others begin."""
    with refused("data-of-earlier-steps", sf.CheckpointError):
        run_in(run_dir, **settings).train()


@pytest.mark.parametrize("when", BEGINS)
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_a_run_given_its_journal_from_the_start_ends_with_the_same_bits(
    order: str, when: str, tmp_path: Path
) -> None:
    changed = changed_run(tmp_path / "changed", when, order=order)
    changed.train()

    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    stop_at_new_data(given, order=order)
    assert sf.load(given).step == BEGINS[when]
    run = run_in(given, MANY, order=order)
    run.train()

    assert run.state.step == changed.state.step > 40
    assert same(weights(run), weights(changed))
    assert sf.load(run_in(given, MANY, order=order)).verify(steps="all").problems == []


@pytest.mark.parametrize("when", BEGINS)
@pytest.mark.parametrize("more", [1, 3, 12])
def test_a_changed_run_resumes_to_the_same_bits(more: int, when: str, tmp_path: Path) -> None:
    whole = changed_run(tmp_path / "whole", when)
    whole.train()
    changed_run(tmp_path / "stopped", when)
    run_in(tmp_path / "stopped", MANY, stop_after=f"{BEGINS[when] + more} steps").train()
    resumed = run_in(tmp_path / "stopped", MANY)
    resumed.train()
    assert same(weights(resumed), weights(whole))


@forks
@pytest.mark.parametrize("when", BEGINS)
def test_a_changed_run_that_is_killed_resumes_to_the_same_bits(when: str, tmp_path: Path) -> None:
    often: dict[str, Any] = {"save_every": "4 steps"}
    whole = changed_run(tmp_path / "whole", when)
    whole.train()
    changed_run(tmp_path / "killed", when)
    for more in (1, 3, 6):  # before the first checkpoint with the new data, and after it

        def killed(_: int, last: int = BEGINS[when] + more) -> None:
            run = run_in(tmp_path / "killed", MANY, **often)
            with run:
                for step in run:
                    if step.index == last:
                        os.kill(os.getpid(), signal.SIGKILL)

        assert on_ranks(1, killed) == [-signal.SIGKILL]
    resumed = run_in(tmp_path / "killed", MANY)
    resumed.train()
    assert same(weights(resumed), weights(whole))


@forks
def test_two_ranks_that_are_given_the_journal_train_as_those_that_were_changed(
    tmp_path: Path,
) -> None:
    of_ranks: dict[str, Any] = {"micro_batch_size": 4}
    changed = tmp_path / "changed"
    assert train_on_two_ranks(changed, FEW, stop_after=f"{AT} steps", **of_ranks) == [0, 0]
    sf.load(changed).change("a test", data="at once")
    assert train_on_two_ranks(changed, MANY, **of_ranks) == [0, 0]
    given = given_the_journal_of(changed, tmp_path / "given")
    assert 0 not in train_on_two_ranks(given, FEW, **of_ranks)
    assert train_on_two_ranks(given, MANY, **of_ranks) == [0, 0]

    assert_same_end(given, changed, step=sf.load(changed).step)


def train_on_two_ranks(run_dir: Path, samples: int, **settings: Any) -> list[int]:
    return on_ranks(2, lambda _: run_in(run_dir, samples, **settings).train())


@pytest.mark.parametrize(("when", "epoch"), [("at once", 2), ("next epoch", 2)])
@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_the_new_data_begin_with_an_epoch_and_each_of_their_epochs_has_every_sample_once(
    order: str, when: str, epoch: int, tmp_path: Path
) -> None:
    begin = BEGINS[when]
    before = run_in(tmp_path / "before", order=order).parts.pipeline.plan
    run = changed_run(tmp_path / "run", when, order=order)
    plan = run.parts.pipeline.plan
    steps = run.parts.length.steps

    assert steps == -(-(begin * 8 + 3 * MANY) // 8)
    seen = samples_read(plan, range(begin, steps))
    for number in range(epoch, 5):
        assert sorted(id_ for each, id_ in seen if each == number) == list(range(MANY))
    # the order of an epoch is that of a run that always had these data
    always = run_in(tmp_path / "always", MANY, order=order).parts.pipeline.plan
    expected = samples_read(always, range(60))[epoch * MANY :]
    assert seen[: 3 * MANY] == expected[: 3 * MANY]
    if when == "next epoch":
        read_before = samples_read(before, range(begin))
        for number in range(epoch):
            assert sorted(id_ for each, id_ in read_before if each == number) == list(range(FEW))


def test_an_epoch_that_ends_in_a_step_ends_before_the_new_data_begin(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    sf.load(tmp_path).change("a test", data="next epoch")
    (change,) = read_changes(tmp_path)
    assert change.from_step == 8  # 64 samples: 4 of another pass
    assert change.was["plan"]["samples"] == FEW
    stop_at_new_data(tmp_path)
    run = run_in(tmp_path, MANY)
    assert run.parts.length.epochs == pytest.approx(5, abs=8 / MANY)
    assert {epoch for epoch, _ in samples_read(run.parts.pipeline.plan, range(8, 9))} == {1}
    run.train()
    assert [record["epoch"] for record in sf.load(tmp_path).records("epoch")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("when", BEGINS)
@pytest.mark.parametrize("samples", [30, 61, 90, 500])
def test_epochs_are_counted_over_a_change_of_the_data(
    samples: int, when: str, tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change("a test", data=when)
    if BEGINS[when] > AT:
        stop_at_new_data(tmp_path)
    run = run_in(tmp_path, samples)
    length = run.parts.length
    every = run.parts.plan.times.epoch
    assert length.steps == BEGINS[when] + -(-3 * samples // 8)
    assert every.count(0, length.steps) == 5
    ends = [step for step in range(BEGINS[when], length.steps + 1) if every.due(step)]
    if when == "at once":
        ends = ends[-3:]
    expected = [BEGINS[when] + -(-Fraction(samples * number, 8) // 1) for number in (1, 2, 3)]
    assert ends[-3:] == expected
    run.train()
    epochs = {record["epoch"]: record for record in sf.load(tmp_path).records("epoch")}
    assert epochs.keys() == ({1, 3, 4, 5} if when == "at once" else {1, 2, 3, 4, 5})
    losses = {record["step"]: record["loss"] for record in sf.load(tmp_path).records("train")}
    steps = range(BEGINS[when] + 1, int(expected[0]) + 1)
    mean = sum(losses[step] for step in steps) / len(steps)
    assert epochs[3]["loss"] == pytest.approx(mean)


def test_the_first_epoch_is_broken_off_without_a_record(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    sf.load(tmp_path).change("a test", data="at once")
    run = run_in(tmp_path, MANY)
    run.train()
    losses = {record["step"]: record["loss"] for record in sf.load(tmp_path).records("train")}
    epochs = {record["epoch"]: record for record in sf.load(tmp_path).records("epoch")}
    assert list(epochs) == [2, 3, 4, 5]
    first = epochs[2]
    assert first["step"] == 5 + -(-MANY // 8)
    steps = range(6, first["step"] + 1)
    assert first["loss"] == pytest.approx(sum(losses[step] for step in steps) / len(steps))


def test_a_length_in_steps_stays(tmp_path: Path) -> None:
    run = changed_run(tmp_path, "at once", length="25 steps")
    assert run.parts.length.steps == 25
    run.train()
    assert run.state.step == 25


def test_a_cosine_goes_on_without_a_jump_to_the_end_of_the_longer_run(tmp_path: Path) -> None:
    run = changed_run(tmp_path, "at once")
    factors = run.parts.task.factors
    before = run_in(tmp_path / "before").parts.task.factors
    assert factors(AT) == before(AT)
    assert factors(run.parts.length.steps) == 0.0
    assert all(factors(step) < factors(step - 1) for step in range(AT + 1, 43))


def test_steps_after_the_change_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    plain_settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "optimizer": sf.optim.sgd(lr=0.1),
        "clip": "off",
        "ema": None,
    }
    run_in(tmp_path, stop_after=f"{AT} steps", **plain_settings).train()
    plain = sf.load(tmp_path).load_model(nn.Linear(4, 1))
    assert isinstance(plain, nn.Linear)
    sf.load(tmp_path).change("a test", data="at once")
    run = run_in(tmp_path, MANY, **plain_settings)
    factors = run.parts.task.factors
    always = run_in(tmp_path / "always", MANY, **plain_settings).parts.pipeline.plan
    expected = [id_ for _, id_ in samples_read(always, range(60))][2 * MANY :]
    run.train()

    plain.train()
    inputs, targets = data(MANY)
    optimizer = torch.optim.SGD(plain.parameters())
    for step in range(AT, run.parts.length.steps):
        ids = torch.tensor(expected[8 * (step - AT) : 8 * (step - AT + 1)])
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * factors(step)
        optimizer.zero_grad()
        loss(plain, [inputs[ids], targets[ids]]).backward()
        optimizer.step()
    for mine, theirs in zip(run.state.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_change_of_another_setting_and_of_the_data_again(tmp_path: Path) -> None:
    run_in(tmp_path / "changed", stop_after=f"{AT} steps").train()
    sf.load(tmp_path / "changed").change("more", data="at once", batch_size=12)
    run_in(tmp_path / "changed", MANY, stop_after="14 steps").train()
    sf.load(tmp_path / "changed").change("smaller", batch_size=6)
    run_in(tmp_path / "changed", MANY, stop_after="16 steps").train()
    sf.load(tmp_path / "changed").change("still more", data="at once")
    changed = run_in(tmp_path / "changed", 120)
    changed.train()
    # two epochs of 60, one of 90 that was broken off, and two of 120
    assert changed.parts.length.steps == 16 + 2 * 120 // 6
    seen = samples_read(changed.parts.pipeline.plan, range(16, 56))
    assert sorted(seen) == [(epoch, id_) for epoch in (3, 4) for id_ in range(120)]

    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    with refused("data-of-later-steps", sf.CheckpointError, step=16):
        run_in(given).train()  # those of the second stretch are asked for
    with refused("data-of-earlier-steps", sf.CheckpointError, step=16):
        run_in(given, MANY).train()
    run = run_in(given, 120)
    run.train()
    assert same(weights(run), weights(changed))


def test_the_data_before_and_after_a_change_are_those_that_its_steps_had(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change("a test", data="next epoch")
    with refused("data-of-later-steps", sf.CheckpointError, step=15):
        run_in(tmp_path, MANY)
    stop_at_new_data(tmp_path)
    run_in(tmp_path, MANY, stop_after="18 steps").train()
    for samples in (FEW, 120):
        with pytest.raises(sf.CheckpointError) as refusal:
            run_in(tmp_path, samples).train()
        assert refusal.value.code in ("data-of-earlier-steps", "data-changed")


def test_steps_before_the_change_are_repeated_with_the_data_that_they_had(tmp_path: Path) -> None:
    run = changed_run(tmp_path, "at once")
    run.train()
    records = {record["step"]: record for record in sf.load(tmp_path).records("train")}
    saved = sf.load(run_in(tmp_path, MANY))
    assert saved.replay(AT + 2).look.loss == records[AT + 3]["loss"]
    with built_again(tmp_path, step=AT - 2):
        with refused("data-of-later-steps", sf.CheckpointError, step=AT):
            run_in(tmp_path, MANY)
        saved = sf.load(run_in(tmp_path))
    assert saved.replay(AT - 2).look.loss == records[AT - 1]["loss"]


def test_a_change_of_data_that_were_not_read_yet_is_taken_back(tmp_path: Path) -> None:
    whole = run_in(tmp_path / "whole")
    whole.train()
    run = tmp_path / "run"
    run_in(run, stop_after=f"{AT} steps").train()
    sf.load(run).change("a test", data="next epoch")
    sf.load(run).change("a mistake", data="unchanged")
    resumed = run_in(run)
    resumed.train()
    assert [change.from_step for change in read_changes(run)] == [15, AT]
    assert same(weights(resumed), weights(whole))


def test_a_body_lets_other_data_begin_with_the_next_epoch(tmp_path: Path) -> None:
    changed = changed_run(tmp_path / "changed", "next epoch")
    changed.train()
    with refused("data-of-earlier-steps", sf.CheckpointError, step=15):
        trained_with_a_wish(run_in(tmp_path / "run"))
    assert sf.load(tmp_path / "run").step == 15
    run = run_in(tmp_path / "run", MANY)
    trained_with_a_wish(run)
    assert len(read_changes(tmp_path / "run")) == 1
    assert same(weights(run), weights(changed))


def trained_with_a_wish(run: Run) -> None:
    with run:
        for step in run:
            if step.index in (AT - 1, AT + 10):
                run.change("data", "next epoch", because="more data")


def test_a_run_that_goes_back_over_a_change_has_the_data_of_before(tmp_path: Path) -> None:
    whole = run_in(tmp_path / "whole")
    whole.train()
    run = tmp_path / "run"
    changed_run(run, "at once").train()
    sf.load(run).go_back(8, "too early")
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(run, MANY).train()
    assert refusal.value.code == "data-changed"
    resumed = run_in(run)
    resumed.train()
    assert same(weights(resumed), weights(whole))


def test_data_that_no_checkpoint_has_do_not_change_again(tmp_path: Path) -> None:
    changed_run(tmp_path, "at once").train()  # its checkpoints are those of steps 10 and 44
    with refused("data-not-saved-yet", step=20):
        sf.load(tmp_path).go_back(20, "again", data="at once")
    assert len(read_changes(tmp_path)) == 1


def test_the_end_of_the_epoch_moves_with_another_batch_size(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change("more", data="next epoch")
    sf.load(tmp_path).change("ramp", batch_size=20)
    assert list(data_changes(read_changes(tmp_path))) == [12]  # 80 + 2 * 20
    follows = {"micro_batch_size": [5, 4]}
    append_changes(tmp_path, [SettingChange(0, 11, "batch_size", 20, 4, follows)])
    sf.load(tmp_path).change("a reason", data="next epoch")
    assert list(data_changes(read_changes(tmp_path))) == [16]  # 80 + 20 + 5 * 4
    stop_at_new_data(tmp_path)
    plan = run_in(tmp_path, MANY).parts.pipeline.plan
    seen = samples_read(plan, range(16, 39))
    assert sorted(id_ for epoch, id_ in seen if epoch == 2) == list(range(MANY))


def test_the_end_of_the_epoch_is_that_of_the_samples_that_were_read(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change(batch_size=16)
    sf.load(tmp_path).change(batch_size=20)  # instead, from the same step on
    sf.load(tmp_path).change(data="next epoch")
    assert list(data_changes(read_changes(tmp_path))) == [12]  # 80 + 2 * 20


def test_the_same_wish_again_changes_nothing(tmp_path: Path) -> None:
    changed_run(tmp_path, "at once")
    run_in(tmp_path, MANY, stop_after="12 steps").train()
    sf.load(tmp_path).change("a test", data="at once")
    assert len(read_changes(tmp_path)) == 1
    sf.load(tmp_path).change("another reason", data="at once")
    assert len(read_changes(tmp_path)) == 2


@pytest.mark.parametrize(
    ("value", "code", "settings"),
    [
        ("tomorrow", "data-change-unknown", {}),
        (3, "data-change-unknown", {}),
        ("at once", "data-cannot-change", {"order": "lanes"}),
        ("at once", "data-cannot-change", {"order": sf.data.Weighted([1.0] * FEW, 90)}),
        ("next epoch", "no-epoch-for-other-data", {"length": "2 epochs"}),
        ("at once", "no-epoch-for-other-data", {"length": "2 epochs"}),
        ("next epoch", "no-epoch-for-other-data", {"length": "12 steps"}),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    value: Any, code: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps", **settings).train()
    with refused(code):
        sf.load(tmp_path).change("a test", data=value)
    assert read_changes(tmp_path) == ()


class Rows:
    """A data set of which only the type and the size are known without reading it."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.samples:
            raise IndexError(index)
        inputs = torch.full((4,), index / self.samples)
        return inputs, inputs[:1]


@pytest.mark.parametrize("kind", [data, Rows])
def test_other_data_at_a_resume_name_the_line_to_type(kind: Any, tmp_path: Path) -> None:
    run_in(tmp_path, train_data=kind(FEW), stop_after=f"{AT} steps").train()
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(tmp_path, train_data=kind(MANY)).train()
    assert f"surefoot change {tmp_path} data='at once'" in str(refusal.value)
    sf.load(tmp_path).change("more data", data="at once")
    run = run_in(tmp_path, train_data=kind(MANY))
    run.train()
    assert run.state.step == 44


def test_another_setting_changes_at_the_same_step(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change("a test", data="at once")
    sf.load(tmp_path).change("a test", **{"optimizer.lr": 1e-3})
    run = run_in(tmp_path, MANY)
    assert run.parts.length.steps == AT + -(-3 * MANY // 8)
    assert {epoch for epoch, _ in samples_read(run.parts.pipeline.plan, range(AT, AT + 1))} == {2}
    assert run.parts.settings.optimizer.lr == 1e-3


def test_another_class_of_data_is_no_change_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path, stop_after=f"{AT} steps").train()
    sf.load(tmp_path).change("a test", data="at once")
    run_in(tmp_path, train_data=Rows(MANY), console=True, stop_after="12 steps").train()
    notes = [line for line in capsys.readouterr().out.splitlines() if "note:" in line]
    assert [line for line in notes if "Rows" in line] == []
    run_in(tmp_path, train_data=Rows(MANY)).train()


def test_a_finished_run_takes_more_data_with_a_longer_length(tmp_path: Path) -> None:
    run_in(tmp_path, length="2 epochs").train()
    with refused("no-epoch-for-other-data"):
        sf.load(tmp_path).change("a test", data="at once")
    sf.load(tmp_path).change("a test", data="at once", length="4 epochs")
    run = run_in(tmp_path, MANY, length="2 epochs")
    run.train()
    assert run.state.step == 15 + -(-2 * MANY // 8)


def test_the_data_of_before_are_refused_with_the_step_from_which_it_has_others(
    tmp_path: Path,
) -> None:
    changed_run(tmp_path, "at once").train()
    with pytest.raises(sf.CheckpointError) as refusal:
        run_in(tmp_path).train()
    assert refusal.value.code == "data-changed"
    assert all(line.startswith("data.") for line in refusal.value.fields["changes"])
    assert any(f"since step {AT}" in str(remedy) for remedy in refusal.value.remedies)
