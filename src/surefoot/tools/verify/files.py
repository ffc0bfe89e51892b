"""Checks of a run directory without building the run: every byte of every checkpoint, and
consistency.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.format import Checkpoint, DamageError
from surefoot.checkpoint.manifest import Manifest
from surefoot.checkpoint.reader import interpreted, open_checkpoint, read_manifest
from surefoot.checkpoint.reader import verify as wrong_in
from surefoot.checkpoint.state_json import SavedState
from surefoot.checkpoint.store import Store, without_checkpoint
from surefoot.config.setting_change import SettingChange, began_since
from surefoot.config.toml import without_none
from surefoot.config.user_code import digest as digest_of
from surefoot.errors import CheckpointError, ConfigError, first_line
from surefoot.tools.verify import metrics_log as logs
from surefoot.tools.verify.metrics_log import FILE, Log, Noted
from surefoot.tools.verify.verdict import Problem
from surefoot.tracking.change_journal import CHANGES
from surefoot.tracking.run_reader import (
    SessionEntry,
    journal_of,
    newest_state,
    read_sessions,
    read_settings,
)
from surefoot.train.run_identity import differences, printed_through, with_changed

_MAY_CHANGE = ("length", "init_from")  # identity settings that may change between sessions


@dataclass(frozen=True)
class StoredStep:
    """An intact checkpoint with tensors on disk, after a check of every byte."""

    path: Path
    manifest: Manifest
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def state(self) -> SavedState:
        return self.checkpoint.saved


@dataclass(frozen=True)
class Files:
    """The content of a run directory: intact checkpoints by step, records, sessions, and
    problems.
    """

    path: Path
    checkpoints: dict[int, StoredStep]
    log: Log
    sessions: Sequence[SessionEntry]
    problems: list[Problem]
    notes: list[str]

    @property
    def newest(self) -> StoredStep:
        return self.checkpoints[max(self.checkpoints)]

    def machine_of(self, step: int, *, otherwise: Checkpoint) -> Mapping[str, Any]:
        """Return the machine of a step's session; the machine of the checkpoint `otherwise` if no
        session is recorded.
        """
        # the last session that began at or before the step: each later session computes its steps
        # anew
        machine: Mapping[str, Any] = otherwise.saved.machine
        for session in self.sessions:
            if session["step"] <= step:
                machine = session["machine"]
        return machine


def check_files(path: Path) -> Files:
    """Check a run directory, without changes or locks; raise `CheckpointError` if the run has no
    checkpoint.
    """
    checkpoints, problems = _checkpoints(Store(path / "checkpoints"))
    if not checkpoints and not problems:
        raise without_checkpoint(path)
    # read last, so that the file covers all checkpoints of a running run
    data = (path / FILE).read_bytes() if (path / FILE).is_file() else b""
    noted = []
    for checkpoint in checkpoints.values():
        if checkpoint.manifest.log:
            length, digest = checkpoint.manifest.log
            noted.append(Noted(checkpoint.step, length, digest))
    log = logs.read(data, noted)
    problems += log.problems
    sessions, unread = _sessions(path)
    problems += unread
    if (path / "environment.damaged.json").exists():
        sessions = []  # the damaged file had further sessions
    notes = []
    changes: Sequence[SettingChange] = ()
    has_journal = True
    try:
        changes = journal_of(path, *newest_state(path))
    except CheckpointError as problem:
        has_journal = False
        problems.append(Problem("damaged", first_line(problem), file=CHANGES))
    if checkpoints:
        newest = checkpoints[max(checkpoints)]
        with interpreted(newest.path):
            if has_journal:  # else it is not known what changed on the way
                problems += _other_runs(checkpoints, changes)
            problems += _wrong_sessions(checkpoints, sessions, log)
            problems += _script(path, newest, changes)
            notes += _other_scores(checkpoints)
    notes += program_notes(path)
    return Files(path, checkpoints, log, sessions, problems, notes)


def program_notes(path: Path) -> list[str]:
    """Return notes on program changes since the run last started or resumed."""
    with suppress(OSError, UnicodeDecodeError, ConfigError):
        program = read_settings(path).program
        file = program.get("path")
        digest = program.get("sha256")
        if not isinstance(file, str) or not isinstance(digest, str):
            return []
        if digest_of(Path(file)) == digest:
            return []
        if not Path(file).is_file():
            return [f"{file} no longer exists"]
        return [
            f"{file} has changed since the run last started or resumed: steps are repeated with the"
            " current program"
        ]
    return []


def _checkpoints(store: Store) -> tuple[dict[int, StoredStep], list[Problem]]:
    checkpoints: dict[int, StoredStep] = {}
    problems: list[Problem] = []
    shared: dict[Path, list[str]] = {}  # problems of the files that several checkpoints refer to
    for step, path in sorted(store.all()):
        wrong = wrong_in(path, checked=shared)
        try:
            if not wrong:
                stored = StoredStep(path, read_manifest(path), open_checkpoint(path))
                if stored.state and stored.step == step:
                    checkpoints.setdefault(step, stored)
                    continue
                wrong = [f"manifest.json: is for step {stored.step}"]
        except DamageError as error:
            wrong = [error.damage.problem]
        except CheckpointError as problem:
            wrong = [str(problem).splitlines()[0]]
        if not path.is_dir():  # a running run may have deleted the directory
            continue
        for line in wrong:
            file = line.partition(":")[0]
            text = f"checkpoint {path.name} is damaged: {line}"
            problems.append(Problem("damaged", text, step=step, file=file))
    return checkpoints, problems


def _printed(state: SavedState, changes: Sequence[SettingChange]) -> dict[str, str]:
    """Return the printed forms of models as far as changes leave them as they are."""
    return {name: printed_through(changes, text) for name, text in state.architecture.items()}


def _other_runs(
    checkpoints: Mapping[int, StoredStep], changes: Sequence[SettingChange]
) -> list[Problem]:
    """Return a problem for each checkpoint whose settings or model are not those of the newest, or
    became these by no change in the journal.
    """
    problems = []
    newest = checkpoints[max(checkpoints)]
    for step, checkpoint in sorted(checkpoints.items()):
        since = began_since(checkpoint.state.changes, step, changes)
        changed = with_changed(checkpoint.state.identity, newest.state.identity, since)
        then = _lasting(changed)
        now = _lasting(newest.state.identity)
        for accepted in newest.state.fingerprints["accepted"]:
            if "data" in accepted["changed"] and accepted["step"] >= step:
                then["data"] = now["data"]
        if checkpoint.state.machine["torch"] == newest.state.machine["torch"]:
            then["architecture"] = _printed(checkpoint.state, since)
            now["architecture"] = _printed(newest.state, since)
        what = f"{checkpoint.path.name} is from a different run than {newest.path.name}"
        for line in differences(then, now)[:1]:
            problems.append(Problem("inconsistent", f"{what}: {line}", step=step))
    return problems


def _lasting(identity: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in identity.items() if name not in _MAY_CHANGE}


def _other_scores(checkpoints: Mapping[int, StoredStep]) -> list[str]:
    """Return a note on the first split whose data has changed."""
    newest = checkpoints[max(checkpoints)].state.splits
    for step, checkpoint in sorted(checkpoints.items()):
        for name, identity in checkpoint.state.splits.items():
            if name in newest and newest[name] != identity:
                return [
                    f"the data of split {name} has changed since step {step:,}: metrics before and after the change are not comparable"
                ]
    return []


def _sessions(path: Path) -> tuple[Sequence[SessionEntry], list[Problem]]:
    file = "environment.json"
    why = "is damaged: it lists no sessions"
    try:
        sessions = read_sessions(path)
        if all("step" in session and "machine" in session for session in sessions):
            return sessions, []
    except FileNotFoundError:
        why = "is missing"
    except OSError as problem:
        why = f"cannot be read: {problem.strerror}"
    except ValueError:
        pass
    return [], [Problem("damaged", f"{file} {why}", file=file)]


def _wrong_sessions(
    checkpoints: Mapping[int, StoredStep], sessions: Sequence[SessionEntry], log: Log
) -> list[Problem]:
    if not sessions:
        return []
    problems = []
    lost = _resume_without_session(sessions, log)
    if lost is not None and not log.problems:
        problems.append(f"lists no session that resumed at step {lost}, but {FILE} does")
    for step, checkpoint in sorted(checkpoints.items()):
        machine = dict(checkpoint.state.machine)
        threads = {"threads": machine["threads"]}  # the user may change their number
        if all(differences({**session["machine"], **threads}, machine) for session in sessions):
            problems.append(f"lists no session on the machine that saved {checkpoint.path.name}")
        data = [session["data"] for session in sessions if session.get("data") is not None]
        if data and checkpoint.state.identity["data"] not in data:
            problems.append(
                f"lists different training data than {checkpoint.path.name}, at step {step:,}"
            )
    return [
        Problem("inconsistent", f"environment.json {line}", file="environment.json")
        for line in problems[:1]
    ]


def _resume_without_session(sessions: Sequence[SessionEntry], log: Log) -> int | None:
    """Return the step of the first resume in the records that no session began at, in the order of
    sessions.
    """
    session_steps = iter([session["step"] for session in sessions])
    for line in log.lines:
        # the search goes on behind the session of the resume before
        if line.kind == "resume" and line.step not in session_steps:
            return line.step
    return None


def _script(path: Path, newest: StoredStep, changes: Sequence[SettingChange]) -> list[Problem]:
    try:
        settings = read_settings(path)
    except (OSError, UnicodeDecodeError, ConfigError):
        text = "config.toml is missing or is not a settings file"
        return [Problem("damaged", text, file="config.toml")]
    if not settings.of_script:
        return []
    written = with_changed(settings.of_script, newest.state.identity, changes)
    lines = differences(_comparable(written), _comparable(newest.state.identity))
    what = f"config.toml does not belong to the run in {newest.path.name}"
    return [Problem("inconsistent", f"{what}: {line}", file="config.toml") for line in lines[:1]]


def _comparable(identity: Mapping[str, Any]) -> dict[str, Any]:
    return dict(without_none(json.loads(json.dumps(_lasting(identity)))))
