"""The history of a run from its directory: a running, dead or resumed one, or one of an older version. Torch-free.

Settings are those that its newest checkpoint notes, whatever program made the run; config.toml adds what changes no result.
A damaged or missing file leaves settings out: the records alone say much.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefoot.config import program, values
from surefoot.config.paths import local_path, open_regular, read_regular
from surefoot.diagnosis.architecture import kinds_of_models
from surefoot.diagnosis.collected import Collected
from surefoot.diagnosis.described import Described, Standing
from surefoot.diagnosis.history import History
from surefoot.errors import ConfigError
from surefoot.sinks import streamed

_TIMES = 5  # as many records as a run that trains keeps in memory: of training none is thinned out up to 10,000


def history_in(path: Path | str) -> History:
    """The history of the run in a directory; `ConfigError` where there is no run."""
    run = local_path(path, setting="path")
    if not (run / "config.toml").is_file() and not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run} is no run: it holds neither config.toml nor metrics.jsonl\n"
            "  a run's directory is what --out, or Run(out=...), was given"
        )
    held = collecting()
    try:
        for record in streamed(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else ():
            held.add(record)
    except OSError as problem:
        raise ConfigError(f"cannot read {run / 'metrics.jsonl'}: {problem.strerror or problem}") from problem
    return held.history(described_in(run))


def collecting() -> Collected:
    """Takes the records of a run that is read, of which there may be any number."""
    return Collected(times=_TIMES)


def described_in(run: Path) -> Described:
    """What the run in a directory was asked to do, as far as its files say."""
    text = _text(run / "config.toml")
    written, made_by, scripted = _written(text, run)
    saved_step, state = _newest_state(run)
    sitting = _last_sitting(run)
    made = state.get("described")
    printed = state.get("architecture")
    processors, memory = sitting.get("processors"), sitting.get("memory_bytes")
    return Described(
        made=made if isinstance(made, dict) else scripted,
        written=written,
        program=str(made_by.get("kind", "script")),
        kinds=kinds_of_models(printed if isinstance(printed, dict) else {}),
        standing=standing_of(run),
        name=str(run),
        processors=processors if isinstance(processors, int) else None,
        memory_bytes=memory if isinstance(memory, int) else None,
        saved_step=saved_step,
    )


def standing_of(run: Path) -> Standing:
    """Whether a process trains into a directory now: such a one holds its lock; "unknown" where that cannot be told."""
    lock = run / ".lock"
    if "surefoot.directory" in sys.modules:
        from surefoot.directory import held_here

        if held_here(run):  # closing another handle of its own lock would let go of it
            return "running"
    if not lock.exists() or sys.platform == "win32":
        return "unknown"
    import fcntl

    try:
        with open_regular(lock) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # not ours to read, or a file system without locks
        return "unknown"
    return "over"


def _written(text: str, run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Settings by dotted name, what made the run, and what a script's file notes of it."""
    if not text:
        return {}, {}, {}
    try:
        written, made_by = values(text, where=str(run / "config.toml")), program(text)
    except ConfigError:
        return {}, {}, {}
    if made_by.get("kind") != "script":
        return written, made_by, {}
    noted = tomllib.loads(text).get("run")
    return {}, made_by, noted if isinstance(noted, dict) else {}


def _newest_state(run: Path) -> tuple[int, Mapping[str, Any]]:
    """The newest checkpoint in which state.json can be read: its step, and that file."""
    for place in sorted((run / "checkpoints").glob("step-*/state.json"), reverse=True):
        found = _json(place)
        if found:
            return int("".join(filter(str.isdigit, place.parent.name)) or 0), found
    return 0, {}


def _last_sitting(run: Path) -> Mapping[str, Any]:
    sittings = _json(run / "environment.json").get("sittings")
    last = sittings[-1] if isinstance(sittings, list) and sittings else {}
    return last if isinstance(last, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError):
        return ""
