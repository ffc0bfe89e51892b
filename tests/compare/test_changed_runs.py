"""`compare` and the page of runs whose settings were changed on record: the journal names what
differs, not the configuration alone. (10 s)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import surefoot as sf
from surefoot.cli.main import _verb
from surefoot.config.setting_change import SettingChange
from surefoot.tools.compare.trained import read_run
from surefoot.tools.report.series import read_reported_run
from surefoot.tools.report.tables import differing_settings
from surefoot.tracking.change_journal import append_changes

TRAIN = [
    "train",
    "images",
    "--length",
    "12 steps",
    "--batch-size",
    "8",
    "--report",
    "False",
    "--tensorboard",
    "False",
    "--log-every",
    "1 steps",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unchanged run, one with another rate from step 4 on, and that one with other batches too."""
    folder = tmp_path_factory.mktemp("runs")
    _verb([*TRAIN, "--run-dir", str(folder / "plain")])
    _verb([*TRAIN, "--stop-after", "4 steps", "--run-dir", str(folder / "rate")])
    shutil.copytree(folder / "rate", folder / "both")
    rate = ["--change", "optimizer.lr=1e-4", "--because", "spikes"]
    _verb(["resume", str(folder / "rate"), *rate])
    _verb(["resume", str(folder / "both"), *rate, "--change", "batch_size=16"])
    return folder


def notes_of(folder: Path, *names: str) -> dict[str, list[str]]:
    """What a comparison says of each run."""
    out = folder / f"compared-{'-'.join(names)}"
    _verb(["compare", *(str(folder / name) for name in names), "--out", str(out)])
    notes = json.loads((out / "comparison.json").read_text())["notes"]
    return {
        name: [note.partition(": ")[2] for note in notes if note.startswith(f"{folder / name}: ")]
        for name in names
    }


def test_a_changed_run_beside_an_unchanged_one_has_its_change(runs: Path) -> None:
    notes = notes_of(runs, "plain", "rate")
    (of_rate,) = notes["rate"]
    assert of_rate.startswith("change 1, from step 4 on: optimizer.lr")
    assert "spikes" in of_rate
    assert len(notes["plain"]) == 1
    assert "lr" not in notes["plain"][0]


def test_of_two_journals_what_both_have_is_not_named(runs: Path) -> None:
    notes = notes_of(runs, "rate", "both")
    assert notes["rate"] == []
    (of_both,) = notes["both"]
    assert "batch_size 8 -> 16" in of_both


def test_the_same_change_for_another_reason_is_the_same(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "rate", tmp_path / "rate")
    shutil.copytree(runs / "rate", tmp_path / "other")
    (tmp_path / "other" / "changes.jsonl").unlink()
    (change,) = read_run(runs / "rate").changes
    append_changes(
        tmp_path / "other",
        [SettingChange(0, 4, change.setting, change.was, change.now, because="else")],
    )
    from surefoot.cli.compare_runs import _unlike_changes

    both = [read_run(tmp_path / "rate"), read_run(tmp_path / "other")]
    assert [_unlike_changes(run, both) for run in both] == [[], []]


def test_a_change_that_no_step_had_is_no_difference(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "plain", tmp_path / "run"))
    append_changes(run, [SettingChange(0, 12, "length", "12 steps", "20 steps")])
    assert read_run(run).changes == ()


def test_samples_and_precision_are_shared_only_under_one_journal(runs: Path) -> None:
    orders = {name: read_run(runs / name).order for name in ("plain", "rate", "both")}
    assert orders["plain"] == orders["rate"]
    assert orders["both"] != orders["rate"]


def test_the_values_of_the_beginning_are_compared_whatever_a_later_session_wrote(
    runs: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs / "both", tmp_path / "run"))
    text = (run / "config.toml").read_text()
    assert "\nbatch_size = 8" in text
    (run / "config.toml").write_text(text.replace("\nbatch_size = 8", "\nbatch_size = 16"))
    assert read_run(run).settings["batch_size"] == 8


def test_the_page_of_several_runs_has_the_changed_settings(runs: Path) -> None:
    reported = [read_reported_run(runs / name) for name in ("plain", "rate", "both")]
    rows = dict(differing_settings(reported))
    assert [value.split()[0] for value in rows["optimizer.lr"]] == ["0.003", "0.0001", "0.0001"]
    assert [value.split()[0] for value in rows["batch_size"]] == ["8", "8", "16"]
    assert "length" not in rows


def test_a_setting_of_the_beginning_is_compared_as_its_file_has_it(tmp_path: Path) -> None:
    inputs = torch.randn(64, 2)

    def train(run_dir: Path) -> None:
        sf.Run(
            model=lambda: torch.nn.Linear(2, 1),
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            train_data=(inputs, inputs.sum(1, keepdim=True)),
            optimizer=sf.optim.adamw(lr=1e-2),
            schedule=sf.schedules.cosine("10%"),
            batch_size=8,
            length="20 steps",
            run_dir=run_dir,
            console=False,
            report=False,
        ).train()

    train(tmp_path / "plain")
    train(tmp_path / "longer")
    sf.load(tmp_path / "longer").change(length="30 steps", **{"schedule.name": "linear"})
    train(tmp_path / "longer")

    before = read_run(tmp_path / "plain").settings
    after = read_run(tmp_path / "longer").settings
    names = [name for name in before if name.startswith("schedule.")]
    assert names
    assert {name: after.get(name) for name in names} == {name: before[name] for name in names}
