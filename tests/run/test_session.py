"""How a session begins and ends: `break`, an exception, a loop without `with`, and what a half-made
step leaves. (3 s)
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from recorded import records_of_kind, training_records
from refused import refused, refused_change
from stated import lines_naming, numbers_by_line, numbers_in
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.data.order import Order
from surefoot.errors import Setting
from surefoot.run.components import RunComponents
from surefoot.tracking.record import OWN
from surefoot.train.meter import Meter
from waiting import LogicalClock

STEPS = 16  # in the middle of the third pass; saved every 4
STOP = 6  # the step at which the body ends the run
End = Callable[[sf.Step], bool]


class MishapError(Exception):
    """An error in the user's own code."""


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **{"length": f"{STEPS} steps", **changes})


def saved(run_dir: Path) -> dict[str, str]:
    """The newest checkpoint: its step and the hash of every tensor file."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    contents = {"step": newest.name}
    for file in newest.glob("*.safetensors"):
        contents[file.name] = sha256(file.read_bytes()).hexdigest()
    return contents


def evaluated_steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in records_of_kind(run_dir, "eval")]


def outcome(run_dir: Path) -> Any:
    """The newest checkpoint, and all losses and scores. In a loop of one's own a step's loss is
    written after its scores, since values may be added.
    """
    losses = [(record["step"], record["loss"]) for record in training_records(run_dir)]
    scores = [(record["step"], record["val/loss"]) for record in records_of_kind(run_dir, "eval")]
    return saved(run_dir), sorted(losses), sorted(scores)


def assert_same_weights(one: sf.Run, other: sf.Run) -> None:
    weights = one.state.model.state_dict()
    for name, expected in other.state.model.state_dict().items():
        assert torch.equal(weights[name], expected), name


def steps_made(run: sf.Run, *, own_loop: bool) -> Iterator[sf.Step]:
    """The steps of a run, each with its update: of a loop of one's own, or made by the run."""
    if not own_loop:
        yield from run
        return
    for step in run.steps():
        sf.forward_backward(step)
        sf.update(step)
        yield step


def make_steps(
    run: sf.Run, *, end: End = lambda step: False, middle: End = lambda step: False
) -> None:
    """Level 3, broken off after the update of a step, or between its two halves."""
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            if middle(step):
                break
            sf.update(step)
            if end(step):
                break


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an uninterrupted run leaves."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build(run_dir).train()
    return outcome(run_dir)


def test_a_run_that_trains_by_itself_spends_no_time_in_code_of_its_users(tmp_path: Path) -> None:
    build(tmp_path / "run").train()

    assert {line["user_s"] for line in training_records(tmp_path / "run")} == {0.0}


