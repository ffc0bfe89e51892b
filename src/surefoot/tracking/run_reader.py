"""Reader of a run's directory: settings, sessions, crashes, the newest state.json, and records;
without torch and locks.

`read_run` lists missing or damaged files in `RunFiles.problems`. `read_settings` and
`read_sessions` raise errors.
"""

import json
import os
import re
import struct
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypedDict

from surefoot.checkpoint.manifest import FORMATS, MANIFEST, STATE, from_bytes
from surefoot.checkpoint.state_json import SavedState, misshapen, parse_state, typed_state
from surefoot.config.behavior import behavior_of, known_behavior, newest_behavior
from surefoot.config.paths import open_regular, printable, read_regular
from surefoot.config.setting_change import SettingChange, is_journal_of, left_by
from surefoot.config.toml import origins, program, values
from surefoot.errors import CheckpointError, ConfigError, first_line
from surefoot.tracking.change_journal import CHANGES, read_changes

Standing = Literal["running", "over", "unknown"]
HELD: set[Path] = set()  # directories locked by runs of this process
_MAX_CRASHES = 10

_DARWIN = sys.platform == "darwin"
_FLOCK = "qqihh" if _DARWIN else "hhqqi0q"  # struct flock in fcntl.h


class SessionEntry(TypedDict, total=False):
    """A start or resume in environment.json; any key may be missing if another tool wrote the
    file.
    """

    step: int
    time: str
    machine: dict[str, Any]
    data: dict[str, Any] | None
    python: str
    numpy: str
    platform: str
    processors: int | None
    memory_bytes: int | None
    command: list[str]
    numbered: str  # run_dir with {n}, of a session that has chosen the number
    directory: str
    git_commit: str | None
    count_unit: str
    workers: int
    settings: dict[str, Any]  # of the program, of those that can change
    origins: dict[str, str]  # of these settings
    auto: dict[str, str]  # what "auto" is for this run
    takes_changes: bool  # the run can be built again while it trains


@dataclass(frozen=True)
class Settings:
    """The content of config.toml: settings and their origins by dotted name, [program], and the
    nested settings of a script.
    """

    flat: Mapping[str, Any]
    origins: Mapping[str, str]
    program: Mapping[str, Any]
    of_script: Mapping[str, Any]

    @property
    def script(self) -> bool:
        """True if a user's script built the run, so that no subcommand can rebuild the run."""
        return self.program.get("kind") == "script"


@dataclass(frozen=True)
class RunFiles:
    """The small files of a run's directory; `step` is the step of the newest checkpoint with a
    readable `state`.
    """

    path: Path
    config: Settings
    sessions: tuple[SessionEntry, ...]
    crashes: tuple[Mapping[str, Any], ...]  # newest first; "words" holds the text file of a crash
    step: int
    state: SavedState | None
    problems: tuple[str, ...]
    changes: tuple[SettingChange, ...] = ()  # of settings, by the journal

    @property
    def name(self) -> str:
        return self.path.resolve().name or str(self.path)

    @property
    def planned_steps(self) -> int | None:
        """The planned number of steps, or None if unknown."""
        if self.state is not None:
            return self.state.planned_steps
        length = self.config.flat.get("length")
        steps = re.fullmatch(r"([\d_]+) steps?", length) if isinstance(length, str) else None
        return int(steps[1]) if steps else None


