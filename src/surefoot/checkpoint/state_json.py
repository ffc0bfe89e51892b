"""The one schema of state.json, everything in a checkpoint that is no tensor: written from it, checked by it. Torch-free."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypedDict

from surefoot.checkpoint.json_shapes import hints_of, misshapen
from surefoot.errors import first_line


def _planned_steps(length: str) -> int:
    return int(length.removesuffix("s").removesuffix(" step"))


def _check_number(text: str) -> None:
    float(text)


def _check_nested(value: Any) -> None:
    """Raise unless it is nested state, taken apart by `nested_state.split_state`."""
    match value:
        case {"tensor": str()} | {"value": _}:
            parts: list[Any] = []
        case {"dict": dict(entries)}:
            parts = list(entries.values())
        case {"pairs": list(pairs)}:
            parts = [part for _, part in pairs]
        case {"list": list(parts)} | {"tuple": list(parts)}:
            pass
        case {"float": str(text)}:
            float(text)
            return
        case _:
            raise ValueError("no nested state")
    for part in parts:
        _check_nested(part)


def _check_optimizer(value: Any) -> None:
    _check_nested(value)
    own = value["dict"]["own"]["dict"]
    if not all({"dict", "pairs"} & own[name].keys() for name in ("state", "more")):
        raise ValueError("no state of an optimizer")


def _check_groups(value: Any) -> None:
    _check_nested(value)
    for group in value["list"]:
        group["dict"].items()


Number = Annotated[str, _check_number]
"""A float as text, whole, finite or not."""
Nested = Annotated[Mapping[str, Any], _check_nested]


class Machine(TypedDict):
    """What bit-equal results depend on besides the configuration; more may stand there."""

    surefoot: str
    torch: str
    device: str
    hardware: str
    cpu: str
    threads: int
    deterministic: bool
    ranks: int
    parallel: str


class Identity(TypedDict):
    """The settings that every run has; more may stand there."""

    compile: bool
    data: dict[str, Any]
    length: Annotated[str, _planned_steps]
    precision: str
    schedule_of_steps: int
    seed: int
    settings: dict[str, Any]


class MicroBatchHash(TypedDict):
    """The first micro-batch of step 0."""

    sha256: str
    count: float
    samples: int


class Accepted(TypedDict):
    """Changes of the program that the user let pass, from a step on."""

    step: int
    changed: list[str]
    what: list[str]


class Sources(TypedDict):
    """Hashes of the texts of the user's own code, by the name of each function or class."""

    loss: dict[str, str]
    model: dict[str, str]
    collate: dict[str, str]
    data: dict[str, str]
    optimizer: dict[str, str]


class Fingerprints(TypedDict):
    """What the program computed when the run began: hashes of samples and sources, and the loss of the first micro-batch."""

    machine: Machine
    format: str
    samples: dict[str, str]
    splits: dict[str, dict[str, str]]
    micro_batch: MicroBatchHash | None
    loss: Number | None
    draws: bool
    failed: bool
    sources: Sources
    accepted: list[Accepted]
    not_looked_into: list[str]


class Trainable(TypedDict):
    """Names of parameters."""

    frozen: list[str]
    in_no_optimizer: list[str]


class Watched(TypedDict):
    """The best value of the score that the run watches, its step, and evaluations since."""

    direction: Literal["min", "max"]
    score: str
    value: Number | None
    step: int | None
    waited: int


class Lowered(TypedDict):
    """How far a plateau has lowered the learning rates."""

    factor: float
    best: Number | None
    waited: int
    cooling: int
    not_numbers: int
    step: int


class Seconds(TypedDict):
    """Seconds by phase over all sessions, those since the last record, and the steps among them with which sessions began."""

    total_s: dict[str, Number]
    window_s: dict[str, Number]
    first_steps: list[int]


@dataclass(frozen=True)
class SavedState:
    """state.json of a run's checkpoint, in the order of its keys."""

    described: Annotated[dict[str, Any], Identity]
    architecture: dict[str, str]
    scored: dict[str, dict[str, Any]]
    fingerprints: Fingerprints
    evaluation_due: bool
    ended: bool
    first_scores: dict[str, Number]
    machine: Machine
    stopped_early: bool
    aliases: dict[str, Mapping[str, str]]
    extra: dict[str, Mapping[str, Nested]]
    optimizer: dict[str, Annotated[Mapping[str, Any], _check_optimizer]]
    groups: dict[str, Annotated[Mapping[str, Any], _check_groups]]
    trainable: Annotated[dict[str, list[str]], Trainable]
    evaluating: dict[str, list[str]]
    watch: Watched | None
    plateau: Lowered | None
    skipped_in_a_row: list[int]
    clock: Seconds
    seen: list[str]
    kept: dict[str, Nested]

    @property
    def planned_steps(self) -> int:
        return _planned_steps(self.described["length"])

    @property
    def best_step(self) -> int | None:
        """The step of the best score; None if no score is watched, or none was seen yet."""
        return None if self.watch is None else self.watch["step"]

    def to_json(self) -> dict[str, Any]:
        """Return a copy that shares nothing with the live run."""
        return dict(json.loads(json.dumps(vars(self))))


KEYS = tuple(field.name for field in fields(SavedState))


def parse_state(data: bytes) -> dict[str, Any]:
    """Parse a state.json, of which any key may be missing; a `ValueError` in one line for anything else."""
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"holds a {type(state).__name__}, not named values")
    for name, hint in hints_of(SavedState).items():
        if name in state and (problem := misshapen(state[name], hint, name)):
            raise ValueError(problem)
    return state


def typed_state(state: Mapping[str, Any]) -> SavedState:
    """The state of a run, typed; a `ValueError` that names the keys it lacks."""
    if missing := sorted(set(KEYS) - state.keys()):
        raise ValueError(f"lacks {', '.join(missing)}")
    return SavedState(**{name: state[name] for name in KEYS})
