"""A run in a notebook's cell: one output that is updated, and how an interrupt ends the cell; 2
seconds, a kernel 20.
"""

from __future__ import annotations

import os
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import small_runs
import surefoot as sf
from stated import lines_naming, numbers_in
from surefoot.tracking import console, live_terminal, notebook
from surefoot.tracking.notebook import Interrupt, Notebook, interrupt
from tracking.in_steps import hand

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'


class Output:
    """An output of a cell: what stands in it now, and how often it was updated."""

    def __init__(self, bundle: dict[str, str]) -> None:
        self.bundle = bundle
        self.updates = 0

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.bundle = bundle
        self.updates += 1

    @property
    def html(self) -> str:
        return self.bundle["text/html"]

    @property
    def rows(self) -> list[list[str]]:
        """The cells of the table, the head first."""
        return Table(self.html).rows


class Table(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.within = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        self.within = tag in ("td", "th")

    def handle_endtag(self, tag: str) -> None:
        self.within = False

    def handle_data(self, data: str) -> None:
        if self.within:
            self.rows[-1][-1] += data


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of a cell, in order."""
    shown: list[Output] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw
        assert display_id
        shown.append(Output(bundle))
        return shown[-1]

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    return shown


def train(step: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "loss": 2.5 - step / 100,
        "lr": 1e-3,
        "targets_per_s": 15400.0,
    } | values


def scores(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "val/loss": 3.3654} | values


def view(*records: dict[str, Any], **settings: Any) -> Notebook:
    """A view of 100 steps that has received records, one each second."""
    clock = [0.0]
    notebook = Notebook(100, now=lambda: clock[0], **settings)
    hand(notebook, records, before=lambda index: clock.__setitem__(0, index + 1.0))
    return notebook


# --- the output -----------------------------------------------------------------------------------


def test_one_output_is_updated_with_a_row_for_each_evaluation_and_the_newest_record(
    outputs: list[Output],
) -> None:
    view(
        *(record for step in range(10, 100, 10) for record in (train(step), scores(step))),
        train(95),
        unit="tokens",
    )
    (output,) = outputs
    assert output.updates == 18
    assert output.rows[0] == ["step", "train loss", "val/loss", "time"]
    assert [row[0] for row in output.rows[1:]] == [str(step) for step in range(10, 100, 10)]
    assert output.rows[1] == ["10", "2.4", "3.3654", "2s"]
    assert (
        '<progress value="95" max="100"></progress> 95 of 100 steps · loss 1.55 · lr 0.001'
        in output.html
    )
    assert "15.4k tokens/s" in output.html
    assert output.bundle["text/plain"].splitlines()[1].split() == ["10", "2.4", "3.3654", "2s"]


@pytest.mark.parametrize("scores_first", [False, True])
def test_a_step_has_one_row_with_its_loss_its_scores_and_the_mean_of_an_epoch_that_ended(
    scores_first: bool, outputs: list[Output]
) -> None:
    epoch = {"kind": "epoch", "step": 10, "epoch": 1, "loss": 0.25, "epoch_s": 65.0}
    in_order = [train(10), epoch, scores(10)]
    if scores_first:
        in_order = [scores(10), train(10), epoch]
    view(*in_order, scores(15), train(20), scores(20, **{"test/loss": 1.5}), epochs=3)
    assert outputs[0].rows == [
        ["step", "train loss", "val/loss", "test/loss", "epoch mean", "time", ""],
        ["10", "2.4", "3.3654", "", "0.25", "3s", "epoch 1/3 in 1m05s"],
        ["15", "", "3.3654", "", "", "4s", ""],
        ["20", "2.3", "3.3654", "1.5", "", "6s", ""],
    ]


def test_training_records_update_at_most_ten_times_a_second_and_the_end_shows_every_row(
    outputs: list[Output],
) -> None:
    clock = [0.0]
    notebook = Notebook(100, every_record=True, now=lambda: clock[0])
    records = [train(step) for step in range(1, 101)]
    hand(notebook, records, before=lambda index: clock.__setitem__(0, 0.01 * (index + 1)))
    assert outputs[0].updates <= 10
    notebook.close()
    assert [row[0] for row in outputs[0].rows[1:]] == [str(step) for step in range(1, 101)]
    assert "<progress" not in outputs[0].html


def test_the_last_hundred_of_many_rows_are_in_the_table(outputs: list[Output]) -> None:
    view(*(scores(step) for step in range(130)))
    assert [row[0] for row in outputs[0].rows[1:]] == [str(step) for step in range(30, 130)]
    assert "30 earlier rows not shown" in outputs[0].html


def test_messages_and_samples_are_text_and_the_output_comes_below_the_header(
    outputs: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(100)
    notebook.doing("checking the training step")
    notebook.write({"kind": "data_check", "step": 0})
    notebook.say("model  Linear\x1b[2J")
    assert outputs == []
    notebook.begin_steps(0.0)
    notebook.doing("training")
    assert "training" in outputs[0].html
    notebook.write(train(10))
    notebook.write({"kind": "sample", "step": 10, "text": "so it goes"})
    header, *sample = capsys.readouterr().out.splitlines()
    assert header == "model  Linear\ufffd[2J"
    assert numbers_in(sample[0]) == [10]
    assert sample[1:] == ["so it goes", "---"]


def test_no_name_or_text_of_a_run_becomes_markup(outputs: list[Output]) -> None:
    notebook = view(train(10, **{HOSTILE: 1.0}), scores(10, **{f"{HOSTILE}/loss": 1.0}))
    notebook.begin_steps(0.0)
    assert Table(outputs[0].html).tags == {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "p",
        "progress",
    }
    assert HOSTILE + "/loss" in outputs[0].rows[0]
    notebook.doing(HOSTILE)
    assert Table(outputs[0].html).tags == {
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "p",
        "progress",
    }


def test_each_session_has_an_output_of_its_own_which_ends_with_the_chart(
    outputs: list[Output],
) -> None:
    notebook = Notebook(100)
    for step in (10, 20):
        notebook.write(train(step))
        notebook.write(scores(step))
        notebook.close()
        notebook.finish(lambda step=step: f"<b>chart {step}</b>")  # type: ignore[misc]
    assert [[row[0] for row in output.rows[1:]] for output in outputs] == [["10"], ["20"]]
    for step, output in zip((10, 20), outputs, strict=True):
        assert output.html.endswith(f"</table>\n<b>chart {step}</b>")


def test_a_chart_that_fails_is_a_warning(
    outputs: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = view(scores(10))
    notebook.close()
    notebook.finish(lambda: str(1 // 0))
    (warning,) = lines_naming(capsys.readouterr().out, "warning: ")
    assert ": ZeroDivisionError" in warning
    assert [row[0] for row in outputs[0].rows] == ["step", "10"]


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture
def in_notebook(outputs: list[Output], monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of runs in this process, as if it were a kernel."""
    monkeypatch.setattr(live_terminal, "in_cell", lambda: True)
    return outputs


def test_a_notebook_is_known_by_the_stream_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream:
        """What ipykernel puts in the place of standard output."""

    assert not console.in_cell()
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", SimpleNamespace(OutStream=OutStream))  # type: ignore[arg-type]
    assert not console.in_cell()  # `%%capture` takes the text of a cell
    monkeypatch.setattr(sys, "stdout", OutStream())
    assert console.in_cell()
    assert isinstance(live_terminal.screen(100), Notebook)


def weights(run: sf.Run) -> list[torch.Tensor]:
    return [*run.state.model.state_dict().values()]


@pytest.mark.parametrize("with_directory", [True, False])
def test_an_interrupted_run_goes_on_in_the_next_cell_and_ends_with_the_same_bits(
    with_directory: bool, in_notebook: list[Output], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    plain = small_runs.build(None, length="20 steps")
    plain.train()
    changes: dict[str, Any] = {"length": "20 steps", "log_every": "auto", "console": True}
    run = small_runs.build(tmp_path / "run" if with_directory else None, **changes)
    assert run._repr_html_() is None
    with pytest.raises(Interrupt), run:  # noqa: PT012
        for step in run:
            if step.index == 11:
                os.kill(os.getpid(), signal.SIGINT)
    assert run.state.step == 12
    assert shell.shows() == []
    first = run._repr_html_()
    assert first is not None
    assert "stopped by SIGINT at step 12" in first
    run.train()
    assert all(map(torch.equal, weights(run), weights(plain)))
    assert [[row[0] for row in output.rows[1:]] for output in in_notebook] == [
        ["5", "10"],
        ["15", "20"],
    ]
    assert all(output.html.count("<iframe srcdoc=") == 1 for output in in_notebook)
    last = run._repr_html_()
    assert last is not None
    assert "finished: 20 steps" in last
    assert all(f"step {step}\n" in last for step in (5, 10, 15, 20))  # of both sessions


def test_a_run_that_is_started_again_when_it_is_finished_shows_its_chart(
    in_notebook: list[Output], tmp_path: Path
) -> None:
    for _ in range(2):
        small_runs.build(tmp_path / "run", length="7 steps", console=True).train()
    assert [output.html.count("<iframe srcdoc=") for output in in_notebook] == [1, 1]


# --- interrupts -----------------------------------------------------------------------------------


class Shell:
    """The part of IPython's shell that decides what is shown of an exception."""

    def __init__(self) -> None:
        self.custom_exceptions: tuple[type[BaseException], ...] = ()
        self.CustomTB: Any = None

    def set_custom_exc(self, kinds: tuple[type[BaseException], ...], show: Any) -> None:
        self.custom_exceptions = kinds
        self.CustomTB = lambda kind, problem, trace, tb_offset=None: (
            show(self, kind, problem, trace, tb_offset) or []
        )

    def shows(self, problem: BaseException | None = None) -> Any:
        problem = Interrupt() if problem is None else problem
        if isinstance(problem, self.custom_exceptions):
            return self.CustomTB(type(problem), problem, None)
        return ["Traceback"]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    return shell


def test_ipython_shows_nothing_of_an_interrupt_and_everything_else_as_before(shell: Shell) -> None:
    shell.set_custom_exc((ValueError,), lambda *_: ["the user's own"])
    for _ in range(2):
        assert isinstance(interrupt(), Interrupt)
    assert shell.custom_exceptions == (ValueError, Interrupt)
    assert shell.shows(Interrupt()) == []
    assert shell.shows(ValueError()) == ["the user's own"]
    assert shell.shows(KeyboardInterrupt()) == ["Traceback"]


def test_an_interrupt_outside_ipython_is_that_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert type(notebook.interrupt()) is KeyboardInterrupt


def test_a_second_interrupt_ends_the_cell_at_once_and_not_the_kernel(
    shell: Shell, tmp_path: Path
) -> None:
    run = small_runs.build(tmp_path / "run", length="20 steps")
    with pytest.raises(Interrupt), run:  # noqa: PT012
        for step in run:
            if step.index == 10:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
    assert (
        sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_step() == 10
    )  # with the best loss; step 10 was not
    run.train()
    plain = small_runs.build(None, length="20 steps")
    plain.train()
    assert all(map(torch.equal, weights(run), weights(plain)))
