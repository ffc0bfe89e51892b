"""Findings while a run trains: said once, worse ones again, at most 1 % of the time, in bounded
memory; 2 seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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


def watching(said: list[str], now: Any = None, **settings: Any) -> LiveFindings:
    """The findings of a run that is watched, which append to `said` what they say."""
    return LiveFindings(
        described(standing="running"),
        say=said.append,
        command="surefoot diagnose runs/a",
        now=now or Ticking(),
        **settings,
    )


def test_a_finding_is_said_once_and_again_where_it_is_worse() -> None:
    said: list[str] = []
    live_findings = watching(said)
    for record in train(skipped=lambda place: int(place >= 5) + EVERY // 2 * (place > 20)):
        live_findings.write(record)

    first, second = [line for line in said if "non-finite" in line]
    assert first.startswith("WARNING non-finite-steps: ")
    assert numbers_in(first) == [1]  # skipped steps
    assert first.endswith(": surefoot diagnose runs/a")
    assert second.startswith("ERROR non-finite-steps: ")


def test_a_healthy_run_says_nothing_and_notes_are_left_to_diagnose() -> None:
    said: list[str] = []
    live_findings = watching(said)
    for record in [*train(data_wait_s=lambda _: 0.15), *layers(), *scores([3.0, 2.0, 1.5, 1.0])]:
        live_findings.write(record)
    assert said == []


def test_at_most_one_line_a_record_and_the_worst_first() -> None:
    said: list[str] = []
    live_findings = watching(said)
    for record in train(lambda place: 2.3, data_wait_s=lambda _: 0.9, skipped=lambda _: 1):
        before = len(said)
        live_findings.write(record)
        assert len(said) - before <= 1

    assert said[0].startswith("ERROR ")
    assert len(set(said)) == len(said) >= 3


def lines_said(is_present: dict[int, bool]) -> list[str]:
    """What is said of a finding that is there, or is not, at these steps."""
    finding = Finding("data-bound", "warning", "Steps wait.")
    said: list[str] = []
    live_findings = watching(said)
    for step, is_there in is_present.items():
        current = (step, [finding] if is_there else [])
        live_findings._current_findings = lambda current=current: current  # type: ignore[method-assign]
        live_findings.write({"kind": "train", "step": step})
    return said


@pytest.mark.parametrize(("absent_steps", "times"), [(50, 1), (150, 2)])
def test_what_was_absent_for_long_is_said_again_and_what_was_absent_for_a_moment_is_not(
    absent_steps: int, times: int
) -> None:
    said = lines_said({400: True, 800: True, 1000 - absent_steps: False, 1000: True, 1001: True})

    assert len(said) == times


def test_early_in_a_run_what_was_absent_for_a_few_steps_is_not_said_again() -> None:
    said = lines_said({40: True, 50: False, 90: True})  # of 600 steps

    assert len(said) == 1


def test_the_search_takes_at_most_a_hundredth_of_the_time() -> None:
    # every look at the clock takes half a second: so does a search then
    clock = Ticking(0.5)
    live_findings = watching([], now=clock)
    times_s = []
    search = live_findings._current_findings

    def timed_search() -> Any:
        times_s.append(clock.time_s)
        return search()

    live_findings._current_findings = timed_search  # type: ignore[method-assign]
    for record in train(count=600):
        live_findings.write(record)

    assert len(times_s) > 3
    assert min(later - earlier for earlier, later in pairwise(times_s)) >= 50.0


def test_a_resumed_run_does_not_repeat_what_its_records_showed_before() -> None:
    records = train(data_wait_s=lambda _: 0.9)
    said: list[str] = []
    live_findings = watching(said, earlier=records[:30])
    for record in records[30:]:
        live_findings.write(record)
    assert said == []


def test_what_earlier_sessions_wrote_is_read_at_the_first_record_of_training_and_not_before() -> (
    None
):
    records = train(data_wait_s=lambda _: 0.9)
    read: list[int] = []

    def earlier() -> Iterator[Record]:
        read.append(len(read))
        yield from records[:30]

    live_findings = watching([], earlier=earlier())
    live_findings.write(layers(watched=1)[0])
    assert read == []
    live_findings.write(records[30])
    assert read == [0]
    assert live_findings.records.train.steps.tolist() == [record["step"] for record in records[:31]]
    assert (live_findings.records.train.count, live_findings.records.layers.count) == (31, 1)


def test_a_fault_in_a_finding_is_said_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(history: History) -> Any:
        raise ZeroDivisionError("of ours")

    checks = (Check("wrong", lambda _: None, wrong),)
    monkeypatch.setattr("surefoot.tools.diagnose.checks.CHECKS", checks)
    said: list[str] = []
    live_findings = watching(said)
    for record in train():
        live_findings.write(record)

    (note,) = said
    assert note.startswith("note: ")
    assert " wrong " in note  # the name of the check
    assert "ZeroDivisionError: of ours" in note


def test_a_fault_before_all_findings_is_said_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(live, "History", wrong)
    said: list[str] = []
    live_findings = watching(said)
    for record in train():
        live_findings.write(record)

    (note,) = said
    assert note.startswith("note: ")
    assert " wrong " not in note  # no check: all of them
    assert "ZeroDivisionError: of ours" in note


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
    for step in range(3000):
        loss = 2.0 + (step - 900) ** 2 / 1e6
        collected.add({"kind": "eval", "step": step, "val/loss": loss})

    history = History(described(), collected)
    assert history.train_count <= 2 * MOST + 16
    assert len(collected.scores.steps) <= 2 * MOST + 16
    assert history.total("targets") == 80 * 9000
    assert history.total("skipped") == 9
    assert history.column("grad_norm_max").value.max() == 50.0
    largest = history.column("loss_max")
    assert largest.step[largest.value == 9.0].tolist() == [173]
    scores = history.splits["val"]
    assert scores.value.min() == 2.0
    assert scores.step[scores.value.argmin()] == 900
    mean = sum(record["loss"] for record in records) / len(records)
    of_windows = history.loss.value @ history.column("targets").value / history.total("targets")
    assert of_windows == pytest.approx(mean)


def test_a_record_without_a_number_where_one_is_usual_ends_nothing() -> None:
    said: list[str] = []
    odd = train(count=2100, loss_max=lambda place: None if place % 2 else 2.0)
    live_findings = watching(said, earlier=odd)
    live_findings.at_end()

    assert said == []
    assert live_findings.records.train.count == 2100


def test_records_that_cannot_be_collected_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise TypeError("of ours")

    monkeypatch.setattr("surefoot.tracking.table.Table.join", wrong)
    said: list[str] = []
    live_findings = watching(said, earlier=train(count=2100))
    live_findings.write(train()[0])
    (note,) = said
    assert note.startswith("note: ")
    assert "TypeError: of ours" in note


@pytest.mark.parametrize(
    ("skipped", "losses"),
    [([0], [2.0, 5.0, 5.0, 5.0]), ([1], [2.0, 5.0, 5.0, 5.0]), ([0, 1], [5.0, 5.0, 5.0])],
)
def test_thinned_records_have_the_loss_of_what_was_applied(
    skipped: list[int], losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "MOST", 2)
    pair = train(lambda _: 2.0, count=2)
    for place in skipped:
        pair[place] |= {"loss": None, "skipped": EVERY, "loss_applied": 0.0}
    rest = train(lambda _: 5.0, count=6)[2:]

    assert history(pair, rest).loss.value.tolist() == losses


def first_falls(place: int) -> float:
    return falling(place // 100)


def never_falls(place: int) -> float:
    return 2.3 + 0.1 * wobble(place)


@pytest.mark.parametrize(("loss", "is_found"), [(first_falls, False), (never_falls, True)])
def test_the_findings_of_a_long_run_see_its_beginning(
    loss: Callable[[int], float], is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "MOST", 50)
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
    printed = capsys.readouterr().out
    quiet = build(tmp_path / "b", **settings)
    quiet.train()

    assert printed.count("ERROR loss-not-falling") == 1
    command = diagnose_command(tmp_path / "a")
    assert f"More: {command}\n" in printed
    assert printed.splitlines()[-1].endswith(f": {command}")  # as it is said at the end
    assert all(map(torch.equal, run.state.parameters, quiet.state.parameters))
    (session,) = json.loads((tmp_path / "a" / "environment.json").read_text())["sessions"]
    assert session["memory_bytes"] > 10**8
    assert sf.load(tmp_path / "a").diagnose()[0].name == "loss-not-falling"


def test_the_sentence_at_the_end_names_the_first_findings_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = [Finding("overfitting", "warning", "", step=400)]
    findings += [Finding(name, "warning", "") for name in "abc"]
    live_findings = watching([])

    def sentence(at_end: list[Finding]) -> str:
        monkeypatch.setattr(live_findings, "at_end", lambda: at_end)
        return live_findings.sentence()

    two = "2 findings: overfitting since step 400, a: surefoot diagnose runs/a"
    four = "4 findings: overfitting since step 400, a, b, 1 more: surefoot diagnose runs/a"
    assert sentence([]) == ""
    assert sentence(findings[:2]) == two
    assert sentence(findings) == four


def test_without_a_directory_the_end_has_the_findings_themselves_and_says_how_to_have_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live_findings = watching([])
    live_findings.command = None
    finding = Finding("a", "warning", "Something is.", try_=("this",))
    monkeypatch.setattr(live_findings, "at_end", lambda: [finding])

    names, sentence, more = live_findings.sentence().splitlines()

    assert names == "1 finding: a"
    assert sentence == "WARNING a: Something is. Try: this"
    assert "run_dir: surefoot diagnose" in more


def test_each_rank_that_becomes_slow_is_said_once() -> None:
    said: list[str] = []
    live_findings = watching(said)
    usual = {"host": "here", "work": "forward", "own_s": 0.04, "median_s": 0.02, "share": 0.2}
    slow_ranks = {100: 3, 200: 5, 260: 3}  # by step
    said_at = []
    for record in train():
        step = record["step"]
        if step in slow_ranks:
            before = len(said)
            slow_rank = {"kind": "slow_rank", "rank": slow_ranks[step], **usual}
            live_findings.write({**slow_rank, "step": step, "since_step": step - 60})
            if len(said) > before:
                said_at.append(step)
        live_findings.write(record)

    assert said_at == [100, 200]
    of_3, of_5 = said
    assert of_3.startswith("WARNING slow-rank: Rank 3 takes 2x as long")
    assert of_5.startswith("WARNING slow-rank: Rank 5 takes 2x as long")
