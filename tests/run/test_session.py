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
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from refused import refused, refused_change
from stated import numbers_in
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.data.order import Order
from surefoot.errors import Setting
from surefoot.run.components import RunComponents
from surefoot.tracking.jsonl import records
from surefoot.tracking.record import OWN
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
    return {
        file.name: sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")
    } | {"step": newest.name}


def logged(run_dir: Path) -> list[Any]:
    """All losses and scores. In a loop of one's own a step's loss is written after its scores,
    since values may be added.
    """
    values = {"train": "loss", "eval": "val/loss"}
    found = [line for line in records(run_dir / "metrics.jsonl") if line["kind"] in values]
    return sorted((line["step"], line["kind"], line[values[line["kind"]]]) for line in found)


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], list[Any]]:
    """What an uninterrupted run leaves."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build(run_dir).train()
    return saved(run_dir), logged(run_dir)


def test_a_run_that_trains_by_itself_spends_no_time_in_code_of_its_users(tmp_path: Path) -> None:
    build(tmp_path / "run").train()
    assert {
        line["user_s"]
        for line in records(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "train"
    } == {0.0}


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


# after 7 steps nothing is due; after 8 a checkpoint, 9 a record, 15 a record and scores; 16 is the
# end
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
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


@pytest.mark.fast("6", "15")
@pytest.mark.parametrize("stop", [STOP, 7, 8, 14, 15])
def test_break_after_an_update_of_ones_own_counts_it(stop: int, whole: Any, tmp_path: Path) -> None:
    make_steps(build(tmp_path / "run"), end=lambda step: step.index == stop)
    assert saved(tmp_path / "run")["step"] == f"step-{stop + 1:08d}"
    make_steps(build(tmp_path / "run"))
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


@pytest.mark.fast("8")
@pytest.mark.parametrize("stop", [STOP, 8, 14])
def test_break_out_of_a_loop_over_a_variable_is_the_same(
    stop: int, whole: Any, tmp_path: Path
) -> None:
    """The generator lives on, as in a bar of progress around it."""
    with build(tmp_path / "run") as run:
        held = run.steps()
        for step in held:
            sf.forward_backward(step)
            sf.update(step)
            if step.index == stop:
                break
    build(tmp_path / "run").train()
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


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
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


def test_break_before_the_update_leaves_nothing_of_the_step(whole: Any, tmp_path: Path) -> None:
    """Its passes have changed batch statistics and gradients, which are put back."""
    make_steps(build(tmp_path / "run"), middle=lambda step: step.index == STOP)
    assert saved(tmp_path / "run")["step"] == f"step-{STOP:08d}"
    make_steps(build(tmp_path / "run"))
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


def test_in_one_process_a_run_goes_on_after_a_half_made_step() -> None:
    broken, plain = build(None), build(None)
    make_steps(broken, middle=lambda step: step.index == STOP)
    make_steps(broken)
    make_steps(plain)
    weights, expected = (run.state.models["model"].state_dict() for run in (broken, plain))
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


@pytest.mark.fast("6-after the update", "8-between steps")
@pytest.mark.parametrize("opened", [False, True], ids=["between steps", "after the update"])
@pytest.mark.parametrize("stop", [STOP, 8])  # 8: a record is due after it
def test_a_save_asked_for_in_the_body_is_of_the_whole_step(
    opened: bool, stop: int, whole: Any, tmp_path: Path
) -> None:
    """Saved at once, the step would be made again, or its record lost, by a resume after a
    crash.
    """
    run = build(tmp_path / "run", save_every="100 steps")
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in run.steps() if opened else run:
            if opened:
                sf.forward_backward(step)
                sf.update(step)
            if step.index == stop:
                run.save()
            if step.index == stop + 1:
                raise MishapError
    assert saved(tmp_path / "run")["step"] == f"step-{stop + 1:08d}"
    build(tmp_path / "run").train()
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


def test_what_the_body_changes_after_asking_for_a_save_is_saved_too(tmp_path: Path) -> None:
    with build(tmp_path / "run") as run:
        held = run.register_state("held", {"number": 7})
        for step in run:
            if step.index == STOP:
                run.save()
                held["number"] = 107
                break
    again = build(tmp_path / "run")
    with again:
        assert again.register_state("held", {"number": 0}) == {"number": 107}


def test_whoever_leaves_in_the_body_is_told_what_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), build(tmp_path / "run", console=True) as run:  # noqa: PT012
        for step in run:
            if step.index == STOP:
                sys.exit(0)
    said = capsys.readouterr().out
    stated = [numbers_in(line)[:1] for line in said.splitlines()[-2:]]
    assert stated == [[STOP], [5]]  # where it ended, and the newest checkpoint


# --- an exception ---------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True], ids=["between steps", "before the update"])
def test_after_an_exception_the_newest_checkpoint_stands_and_a_resume_ends_bit_equal(
    opened: bool, whole: Any, tmp_path: Path
) -> None:
    run = build(tmp_path / "run")
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in run.steps() if opened else run:
            if opened:
                sf.forward_backward(step)
            if step.index == STOP:
                raise MishapError
            if opened:
                sf.update(step)
    assert saved(tmp_path / "run")["step"] == "step-00000005"  # a new best score
    build(tmp_path / "run").train()
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


@pytest.mark.parametrize("opened", [False, True], ids=["between steps", "before the update"])
def test_a_crash_is_filed_under_the_step_whose_body_it_was(opened: bool, tmp_path: Path) -> None:
    run = build(tmp_path / "run")
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in run.steps() if opened else run:
            if step.index == STOP:
                raise MishapError
            if opened:
                sf.forward_backward(step)
                sf.update(step)
    (file,) = (tmp_path / "run" / "crash").iterdir()
    report = json.loads(file.read_text())
    ids = Order(0, samples=small_runs.SAMPLES, batch_size=8).ids(STOP)[0].tolist()
    assert file.name == f"step-{STOP:08d}.json"
    assert (report["step"], [sample for part in report["samples"] for sample in part]) == (
        STOP,
        ids,
    )
    assert numbers_in(report["how_to_go_on"])[:1] == [5]  # the newest checkpoint


def test_after_an_exception_it_is_said_what_stands_and_where_the_report_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(tmp_path / "run", console=True)
    with pytest.raises(MishapError), run:  # noqa: PT012
        for step in run:
            if step.index == STOP:
                raise MishapError
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

    broken, plain = build(None, loss=failing), build(None)
    with pytest.raises(MishapError):
        broken.train()
    broken.train()
    plain.train()
    weights, expected = (run.state.models["model"].state_dict() for run in (broken, plain))
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


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
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole


# --- gradients nobody used ------------------------------------------------------------------------


def test_a_step_that_ends_with_unused_gradients_is_refused() -> None:
    run = build(None)
    with (
        refused("gradients-unused", step=0),
        run,
    ):
        for step in run.steps():
            sf.forward_backward(step)


def test_gradients_that_were_there_before_the_run_do_not_reach_its_first_step() -> None:
    def prepared(gradient: float | None) -> nn.Module:
        torch.manual_seed(0)
        model = small_runs.Net()
        for parameter in model.parameters():
            parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
        return model

    stale, fresh = (build(None, model=prepared(gradient), ema=None) for gradient in (1e3, None))
    stale.train()
    fresh.train()
    weights, expected = (run.state.models["model"].state_dict() for run in (stale, fresh))
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_a_pass_made_only_to_look_changes_no_batch_statistic() -> None:
    """A probe: forward and backward, the gradients let go, no update."""

    def body(step: sf.Step, probing: bool) -> None:
        if step.index != STOP:
            sf.forward_backward(step)
            sf.update(step)
        elif probing:
            sf.forward_backward(step)
            for parameter in step.state.models["model"].parameters():
                parameter.grad = None

    weights = []
    for probing in (False, True):
        with build(None) as run:
            for step in run.steps():
                body(step, probing)
        weights.append(run.state.models["model"].state_dict())
    assert [
        name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])
    ] == []


# --- names in a record ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "step", "kind", "lr", "saving_s"])
def test_a_users_value_cannot_take_the_name_of_a_records_own(name: str) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return small_runs.loss(model, batch), {name: sf.Mean(1.0, 1)}

    run = build(None)
    with refused("logged-name-reserved", name=name), run:
        for step in run:
            step.log(**{name: 1.0})
    with refused("logged-name-reserved", name=name):
        build(None, loss=loss).train()


def test_a_users_value_cannot_take_the_name_of_a_splits_score() -> None:
    run = build(None, splits={"val": sf.Split(small_runs.Augmented())}, log_every="1 steps")
    with refused("logged-name-of-a-split", name="val/loss", split="val"), run:
        for step in run:
            step.log(**{"val/loss": 1.0})
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
    lines = [
        line
        for line in records(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] in ("train", "eval")
    ]
    names = {name for line in lines for name in line if "/" not in name}
    assert "loss_applied" in names
    assert names - OWN == set()


def test_values_of_the_users_own_are_shown_on_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with build(None, console=True, length="3 steps") as run:
        for step in run:
            step.log(warmth=step.index)
    line = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("step=3/3 train/loss")
    )
    assert " warmth=1 " in line


# --- how it is told -------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "told"), [("mine.py", False), ("/usr/bin/surefoot", True)])
def test_only_a_run_of_the_command_line_is_told_how_to_score_it(
    command: str,
    told: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [command])
    build(tmp_path / "run", length="2 steps", console=True).train()
    assert ("surefoot evaluate" in capsys.readouterr().out) == told


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
    assert (saved(tmp_path / "run"), logged(tmp_path / "run")) == whole
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
    said = capsys.readouterr().out
    stated = [numbers_in(line) for line in said.splitlines()]
    assert [STEPS] in stated  # the evaluation that a resume makes
    assert any("Ctrl-C" in line and numbers_in(line) == [STEPS] * 2 for line in said.splitlines())
    assert "finished" not in said
    assert samples == []
    again = build(tmp_path / "run", sample_fn=sample, console=True)
    again.train()
    said = capsys.readouterr().out
    assert f"finished: {STEPS} steps" in said
    assert samples == [STEPS]
    build(tmp_path / "run", sample_fn=sample, console=True).train()
    (line,) = capsys.readouterr().out.splitlines()  # that it is finished
    assert str(tmp_path / "run") in line
    assert [step for step, _ in scored(tmp_path / "run")] == [5, 10, 15, STEPS]


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
    assert [step for step, _ in scored(tmp_path / "run")] == [5]


def test_with_code_of_ones_own_between_the_steps_an_evaluation_is_finished(tmp_path: Path) -> None:
    """That code belongs to the step, and a resume could not run it."""
    data = small_runs.Augmented()
    bodies: list[int] = []
    asked: list[int] = []

    def accuracy(outputs: Any, targets: Any) -> sf.Mean:
        if run.state.step == 5 and not asked:
            asked.append(5)
            signal.raise_signal(signal.SIGINT)
        return sf.metrics.accuracy(outputs, targets)

    run = build(
        tmp_path / "run", splits={"val": sf.Split((data.inputs, data.labels), metrics=accuracy)}
    )
    with pytest.raises(SystemExit), run:  # noqa: PT012
        for step in run:
            bodies.append(step.index)
    assert bodies[-1] == 4
    assert [step for step, _ in scored(tmp_path / "run")] == [5]


def test_an_error_that_follows_a_signal_is_reported_and_the_status_is_that_of_the_signal(
    tmp_path: Path,
) -> None:
    """A compiler that was told to stop too fails, which is no mistake of anybody's; another error
    is.
    """

    class StoppedError(MishapError):
        __module__ = "torch._inductor.exc"

    def loss(model: nn.Module, batch: Any) -> Any:
        if run.state.step == STOP:
            signal.raise_signal(signal.SIGTERM)
            raise kind
        return small_runs.loss(model, batch)

    kind: type[Exception] = StoppedError
    run = build(tmp_path / "run", loss=loss)
    with pytest.raises(SystemExit) as end:
        run.train()
    assert end.value.code == 143
    assert "StoppedError" in next((tmp_path / "run" / "crash").iterdir()).read_text()
    kind = MishapError
    run = build(tmp_path / "run", loss=loss)
    with pytest.raises(MishapError):
        run.train()


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
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl: No space left on device") == 1
    steps = [
        line["step"]
        for line in records(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "train"
    ]
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
    flushed: list[Path] = []
    real = Disk.flush_directory
    monkeypatch.setattr(
        Disk,
        "flush_directory",
        lambda disk, path: (flushed.append(Path(path)), real(disk, path))[1],
    )
    build(tmp_path / "deep" / "down" / "run", length="1 steps").train()
    assert {tmp_path, tmp_path / "deep", tmp_path / "deep" / "down"} <= set(flushed)


def test_a_checkpoint_that_lacks_a_part_of_its_state_is_refused_by_its_name(tmp_path: Path) -> None:
    build(tmp_path / "run", length="4 steps").train()
    store = Store(tmp_path / "run" / "checkpoints")
    found = store.newest_intact()
    assert found is not None
    whole = found[0]
    store.save(
        replace(
            whole,
            step=5,
            state={name: held for name, held in whole.state.items() if name != "machine"},
        )
    )
    with refused("state-of-another-version", sf.CheckpointError, step=5):
        build(tmp_path / "run", length="9 steps").train()


def scored(run_dir: Path) -> list[Any]:
    return [
        (line["step"], line["val/loss"])
        for line in records(run_dir / "metrics.jsonl")
        if line["kind"] == "eval"
    ]


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
        assert run.session.journal.metrics is not None
        fileno = run.session.journal.metrics.appended.file.fileno()
        opened = run.session.journal.metrics.appended.file
        run.session.journal.metrics.appended.file = Full()  # type: ignore[assignment]
        for _ in run:
            pass
    opened.close()
    assert re.search(
        r"WARNING: .* metrics\.jsonl: No space left on device", capsys.readouterr().out
    )


def test_time_spent_on_logging_before_an_evaluation_is_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the host waits for the steps that the device still has to make."""
    from surefoot.train.meter import Meter

    real = Meter.read
    clock = LogicalClock()
    monkeypatch.setattr(
        Meter, "read", lambda meter, **more: (clock.advance(1.0), real(meter, **more))[1]
    )
    run = build(tmp_path / "run", length="5 steps", log_every="5 steps")
    run.parts.run_state.clock.now = clock
    run.train()
    (record,) = [
        line for line in records(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"
    ]
    assert (record["training_s"], record["evaluating_s"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"parallel": "fsdp"},
            "note: trained on 2 ranks (fsdp), now on 1 rank (none): ",
        ),
        ({"parallel": "ddp"}, None),
        (
            {"ranks": 1, "shards": 1, "parallel": "none", "exact": False},
            "note: trained on 1 rank (none), now on 1 rank (none): ",
        ),
        (
            {"parallel": "ddp", "exact": False},
            "note: trained on 2 ranks (ddp), now on 1 rank (none): ",
        ),
    ],
)
def test_other_ranks_are_told_in_one_line_if_bits_depend_on_them(
    changes: dict[str, Any], note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "run", length="4 steps", stop_after="2 steps").train()
    store = Store(tmp_path / "run" / "checkpoints")
    found = store.at(2)
    machine = found.state["machine"] | {"ranks": 2, "shards": 2} | changes
    store.save(replace(found, state={**found.state, "machine": machine}))
    build(tmp_path / "run", length="4 steps", console=True).train()
    lines = [line for line in capsys.readouterr().out.splitlines() if " now on 1 rank " in line]
    assert len(lines) == bool(note)
    assert all(line.startswith(str(note)) for line in lines)


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
        for ours, reference in zip(run.state.parameters, alone.state.parameters, strict=True):
            assert torch.equal(ours, reference)


