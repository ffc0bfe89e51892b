"""The live view, read off the screen of a terminal emulator; a real pseudo-terminal where processes
and signals matter; 16 seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stated import numbers_in
from surefoot.tracking import console
from surefoot.tracking.format import sample_block
from surefoot.tracking.jsonl import records
from surefoot.tracking.live_terminal import Terminal, screen
from tracking.in_steps import hand
from tracking.in_terminal import LIVE, Process, Screen, Warm, environment
from waiting import wait_until


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "LINES", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)


def train(step: int, **values: Any) -> dict[str, Any]:
    defaults = {
        "loss": 2.5 - step / 100,
        "lr": 1e-3,
        "grad_norm": 0.51,
        "targets_per_s": 15400.0,
        "eta_s": 90,
    }
    return {"kind": "train", "step": step} | defaults | values


def scores(step: int, **values: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "val/loss": 3.3654,
        "val/perplexity": 28.946,
        "cloze/accuracy": 0.645,
    } | values


def terminal_on(screen: Screen, *, steps: int = 100, **settings: Any) -> Terminal:
    """A live view of a run of so many steps, for which no time passes."""
    return Terminal(steps, screen, now=lambda: 0.0, **settings)  # type: ignore[arg-type]


def screen_after(*records: dict[str, Any], columns: int = 80, epochs: int = 0) -> Screen:
    screen = Screen(columns)
    hand(terminal_on(screen, epochs=epochs), records)
    return screen


def table_rows(screen: Screen) -> list[list[str]]:
    """The words of each row of the table: those lines end with a time."""
    return [line.split() for line in screen.lines if re.search(r" \d+s$", line)]


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def color_codes(text: str) -> set[str]:
    codes = set()
    for sequence in re.findall(r"\x1b\[([0-9;]*)m", text):
        codes.update(sequence.split(";"))
    return codes


def test_there_is_one_row_per_evaluation_under_one_head_and_one_live_line_below() -> None:
    steps = range(10, 100, 10)
    records = []
    for step in steps:
        records += [train(step), scores(step)]

    head, *rows, live = screen_after(*records, train(95)).lines

    names = ["val/loss", "val/perplexity", "cloze/accuracy"]
    assert head.split() == ["step", "train", "loss", *names, "time"]
    assert [row.split()[0] for row in rows] == [str(step) for step in steps]
    assert rows[0].split()[1:5] == ["2.4", "3.3654", "28.946", "0.645"]
    assert live.startswith("━━━━━━━━━━─ 95/100  loss 1.55  eta 1m30s  lr 0.001  norm 0.51  15.4k/s")


@pytest.mark.parametrize("scores_first", [False, True])
def test_a_step_has_one_row_with_its_loss_its_scores_and_the_mean_of_an_epoch_that_ended(
    scores_first: bool,
) -> None:
    epoch = {"kind": "epoch", "loss": 0.25, "epoch_s": 65.0}
    first = epoch | {"step": 10, "epoch": 1}
    second = epoch | {"step": 20, "epoch": 2}
    scores_of_10 = {"kind": "eval", "step": 10, "val/loss": 0.75}
    scores_of_15 = {"kind": "eval", "step": 15, "val/loss": 0.75}
    records_of_10 = [train(10), first, scores_of_10]
    if scores_first:
        records_of_10 = [scores_of_10, train(10), first]

    screen = screen_after(*records_of_10, scores_of_15, train(20), second, epochs=30)

    head, *rows = [line.split() for line in screen.lines[:-1]]
    assert head == ["step", "train", "loss", "val/loss", "epoch", "mean", "time"]
    assert rows == [
        ["10", "2.4", "0.75", "0.25", "0s", "epoch", "1/30", "in", "1m05s"],
        ["15", "0.75", "0s"],
        ["20", "2.3", "0.25", "0s", "epoch", "2/30", "in", "1m05s"],
    ]


def test_every_record_of_training_has_one_row_if_log_every_was_given() -> None:
    screen = Screen()
    terminal = terminal_on(screen, every_record=True)
    hand(terminal, [train(10), train(20), scores(20), scores(25), train(25), train(30)])
    terminal.step_recorded()
    terminal.say("finished: 30 steps")
    terminal.close()

    step_and_loss = [row[:2] for row in table_rows(screen)]
    assert step_and_loss == [["10", "2.4"], ["20", "2.3"], ["25", "2.25"], ["30", "2.2"]]
    assert screen.lines[-1] == "finished: 30 steps"


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_step_has_one_row_even_if_a_note_comes_before_its_scores(kind: str) -> None:
    screen = Screen()
    terminal = terminal_on(screen, every_record=True)
    for record in (train(10), scores(10), train(20), scores(20)):
        terminal.write(record)
        if record["kind"] == kind:
            terminal.say("note: the loss has a spike")
    terminal.close()

    assert [row[0] for row in table_rows(screen)] == ["10", "20"]
    notes = [line for line in screen.lines if line.startswith("note:")]
    assert len(notes) == 2


@pytest.mark.slow
def test_a_thousand_rows_scroll_away_as_ordinary_text() -> None:
    records = []
    for step in range(1000):
        if step % 10 == 0:
            records.append(train(step))
        records.append(scores(step))

    screen = screen_after(*records)

    assert sum("28.946" in line for line in screen.lines) == 1000
    assert sum("━" in line for line in screen.lines) == 1


@pytest.mark.parametrize("columns", [10, 20, 40, 79, 80, 200])
def test_the_live_line_is_one_line_and_leaves_room_for_the_echo_of_ctrl_c(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    values = {
        "a_value_with_a_rather_long_name": 1.0,
        "two\nlines": 123456.789,
        "wide 宽宽宽宽": 1e300,
    }
    records = [train(10, **values), train(20, loss=1e300, grad_norm=float("inf"), **values)]
    screen = screen_after(*records, columns=columns)
    assert len(screen.lines) == 1
    assert screen.screen.cursor.x <= columns - 3


@pytest.mark.parametrize("columns", [40, 79, 80, 200])
def test_no_row_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    values = (1e300, -1.23456e-100, float("nan"), 123456.789, -float("inf"))
    wide_scores = {f"split {number}/宽 score": value for number, value in enumerate(values)}
    records = [
        train(10, loss=1e300),
        scores(10),
        train(20, loss=1e300),
        {"kind": "eval", "step": 20, **wide_scores},
    ]

    screen = screen_after(*records, columns=columns)

    rows = [line.split() for line in screen.lines[:-1]]
    assert [row[0] for row in rows if row[1:2] == ["1e+300"]] == ["10", "20"]
    heads_and_rows = [row for row in rows if "1e+300" in row or row[-1] == "time"]
    # nothing of them has wrapped
    assert [row[-1] for row in heads_and_rows] == ["time", "0s", "time", "0s"]


def test_all_that_one_wants_to_know_is_in_eighty_columns() -> None:
    screen = Screen()
    record = train(
        19_999, loss=2.34567, lr=4.98e-5, grad_norm=0.512, targets_per_s=123456.0, eta_s=5040
    )
    terminal_on(screen, steps=20_000).write(record)
    assert screen.lines == [
        "━━━━━━━ 19999/20000  loss 2.3457  eta 1h24m  lr 4.98e-5  norm 0.512  123k/s"
    ]


@pytest.mark.parametrize(
    ("columns", "end"), [(91, "norm 0.51  15.4k/s"), (92, "norm 0.51  15.4k tokens/s")]
)
def test_the_rate_has_its_unit_beside_a_full_bar(
    columns: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen(columns)
    terminal_on(screen, unit="tokens").write(train(10))
    (live,) = screen.lines
    assert re.match("━━─{14} 10/100  ", live)
    assert live.endswith(end)


def test_scores_for_which_there_is_no_room_are_named() -> None:
    wide_scores = {f"split {number}/a rather long score": 1.0 for number in range(5)}
    screen = screen_after(train(10), scores(10, **wide_scores))
    assert ": split 1" in " ".join(screen.lines)


def test_other_scores_get_a_head_of_their_own() -> None:
    screen = screen_after(scores(10), {"kind": "eval", "step": 20, "test/loss": 1.0})
    heads = [line.split() for line in screen.lines if "step" in line]
    assert [head[-2] for head in heads] == ["cloze/accuracy", "test/loss"]


ONE_HEAD = ["step train loss val/loss val/perplexity cloze/accuracy val/bits_per_byte time"]
TWO_HEADS = [
    "train val val cloze val",
    "step loss loss perplexity accuracy bits_per_byte time",
]


@pytest.mark.parametrize(
    ("columns", "heads"),
    [(88, ONE_HEAD), (87, TWO_HEADS), (80, TWO_HEADS)],
    ids=["88", "87", "80"],
)
def test_every_column_names_its_split_in_one_line_or_above_it(
    columns: int, heads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = screen_after(train(10), scores(10, **{"val/bits_per_byte": 1.5}), columns=columns)
    *shown_heads, row, _ = [line.split() for line in screen.lines]
    assert shown_heads == [head.split() for head in heads]
    assert row == ["10", "2.4", "3.3654", "28.946", "0.645", "1.5", "0s"]


def test_a_message_breaks_between_words_and_its_first_word_has_a_color() -> None:
    screen = Screen(40)
    terminal = terminal_on(screen)
    terminal.rich.width = 40
    terminal.say("WARNING slow: one two three four five six seven eight nine\nfinished: 3 steps")
    assert screen.lines == [
        "WARNING slow: one two three four five",
        "  six seven eight nine",
        "finished: 3 steps",
    ]
    assert "\x1b[1;31mWARNING\x1b[0m slow" in screen.raw
    assert "\x1b[1;32mfinished:\x1b[0m" in screen.raw


def test_prose_and_samples_stand_above_the_live_line() -> None:
    screen = Screen()
    terminal = terminal_on(screen)
    terminal.write(train(10))
    terminal.say("warning: something")
    terminal.write({"kind": "sample", "step": 10, "text": "[bold]so it goes[/bold] :smile:"})
    assert screen.lines[:4] == [
        "warning: something",
        sample_block({"step": 10, "text": ""}).splitlines()[0],
        "[bold]so it goes[/bold] :smile:",
        "---",
    ]
    assert screen.lines[4].startswith("━")
    terminal.close()
    assert len(screen.lines) == 4


@pytest.mark.parametrize(
    "record",
    [train(20), scores(10), {"kind": "sample", "step": 10, "text": "so it goes"}],
    ids=lambda record: record["kind"],
)
def test_what_takes_long_is_named_until_the_next_record(record: dict[str, Any]) -> None:
    screen = Screen()
    terminal = terminal_on(screen)
    terminal.write(train(10))
    terminal.doing("evaluating val")
    assert screen.lines[-1].endswith("10/100  evaluating val")
    terminal.write(record)
    assert "evaluating" not in "".join(screen.lines)


def test_what_a_model_writes_does_not_command_the_terminal() -> None:
    text = "so\x1b[2J it\x1b[?25l\rgoes\r\non\x9b2J"
    screen = screen_after(train(10), {"kind": "sample", "step": 10, "text": text})
    assert screen.lines[:4] == [
        sample_block({"step": 10, "text": ""}).splitlines()[0],
        "so\ufffd[2J it\ufffd[?25l\ufffdgoes",
        "on\ufffd2J",
        "---",
    ]
    assert not screen.screen.cursor.hidden


def test_a_terminal_that_knows_few_letters_gets_others() -> None:
    screen = Screen(encoding="latin-1")
    terminal = terminal_on(screen)
    terminal.write(train(50))
    terminal.say("宽")
    assert screen.lines[0] == "?"
    assert screen.lines[1].startswith("######----- 50/100")


@pytest.mark.parametrize(
    "variables", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"JPY_PARENT_PID": "1"}]
)
def test_plain_lines_go_where_a_line_cannot_be_redrawn(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(screen(100, Screen()), Terminal)  # type: ignore[arg-type]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert isinstance(screen(100, Screen()), console.Console)  # type: ignore[arg-type]


def test_skipped_steps_stand_out() -> None:
    screen = screen_after(train(10, skipped=2, loss=float("nan"), loss_applied=1.5))
    assert "2 skipped  loss 1.5" in screen.lines[-1]
    assert "\x1b[31m" in screen.raw


NO_COLORS = {"0", "1", "2"}  # plain, bold and dim


def test_only_the_eight_plain_colors_are_used_and_the_cursor_is_never_hidden() -> None:
    screen = screen_after(train(10, skipped=1), scores(10), train(20))
    colors = {str(30 + color) for color in range(8)}
    assert color_codes(screen.raw) <= NO_COLORS | colors
    assert "\x1b[?25l" not in screen.raw


# --- processes in a pseudo-terminal ---------------------------------------------------------------

RUN = """
import ctypes, os, signal, time
import small_runs

