"""Plain lines: what is in them, and how often they come; 1 second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from itertools import permutations
from typing import Any

import pytest

from surefoot.tracking.console import Console
from surefoot.tracking.format import sample_block
from surefoot.tracking.live_terminal import screen
from tracking.in_steps import hand
from waiting import LogicalClock


def lines(*records: dict[str, Any], at: tuple[float, ...]) -> list[str]:
    """What a console of 100 steps prints when each record comes at its second."""
    stream = StringIO()
    clock = LogicalClock()
    console = Console(100, stream, now=clock)

    def set_clock(index: int) -> None:
        clock.now_s = at[index]

    hand(console, records, before=set_clock)
    return stream.getvalue().splitlines()


def first_words(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines]


def train(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.5, "skipped": 0, **values}


def test_training_has_a_line_at_most_every_ten_seconds_and_always_the_first_and_the_last() -> None:
    records = [train(step) for step in (10, 20, 30, 40, 50, 100)]
    printed = lines(*records, at=(0.0, 5.0, 9.9, 10.0, 15.0, 15.1))
    assert first_words(printed) == ["step=10/100", "step=40/100", "step=100/100"]


def test_every_record_of_training_has_a_line_if_log_every_was_given() -> None:
    stream = StringIO()
    console = Console(100, stream, every_record=True, now=lambda: 0.0)
    hand(console, [train(step) for step in (10, 20, 30)])
    printed = stream.getvalue().splitlines()
    assert first_words(printed) == ["step=10/100", "step=20/100", "step=30/100"]


def test_scores_and_samples_are_never_left_out() -> None:
    scores = {"kind": "eval", "step": 20, "val/loss": 1.25}
    sample = {"kind": "sample", "step": 20, "text": "so it goes"}
    assert lines(train(10), scores, sample, train(30), at=(0.0, 0.1, 0.2, 0.3)) == [
        "step=10/100 train/loss=2.5",
        "step=20/100 val/loss=1.25",
        sample_block({"step": 20, "text": ""}).splitlines()[0],
        "so it goes",
        "---",
    ]


SCORES_OF_40 = {"kind": "eval", "step": 40, "val/loss": 1.25}


@pytest.mark.parametrize(
    "records_of_40",
    [[train(40), SCORES_OF_40], [SCORES_OF_40, train(40)]],
    ids=["loss first", "scores first"],
)
def test_scores_that_come_before_their_training_record_bring_no_older_one_out(
    records_of_40: list[dict[str, Any]],
) -> None:
    records = [train(10), train(20), train(30), *records_of_40]
    printed = lines(*records, at=(0.0, 0.1, 0.2, 0.3, 0.4))
    assert first_words(printed) == ["step=10/100", "step=40/100"]


def test_steps_stand_in_their_order_beside_scores_and_samples() -> None:
    scores = {"kind": "eval", "step": 25, "val/loss": 1.25}
    sample = {"kind": "sample", "step": 35, "text": "so"}
    records = [train(10), train(20), scores, train(30), sample, train(40), train(100)]
    step_10, step_20, step_25, step_30, *block, step_100 = lines(
        *records, at=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    )
    assert step_10.startswith("step=10/")
    assert step_20.startswith("step=20/")
    assert step_25.startswith("step=25/")
    assert step_30.startswith("step=30/")
    assert block == sample_block(sample).splitlines()
    assert step_100.startswith("step=100/")


def test_a_line_calls_targets_what_the_run_calls_them() -> None:
    stream = StringIO()
    hand(Console(100, stream, unit="tokens"), [train(10, targets_per_s=51234.0)])
    assert stream.getvalue().endswith(" tokens_per_s=51234\n")


def test_a_line_has_what_was_skipped_the_users_values_and_the_time_left() -> None:
    record = train(
        10, loss_applied=2.25, lr=1e-3, grad_norm=0.5, targets_per_s=51234.0, warmth=3, eta_s=192
    )
    record["skipped"] = 2
    (line,) = lines(record, at=(0.0,))
    assert line == (
        "step=10/100 train/loss=2.5 train/loss_applied=2.25"
        " skipped=2 lr=0.001 grad_norm=0.5 targets_per_s=51234 warmth=3 eta=3m12s"
    )


def test_plain_lines_hold_no_escape() -> None:
    record = {"kind": "eval", "step": 20, "val/loss": float("nan")}
    assert lines(record, train(100), at=(0.0, 0.0)) == [
        "step=20/100 val/loss=nan",
        "step=100/100 train/loss=2.5",
    ]


def test_the_newest_record_is_brought_out_by_a_message_and_by_the_end() -> None:
    stream = StringIO()
    console = Console(100, stream, now=lambda: 0.0)
    hand(console, [train(10), train(20), train(30)])
    console.say("warning: something")
    console.write(train(40))
    console.close()
    console.close()
    printed = stream.getvalue().splitlines()
    assert first_words(printed) == ["step=10/100", "step=30/100", "warning:", "step=40/100"]


def test_a_record_is_one_line_and_commands_nothing() -> None:
    (line,) = lines(train(10, **{"two\nlines": 1e300, "\x1b[31mred": 1.0}), at=(0.0,))
    assert line == "step=10/100 train/loss=2.5 two lines=1e+300 \ufffd[31mred=1"


def test_letters_that_the_stream_does_not_have_end_no_run() -> None:
    stream = TextIOWrapper(BytesIO(), encoding="latin-1")
    Console(100, stream).say("na\u00efve \u5bbd")
    stream.seek(0)
    assert stream.read().encode("latin-1") == b"na\xefve ?\n"


class FullStream(StringIO):
    """Where nothing can be written any more."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_stream_without_room_is_given_up_and_ends_nothing() -> None:
    console = Console(100, FullStream())
    console.write(train(10))
    console.say("so it goes")
    console.close()


