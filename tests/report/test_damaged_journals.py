"""Everyone who reads a run names a journal of changes that is not the one of its checkpoints. (5 s)"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import surefoot as sf
from refused import refused
from surefoot.cli.main import _verb
from surefoot.tools.compare.trained import read_run
from surefoot.tools.diagnose.reading import history_in
from surefoot.tools.plan.rest_of_run import read_rest
from surefoot.tools.report.series import read_reported_run
from surefoot.tracking.change_journal import CHANGES

TRAIN = ["train", "images", "--length", "12 steps", "--batch-size", "8", "--report", "False"]
OTHER = "journal-of-another-checkpoint"
DAMAGED = "journal-of-changes-damaged"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "digits"
    _verb([*TRAIN, "--stop-after", "4 steps", "--run-dir", str(run)])
    _verb(["resume", str(run), "--change", "optimizer.lr=1e-4", "--stop-after", "8 steps"])
    _verb(["resume", str(run), "--change", "batch_size=16"])
    return run


def delete(journal: Path) -> None:
    journal.unlink()


def cut(journal: Path) -> None:
    """Cut off the last line."""
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]))


def edit(journal: Path) -> None:
    journal.write_text(journal.read_text().replace("0.0001", "0.0002", 1))


@pytest.mark.parametrize(
    ("damage", "code"),
    [(delete, OTHER), (cut, OTHER), (edit, DAMAGED)],
    ids=["deleted", "cut", "edited"],
)
def test_a_journal_that_is_not_the_one_of_the_checkpoint_is_named(
    changed: Path, tmp_path: Path, damage: Callable[[Path], None], code: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(changed, run)
    damage(run / CHANGES)
    saved = sf.load(run)

    with refused(code, sf.CheckpointError):
        read_rest(run)
    with refused(code, sf.CheckpointError):
        saved.replay(9)
    with refused(code, sf.CheckpointError):
        saved.change(**{"optimizer.lr": 1e-3})
    with refused(code, sf.CheckpointError):
        saved.settings_at(9)
    (problem,) = read_run(run).problems
    _verb(["compare", str(changed), str(run), "--out", str(tmp_path / "compared")])
    notes = json.loads((tmp_path / "compared" / "comparison.json").read_text())["notes"]
    assert f"{run}: {problem}" in notes
    assert len(history_in(run).described.problems) == 1
    assert len(read_reported_run(run).problems) == 1
    problems = saved.verify(windows=0).problems
    assert [problem.file for problem in problems] == [CHANGES]


def test_readers_of_the_whole_journal_name_nothing(changed: Path) -> None:
    assert history_in(changed).described.problems == ()
    assert read_reported_run(changed).problems == ()
    assert sf.load(changed).verify(windows=0).problems == []
