"""Whether a run may go on with another length: where the rates of steps that are made would be
others, it says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import surefoot as sf
from refused import refused
from surefoot.config.accepted_changes import ANOTHER_RUN, FROM_ITS_WEIGHTS
from surefoot.config.durations import Length
from surefoot.errors import CheckpointError
from surefoot.train.run_identity import (
    differences,
    refuse_another_length,
    refuse_differences,
    refuse_other_data,
)

JOINED = sf.schedules.join(sf.schedules.constant(), sf.schedules.linear(), at=12)
COOLING = sf.schedules.wsd(cooldown="5 steps")


def resume(before: int, now: int, *, steps_done: int, schedule: Any) -> None:
    length = Length(steps=now, samples_per_epoch=8, batch_size=1)
    saved = {"length": f"{before} steps"}
    refuse_another_length(saved, {}, length, schedule=schedule, step=steps_done, where="runs/a")


@pytest.mark.parametrize(
    ("before", "now", "steps_done", "schedule"),
    [
        (20, 20, 20, sf.schedules.linear()),
        (20, 40, 20, sf.schedules.constant()),
        (20, 40, 15, COOLING),
        (40, 20, 15, COOLING),
        (20, 40, 12, JOINED),
        (20, 40, 0, sf.schedules.linear()),
    ],
)
def test_a_length_that_changes_no_rate_of_a_step_that_is_made_is_taken(
    before: int, now: int, steps_done: int, schedule: object
) -> None:
    resume(before, now, steps_done=steps_done, schedule=schedule)


@dataclass(frozen=True)
class Refusal:
    """A run that is resumed with another length, and why it is refused."""

    before: int
    now: int
    steps_done: int
    schedule: Any
    why: str


IN_COOLDOWN = "its cooldown begins at step 16 of a run of 20 steps, and 17 steps are completed"
REFUSALS = {
    "shorter than what is done": Refusal(
        20,
        10,
        steps_done=11,
        schedule=sf.schedules.constant(),
        why="11 steps are already completed",
    ),
    "longer within a cooldown": Refusal(20, 40, steps_done=17, schedule=COOLING, why=IN_COOLDOWN),
    "shorter into a cooldown": Refusal(40, 20, steps_done=17, schedule=COOLING, why=IN_COOLDOWN),
    "no room for two schedules": Refusal(
        20,
        10,
        steps_done=4,
        schedule=JOINED,
        why="at = 12 steps: two joined schedules in a run of 10 steps need at least one step each",
    ),
    "other rates": Refusal(
        20,
        40,
        steps_done=5,
        schedule=sf.schedules.linear(),
        why="with another length, its learning rates differ from step 1 on,"
        " and 5 steps are completed",
    ),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_another_length_is_refused_with_the_reason_in_the_second_line(case: Refusal) -> None:
    with refused("length-changed", CheckpointError) as error:
        resume(case.before, case.now, steps_done=case.steps_done, schedule=case.schedule)

    first, second, *_ = str(error.value).splitlines()
    assert first == f"cannot resume runs/a: length was {case.before} steps, now {case.now} steps"
    assert second == f"  {case.why}"
    assert error.value.remedies == (ANOTHER_RUN, FROM_ITS_WEIGHTS)


ADAM = {"name": "adam", "lr": 0.003, "eps": 1e-8}
SAVED: dict[str, Any] = {
    "seed": 0,
    "length": "80 steps",
    "batch_size": 32,
    "micro_batch_size": 32,
    "optimizer": ADAM,
    "clip": "off",
    "ema": None,
    "data": {"plan": {"samples": 640}, "samples": 640},
}
SIZES = {"batch_size": 64, "micro_batch_size": 64}


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        (SIZES, ["batch_size", "length"]),
        ({"micro_batch_size": 16}, ["micro_batch_size", "length"]),
        (
            {"data": {"plan": {"samples": 320}, "samples": 320}, "optimizer": ADAM | {"lr": 0.1}},
            ["data.samples", "optimizer.lr", "length"],
        ),
        (
            {**SIZES, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "seed": 3},
            ["seed", "batch_size", "optimizer.name", "optimizer.lr", "length"],
        ),
    ],
)
def test_what_was_changed_is_named_where_it_makes_another_length(
    changed: dict[str, Any], names: list[str]
) -> None:
    now = SAVED | changed | {"length": "40 steps"}
    length = Length(steps=40, samples_per_epoch=512, batch_size=64)
    with refused("settings-changed", CheckpointError) as refusal:
        refuse_another_length(
            SAVED, now, length, schedule=sf.schedules.linear(), step=80, where="runs/a"
        )

    assert [change.split()[0] for change in refusal.value.fields["changes"]] == names
    for name in names:
        assert f"{name} was " in str(refusal.value)


def test_changes_beyond_five_are_counted() -> None:
    now = SAVED | {"clip": "norm 1", "ema": 0.9, "seed": 1, "length": "1 steps", "data": None}
    with refused("settings-changed", CheckpointError) as refusal:
        refuse_differences(SAVED | {"batch_size": 1}, now, where="runs/a")

    message = str(refusal.value)
    changes = refusal.value.fields["changes"]
    assert len([change for change in changes if change in message]) == 5
    assert f"and {len(changes) - 5} more" in message


@pytest.mark.parametrize(("count", "shown"), [(2, 2), (4, 4), (5, 5), (6, 5)])
def test_each_of_five_changes_is_named_and_nothing_is_counted(count: int, shown: int) -> None:
    saved = {f"setting{number}": 0 for number in range(count)}
    with refused("settings-changed", CheckpointError) as refusal:
        refuse_differences(saved, dict.fromkeys(saved, 1), where="runs/a")

    changes = refusal.value.fields["changes"]
    assert len(changes) == count
    further = (refusal.value.reason or "").splitlines()
    named = [line.removeprefix("also ") for line in further[: shown - 1]]
    counted = further[shown - 1 :]
    assert named == changes[1:shown]
    assert len(counted) == (count > shown)


def test_other_data_are_named_with_every_other_change() -> None:
    now = SAVED | {"data": {"sha256": "b"}, "optimizer": ADAM | {"lr": 0.1}, "seed": 1}
    with refused("data-changed", CheckpointError) as refusal:
        refuse_other_data(SAVED | {"data": {"sha256": "a"}}, now, where="runs/a", step=1)

    changed = [change.split()[0] for change in refusal.value.fields["changes"]]
    assert changed == ["data.sha256", "seed", "optimizer.lr"]


@pytest.mark.parametrize(("step", "may_be_removed"), [(0, True), (1, False)])
def test_other_data_say_what_to_remove_where_no_step_was_trained(
    step: int, may_be_removed: bool
) -> None:
    identity = {"length": "8 steps", "seed": 0, "identity": None}
    saved = {"data": {"sha256": "a", "samples": 8}} | identity
    now = {"data": {"sha256": "b", "samples": 7}} | identity
    with pytest.raises(CheckpointError) as caught:
        refuse_other_data(saved, now, where="runs/a", step=step)

    removing = [text for text in caught.value.remedies if isinstance(text, str)]
    assert len(removing) == may_be_removed


@pytest.mark.parametrize(
    ("saved", "now", "count"),
    [
        ({}, {"exact_sums": False}, 0),
        ({}, {"exact_sums": True}, 1),
        ({"optimizer": {"name": "own"}}, {"optimizer": {"name": "own", "eps": 1.0}}, 1),
        (
            {"optimizer": {"name": "own"}},
            {"optimizer": {"name": "own", "attributes": {"eps": 1.0}}},
            0,
        ),
        ({"data": {"type": "Dataset"}}, {"data": {"type": "Dataset", "sha256": "ab"}}, 0),
        ({"data": {"type": "Rows"}}, {"data": {"type": "Rows", "sha256": "ab"}}, 1),
    ],
)
def test_what_0_1_0_had_without_recording_it_is_no_difference(
    saved: dict[str, Any], now: dict[str, Any], count: int
) -> None:
    assert len(differences(saved, now)) == count


def with_splits(run_dir: Path, **splits: tuple[Tensor, Tensor]) -> sf.Run:
    x = torch.arange(16.0).reshape(8, 2)
    return sf.Run(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_data=(x, x.sum(1, keepdim=True)),
        splits={name: sf.Split(data) for name, data in splits.items()},
        optimizer=sf.optim.sgd(lr=1e-4),
        batch_size=4,
        length="2 steps",
        stop_after="1 step",
        run_dir=run_dir,
        device="cpu",
        console=False,
    )


def test_a_resume_notes_the_splits_whose_data_are_others_and_no_further_ones(
    tmp_path: Path,
) -> None:
    x = torch.ones(4, 2)
    same = (x, x.sum(1, keepdim=True))
    other = (2 * x, x.sum(1, keepdim=True))
    with_splits(tmp_path / "run", first=same, second=same).train()
    run = with_splits(tmp_path / "run", first=same, second=other, third=other)
    with run:
        contents = sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_intact()
        assert contents is not None
        (note,) = run.parts.notes(contents[0])

    assert "second" in note
