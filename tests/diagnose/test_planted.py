"""Faults planted in short real runs are found by their names, and no healthy run is called broken;
3 seconds, slow: 60.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.planted import ALL, FAULTY, HEALTHY, Planted, trained
from surefoot.tools.diagnose.checks import CHECKS

FAST = ("own, tanh", "own, a layer cut off")  # a healthy one and a faulty one


def judge(planted: Planted, run_dir: Path) -> None:
    found = trained(planted, run_dir)
    if planted.fault is None:
        assert [finding for finding in found if finding.severity == "error"] == []
    else:
        assert planted.fault in [finding.name for finding in found]


@pytest.mark.parametrize("name", FAST)
def test_a_healthy_and_a_faulty_run_are_told_apart(name: str, tmp_path: Path) -> None:
    judge(next(planted for planted in ALL if planted.name == name), tmp_path / "run")


TIMED = (
    "data-bound",
    "evaluating-too-long",
    "saving-too-long",
    "falling-throughput",
    "jittering-throughput",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(one, marks=[pytest.mark.timing] * (one.fault in TIMED), id=one.name)
        for one in ALL
    ],
)
@pytest.mark.filterwarnings("ignore:the loss of a batch")
def test_every_planted_fault_is_found_and_no_healthy_run_is_called_broken(
    planted: Planted, tmp_path: Path
) -> None:
    judge(planted, tmp_path / "run")


def test_there_are_enough_of_them_and_every_finding_has_one(tmp_path: Path) -> None:
    assert len(HEALTHY) >= 10
    assert len(FAULTY) >= 20
    assert len({planted.name for planted in ALL}) == len(ALL)
    from diagnose.histories import healthy

    needs_ranks = {"slow-rank"}  # tests/run/test_rank_checks.py
    assert {check(healthy()).name for check in CHECKS} - needs_ranks == {
        planted.fault for planted in FAULTY
    }