def test_a_finished_run_has_no_note_of_another_machine(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    build(tmp_path / "run").train()
    before = RunComponents.machine
    monkeypatch.setattr(RunComponents, "machine", lambda parts: before(parts) | {"ranks": 2})
    build(tmp_path / "run", console=True).train()

    (line,) = capsys.readouterr().out.splitlines()  # that it is finished
    assert str(tmp_path / "run") in line


# --- break ----------------------------------------------------------------------------------------


# Stopped in the body of one of these steps: after 7 steps nothing is due; after 8 a checkpoint,
# 9 a record, 15 a record and scores; 16 is the end.
@pytest.mark.fast("6", "15")
@pytest.mark.parametrize("stop", [STOP, 7, 8, 14, 15])
def test_after_break_the_step_counts_as_made_and_a_resume_ends_bit_equal(
    stop: int, whole: Any, tmp_path: Path
) -> None:
    with build(tmp_path / "run") as run:
        for step in run:
            if step.index == stop:
                break
    assert run.state.step == stop + 1
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


@pytest.mark.fast("6", "15")
@pytest.mark.parametrize("stop", [STOP, 7, 8, 14, 15])
def test_break_after_an_update_of_ones_own_counts_it(stop: int, whole: Any, tmp_path: Path) -> None:
    make_steps(build(tmp_path / "run"), end=lambda step: step.index == stop)
    assert saved(tmp_path / "run")["step"] == f"step-{stop + 1:08d}"
    make_steps(build(tmp_path / "run"))
    assert outcome(tmp_path / "run") == whole


@pytest.mark.fast("8")
@pytest.mark.parametrize("stop", [STOP, 8, 14])
def test_break_out_of_a_loop_over_a_variable_is_the_same(
    stop: int, whole: Any, tmp_path: Path
) -> None:
    """The generator lives on, as in a bar of progress around it."""
    with build(tmp_path / "run") as run:
        steps = run.steps()
        for step in steps:
            sf.forward_backward(step)
            sf.update(step)
            if step.index == stop:
                break
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


def test_two_loops_in_one_session_leave_the_records_of_one(whole: Any, tmp_path: Path) -> None:
    with build(tmp_path / "run") as run:
        for step in run:
            if step.index in (8, 14):
                break
        for step in run:
            if step.index == 14:
                break
        for _ in run:
            pass
    assert outcome(tmp_path / "run") == whole


def test_break_before_the_update_leaves_nothing_of_the_step(whole: Any, tmp_path: Path) -> None:
    """Its passes have changed batch statistics and gradients, which are put back."""
    make_steps(build(tmp_path / "run"), middle=lambda step: step.index == STOP)
    assert saved(tmp_path / "run")["step"] == f"step-{STOP:08d}"
    make_steps(build(tmp_path / "run"))
    assert outcome(tmp_path / "run") == whole


def test_in_one_process_a_run_goes_on_after_a_half_made_step() -> None:
    broken = build(None)
    plain = build(None)
    make_steps(broken, middle=lambda step: step.index == STOP)
    make_steps(broken)
    make_steps(plain)

    assert_same_weights(broken, plain)


@pytest.mark.fast("6-after the update", "8-between steps")
@pytest.mark.parametrize("own_loop", [False, True], ids=["between steps", "after the update"])
@pytest.mark.parametrize("stop", [STOP, 8])  # 8: a record is due after it
def test_a_save_asked_for_in_the_body_is_of_the_whole_step(
    own_loop: bool, stop: int, whole: Any, tmp_path: Path
) -> None:
    """Saved at once, the step would be made again, or its record lost, by a resume after a
    crash.
    """
    run = build(tmp_path / "run", save_every="100 steps")
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in steps_made(run, own_loop=own_loop):
            if step.index == stop:
                run.save()
            if step.index == stop + 1:
                raise MishapError
    assert saved(tmp_path / "run")["step"] == f"step-{stop + 1:08d}"
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


def test_what_the_body_changes_after_asking_for_a_save_is_saved_too(tmp_path: Path) -> None:
    with build(tmp_path / "run") as run:
        mine = run.register_state("mine", {"number": 7})
        for step in run:
            if step.index == STOP:
                run.save()
                mine["number"] = 107
                break

    with build(tmp_path / "run") as resumed:
        assert resumed.register_state("mine", {"number": 0}) == {"number": 107}


def test_whoever_leaves_in_the_body_is_told_what_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), build(tmp_path / "run", console=True) as run:  # noqa: PT012
        for step in run:
            if step.index == STOP:
                sys.exit(0)

    *_, end, stands = capsys.readouterr().out.splitlines()
    assert numbers_in(end)[0] == STOP
    assert numbers_in(stands)[0] == 5  # the newest checkpoint


# --- an exception ---------------------------------------------------------------------------------


def fail_between_steps(run: sf.Run) -> None:
    with run:
        for step in run:
            if step.index == STOP:
                raise MishapError


def fail_before_the_passes(run: sf.Run) -> None:
    with run:
        for step in run.steps():
            if step.index == STOP:
                raise MishapError
            sf.forward_backward(step)
            sf.update(step)


def fail_before_the_update(run: sf.Run) -> None:
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            if step.index == STOP:
                raise MishapError
            sf.update(step)


@pytest.mark.parametrize("fail", [fail_between_steps, fail_before_the_update])
def test_after_an_exception_the_newest_checkpoint_stands_and_a_resume_ends_bit_equal(
    fail: Callable[[sf.Run], None], whole: Any, tmp_path: Path
) -> None:
    with pytest.raises(MishapError):
        fail(build(tmp_path / "run"))
    assert saved(tmp_path / "run")["step"] == "step-00000005"  # a new best score
    build(tmp_path / "run").train()
    assert outcome(tmp_path / "run") == whole