def test_a_program_without_standard_output_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started with `>&-`, or as a service of Windows."""
    monkeypatch.setattr(sys, "stdout", None)
    console = screen(100)
    console.write(train(10))
    console.say("so it goes")
    console.close()


def test_what_takes_more_than_a_minute_is_said_once() -> None:
    stream = StringIO()
    clock = LogicalClock()
    console = Console(100, stream, now=clock)

    def evaluate_at(*times_s: float) -> None:
        for time_s in times_s:
            clock.now_s = time_s
            console.doing("evaluating val")

    evaluate_at(0.0, 30.0, 59.0)
    assert stream.getvalue() == ""
    evaluate_at(61.0, 90.0, 200.0)
    assert stream.getvalue() == "still evaluating val ...\n"

    console.write({"kind": "eval", "step": 20, "val/loss": 1.25})
    evaluate_at(300.0, 359.0)
    assert stream.getvalue().count("still") == 1
    evaluate_at(361.0)
    assert stream.getvalue().count("still") == 2


EPOCH = {"kind": "epoch", "step": 20, "epoch": 2, "loss": 0.5, "epoch_s": 65.0}
SCORES = {"kind": "eval", "step": 20, "val/loss": 0.75}


def test_an_epoch_that_rounds_to_no_second_has_no_time() -> None:
    stream = StringIO()
    hand(Console(30, stream, epochs=3), [EPOCH | {"epoch_s": 0.3}])
    assert stream.getvalue() == "step=20/30 epoch=2/3 train/epoch_mean=0.5\n"


@pytest.mark.parametrize("order", list(permutations((train(20), EPOCH, SCORES))))
def test_all_records_of_a_step_are_one_line_whichever_comes_first(
    order: tuple[dict[str, Any], ...],
) -> None:
    """In `run.train()` the scores come last, in a loop of one's own first."""
    stream = StringIO()
    hand(Console(30, stream, epochs=3), order)
    assert stream.getvalue() == (
        "step=20/30 epoch=2/3 train/loss=2.5 train/epoch_mean=0.5 val/loss=0.75 epoch_time=1m05s\n"
    )


def test_a_message_between_two_records_of_a_step_does_not_part_them() -> None:
    stream = StringIO()
    console = Console(30, stream, epochs=3)
    console.write(SCORES)
    console.say("note: something")
    console.write(train(20))
    console.step_recorded()
    assert stream.getvalue() == ("note: something\nstep=20/30 train/loss=2.5 val/loss=0.75\n")


def test_a_message_that_begins_like_an_ending_does_not_part_them() -> None:
    stream = StringIO()
    console = Console(30, stream, epochs=3)
    console.write(SCORES)
    console.say("stopped")
    console.write(train(20))
    console.step_recorded()
    assert stream.getvalue() == "stopped\nstep=20/30 train/loss=2.5 val/loss=0.75\n"


def say_the_end(console: Console) -> None:
    console.step_recorded()
    console.say("stopped at step 20")


@pytest.mark.parametrize("end", [Console.close, say_the_end])
def test_an_evaluation_that_was_aborted_takes_no_other_record_of_its_step_away(
    end: Callable[[Console], None],
) -> None:
    stream = StringIO()
    console = Console(30, stream, epochs=3)
    console.write(train(20))
    console.write(EPOCH)
    end(console)
    assert stream.getvalue().startswith(
        "step=20/30 epoch=2/3 train/loss=2.5 train/epoch_mean=0.5 epoch_time=1m05s\n"
    )
