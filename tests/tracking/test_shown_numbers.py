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
EPOCHS, EPOCH_STEPS = 4, 6.5  # of `small_runs`: 52 samples, 8 a step
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


OWN = ("index", "steps", "largest", "last")  # logged by `by_loop`


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
        self.screens: list[Any] = [
            Console(length, self.plain, **settings),
            Terminal(length, self.terminal, marks_loss=marks_loss, **settings),  # type: ignore[arg-type]
            Notebook(length, marks_loss=marks_loss, **settings),
        ]

    def __getattr__(self, name: str) -> Callable[..., None]:
        def to_all(*values: Any) -> None:
            for screen in self.screens:
                getattr(screen, name)(*values)

        return to_all


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
    """The screens of each run that is built, and the last content of its cell."""
    made: list[Screens] = []

    def display(bundle: dict[str, str], **_: Any) -> Any:
        def update(bundle: dict[str, str], **_: Any) -> None:
            made[-1].cell = bundle["text/html"]  # type: ignore[attr-defined]

        update(bundle)
        return SimpleNamespace(update=update)

    def screen(length: int, stream: None, **settings: Any) -> Screens:
        assert stream is None
        monkeypatch.setenv("COLUMNS", "160")
        made.append(Screens(length, **settings))
        return made[-1]

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    monkeypatch.setattr(live_terminal, "screen", screen)
    return made


def by_step(run_dir: Path) -> dict[str, dict[int, Record]]:
    kinds: dict[str, dict[int, Record]] = {"train": {}, "epoch": {}, "eval": {}}
    for record in records(run_dir / "metrics.jsonl"):
        if record["kind"] in kinds:
            assert record["step"] not in kinds[record["kind"]]
            kinds[record["kind"]][record["step"]] = record
    return kinds


# --- what each screen may show of a step ----------------------------------------------------------


def of_train(record: Record) -> dict[str, str]:
    names = ["lr", "grad_norm", "targets_per_s", "ms_per_step", *OWN]
    own = {"train/loss": number(record["loss"]), "eta": duration(record["eta_s"])}
    return own | {name: number(record[name]) for name in names if name in record}


def expected_line(kinds: dict[str, dict[int, Record]], step: int) -> dict[str, str]:
    """The `key=value` pairs of a step."""
    pairs: dict[str, str] = {}
    if step in kinds["train"]:
        pairs |= of_train(kinds["train"][step])
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
            begins = [0, *(title.end() for title in titles)]
            cells = {
                title[0]: line[begin : title.end()].strip()
                for begin, title in zip(begins, titles, strict=False)
            }
            cells[""] = line[titles[-1].end() :].strip()
            rows.append((int(cells.pop("step")), cells))
    return rows


def rows_of_cell(html: str) -> list[tuple[int, dict[str, str]]]:
    head, *rows = Cells(html).rows
    named = [dict(zip(head, row, strict=True)) for row in rows]
    return [(int(cells.pop("step")), cells) for cells in named]


@pytest.mark.parametrize("intervals", [*INTERVALS])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_number_on_every_screen_is_that_of_the_record_of_its_step(
    loop: Callable[[sf.Run], None], intervals: str, screens: list[Screens], tmp_path: Path
) -> None:
    settings = QUICK | {"sample_fn": lambda _: "so it goes"} | INTERVALS[intervals]
    loop(build(tmp_path / "run", console=True, **settings))
    (shown,) = screens
    kinds = by_step(tmp_path / "run")
    length = shown.length
    needs_row = kinds["epoch"].keys() | kinds["eval"].keys()
    if settings.get("log_every", "auto") != "auto":
        needs_row |= kinds["train"].keys()

    lines = [line for line in shown.plain.getvalue().splitlines() if line.startswith("step=")]
    steps = Counter[int]()
    for line in lines:
        first, *pairs = line.split(" ")
        step = int(first.removeprefix("step=").removesuffix(f"/{length}"))
        assert dict(pair.split("=") for pair in pairs) == expected_line(kinds, step)
        steps[step] += 1
    assert needs_row <= steps.keys() <= needs_row | kinds["train"].keys()
    assert set(steps.values()) == {1}

    in_terminal = rows_of_terminal(shown.terminal.lines)
    in_cell = rows_of_cell(shown.cell)  # type: ignore[attr-defined]
    for rows in (in_terminal, in_cell):
        assert [step for step, _ in rows] == sorted(needs_row)
        for step, cells in rows:
            numbers = {title: cell for title, cell in cells.items() if cell and title != "time"}
            assert numbers == expected_row(kinds, step)

    live = re.findall(rf"(\d+)/{length}(?:  (loss [^\r\n]+))", without_colors(shown.terminal.raw))
    assert {int(step) for step, _ in live} == kinds["train"].keys()
    for step, text in live:
        record = kinds["train"][int(step)]
        values = {"loss": number(record["loss"]), "eta": duration(record["eta_s"])}
        values |= {"lr": record["lr"], "norm": record["grad_norm"]}
        values |= {"step": record.get("ms_per_step")} | {name: record.get(name) for name in OWN}
        for each in text.split("  "):
            if each.endswith(" targets/s"):
                assert each == f"{compact(record['targets_per_s'])} targets/s"
                continue
            name, value, *_ = each.split(" ")
            expected = values[name]
            if isinstance(expected, str):
                assert value == expected
            else:
                assert float(value) == pytest.approx(expected, rel=5e-3)


