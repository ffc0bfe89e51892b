"""One line of metrics, what takes it, and the names in it that are surefoot's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from surefoot.errors import ConfigError

Record = dict[str, Any]
"""`kind` ("train", "scores", "sample", "layers", "data", "event", "resumed", "end"), `step` (steps made), and the values."""

_SPENT = {"starting_s", "training_s", "waiting_s", "evaluating_s", "saving_s", "user_s"}
_MEASURED = {
    "loss",
    "loss_of_applied",
    "skipped",
    "norm",
    "norm_max",
    "clipped",
    "targets",
    "starting_targets",
    "targets_per_s",
}
_EXTREME = {
    "loss_max",
    "loss_max_step",
    "skipped_steps",
    "host_memory_bytes",
    "host_memory_peak_bytes",
    "device_memory_peak_bytes",
}
_STEERED = {"learning_rate", "rate_factor"}
OWN = frozenset({"kind", "step", "text", "nonfinite", "left_s"} | _SPENT | _MEASURED | _EXTREME | _STEERED)


def scores_in(record: Record) -> dict[str, float]:
    """The scores in a record, and nothing else that a judge has found: a text, a confusion matrix.

    >>> scores_in({"kind": "scores", "step": 3, "all/accuracy": 0.5, "all/confusion": [[1, 0], [1, 0]]})
    {'all/accuracy': 0.5}
    """
    return {name: value for name, value in record.items() if "/" in name and isinstance(value, int | float)}


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Record) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


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
