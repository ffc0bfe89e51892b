"""What a record says besides the numbers of law 8: how a session ended, memory, the largest loss,
which steps were skipped. (3 s)
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from small_runs import Augmented, build
from stated import lines_naming
from surefoot import memory
from surefoot.checkpoint.state_json import misshapen
from surefoot.tracking.jsonl import JsonLines, line, records
from surefoot.tracking.record import KINDS


def records_of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in records(run_dir / "metrics.jsonl") if record["kind"] == kind]


def events_of(run_dir: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["event"]) for record in records_of_kind(run_dir, "event")]


def build_of_data(data: Augmented, run_dir: Path | None, **changes: Any) -> sf.Run:
    """A run of these data that is not evaluated."""
    return build(run_dir, train_data=data, splits=None, early_stopping=None, **changes)


class MishapError(Exception):
    """Something in a user's code."""


# --- how a session ended --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({}, "finished"),
        ({"stop_after": "2 steps"}, "stopped by stop_after"),
        ({"early_stopping": sf.EarlyStopping("max val/loss", patience=1)}, "stopped early"),
        ({"time_limit": "10 min"}, "stopped by time_limit"),
    ],
    ids=["length", "stop_after", "early stopping", "time limit"],
)
def test_how_a_session_ended_is_recorded(
    changes: dict[str, Any], event: str, tmp_path: Path
) -> None:
    settings = {"length": "6 steps", "evaluate_every": "1 steps", "save_every": "3 steps"}
    run = build(tmp_path / "run", **(settings | changes))
    with run:
        assert run.session is not None
        deadline = run.session.stop_requests.deadline
        for step in run:
            if deadline is not None and step.index == 2:
                deadline.end -= 600.0  # it is over
    assert events_of(tmp_path / "run") == [(run.state.step, event)]


@pytest.mark.parametrize("changes", [{"stop_after": "2 steps"}, {"time_limit": "1 s"}], ids=min)
def test_the_last_line_of_a_session_names_the_setting_that_ended_it(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    build(None, length="6 steps", console=True, **changes).train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped")]
    assert min(changes) in line


def test_a_time_limit_too_short_for_a_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(tmp_path / "run", length="6 steps", time_limit="1 s", console=True)
    run.train()
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "leaves no time" in line]
    assert "time_limit = 1 s" in note
    assert events_of(tmp_path / "run") == [(0, "stopped by time_limit")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_signal_that_stopped_a_run_is_recorded_by_its_name(
    number: signal.Signals, tmp_path: Path
) -> None:
    run = build(tmp_path / "run", length="6 steps")
    with pytest.raises(SystemExit), run:  # noqa: PT012
        for step in run:
            if step.index == 2:
                os.kill(os.getpid(), number)
    assert events_of(tmp_path / "run") == [(3, f"stopped by {number.name}")]


def test_a_break_is_recorded(tmp_path: Path) -> None:
    with build(tmp_path / "run", length="6 steps") as run:
        for step in run:
            if step.index == 2:
                break
    assert events_of(tmp_path / "run") == [(3, "stopped by break")]


def test_a_stop_by_the_users_code_is_recorded(tmp_path: Path) -> None:
    with build(tmp_path / "run", length="6 steps") as run:
        for step in run:
            if step.index == 2:
                run.stop()
    assert events_of(tmp_path / "run") == [(3, "stopped by run.stop()")]


def test_an_error_is_recorded_with_its_first_line(tmp_path: Path) -> None:
    with pytest.raises(MishapError), build(tmp_path / "run", length="6 steps") as run:  # noqa: PT012
        for step in run:
            if step.index == 4:
                raise MishapError("first\nsecond")
    assert events_of(tmp_path / "run") == [(5, "failed: MishapError: first")]


def test_a_divergence_is_recorded_at_the_step_whose_weights_stand(tmp_path: Path) -> None:
    data = Augmented()
    data.inputs[:] = torch.nan
    run = build_of_data(data, tmp_path / "run", max_bad_steps=1)
    with pytest.raises(sf.DivergedError):
        run.train()
    assert events_of(tmp_path / "run") == [(0, "diverged")]


def test_events_stay_where_a_resume_supersedes_the_records_around_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"length": "9 steps", "save_every": "4 steps"}
    with pytest.raises(MishapError), build(tmp_path / "run", **settings) as run:  # noqa: PT012
        for step in run:
            if step.index == 6:
                raise MishapError("in the seventh")
    build(tmp_path / "run", stop_after="8 steps", **settings).train()
    build(tmp_path / "run", **settings).train()
    assert events_of(tmp_path / "run") == [
        (7, "failed: MishapError: in the seventh"),
        (8, "stopped by stop_after"),
        (9, "finished"),
    ]


