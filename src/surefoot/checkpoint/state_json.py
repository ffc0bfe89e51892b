"""The schema of state.json: all state of a checkpoint except tensors. Both writing and checking use
the schema. Torch-free.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from surefoot.errors import first_line

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions from code that reads a value with an unexpected type or shape."""


def _planned_steps(length: str) -> int:
    return int(length.removesuffix("s").removesuffix(" step"))


def _check_nested(value: Any) -> None:
    match value:
        case {"tensor": str()} | {"value": _}:
            parts: list[Any] = []
        case {"dict": dict(entries)}:
            parts = list(entries.values())
        case {"pairs": list(pairs)}:
            parts = [part for _, part in pairs]
        case {"list": list(parts)} | {"tuple": list(parts)} | {"deque": list(parts)}:
            pass
        case {"numpy": str(), "text": str()}:
            parts = []
        case {"float": str(text)}:
            parts = [{"value": float(text)}]
        case _:
            raise ValueError("not a nested state")
    for part in parts:
        _check_nested(part)


def _check_optimizer(value: Any) -> None:
    _check_nested(value)
    own = value["dict"]["own"]["dict"]
    for name in ("state", "more"):
        if not {"dict", "pairs"} & own[name].keys():
            raise ValueError("not an optimizer state")


def _check_groups(value: Any) -> None:
    _check_nested(value)
    for group in value["list"]:
        if not isinstance(group["dict"], dict):
            raise ValueError("not a parameter group")


Number = Annotated[str, partial(float)]  # a float as text, which may be NaN or infinite
Nested = Annotated[Mapping[str, Any], _check_nested]


class MachineFacts(TypedDict):
    """The machine settings that affect the bits of results. Further keys are allowed."""

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
    """The settings that every run has. Further keys are allowed."""

    compile: bool
    data: dict[str, Any]
    length: Annotated[str, _planned_steps]
    precision: str
    schedule_of_steps: int
    seed: int
    identity: dict[str, Any]


class MicroBatchHash(TypedDict):
    """The hash of the first micro-batch of step 0."""

    sha256: str
    count: float
    samples: int


class AcceptedChange(TypedDict):
    """The program changes that the user accepted at `step`."""

    step: int
    changed: list[str]
    what: list[str]


class Sources(TypedDict):
    """Hashes of the user's source code by function or class name."""

    loss: dict[str, str]
    model: dict[str, str]
    collate: dict[str, str]
    data: dict[str, str]
    optimizer: dict[str, str]


class Fingerprints(TypedDict):
    """Results at the start of the run: hashes of samples and source code, and the loss of the first
    micro-batch.
    """

    machine: MachineFacts
    format: str
    samples: dict[str, str]
    splits: dict[str, dict[str, str]]
    micro_batch: MicroBatchHash | None
    loss: Number | None
    noisy_loss: NotRequired[Number | None]  # with noise added to what the models return
    draws: bool
    failed: bool
    sources: Sources
    accepted: list[AcceptedChange]
    not_looked_into: list[str]


class TrainableNames(TypedDict):
    """Names of the frozen parameters, and of the parameters in no optimizer."""

    frozen: list[str]
    in_no_optimizer: list[str]


class WatchedScore(TypedDict):
    """The best monitored score, its step, and the number of evaluations since that step."""

    direction: Literal["min", "max"]
    score: str
    value: Number | None
    step: int | None
    waited: int


class RunnerUp(TypedDict):
    """One of the best checkpoints after the best, with its value of the score of `best`."""

    step: int
    value: Number


class PlateauState(TypedDict):
    """The state of a learning-rate plateau: the factor, the best score and counters."""

    factor: float
    best: Number | None
    waited: int
    cooling: int
    not_numbers: int
    step: int


class _Phases(TypedDict):
    total_s: dict[str, Number]
    window_s: dict[str, Number]
    first_steps: list[int]


class Seconds(_Phases, total=False):
    """Seconds per phase, in total and since the last record, the first steps of sessions since
    that record, and the seconds of training before the current epoch.
    """

    epoch_start_s: Number


class Epoch(TypedDict):
    """The current epoch: its first step, and the total and count of each mean up to the last
    record.
    """

    start: int
    totals: dict[str, list[Number]]


_OPTIONAL = {
    "rates",
    "tape",
    "data_values",
    "epoch_list",
    "scores",
    "average_updates",
    "runners_up",
    "stopping",
    "buffers",
    "epoch",
    "changes",
    "whole_epochs",
}