def without_colors(text: str) -> str:
    return re.sub(r"\x1b\[\d+(;\d+)*m", "", text)


# --- the mean of an epoch -------------------------------------------------------------------------


def means_of_epochs(run_dir: Path) -> list[float]:
    """From one record a step: epochs of 7, 6, 7 and 6 steps."""
    each = [record for record in records(run_dir / "metrics.jsonl") if record["kind"] == "train"]
    assert [record["step"] for record in each] == list(range(1, ENDS[-1] + 1))
    means = []
    for begin, end in pairwise(ENDS):
        steps = each[begin:end]
        targets = sum(record["targets"] for record in steps)
        means.append(sum(record["loss"] * record["targets"] for record in steps) / targets)
    return means


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    build(run_dir, **QUICK, log_every="1 steps").train()
    return means_of_epochs(run_dir)


# with intervals longer than an epoch: by step, the epoch whose mean is recorded there
RECORDED = {"9 steps": {9: 1, 18: 2, 26: 4}, "100 steps": {26: 4}}


@pytest.mark.parametrize("log_every", ["3 steps", *RECORDED])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_mean_of_an_epoch_is_over_its_steps_whatever_the_interval_of_records(
    loop: Callable[[sf.Run], None], log_every: str, expected: list[float], tmp_path: Path
) -> None:
    """An epoch that is shorter than the interval is recorded with the next training record."""
    loop(build(tmp_path / "run", **QUICK, log_every=log_every))
    kinds = by_step(tmp_path / "run")
    epochs = kinds["epoch"]
    recorded = {ENDS[number]: number for number in range(1, EPOCHS + 1)}
    if log_every != "3 steps":
        assert epochs.keys() <= kinds["train"].keys()
        recorded = RECORDED[log_every]
    assert {step: record["epoch"] for step, record in epochs.items()} == recorded
    for record in epochs.values():
        number = record["epoch"]
        begin = ENDS[number - 1]
        end = ENDS[number]
        assert record["loss"] == pytest.approx(expected[number - 1], rel=1e-12)
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
    def epochs(run_dir: Path) -> list[Record]:
        found = [*by_step(run_dir)["epoch"].values()]
        for record in found:
            assert record.pop("epoch_s") > 0.0
        return found

    settings = QUICK | {"log_every": log_every}
    by_loop(build(tmp_path / "whole", **settings))
    by_loop(build(tmp_path / "parted", stop_after=f"{stop} steps", **settings))
    by_loop(build(tmp_path / "parted", **settings))
    assert epochs(tmp_path / "parted") == epochs(tmp_path / "whole")


def test_short_epochs_read_the_device_no_more_often_than_records(tmp_path: Path) -> None:
    """Full batches: each step is an epoch."""
    run = build(tmp_path / "run", **QUICK, batch_size=52, length="60 epochs", log_every="auto")
    run.train()
    kinds = by_step(tmp_path / "run")
    assert [*kinds["epoch"]] == [*kinds["train"]] == [*range(3, 61, 3)]
    assert [record["epoch"] for record in kinds["epoch"].values()] == [*kinds["epoch"]]
    last = kinds["epoch"][60]
    assert last["targets"] == 52


def test_values_named_like_keys_of_an_epoch_are_said_to_be_in_training_records_only(
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
    saved_by = run.parts.run_state.meter
    saved_by.epoch_state = lambda: None  # type: ignore[method-assign]
    run.train()
    build(tmp_path / "run", **QUICK).train()
    assert [*by_step(tmp_path / "run")["epoch"]] == [7, 20, 26]


def test_skipped_steps_are_not_in_the_mean_of_an_epoch(tmp_path: Path) -> None:
    def broken_at_4(model: Any, batch: Any) -> Any:
        mean = loss(model, batch)
        return mean * (torch.nan if model.training and run.state.step == 4 else 1.0)

    run = build(tmp_path / "run", log_every="1 steps", **QUICK, loss=broken_at_4)
    run.train()
    steps = by_step(tmp_path / "run")["train"]
    first = [steps[step] for step in range(1, 8) if step != 5]
    total = sum(record["loss"] * record["targets"] for record in first)
    epoch = by_step(tmp_path / "run")["epoch"][7]
    assert epoch["loss"] == pytest.approx(total / epoch["targets"])
    assert epoch["targets"] == sum(record["targets"] for record in first) == 48


def test_a_run_whose_length_is_in_steps_has_no_epochs(tmp_path: Path) -> None:
    build(tmp_path / "run", **QUICK, length="20 steps").train()
    assert by_step(tmp_path / "run")["epoch"] == {}


# --- a training loss beside other losses ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "is_marked"),
    [
        ({}, False),
        ({"loss_note": "label smoothing 0.1"}, True),
        (
            {"splits": {"val": sf.Split(held_out(), loss=other_loss)}},
            True,
        ),
        ({"splits": {"val": sf.Split(held_out(), loss=False, metrics=sf.metrics.accuracy)}}, False),
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
    assert title in rows_of_cell(shown.cell)[0][1]  # type: ignore[attr-defined]
    assert title in rows_of_terminal(shown.terminal.lines)[0][1]
    for text in (shown.plain.getvalue(), shown.terminal.raw):
        assert ("loss*      " in without_colors(text)) == is_marked