def test_a_resume_after_an_event_misses_no_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for stop in (2, 4, 6):
        build(tmp_path / "run", length="6 steps", stop_after=f"{stop} steps", console=True).train()
    assert lines_naming(capsys.readouterr().out, "warning: ") == []
    assert len(events_of(tmp_path / "run")) == 3


def test_a_finished_run_that_is_opened_again_has_one_end(tmp_path: Path) -> None:
    for _ in range(2):
        build(tmp_path / "run", length="3 steps").train()
    assert events_of(tmp_path / "run") == [(3, "finished")]


def test_a_disk_that_is_full_at_the_end_breaks_no_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = JsonLines._append

    def append_to_full_disk(self: JsonLines, data: bytes) -> None:
        if b'"event"' in data:
            raise OSError(28, "No space left on device")
        append(self, data)

    monkeypatch.setattr(JsonLines, "_append", append_to_full_disk)
    run = build(tmp_path / "run", length="3 steps", console=True)
    run.train()
    assert run.session is None
    (warning,) = lines_naming(capsys.readouterr().out, "WARNING: ")
    assert " metrics.jsonl: No space left on device" in warning

    # the directory is free, and the records are whole
    build(tmp_path / "run", length="3 steps", console=True).train()
    assert lines_naming(capsys.readouterr().out, "warning: ") == []


# --- what a record of training says ---------------------------------------------------------------


def test_the_largest_loss_of_a_step_and_which_it_was_are_recorded(tmp_path: Path) -> None:
    data = Augmented()
    data.inputs[5] = torch.nan  # once in each pass
    losses: list[float] = []
    skipped: list[int] = []
    with build_of_data(data, tmp_path / "run", log_every="7 steps") as run:
        for step in run:
            assert step.loss is not None
            losses.append(float(step.loss))
            if step.skipped:
                skipped.append(step.index)
    assert len(skipped) == 4

    begin = 0
    for record in records_of_kind(tmp_path / "run", "train"):
        steps = range(begin, record["step"])
        begin = record["step"]
        finite = [losses[index] for index in steps if math.isfinite(losses[index])]
        assert record["loss_max"] == max(finite)
        assert record["loss_max_step"] == losses.index(max(finite))
        skipped_steps = [index for index in skipped if index in steps]
        if skipped_steps:
            assert record["skipped_steps"] == skipped_steps
        else:
            assert "skipped_steps" not in record


def test_the_loss_before_the_first_update_is_recorded_alone(tmp_path: Path) -> None:
    """Whatever the interval, the order of evaluations and a resume within the first record."""
    losses: list[float] = []
    run = build(tmp_path / "a", length="9 steps", log_every="9 steps", stop_after="2 steps")
    with run:
        for step in run:
            assert step.loss is not None
            losses.append(float(step.loss))
    build(tmp_path / "a", length="9 steps", log_every="9 steps").train()
    build(tmp_path / "b", length="9 steps", log_every="2 steps").train()

    for name in ("a", "b"):
        first, *others = records_of_kind(tmp_path / name, "train")
        assert first["first_step_loss"] == losses[0]
        assert not any("first_step_loss" in record for record in others)


