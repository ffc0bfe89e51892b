"""Law 19 for runs that go back to an earlier step: they end as the run that was given the journal in
force from the start, whatever was killed on the way.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities.changed_runs import assert_same_end, given_the_journal_of, run_in
from journals import in_force
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.config.setting_change import SettingChange, going_back, in_effect, left_by
from surefoot.tracking.change_journal import append_changes, read_changes
from surefoot.tracking.run_reader import newest_state, read_beginning

BAD = 10  # the step of a change that was no good
STOPPED = 16
LAST = 23
SAVED: dict[str, Any] = {"save_every": "4 steps", "keep_last": 2}
OTHERWISE: dict[str, Any] = {"optimizer.lr": 5e-3, "clip": "off"}


def left_run(run_dir: Path, **settings: Any) -> Path:
    """Return a run with a bad change from step 10 on, that was stopped at step 16."""
    run_in(run_dir, stop_after=f"{BAD} steps", **SAVED, **settings).train()
    sf.load(run_dir).change("a try", **{"optimizer.lr": 0.5, "batch_size": 16})
    run_in(run_dir, stop_after=f"{STOPPED} steps", **SAVED, **settings).train()
    return run_dir


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return left_run(tmp_path_factory.mktemp("left") / "run")


def copied(run: Path, to: Path) -> Path:
    return Path(shutil.copytree(run, to))


def given_what_is_in_force(run: Path, to: Path, **settings: Any) -> Path:
    """Return a run from the start with the changes of another that are in force, and no others."""
    to.mkdir()
    append_changes(to, in_force(read_changes(run)))
    run_in(to, **SAVED, **settings).train()
    return to


def course(run: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and rate of the training records."""
    records = sf.load(run).records("train")
    return [(record["step"], record["loss"], record["lr"]) for record in records]


def steps_in(checkpoints: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [BAD, 9, 3, 0, 14])
def test_a_run_that_went_back_ends_as_one_given_what_is_in_force(
    step: int, left: Path, tmp_path: Path
) -> None:
    run = copied(left, tmp_path / "run")
    sf.load(run).go_back(step, "no good", **OTHERWISE)
    run_in(run, **SAVED).train()

    last = sf.load(run).step
    given = given_what_is_in_force(run, tmp_path / "given")
    assert_same_end(given, run, step=last)
    assert course(run) == course(given)

    with_its_journal = given_the_journal_of(run, tmp_path / "whole")
    run_in(with_its_journal, **SAVED).train()
    assert_same_end(with_its_journal, run, step=last)
    assert course(run) == course(with_its_journal)
    assert not (with_its_journal / "branches").exists()


@pytest.mark.parametrize("begins", [9, 13, 15])
@pytest.mark.parametrize("twice", [False, True])
def test_a_ramp_from_the_start_is_as_it_was(begins: int, twice: bool, tmp_path: Path) -> None:
    ramp: dict[str, Any] = {"clip": f"norm 1.0, value 0.1 from {begins} steps"}
    run = tmp_path / "run"
    run_in(run, stop_after="12 steps", **SAVED, **ramp).train()
    sf.load(run).change("a try", **{"optimizer.lr": 0.5, "clip": "off"})
    run_in(run, stop_after="16 steps", **SAVED, **ramp).train()
    if twice:
        sf.load(run).go_back(14)
        run_in(run, stop_after="15 steps", **SAVED, **ramp).train()
    sf.load(run).go_back(12, ema=0.5)
    run_in(run, **SAVED, **ramp).train()

    values = [sf.load(run).settings_at(step)["clip"] for step in range(LAST)]
    assert values == ["norm 1.0"] * begins + ["value 0.1"] * (LAST - begins)
    given = given_what_is_in_force(run, tmp_path / "given")
    assert_same_end(given, run, step=LAST)
    assert course(run) == course(given)