@dataclass(frozen=True)
class SavedState:
    """The state.json of a run's checkpoint, in key order."""

    identity: Annotated[dict[str, Any], Identity]
    architecture: dict[str, str]
    splits: dict[str, dict[str, Any]]
    fingerprints: Fingerprints
    evaluation_due: bool
    ended: bool
    first_scores: dict[str, Number]
    machine: MachineFacts
    stopped_early: bool
    aliases: dict[str, Mapping[str, str]]
    extra: dict[str, Mapping[str, Nested]]
    optimizer: dict[str, Annotated[Mapping[str, Any], _check_optimizer]]
    param_groups: dict[str, Annotated[Mapping[str, Any], _check_groups]]
    trainable: Annotated[dict[str, list[str]], TrainableNames]
    eval_mode: dict[str, list[str]]
    monitor: WatchedScore | None
    plateau: PlateauState | None
    skipped_in_a_row: list[int]
    clock: Seconds
    seen: list[str]
    user_state: dict[str, Nested]
    # absent if there is none:
    tape: dict[str, int | str] | None = None  # rows read from a stream, and their hash
    data_values: dict[str, Nested] | None = None  # what the body changed in the data set
    epoch_list: dict[str, int | str] | None = None  # a sampler's list: its epoch and hash
    rates: dict[str, Nested] | None = None  # base learning rates, which the body may write
    scores: dict[str, Number] | None = None  # of an evaluation after this step
    average_updates: dict[str, int] | None = None  # of models with an average, by name
    runners_up: list[RunnerUp] | None = None  # the best checkpoints after the best, in order
    stopping: list[WatchedScore] | None = None  # of each early-stopping rule; behavior 1: `monitor`
    # what passes have shown of the buffers without a rule
    buffers: dict[str, list[str]] | None = None
    epoch: Epoch | None = None  # of a run whose length is in epochs
    # the last change of a setting that held in the last step: its number, and the hash of its line
    changes: dict[str, int | str] | None = None
    # where each epoch begins with a step: the steps of an epoch, and the step from which on epochs
    # have so many; absent if a sampler of the user lists the batches
    whole_epochs: dict[str, int] | None = None

    @property
    def planned_steps(self) -> int:
        return _planned_steps(self.identity["length"])

    @property
    def best_step(self) -> int | None:
        return None if self.monitor is None else self.monitor["step"]

    @property
    def watched(self) -> WatchedScore | None:
        """The score by which the run is judged: that of `best`, else of the first early-stopping
        rule.
        """
        return self.monitor or next(iter(self.stopping or ()), None)

    def to_json(self) -> dict[str, Any]:
        state = {}
        for name, value in vars(self).items():
            if value or name not in _OPTIONAL:
                state[name] = json.loads(json.dumps(value))
        return state


def parse_state(data: bytes) -> dict[str, Any]:
    """Parse a state.json with any subset of the keys; raise a one-line `ValueError` for invalid
    content.
    """
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise ValueError(f"holds a {type(state).__name__}, not a JSON object")
    for name, hint in hints_of(SavedState).items():
        problem = misshapen(state[name], hint, name) if name in state else None
        if problem is not None:
            raise ValueError(problem)
    return state


def typed_state(state: Mapping[str, Any]) -> SavedState:
    """Return the typed state of a run; raise `ValueError` with the names of missing keys."""
    names = hints_of(SavedState)
    missing = names.keys() - state.keys() - _OPTIONAL
    if missing:
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    return SavedState(**{name: state[name] for name in names if name in state})


@cache
def hints_of(owner: type) -> dict[str, Any]:
    """Return the type hints of a class with their annotations. The result is cached."""
    return get_type_hints(owner, include_extras=True)


def misshapen(value: Any, hint: Any, where: str) -> str | None:
    """Return a message about the first value of a wrong type, or None. A TypedDict may have further
    keys.

    >>> misshapen({"a": [1, "x"]}, dict[str, list[int]], "counts")
    'counts/a/1 has the invalid value "x"'
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin is Annotated:
        # the metadata are TypedDicts, and functions that raise for invalid values
        hints = (arguments[0], *hint.__metadata__)
        return _first(misshapen(value, one_hint, where) for one_hint in hints)
    if origin is NotRequired:
        return misshapen(value, arguments[0], where)
    if origin in (Union, UnionType):
        problems = [misshapen(value, alternative, where) for alternative in arguments]
        return None if None in problems else problems[0]
    if is_typeddict(hint) and isinstance(value, dict):
        return _misshapen_typed_dict(value, hint, where)
    if origin in (dict, Mapping) and isinstance(value, dict):
        of_entries = arguments[1]
        return _first(misshapen(value[key], of_entries, f"{where}/{key}") for key in value)
    if origin is list and isinstance(value, list):
        of_entries = arguments[0]
        numbered = enumerate(value)
        return _first(misshapen(entry, of_entries, f"{where}/{i}") for i, entry in numbered)
    if hint is Any or (origin is Literal and value in arguments):
        return None
    if hint in (bool, int, str, float, NoneType):
        if _is_scalar(value, hint):
            return None
    elif origin is None and not is_typeddict(hint):
        with suppress(*UNREADABLE):
            hint(value)
            return None
    return f"{where} has the invalid value {json.dumps(value)[:40]}"


def _misshapen_typed_dict(value: dict[str, Any], hint: Any, where: str) -> str | None:
    hints = hints_of(hint)
    for name in hints:
        if name in hint.__required_keys__ and name not in value:
            return f"{where} lacks {name}"
    present = [name for name in hints if name in value]
    return _first(misshapen(value[name], hints[name], f"{where}/{name}") for name in present)


def _is_scalar(value: Any, hint: type) -> bool:
    """Return True if a value from JSON has this type; an integer is a float, a bool is no integer."""
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