@pytest.mark.parametrize("fail", [fail_between_steps, fail_before_the_passes])
def test_a_crash_is_filed_under_the_step_whose_body_it_was(
    fail: Callable[[sf.Run], None], tmp_path: Path
) -> None:
    with pytest.raises(MishapError):
        fail(build(tmp_path / "run"))

    (file,) = (tmp_path / "run" / "crash").iterdir()
    report = json.loads(file.read_text())
    ids, _ = Order(0, samples=small_runs.SAMPLES, batch_size=8).ids(STOP)
    assert file.name == f"step-{STOP:08d}.json"
    assert report["step"] == STOP
    assert [*chain.from_iterable(report["samples"])] == ids.tolist()
    assert numbers_in(report["how_to_go_on"])[:1] == [5]  # the newest checkpoint


def test_after_an_exception_it_is_said_what_stands_and_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MishapError):
        fail_between_steps(build(tmp_path / "run", console=True))

    *_, stands, where = capsys.readouterr().out.splitlines()
    assert numbers_in(stands)[:1] == [5]
    assert where.endswith(f" {tmp_path / 'run' / 'crash'}")


def test_after_an_exception_in_step_0_it_is_said_that_no_training_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MishapError), build(tmp_path / "run", console=True) as run:  # noqa: PT012
        for _ in run:
            raise MishapError

    *_, stands, _ = capsys.readouterr().out.splitlines()
    assert numbers_in(stands)[:1] == [0]


def test_an_exception_inside_a_step_leaves_nothing_to_the_next_session_of_the_same_process() -> (
    None
):
    """The first of two micro-batches has gone backward when the loss of the second fails."""
    passes = [0]

    def failing(model: nn.Module, batch: Any) -> Any:
        if model.training:
            passes[0] += 1
            if passes[0] == 2 * STOP + 2:
                raise MishapError
        return small_runs.loss(model, batch)

    broken = build(None, loss=failing)
    plain = build(None)
    with pytest.raises(MishapError):
        broken.train()
    broken.train()
    plain.train()

    assert_same_weights(broken, plain)


