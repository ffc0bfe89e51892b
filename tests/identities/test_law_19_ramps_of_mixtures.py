"""Law 19: weights of a mixture with several values are changes that are known from the start."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import surefoot as sf
from identities.changed_runs import assert_same_end, given_the_journal_of, samples_read
from identities.test_law_19_changes_of_mixtures import END, mixture, run_in, train_on_two_ranks
from rank_processes import forks, on_ranks
from refused import refused
from surefoot.cli.main import _verb
from surefoot.tracking.change_journal import read_changes

WEB = "0.7, 0.4 from 30%, 0.2 from 22 steps"
BOOKS = "0.3, 0.8 from 22 steps"
LINES = [
    (14, {"web": 0.4, "old books": 0.3}, f"web: {WEB}"),
    (22, {"web": 0.2, "old books": 0.8}, f"web: {WEB}; old books: {BOOKS}"),
]


def ramps() -> dict[str, Any]:
    return {"train_data": mixture(WEB, BOOKS)}


def lines_of(run_dir: Path) -> list[tuple[int, Any, str]]:
    return [(change.from_step, change.now, change.because) for change in read_changes(run_dir)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("ramps") / "whole"
    run_in(run_dir, **ramps()).train()
    return run_dir


def test_they_end_as_weights_that_were_changed_at_these_steps(whole: Path, tmp_path: Path) -> None:
    assert lines_of(whole) == LINES
    for step, now, _ in LINES:
        run_in(tmp_path / "changed", stop_after=f"{step} steps").train()
        sf.load(tmp_path / "changed").change(**{"train_data.weights": now})
    run_in(tmp_path / "changed").train()
    assert_same_end(tmp_path / "changed", whole, step=END)

    run_in(tmp_path / "unchanged").train()
    with pytest.raises(AssertionError):
        assert_same_end(tmp_path / "unchanged", whole, step=END)
    assert sf.load(run_in(whole, **ramps())).verify(steps="all").problems == []


def test_the_new_quotas_hold_from_the_next_block_on(whole: Path) -> None:
    samples = samples_read(run_in(whole, **ramps()).parts.pipeline.plan, range(45))
    shares = [0.7, 0.7, 400 / 700, 0.2]
    for block, share in enumerate(shares):
        of_block = [sample for _, sample in samples[1000 * block : 1000 * (block + 1)]]
        assert sum(sample < 300 for sample in of_block) == round(1000 * share)


def test_a_run_that_stops_after_every_step_ends_with_the_same_bits(
    whole: Path, tmp_path: Path
) -> None:
    for step in range(1, 45):
        run_in(tmp_path, stop_after=f"{step} steps", **ramps()).train()
    run_in(tmp_path, **ramps()).train()
    assert_same_end(tmp_path, whole, step=END)
    assert lines_of(tmp_path) == LINES


@forks
def test_a_run_that_is_killed_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    for at in (1, 12, 14, 23):

        def killed(_: int, at: int = at) -> None:
            run = run_in(tmp_path, save_every="3 steps", **ramps())
            with run:
                for step in run:
                    if step.index >= at:
                        os.kill(os.getpid(), signal.SIGKILL)

        assert on_ranks(1, killed) == [-signal.SIGKILL]
    run_in(tmp_path, **ramps()).train()
    assert_same_end(tmp_path, whole, step=END)


@pytest.mark.parametrize("lines", [0, 1])
def test_a_kill_before_the_journal_was_written_whole_loses_no_line(
    lines: int, whole: Path, tmp_path: Path
) -> None:
    with run_in(tmp_path, **ramps()):
        pass  # step 0 is saved
    journal = tmp_path / "changes.jsonl"
    written = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(written[:lines]) + b'{"number": ')
    run_in(tmp_path, **ramps()).train()
    assert lines_of(tmp_path) == LINES
    assert_same_end(tmp_path, whole, step=END)


def test_a_run_whose_weights_are_not_written_yet_is_not_changed(tmp_path: Path) -> None:
    with run_in(tmp_path, **ramps()):
        pass  # step 0 is saved
    (tmp_path / "changes.jsonl").unlink()  # as a kill before has it
    at_first = sf.load(tmp_path).settings_at(0)
    assert at_first["train_data.weights"] == {"web": 0.7, "old books": 0.3}
    with refused("ramp-not-written-yet", setting="train_data.weights.web"):
        sf.load(tmp_path).change(**{"optimizer.lr": 1e-3})
    assert read_changes(tmp_path) == ()


def test_the_journal_is_enough_and_a_program_may_have_the_first_or_the_last_weights(
    whole: Path, tmp_path: Path
) -> None:
    programs: dict[str, Any] = {"first": mixture(), "last": mixture(0.2, 0.8), **ramps()}
    for name, train_data in programs.items():
        given = given_the_journal_of(whole, tmp_path / name)
        run_in(given, train_data=train_data).train()
        assert_same_end(given, whole, step=END)


@forks
def test_two_ranks_train_as_those_that_were_changed(tmp_path: Path) -> None:
    train_on_two_ranks(tmp_path / "ramps", micro_batch_size=50, **ramps())
    for step, now, _ in LINES:
        stop: dict[str, Any] = {"stop_after": f"{step} steps", "micro_batch_size": 50}
        train_on_two_ranks(tmp_path / "changed", **stop)
        sf.load(tmp_path / "changed").change(**{"train_data.weights": now})
    train_on_two_ranks(tmp_path / "changed", micro_batch_size=50)
    assert_same_end(tmp_path / "ramps", tmp_path / "changed", step=END)


@forks
def test_ranks_with_other_weights_are_refused(tmp_path: Path) -> None:
    def differs(rank: int) -> None:
        train_data = mixture(WEB, BOOKS if rank == 0 else "0.3, 0.9 from 22 steps")
        with refused("ranks-of-different-settings"):
            run_in(tmp_path / "run", train_data=train_data, micro_batch_size=50)

    assert on_ranks(2, differs) == [0, 0]


def test_with_a_ramp_of_the_batch_size_percentages_are_of_the_samples(tmp_path: Path) -> None:
    train_data = mixture("0.7, 0.2 from 50%")
    settings: dict[str, Any] = {"batch_size": "50, 100 from 20%", "length": "10 epochs"}
    run = run_in(tmp_path, train_data=train_data, **settings)
    # of 4,500 samples: 18 steps of 50, and 13.5 of 100
    found = [(change.from_step, change.setting) for change in run.parts.first_changes]
    assert found == [(18, "batch_size"), (32, "train_data.weights")]
    run.train()
    assert sf.load(tmp_path).step == 18 + 36


def test_a_mixture_in_a_data_loader_has_them_too(whole: Path, tmp_path: Path) -> None:
    loader: Any = DataLoader(mixture(WEB, BOOKS), batch_size=100, shuffle=True)
    run_in(tmp_path, train_data=loader, batch_size=None).train()
    assert lines_of(tmp_path) == LINES
    assert_same_end(tmp_path, whole, step=END)


def test_a_change_supersedes_what_is_to_come_of_all_weights(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="15 steps", **ramps()).train()
    sf.load(tmp_path).change(**{"train_data.weights.web": 0.5})
    run_in(tmp_path, **ramps()).train()
    assert sf.load(tmp_path).settings_at(44)["train_data.weights"] == {"web": 0.5, "old books": 0.3}


def test_a_run_that_goes_back_keeps_what_is_to_come(whole: Path, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="30 steps", save_every="5 steps", **ramps()).train()
    sf.load(tmp_path).go_back(16, "a test")
    run_in(tmp_path, **ramps()).train()
    assert [change.from_step for change in read_changes(tmp_path)] == [14, 22, 16, 22]
    assert_same_end(tmp_path, whole, step=END)


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "another step": (WEB, "0.3, 0.8 from 23 steps", "ramp-of-begun-run"),
    "one more": (f"{WEB}, 0.3 from 90%", BOOKS, "ramp-of-begun-run"),
    "another value": (WEB, "0.3, 0.9 from 22 steps", "ramp-of-begun-run"),
    "another beginning": ("0.6, 0.4 from 30%, 0.2 from 22 steps", BOOKS, "ramp-of-begun-run"),
    "others": (0.5, 0.5, "changed-setting-differs"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_program_keeps_its_weights(name: str, tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps", **ramps()).train()
    web, books, code = OTHERS[name]
    with refused(code):
        run_in(tmp_path, train_data=mixture(web, books))


def test_a_run_that_began_without_them_has_none_later(tmp_path: Path) -> None:
    run_in(tmp_path, stop_after="3 steps").train()
    with refused("ramp-of-begun-run", setting="train_data.weights.web", step=3):
        run_in(tmp_path, train_data=mixture("0.7, 0.2 from 50%"))
    assert read_changes(tmp_path) == ()


@pytest.mark.parametrize(
    ("web", "code"),
    [
        ("much", "setting-out-of-range"),
        ("0.7 from 20%", "ramp-not-understood"),
        ("0.7, 0.5", "setting-out-of-range"),
        ("0.7, much from 20%", "setting-out-of-range"),
        ("0.7, 0.5 from soon", "duration-not-understood"),
        ("0.7, 0 from 20%", "mixture-weights-invalid"),
        ("0.7, nan from 20%", "mixture-weights-invalid"),
        ("0.7, 0.5 from 100%", "ramp-step-out-of-order"),
        ("0.7, 0.5 from 50%, 0.2 from 20%", "ramp-step-out-of-order"),
        ("0.7, 0.70 from 20%", "ramp-repeats-value"),
    ],
)
def test_weights_that_cannot_be_are_refused_and_nothing_written(
    web: str, code: str, tmp_path: Path
) -> None:
    with refused(code):
        run_in(tmp_path / "run", train_data=mixture(web))
    assert not (tmp_path / "run").exists()


def test_they_need_a_directory_and_a_change_is_to_one_weight(tmp_path: Path) -> None:
    no_directory: Any = None
    with refused("ramp-without-directory", setting="train_data.weights"):
        run_in(no_directory, **ramps()).train()
    run_in(tmp_path, stop_after="3 steps").train()
    with refused("ramp-begins-with-run", setting="train_data.weights"):
        sf.load(tmp_path).change(**{"train_data.weights.web": "0.7, 0.5 from 50%"})
    assert read_changes(tmp_path) == ()


PROGRAM = """
from dataclasses import dataclass

import surefoot as sf
from identities.test_law_19_changes_of_mixtures import mixture, run_in

@dataclass
class Config:
    run_dir: str
    web: str = "0.7"
    books: str = "0.3"
    stop_after: str | None = None

def build(config: Config) -> sf.Run:
    data = mixture(config.web, config.books)
    return run_in(config.run_dir, train_data=data, stop_after=config.stop_after)
"""


def test_a_flag_of_a_program_gives_them_and_plan_shows_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    flags = ["--web", WEB, "--books", BOOKS]
    run_dir = tmp_path / "run"
    _verb(["plan", str(program), *flags, "--run-dir", str(run_dir)])
    printed = capsys.readouterr().out
    assert "from step 14 on: train_data.weights" in printed
    assert "from step 22 on: train_data.weights" in printed
    assert not run_dir.exists()
    _verb(["train", str(program), *flags, "--stop-after", "15 steps", "--run-dir", str(run_dir)])
    assert lines_of(run_dir) == LINES
    _verb(["resume", str(run_dir)])
    assert sf.load(run_dir).step == 45