def build(**changes):
    return small_runs.build({out!r}, console=True, log_every="1 steps", **changes)

def mark(name):
    open(os.path.join(os.path.dirname({out!r}), name), "w").close()

def slow_call():  # one call of three seconds and more, in which Python runs no handler
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    mark("begun")
    libc.pthread_mutex_timedlock(mutex, ctypes.byref((ctypes.c_long * 2)(int(time.time()) + 4, 0)))  # no signal ends it
    mark("over")
"""

SLOW_STEP = """
passes = [0]
def loss(model, batch):
    passes[0] += model.training
    if passes[0] == 7 and model.training:
        slow_call()
    return small_runs.loss(model, batch)

with build(loss=loss, length="2000 steps", check_state=False) as run:
    for step in run:
        step.log(a_value=1.2345, another=5.4321, the_third_one=6.789)  # the live line is full
"""

SLOW_EVALUATION = """
trained, evaluated = [0], [0]
def loss(model, batch):
    trained[0] += model.training
    evaluated[0] += trained[0] > 0 and not model.training  # those before the first step are the contract's
    if evaluated[0] == 1 and not model.training:
        slow_call()
    return small_runs.loss(model, batch)

build(loss=loss, length="2000 steps", check_state=False).train()
"""

SLEEPING_STEP = """
passes = [0]
def loss(model, batch):
    passes[0] += model.training
    if passes[0] == 7 and model.training:
        mark("begun")
        time.sleep(3)
    return small_runs.loss(model, batch)