# --- without `with` -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [list, lambda run: list(run.steps()), lambda run: run.stop(), lambda run: run.save()],
    ids=["for step in run", "run.steps", "run.stop", "run.save"],
)
def test_outside_of_with_a_run_says_what_to_type_and_touches_nothing(
    use: Any, tmp_path: Path
) -> None:
    with refused("run-not-open"):
        use(build(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_train_inside_and_outside_of_with_is_the_same(whole: Any, tmp_path: Path) -> None:
    with build(tmp_path / "run") as run:
        run.train()
    assert outcome(tmp_path / "run") == whole


# --- gradients nobody used ------------------------------------------------------------------------


def test_a_step_that_ends_with_unused_gradients_is_refused() -> None:
    run = build(None)
    with refused("gradients-unused", step=0), run:
        for step in run.steps():
            sf.forward_backward(step)


def test_gradients_that_were_there_before_the_run_do_not_reach_its_first_step() -> None:
    def prepared(gradient: float | None) -> nn.Module:
        torch.manual_seed(0)
        model = small_runs.Net()
        for parameter in model.parameters():
            parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
        return model

    stale = build(None, model=prepared(1e3), ema=None)
    fresh = build(None, model=prepared(None), ema=None)
    stale.train()
    fresh.train()

    assert_same_weights(stale, fresh)


def test_a_pass_made_only_to_look_changes_no_batch_statistic() -> None:
    """A probe: forward and backward, the gradients let go, no update."""

    with build(None) as plain:
        for step in plain.steps():
            if step.index != STOP:
                sf.forward_backward(step)
                sf.update(step)
    with build(None) as probing:
        for step in probing.steps():
            sf.forward_backward(step)
            if step.index != STOP:
                sf.update(step)
            else:
                for parameter in probing.state.model.parameters():
                    parameter.grad = None

    assert_same_weights(probing, plain)


# --- names in a record ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "step", "kind", "lr", "saving_s"])
def test_a_users_value_cannot_take_the_name_of_a_records_own(name: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return small_runs.loss(model, batch), {name: sf.Mean(1.0, 1)}

    with refused("logged-name-reserved", name=name), build(None) as run:
        for step in run:
            step.log(**{name: 1.0})
    with refused("logged-name-reserved", name=name):
        build(None, loss=loss).train()


def test_a_users_value_cannot_take_the_name_of_a_splits_score() -> None:
    run = build(None, splits={"val": sf.Split(small_runs.Augmented())}, log_every="1 steps")
    with refused("logged-name-of-a-split", name="val/loss", split="val"), run:
        for step in run:
            step.log(**{"val/loss": 1.0})


def test_the_name_of_the_score_of_no_split_may_be_taken() -> None:
    with build(None, splits={}, early_stopping=None, log_every="1 steps") as run:
        for step in run:
            step.log(**{"val/loss": 1.0})


def test_a_model_of_the_wrong_shape_fails_in_the_first_step_and_no_split_is_blamed() -> None:
    def wrong_shape(model: Any, batch: Any) -> Any:
        return model(batch[0][:, :2]).square().mean()

    run = build(None, loss=wrong_shape, check_state=True)
    with pytest.raises(RuntimeError) as caught:
        run.train()

    assert any(note.startswith("at step 0,") for note in caught.value.__notes__)


def test_every_name_that_a_record_has_by_itself_is_known_as_its_own(tmp_path: Path) -> None:
    data = small_runs.Augmented()
    data.inputs[3] = torch.nan  # so that the records of skipped steps are seen too
    build(tmp_path / "run", train_data=data).train()

    names: set[str] = set()
    for line in training_records(tmp_path / "run") + records_of_kind(tmp_path / "run", "eval"):
        names.update(name for name in line if "/" not in name)
    assert "loss_applied" in names
    assert names - OWN == set()


def test_values_of_the_users_own_are_shown_on_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with build(None, console=True, length="3 steps") as run:
        for step in run:
            step.log(warmth=step.index)

    (line,) = lines_naming(capsys.readouterr().out, "step=3/3 train/loss")
    assert " warmth=1 " in line


# --- how it is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "names_it"), [("mine.py", False), ("/usr/bin/surefoot", True)])
def test_only_a_run_of_the_command_line_is_told_how_to_score_it(
    command: str,
    names_it: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [command])
    build(tmp_path / "run", length="2 steps", console=True).train()

    assert ("surefoot evaluate" in capsys.readouterr().out) == names_it


def test_data_that_cannot_be_read_again_do_not_hide_the_error_that_ended_the_run(
    tmp_path: Path,
) -> None:
    class Vanishing(small_runs.Augmented):
        gone = False

        def __getitem__(self, sample: int) -> Any:
            if self.gone:
                raise OSError("the disk is gone")
            return super().__getitem__(sample)

    data = Vanishing()
    run = build(tmp_path / "run", train_data=data)
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in run:
            if step.index == STOP:
                data.gone = True
                raise MishapError

    (file,) = (tmp_path / "run" / "crash").iterdir()
    planned = [ids.tolist() for ids, _ in run.parts.pipeline.plan.micro_batches(STOP)]
    assert json.loads(file.read_text())["samples"] == planned, "by the plan: none of them is read"


def test_scores_asked_for_outside_of_a_session_have_the_settings_of_the_run() -> None:
    seen: list[bool] = []

    def settings(outputs: Any, targets: Any) -> sf.Mean:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return sf.Mean(0.0, 1)

    data = small_runs.Augmented()
    split = sf.Split((data.inputs, data.labels), metrics=settings)
    run = build(None, splits={"val": split}, deterministic=True)
    run.evaluate()
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()


# --- an evaluation gives way to a signal ----------------------------------------------------------


@pytest.mark.fast("2-5", "15-15", "15-16")
@pytest.mark.parametrize("at", [5, 15, STEPS])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_evaluation_that_a_signal_cuts_short_is_made_by_the_resume(
    number: signal.Signals, at: int, whole: Any, tmp_path: Path
) -> None:
    data = small_runs.Augmented()
    seen = [0]

    def accuracy(outputs: Any, targets: Any) -> sf.Mean:
        seen[0] += 1
        if run.state.step == at:
            signal.raise_signal(number)
        return sf.metrics.accuracy(outputs, targets)

    split = sf.Split((data.inputs, data.labels), metrics=accuracy)
    run = build(tmp_path / "run", splits={"val": split})
    with pytest.raises(SystemExit) as end:
        run.train()

    assert end.value.code == 128 + number
    assert seen[0] % 13 == 1  # 52 samples, 4 at once: one batch of the last evaluation
    assert saved(tmp_path / "run")["step"] == f"step-{at:08d}"

    build(tmp_path / "run").train()

    assert outcome(tmp_path / "run") == whole
    newest = Store(tmp_path / "run" / "checkpoints").newest_intact()
    assert newest is not None
    assert not newest[0].state["evaluation_due"]  # and it is not made once more


def test_an_evaluation_given_up_at_the_end_is_told_and_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small_runs.Augmented()
    samples = []

    def accuracy(outputs: Any, targets: Any) -> sf.Mean:
        if run.state.step == STEPS:
            signal.raise_signal(signal.SIGINT)
        return sf.metrics.accuracy(outputs, targets)

    def sample(model: nn.Module) -> str:
        samples.append(run.state.step)
        return "a sample"

    split = sf.Split((data.inputs, data.labels), metrics=accuracy)
    run = build(tmp_path / "run", splits={"val": split}, sample_fn=sample, console=True)
    with pytest.raises(SystemExit):
        run.train()
    printed = capsys.readouterr().out
    (ctrl_c,) = lines_naming(printed, "Ctrl-C")
    assert numbers_in(ctrl_c) == [STEPS] * 2
    assert [STEPS] in numbers_by_line(printed)  # the evaluation that a resume makes
    assert "finished" not in printed
    assert samples == []

    build(tmp_path / "run", sample_fn=sample, console=True).train()
    assert f"finished: {STEPS} steps" in capsys.readouterr().out
    assert samples == [STEPS]

    build(tmp_path / "run", sample_fn=sample, console=True).train()
    (line,) = capsys.readouterr().out.splitlines()  # that it is finished
    assert str(tmp_path / "run") in line
    assert evaluated_steps(tmp_path / "run") == [5, 10, 15, STEPS]


def test_a_kill_after_the_evaluation_that_a_resume_made_up_for_repeats_no_scores(
    tmp_path: Path,
) -> None:
    data = small_runs.Augmented()

    def accuracy(outputs: Any, targets: Any) -> sf.Mean:
        if run.state.step == 5:
            signal.raise_signal(signal.SIGINT)
        return sf.metrics.accuracy(outputs, targets)

    def dying(model: nn.Module, batch: Any) -> Any:
        if model.training:
            raise MishapError
        return small_runs.loss(model, batch)

    split = sf.Split((data.inputs, data.labels), metrics=accuracy)
    run = build(tmp_path / "run", splits={"val": split})
    with pytest.raises(SystemExit):
        run.train()
    for _ in range(2):
        with pytest.raises(MishapError):
            build(tmp_path / "run", loss=dying).train()

    assert evaluated_steps(tmp_path / "run") == [5]


def test_with_code_of_ones_own_between_the_steps_an_evaluation_is_finished(tmp_path: Path) -> None:
    """That code belongs to the step, and a resume could not run it."""
    data = small_runs.Augmented()
    bodies: list[int] = []
    signals: list[int] = []

    def accuracy(outputs: Any, targets: Any) -> sf.Mean:
        if run.state.step == 5 and not signals:
            signals.append(5)
            signal.raise_signal(signal.SIGINT)
        return sf.metrics.accuracy(outputs, targets)

    split = sf.Split((data.inputs, data.labels), metrics=accuracy)
    run = build(tmp_path / "run", splits={"val": split})
    with pytest.raises(SystemExit), run:  # noqa: PT012
        for step in run:
            bodies.append(step.index)

    assert bodies[-1] == 4
    assert evaluated_steps(tmp_path / "run") == [5]


class StoppedCompilerError(MishapError):
    """As of a compiler that a signal has reached too."""

    __module__ = "torch._inductor.exc"


def fail_after_sigterm(run_dir: Path, error: type[Exception]) -> None:
    """Train a run whose loss fails at once after a signal has come."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if run.state.step == STOP:
            signal.raise_signal(signal.SIGTERM)
            raise error
        return small_runs.loss(model, batch)

    run = build(run_dir, loss=loss)
    run.train()


def test_an_error_of_a_compiler_that_was_told_to_stop_is_reported_and_ends_as_the_signal_does(
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit) as end:
        fail_after_sigterm(tmp_path / "run", StoppedCompilerError)

    assert end.value.code == 128 + signal.SIGTERM
    (report,) = (tmp_path / "run" / "crash").iterdir()
    assert "StoppedCompilerError" in report.read_text()


def test_another_error_that_follows_a_signal_is_raised(tmp_path: Path) -> None:
    with pytest.raises(MishapError):
        fail_after_sigterm(tmp_path / "run", MishapError)


# --- what fails on the way ------------------------------------------------------------------------


def test_records_that_find_no_room_end_no_run_and_are_written_when_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        """A file on a disk that is full for the first ten tries."""

        def __init__(self, file: Any) -> None:
            self.file = file
            self.tries = 0

        def write(self, data: bytes) -> int:
            self.tries += 1
            if self.tries <= 10:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data[:7]))  # and then takes little at once

        def fileno(self) -> int:
            return int(self.file.fileno())

        def close(self) -> None:
            self.file.close()

    run = build(tmp_path / "run", console=True)
    with run:
        assert run.session is not None
        metrics = run.session.journal.metrics
        assert metrics is not None
        metrics.appended.file = Full(metrics.appended.file)  # type: ignore[assignment]
        for _ in run:
            pass

    warnings = lines_naming(capsys.readouterr().out, "metrics.jsonl: No space left on device")
    assert len(warnings) == 1
    steps = [line["step"] for line in training_records(tmp_path / "run")]
    assert steps == [*range(3, STEPS, 3), STEPS]


def test_a_sink_that_cannot_be_closed_keeps_nothing_else_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(tmp_path / "run", console=True, length="3 steps")
    with run:
        assert run.session is not None

        def fail() -> None:
            raise OSError(28, "No space left on device")

        board = run.session.journal.sinks[-1]
        close = board.close
        board.close = fail  # type: ignore[method-assign]

    assert re.search(r"WARNING: .* tensorboard: .*No space left", capsys.readouterr().out)
    close()
    build(tmp_path / "run").train()  # the directory is free


def test_a_second_run_of_this_process_is_refused_the_directory(tmp_path: Path) -> None:
    """The operating system's lock is the process's: it would let both in, and go with the first
    that ends.
    """
    first = build(tmp_path / "run")
    with first:
        with refused("run-in-training", process="this") as error:
            build(tmp_path / "run").__enter__()
        assert error.value.remedies[1] == Setting("run_dir", str(tmp_path / "run-2"))
        next(iter(first))
    build(tmp_path / "run").train()


def test_the_names_of_new_directories_are_flushed_up_to_one_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[Path] = set()
    flush = Disk.flush_directory

    def noted_flush(disk: Disk, path: Path) -> None:
        flushed.add(Path(path))
        flush(disk, path)

    monkeypatch.setattr(Disk, "flush_directory", noted_flush)
    build(tmp_path / "deep" / "down" / "run", length="1 steps").train()

    assert {tmp_path, tmp_path / "deep", tmp_path / "deep" / "down"} <= flushed


def test_a_checkpoint_that_lacks_a_part_of_its_state_is_refused_by_its_name(tmp_path: Path) -> None:
    build(tmp_path / "run", length="4 steps").train()
    store = Store(tmp_path / "run" / "checkpoints")
    newest = store.newest_intact()
    assert newest is not None
    checkpoint, _ = newest
    state = dict(checkpoint.state)
    del state["machine"]
    store.save(replace(checkpoint, step=5, state=state))

    with refused("state-of-another-version", sf.CheckpointError, step=5):
        build(tmp_path / "run", length="9 steps").train()


def test_an_exit_after_the_end_is_no_half_made_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), build(tmp_path / "run", console=True) as run:  # noqa: PT012
        run.train()
        sys.exit(0)

    assert not (tmp_path / "run" / "crash").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("best: ")  # of the ending


def test_a_disk_that_stays_full_loses_records_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def fileno(self) -> int:
            return fileno

        def close(self) -> None:
            pass

    with build(tmp_path / "run", console=True) as run:
        assert run.session is not None
        metrics = run.session.journal.metrics
        assert metrics is not None
        file = metrics.appended.file
        fileno = file.fileno()
        metrics.appended.file = Full()  # type: ignore[assignment]
        for _ in run:
            pass
    file.close()

    printed = capsys.readouterr().out
    assert re.search(r"WARNING: .* metrics\.jsonl: No space left on device", printed)


def test_time_spent_on_logging_before_an_evaluation_is_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the host waits for the steps that the device still has to make."""
    clock = LogicalClock()
    read = Meter.read

    def read_for_a_second(meter: Meter, **named: Any) -> Any:
        clock.advance(1.0)
        return read(meter, **named)

    monkeypatch.setattr(Meter, "read", read_for_a_second)
    run = build(tmp_path / "run", length="5 steps", log_every="5 steps")
    run.parts.run_state.clock.now = clock
    run.train()

    (record,) = training_records(tmp_path / "run")
    assert (record["training_s"], record["evaluating_s"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("trained_on", "before"),
    [
        ({"parallel": "fsdp"}, "2 ranks (fsdp)"),
        ({"parallel": "ddp"}, None),
        ({"ranks": 1, "shards": 1, "parallel": "none", "exact": False}, "1 rank (none)"),
        ({"parallel": "ddp", "exact": False}, "2 ranks (ddp)"),
    ],
)
def test_other_ranks_are_told_in_one_line_if_bits_depend_on_them(
    trained_on: dict[str, Any],
    before: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build(tmp_path / "run", length="4 steps", stop_after="2 steps").train()
    store = Store(tmp_path / "run" / "checkpoints")
    checkpoint = store.at(2)
    machine = checkpoint.state["machine"] | {"ranks": 2, "shards": 2} | trained_on
    store.save(replace(checkpoint, state={**checkpoint.state, "machine": machine}))

    build(tmp_path / "run", length="4 steps", console=True).train()

    notes = lines_naming(capsys.readouterr().out, " now on 1 rank ")
    if before is None:
        assert notes == []
    else:
        (note,) = notes
        assert note.startswith(f"note: trained on {before}, now on 1 rank (none): ")


def test_a_run_in_another_thread_is_refused_while_one_is_open(tmp_path):
    """Its model, its steps and its evaluation would draw from the generators of the run that is
    open.
    """
    codes: list[str | None] = []

    def in_thread(call: Callable[[], Any]) -> None:
        def catch() -> None:
            with pytest.raises(sf.ConfigError) as caught:
                call()
            codes.append(caught.value.code)

        thread = threading.Thread(target=catch)
        thread.start()
        thread.join()

    other = build(tmp_path / "other")
    with build(tmp_path / "one") as run:
        for step in run:
            in_thread(other.train)
            in_thread(lambda: build(tmp_path / "third"))
            in_thread(lambda: other.evaluate("val"))
            if step.index == 1:
                break

    assert codes == ["runs-in-two-threads"] * 6
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_run_opened_beside_another_in_one_thread_and_one_after_it_in_another_thread_are_taken(
    tmp_path,
):
    alone = build(tmp_path / "alone")
    alone.train()
    trained: list[sf.Run] = []

    def train() -> None:
        trained.append(build(tmp_path / "thread"))
        trained[0].train()

    with build(tmp_path / "outer") as outer:
        inner = build(tmp_path / "inner")
        for step in outer:
            if step.index == 0:
                inner.train()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

    for run in [outer, inner, *trained]:
        assert_same_weights(run, alone)


@pytest.mark.parametrize(
    ("decay", "sizes"),
    [("matrices", "0.05 for 176 parameters and 0 for 51"), ("all", "0.05 for 227 parameters;")],
)
def test_the_header_says_what_decays_and_what_limits_the_gradient(
    decay: Any, sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = sf.optim.adamw(1e-2, weight_decay=0.05, decay=decay)
    build(None, optimizer=optimizer, clip="value 0.5", console=True, length="2 steps").train()

    printed = " ".join(capsys.readouterr().out.split())
    assert f"AdamW, weight decay {sizes}" in printed
    assert "clip value 0.5" in printed


@pytest.mark.parametrize(("before", "after"), [("matrices", "all"), ("all", "matrices")])
def test_a_resume_with_another_choice_of_what_decays_is_refused(
    before: Any, after: Any, tmp_path: Path
) -> None:
    def optimizer(decay: Any) -> Any:
        return sf.optim.adamw(1e-2, weight_decay=0.05, decay=decay)

    build(tmp_path, optimizer=optimizer(before), stop_after="2 steps").train()
    with refused_change("optimizer.decay"):
        build(tmp_path, optimizer=optimizer(after)).train()


def test_the_header_has_the_decay_of_a_group_without_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def optimizer(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*groups, {"params": [], "weight_decay": 0.25}], lr=1e-2)

    build(tmp_path, optimizer=optimizer, console=True, stop_after="1 steps").train()

    printed = " ".join(capsys.readouterr().out.split())
    assert "0.25 for 0 parameters" in printed


def test_a_run_killed_before_its_first_save_says_that_it_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> str:
        """Open the run, and return what it prints of its plan."""
        with small_runs.build(tmp_path / "run", console=True):
            pass
        header = " ".join(capsys.readouterr().out.split())
        return header.partition(" plan ")[2].partition(" update ")[0]

    first = start()
    second = start()

    assert numbers_in(first)[-1] == numbers_in(second)[-1] == 0
    assert first != second  # which resumes


def test_a_save_that_takes_longer_than_a_step_holds_the_state_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(disk: Disk, handle: int, data: memoryview, append: Any = Disk.append) -> None:
        time.sleep(0.02)
        append(disk, handle, data)

    monkeypatch.setattr(Disk, "append", slow)
    states: dict[int, Any] = {}
    run = sf.Run(
        model=lambda: nn.Linear(600, 600),  # tensors below a megabyte are copied once more
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_data=(torch.randn(32, 600), torch.randn(32, 600)),
        batch_size=8,
        length="4 steps",
        optimizer=sf.optim.adamw(lr=1e-2),
        save_every="1 steps",
        keep_last=9,
        check_state=False,
        run_dir=tmp_path,
    )
    with run:
        for step in run:
            states[step.index + 1] = run.parts.packed().files

    assert run.parts.checkpointing is not None
    assert not run.parts.checkpointing.memory.lent  # the run is over
    for done, state in states.items():
        saved = Store(tmp_path / "checkpoints").at(done)
        for file in ("model", "optimizer"):
            assert state[file]
            for name, tensor in state[file].items():
                assert torch.equal(saved.tensors(file)[name], tensor), name


def test_a_kill_before_the_look_at_the_data_leaves_it_to_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt  # step 0 is saved

    with monkeypatch.context() as patched:
        patched.setattr("surefoot.run.after.look_at_data", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "run").train()
    assert Store(tmp_path / "run" / "checkpoints").steps() == [0]

    for stop in ("4 steps", None):  # a later session does not look again
        build(tmp_path / "run", stop_after=stop).train()

    (check,) = records_of_kind(tmp_path / "run", "data_check")
    assert check["step"] == 0


def test_a_kill_after_the_last_save_leaves_nothing_behind(tmp_path: Path) -> None:
    build(tmp_path / "run").train()
    checkpoints = tmp_path / "run" / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    shutil.copytree(checkpoints / "step-00000000", checkpoints / ".deleted-step-00000004")

    build(tmp_path / "run").train()  # finished: no save follows

    assert sorted(path.name for path in checkpoints.iterdir()) == before
