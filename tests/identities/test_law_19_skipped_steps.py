"""Law 19, of steps that the journal skips: the index, the schedule and the order of samples go on,
and nothing else does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from identities.changed_runs import (
    assert_same_end,
    data,
    given_the_journal_of,
    loss,
    model,
    on_two_ranks,
    run_in,
    tensors_of,
)
from rank_processes import forks
from refused import refused
from same_bits import changed_names
from surefoot.tracking.change_journal import read_changes

SKIPPED = range(8, 13)  # indexes from 0; 9..13 in records
VALIDATION: dict[str, Any] = {
    "splits": {"val": sf.Split(data())},
    "evaluate_every": "3 steps",
    "save_every": "4 steps",
    "keep_last": 100,
}


def skipping(run_dir: Path, value: str = "9..13", *, at: int = 5, **settings: Any) -> Path:
    """Train a run up to a step and let it skip later ones."""
    run_in(run_dir, stop_after=f"{at} steps", **settings).train()
    sf.load(run_dir).change("bad data", skip_steps=value)
    return run_dir


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = skipping(tmp_path_factory.mktemp("skipped") / "run", **VALIDATION)
    run_in(run_dir, **VALIDATION).train()
    return run_dir


@pytest.mark.parametrize("data_settings", [{}, {"micro_batch_size": 2}, {"order": "lanes"}])
def test_a_run_that_skips_steps_is_a_plain_loop_that_continues(
    data_settings: dict[str, Any], tmp_path: Path
) -> None:
    plain = nn.Linear(4, 1)
    settings: dict[str, Any] = {"model": lambda: nn.Linear(4, 1), "ema": None, "clip": "off"}
    settings |= {"length": "23 steps", **data_settings}
    run = run_in(None, **settings)
    plan = run.parts.pipeline.plan
    factors = run.parts.task.factors
    skipping(tmp_path, at=1, **settings)
    plain.load_state_dict(first_weights(tmp_path))
    run_in(tmp_path, **settings).train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [plain.weight], "weight_decay": 0.1},
            {"params": [plain.bias], "weight_decay": 0.0},
        ]
    )
    inputs, targets = data()
    for step in range(23):
        if step in SKIPPED:
            continue
        ids = torch.cat([torch.from_numpy(ids) for ids, _ in plan.micro_batches(step)])
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factors(step)
        optimizer.zero_grad()
        loss(plain, [inputs[ids], targets[ids]]).backward()
        optimizer.step()
    trained = sf.load(tmp_path).load_model(nn.Linear(4, 1))
    torch.testing.assert_close(trained.weight, plain.weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(trained.bias, plain.bias, rtol=1e-5, atol=1e-7)


def first_weights(run_dir: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "checkpoints" / "step-00000000" / "model.safetensors")


def test_nothing_but_the_index_changes_in_skipped_steps(skipped: Path) -> None:
    saved = sf.load(skipped)
    assert {8, 12, 13} <= set(saved.checkpoints)
    of_step = {step: tensors_of(skipped, step) for step in (8, 12, 13)}
    for step in (12, 13):
        changed = changed_names(of_step[step], of_step[8])
        assert [name for name in changed if not name.startswith("state/")] == []


def test_records_say_which_steps_were_skipped_and_evaluations_keep_their_steps(
    skipped: Path,
) -> None:
    saved = sf.load(skipped)
    assert [record["step"] for record in saved.records("train")] == [
        *range(1, 9),
        *range(14, 24),
    ]
    marks = saved.records("skipped_range")
    assert [(mark["step"], mark["first"], mark["last"]) for mark in marks] == [(9, 9, 13)]
    scores = {record["step"]: record["val/loss"] for record in saved.records("eval")}
    assert list(scores) == [3, 6, 9, 12, 15, 18, 21, 23]
    assert scores[9] == scores[12]


def test_a_run_that_stops_after_every_step_skips_the_same_ones(
    skipped: Path, tmp_path: Path
) -> None:
    skipping(tmp_path, **VALIDATION)
    for step in range(6, 16):
        run_in(tmp_path, stop_after=f"{step} steps", **VALIDATION).train()
    run_in(tmp_path, **VALIDATION).train()
    assert_same_end(tmp_path, skipped)
    assert len(sf.load(tmp_path).records("skipped_range")) == 1


@pytest.mark.parametrize("log_every", ["1 steps", "3 steps", "10 steps", "auto"])
def test_a_run_given_the_journal_skips_whatever_it_records(
    log_every: str, skipped: Path, tmp_path: Path
) -> None:
    given = given_the_journal_of(skipped, tmp_path / "given")
    settings = VALIDATION | {"log_every": log_every}
    run_in(given, **settings).train()
    assert_same_end(given, skipped)
    verdict = sf.load(run_in(given, **settings)).verify(steps="all")
    assert verdict.problems == []
    steps = [record["step"] for record in sf.load(given).records("train")]
    assert [step for step in steps if step in range(9, 14)] == []


def test_a_body_runs_in_no_skipped_step(skipped: Path, tmp_path: Path) -> None:
    for name in ("updated", "own"):
        given_the_journal_of(skipped, tmp_path / name)
    expected = [step for step in range(23) if step not in SKIPPED]
    with run_in(tmp_path / "updated", **VALIDATION) as run:
        assert [step.index for step in run] == expected
    indexes = []
    with run_in(tmp_path / "own", **VALIDATION) as run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)
            indexes.append(step.index)
    assert indexes == expected
    for name in ("updated", "own"):
        assert_same_end(tmp_path / name, skipped)


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_skip_the_same_steps(parallel: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = VALIDATION | {"parallel": parallel, "micro_batch_size": 4}
    changed = tmp_path / "changed"
    on_two_ranks(changed, stop_after="5 steps", **settings)
    sf.load(changed).change(skip_steps="9..13")
    on_two_ranks(changed, stop_after="10 steps", **settings)
    on_two_ranks(changed, **settings)
    given = given_the_journal_of(changed, tmp_path / "given")
    on_two_ranks(given, **settings)
    assert_same_end(given, changed)


def test_verify_and_replay_know_skipped_steps(skipped: Path) -> None:
    saved = sf.load(run_in(skipped, **VALIDATION))
    verdict = saved.verify(steps="all")
    assert verdict.problems == []
    assert {8, 12, 13, 23} <= {step for outcome in verdict.outcomes for step in outcome.checkpoints}
    assert not any("not repeated" in line for line in verdict.not_proved)
    for step in (8, 12):
        with refused("step-was-skipped", step=step):
            saved.replay(step)
    for step in (7, 13):
        assert saved.replay(step).look.step == step


def test_ranges_are_added_and_all_that_are_to_come_end(tmp_path: Path) -> None:
    skipping(tmp_path, "9..10, 15..16")
    assert skipped_in(tmp_path) == [8, 9, 14, 15]
    sf.load(tmp_path).change(skip_steps="10..12")
    sf.load(tmp_path).change(skip_steps="9..11")  # is there already
    assert skipped_in(tmp_path) == [8, 9, 10, 11, 14, 15]
    run_in(tmp_path, stop_after="10 steps").train()
    sf.load(tmp_path).change(skip_steps="9..12")
    sf.load(tmp_path).change(skip_steps="12..13")
    assert skipped_in(tmp_path) == [8, 9, 10, 11, 12, 14, 15]
    run_in(tmp_path, stop_after="14 steps").train()
    sf.load(tmp_path).change(skip_steps=None)
    assert skipped_in(tmp_path) == [8, 9, 10, 11, 12]
    run_in(tmp_path).train()
    steps = [record["step"] - 1 for record in sf.load(tmp_path).records("train")]
    assert steps == [step for step in range(23) if step not in SKIPPED]


def skipped_in(run_dir: Path) -> list[int]:
    saved = sf.load(run_dir)
    return [step for step in range(23) if saved.settings_at(step).get("skip_steps") is not None]


def test_an_epoch_may_have_no_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 20, "length": "6 epochs", "model": model}
    skipping(tmp_path, "4..9", at=2, **settings)
    run_in(tmp_path, **settings).train()
    saved = sf.load(tmp_path)
    assert saved.step == 18
    assert [record["epoch"] for record in saved.records("epoch")][-2:] == [5, 6]
    assert sf.load(run_in(tmp_path, **settings)).verify(steps="all").problems == []


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("9", "setting-out-of-range"),
        ("9-13", "setting-out-of-range"),
        ("13..9", "setting-out-of-range"),
        ("0..3", "setting-out-of-range"),
        ("9..13,", "setting-out-of-range"),
        (9, "setting-out-of-range"),
        ("5..8", "skipped-steps-completed"),
        ("20..23", "skipped-steps-beyond-length"),
        ("30..40", "skipped-steps-after-end"),
    ],
)
def test_what_cannot_be_skipped_is_refused(value: Any, code: str, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    with refused(code):
        sf.load(tmp_path).change(skip_steps=value)
    assert read_changes(tmp_path) == ()


def test_a_record_over_skipped_steps_is_proved(skipped: Path, tmp_path: Path) -> None:
    given = given_the_journal_of(skipped, tmp_path / "given")
    settings = VALIDATION | {"log_every": "5 steps"}
    run_in(given, **settings).train()
    records = sf.load(given).records("train")
    assert [(record["step"], record["samples"]) for record in records][:2] == [(5, 40), (15, 40)]
    verdict = sf.load(run_in(given, **settings)).verify(steps="all")
    proved = [step for outcome in verdict.outcomes for step in outcome.records]
    assert proved == [5, 15, 20, 23]


def rows() -> Any:
    for number in range(1000):
        yield torch.full((4,), float(number % 7)), torch.tensor([float(number % 3)])


def test_a_stream_goes_on_behind_the_rows_of_skipped_steps(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_data": rows, "length": "23 steps"}
    skipping(tmp_path / "changed", **settings)
    run_in(tmp_path / "changed", **settings).train()
    given = given_the_journal_of(tmp_path / "changed", tmp_path / "given")
    run_in(given, **settings).train()
    assert_same_end(given, tmp_path / "changed")
    other = tmp_path / "other"
    run_in(other, **settings).train()
    losses = [
        {record["step"]: record["loss"] for record in sf.load(run_dir).records("train")}
        for run_dir in (tmp_path / "changed", other)
    ]
    assert losses[0][8] == losses[1][8]
    assert losses[0][14] != losses[1][14]


PATIENT = {"best": "min val/loss", "early_stopping": sf.EarlyStopping("min val/loss", patience=3)}
REDUCED = {"plateau": sf.ReduceLROnPlateau("min val/loss", patience=2, factor=0.5)}


def test_scores_of_skipped_steps_count_for_patience(tmp_path: Path) -> None:
    settings: dict[str, Any] = VALIDATION | PATIENT | {"evaluate_every": "1 steps"}
    skipping(tmp_path / "changed", "9..16", **settings)
    run_in(tmp_path / "changed", **settings).train()
    saved = sf.load(tmp_path / "changed")
    scores = {record["step"]: record["val/loss"] for record in saved.records("eval")}
    best = min(scores, key=lambda step: scores[step])
    assert saved.step == best + 3 in range(9, 17)
    run_in(given_the_journal_of(tmp_path / "changed", tmp_path / "given"), **settings).train()
    assert_same_end(tmp_path / "given", tmp_path / "changed", step=saved.step)


def test_scores_of_skipped_steps_lower_the_rate(skipped: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = VALIDATION | REDUCED | {"evaluate_every": "1 steps"}
    given = given_the_journal_of(skipped, tmp_path / "given")
    run_in(given, **settings).train()
    stopped = given_the_journal_of(skipped, tmp_path / "stopped")
    for step in range(8, 15):
        run_in(stopped, stop_after=f"{step} steps", **settings).train()
    run_in(stopped, **settings).train()
    assert_same_end(given, stopped)
    factors = run_in(None).parts.task.factors
    lowered = {
        record["step"]: record["lr"] / (1e-2 * factors(record["step"] - 1))
        for record in sf.load(given).records("train")
    }
    # the scores of steps 9 to 13 are that of step 8
    assert lowered[14] == pytest.approx(lowered[8] / 4)
    assert sf.load(run_in(given, **settings)).verify(steps="all").problems == []


def test_a_change_within_a_range_holds_from_its_step(tmp_path: Path) -> None:
    run_dir = skipping(tmp_path / "changed")
    run_in(run_dir, stop_after="10 steps").train()
    sf.load(run_dir).change(**{"optimizer.lr": 1e-3, "batch_size": 12, "ema": 0.5})
    run_in(run_dir).train()
    steps = [record["step"] - 1 for record in sf.load(run_dir).records("train")]
    assert steps == [step for step in range(19) if step not in SKIPPED]
    last = sf.load(run_dir).step
    # 10 steps of 8 samples, and the others of the 180 by twelve
    assert last == 10 + 9
    run_in(given_the_journal_of(run_dir, tmp_path / "given")).train()
    assert_same_end(tmp_path / "given", run_dir, step=last)
    assert sf.load(run_in(run_dir)).verify(steps="all").problems == []


def test_a_range_begins_with_the_first_step_and_ends_before_the_last(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="1 steps").train()
    sf.load(tmp_path).go_back(0, skip_steps="1..3, 20..22")
    run_in(tmp_path).train()
    steps = [record["step"] for record in sf.load(tmp_path).records("train")]
    assert steps == [*range(4, 20), 23]
    marks = sf.load(tmp_path).records("skipped_range")
    assert [(mark["first"], mark["last"]) for mark in marks] == [(1, 3), (20, 22)]


def test_a_longer_run_can_skip_the_steps_that_were_its_last(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="5 steps").train()
    sf.load(tmp_path).change(length="4 epochs", skip_steps="20..25")
    assert [line.from_step for line in read_changes(tmp_path)] == [5, 19, 25]
    with refused("skipped-steps-beyond-length", steps=30):
        sf.load(tmp_path).change(skip_steps="29..30")