build(loss=loss, length="2000 steps", check_state=False).train()
"""
# one that runs handlers, and says each time that it has
ENDLESS_STEP = SLEEPING_STEP.replace(
    "time.sleep(3)", "exec(\"while True: time.sleep(0.01); mark('awake')\")"
)

SHORT_STEPS = """
def loss(model, batch):
    time.sleep(0.01)
    return small_runs.loss(model, batch)

build(loss=loss, length="2000 steps", check_state=False).train()
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


@pytest.fixture
def start(warm: Warm, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts a program after `RUN` in a pseudo-terminal, with these variables of its
    environment.
    """
    processes: list[Process] = []

    def start_program(program: str, *, columns: int = 80, **variables: str) -> Process:
        text = RUN.format(out=str(tmp_path / "run")) + program
        process = Process(warm, text, columns=columns, environment=variables)
        processes.append(process)
        return process

    yield start_program
    for process in processes:
        process.close()


def assert_sane(process: Process) -> None:
    """No live line is left, and what comes next stands at the begin of a line, with a cursor."""
    assert not any(LIVE.search(line) for line in process.screen.lines), process.screen.lines
    assert process.screen.screen.cursor.x == 0
    assert "\x1b[?25l" not in process.screen.raw


def test_a_run_leaves_its_head_its_table_and_its_end(start: Callable[..., Process]) -> None:
    # too few steps for a remark, whose time depends on the machine
    process = start("build(length='11 steps').train()")
    assert process.end() == 0

    lines = process.screen.lines
    first_words = [line.split()[0] for line in lines]
    # a long line may have wrapped, and notes stand between
    subjects = ["model", "data", "plan", "update", "precision", "adds", "device", "run_dir"]
    assert [word for word in first_words[:16] if word in subjects] == subjects

    table = first_words.index("step")
    end = first_words.index("finished:")
    assert lines[end].startswith("finished: 11 steps")
    steps = [word for word in first_words[table:end] if word.isdigit()]
    assert steps == [str(step) for step in range(1, 12)]  # each record, as log_every asks
    heads = first_words[table:end].count("step")
    assert heads == 2  # from the first evaluation on there are more columns
    assert "; val/loss " in " ".join(lines[end:])
    assert_sane(process)


@pytest.mark.slow
def test_a_process_that_was_not_forked_shows_the_same(tmp_path: Path) -> None:
    """Python's own end (streams flushed, threads joined) is not that of the forks of the other
    tests.
    """
    main, side = os.openpty()
    program = RUN.format(out=str(tmp_path / "run")) + "build(length='12 steps').train()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=side, stderr=side, env=environment()
    )
    os.close(side)
    data = b""
    with suppress(OSError):  # the end of a terminal that nobody has open any more
        while chunk := os.read(main, 65536):
            data += chunk
    assert process.wait() == 0
    os.close(main)

    screen = Screen()
    screen.write(data.decode().replace("\r\n", "\n"))
    assert [row[0] for row in table_rows(screen)] == [str(step) for step in range(1, 13)]


def test_a_dumb_terminal_gets_plain_lines(start: Callable[..., Process]) -> None:
    process = start("build(length='12 steps').train()", TERM="dumb")
    assert process.end() == 0
    assert "\x1b" not in process.screen.raw
    assert any(line.startswith("step=12/12 train/loss=") for line in process.screen.lines)


def test_without_color_there_is_none_and_still_a_live_line(
    start: Callable[..., Process],
) -> None:
    process = start("build(length='12 steps').train()", NO_COLOR="1")
    assert process.end() == 0
    assert color_codes(process.screen.raw) <= NO_COLORS
    assert "━" in process.screen.raw


def test_a_terminal_that_is_made_narrow_gets_short_lines_from_then_on(
    start: Callable[..., Process],
) -> None:
    process = start(SHORT_STEPS, columns=120)
    process.until(" 2/2000")
    process.resize(40)
    process.screen.raw = ""
    process.until("12/2000")
    process.press(b"\x03")
    assert process.end() == 130

    # the first ones may be older than the change
    redrawn = without_colors(process.screen.raw).split("\r\x1b[2K")[3:]
    lines = [re.split(r"\n|\^C", text)[0] for text in redrawn]
    messages = ("stopped by", "best:")  # prose, which has "loss" too
    live_lines = [line for line in lines if "loss " in line and not line.startswith(messages)]
    assert max(len(line) for line in live_lines) <= 37


@pytest.mark.parametrize(
    ("program", "last_text_before"),
    [
        (SLOW_STEP, " 2/2000"),
        pytest.param(SLOW_EVALUATION, "evaluating val", marks=pytest.mark.slow),
        pytest.param(SHORT_STEPS, " 2/2000", marks=pytest.mark.slow),
    ],
    ids=["step", "evaluation", "short steps"],
)
def test_ctrl_c_is_answered_while_a_call_goes_on_on_a_line_of_its_own(
    program: str, last_text_before: str, start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(program)
    process.until(last_text_before)
    if "slow_call" in program:
        assert wait_until((tmp_path / "begun").exists)
    process.press(b"\x03")
    process.until("Ctrl-C: ")
    assert not (tmp_path / "over").exists()
    assert process.end() == 130
    answers = [line for line in process.screen.lines if line.startswith("Ctrl-C: ")]
    assert len(answers) == 1
    assert "resume with:  " in process.screen.raw
    assert not any("^" in line for line in process.screen.lines)
    assert_sane(process)


def test_ctrl_c_twice_ends_at_once_and_leaves_the_terminal_as_it_was(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    process = start(ENDLESS_STEP)
    process.until(" 2/2000")
    assert wait_until((tmp_path / "begun").exists)
    process.press(b"\x03")
    process.until("Ctrl-C: ")
    (tmp_path / "awake").unlink(missing_ok=True)
    # or both would be one signal: Python's handlers do not count
    assert wait_until((tmp_path / "awake").exists)
    process.press(b"\x03")
    assert process.end() == 130
    (answer,) = [line for line in process.screen.lines if line.startswith("Ctrl-C again: ")]
    newest_checkpoint, *_ = numbers_in(answer)
    assert newest_checkpoint == 0
    assert_sane(process)


def test_what_the_user_prints_stands_on_lines_of_its_own(start: Callable[..., Process]) -> None:
    process = start(
        """
import sys
with build(length="12 steps") as run:
    for step in run:
        if step.metrics:
            print("the user's", step.index)
        if step.index == 6:
            print("no end", end="")
        if step.index == 8:
            print("an error", file=sys.stderr)
print("after it")
"""
    )
    assert process.end() == 0
    lines = process.screen.lines
    assert {"the user's 4", "the user's 9", "the user's 11", "no end", "an error"} <= set(lines)
    assert lines[-1] == "after it"
    assert_sane(process)


def test_an_error_stands_on_a_line_of_its_own(start: Callable[..., Process]) -> None:
    process = start(
        """
with build(length="12 steps") as run:
    for step in run:
        if step.index == 7:
            raise ValueError("a mistake of the user's own")
"""
    )
    assert process.end() == 1
    assert "Traceback (most recent call last):" in process.screen.lines
    assert process.screen.lines[-1] == "ValueError: a mistake of the user's own"
    assert_sane(process)


def test_a_signal_to_a_forked_child_is_not_answered_by_its_parent(
    start: Callable[..., Process],
) -> None:
    process = start(
        """
with build(length="12 steps") as run:
    for step in run:
        if step.index == 3:
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            os.waitpid(child, 0)
"""
    )
    assert process.end() == 0
    assert "SIGTERM" not in process.screen.raw


def test_a_run_whose_reader_has_ended_with_the_same_ctrl_c_is_saved(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """`python train.py 2>&1 | tee log`"""
    process = start(
        """
reader, writer = os.pipe()
for number in (1, 2):
    os.dup2(writer, number)
os.close(writer)
with build(length="2000 steps") as run:
    for step in run:
        if step.index == 5:
            os.close(reader)
            os.kill(os.getpid(), signal.SIGINT)
"""
    )
    assert process.end() == 130
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*")).name
    assert newest in ("step-00000006", "step-00000007")


def test_a_row_of_scores_has_the_loss_of_the_steps_up_to_it(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    """Both are due at once, and the first row has a loss too."""
    run_dir = str(tmp_path / "run")
    every = "log_every='4 steps', evaluate_every='4 steps'"
    process = start(
        f"small_runs.build({run_dir!r}, console=True, length='12 steps', {every}).train()"
    )
    assert process.end() == 0
    training = [
        record
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    for row, record in zip(table_rows(process.screen), training, strict=True):
        assert int(row[0]) == record["step"]
        assert float(row[1]) == pytest.approx(record["loss"], rel=1e-4)