def test_going_back_twice_ends_as_one_given_what_is_in_force(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    sf.load(run).go_back(14, "first", **{"optimizer.lr": 0.1})
    run_in(run, stop_after="15 steps", **SAVED).train()
    sf.load(run).go_back(12, "second", ema=0.5)
    run_in(run, **SAVED).train()

    given = given_what_is_in_force(run, tmp_path / "given")
    assert_same_end(given, run, step=sf.load(run).step)
    assert course(run) == course(given)


def test_going_back_without_another_setting_repeats_the_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_in(run, **SAVED).train()
    before = copied(run, tmp_path / "before")
    sf.load(run).go_back(13)
    run_in(run, **SAVED).train()
    assert_same_end(before, run, step=LAST)
    assert course(run) == course(before)


@pytest.mark.parametrize("stopped_at", range(BAD, LAST))
def test_a_stop_after_every_step_of_the_new_branch_changes_nothing(
    stopped_at: int, left: Path, tmp_path: Path
) -> None:
    whole = copied(left, tmp_path / "whole")
    sf.load(whole).go_back(14, **OTHERWISE)
    run_in(whole, **SAVED).train()

    stopped = copied(left, tmp_path / "stopped")
    sf.load(stopped).go_back(14, **OTHERWISE)
    run_in(stopped, stop_after=f"{stopped_at} steps", **SAVED).train()
    run_in(stopped, **SAVED).train()
    assert_same_end(whole, stopped, step=sf.load(whole).step)
    assert course(whole) == course(stopped)


SPLIT: dict[str, Any] = {
    "best": "min val/loss",
    "evaluate_every": "2 steps",
    "early_stopping": sf.EarlyStopping("min val/loss", patience=50),
    "plateau": sf.ReduceLROnPlateau("min val/loss", patience=2),
}


def with_a_split() -> dict[str, Any]:
    import torch

    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return {"splits": {"val": sf.Split((inputs, inputs.sum(1, keepdim=True)))}, **SPLIT}


def test_best_patience_and_plateau_are_those_of_the_step(tmp_path: Path) -> None:
    run = left_run(tmp_path / "run", **with_a_split())
    sf.load(run).go_back(14, **OTHERWISE)
    run_in(run, **SAVED, **with_a_split()).train()
    given = given_what_is_in_force(run, tmp_path / "given", **with_a_split())

    last = sf.load(run).step
    assert_same_end(given, run, step=last)
    state = sf.load(run)
    assert state.records("eval") == sf.load(given).records("eval")
    of_run = saved_state(run, last)
    of_given = saved_state(given, last)
    for name in ("monitor", "stopping", "plateau", "scores", "first_scores"):
        assert getattr(of_run, name) == getattr(of_given, name)


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    worst = with_a_split() | {"best": "max val/loss", "early_stopping": None, "plateau": None}
    settings = {**SAVED, **worst, "text_log": True}
    run = tmp_path / "run"
    run_in(run, stop_after="14 steps", **settings).train()
    best = saved_state(run, 12).best_step
    assert best not in (None, 0, 12)
    name = f"step-{best:08d}"
    shutil.rmtree(run / "checkpoints" / name)
    sf.load(run).go_back(12)
    assert name not in (run / "log.txt").read_text()
    run_in(run, **settings).train()
    assert name in (run / "log.txt").read_text()


def saved_state(run: Path, step: int) -> Any:
    from surefoot.tracking.run_reader import read_state

    return read_state(run, step)


@forks
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_go_back(parallel: str, tmp_path: Path) -> None:
    of_ranks: dict[str, Any] = {"parallel": parallel, "micro_batch_size": 4}
    run = tmp_path / "run"
    on_two_ranks(run, stop_after=f"{BAD} steps", **of_ranks)
    sf.load(run).change(**{"optimizer.lr": 0.5})
    on_two_ranks(run, stop_after=f"{STOPPED} steps", **of_ranks)
    sf.load(run).go_back(14, **OTHERWISE)
    on_two_ranks(run, **of_ranks)

    given = given_the_journal_of(run, tmp_path / "given")
    on_two_ranks(given, **of_ranks)
    assert_same_end(given, run, step=LAST)
    assert course(run) == course(given)


def on_two_ranks(run_dir: Path, **settings: Any) -> None:
    statuses = on_ranks(2, lambda _: run_in(run_dir, **SAVED, **settings).train())
    assert statuses == [0, 0]


# --- kills ----------------------------------------------------------------------------------------

_CHANGING = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


def killed_before(number: int, work: Callable[[], object]) -> bool:
    """Do some work in another process, which is killed before its change number `number` (from 1)
    of a file or directory. Return False if it ended before.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            left = number

            def count(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal left
                opens = event == "open" and isinstance(arguments[2], int)
                writes = opens and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
                if event in _CHANGING or writes:
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            work()
            status = 0
        finally:
            os._exit(status)
    _, how = os.waitpid(child, 0)
    assert how in (0, signal.SIGKILL)
    return how == signal.SIGKILL


def _go_back(run: Path) -> None:
    sf.load(run).go_back(14, "no good", **OTHERWISE)


def _train(run: Path) -> None:
    run_in(run, **SAVED).train()


@forks
@pytest.mark.parametrize("killed", [_go_back, _train])
def test_a_kill_at_any_point_changes_nothing(
    killed: Callable[[Path], None], left: Path, tmp_path: Path
) -> None:
    base = copied(left, tmp_path / "base")
    if killed is _train:  # the line is written, and nothing was moved
        journal = read_changes(base)
        _go_back(base)
        lines = read_changes(base)[len(journal) :]
        shutil.rmtree(base)
        copied(left, base)
        append_changes(base, lines)
    whole = copied(left, tmp_path / "whole")
    _go_back(whole)
    _train(whole)
    last = sf.load(whole).step
    expected = course(whole)

    number = 1
    while True:
        run = copied(base, tmp_path / f"run-{number}")
        was_killed = killed_before(number, lambda run=run: killed(run))  # type: ignore[misc]
        if was_killed:
            if killed is _go_back:
                _go_back(run)  # the command is repeated
            assert len(read_changes(run)) == len(read_changes(whole))
            _train(run)
        else:
            assert number > 10
            break
        assert_same_end(whole, run, step=last)
        assert course(run) == expected
        assert steps_in(run / "checkpoints") == steps_in(whole / "checkpoints")
        shutil.rmtree(run)
        number += 1 if number < 40 else 6  # the moves, then the opening and steps with their saves


def test_what_is_left_counts_no_more_once_the_line_is_written(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    append_changes(run, [going_back(read_changes(run), was=STOPPED, now=BAD, because="")])
    assert read_beginning(run).step == BAD
    assert newest_state(run)[0] == BAD


def test_a_checkpoint_belongs_to_the_branch_of_its_last_line() -> None:
    lr = SettingChange(1, BAD, "optimizer.lr", 0.1, 0.2)
    lines = [lr, SettingChange(2, BAD, "step", STOPPED, BAD)]
    assert left_by({"number": 1}, BAD, lines) == 2  # saved again at the change
    assert left_by(None, BAD + 1, lines) == 2
    assert left_by(None, BAD, lines) is None
    assert left_by({"number": 2}, BAD + 1, lines) is None


# --- what is left, and what is refused ------------------------------------------------------------


def test_the_branch_is_kept_until_the_run_has_passed_it(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    before = course(run)
    saved = [step for step in steps_in(run / "checkpoints") if step > BAD]
    sf.load(run).go_back(BAD, **OTHERWISE)

    number = len(read_changes(left)) + 1
    branch = run / "branches" / str(number)
    assert steps_in(branch / "checkpoints") == saved
    assert STOPPED in saved
    assert steps_in(run / "checkpoints")[-1] == BAD
    assert course(branch) == before
    assert sf.load(branch).settings_at(BAD)["optimizer.lr"] == 0.5

    run_in(run, stop_after=f"{STOPPED - 1} steps", **SAVED).train()
    assert steps_in(branch / "checkpoints") == saved
    run_in(run, **SAVED).train()
    assert not (branch / "checkpoints").exists()
    assert course(branch) == before
    assert BAD in steps_in(run / "checkpoints")


def test_the_settings_are_those_in_force(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    sf.load(run).go_back(14, "no good", ema=0.5)
    saved = sf.load(run)
    assert saved.settings_at(9)["optimizer.lr"] == 1e-2
    assert saved.settings_at(12)["optimizer.lr"] == 0.5
    assert saved.settings_at(14)["ema"] == 0.5

    sf.load(run).go_back(BAD, "no good either")
    assert saved.settings_at(20)["optimizer.lr"] == 1e-2
    assert saved.settings_at(20)["ema"] == 0.9
    assert saved.settings_at(20)["batch_size"] == 8
    line = in_effect(read_changes(run))[-1]
    assert (line.setting, line.now, line.from_step) == ("step", BAD, BAD)
    assert line.follows["optimizer.lr"] == [1e-2, 1e-2]


def test_the_same_going_back_is_not_made_again(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    sf.load(run).go_back(BAD, "no good", **OTHERWISE)
    lines = read_changes(run)
    run_in(run, stop_after="13 steps", **SAVED).train()
    sf.load(run).go_back(BAD, "no good", **OTHERWISE)
    assert read_changes(run) == lines
    assert sf.load(run).checkpoints[-1] == 13

    sf.load(run).go_back(BAD, "once more", **OTHERWISE)
    assert len(read_changes(run)) > len(lines)
    assert sf.load(run).checkpoints[-1] == BAD


@pytest.mark.parametrize("others", [{}, {"length": "33 steps"}, {"optimizer.lr": 5e-3}])
def test_the_same_going_back_that_stretches_the_schedule_is_not_made_again(
    others: dict[str, Any], tmp_path: Path
) -> None:
    cosine: dict[str, Any] = {"schedule": sf.schedules.cosine("10%"), **SAVED}
    run = tmp_path / "run"
    run_in(run, stop_after=f"{BAD} steps", **cosine).train()
    sf.load(run).change("longer", length="33 steps")
    sf.load(run).go_back(BAD, "stretched", schedule="stretch", **others)
    lines = read_changes(run)
    sf.load(run).go_back(BAD, "stretched", schedule="stretch", **others)
    assert read_changes(run) == lines
    sf.load(run).go_back(BAD, "stretched", schedule="stretch", length="40 steps")
    assert len(read_changes(run)) > len(lines)


def test_crashes_of_the_left_branch_go_with_it(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    (run / "crash").mkdir(exist_ok=True)
    for step in (9, 12):
        (run / "crash" / f"step-{step:08d}.json").write_text("{}")
    sf.load(run).go_back(BAD, **OTHERWISE)
    assert [path.name for path in (run / "crash").iterdir()] == ["step-00000009.json"]
    number = len(read_changes(left)) + 1
    assert (run / "branches" / str(number) / "crash" / "step-00000012.json").is_file()


@pytest.mark.parametrize(
    ("step", "code"),
    [(-1, "from-step-not-a-step"), ("3", "from-step-not-a-step"), (17, "from-step-ahead")],
)
def test_a_step_that_the_run_does_not_have_is_refused(
    step: Any, code: str, left: Path, tmp_path: Path
) -> None:
    run = copied(left, tmp_path / "run")
    with refused(code, value=step):
        sf.load(run).go_back(step, clip="off")
    unchanged(run, left)


def test_without_an_intact_checkpoint_the_run_stays_where_it_is(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    for step in steps_in(run / "checkpoints"):
        if step <= BAD:
            weights = run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
    with refused("no-checkpoint-to-go-back-to", sf.CheckpointError, step=BAD):
        sf.load(run).go_back(BAD, **OTHERWISE)
    unchanged(run, left)


def test_a_run_that_trains_does_not_go_back(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    with run_in(run, **SAVED), refused("going-back-of-training-run"):
        sf.load(run).go_back(BAD, **OTHERWISE)
    assert read_changes(run) == read_changes(left)
    assert not (run / "branches").exists()


def test_a_wish_that_cannot_be_is_refused_before_the_run_goes_back(
    left: Path, tmp_path: Path
) -> None:
    run = copied(left, tmp_path / "run")
    with refused("setting-out-of-range"):
        sf.load(run).go_back(BAD, **{"optimizer.lr": -1})
    with refused("length-already-passed"):
        sf.load(run).go_back(BAD, length="9 steps")
    unchanged(run, left)


def test_a_run_that_was_built_before_goes_on_from_the_step(left: Path, tmp_path: Path) -> None:
    run = copied(left, tmp_path / "run")
    built = run_in(run, **SAVED)
    sf.load(run).go_back(BAD, **OTHERWISE)
    built.train()
    whole = copied(left, tmp_path / "whole")
    sf.load(whole).go_back(BAD, **OTHERWISE)
    run_in(whole, **SAVED).train()
    assert_same_end(whole, run, step=sf.load(whole).step)


def unchanged(run: Path, before: Path) -> None:
    assert read_changes(run) == read_changes(before)
    assert steps_in(run / "checkpoints") == steps_in(before / "checkpoints")
    assert not (run / "branches").exists()
