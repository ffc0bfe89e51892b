"""A run as its directory tells it: curves and events from the records, settings, sittings, what it watches, what it died of.

Nothing is rebuilt, nothing is locked, no tensor is read. A file that is missing or damaged leaves out what it would have
told, and `problems` names it; a run of an older version has less.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from surefoot.config import origins, program, values
from surefoot.errors import ConfigError
from surefoot.record import OWN, Record, scores_in
from surefoot.reporting.streaming import streamed
from surefoot.reporting.thinning import Curve
from surefoot.reporting.watched_layers import Layers

PHASES = {
    "training": "training",
    "waiting": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "user": "your own code",
}
_SPENT = {phase: f"{phase}_s" for phase in PHASES}
_DRAWN = {
    "loss",
    "norm",
    "norm_max",
    "clipped",
    "learning_rate",
    "targets_per_s",
    "memory_bytes",
    "device_memory_bytes",
}
_MOST_CURVES = 60  # names of one kind: more are left out
_MOST_EVENTS = 200
_LONGEST_EVENT = 500  # letters
_MOST_SAMPLES = 8
_LONGEST_SAMPLE = 6_000  # letters
_LARGEST_FILE = 20_000_000  # bytes


@dataclass(frozen=True)
class Event:
    """Something that happened after so many steps."""

    step: int
    what: str
    kind: str = "event"  # or "resumed", "skipped"


@dataclass
class Recorded:
    """What the records of a run tell."""

    train: dict[str, Curve] = field(default_factory=dict)
    users: dict[str, Curve] = field(default_factory=dict)  # what `step.log` added
    scores: dict[str, Curve] = field(default_factory=dict)
    at_end: dict[str, float] = field(default_factory=dict)  # scored once, when the run was over
    at_end_of_step: int | None = None
    kept_samples: list[tuple[int, str]] = field(default_factory=list)
    last_sample: tuple[int, str] | None = None
    sampled: int = 0
    sampled_every: int = 1  # of so many samples one is kept
    layers: Layers = field(default_factory=Layers)
    events: list[Event] = field(default_factory=list)
    more_events: int = 0
    spent_s: dict[str, float] = field(default_factory=dict)
    targets: float = 0.0
    skipped: int = 0
    last_step: int = 0
    count: int = 0
    left_s: float | None = None
    over: str | None = None  # the last event, where nothing came after it
    left_out: int = 0  # curves

    def add(self, record: Record) -> None:
        """Take one record."""
        self.count += 1
        step, kind = record["step"], record["kind"]
        self.last_step = max(self.last_step, step)
        self.over = str(record.get("what", "")) or None if kind == "event" else None
        match kind:
            case "train":
                self._add_train(step, record)
            case "scores":
                for name, value in scores_in(record).items():
                    self._add(self.scores, name, step, value)
                if _is_number(record.get("rate_factor")):
                    self._add(self.train, "rate_factor", step, record["rate_factor"])
            case "end":
                self.at_end = scores_in(record)
                weights = record.get("weights_of_step")
                self.at_end_of_step = weights if isinstance(weights, int) else None
            case "sample" if isinstance(record.get("text"), str):
                self._add_sample(step, record["text"])
            case "layers":
                self.layers.add(record)
            case "resumed":
                self._tell(Event(step, f"resumed after step {step:,}", "resumed"))
            case "event" if isinstance(record.get("what"), str):
                self._tell(Event(step, record["what"][:_LONGEST_EVENT]))

    def _add_train(self, step: int, record: Record) -> None:
        for name, value in record.items():
            if name in _DRAWN:
                if _is_number(value):
                    self._add(self.train, name, step, value)
            elif name not in OWN and _is_number(value):
                self._add(self.users, name, step, value)
        for phase, key in _SPENT.items():
            value = record.get(key)
            if _is_number(value) and math.isfinite(value):
                self.spent_s[phase] = self.spent_s.get(phase, 0.0) + value
        if _is_number(record.get("targets")):
            self.targets += record["targets"]
        self.left_s = record["left_s"] if _is_number(record.get("left_s")) else None
        skipped = record.get("skipped")
        if isinstance(skipped, int) and skipped > 0:
            self.skipped += skipped
            steps = record.get("skipped_steps")
            which = f": {', '.join(str(index) for index in steps[:5])}" if isinstance(steps, list) and steps else ""
            more = ", ..." if which and skipped > 5 else ""
            counted = "1 step was" if skipped == 1 else f"{skipped:,} steps were"
            self._tell(
                Event(step, f"{counted} skipped, for a gradient or loss that was not finite{which}{more}", "skipped")
            )

    def _add(self, curves: dict[str, Curve], name: str, step: int, value: float) -> None:
        if name not in curves:
            if len(curves) >= _MOST_CURVES:
                self.left_out += 1
                return
            curves[name] = Curve()
        curves[name].add(step, value)

    def _add_sample(self, step: int, text: str) -> None:
        """Samples at even distances; where there are too many, every second one is dropped."""
        cut = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} \u2026"
        if self.sampled % self.sampled_every == 0:
            self.kept_samples.append((step, cut))
        self.sampled += 1
        self.last_sample = (step, cut)
        if len(self.kept_samples) > _MOST_SAMPLES:
            self.kept_samples = self.kept_samples[::2]
            self.sampled_every *= 2

    @property
    def samples(self) -> list[tuple[int, str]]:
        """Steps and texts of samples, some of them where there were many; the last is always there."""
        last = [] if self.last_sample is None or self.last_sample in self.kept_samples[-1:] else [self.last_sample]
        return self.kept_samples + last

    def _tell(self, event: Event) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)
        else:
            self.more_events += 1


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


def read_run(path: Path) -> RunTold:
    """All that a report shows of a run's directory but findings and panels; `ConfigError` where there is none."""
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
        found = _json(place / "state.json")
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
    found = _json(place)
    held = found.get("sittings") if isinstance(found, dict) else None
    if not isinstance(held, list):
        if place.exists():
            problems.append("environment.json cannot be read")
        return ()
    return tuple(sitting for sitting in held if isinstance(sitting, dict))


def _crashes(path: Path) -> tuple[Mapping[str, Any], ...]:
    """What the run died of, the last first."""
    places = sorted((path / "crash").glob("step-*.json"), reverse=True)[:10]
    return tuple(found for place in places if isinstance(found := _json(place), dict))


def _steps(length: Any) -> int | None:
    found = re.fullmatch(r"([\d_]+) steps?", length) if isinstance(length, str) else None
    return int(found[1]) if found else None


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            problems.append(f"{path.name} is too large to be read")
            return None
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as problem:
        problems.append(f"{path.name} cannot be read: {problem.strerror if isinstance(problem, OSError) else problem}")
        return None


def _json(path: Path) -> Any:
    text = _text(path, [])
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
