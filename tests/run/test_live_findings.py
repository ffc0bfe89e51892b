"""Findings while a run trains: said once, worse ones again, at most 1 % of the time, in bounded
memory; 2 seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from diagnose.histories import EVERY, described, falling, history, layers, scores, train, wobble
from small_runs import build
from stated import numbers_in
from surefoot.tools.diagnose import live
from surefoot.tools.diagnose.checks import findings
from surefoot.tools.diagnose.finding import Check, Finding
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.live import LiveFindings
from surefoot.tracking import run_records
from surefoot.tracking.commands import diagnose_command
from surefoot.tracking.record import Record
from surefoot.tracking.run_records import MOST, RunRecords


class Ticking:
    """A clock that goes on by `step_s` at every look, and by what is added."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += self.step_s
        return self.time_s


def of(said: list[str], now: Any = None, **settings: Any) -> LiveFindings:
    return LiveFindings(
        described(standing="running"),
        say=said.append,
        command="surefoot diagnose runs/a",
        now=now or Ticking(),
        **settings,
    )


def test_a_finding_is_said_once_and_again_where_it_is_worse() -> None:
    said: list[str] = []
    made = of(said)
    for record in train(skipped=lambda place: int(place >= 5) + EVERY // 2 * (place > 20)):
        made.write(record)
    about = [line for line in said if "non-finite" in line]
    assert about[0].startswith("WARNING non-finite-steps: ")
    assert numbers_in(about[0]) == [1]  # skipped steps
    assert about[0].endswith(": surefoot diagnose runs/a")
    assert [line.split()[0] for line in about] == ["WARNING", "ERROR"]


def test_a_healthy_run_says_nothing_and_notes_are_left_to_diagnose() -> None:
    said: list[str] = []
    made = of(said)
    for record in [*train(data_wait_s=lambda _: 0.15), *layers(), *scores([3.0, 2.0, 1.5, 1.0])]:
        made.write(record)
    assert said == []


def test_at_most_one_line_a_record_and_the_worst_first() -> None:
    said: list[str] = []
    made = of(said)
    lines = []
    for record in train(lambda place: 2.3, data_wait_s=lambda _: 0.9, skipped=lambda _: 1):
        before = len(said)
        made.write(record)
        lines.append(len(said) - before)
    assert max(lines) == 1
    severities = [line.split()[0] for line in said]
    assert severities[0] == "ERROR"
    assert len(set(said)) == len(said) >= 3


@pytest.mark.parametrize(("gone", "times"), [(50, 1), (150, 2)])
def test_what_was_gone_for_long_is_said_again_and_what_was_gone_for_a_moment_is_not(
    gone: int, times: int
) -> None:
    there = Finding("data-bound", "warning", "Steps wait.")
    said: list[str] = []
    made = of(said)
    for step, found in (
        (400, [there]),
        (800, [there]),
        (1000 - gone, []),
        (1000, [there]),
        (1001, [there]),
    ):
        made._current_findings = lambda step=step, found=found: (step, found)  # type: ignore[method-assign]
        made.write({"kind": "train", "step": step})
    assert len(said) == times


def test_early_in_a_run_what_was_gone_for_a_few_steps_is_not_said_again() -> None:
    there = Finding("data-bound", "warning", "Steps wait.")
    said: list[str] = []
    made = of(said)
    for step, found in ((40, [there]), (50, []), (90, [there])):  # of 600 steps
        made._current_findings = lambda step=step, found=found: (step, found)  # type: ignore[method-assign]
        made.write({"kind": "train", "step": step})
    assert len(said) == 1


def test_asking_takes_at_most_a_hundredth_of_the_time() -> None:
    clock = Ticking(
        0.5
    )  # every look at the clock takes half a second: an asking then takes half of one
    made = of([], now=clock)
    asked_at = []
    ask = made._current_findings

    def counted() -> Any:
        asked_at.append(clock.time_s)
        return ask()

    made._current_findings = counted  # type: ignore[method-assign]
    for record in train(count=600):
        made.write(record)
    assert len(asked_at) > 3
    assert min(later - earlier for earlier, later in pairwise(asked_at)) >= 50.0


def test_a_resumed_run_does_not_repeat_what_its_records_showed_before() -> None:
    records = train(data_wait_s=lambda _: 0.9)
    said: list[str] = []
    made = of(said, earlier=records[:30])
    for record in records[30:]:
        made.write(record)
    assert said == []


def test_what_earlier_sessions_wrote_is_read_at_the_first_record_of_training_and_not_before() -> (
    None
):
    records = train(data_wait_s=lambda _: 0.9)
    read: list[int] = []

    def earlier() -> Iterator[Record]:
        read.append(len(read))
        yield from records[:30]

    made = of([], earlier=earlier())
    made.write(layers(watched=1)[0])
    assert read == []
    made.write(records[30])
    assert read == [0]
    assert made.records.train.steps.tolist() == [record["step"] for record in records[:31]]
    assert (made.records.train.count, made.records.layers.count) == (31, 1)


def test_a_fault_in_a_finding_is_said_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(history: History) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(
        "surefoot.tools.diagnose.checks.CHECKS", (Check("wrong", lambda _: None, wrong),)
    )
    said: list[str] = []
    made = of(said)
    for record in train():
        made.write(record)
    (note,) = said
    assert note.startswith("note: ")
    assert " wrong " in note  # the name of the check
    assert "ZeroDivisionError: of ours" in note
    made = of(said)
    monkeypatch.setattr(live, "History", lambda _described, records: wrong(records))
    for record in train():
        made.write(record)
    assert len(said) == 2
    assert said[1].startswith("note: ")
    assert "ZeroDivisionError: of ours" in said[1]
    assert " wrong " not in said[1]  # all checks


def test_memory_is_bounded_and_sums_extremes_and_the_best_are_kept() -> None:
    collected = RunRecords()
    records = train(
        count=9000,
        skipped=lambda place: int(place % 1000 == 0),
        grad_norm_max=lambda place: 50.0 if place == 17 else 1.0,
        loss_max=lambda place: 9.0 if place == 17 else 2.0,
        loss_max_step=lambda place: EVERY * place + 3,
    )
    collected.extend(records)
    losses = [2.0 + (place - 900) ** 2 / 1e6 for place in range(3000)]
    for place, loss in enumerate(losses):
        collected.add({"kind": "eval", "step": place, "val/loss": loss})
    history = History(described(), collected)
    assert history.train_count <= 2 * MOST + 16
    assert len(collected.scores.steps) <= 2 * MOST + 16
    assert history.total("targets") == 80 * 9000
    assert history.total("skipped") == 9
    assert history.column("grad_norm_max").value.max() == 50.0
    largest = history.column("loss_max")
    assert largest.step[largest.value == 9.0].tolist() == [173]
    best = history.splits["val"]
    assert (best.value.min(), best.step[best.value.argmin()]) == (2.0, 900)
    whole = sum(record["loss"] for record in records) / len(records)
    of_windows = history.loss.value @ history.column("targets").value / history.total("targets")
    assert of_windows == pytest.approx(whole)


def test_a_record_without_a_number_where_one_is_usual_ends_nothing() -> None:
    said: list[str] = []
    odd = train(count=2100, loss_max=lambda place: None if place % 2 else 2.0)
    made = of(said, earlier=odd)
    made.at_end()
    assert said == []
    assert made.records.train.count == 2100


def test_records_that_cannot_be_collected_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise TypeError("of ours")

    monkeypatch.setattr("surefoot.tracking.table.Table.join", wrong)
    said: list[str] = []
    made = of(said, earlier=train(count=2100))
    made.write(train()[0])
    (note,) = said
    assert note.startswith("note: ")
    assert "TypeError: of ours" in note


@pytest.mark.parametrize("lost", [(True, False), (False, True), (True, True)])
def test_thinned_records_have_the_loss_of_what_was_applied(
    lost: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "MOST", 2)
    pair = [
        record | ({"loss": None, "skipped": EVERY, "loss_applied": 0.0} if gone else {})
        for record, gone in zip(train(lambda _: 2.0, count=2), lost, strict=True)
    ]
    last = train(lambda _: 5.0, count=6)[2:]
    losses = history(pair, last).loss.value.tolist()
    assert losses == ([] if all(lost) else [2.0]) + [5.0, 5.0, 5.0]


def test_the_findings_of_a_long_run_see_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_records, "MOST", 50)
    for loss, is_found in (
        (lambda place: falling(place // 100), False),
        (lambda place: 2.3 + 0.1 * wobble(place), True),
    ):
        records = history(train(loss, count=6000), length="60000 steps")
        names = [finding.name for finding in findings(records)]
        assert ("loss-not-falling" in names) == is_found


def test_a_run_says_what_it_finds_and_its_weights_are_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "_TIMES_AS_LONG", 0)
    settings: dict[str, Any] = {
        "log_every": "1 steps",
        "save_every": "40 steps",
        "evaluate_every": "40 steps",
        "optimizer": sf.optim.sgd(lr=1e-9),
        "schedule": None,
        "length": "40 steps",
    }
    run = build(tmp_path / "a", console=True, **settings)
    run.train()
    shown = capsys.readouterr().out
    assert shown.count("ERROR loss-not-falling") == 1
    command = diagnose_command(tmp_path / "a")
    assert f"More: {command}\n" in shown
    assert shown.splitlines()[-1].endswith(f": {command}")  # as it is said at the end
    quiet = build(tmp_path / "b", **settings)
    quiet.train()
    assert all(
        torch.equal(one, other)
        for one, other in zip(run.state.parameters, quiet.state.parameters, strict=True)
    )
    noted = json.loads((tmp_path / "a" / "environment.json").read_text())["sessions"][0]
    assert noted["memory_bytes"] > 10**8
    assert sf.load(tmp_path / "a").diagnose()[0].name == "loss-not-falling"


def test_the_sentence_at_the_end_names_the_first_findings_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = [
        Finding("overfitting", "warning", "", step=400),
        *(Finding(name, "warning", "") for name in "abc"),
    ]
    remarks = of([])
    monkeypatch.setattr(remarks, "at_end", lambda: findings[:2])
    assert (
        remarks.sentence() == "2 findings: overfitting since step 400, a: surefoot diagnose runs/a"
    )
    monkeypatch.setattr(remarks, "at_end", lambda: findings)
    assert (
        remarks.sentence()
        == "4 findings: overfitting since step 400, a, b, 1 more: surefoot diagnose runs/a"
    )
    monkeypatch.setattr(remarks, "at_end", list)
    assert remarks.sentence() == ""


def test_without_a_directory_the_end_has_the_findings_themselves_and_says_how_to_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remarks = of([])
    remarks.command = None
    monkeypatch.setattr(
        remarks, "at_end", lambda: [Finding("a", "warning", "Something is.", try_=("this",))]
    )
    names, finding, more = remarks.sentence().splitlines()
    assert names == "1 finding: a"
    assert finding == "WARNING a: Something is. Try: this"
    assert "run_dir: surefoot diagnose" in more


def test_each_rank_that_becomes_slow_is_said_once() -> None:
    said: list[str] = []
    made = of(said)
    usual = {"host": "here", "work": "forward", "own_s": 0.04, "median_s": 0.02, "share": 0.2}
    for record in train():
        step = record["step"]
        if step in (100, 200, 260):
            rank = {100: 3, 200: 5, 260: 3}[step]
            before = len(said)
            made.write(
                {"kind": "slow_rank", "step": step, "rank": rank, "since_step": step - 60, **usual}
            )
            assert len(said) == before + (step < 260)
        made.write(record)
    assert [line.partition(" as long")[0] for line in said] == [
        "WARNING slow-rank: Rank 3 takes 2x",
        "WARNING slow-rank: Rank 5 takes 2x",
    ]
