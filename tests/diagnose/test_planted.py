"""Faults planted in short real runs are found by their names, and no healthy run is called broken;
3 seconds, slow: 60.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diagnose.planted import ALL, FAULTY, HEALTHY, Planted, trained
from surefoot.tools.diagnose.checks import CHECKS

FAST = ("own, tanh", "own, a layer cut off")  # a healthy one and a faulty one


def check_findings(planted: Planted, run_dir: Path) -> None:
    findings = trained(planted, run_dir)
    if planted.fault is None:
        assert "error" not in [finding.severity for finding in findings]
    else:
        assert planted.fault in [finding.name for finding in findings]


@pytest.mark.parametrize("name", FAST)
def test_a_healthy_and_a_faulty_run_are_told_apart(name: str, tmp_path: Path) -> None:
    (planted,) = [planted for planted in ALL if planted.name == name]
    check_findings(planted, tmp_path / "run")


TIMED = (
    "data-bound",
    "evaluating-too-long",
    "saving-too-long",
    "falling-throughput",
    "jittering-throughput",
)


def case_of(planted: Planted) -> Any:
    marks = [pytest.mark.timing] if planted.fault in TIMED else []
    return pytest.param(planted, marks=marks, id=planted.name)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [case_of(planted) for planted in ALL])
@pytest.mark.filterwarnings("ignore:the loss of a batch")
def test_every_planted_fault_is_found_and_no_healthy_run_is_called_broken(
    planted: Planted, tmp_path: Path
) -> None:
    check_findings(planted, tmp_path / "run")


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own() -> None:
    assert len(HEALTHY) >= 10
    assert len(FAULTY) >= 20
    assert len({planted.name for planted in ALL}) == len(ALL)


def test_every_finding_has_a_faulty_run() -> None:
    needs_ranks = {"slow-rank"}  # tests/run/test_rank_checks.py
    faults = {planted.fault for planted in FAULTY}
    assert {check.name for check in CHECKS} - needs_ranks == faults
