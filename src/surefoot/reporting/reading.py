"""A run as its directory tells it: curves and events from the records, settings, sittings, what it watches, what it died of.

Nothing is rebuilt, nothing is locked, no tensor is read. A file that is missing or damaged leaves out what it would have
told, and `problems` names it; a run of an older version has less.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config import origins, program, values
from surefoot.config.paths import read_regular
from surefoot.errors import ConfigError
from surefoot.record import Record
from surefoot.reporting.recorded import Recorded
from surefoot.sinks import streamed


@dataclass(frozen=True)
class RunTold:
    """A run's directory, read. `watch`: direction, score, best value and its step, as the newest checkpoint has them."""

    path: Path
    name: str
    recorded: Recorded
    settings: Mapping[str, Any]
    origins: Mapping[str, str]
    program: Mapping[str, Any]
    sittings: tuple[Mapping[str, Any], ...]
    crashes: tuple[Mapping[str, Any], ...]
    planned_steps: int | None
    watch: tuple[str, str, float | None, int | None] | None
    data: Mapping[str, Any]
    problems: tuple[str, ...]

    @property
    def script(self) -> bool:
        """Whether a script of the user's own made the run, so that no verb can build it again."""
        return self.program.get("kind") == "script"


def read_run(path: Path, *, also: Callable[[Record], object] = lambda record: None) -> RunTold:  # noqa: ARG005
    """All that a report shows of a run's directory but findings and panels; `ConfigError` where there is none.

    `also` is given every record too, so that the file is read once for all who need it.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory of a run")
    problems: list[str] = []
    recorded, data = Recorded(), dict[str, Any]()
    metrics = path / "metrics.jsonl"
    try:
        for record in streamed(metrics) if metrics.exists() else ():
            if record["kind"] == "data":
                data = record
            recorded.add(record)
            also(record)
    except OSError as problem:
        problems.append(f"metrics.jsonl cannot be read: {problem.strerror or problem}")
    text = _text(path / "config.toml", problems)
    settings, made_by, where_from = dict[str, Any](), dict[str, Any](), dict[str, str]()
    if text is not None:
        try:
            settings, made_by, where_from = values(text), program(text), origins(text)
        except ConfigError as problem:
            problems.append(str(problem).splitlines()[0])
    if made_by.get("kind") == "script":
        settings = {name.removeprefix("run."): value for name, value in settings.items()}
    state = _newest_state(path)
    described = state.get("described")
    return RunTold(
        path=path,
        name=path.resolve().name or str(path),
        recorded=recorded,
        settings=settings,
        origins=where_from,
        program=made_by,
        sittings=_sittings(path, problems),
        crashes=_crashes(path),
        planned_steps=_steps(described.get("length") if isinstance(described, dict) else None)
        or _steps(settings.get("length")),
        watch=_watch(state.get("watch")),
        data=data,
        problems=tuple(problems),
    )


def _newest_state(path: Path) -> dict[str, Any]:
    """state.json of the newest checkpoint that has one."""
    for place in sorted((path / "checkpoints").glob("step-*"), reverse=True):
        found = _json(place / "state.json", [])
        if isinstance(found, dict):
            return found
    return {}


def _watch(held: Any) -> tuple[str, str, float | None, int | None] | None:
    try:
        value = None if held["value"] is None else float(held["value"])
        step = None if held["step"] is None else int(held["step"])
        return str(held["direction"]), str(held["score"]), value, step
    except (TypeError, LookupError, ValueError):
        return None


def _sittings(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    place = path / "environment.json"
    wrong: list[str] = []
    found = _json(place, wrong)
    held = found.get("sittings") if isinstance(found, dict) else None
    if not isinstance(held, list):
        if place.exists():
            problems.extend(wrong or ["environment.json cannot be read"])
        return ()
    return tuple(sitting for sitting in held if isinstance(sitting, dict))


def _crashes(path: Path) -> tuple[Mapping[str, Any], ...]:
    """What the run died of, the last first, with the words that stand beside it, where its step was made again."""
    places = sorted((path / "crash").glob("step-*.json"), reverse=True)[:10]
    held = [(place, _json(place, [])) for place in places]
    return tuple(
        {**found, "words": _text(place.with_suffix(".txt"), [])} for place, found in held if isinstance(found, dict)
    )


def _steps(length: Any) -> int | None:
    found = re.fullmatch(r"([\d_]+) steps?", length) if isinstance(length, str) else None
    return int(found[1]) if found else None


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        problems.append(f"{path.name} cannot be read: {problem.strerror if isinstance(problem, OSError) else problem}")
        return None


def _json(path: Path, problems: list[str]) -> Any:
    text = _text(path, problems)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