@pytest.mark.parametrize(
    ("decay", "sizes"),
    [("matrices", "0.05 for 176 parameters and 0 for 51"), ("all", "0.05 for 227 parameters;")],
)
def test_the_header_says_what_decays_and_what_limits_the_gradient(
    decay: Any, sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(decay: Any, **changes: Any) -> sf.Run:
        optimizer = sf.optim.adamw(1e-2, weight_decay=0.05, decay=decay)
        return build(
            tmp_path,
            optimizer=optimizer,
            clip="value 0.5",
            console=True,
            stop_after="2 steps",
            **changes,
        )

    run(decay).train()
    printed = " ".join(capsys.readouterr().out.split())
    assert f"AdamW, weight decay {sizes}" in printed
    assert "clip value 0.5" in printed
    with refused_change("optimizer.decay"):
        run("all" if decay == "matrices" else "matrices").train()


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
    starts = []
    for _ in range(2):
        with small_runs.build(tmp_path / "run", console=True):
            pass
        starts.append(" ".join(capsys.readouterr().out.split()))
    first, second = (start.partition(" plan ")[2].partition(" update ")[0] for start in starts)
    assert (numbers_in(first)[-1], numbers_in(second)[-1]) == (0, 0)
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
            assert all(
                torch.equal(saved.tensors(file)[name], each) for name, each in state[file].items()
            )


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
    checks = [
        record["step"]
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "data_check"
    ]
    assert checks == [0]


def test_a_kill_after_the_last_save_leaves_nothing_behind(tmp_path: Path) -> None:
    build(tmp_path / "run").train()
    checkpoints = tmp_path / "run" / "checkpoints"
    before = sorted(path.name for path in checkpoints.iterdir())
    shutil.copytree(checkpoints / "step-00000000", checkpoints / ".deleted-step-00000004")
    build(tmp_path / "run").train()  # finished: no save follows
    assert sorted(path.name for path in checkpoints.iterdir()) == before
