"""Commands that torchrun or srun starts several times: what all ranks have to say, one of them
says. (10 s)
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rank_processes import Outcome, Ranks
from surefoot.cli.main import main

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
