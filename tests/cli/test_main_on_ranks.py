"""Commands that torchrun or srun starts several times: what all ranks have to say, one of them
says. (10 s)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import surefoot as sf
from journals import in_force
from rank_processes import Outcome, Ranks
from same_bits import assert_same_bits, newest_checkpoint, tensors_of
from surefoot.cli.main import main
from surefoot.tracking.change_journal import append_changes, read_changes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
PROGRAM = f"{Path(__file__).parents[1] / 'small_program.py'}:build"


def typed(*, arguments: list[str]) -> None:
    sys.argv = ["surefoot", *arguments]
    main(arguments)


def outcomes(ranks: Ranks, size: int, *arguments: str) -> list[Outcome]:
    return ranks.outcomes(ranks.start(size, typed, arguments=list(arguments)))


@pytest.mark.slow
def test_an_error_that_all_ranks_meet_is_said_once(ranks: Ranks) -> None:
    first, second = outcomes(
        ranks, 2, "train", PROGRAM, "--batch-size", "12", "--micro-batch-size", "12"
    )
    assert first.status == second.status == 2
    assert "[more-ranks-than-micro-batches]" in first.text
    assert second.text == ""


@pytest.mark.slow
def test_scores_of_a_run_are_printed_once(ranks: Ranks, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    (trained,) = outcomes(ranks, 1, "train", PROGRAM, "--run-dir", run_dir, "--length", "4 steps")
    assert trained.status == 0, trained.text
    first, second = outcomes(ranks, 2, "evaluate", run_dir)
    assert first.status == second.status == 0, second.text
    assert "step=4 val/loss=" in first.text
    assert second.text == ""


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_three_ranks_go_back_and_skip_steps(parallel: str, ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--parallel", parallel]

    def on_three(*arguments: str) -> None:
        for outcome in outcomes(ranks, 3, *arguments, *flags):
            assert outcome.status == 0, outcome.text

    began = ["train", "images", "--batch-size", "12", "--micro-batch-size", "2"]
    began += ["--length", "20 steps", "--save-every", "2 steps", "--report", "False"]
    on_three(*began, "--run-dir", str(run), "--stop-after", "12 steps")
    back = ["resume", str(run), "--from-step", "7", "--change", "optimizer.lr=1e-4"]
    back += ["--skip-steps", "10..11", "--because", "no good"]
    on_three(*back, "--stop-after", "9 steps")
    journal = read_changes(run)
    assert [line.setting for line in journal] == ["step", "optimizer.lr", *["skip_steps"] * 2]
    on_three(*back)  # as a queue repeats it
    assert read_changes(run) == journal

    given = tmp_path / "given"
    given.mkdir()
    append_changes(given, in_force(journal))
    on_three(*began, "--run-dir", str(given))
    assert sf.load(run).step == sf.load(given).step == 20
    assert_same_bits(tensors_of(newest_checkpoint(run)), tensors_of(newest_checkpoint(given)))
