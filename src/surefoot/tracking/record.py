"""One line of metrics, what takes it, and the names in it that are surefoot's own."""

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from surefoot.errors import ConfigError

Record = dict[str, Any]
"""A record of any kind, with scores as "SPLIT/SCORE" and values of the user's besides the keys that its kind declares."""


Phase = Literal["opening", "starting", "training", "data_wait", "evaluating", "saving", "user"]
PHASES: tuple[Phase, ...] = ("starting", "training", "data_wait", "evaluating", "saving", "user")

_SPENT: dict[str, Any] = {f"{phase}_s": float for phase in PHASES}  # since the last record (`train/timer.py`)
_BY_NAME = dict[str, float]  # of parameters or modules
KINDS: dict[str, dict[str, Any]] = {
    # the steps since the last record: what each value means says `Meter.read`; besides, what `step.log` added
    "train": _SPENT
    | {"step": int, "loss": float, "loss_applied": float, "loss_max": float, "loss_max_step": int}
    | {"skipped": int, "skipped_steps": list[int], "grad_norm": float, "grad_norm_max": float, "clip_fraction": float}
    | {"samples": int, "samples_per_s": float, "targets": float, "starting_targets": float, "targets_per_s": float}
    | {"lr": float, "eta_s": float}
    | {"host_memory_bytes": int, "host_memory_peak_bytes": int, "device_memory_peak_bytes": int},
    # an evaluation; the factor of a plateau if there is one
    "eval": {"step": int, "lr_factor": float},
    # the evaluation of a run that is over, and the step of the weights that were evaluated
    "final_eval": {"step": int, "weights_step": int},
    "sample": {"step": int, "text": str, "texts": list[str]},
    # one watched step (`train/layer_stats.py`)
    "layer_stats": {"step": int, "measured_step": int, "never_updated": list[str], "grad_noise": _BY_NAME}
    | {"grad_norm": _BY_NAME, "weight_norm": _BY_NAME, "update_norm": _BY_NAME}
    | {"zero_grad_row_fraction": _BY_NAME, "saturated_fraction": _BY_NAME, "activation_rms": _BY_NAME},
    # the look at the data before the first step (`first_look`)
    "data_check": {"step": int, "samples": int, "checked": int, "targets": dict[str, Any]}
    | {"overlap": dict[str, dict[str, Any]], "scored_by_training_loss": list[str]},
    # what happened to the run: how a session ended
    "event": _SPENT | {"step": int, "event": str},
    # a session goes on from this step; what stands before with a later one is superseded
    "resume": {"step": int},
}
"""The only declaration of the records in metrics.jsonl: keys and types of each kind."""

OWN = frozenset({"kind", "text", "nonfinite"} | KINDS["train"].keys() | KINDS["eval"].keys())


def scores_in(record: Record) -> dict[str, float]:
    """The metrics in a record that are numbers, without texts and confusion matrices.

    >>> scores_in({"kind": "eval", "step": 3, "all/accuracy": 0.5, "all/confusion": [[1, 0], [1, 0]]})
    {'all/accuracy': 0.5}
    """
    return {name: value for name, value in record.items() if "/" in name and isinstance(value, int | float)}


class Sink(Protocol):
    """A receiver of records."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def refuse_own(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a value of the user's would replace one of surefoot's.

    >>> refuse_own(["accuracy"])
    """
    if taken := OWN.intersection(names):
        name = min(taken)
        raise ConfigError(
            f"a value called {name!r} cannot be logged: a record has a {name!r} of its own\n  give it another name, as in my_{name}"
        )
