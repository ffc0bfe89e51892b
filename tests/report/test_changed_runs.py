"""The page of a run whose settings were changed on record: marks, settings, rates to come, and the
commands that repeat it. (10 s)
"""

from __future__ import annotations

import json
import shlex
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from pages import Elements
from refused import refused
from surefoot.cli.main import _verb
from surefoot.config.setting_change import SettingChange
from surefoot.tools.report import tables
from surefoot.tools.report.charts import Chart
from surefoot.tools.report.run_charts import charts
from surefoot.tools.report.series import ReportedRun, read_reported_run
from surefoot.tools.report.write import page_of
from surefoot.tracking.change_journal import _values, append_changes, read_changes
from surefoot.tracking.commands import commands
from surefoot.tracking.run_reader import read_run
from surefoot.train.recorded_settings import recorded_settings
from written_runs import CONFIG, SESSION, train, written

TRAIN = [
    "train",
    "images",
    "--length",
    "20 steps",
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
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was changed at step 4 and at step 9, and stopped at step 12."""
    run = tmp_path_factory.mktemp("runs") / "digits"
    _verb([*TRAIN, "--stop-after", "4 steps", "--run-dir", str(run)])
    _verb(
        [
            "resume",
            str(run),
            "--change",
            "optimizer.lr=1e-4",
            "--change",
            "batch_size=16",
            "--because",
            "it <spikes>",
            "--stop-after",
            "9 steps",
        ]
    )
    _verb(["resume", str(run), "--change", "schedule.name=linear", "--stop-after", "12 steps"])
    return run


def chart_of(run: ReportedRun, name: str) -> Chart:
    return next(chart for chart in charts(run) if chart.name == name)


@pytest.mark.parametrize("name", ["loss", "learning-rate", "grad_norm", "throughput"])
def test_each_change_is_a_mark_with_its_reason(name: str, changed: Path) -> None:
    marks = chart_of(read_reported_run(changed), name).marks
    titles = {mark.x: mark.title for mark in marks if mark.kind == "event" and mark.x in (4, 9)}
    assert "it <spikes>" in titles[4]
    assert "batch_size" in titles[4]
    assert "schedule" in titles[9]


def test_the_page_shows_the_reason_as_text(changed: Path) -> None:
    page = page_of([changed])
    assert "it <spikes>" not in page
    assert "it <spikes>" in "".join(Elements(page).text)


def test_the_table_has_the_values_in_force_and_the_others(changed: Path) -> None:
    rows = {
        name: (value, origin)
        for name, value, origin in tables.settings(
            read_reported_run(changed), limit=1000, max_length=400
        )
    }
    value, origin = rows["optimizer.lr"]
    assert origin == "changed"
    assert value.split()[0] == "0.0001"
    assert "until step 4" in value
    assert rows["batch_size"][0].startswith("16 (8 until step 4")
    assert rows["schedule.name"][0].startswith("linear (cosine until step 9")
    assert rows["length"] == ("20 steps", "flag")


def test_a_change_that_is_to_come_is_not_in_force(changed: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "given")
    _verb(
        [
            *TRAIN,
            "--stop-after",
            "6 steps",
            "--run-dir",
            run,
            "--changes",
            str(changed / "changes.jsonl"),
        ]
    )
    rows = {
        name: value
        for name, value, _ in tables.settings(
            read_reported_run(Path(run)), limit=1000, max_length=400
        )
    }
    assert rows["batch_size"].startswith("16 (")
    assert rows["schedule.name"] == "cosine (linear from step 9)"
    assert {mark.x for mark in chart_of(read_reported_run(Path(run)), "learning-rate").marks} == {4}


def test_the_rates_to_come_are_those_that_the_run_will_have(changed: Path, tmp_path: Path) -> None:
    def planned(run: Path) -> dict[float, float]:
        lines = chart_of(read_reported_run(run), "learning-rate").lines
        (line,) = [line for line in lines if line.name == "planned"]
        return dict(line.points)

    assert min(planned(changed)) == 12
    run = tmp_path / "given"
    _verb(
        [
            *TRAIN,
            "--stop-after",
            "2 steps",
            "--run-dir",
            str(run),
            "--changes",
            str(changed / "changes.jsonl"),
        ]
    )
    rates = planned(run)
    _verb(["resume", str(run)])
    recorded = {record["step"]: record["lr"] for record in sf.load(run).records("train")}
    assert set(rates) == set(range(2, 21))
    for step, rate in rates.items():
        assert rate == pytest.approx(recorded[step], rel=1e-9)
    assert len(chart_of(read_reported_run(run), "learning-rate").lines) == 1


def test_the_command_that_trains_it_again_repeats_the_changes(
    changed: Path, tmp_path: Path
) -> None:
    was_typed(changed, [*TRAIN, "--run-dir", str(changed), "--changes", "other.jsonl"])
    text = commands(read_run(changed), finished=False)["Train it again"]
    words = shlex.split(text.splitlines()[-1])
    assert words[:3] == ["surefoot", "train", "images"]
    assert words.count("--changes") == 1
    again = tmp_path / "again"
    words[words.index("DIR")] = str(again)
    _verb(words[1:])
    assert read_changes(again) == read_changes(changed)
    losses = {record["step"]: record["loss"] for record in sf.load(again).records("train")}
    for record in sf.load(changed).records("train"):
        assert losses[record["step"]] == record["loss"]
    was_typed(again, words[1:])
    text = commands(read_run(again), finished=True)["Train it again"]
    assert text.count("--changes") == 1
    assert str(again / "changes.jsonl") in text


def was_typed(run: Path, words: list[str]) -> None:
    """Let the first session of a run be one of this command, as if a shell had started it."""
    file = run / "environment.json"
    environment = json.loads(file.read_text())
    environment["sessions"][0]["command"] = ["surefoot", *words]
    file.write_text(json.dumps(environment))


def test_a_script_is_given_its_journal_by_a_copy(tmp_path: Path) -> None:
    config = '[program]\nkind = "script"\ncommand = ["mine.py"]\n'
    run = written(tmp_path / "run", [train(1)], config=config, command=["mine.py"])
    plain = commands(read_run(run), finished=True)["Train it again"]
    append_changes(run, [SettingChange(0, 4, "clip", "off", "norm 1.0")])
    lines = commands(read_run(run), finished=True)["Train it again"].splitlines()
    assert lines[-1] == plain.splitlines()[-1]
    assert str(run / "changes.jsonl") in lines[-2]


def test_a_script_keeps_its_name_of_the_schedule(tmp_path: Path) -> None:
    config = '[program]\nkind = "script"\n[run]\nseed = 1\n[run.schedule]\nshape = "cosine"\n'
    run = written(tmp_path / "run", [train(10)], config=config)
    append_changes(run, [SettingChange(0, 4, "schedule", {"shape": "cosine"}, {"shape": "linear"})])
    rows = tables.settings(read_reported_run(run), limit=9, max_length=80)
    assert [(name, value.split()[0]) for name, value, _ in rows] == [
        ("seed", "1"),
        ("schedule.shape", "linear"),
    ]


def test_the_settings_of_a_run_without_changes_are_those_of_its_file(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [train(1)], config=CONFIG, **SESSION)
    rows = tables.settings(read_reported_run(run), limit=1000, max_length=400)
    assert "changed" not in {origin for _, _, origin in rows}


def forged(**values: Any) -> str:
    """A line with the right hash, as another program may write it."""
    fields = _values(SettingChange(1, 4, "clip", "off", "norm 1.0")) | values
    del fields["sha256"]
    text = json.dumps(fields, ensure_ascii=False)
    digest = sha256(("0" * 64 + text).encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}) + "\n"


@pytest.mark.parametrize(
    "values",
    [
        {"from_step": "4"},
        {"from_step": -1},
        {"from_step": True},
        {"setting": 3},
        {"because": {}},
        {"follows": {"clip": 3}},
        {"follows": []},
        {"origins": [1]},
        {"stretches": 3},
    ],
)
def test_a_line_of_another_type_is_damage(values: dict[str, Any], tmp_path: Path) -> None:
    run = written(tmp_path / "run", [train(1)], config=CONFIG, **SESSION)
    (run / "changes.jsonl").write_text(forged())
    assert len(read_changes(run)) == 1
    (run / "changes.jsonl").write_text(forged(**values))
    with refused("journal-of-changes-damaged", sf.CheckpointError, line=1):
        read_changes(run)
    assert "changes.jsonl" in page_of([run])


@pytest.mark.parametrize(
    "now", [None, 3, "x", [], {}, {"shape": 7}, {"shape": "cosine", "warmup": {}}]
)
def test_values_that_no_setting_can_have_leave_a_page(
    now: Any, changed: Path, tmp_path: Path
) -> None:
    import shutil

    run = Path(shutil.copytree(changed, tmp_path / "run"))
    (run / "changes.jsonl").unlink()
    for setting in ("schedule", "batch_size", "length", "optimizer.lr"):
        append_changes(run, [SettingChange(0, 4, setting, now, now)])
    assert recorded_settings(read_run(run)).known_course() is None
    assert page_of([run]).endswith("</html>")
    assert isinstance(sf.load(run).diagnose(), list)


def test_a_run_that_is_built_again_at_a_change_is_running(tmp_path: Path) -> None:
    seen: list[tuple[str, set[str]]] = []

    def model() -> torch.nn.Module:
        if (tmp_path / "metrics.jsonl").exists():
            saved = sf.load(tmp_path)
            seen.append((saved.status, {finding.name for finding in saved.diagnose()}))
        return torch.nn.Linear(2, 1)

    inputs = torch.randn(64, 2)
    run = sf.Run(
        model=model,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        train_data=(inputs, inputs.sum(1, keepdim=True)),
        optimizer=sf.optim.adamw(lr=1e-2),
        batch_size=8,
        length="20 steps",
        run_dir=tmp_path,
        console=False,
        report=False,
    )
    with run:
        for step in run:
            if step.index == 9:
                run.change("optimizer.lr", 1e-3)

    assert [status for status, _ in seen] == ["running"]
    assert "ended-early" not in seen[0][1]
    assert sf.load(tmp_path).status == "finished"
