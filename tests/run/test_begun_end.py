"""A run that has reached its length has everything that its end writes, however often it was
killed.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot as sf
from rank_processes import Ranks
from surefoot.tracking.logger import Journal

LENGTH = 4


def counts(_model: nn.Module) -> list[sf.report.ConfusionMatrix]:
    return [sf.report.ConfusionMatrix(title="counts", classes=("x",), counts=((4,),))]


def build(run_dir: Path, **changes: Any) -> sf.Run:
    data = torch.linspace(-1, 1, 8)[:, None], 3 * torch.linspace(-1, 1, 8)[:, None]
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "train_data": data,
        "batch_size": 4,
        "micro_batch_size": 2,
        "length": f"{LENGTH} steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "splits": {"val": sf.Split(data), "test": sf.Split(data, at_end=True)},
        "sample_fn": lambda model: f"{model.weight.item():.6f}",
        "panels_fn": counts,
        "device": "cpu",
        "run_dir": run_dir,
        "console": False,
    }
    return sf.Run(**(settings | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no kill has met."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    build(run_dir).train()
    return run_dir


@pytest.fixture
def run_dir(whole: Path, tmp_path: Path) -> Path:
    """A copy of the whole run, from which a test takes what a kill would have prevented."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def cut_records(run_dir: Path, *, before: str) -> None:
    """Remove the first record of a kind after the last save, and all behind it."""
    manifest = json.loads((run_dir / f"checkpoints/step-{LENGTH:08d}/manifest.json").read_text())
    saved_bytes = manifest["metrics"]["bytes"]
    metrics = run_dir / "metrics.jsonl"
    content = metrics.read_bytes()
    kept = [content[:saved_bytes]]
    for line in content[saved_bytes:].splitlines(keepends=True):
        if json.loads(line)["kind"] == before:
            break
        kept.append(line)
    else:
        pytest.fail(f"no record of kind {before} follows the last save")
    metrics.write_bytes(b"".join(kept))


def killed_before_the_sample(run_dir: Path) -> None:
    cut_records(run_dir, before="sample")
    (run_dir / "panels.json").unlink()
    (run_dir / "report.html").unlink()


def killed_before_the_panels(run_dir: Path) -> None:
    cut_records(run_dir, before="event")
    (run_dir / "panels.json").unlink()
    (run_dir / "report.html").unlink()


def killed_before_the_event(run_dir: Path) -> None:
    cut_records(run_dir, before="event")
    (run_dir / "report.html").unlink()


def killed_before_the_page(run_dir: Path) -> None:
    (run_dir / "report.html").unlink()


@pytest.mark.parametrize(
    "kill",
    [
        killed_before_the_sample,
        killed_before_the_panels,
        killed_before_the_event,
        killed_before_the_page,
    ],
)
def test_a_start_of_a_complete_run_writes_what_its_end_lacks(
    kill: Callable[[Path], None], whole: Path, run_dir: Path
) -> None:
    kill(run_dir)

    build(run_dir).train()

    saved = sf.load(run_dir)
    expected = sf.load(whole)
    assert saved.status == "finished"
    assert saved.records("sample") == expected.records("sample")
    assert saved.records("final_eval") == expected.records("final_eval")
    assert saved.records("event")[-1]["event"] == "finished"
    assert saved.panels() == expected.panels()
    assert (run_dir / "report.html").exists()


def open_on_rank(run_dir: str) -> bool:
    """Open a run and close it; return whether this rank has found its end written."""
    with build(Path(run_dir)) as run:
        assert run.session is not None
        return run.session.is_over


def test_ranks_write_together_what_the_end_lacks(whole: Path, run_dir: Path, ranks: Ranks) -> None:
    killed_before_the_sample(run_dir)

    are_over = ranks(2, open_on_rank, run_dir=str(run_dir))

    assert are_over == [False, False]
    saved = sf.load(run_dir)
    assert saved.records("event")[-1]["event"] == "finished"
    assert len(saved.records("sample")) == 1
    assert saved.panels() == sf.load(whole).panels()


def test_after_two_kills_a_complete_run_still_has_one_sample(run_dir: Path) -> None:
    killed_before_the_panels(run_dir)

    for _ in range(2):
        build(run_dir).train()

    assert len(sf.load(run_dir).records("sample")) == 1


def test_a_page_from_before_the_last_record_is_written_again(run_dir: Path) -> None:
    page = run_dir / "report.html"
    page.write_text("of an earlier session")
    last_written_at = (run_dir / "metrics.jsonl").stat().st_mtime_ns
    earlier = last_written_at - 10**9
    os.utime(page, ns=(earlier, earlier))

    build(run_dir).train()

    assert page.read_text() != "of an earlier session"


def test_a_kill_at_the_end_leaves_no_page_to_a_run_without_reports(run_dir: Path) -> None:
    killed_before_the_sample(run_dir)

    build(run_dir, report=False).train()

    assert not (run_dir / "report.html").exists()


def test_the_outcome_has_the_scores_of_the_session_before_the_kill(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_before_the_sample(run_dir)
    shown = []
    monkeypatch.setattr(Journal, "show", lambda _journal, record: shown.append(record))

    build(run_dir).train()

    (outcome,) = [record for record in shown if record["kind"] == "outcome"]
    (final,) = sf.load(run_dir).records("final_eval")
    assert outcome["scores"]["val/loss"] == sf.load(run_dir).records("eval")[-1]["val/loss"]
    assert outcome["scores_at_end"] == {"test/loss": final["test/loss"]}
