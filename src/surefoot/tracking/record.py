"""One line of metrics, what takes it, and the names in it that are surefoot's own."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypedDict

from surefoot.errors import ConfigError

Record = dict[str, Any]
"""A record of any kind, with scores as "SPLIT/SCORE" and values of the user's besides the keys that its kind declares."""


class Spent(TypedDict, total=False):
    """Seconds since the last record, by phase (`train/timer.py`)."""

    starting_s: float
    training_s: float
    waiting_s: float
    evaluating_s: float
    saving_s: float
    user_s: float


class TrainRecord(Spent, total=False):
    """The steps since the last record; what each value means says `Meter.read`. Besides: what `step.log` added."""

    kind: Literal["train"]
    step: int
    loss: float
    loss_of_applied: float
    loss_max: float
    loss_max_step: int
    skipped: int
    skipped_steps: list[int]
    norm: float
    norm_max: float
    clipped: float
    targets: float
    starting_targets: float
    targets_per_s: float
    learning_rate: float
    left_s: float
    host_memory_bytes: int
    host_memory_peak_bytes: int
    device_memory_peak_bytes: int


class ScoresRecord(TypedDict, total=False):
    """An evaluation; the factor of a plateau if there is one."""

    kind: Literal["scores"]
    step: int
    rate_factor: float


class EndRecord(TypedDict, total=False):
    """The evaluation of a run that is over, and the step of the weights that were evaluated."""

    kind: Literal["end"]
    step: int
    weights_of_step: int


class SampleRecord(TypedDict):
    """A sample of what the model makes."""

    kind: Literal["sample"]
    step: int
    text: str


class LayersRecord(TypedDict, total=False):
    """One watched step: numbers by parameter, or by module (`train/layer_stats.py`)."""

    kind: Literal["layers"]
    step: int
    watched_step: int
    gradient_norm: dict[str, float]
    weight_norm: dict[str, float]
    update_norm: dict[str, float]
    zero_rows: dict[str, float]
    saturated: dict[str, float]
    activation_norm: dict[str, float]
    noise: dict[str, float]
    never_updated: list[str]


class DataRecord(TypedDict, total=False):
    """The look at the data before the first step (`first_look`)."""

    kind: Literal["data"]
    step: int
    samples: int
    looked_at: int
    targets: dict[str, Any]
    overlap: dict[str, dict[str, Any]]
    scored_by_training_loss: list[str]


class EventRecord(Spent, total=False):
    """What happened to the run: how a session ended."""

    kind: Literal["event"]
    step: int
    what: str


class ResumedRecord(TypedDict):
    """A session goes on from this step; what stands before with a later one is superseded."""

    kind: Literal["resumed"]
    step: int


KINDS: dict[str, Any] = {
    "train": TrainRecord,
    "scores": ScoresRecord,
    "end": EndRecord,
    "sample": SampleRecord,
    "layers": LayersRecord,
    "data": DataRecord,
    "event": EventRecord,
    "resumed": ResumedRecord,
}
"""The one declaration of what surefoot writes into metrics.jsonl."""

OWN = frozenset({"text", "nonfinite"} | TrainRecord.__annotations__.keys() | ScoresRecord.__annotations__.keys())


def scores_in(record: Record) -> dict[str, float]:
    """The scores in a record, and nothing else that a judge has found: a text, a confusion matrix.

    >>> scores_in({"kind": "scores", "step": 3, "all/accuracy": 0.5, "all/confusion": [[1, 0], [1, 0]]})
    {'all/accuracy': 0.5}
    """
    return {name: value for name, value in record.items() if "/" in name and isinstance(value, int | float)}


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def refuse_own(names: Iterable[str]) -> None:
    """Raise `ConfigError` where a value of the user's would take the place of one of surefoot's.

    >>> refuse_own(["accuracy"])
    """
    taken = OWN.intersection(names)
    if taken:
        name = min(taken)
        raise ConfigError(
            f"a value called {name!r} cannot be logged: a record has a {name!r} of its own\n  give it another name, as in my_{name}"
        )


Phase = Literal["opening", "starting", "training", "waiting", "evaluating", "saving", "user"]

PHASES: tuple[Phase, ...] = ("starting", "training", "waiting", "evaluating", "saving", "user")
