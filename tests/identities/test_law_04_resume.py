"""Law 4: killed at any point and resumed, a run ends with the same bits as one that was left alone.
(about 40 s)

Real processes, real SIGKILL. Compared are the tensors of model, averages, optimizer and meter,
every record, every sample id, the score that early stopping watches, and a value of the user's own
that draws random numbers in the loop's body.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rank_processes import Ranks
from small_runs import outcome
from zygote import Zygote

SIGKILLED = -signal.SIGKILL


@pytest.fixture(scope="module")
def zygote(ranks: Ranks) -> Zygote:
    return Zygote(ranks)


@pytest.fixture(scope="module")
def uninterrupted(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert zygote.run(run_dir) == 0
    return outcome(run_dir)


@pytest.mark.fast("10-0")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "killed_at_pass",
    [1, 10, 41, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 9, 26, 51))],
)
def test_killed_in_a_step_or_inside_an_accumulation_window(
    killed_at_pass: int, workers: int, zygote: Zygote, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert zygote.run(run_dir, **{"pass": killed_at_pass}, workers=workers) == SIGKILLED
    assert zygote.run(run_dir, workers=workers) == 0
    assert outcome(run_dir) == uninterrupted


@pytest.mark.fast("75")
@pytest.mark.parametrize(
    "operation",
    [
        1,
        3,
        17,
        24,
        47,
        75,
        *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 9, 23, 25, 31, 60)),
    ],
)
def test_killed_before_during_and_after_a_save(
    operation: int, zygote: Zygote, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert zygote.run(run_dir, operation=operation) == SIGKILLED
    assert zygote.run(run_dir) == 0
    assert outcome(run_dir) == uninterrupted
    assert not [left for left in (run_dir / "checkpoints").iterdir() if left.name.startswith(".")]


def test_several_kills_in_one_run_and_another_number_of_workers_each_time(
    zygote: Zygote, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for workers, killed_at in ((0, 3), (2, 12), (1, 11), (0, 14)):
        assert zygote.run(run_dir, **{"pass": killed_at}, workers=workers) == SIGKILLED
    assert zygote.run(run_dir, workers=2) == 0
    assert outcome(run_dir) == uninterrupted


@pytest.mark.slow
def test_killed_at_moments_of_the_clock(
    zygote: Zygote, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    for after_s in (0.05, 0.2, 0.35, 0.3, 0.25):
        assert zygote.run(run_dir, after_s=after_s) in (SIGKILLED, 0)
    assert zygote.run(run_dir) == 0
    assert outcome(run_dir) == uninterrupted


@pytest.mark.fast("2-2-130")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_loses_no_step_and_shows_in_the_exit_status(
    number: int,
    status: int,
    workers: int,
    zygote: Zygote,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    changes = {"save_every": "1000 steps"}  # so that only the signal can have saved
    assert (
        zygote.run(run_dir, workers=workers, changes=changes, signal_at_step=[9, number]) == status
    )
    assert (run_dir / "checkpoints" / "step-00000010").exists()
    assert zygote.run(run_dir, workers=workers) == 0
    assert outcome(run_dir) == uninterrupted


def test_a_plateau_decides_the_same_however_often_its_run_is_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Two passes are a step: killed in the first step at a lowered rate, in the one before, and
    between two saves.
    """
    spec: dict[str, Any] = {"plateau": {"monitor": "min val/loss", "patience": 1, "min_delta": 0.5}}
    assert zygote.run(tmp_path / "whole", **spec) == 0
    for killed_at in (21, 8, 13, 9):
        assert zygote.run(tmp_path / "killed", **spec, **{"pass": killed_at}) == SIGKILLED
    assert zygote.run(tmp_path / "killed", **spec) == 0
    expected = outcome(tmp_path / "whole")
    assert expected["state"]["plateau"]["factor"] < 1
    assert outcome(tmp_path / "killed") == expected


@pytest.mark.slow
def test_early_stopping_ends_at_the_same_step_however_often_its_run_is_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Killed in the evaluation that ends it, in a step, and twice in its last save; once it has
    stopped it makes no step.
    """
    stopping = {"monitor": "min val/loss", "patience": 2, "min_delta": 0.5}
    spec: dict[str, Any] = {"early_stopping": stopping}
    assert zygote.run(tmp_path / "whole", **spec) == 0
    expected = outcome(tmp_path / "whole")
    run_dir = tmp_path / "killed"
    assert expected["step"] == "step-00000015"
    last_save = {"operation": 5, "path": "step-00000015"}
    for kill in (
        {"evaluated": 18},
        {"evaluated": 9},
        {"pass": 13},
        last_save,
        last_save | {"operation": 9},
    ):
        assert zygote.run(run_dir, **spec, **kill) == SIGKILLED
    assert (run_dir / "checkpoints" / ".partial-step-00000015").exists()
    for _ in ("what is left", "nothing"):
        assert zygote.run(run_dir, **spec) == 0
        assert outcome(run_dir) == expected


@pytest.mark.slow
def test_compiled_runs_resume_to_the_same_bits_too(zygote: Zygote, tmp_path: Path) -> None:
    compiled = {"changes": {"compile": True}}
    assert zygote.run(tmp_path / "whole", **compiled) == 0
    assert zygote.run(tmp_path / "killed", **{"pass": 21}, **compiled) == SIGKILLED
    assert zygote.run(tmp_path / "killed", **compiled) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
