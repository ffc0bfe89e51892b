"""A run in a notebook's cell: one output that is updated, and how an interrupt ends the cell; 2
seconds, a kernel 20.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
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
from waiting import LogicalClock

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
    outputs: list[Output] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw
        assert display_id
        outputs.append(Output(bundle))
        return outputs[-1]

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    return outputs


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


def notebook_after(*records: dict[str, Any], interval_s: float = 1.0, **settings: Any) -> Notebook:
    """A view of 100 steps that has received records, one after each interval."""
    clock = LogicalClock()
    notebook = Notebook(100, now=clock, **settings)
    hand(notebook, records, before=lambda _: clock.advance(interval_s))
    return notebook


def steps_of(output: Output) -> list[str]:
    _, *rows = output.rows
    return [row[0] for row in rows]


# --- the output -----------------------------------------------------------------------------------


def test_one_output_is_updated_with_a_row_for_each_evaluation_and_the_newest_record(
    outputs: list[Output],
) -> None:
    steps = range(10, 100, 10)
    records = []
    for step in steps:
        records += [train(step), scores(step)]

    notebook_after(*records, train(95), unit="tokens")

    (output,) = outputs
    assert output.updates == 18
    assert steps_of(output) == [str(step) for step in steps]
    assert output.rows[0] == ["step", "train loss", "val/loss", "time"]
    assert output.rows[1] == ["10", "2.4", "3.3654", "2s"]
    progress = '<progress value="95" max="100"></progress> 95 of 100 steps · loss 1.55 · lr 0.001'
    assert progress in output.html
    assert "15.4k tokens/s" in output.html
    _, first_line, *_ = output.bundle["text/plain"].splitlines()
    assert first_line.split() == ["10", "2.4", "3.3654", "2s"]


@pytest.mark.parametrize("scores_first", [False, True])
def test_a_step_has_one_row_with_its_loss_its_scores_and_the_mean_of_an_epoch_that_ended(
    scores_first: bool, outputs: list[Output]
) -> None:
    epoch = {"kind": "epoch", "step": 10, "epoch": 1, "loss": 0.25, "epoch_s": 65.0}
    in_order = [train(10), epoch, scores(10)]
    if scores_first:
        in_order = [scores(10), train(10), epoch]
    notebook_after(*in_order, scores(15), train(20), scores(20, **{"test/loss": 1.5}), epochs=3)
    assert outputs[0].rows == [
        ["step", "train loss", "val/loss", "test/loss", "epoch mean", "time", ""],
        ["10", "2.4", "3.3654", "", "0.25", "3s", "epoch 1/3 in 1m05s"],
        ["15", "", "3.3654", "", "", "4s", ""],
        ["20", "2.3", "3.3654", "1.5", "", "6s", ""],
    ]


def test_training_records_update_at_most_ten_times_a_second_and_the_end_shows_every_row(
    outputs: list[Output],
) -> None:
    records = [train(step) for step in range(1, 101)]

    notebook = notebook_after(*records, interval_s=0.01, every_record=True)

    (output,) = outputs
    assert output.updates <= 10
    notebook.close()
    assert steps_of(output) == [str(step) for step in range(1, 101)]
    assert "<progress" not in output.html


def test_the_last_hundred_of_many_rows_are_in_the_table(outputs: list[Output]) -> None:
    notebook_after(*(scores(step) for step in range(130)))
    (output,) = outputs
    assert steps_of(output) == [str(step) for step in range(30, 130)]
    assert "30 earlier rows not shown" in output.html


def test_the_output_comes_below_the_header(outputs: list[Output]) -> None:
    notebook = Notebook(100)
    notebook.doing("checking the training step")
    notebook.write({"kind": "data_check", "step": 0})
    notebook.say("model  Linear")
    assert outputs == []

    notebook.begin_steps(0.0)
    notebook.doing("training")
    assert "training" in outputs[0].html


def test_messages_and_samples_are_text(
    outputs: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = Notebook(100)
    notebook.say("model  Linear\x1b[2J")
    notebook.write(train(10))
    notebook.write({"kind": "sample", "step": 10, "text": "so it goes"})
    message, sample_head, *sample = capsys.readouterr().out.splitlines()
    assert message == "model  Linear\ufffd[2J"
    assert numbers_in(sample_head) == [10]
    assert sample == ["so it goes", "---"]


TAGS = {"table", "thead", "tbody", "tr", "th", "td", "p", "progress"}


def test_no_name_or_text_of_a_run_becomes_markup(outputs: list[Output]) -> None:
    notebook = notebook_after(train(10, **{HOSTILE: 1.0}), scores(10, **{f"{HOSTILE}/loss": 1.0}))
    (output,) = outputs
    notebook.begin_steps(0.0)
    assert Table(output.html).tags == TAGS
    assert HOSTILE + "/loss" in output.rows[0]
    notebook.doing(HOSTILE)
    assert Table(output.html).tags == TAGS


def test_each_session_has_an_output_of_its_own_which_ends_with_the_chart(
    outputs: list[Output],
) -> None:
    notebook = Notebook(100)
    charts = {10: "<b>first chart</b>", 20: "<b>second chart</b>"}
    for step, chart in charts.items():
        notebook.write(train(step))
        notebook.write(scores(step))
        notebook.close()
        notebook.finish(partial(str, chart))

    for (step, chart), output in zip(charts.items(), outputs, strict=True):
        assert steps_of(output) == [str(step)]
        assert output.html.endswith(f"</table>\n{chart}")


def test_a_chart_that_fails_is_a_warning(
    outputs: list[Output], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = notebook_after(scores(10))
    notebook.close()
    notebook.finish(lambda: str(1 // 0))
    (warning,) = lines_naming(capsys.readouterr().out, "warning: ")
    assert ": ZeroDivisionError" in warning
    assert steps_of(outputs[0]) == ["10"]


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


def assert_same_weights(run: sf.Run, other: sf.Run) -> None:
    state = run.state.model.state_dict()
    for name, tensor in other.state.model.state_dict().items():
        assert torch.equal(state[name], tensor)


@pytest.fixture(scope="module")
def uninterrupted() -> sf.Run:
    run = small_runs.build(None, length="20 steps")
    run.train()
    return run


def train_until_interrupt(run: sf.Run, *, at: int, signals: int = 1) -> None:
    """Train, and press Ctrl-C in the step with this index."""
    with pytest.raises(Interrupt), run:  # noqa: PT012
        for step in run:
            if step.index == at:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)


def page_in_cell(run: sf.Run) -> str:
    html = run._repr_html_()
    assert html is not None
    return html


@pytest.mark.parametrize("with_directory", [True, False])
def test_an_interrupted_run_goes_on_in_the_next_cell_and_ends_with_the_same_bits(
    with_directory: bool,
    shell: Shell,
    uninterrupted: sf.Run,
    in_notebook: list[Output],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run" if with_directory else None
    run = small_runs.build(run_dir, length="20 steps", log_every="auto", console=True)
    assert run._repr_html_() is None

    train_until_interrupt(run, at=11)
    assert run.state.step == 12
    assert shell.traceback(Interrupt()) == []
    assert "stopped by SIGINT at step 12" in page_in_cell(run)

    run.train()
    assert_same_weights(run, uninterrupted)
    assert [steps_of(output) for output in in_notebook] == [["5", "10"], ["15", "20"]]
    assert [output.html.count("<iframe srcdoc=") for output in in_notebook] == [1, 1]
    page = page_in_cell(run)
    assert "finished: 20 steps" in page
    for step in (5, 10, 15, 20):  # of both sessions
        assert f"step {step}\n" in page


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
        def custom_traceback(
            kind: type[BaseException], problem: BaseException, trace: Any, tb_offset: Any = None
        ) -> Any:
            return show(self, kind, problem, trace, tb_offset) or []

        self.custom_exceptions = kinds
        self.CustomTB = custom_traceback

    def traceback(self, problem: BaseException) -> Any:
        """What is shown of an exception."""
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
    assert shell.traceback(Interrupt()) == []
    assert shell.traceback(ValueError()) == ["the user's own"]
    assert shell.traceback(KeyboardInterrupt()) == ["Traceback"]


def test_an_interrupt_outside_ipython_is_that_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # type: ignore[arg-type]
    assert type(notebook.interrupt()) is KeyboardInterrupt


def test_a_second_interrupt_ends_the_cell_at_once_and_not_the_kernel(
    shell: Shell, uninterrupted: sf.Run, tmp_path: Path
) -> None:
    run = small_runs.build(tmp_path / "run", length="20 steps")

    train_until_interrupt(run, at=10, signals=2)

    # that of the best loss; the step that was interrupted is not saved
    assert sf.checkpoint.Store(tmp_path / "run" / "checkpoints").newest_step() == 10
    run.train()
    assert_same_weights(run, uninterrupted)
