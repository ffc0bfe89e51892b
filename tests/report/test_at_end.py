"""The page that every run leaves in its directory: whole, cheap, and never in the way; 4
seconds.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from pages import Elements, titles
from surefoot.tools.report import write as writing
from surefoot.tracking.run_reader import is_running


def build(run_dir: Path, **changes: Any) -> sf.Run:
    return small_runs.build(run_dir, **({"report": True} | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("at end") / "run"
    build(run_dir, log_every="1 steps", layer_stats_every="5 steps").train()
    return run_dir


def state(page: Path) -> str:
    return page.read_text().partition('data-state="')[2].partition('"')[0]


def test_a_finished_run_leaves_a_page(run: Path) -> None:
    page = (run / "report.html").read_text()
    Elements(page)
    assert state(run / "report.html") == "finished"
    assert {"Loss", "Metrics", "Learning rate and gradient", "Layers", "Settings"} <= set(
        titles(page)
    )
    assert not list(run.glob(".report*"))


def test_the_page_of_a_small_run_takes_a_moment(run: Path) -> None:
    """Processor time, the least of several: 10 ms where it was written."""
    times = []
    for _ in range(5):
        before = time.process_time()
        writing.report_at_end(run, warn=pytest.fail)
        times.append(time.process_time() - before)
    assert min(times) < 0.05


def test_what_a_run_ends_of_stands_on_its_page(tmp_path: Path) -> None:
    build(tmp_path / "stopped", stop_after="6 steps").train()
    assert state(tmp_path / "stopped" / "report.html") == "stopped"

    def bad(model: nn.Module, batch: Any) -> torch.Tensor:
        return small_runs.loss(model, batch) * float("nan")

    with pytest.raises(sf.DivergedError):
        build(tmp_path / "diverged", loss=bad, max_bad_steps=1).train()
    assert state(tmp_path / "diverged" / "report.html") == "diverged"

    def failing(model: nn.Module, batch: Any) -> torch.Tensor:
        raise OSError("the disk of sample 7 is <gone>")

    with pytest.raises(OSError, match="sample 7"):
        build(tmp_path / "failed", loss=failing).train()
    assert state(tmp_path / "failed" / "report.html") == "failed"
    assert (
        "the disk of sample 7 is &lt;gone&gt;" in (tmp_path / "failed" / "report.html").read_text()
    )


def test_without_the_wish_there_is_none(tmp_path: Path) -> None:
    build(tmp_path / "run", report=False, length="2 steps").train()
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_page_that_cannot_be_written_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(tmp_path / "run", length="2 steps", console=True)
    with run:
        for step in run:
            if step.index == 0:
                (tmp_path / "run" / "report.html" / "in the way").mkdir(parents=True)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    (warning,) = told
    assert f" {tmp_path / 'run' / 'report.html'}: " in warning
    assert warning.endswith(": Is a directory")


def test_a_fault_of_ours_in_the_page_breaks_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(writing, "run_page", broken)
    build(tmp_path / "run", length="2 steps", console=True).train()
    said = capsys.readouterr().out
    assert f"warning: no {tmp_path / 'run' / 'report.html'}: ZeroDivisionError: in a chart" in said
    assert "finished: 2 steps" in said


def test_a_run_that_goes_on_is_seen_to_run_and_keeps_its_lock(tmp_path: Path) -> None:
    """To look at a run of this process must not let go of the lock that keeps others out."""
    import subprocess
    import sys

    run_dir = tmp_path / "run"
    with build(run_dir, log_every="1 steps") as run:
        for step in run:
            if step.index == 4:
                page = sf.load(run_dir).report().read_text()
                look = f"from surefoot.tracking.run_reader import Path, is_running; print(is_running(Path({str(run_dir)!r})))"
                seen = subprocess.run(
                    [sys.executable, "-c", look], capture_output=True, text=True, check=True
                ).stdout
                break
    assert re.search(r"running: step \d of 26", page)
    assert seen == "True\n"
    assert not is_running(run_dir)


def test_the_page_changes_no_bit_of_the_run(tmp_path: Path, run: Path) -> None:
    build(
        tmp_path / "without", log_every="1 steps", layer_stats_every="5 steps", report=False
    ).train()
    one, other = (small_runs_tensors(place) for place in (run, tmp_path / "without"))
    assert one == other


def small_runs_tensors(run_dir: Path) -> dict[str, Any]:
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return {
        "step": newest.name,
        "files": json.loads((newest / "manifest.json").read_text())["files"]["model.safetensors"],
    }
