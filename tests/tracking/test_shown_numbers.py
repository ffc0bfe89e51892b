"""Every number on a screen is the number of metrics.jsonl at the step beside it, and an epoch's
mean covers the epoch; 8 seconds.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from io import StringIO
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import surefoot as sf
from small_runs import Augmented, build, loss
from surefoot.tracking import live_terminal
from surefoot.tracking.console import Console
from surefoot.tracking.format import compact, duration, number
from surefoot.tracking.jsonl import records
from surefoot.tracking.live_terminal import Terminal
from surefoot.tracking.notebook import Notebook
from surefoot.tracking.rows import score_text
from tracking.in_terminal import Screen

Record = dict[str, Any]
QUICK: dict[str, Any] = {  # what no screen shows costs nothing
    "early_stopping": None,
    "check_state": False,
    "layer_stats_every": None,
    "save_every": "100 steps",
    "tensorboard": False,
}
EPOCHS = 4
EPOCH_STEPS = 6.5  # of `small_runs`: 52 samples, 8 a step
ENDS = [ceil(epoch * EPOCH_STEPS) for epoch in range(EPOCHS + 1)]
INTERVALS: dict[str, dict[str, Any]] = {
    "of the defaults": {"log_every": "auto", "evaluate_every": "1 epochs"},
    "that divide nothing": {"log_every": "3 steps", "evaluate_every": "5 steps"},
    "longer than an epoch": {"log_every": "9 steps", "evaluate_every": "1 epochs"},
    "longer than the run": {"log_every": "100 steps", "evaluate_every": "0.7 epochs"},
    "of an evaluation at the start": {
        "log_every": "auto",
        "evaluate_at_start": True,
        "sample_every": "4 steps",
    },
}
LOGGED_VALUES = ("index", "steps", "largest", "last")  # by `by_loop`


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    data = Augmented()
    return data.inputs, data.labels


def other_loss(model: Any, batch: Any) -> Any:
    return 2 * loss(model, batch)


def by_train(run: sf.Run) -> None:
    run.train()


def by_loop(run: sf.Run) -> None:
    with run:
        for step in run:
            step.log(index=step.index)
            step.log(reduce="sum", steps=1.0)
            step.log(reduce="max", largest=-abs(step.index - 8.0))
            step.log(reduce="last", last=step.index)


def by_steps(run: sf.Run) -> None:
    with run:
        for step in run.steps():
            sf.forward_backward(step, loss)
            sf.update(step)
            step.log(index=step.index)


LOOPS = [by_train, by_loop, by_steps]


class Screens:
    """All screens of a run at once."""

    fresh_line = "\n"
    width = 80

    def __init__(self, length: int, *, marks_loss: bool, **settings: Any) -> None:
        self.length = length
        self.plain = StringIO()
        self.terminal = Screen(160)
        self.cell = ""  # what the notebook's cell shows
        self.screens: list[Any] = [
            Console(length, self.plain, **settings),
            Terminal(length, self.terminal, marks_loss=marks_loss, **settings),  # type: ignore[arg-type]
            Notebook(length, marks_loss=marks_loss, **settings),
        ]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call_all(*values: Any) -> None:
            for screen in self.screens:
                getattr(screen, name)(*values)

        return call_all


class Cells(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> list[Screens]:
    """The screens of each run that is built."""
    screens_of_runs: list[Screens] = []

    def display(bundle: dict[str, str], **_: Any) -> Any:
        def update(bundle: dict[str, str], **_: Any) -> None:
            screens_of_runs[-1].cell = bundle["text/html"]

        update(bundle)
        return SimpleNamespace(update=update)

    def screen(length: int, stream: None, **settings: Any) -> Screens:
        assert stream is None
        monkeypatch.setenv("COLUMNS", "160")
        screens_of_runs.append(Screens(length, **settings))
        return screens_of_runs[-1]

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    monkeypatch.setattr(live_terminal, "screen", screen)
    return screens_of_runs


def by_step(run_dir: Path) -> dict[str, dict[int, Record]]:
    """The records of each kind by their step, of which there is one for each."""
    kinds: dict[str, dict[int, Record]] = {"train": {}, "epoch": {}, "eval": {}}
    for record in records(run_dir / "metrics.jsonl"):
        if record["kind"] in kinds:
            of_kind = kinds[record["kind"]]
            assert record["step"] not in of_kind
            of_kind[record["step"]] = record
    return kinds


# --- what each screen may show of a step ----------------------------------------------------------


def training_pairs(record: Record) -> dict[str, str]:
    names = ["lr", "grad_norm", "targets_per_s", "ms_per_step", *LOGGED_VALUES]
    pairs = {"train/loss": number(record["loss"]), "eta": duration(record["eta_s"])}
    for name in names:
        if name in record:
            pairs[name] = number(record[name])
    return pairs


def expected_line(kinds: dict[str, dict[int, Record]], step: int) -> dict[str, str]:
    """The `key=value` pairs of a step."""
    pairs: dict[str, str] = {}
    if step in kinds["train"]:
        pairs |= training_pairs(kinds["train"][step])
    if step in kinds["epoch"]:
        epoch = kinds["epoch"][step]
        pairs |= {"epoch": f"{epoch['epoch']}/{EPOCHS}", "train/epoch_mean": number(epoch["loss"])}
        if epoch["epoch_s"] >= 0.5:
            pairs["epoch_time"] = duration(epoch["epoch_s"])
    if step in kinds["eval"]:
        scores = kinds["eval"][step]
        pairs |= {name: number(scores[name]) for name in ("val/loss", "val/accuracy")}
    return pairs


def expected_row(kinds: dict[str, dict[int, Record]], step: int) -> dict[str, str]:
    """The cells of a step in a table that are not empty, without the time."""
    cells: dict[str, str] = {}
    if step in kinds["train"]:
        cells["train loss"] = number(kinds["train"][step]["loss"])
    if step in kinds["eval"]:
        scores = kinds["eval"][step]
        cells |= {name: score_text(scores[name]) for name in ("val/loss", "val/accuracy")}
    if step in kinds["epoch"]:
        epoch = kinds["epoch"][step]
        cells["epoch mean"] = number(epoch["loss"])
        cells[""] = f"epoch {epoch['epoch']}/{EPOCHS} in {duration(epoch['epoch_s'])}"
    return cells


def rows_of_terminal(lines: list[str]) -> list[tuple[int, dict[str, str]]]:
    """The cells of each row by the title above: a title ends where its cells end."""
    titles: list[re.Match[str]] = []
    rows = []
    for line in lines:
        if line.lstrip().startswith("step  "):
            titles = [*re.finditer(r"\S+(?: \S+)?(?=\s\s|$)", line)]
        elif re.match(r" +\d+  ", line) and titles:
            cells = {}
            begin = 0
            for title in titles:
                cells[title[0]] = line[begin : title.end()].strip()
                begin = title.end()
            cells[""] = line[begin:].strip()
            rows.append((int(cells.pop("step")), cells))
    return rows


def rows_of_cell(html: str) -> list[tuple[int, dict[str, str]]]:
    head, *rows = Cells(html).rows
    steps_and_cells = []
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        steps_and_cells.append((int(cells.pop("step")), cells))
    return steps_and_cells


def assert_lines_of_console(
    text: str, kinds: dict[str, dict[int, Record]], length: int, needs_row: set[int]
) -> None:
    """Each line has the numbers of its step, and each of these steps has one."""
    steps = Counter[int]()
    for line in text.splitlines():
        if not line.startswith("step="):
            continue
        first, *pairs = line.split(" ")
        step = int(first.removeprefix("step=").removesuffix(f"/{length}"))
        assert dict(pair.split("=") for pair in pairs) == expected_line(kinds, step)
        steps[step] += 1
    assert needs_row <= steps.keys() <= needs_row | kinds["train"].keys()
    assert set(steps.values()) == {1}


def assert_rows_of_table(
    rows: list[tuple[int, dict[str, str]]],
    kinds: dict[str, dict[int, Record]],
    needs_row: set[int],
) -> None:
    """Each of these steps has one row, with its numbers."""
    assert [step for step, _ in rows] == sorted(needs_row)
    for step, cells in rows:
        numbers = {title: cell for title, cell in cells.items() if cell and title != "time"}
        assert numbers == expected_row(kinds, step)


def assert_live_lines(text: str, training: dict[int, Record], length: int) -> None:
    """Each record of training was shown in the live line, with its numbers."""
    live_lines = re.findall(rf"(\d+)/{length}(?:  (loss [^\r\n]+))", without_colors(text))
    assert {int(step) for step, _ in live_lines} == training.keys()
    for step, line in live_lines:
        record = training[int(step)]
        for entry in line.split("  "):
            if entry.endswith(" targets/s"):
                assert entry == f"{compact(record['targets_per_s'])} targets/s"
                continue
            name, value, *_ = entry.split(" ")
            if name == "loss":
                assert value == number(record["loss"])
            elif name == "eta":
                assert value == duration(record["eta_s"])
            else:
                key = {"norm": "grad_norm", "step": "ms_per_step"}.get(name, name)
                assert key in ("lr", "grad_norm", "ms_per_step", *LOGGED_VALUES)
                assert float(value) == pytest.approx(record[key], rel=5e-3)


@pytest.mark.parametrize("intervals", [*INTERVALS])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_number_on_every_screen_is_that_of_the_record_of_its_step(
    loop: Callable[[sf.Run], None], intervals: str, screens: list[Screens], tmp_path: Path
) -> None:
    settings = QUICK | {"sample_fn": lambda _: "so it goes"} | INTERVALS[intervals]
    loop(build(tmp_path / "run", console=True, **settings))
    (shown,) = screens
    kinds = by_step(tmp_path / "run")
    needs_row = kinds["epoch"].keys() | kinds["eval"].keys()
    if settings.get("log_every", "auto") != "auto":
        needs_row |= kinds["train"].keys()

    assert_lines_of_console(shown.plain.getvalue(), kinds, shown.length, needs_row)
    assert_rows_of_table(rows_of_terminal(shown.terminal.lines), kinds, needs_row)
    assert_rows_of_table(rows_of_cell(shown.cell), kinds, needs_row)
    assert_live_lines(shown.terminal.raw, kinds["train"], shown.length)


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[\d+(;\d+)*m", "", text)


# --- the mean of an epoch -------------------------------------------------------------------------


def means_of_epochs(run_dir: Path) -> list[float]:
    """From one record a step: epochs of 7, 6, 7 and 6 steps."""
    steps = by_step(run_dir)["train"]
    assert list(steps) == list(range(1, ENDS[-1] + 1))
    means = []
    for begin, end in pairwise(ENDS):
        of_epoch = [steps[step] for step in range(begin + 1, end + 1)]
        total = sum(record["loss"] * record["targets"] for record in of_epoch)
        targets = sum(record["targets"] for record in of_epoch)
        means.append(total / targets)
    return means


@pytest.fixture(scope="module")
def expected_means(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    build(run_dir, **QUICK, log_every="1 steps").train()
    return means_of_epochs(run_dir)


# with intervals longer than an epoch: by step, the epoch whose mean is recorded there
RECORDED = {"9 steps": {9: 1, 18: 2, 26: 4}, "100 steps": {26: 4}}


@pytest.mark.parametrize("log_every", ["3 steps", *RECORDED])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_mean_of_an_epoch_is_over_its_steps_whatever_the_interval_of_records(
    loop: Callable[[sf.Run], None], log_every: str, expected_means: list[float], tmp_path: Path
) -> None:
    """An epoch that is shorter than the interval is recorded with the next training record."""
    loop(build(tmp_path / "run", **QUICK, log_every=log_every))
    kinds = by_step(tmp_path / "run")
    epochs = kinds["epoch"]
    expected_epochs = {ENDS[epoch]: epoch for epoch in range(1, EPOCHS + 1)}
    if log_every != "3 steps":
        assert epochs.keys() <= kinds["train"].keys()
        expected_epochs = RECORDED[log_every]
    assert {step: record["epoch"] for step, record in epochs.items()} == expected_epochs
    for record in epochs.values():
        epoch = record["epoch"]
        begin = ENDS[epoch - 1]
        end = ENDS[epoch]
        assert record["loss"] == pytest.approx(expected_means[epoch - 1], rel=1e-12)
        if loop is not by_train:  # your own values are means over the epoch too
            assert record["index"] == (begin + end - 1) / 2
        if loop is by_loop:
            assert record["steps"] == end - begin
            assert record["largest"] == -min(abs(step - 8) for step in range(begin, end))
            assert record["last"] == end - 1


@pytest.mark.parametrize(("stop", "log_every"), [(7, "3 steps"), (8, "3 steps"), (8, "9 steps")])
def test_the_mean_of_an_epoch_in_two_sessions_has_the_same_bits(
    stop: int, log_every: str, tmp_path: Path
) -> None:
    def epochs_without_time(run_dir: Path) -> list[Record]:
        epochs = list(by_step(run_dir)["epoch"].values())
        for record in epochs:
            assert record.pop("epoch_s") > 0.0
        return epochs

    settings = QUICK | {"log_every": log_every}
    by_loop(build(tmp_path / "whole", **settings))
    by_loop(build(tmp_path / "parted", stop_after=f"{stop} steps", **settings))
    by_loop(build(tmp_path / "parted", **settings))

    assert epochs_without_time(tmp_path / "parted") == epochs_without_time(tmp_path / "whole")


def test_short_epochs_read_the_device_no_more_often_than_records(tmp_path: Path) -> None:
    """Full batches: each step is an epoch."""
    run = build(tmp_path / "run", **QUICK, batch_size=52, length="60 epochs", log_every="auto")
    run.train()
    kinds = by_step(tmp_path / "run")
    steps = list(range(3, 61, 3))
    assert list(kinds["train"]) == steps
    assert list(kinds["epoch"]) == steps
    assert [record["epoch"] for record in kinds["epoch"].values()] == steps
    assert kinds["epoch"][60]["targets"] == 52


def test_a_note_says_that_values_named_like_keys_of_an_epoch_are_in_training_records_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with build(tmp_path / "run", console=True, **QUICK) as run:
        for step in run:
            step.log(epoch=100.0, epoch_s=200.0)
    kinds = by_step(tmp_path / "run")
    assert [record["epoch"] for record in kinds["epoch"].values()] == [1, 2, 3, 4]
    assert all(record["epoch"] == 100.0 for record in kinds["train"].values())
    notes = [line for line in capsys.readouterr().out.splitlines() if "epoch and epoch_s" in line]
    assert len(notes) == 1


def test_an_epoch_whose_beginning_is_unknown_has_no_mean(tmp_path: Path) -> None:
    """A checkpoint of an older version has no totals of the epoch."""
    run = build(tmp_path / "run", stop_after="9 steps", **QUICK)
    run.parts.run_state.meter.epoch_state = lambda: None  # type: ignore[method-assign]
    run.train()
    build(tmp_path / "run", **QUICK).train()
    assert list(by_step(tmp_path / "run")["epoch"]) == [7, 20, 26]


def test_skipped_steps_are_not_in_the_mean_of_an_epoch(tmp_path: Path) -> None:
    def nan_at_step_5(model: Any, batch: Any) -> Any:
        mean = loss(model, batch)
        if model.training and run.state.step == 4:
            return mean * torch.nan
        return mean

    run = build(tmp_path / "run", log_every="1 steps", **QUICK, loss=nan_at_step_5)
    run.train()

    kinds = by_step(tmp_path / "run")
    applied = [kinds["train"][step] for step in (1, 2, 3, 4, 6, 7)]
    total = sum(record["loss"] * record["targets"] for record in applied)
    epoch = kinds["epoch"][7]
    assert epoch["loss"] == pytest.approx(total / epoch["targets"])
    assert epoch["targets"] == sum(record["targets"] for record in applied) == 48


def test_a_run_whose_length_is_in_steps_has_no_epochs(tmp_path: Path) -> None:
    build(tmp_path / "run", **QUICK, length="20 steps").train()
    assert by_step(tmp_path / "run")["epoch"] == {}


# --- a training loss beside other losses ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_marked"),
    [
        pytest.param({}, False, id="same loss"),
        pytest.param({"loss_note": "label smoothing 0.1"}, True, id="note"),
        pytest.param(
            {"splits": {"val": sf.Split(held_out(), loss=other_loss)}}, True, id="other loss"
        ),
        pytest.param(
            {"splits": {"val": sf.Split(held_out(), loss=False, metrics=sf.metrics.accuracy)}},
            False,
            id="no loss",
        ),
    ],
)
def test_a_training_loss_that_is_not_the_loss_of_the_splits_is_marked(
    changes: dict[str, Any],
    is_marked: bool,
    screens: list[Screens],
    tmp_path: Path,
) -> None:
    build(tmp_path / "run", console=True, **QUICK, **changes).train()
    (shown,) = screens
    title = "train loss*" if is_marked else "train loss"
    _, first_of_cell = rows_of_cell(shown.cell)[0]
    _, first_of_terminal = rows_of_terminal(shown.terminal.lines)[0]
    assert title in first_of_cell
    assert title in first_of_terminal
    for text in (shown.plain.getvalue(), shown.terminal.raw):
        assert ("loss*      " in without_colors(text)) == is_marked
