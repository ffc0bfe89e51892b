"""Law 19, of changes that are to come: a journal's lines hold by their steps, and a later line
supersedes what was to come of its setting.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities.changed_runs import assert_same_end, given_the_journal_of, on_two_ranks, run_in
from rank_processes import forks
from refused import refused
from surefoot.config.setting_change import SettingChange
from surefoot.tracking.change_journal import append_changes, read_changes

TO_COME = [
    SettingChange(0, 8, "batch_size", 8, 12, follows={"micro_batch_size": [8, 6]}),
    SettingChange(0, 14, "batch_size", 12, 24, follows={"micro_batch_size": [6, 6]}),
    SettingChange(0, 11, "clip", "norm 1.0", "value 0.1"),
]


RAMPS: dict[str, Any] = {
    "batch_size": "8, 16 from 40%, 20 from 2 epochs",
    "clip": "norm 1.0, off from 50%",
}
END = 15  # the last step with these batches


def test_changes_in_the_midst_of_others_end_with_the_bits_of_the_whole_journal(
    tmp_path: Path,
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    append_changes(changed, TO_COME)
    run_in(changed, stop_after="5 steps").train()
    sf.load(changed).change(**{"optimizer.lr": 1e-3, "clip": "auto 0.5"})
    run_in(changed, stop_after="10 steps").train()
    sf.load(changed).change(batch_size=20)
    run_in(changed).train()
    assert [change.from_step for change in read_changes(changed)] == [8, 14, 11, 5, 5, 10]
    assert sf.load(changed).settings_at(14)["batch_size"] == 20
    assert sf.load(changed).settings_at(11)["clip"] == "auto 0.5"

    given = given_the_journal_of(changed, tmp_path / "given")
    for step in range(2, 15):  # a resume after every step
        run_in(given, stop_after=f"{step} steps").train()
    run_in(given).train()

    assert_same_end(given, changed, step=sf.load(changed).step)
    assert sf.load(run_in(given)).verify(steps="all").problems == []


def test_a_run_with_ramps_ends_as_one_whose_settings_were_changed_at_these_steps(
    tmp_path: Path,
) -> None:
    run_in(tmp_path / "ramps", **RAMPS).train()
    steps = [
        (change.from_step, change.setting, change.now)
        for change in read_changes(tmp_path / "ramps")
    ]
    # 3 epochs of 60 samples: 40% are 72 samples, 2 epochs are 120, and half is 90
    assert steps == [(9, "batch_size", 16), (10, "clip", "off"), (12, "batch_size", 20)]

    changed = tmp_path / "changed"
    for step, setting, value in steps:
        run_in(changed, stop_after=f"{step} steps").train()
        sf.load(changed).change(**{setting: value})
    run_in(changed).train()

    assert_same_end(tmp_path / "ramps", changed, step=END)
    assert sf.load(run_in(tmp_path / "ramps", **RAMPS)).verify(steps="all").problems == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("ramps") / "whole"
    run_in(run_dir, **RAMPS).train()
    return run_dir


def test_a_run_with_ramps_that_stops_after_every_step_ends_with_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    for step in range(1, 15):
        run_in(tmp_path, stop_after=f"{step} steps", **RAMPS).train()
    run_in(tmp_path, **RAMPS).train()
    assert_same_end(tmp_path, whole, step=END)
    assert len(read_changes(tmp_path)) == 3


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_a_kill_before_the_journal_was_written_whole_loses_none_of_a_ramp(
    lines: int, whole: Path, tmp_path: Path
) -> None:
    with run_in(tmp_path, **RAMPS):
        pass  # step 0 is saved
    journal = tmp_path / "changes.jsonl"
    written = journal.read_bytes().splitlines(keepends=True)
    torn = b"" if lines == 0 else b'{"number": '
    journal.write_bytes(b"".join(written[:lines]) + torn)
    run_in(tmp_path, **RAMPS).train()
    assert_same_end(tmp_path, whole, step=END)
    assert len(read_changes(tmp_path)) == 3


def test_a_run_given_the_journal_of_a_ramp_needs_no_ramp(whole: Path, tmp_path: Path) -> None:
    for name, settings in {"plain": {}, "ramps": RAMPS}.items():
        given = given_the_journal_of(whole, tmp_path / name)
        run_in(given, **settings).train()
        assert_same_end(given, whole, step=END)


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_with_ramps_train_as_those_that_were_changed(
    parallel: str, tmp_path: Path
) -> None:
    on_two_ranks(tmp_path / "ramps", parallel=parallel, **RAMPS)
    changed = tmp_path / "changed"
    for change in read_changes(tmp_path / "ramps"):
        on_two_ranks(changed, parallel=parallel, stop_after=f"{change.from_step} steps")
        sf.load(changed).change(**{change.setting: change.now})
    on_two_ranks(changed, parallel=parallel)
    assert_same_end(tmp_path / "ramps", changed, step=END)


def test_a_change_in_the_midst_of_a_ramp_supersedes_what_is_to_come_of_its_setting(
    tmp_path: Path,
) -> None:
    run_in(tmp_path, stop_after="10 steps", **RAMPS).train()
    sf.load(tmp_path).change(**{"batch_size": 10, "optimizer.lr": 1e-3})
    run_in(tmp_path, **RAMPS).train()
    # 9 steps of 8 samples, one of 16, and 92 of 180 samples are left
    assert sf.load(tmp_path).step == 20
    assert sf.load(tmp_path).settings_at(19)["batch_size"] == 10
    assert sf.load(tmp_path).settings_at(19)["clip"] == "off"


@pytest.mark.parametrize("setting", ["optimizer.lr", "batch_size"])
def test_a_change_before_a_ramp_begins_ends_with_the_bits_of_the_whole_journal(
    setting: str, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    run_in(changed, stop_after="3 steps", **RAMPS).train()
    sf.load(changed).change(**{setting: {"optimizer.lr": 1e-3, "batch_size": 10}[setting]})
    run_in(changed, **RAMPS).train()
    sizes = [sf.load(changed).settings_at(step)["batch_size"] for step in (2, 3, 9, 12)]
    assert sizes == {"optimizer.lr": [8, 8, 16, 20], "batch_size": [8, 10, 10, 10]}[setting]

    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given).train()
    assert_same_end(given, changed, step=sf.load(changed).step)


def test_a_run_whose_ramp_is_not_written_yet_is_not_changed(whole: Path, tmp_path: Path) -> None:
    with run_in(tmp_path, **RAMPS):
        pass  # step 0 is saved
    (tmp_path / "changes.jsonl").unlink()  # as a kill before has it
    assert sf.load(tmp_path).settings_at(0)["batch_size"] == 8
    for work in (sf.load(tmp_path).change, partial(sf.load(tmp_path).go_back, 0)):
        with refused("ramp-not-written-yet", setting="batch_size"):
            work(**{"optimizer.lr": 1e-3})
    assert read_changes(tmp_path) == ()
    run_in(tmp_path, **RAMPS).train()
    assert_same_end(tmp_path, whole, step=END)


OTHERS = {
    "8, 16 from 50%": "ramp-of-begun-run",
    "8, 12 from 40%, 20 from 2 epochs": "ramp-of-begun-run",
    12: "changed-setting-differs",
    "12, 16 from 40%": "ramp-of-begun-run",
}


@pytest.mark.parametrize("batch_size", OTHERS)
def test_a_program_keeps_its_ramp(batch_size: Any, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps", **RAMPS).train()
    with refused(OTHERS[batch_size]):
        run_in(tmp_path, **RAMPS | {"batch_size": batch_size})


@pytest.mark.parametrize("batch_size", [8, 20, "8,  16 from 40%,20 from 2 epochs"])
def test_or_it_has_the_first_or_the_last_value(
    batch_size: Any, whole: Path, tmp_path: Path
) -> None:
    run_in(tmp_path, stop_after="3 steps", **RAMPS).train()
    run_in(tmp_path, **RAMPS | {"batch_size": batch_size}).train()
    assert_same_end(tmp_path, whole, step=END)


def test_a_run_that_began_without_a_ramp_has_none_later(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps").train()
    with refused("ramp-of-begun-run", setting="batch_size", step=3):
        run_in(tmp_path, batch_size="8, 16 from 50%")
    assert read_changes(tmp_path) == ()


LENGTHS = [
    # in steps: percentages are of the steps, epochs of the samples
    ("100 steps", "8, 16 from 25%, 24 from 50%", [25, 50]),
    ("100 steps", "8, 20 from 2 epochs, 40 from 5 epochs", [15, 24]),
    # in epochs: both are of the samples. 10 epochs are 600
    ("10 epochs", "8, 16 from 20%, 60 from 50%", [15, 15 + 11]),
    ("10 epochs", "12, 30 from 1 epochs, 60 from 90%", [5, 5 + 16]),
    ("10 epochs", "8, 16 from 4 steps, 24 from 6 steps", [4, 6]),
]


@pytest.mark.parametrize(("length", "batch_size", "steps"), LENGTHS)
def test_the_steps_of_a_ramp_are_counted_in_samples(
    length: str, batch_size: str, steps: list[int], tmp_path: Path
) -> None:
    parts = run_in(tmp_path, length=length, batch_size=batch_size).parts
    assert [change.from_step for change in parts.first_changes] == steps
    assert parts.plan.timeline.until == steps[0]
    assert not (tmp_path / "changes.jsonl").exists()


def test_other_ramps_count_the_samples_of_the_batch_sizes_before(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"length": "10 epochs", "batch_size": "8, 60 from 20%"}
    for when, step in {"1 epochs": 8, "20%": 15, "50%": 18, "9 epochs": 22}.items():
        parts = run_in(tmp_path, clip=f"off, norm 1.0 from {when}", **settings).parts
        assert [each.from_step for each in parts.first_changes if each.setting == "clip"] == [step]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": "8 from 20%"}, "ramp-not-understood"),
    ({"batch_size": "8, 16"}, "setting-out-of-range"),
    ({"batch_size": "8, 16 from 20%, 32"}, "ramp-not-understood"),
    ({"batch_size": "8, many from 20%"}, "setting-out-of-range"),
    ({"batch_size": "8, 16 from 20"}, "duration-without-unit"),
    ({"batch_size": "8, 16 from soon"}, "duration-not-understood"),
    ({"batch_size": "8, 16 from 5 min"}, "duration-not-understood"),
    ({"batch_size": "8, 16 from 0 steps"}, "ramp-step-out-of-order"),
    ({"batch_size": "8, 16 from 50%, 20 from 20%"}, "ramp-step-out-of-order"),
    ({"batch_size": "8, 16 from 100%"}, "ramp-step-out-of-order"),
    ({"batch_size": "8, 16 from 3 epochs"}, "ramp-step-out-of-order"),
    ({"batch_size": "8, 8 from 20%"}, "ramp-repeats-value"),
    ({"batch_size": "8, 64 tokens from 20%"}, "ramp-in-tokens"),
    ({"batch_size": "8, 16 from 20%", "order": "lanes"}, "ramp-of-whole-epochs"),
    ({"clip": "norm 1.0, loose from 20%"}, "clip-not-a-limit"),
    ({"clip": "norm 1.0, off from 99 steps"}, "ramp-step-out-of-order"),
    ({"clip": "off, off from 50%"}, "ramp-repeats-value"),
]


@pytest.mark.parametrize(("settings", "code"), BAD)
def test_what_is_no_ramp_is_refused_and_nothing_written(
    settings: dict[str, Any], code: str, tmp_path: Path
) -> None:
    with refused(code):
        run_in(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_ramp_needs_a_directory() -> None:
    with refused("ramp-without-directory", setting="clip"):
        run_in(None, clip="norm 1.0, off from 50%").train()


def test_a_change_is_to_one_value(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps").train()
    with refused("ramp-begins-with-run", setting="clip"):
        sf.load(tmp_path).change(clip="norm 0.5, off from 50%")
    assert read_changes(tmp_path) == ()
