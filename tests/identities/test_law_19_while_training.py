"""Law 19: a run whose settings change while it trains is the run that had its journal from the
start.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from identities import changed_runs
from identities.changed_runs import given_the_journal_of, model, same, weights
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.run.run import Run
from surefoot.tools.change.while_training import ask_for_changes, request_half_rates
from surefoot.tracking.change_journal import read_changes
from surefoot.tracking.change_request import REQUEST, request_changes, requested_changes
from surefoot.train.changed_settings import Wish
from waiting import HANG_S, HangLimit


def run_in(run_dir: Path | None, **settings: Any) -> Run:
    return changed_runs.run_in(run_dir, **({"length": "20 steps"} | settings))


def given_journal_of(run_dir: Path, **settings: Any) -> list[Tensor]:
    """Return the weights of a run that has the journal of another from the start."""
    given = given_the_journal_of(run_dir, run_dir.with_name("given"))
    run = run_in(given, **settings)
    run.train()
    return weights(run)


# --- in the body of a loop ------------------------------------------------------------------------


def train_with_changes(run: Run, *, leave_at: int | None = None) -> list[int]:
    """Train with a body that changes two settings; return the steps of the loop."""
    steps = []
    with run:
        for step in run:
            steps.append(step.index)
            if step.index == 4:
                run.change("optimizer.lr", 1e-3, because="a test")
            if step.index == 9:
                run.change("batch_size", 12)
            if step.index == leave_at:
                raise LeftError
    return steps


class LeftError(Exception):
    """What ends a body as a crash does."""


def test_a_change_in_the_body_holds_from_the_next_step_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert train_with_changes(run) == list(range(20))
    first, second = read_changes(tmp_path / "run")
    assert (first.from_step, first.setting, first.now) == (5, "optimizer.lr", 1e-3)
    assert (second.from_step, second.setting, second.now) == (10, "batch_size", 12)
    assert first.because == "a test"
    rates = {record["step"]: record["lr"] for record in sf.load(tmp_path / "run").records("train")}
    assert list(rates) == list(range(1, 21))
    assert rates[6] < rates[5] / 5
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_change_in_an_own_body_holds_from_the_next_step_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
            sf.update(step)
    (change,) = read_changes(tmp_path / "run")
    assert change.from_step == 5
    assert run.state.step == 20
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_change_before_the_loop_holds_from_its_first_step_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with run:
        run.change("optimizer.lr", 1e-3)
        steps = [step.index for step in run]
    (change,) = read_changes(tmp_path / "run")
    assert change.from_step == 0
    assert steps == list(range(20))
    assert same(weights(run), given_journal_of(tmp_path / "run"))


@pytest.mark.parametrize("leave_at", [3, 4, 5, 9, 10, 15])
def test_a_body_that_is_repeated_after_a_crash_changes_nothing_more(
    tmp_path: Path, leave_at: int
) -> None:
    with pytest.raises(LeftError):
        train_with_changes(run_in(tmp_path / "run"), leave_at=leave_at)
    run = run_in(tmp_path / "run")
    train_with_changes(run)
    assert [change.from_step for change in read_changes(tmp_path / "run")] == [5, 10]
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_repeated_body_that_wants_another_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LeftError):
        train_with_changes(run_in(tmp_path), leave_at=4)
    run = run_in(tmp_path)
    with refused("changed-otherwise-already", setting="optimizer.lr", step=5), run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 2e-3)


def test_a_body_that_is_repeated_before_a_later_change_changes_nothing_more(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(LeftError):
        train_with_two_rates(run_in(run_dir), leave_at=14)
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        if checkpoint.name != "step-00000000":
            shutil.rmtree(checkpoint)
    run = run_in(run_dir)
    train_with_two_rates(run)
    assert [change.from_step for change in read_changes(run_dir)] == [5, 10]
    assert same(weights(run), given_journal_of(run_dir))


def train_with_two_rates(run: Run, *, leave_at: int | None = None) -> None:
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
            if step.index == 9:
                run.change("optimizer.lr", 1e-4)
            if step.index == leave_at:
                raise LeftError


def test_registered_state_and_the_factor_of_a_body_go_on_across_a_change(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    seen = run.register_state("seen", {"steps": 0})
    with run:
        for step in run:
            seen["steps"] += 1
            if step.index == 2:
                for group in run.state.optimizers["model"].optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
            if step.index == 4:
                run.change("batch_size", 12)
    assert seen["steps"] == 20


def test_a_run_of_a_model_that_was_passed_ends_at_its_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = model()
    run = run_in(tmp_path, model=given)
    with run:
        steps = []
        for step in run:
            steps.append(step.index)
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
    assert steps == [0, 1, 2, 3, 4]
    run_in(tmp_path, model=given).train()
    assert sf.load(tmp_path).step == 20


def test_a_change_without_a_directory_or_an_open_run_is_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with refused("run-not-open"):
        run.change("optimizer.lr", 1e-3)
    without_directory = run_in(None)
    with refused("run-without-directory"), without_directory:
        without_directory.change("optimizer.lr", 1e-3)


def test_a_longer_length_in_the_last_body_goes_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with run:
        for step in run:
            if step.index == 19:
                run.change("length", "25 steps")
    assert run.state.step == 25
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_directory_that_is_deleted_meanwhile_gets_its_journal_back(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
            if step.index == 9:
                shutil.rmtree(tmp_path / "run")
    (change,) = read_changes(tmp_path / "run")
    assert change.from_step == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_run_is_built_again_is_not_lost(
    tmp_path: Path, number: signal.Signals
) -> None:
    built: list[nn.Module] = []

    def signaled_model() -> nn.Module:
        built.append(model())
        if len(built) == 2:
            os.kill(os.getpid(), number)
        return built[-1]

    run = run_in(tmp_path / "run", model=signaled_model)
    with suppress(SystemExit), run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
    assert run.state.step == (5 if number == signal.SIGTERM else 20)
    again = run_in(tmp_path / "run")
    again.train()
    assert same(weights(again), given_journal_of(tmp_path / "run"))


# --- at the request of another process ------------------------------------------------------------


def wish(setting: str, value: Any) -> dict[str, Any]:
    return {"setting": setting, "value": value, "because": "a request"}


def test_a_request_is_taken_at_the_next_record(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with run:
        for step in run:
            if step.index == 6:
                request_changes(tmp_path / "run", [wish("optimizer.lr", 1e-3)])
    (change,) = read_changes(tmp_path / "run")
    assert change.from_step == 7
    assert change.because == "a request"
    assert not (tmp_path / "run" / REQUEST).exists()
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_request_while_the_run_is_built_again_is_taken_at_the_next_record(tmp_path: Path) -> None:
    built: list[nn.Module] = []

    def build_and_request() -> nn.Module:
        built.append(model())
        if len(built) == 2:
            request_changes(tmp_path / "run", [wish("clip", "norm 0.1")])
        return built[-1]

    run = run_in(tmp_path / "run", model=build_and_request)
    with run:
        for step in run:
            if step.index == 4:
                run.change("optimizer.lr", 1e-3)
    assert run.state.step == 20
    changes = [(change.from_step, change.setting) for change in read_changes(tmp_path / "run")]
    assert changes == [(5, "optimizer.lr"), (6, "clip")]
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_a_request_that_cannot_be_is_taken_away_and_the_run_goes_on(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with run:
        for step in run:
            if step.index == 6:
                request_changes(tmp_path, [wish("optimizer.momentum", 1e-3)])
    assert run.state.step == 20
    assert read_changes(tmp_path) == ()
    assert not (tmp_path / REQUEST).exists()


def test_a_second_request_waits_for_the_first(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="1 steps").train()
    request_changes(tmp_path, [wish("optimizer.lr", 1e-3)])
    with refused("change-requested-already"):
        request_changes(tmp_path, [wish("optimizer.lr", 1e-4)])


def test_a_request_that_waits_when_the_loop_is_left_holds_when_the_run_goes_on(
    tmp_path: Path,
) -> None:
    run = run_in(tmp_path / "run", log_every="5 steps")
    with run:
        for step in run:
            if step.index == 6:
                request_changes(tmp_path / "run", [wish("optimizer.lr", 1e-3)])
                break
    (change,) = read_changes(tmp_path / "run")
    assert change.from_step == 7
    assert not (tmp_path / "run" / REQUEST).exists()
    run = run_in(tmp_path / "run", log_every="5 steps")
    run.train()
    assert same(weights(run), given_journal_of(tmp_path / "run"))


def test_the_button_of_the_page_asks_for_half_of_the_rates(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps", optimizer=sf.optim.muon(lr=1e-2, adamw_lr=3e-3)).train()
    request_half_rates(tmp_path)
    asked = {each["setting"]: each["value"] for each in requested_changes(tmp_path)}
    assert asked == pytest.approx({"optimizer.lr": 5e-3, "optimizer.adamw_lr": 1.5e-3})


def test_a_button_asks_nothing_of_a_model_that_cannot_be_built_again(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps", model=model()).train()
    with refused("change-of-model-in-training"):
        request_half_rates(tmp_path)
    assert requested_changes(tmp_path) == []


@forks
def test_another_process_asks_and_is_told_the_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = run_in(run_dir)
    with run:
        for step in run:
            if step.index == 5:
                process = ask_in_another_process(run_dir)
                wait_for_request(run_dir)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 6
    (change,) = read_changes(run_dir)
    assert change.from_step == 6
    assert same(weights(run), given_journal_of(run_dir))


def ask_in_another_process(run_dir: Path) -> int:
    """Ask for a change in another process; it leaves with the step of the answer."""
    process = os.fork()
    if process == 0:
        try:
            (change,) = ask_for_changes(run_dir, [Wish("optimizer.lr", 1e-3)])
        except BaseException:
            traceback.print_exc()
            os._exit(99)
        os._exit(change.from_step)
    return process


def wait_for_request(run_dir: Path) -> None:
    limit = HangLimit(HANG_S)
    while not (run_dir / REQUEST).exists():
        assert not limit.is_over
        time.sleep(0.01)


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_change_at_the_same_step(tmp_path: Path, parallel: str) -> None:
    def train(_: int) -> None:
        run = run_in(tmp_path / "run", parallel=parallel)
        steps = []
        with run:
            for step in run:
                steps.append(step.index)
                if step.index == 4:
                    run.change("optimizer.lr", 1e-3)
                if step.index == 9 and run.rank == 0:
                    request_changes(tmp_path / "run", [wish("batch_size", 12)])
        assert steps == list(range(20))

    def train_given(_: int) -> None:
        run_in(tmp_path / "given", parallel=parallel).train()

    assert on_ranks(2, train) == [0, 0]
    first, second = read_changes(tmp_path / "run")
    assert first.from_step == 5
    assert second.from_step in (10, 11)
    (tmp_path / "given").mkdir()
    shutil.copy(tmp_path / "run" / "changes.jsonl", tmp_path / "given")
    assert on_ranks(2, train_given) == [0, 0]
    one = sf.load(tmp_path / "run").load_model(model)
    other = sf.load(tmp_path / "given").load_model(model)
    assert same(list(one.parameters()), list(other.parameters()))


@forks
def test_a_request_in_the_last_step_of_two_ranks_holds_when_the_run_goes_on(tmp_path: Path) -> None:
    def train(_: int) -> None:
        run = run_in(tmp_path / "run", parallel="ddp")
        with run:
            for step in run:
                if step.index == 19 and run.rank == 0:
                    request_changes(tmp_path / "run", [wish("length", "25 steps")])
        assert run.state.step == 20

    assert on_ranks(2, train) == [0, 0]
    (change,) = read_changes(tmp_path / "run")
    assert (change.from_step, change.setting) == (20, "length")
    assert not (tmp_path / "run" / REQUEST).exists()
