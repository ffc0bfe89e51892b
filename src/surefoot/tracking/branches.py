"""The branches that a run has left by going back to an earlier step: `branches/NUMBER` in its
directory, by the number of the line in its journal. Imports no torch.

A branch has the form of a run: its records, its settings, its journal up to that line, and the
checkpoints of the steps behind the one to which the run went back. The checkpoints are removed when
the run has passed them; the records stay.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.checkpoint.filesystem import DISK
from surefoot.checkpoint.manifest import STATE
from surefoot.checkpoint.state_json import SavedState, parse_state, typed_state
from surefoot.config.paths import make_no_follow, open_regular, read_regular, write_whole
from surefoot.config.setting_change import SettingChange, left_by
from surefoot.tracking.change_journal import CHANGES, read_changes
from surefoot.tracking.run_reader import run_file_not_written

BRANCHES = "branches"
_COPIED = ("config.toml", "environment.json", "metrics.jsonl")
_REMOVED = ".removed-checkpoints"
_READ_BYTES = 1 << 20


def leave_branches(run: Path) -> None:
    """Move what a run has left behind into the directory of its branch, as its journal says. Does
    nothing if that is done; what a kill has cut off is completed. The run's lock must be owned.

    Raises `CheckpointError` if a file cannot be written or moved.
    """
    lines = read_changes(run)
    if not any(line.goes_back for line in lines):
        return
    try:
        for checkpoint, number in _left_checkpoints(run, lines):
            branch = run / BRANCHES / str(number)
            _begin(branch, run, line_count=number - 1)
            _move_crashes(run, branch, since=lines[number - 1].from_step)
            _move(checkpoint, branch / "checkpoints")
    except OSError as problem:
        raise run_file_not_written(run / BRANCHES, problem) from problem


def is_at_branching(run: Path, lines: Sequence[SettingChange]) -> bool:
    """Return True if a run has gone back by the lines of its journal, and nobody has trained it
    since: its records are still those of the branch that it has left.
    """
    backs = [line for line in lines if line.goes_back]
    if not backs:
        return False
    # a kill has cut off `leave_branches`
    if next(_left_checkpoints(run, lines), None) is not None:
        return True
    records = _size_of(run / "metrics.jsonl")
    copies = [_size_of(run / BRANCHES / str(back.number) / "metrics.jsonl") for back in backs]
    return records > 0 and records in copies  # a session begins with another record


def left_steps(run: Path) -> dict[Path, int]:
    """Return the newest step of each branch that still has checkpoints."""
    newest: dict[Path, int] = {}
    for checkpoint in run.glob(f"{BRANCHES}/*/checkpoints/step-*"):
        branch = checkpoint.parent.parent
        step = _step_of(checkpoint)
        if step is not None:
            newest[branch] = max(step, newest.get(branch, 0))
    return newest


@dataclass
class LeftBranches:
    """The branches of a run that still have checkpoints, with the newest step of each."""

    newest: dict[Path, int] = field(default_factory=dict)

    def passed(self, saved: int | None) -> None:
        """Remove the checkpoints of the branches that the run has passed: its checkpoint of step
        `saved` is on the disk. What cannot be removed stays.
        """
        for branch, step in list(self.newest.items()):
            if saved is None or saved < step:
                continue
            del self.newest[branch]
            with suppress(OSError):
                # at once, so that no checkpoint is ever incomplete
                DISK.rename(branch / "checkpoints", branch / _REMOVED)
            shutil.rmtree(branch / _REMOVED, ignore_errors=True)


def left_branches(run: Path) -> LeftBranches:
    """Return the branches of a run that still have checkpoints, and remove what a kill has left of
    others.
    """
    for removed in run.glob(f"{BRANCHES}/*/{_REMOVED}"):
        shutil.rmtree(removed, ignore_errors=True)
    return LeftBranches(left_steps(run))


def _size_of(file: Path) -> int:
    """Return the size of a file in bytes, or 0 without a file."""
    return file.stat().st_size if file.is_file() else 0


def _left_checkpoints(run: Path, lines: Sequence[SettingChange]) -> Iterator[tuple[Path, int]]:
    """Yield the checkpoints of branches that the run has left, and the numbers of the lines by which
    it left them.
    """
    # `.replaced-step-00000600` becomes a checkpoint again if its replacement is missing
    for checkpoint in sorted((run / "checkpoints").glob("*step-*")):
        step = _step_of(checkpoint)
        state = _state_of(checkpoint)
        if step is None or state is None:
            continue
        number = left_by(state.changes, step, lines)
        if number is not None:
            yield checkpoint, number


def _step_of(checkpoint: Path) -> int | None:
    number = checkpoint.name.removeprefix(".replaced-").removeprefix("step-")
    return int(number) if number.isdecimal() else None


def _state_of(checkpoint: Path) -> SavedState | None:
    try:
        return typed_state(parse_state(read_regular(checkpoint / STATE)))
    except (OSError, ValueError):
        return None


def _begin(branch: Path, run: Path, *, line_count: int) -> None:
    """Create the directory of a branch, with the files of the run as they were."""
    for directory in (branch.parent, branch, branch / "checkpoints"):
        make_no_follow(directory)
        DISK.flush_directory(directory.parent)
    for name in _COPIED:
        source = run / name
        if source.is_file() and not (branch / name).exists():
            write_whole(branch / name, _pieces(source))
    journal = read_regular(run / CHANGES).splitlines(keepends=True)[:line_count]
    if journal:
        write_whole(branch / CHANGES, b"".join(journal))
    DISK.flush_directory(branch)


def _pieces(file: Path) -> Iterator[bytes]:
    with open_regular(file) as opened:
        while piece := opened.read(_READ_BYTES):
            yield piece


def _move(checkpoint: Path, into: Path) -> None:
    DISK.rename(checkpoint, into / checkpoint.name)
    DISK.flush_directory(into)
    DISK.flush_directory(checkpoint.parent)


def _move_crashes(run: Path, branch: Path, *, since: int) -> None:
    """Move the reports of crashes in steps that are computed anew with other settings."""
    for report in sorted((run / "crash").glob("step-*")):
        number = report.name.removeprefix("step-").partition(".")[0].partition("-")[0]
        if number.isdecimal() and int(number) >= since:
            make_no_follow(branch / "crash")
            os.replace(report, branch / "crash" / report.name)