def read_run(path: Path) -> RunFiles:
    """Read a run's files without loading weights. A file that cannot be read is a problem in the
    result, not an error.
    """
    problems: list[str] = []

    @contextmanager
    def reading(name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass
        except (ConfigError, CheckpointError) as problem:
            problems.append(first_line(problem))
        except OSError as problem:
            problems.append(f"{name} cannot be read: {problem.strerror}")
        except ValueError as problem:
            problems.append(f"{name} cannot be read: {problem}")

    config = Settings({}, {}, {}, {})
    sessions: tuple[SessionEntry, ...] = ()
    with reading("config.toml"):
        config = read_settings(path)
    with reading("environment.json"):
        sessions = read_sessions(path)
    step, state = newest_state(path)
    changes: tuple[SettingChange, ...] = ()
    with reading(CHANGES):
        changes = read_changes(path)
        journal_of(path, step, state)
    return RunFiles(path, config, sessions, _crashes(path), step, state, tuple(problems), changes)


def journal_of(run: Path, step: int, state: SavedState | None) -> tuple[SettingChange, ...]:
    """Return the journal of a run, whose newest checkpoint has `step` and `state`. Raises
    `CheckpointError` for an edited journal, and for one that lacks a change which the checkpoint
    has had.
    """
    changes = read_changes(run)
    if state is not None and not is_journal_of(state.changes, step, changes):
        raise CheckpointError(
            "journal-of-another-checkpoint",
            problem=f"the newest checkpoint of {run}, of step {step}, was saved after other changes"
            f" than {CHANGES} has",
            reason="the journal says which settings the run had at which step",
            remedy="restore the file from a copy of the run",
            number=0 if state.changes is None else state.changes["number"],
        )
    return changes


def read_settings(path: Path) -> Settings:
    """Read config.toml; raise `OSError`, `UnicodeDecodeError` or `ConfigError` if the file is
    missing or damaged.
    """
    file = path / "config.toml"
    text = read_regular(file).decode()
    flat = values(text, where=str(file))
    program_table = program(text, where=str(file))
    of_script = None
    if program_table.get("kind") == "script":
        of_script = tomllib.loads(text).get("run")
        flat = {name.removeprefix("run."): value for name, value in flat.items()}
    if not isinstance(of_script, dict):
        of_script = {}
    return Settings(flat, origins(text), program_table, of_script)


def read_sessions(path: Path) -> tuple[SessionEntry, ...]:
    """Read environment.json; raise `OSError` if the file is missing, and `ValueError` if the file
    lists no sessions.
    """
    try:
        environment = json.loads(read_regular(path / "environment.json"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    sessions = environment.get("sessions") if isinstance(environment, dict) else None
    problem = misshapen(sessions, list[SessionEntry], "sessions")
    if problem is not None:
        raise ValueError(problem)
    return tuple(sessions or ())


def read_state(path: Path, step: int) -> SavedState | None:
    """Return a checkpoint's state.json without checking its hash, or None if the file is missing or
    damaged.
    """
    file = path / "checkpoints" / f"step-{step:08d}" / STATE
    try:
        return typed_state(parse_state(read_regular(file)))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Beginning:
    """How a run began: what later sessions keep, whatever is now the default."""

    behavior: Any  # a number, which may be one that this version lacks
    batch_size: int | str | None = None
    micro_batch_size: int | str | None = None
    exact_sums: bool = True  # 0.1.0 did not know the setting
    precision: str | None = None
    channels_last: bool | None = None
    compile: bool | None = None
    schedule_of_steps: int | None = None
    step: int = 0  # of the newest checkpoint, from which a session goes on
    evaluation_due: bool = False  # a stop has cut off the evaluation after this step

    @property
    def is_new(self) -> bool:
        """True if no run has begun yet."""
        return self.schedule_of_steps is None

    def micro_batch_size_for(self, batch_size: int | str | None) -> int | str | None:
        """Return the micro-batch size if the batch size is the same (None: any), else None."""
        return self.micro_batch_size if batch_size in (None, self.batch_size) else None


def new_beginning() -> Beginning:
    """Return the beginning of a new run."""
    return Beginning(newest_behavior())


def read_beginning(path: Path) -> Beginning:
    """Return how the run in a directory began, or the beginning of a new run without a readable
    run.

    The newest state.json with the hash that its manifest names is read: a resume uses no other. If
    none is intact, the sizes and the behavior are those of a damaged one, so that the data are read
    as they were until the opening names the damage.
    """
    for step, state in _states_of_manifests(path):
        beginning = beginning_in(state.identity)
        return replace(beginning, step=step, evaluation_due=state.evaluation_due)
    _, damaged = newest_state(path)
    if damaged is None:
        return new_beginning()
    return replace(
        beginning_in(damaged.identity),
        precision=None,
        channels_last=None,
        compile=None,
        schedule_of_steps=None,
    )


def beginning_in(identity: Mapping[str, Any]) -> Beginning:
    """Return how a run began, from the identity in its checkpoints."""
    return Beginning(
        batch_size=identity.get("batch_size"),
        micro_batch_size=identity.get("micro_batch_size"),
        exact_sums=bool(identity.get("exact_sums")),
        behavior=behavior_of(identity),
        precision=identity.get("precision"),
        channels_last=identity.get("channels_last"),
        compile=identity.get("compile"),
        schedule_of_steps=identity.get("schedule_of_steps"),
    )


def behavior_in(path: Path | str | None) -> int:
    """Return the behavior of the run in a directory, or the newest one without a run or directory.

    What reads samples before the run is built, such as a recipe, asks here. Raises
    `CheckpointError` if this version lacks the behavior.
    """
    if path is None:
        return newest_behavior()
    return known_behavior(read_beginning(Path(path)).behavior, run=str(path))


def started_run(path: Path | str | None) -> Path | None:
    """Return the directory of a run that has a checkpoint; None if no run has started there."""
    if path is None or not any(Path(path).glob("checkpoints/step-*")):
        return None
    return Path(path)


def _states_of_manifests(path: Path) -> Iterator[tuple[int, SavedState]]:
    """Yield the steps and states of checkpoints whose state.json is intact, the newest first. Those
    of a branch that the run has left are none of them.
    """
    lines = _lines_of(path)
    for directory in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        try:
            manifest = from_bytes(read_regular(directory / MANIFEST))
            content = read_regular(directory / STATE)
            digest = sha256(content).hexdigest()
            if manifest.files.get(STATE) == (len(content), digest):
                state = typed_state(parse_state(content))
                if left_by(state.changes, manifest.step, lines) is None:
                    yield manifest.step, state
        except (OSError, ValueError, RecursionError):
            continue


def newest_state(path: Path) -> tuple[int, SavedState | None]:
    """Return the step and content of the newest readable state.json, or (0, None) without a
    readable file. That of a branch that the run has left is none.
    """
    lines = _lines_of(path)
    for directory in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        number = directory.name.removeprefix("step-")
        state = read_state(path, int(number)) if number.isdecimal() else None
        if state is not None and left_by(state.changes, int(number), lines) is None:
            return int(number), state
    return 0, None


def _lines_of(path: Path) -> tuple[SettingChange, ...]:
    """Return the lines of a run's journal; none of one that cannot be read, which is named where
    its settings are needed.
    """
    try:
        return read_changes(path)
    except (OSError, CheckpointError):
        return ()


def other_format(path: Path) -> int | None:
    """Return the format of a run's checkpoints if this version does not read it, else None."""
    for file in sorted((path / "checkpoints").glob(f"step-*/{MANIFEST}"), reverse=True):
        with suppress(OSError, ValueError, RecursionError):
            manifest = json.loads(read_regular(file))
            version = manifest.get("format_version") if isinstance(manifest, dict) else None
            if isinstance(version, int):
                return None if version in FORMATS else version
    return None


def unreadable_format(version: int, *, run: Path | str) -> CheckpointError:
    """Return the error for a run of another format. `run` is the path as the user gave it."""
    return CheckpointError(
        "run-format-unknown",
        problem=f"another version of surefoot wrote {run} (format {version}; this version reads"
        f" {FORMATS[0]} to {FORMATS[-1]})",
        remedy="install that version, or train a new run in another directory",
        run=str(run),
        format=version,
    )


REPORT = "report.html"
"""The page about a run, in its directory."""
_NEAREST = 5  # runs that the error for a missing run names


def is_run(path: Path) -> bool:
    """Return True if a directory has the settings or the records of a run."""
    return (path / "config.toml").is_file() or (path / "metrics.jsonl").is_file()


def missing_run(path: Path, runs: Path) -> ConfigError:
    """Return the error for a path that is not the directory of a run. It names the nearest of the
    runs in the directory `runs`.
    """
    from difflib import SequenceMatcher

    files = [*runs.glob("*/config.toml"), *runs.glob("*/metrics.jsonl")]
    names = sorted({printable(file.parent.name) for file in files})
    ratios = {name: SequenceMatcher(None, path.name, name).ratio() for name in names}
    nearest = sorted(names, key=lambda name: -ratios[name])[:_NEAREST]
    present = ", ".join(nearest) or "no runs"
    if len(names) > _NEAREST:
        present += f", and {len(names) - _NEAREST} more"
    shown = printable(str(path))
    problem = f"no run {shown}"
    if path.is_dir():
        problem = (
            f"{shown} is a directory, but not a run: it has no config.toml and no metrics.jsonl"
        )
    return ConfigError(
        "run-missing",
        problem=problem,
        reason=f"{runs} has {present}",
        remedy="give the directory that was passed as run_dir; a run has it once it trains",
        run=shown,
        nearest=nearest,
    )


def unreadable_records(path: Path, problem: OSError) -> ConfigError:
    """Return the error for a metrics.jsonl that cannot be read."""
    return ConfigError(
        "records-unreadable",
        problem=f"cannot read {path}: {problem.strerror or problem}",
        path=path,
    )


def run_file_not_written(path: Path, problem: OSError) -> CheckpointError:
    """Return the error for a file of a run that cannot be written."""
    return CheckpointError(
        "run-file-not-written",
        problem=f"cannot write {path}: {problem.strerror or problem}",
        path=path,
    )


def refuse_other_format(path: Path, *, shown: Path | str | None = None) -> None:
    """Raise `CheckpointError` if a run has a format that this version does not read. `shown` is the
    path as the user gave it.
    """
    version = other_format(path)
    if version is not None:
        raise unreadable_format(version, run=shown or path)


def standing_of(run: Path) -> Standing:
    """Return "running" if a process is training in the directory, else "over" or "unknown", without
    acquiring the lock.
    """
    holder = lock_holder(run)
    if holder is None:
        return "unknown"
    return "over" if holder == 0 else "running"


def lock_holder(run: Path) -> int | None:
    """Return the process that has locked a run's directory: 0 if none has, -1 if it has no number
    here, None if that is unknown.
    """
    if run.resolve() in HELD:  # opening and closing the lock file would release the lock
        return os.getpid()
    if sys.platform == "win32":
        return None
    import fcntl

    whole_file = (0, 0, 0, fcntl.F_WRLCK, 0) if _DARWIN else (fcntl.F_WRLCK, 0, 0, 0, 0)
    question = struct.pack(_FLOCK, *whole_file)
    try:
        with open_regular(run / ".lock") as lock:
            answer = struct.unpack(_FLOCK, fcntl.fcntl(lock, fcntl.F_GETLK, question))
    except OSError:  # the lock is missing, belongs to another user, or the file system has no locks
        return None
    if _DARWIN:
        _, _, process, kind, _ = answer
    else:
        kind, _, _, _, process = answer
    if kind == fcntl.F_UNLCK:
        return 0
    if process <= 0:  # of another container
        return -1
    return int(process)


def is_running(run: Path) -> bool:
    """Return True if a living process trains a run."""
    return standing_of(run) == "running"


@cache
def surefoot_version() -> str:
    """Return the version of the installed package, or 'unknown' if it is not installed."""
    try:
        return version("surefoot")
    except PackageNotFoundError:
        return "unknown"


def divergence_from(path: Path, step: int) -> int | None:
    """Return the first step from `step` on at which an earlier session diverged, or None."""
    steps = []
    for crash in _crashes(path):
        crash_step = crash.get("step")
        has_diverged = str(crash.get("error", "")).startswith("DivergedError")
        if has_diverged and isinstance(crash_step, int) and crash_step >= step:
            steps.append(crash_step)
    return min(steps, default=None)


def _crashes(path: Path) -> tuple[Mapping[str, Any], ...]:
    crashes = []
    for file in sorted((path / "crash").glob("step-*.json"), reverse=True)[:_MAX_CRASHES]:
        with suppress(OSError, ValueError, RecursionError):
            crash = json.loads(read_regular(file))
            words = None
            with suppress(OSError, UnicodeDecodeError):
                words = read_regular(file.with_suffix(".txt")).decode()
            if isinstance(crash, dict):
                crashes.append({**crash, "words": words})
    return tuple(crashes)
