"""The journal of changes of a run, changes.jsonl: which setting has which value from which step on,
and why. Imports no torch.

A line that a step has had stays, and others are only appended. A run that cannot go on with new
lines takes them away. Each line has a hash over its values and the hash of the line before, so an
edited or foreign line is found. A last line that was not written whole counts as never written. A
run that goes back appends a line too, which supersedes others.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from surefoot.checkpoint.filesystem import DISK
from surefoot.config.paths import open_no_follow, read_regular
from surefoot.config.setting_change import SettingChange
from surefoot.errors import CheckpointError

CHANGES = "changes.jsonl"
_BEFORE_THE_FIRST = "0" * 64


def read_changes(run: Path) -> tuple[SettingChange, ...]:
    """Return the changes of a run, in order. Raises `CheckpointError` for an edited journal."""
    try:
        return read_journal(run / CHANGES)
    except (FileNotFoundError, NotADirectoryError):
        return ()


def read_journal(file: Path) -> tuple[SettingChange, ...]:
    """Return the changes in a file, in order. Raises `OSError` for one that cannot be read, and
    `CheckpointError` for an edited one.
    """
    return tuple(_changes_in(_whole_lines(read_regular(file)), file))


def append_changes(run: Path, changes: Iterable[SettingChange]) -> tuple[SettingChange, ...]:
    """Add lines to the journal, and wait until they are on the disk. Returns them with their
    numbers and hashes. Raises `CheckpointError` for an edited journal.
    """
    path = run / CHANGES
    is_new = not path.exists()
    with os.fdopen(open_no_follow(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        _wait_for_lock(file)
        lines = _whole_lines(file.read())
        before = _changes_in(lines, path)
        written: list[SettingChange] = []
        for change in changes:
            numbered = _completed(change, number=len(before) + 1, before=_last_hash(before))
            before.append(numbered)
            written.append(numbered)
        whole = sum(len(line) + 1 for line in lines)
        file.truncate(whole)  # the rest was never written whole
        file.seek(whole)
        try:
            for change in written:
                file.write((_text(_values(change)) + "\n").encode())
            file.flush()
            DISK.flush(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), whole)  # all of them or none
            raise
    if is_new:
        DISK.flush_directory(run)
    return tuple(written)


def take_back(run: Path, *, keep: int) -> None:
    """Take away the lines behind the first `keep`, which no step of the run has had."""
    path = run / CHANGES
    with os.fdopen(open_no_follow(path, os.O_RDWR), "r+b") as file:
        _wait_for_lock(file)
        kept = _whole_lines(file.read())[:keep]
        file.truncate(sum(len(line) + 1 for line in kept))
        file.flush()
        DISK.flush(file.fileno())


def _wait_for_lock(file: IO[bytes]) -> None:
    """Let one process at a time append, where the file system has locks."""
    if sys.platform == "win32":
        return
    import fcntl

    with suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX)  # until the file is closed


def _changes_in(lines: Iterable[bytes], file: Path) -> list[SettingChange]:
    changes: list[SettingChange] = []
    for line in lines:
        number = len(changes) + 1
        change = _parsed(line, number=number, before=_last_hash(changes))
        if change is None:
            raise CheckpointError(
                "journal-of-changes-damaged",
                problem=f"line {number} of {file} is not as it was written",
                reason="it says which settings the run had at which step",
                remedy="restore the file from a copy of the run",
                path=file,
                line=number,
            )
        changes.append(change)
    return changes


def _whole_lines(data: bytes) -> list[bytes]:
    """Return the lines that were written whole, without their ends."""
    *lines, _ = data.split(b"\n")
    if lines and not lines[-1].strip(b"\0"):  # zeros after a power loss
        lines.pop()
    return lines


def _parsed(line: bytes, *, number: int, before: str) -> SettingChange | None:
    """Return the change in a line, or None if its values or its hash differ from what was written."""
    try:
        change = SettingChange(**json.loads(line))
        is_as_written = _completed(change, number=number, before=before) == change
        is_as_written &= _has_its_types(change)
    except (TypeError, ValueError, RecursionError):
        return None
    return change if is_as_written else None


def _has_its_types(change: SettingChange) -> bool:
    """Return True if what readers compute with is of its type, and no value of another program."""
    step = change.from_step
    if not isinstance(change.origins, list | tuple) or not isinstance(change.follows, dict):
        return False
    texts = [change.setting, change.because, change.when, *change.origins, *change.follows]
    pairs = change.follows.values()
    return (
        type(step) is int
        and isinstance(change.stretches, bool)
        and step >= 0
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    )


def _completed(change: SettingChange, *, number: int, before: str) -> SettingChange:
    """Return a change with its number and its hash."""
    values = _values(change)
    values["number"] = number
    del values["sha256"]
    digest = sha256((before + _text(values)).encode()).hexdigest()
    return SettingChange(**values, sha256=digest)


def _values(change: SettingChange) -> dict[str, Any]:
    """Return the values of a line, without those that say nothing."""
    values = asdict(change)
    if not change.origins:
        del values["origins"]
    if not change.stretches:
        del values["stretches"]
    return values


def _last_hash(changes: Sequence[SettingChange]) -> str:
    return changes[-1].sha256 if changes else _BEFORE_THE_FIRST


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)
