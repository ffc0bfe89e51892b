"""Law 19, of changes that are to come: a journal's lines hold by their steps, and a later line
supersedes what was to come of its setting.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import surefoot as sf
from identities.test_law_19_changes import run_in
from same_bits import assert_same_bits, newest_checkpoint, tensors_of
from surefoot.config.setting_change import SettingChange
from surefoot.tracking.change_journal import append_changes, read_changes

TO_COME = [
    SettingChange(0, 8, "batch_size", 8, 12, follows={"micro_batch_size": [8, 6]}),
    SettingChange(0, 14, "batch_size", 12, 24, follows={"micro_batch_size": [6, 6]}),
    SettingChange(0, 11, "clip", "norm 1.0", "value 0.1"),
]


def test_changes_in_the_midst_of_others_end_with_the_bits_of_the_whole_journal(
    tmp_path: Path,
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    append_changes(changed, TO_COME)
    run_in(changed, stop_after="5 steps").train()
    sf.load(changed).change(**{"optimizer.lr": 1e-3, "clip": "auto 0.5"})
    run_in(changed, stop_after="10 steps").train()
    sf.load(changed).change(batch_size=20)
    run_in(changed).train()
    assert [change.from_step for change in read_changes(changed)] == [8, 14, 11, 5, 5, 10]
    assert sf.load(changed).settings_at(14)["batch_size"] == 20
    assert sf.load(changed).settings_at(11)["clip"] == "auto 0.5"

    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(changed / "changes.jsonl", given)
    for step in range(2, 15):  # a resume after every step
        run_in(given, stop_after=f"{step} steps").train()
    run_in(given).train()

    assert sf.load(given).step == sf.load(changed).step
    assert_same_bits(tensors_of(newest_checkpoint(given)), tensors_of(newest_checkpoint(changed)))
    assert sf.load(run_in(given)).verify(steps="all").problems == []