def test_no_more_than_twenty_skipped_steps_are_named(tmp_path: Path) -> None:
    data = Augmented()
    data.inputs[:] = torch.nan
    build_of_data(data, tmp_path / "run", max_bad_steps=100, log_every="24 steps").train()
    first, *_ = records_of_kind(tmp_path / "run", "train")
    assert first["skipped"] == 24
    assert first["skipped_steps"] == list(range(20))
    assert "loss_max" not in first
    assert math.isnan(first["first_step_loss"])
    assert "loss_applied" not in first  # 0 would be no true number


def test_memory_is_that_of_this_process(tmp_path: Path) -> None:
    ones = torch.ones(1 << 24)  # 64 MiB, touched
    build(tmp_path / "run", length="3 steps").train()
    *_, last = records_of_kind(tmp_path / "run", "train")
    assert ones.nbytes < last["host_memory_bytes"] < 1 << 36
    assert "device_memory_peak_bytes" not in last


def test_the_most_that_ever_was_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATM", Path("no such file"))
    used = memory.used_bytes(torch.device("cpu"))
    assert used.keys() == {"host_memory_peak_bytes"}
    assert used["host_memory_peak_bytes"] > 1e7


def test_what_records_have_of_their_own_is_not_shown_as_the_users(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = Augmented()
    data.inputs[5] = torch.nan
    build_of_data(data, None, length="8 steps", console=True).train()
    output = capsys.readouterr().out
    assert "step=8/8 train/loss" in output
    keys = (
        "host_memory_bytes",
        "loss_max",
        "loss_max_step",
        "skipped_steps",
        "first_step_loss",
    )
    assert [key for key in keys if f"{key}=" in output] == []


def test_numbers_inside_of_dictionaries_that_are_not_finite_come_back(tmp_path: Path) -> None:
    record = {
        "kind": "layer_stats",
        "step": 1,
        "grad_norm": {"a.weight": math.inf, "a/b": 2.0},
        "update_norm": {"a/b": -math.inf},
        "val/loss": math.inf,
        "val": {"loss": 1.0},
    }
    raw = json.loads(line(record), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert raw["nonfinite"] == {
        "grad_norm/a.weight": "inf",
        "update_norm/a/b": "-inf",
        "val/loss": "inf",
    }
    (tmp_path / "metrics.jsonl").write_text(line(record) + "\n")
    assert records(tmp_path / "metrics.jsonl") == [record]


def test_where_the_system_tells_nothing_of_memory_no_record_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_STATM", Path("nothing/there"))
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert memory.used_bytes(torch.device("cpu")) == {}


def test_every_key_of_a_record_is_declared_or_named_by_the_user(tmp_path: Path) -> None:
    settings = {"length": "6 steps", "layer_stats_every": "2 steps", "log_every": "2 steps"}
    build(tmp_path, stop_after="4 steps", **settings).train()
    build(tmp_path, **settings).train()

    lines = records(tmp_path / "metrics.jsonl")

    kinds = {record["kind"] for record in lines}
    assert {"train", "eval", "layer_stats", "data_check", "event", "resume"} <= kinds
    for record in lines:
        declared = KINDS[record["kind"]]
        named_by_user = {name for name in record if "/" in name}
        assert record.keys() - named_by_user <= {"kind", *declared}
        for name in record.keys() & declared.keys():
            assert not misshapen(record[name], declared[name], name)


def test_records_count_the_parameters_that_are_frozen(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    run = sf.Run(
        model=model,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.ones(4, 2),),
        batch_size=2,
        length="4 steps",
        log_every="1 steps",
        optimizer=sf.optim.adamw(lr=0.1),
        run_dir=tmp_path / "run",
        console=False,
    )
    with run:
        for step in run:
            model[0].requires_grad_(step.index >= 1)
    training = records_of_kind(tmp_path / "run", "train")
    assert [record.get("frozen_tensors") for record in training] == [2, 2, None, None]
