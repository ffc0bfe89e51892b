"""The journal of changes: appended, read, torn, edited."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import surefoot as sf
from surefoot.checkpoint.filesystem import DISK
from surefoot.config.setting_change import SettingChange
from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes, take_back

LR = SettingChange(0, 10, "optimizer.lr", 0.01, 0.001, because="spikes")
CLIP = SettingChange(0, 20, "clip", "off", "norm 1.0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append_changes(tmp_path, [LR, CLIP])
    return tmp_path


def test_lines_come_back_in_order_with_their_numbers(run: Path) -> None:
    changes = read_changes(run)
    assert [change.number for change in changes] == [1, 2]
    assert [change.setting for change in changes] == ["optimizer.lr", "clip"]
    assert changes[0].because == "spikes"
    assert changes[0].sha256 != changes[1].sha256


def test_a_directory_without_a_journal_has_no_changes(tmp_path: Path) -> None:
    assert read_changes(tmp_path) == ()


def test_a_later_line_changes_no_byte_of_an_earlier_one(run: Path) -> None:
    before = (run / CHANGES).read_bytes()
    append_changes(run, [LR])
    assert (run / CHANGES).read_bytes().startswith(before)
    assert len(read_changes(run)) == 3


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_last_line_that_was_not_written_whole_counts_as_never_written(
    cut: int, run: Path
) -> None:
    whole = (run / CHANGES).read_bytes()
    (run / CHANGES).write_bytes(whole[:-cut])
    assert [change.number for change in read_changes(run)] == [1]

    append_changes(run, [CLIP])
    assert [change.number for change in read_changes(run)] == [1, 2]


@pytest.mark.parametrize("keep", [0, 1])
def test_lines_that_are_taken_back_leave_the_others_as_they_were(keep: int, run: Path) -> None:
    before = read_changes(run)
    take_back(run, keep=keep)
    assert read_changes(run) == before[:keep]
    append_changes(run, [CLIP])
    assert [change.number for change in read_changes(run)] == [*range(1, keep + 2)]


def test_a_kill_before_the_disk_has_what_is_taken_back_leaves_a_readable_journal(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_changes(run)
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(DISK, "flush", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        take_back(run, keep=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert read_changes(run) == before[:1]


def test_zeros_after_a_power_loss_are_no_line(run: Path) -> None:
    with (run / CHANGES).open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    assert len(read_changes(run)) == 2


def test_one_changed_byte_of_the_last_line_is_no_torn_line(run: Path) -> None:
    text = (run / CHANGES).read_text()
    (run / CHANGES).write_text(text[:-2] + "|\n")
    with pytest.raises(sf.CheckpointError) as refusal:
        read_changes(run)
    assert refusal.value.fields["line"] == 2


def edited(line: str, **values: object) -> str:
    return json.dumps(json.loads(line) | values)


@pytest.mark.parametrize(
    "values", [{"now": 1.0}, {"from_step": 0}, {"because": "x"}, {"sha256": "0" * 64}]
)
@pytest.mark.parametrize("place", [0, 1])
def test_an_edited_line_is_named(place: int, values: dict[str, object], run: Path) -> None:
    lines = (run / CHANGES).read_text().splitlines()
    lines[place] = edited(lines[place], **values)
    (run / CHANGES).write_text("\n".join(lines) + "\n")

    with pytest.raises(sf.CheckpointError) as refusal:
        read_changes(run)
    assert refusal.value.code == "journal-of-changes-damaged"
    assert refusal.value.fields["line"] == place + 1


def test_a_line_that_was_removed_is_noticed(run: Path) -> None:
    second = (run / CHANGES).read_text().splitlines()[1]
    (run / CHANGES).write_text(second + "\n")
    with pytest.raises(sf.CheckpointError) as refusal:
        read_changes(run)
    assert refusal.value.fields["line"] == 1


def test_a_link_in_the_place_of_the_journal_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / CHANGES).symlink_to(other)
    with pytest.raises(OSError, match="a link"):
        append_changes(run, [LR])
    assert other.read_text() == ""
