"""Law 19 for the precision: "auto" is resolved when it is changed, and 8-bit layers come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import surefoot as sf
from identities.changed_runs import CHANGED_AT, assert_same_end, given_the_journal_of, run_in
from refused import refused
from surefoot.config.setting_change import SettingChange
from surefoot.tracking.change_journal import append_changes, read_changes
from train.test_fp8 import built, emulated

__all__ = ["emulated"]


@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp32", "bf16")]
)
def test_another_precision_is_that_of_a_run_given_its_journal(
    before: str, after: str, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    run_in(changed, precision=before, stop_after=f"{CHANGED_AT} steps").train()
    sf.load(changed).change(precision=after)
    run_in(changed, precision=before, stop_after="12 steps").train()
    run = run_in(changed, precision=before)
    run.train()
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, precision=before).train()
    assert_same_end(given, changed)
    assert run.parts.plan.precision == after


def test_a_loss_scale_begins_anew(tmp_path: Path) -> None:
    run_in(tmp_path, precision="fp16", stop_after="4 steps").train()
    for precision in ("fp32", "fp16"):
        sf.load(tmp_path).change(precision=precision)
    run = run_in(tmp_path, precision="fp16")
    with run:
        scale = run.parts.run_state.precision.loss_scale
        assert scale is not None
        assert float(scale.scale) == 65536
        assert int(scale.good_steps) == 0


def test_auto_is_resolved_when_it_is_changed(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    run_in(changed, precision="bf16", stop_after=f"{CHANGED_AT} steps").train()
    sf.load(changed).change(precision="auto")
    (change,) = read_changes(changed)
    assert (change.was, change.now) == ("bf16", "fp32")
    assert list(change.origins) == ["given", "auto"]

    run = run_in(changed, precision="bf16")
    run.train()
    assert run.parts.plan.precision == "fp32"
    given = given_the_journal_of(changed, tmp_path / "given")
    run_in(given, precision="bf16").train()
    assert_same_end(given, changed)


def test_a_run_that_chose_its_precision_says_so_in_the_line_of_a_change(tmp_path: Path) -> None:
    run_in(tmp_path, precision="auto", stop_after="2 steps").train()
    sf.load(tmp_path).change(precision="bf16", clip="off")
    first, second = read_changes(tmp_path)
    assert (first.was, list(first.origins)) == ("fp32", ["auto", "given"])
    assert list(second.origins) == ["given", "given"]
    run_in(tmp_path, precision="auto", stop_after="4 steps").train()
    sf.load(tmp_path).change(precision="fp16", **{"optimizer.lr": 1e-3})
    *_, third, fourth = read_changes(tmp_path)
    assert list(third.origins) == ["changed", "given"]
    assert list(fourth.origins) == ["given", "given"]


def test_auto_of_a_run_that_did_not_record_it_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path, precision="bf16", stop_after="2 steps").train()
    environment = tmp_path / "environment.json"
    sessions = json.loads(environment.read_text())
    for session in sessions if isinstance(sessions, list) else sessions["sessions"]:
        session.pop("auto", None)
    environment.write_text(json.dumps(sessions))
    with refused("precision-auto-unknown"):
        sf.load(tmp_path).change(precision="auto")
    assert read_changes(tmp_path) == ()


def test_a_journal_without_origins_is_read(tmp_path: Path) -> None:
    append_changes(tmp_path, [SettingChange(0, 3, "clip", "off", "norm 1.0")])
    assert "origins" not in (tmp_path / "changes.jsonl").read_text()
    (change,) = read_changes(tmp_path)
    assert change.origins == ()


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp8"), ("fp8", "bf16")])
@pytest.mark.usefixtures("emulated")
def test_layers_in_8_bits_come_and_go_with_the_moments_of_their_weights(
    before: str, after: str, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    settings: dict[str, Any] = {"precision": before, "stop_after": "3 steps"}
    built(changed, **settings).train()
    sf.load(changed).change(precision=after)
    built(changed, precision=before, stop_after="5 steps").train()
    run = built(changed, precision=before)
    run.train()
    given = given_the_journal_of(changed, tmp_path / "given")
    built(given, precision=before).train()
    assert_same_end(given, changed, step=6)
    names = {type(module).__name__ for module in run.state.model.modules()}
    assert ("Float8Linear" in names) == (after == "fp8")
