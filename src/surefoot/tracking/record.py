"""Record kinds and their keys, the sink protocol, and reserved names."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from surefoot.errors import ConfigError

Record = dict[str, Any]
"""A record: the keys of its kind, metrics as "SPLIT/METRIC", and user-defined values."""


Phase = Literal["opening", "starting", "training", "data_wait", "evaluating", "saving", "user"]
PHASES: dict[Phase, str] = {
    "starting": "first steps",
    "training": "training",
    "data_wait": "waiting for data",
    "evaluating": "evaluating",
    "saving": "saving",
    "user": "your own code",
}
"""The phases of a session and their names in messages; "opening" is not timed."""

# seconds since the last record (`train/timer.py`)
_SPENT: dict[str, Any] = {f"{phase}_s": float for phase in PHASES}
_BY_NAME = dict[str, float]  # values by parameter or module name
KINDS: dict[str, dict[str, Any]] = {
    # the steps since the last record: `Meter.read` documents each value; `step.log` adds values
    "train": _SPENT
    | {"step": int, "loss": float, "loss_applied": float, "loss_max": float, "loss_max_step": int}
    | {"first_step_loss": float}
    | {
        "skipped": int,
        "skipped_steps": list[int],
        "grad_norm": float,
        "grad_norm_max": float,
        "clip_fraction": float,
    }
    | {
        "samples": int,
        "samples_per_s": float,
        "targets": float,
        "starting_targets": float,
        "targets_per_s": float,
        "ms_per_step": float,
        "skipped_samples": float,  # for which the loss or `collate_fn` returned None
    }
    # of the first group of the first optimizer; others are named "lr/NAME" and "momentum/NAME"
    # (`optim/group_rates.py`)
    | {"lr": float, "momentum": float}
    # values of such names that the user's code logged
    | {"logged_rates": list[str]}
    # `lr_body_factor`: if the body of the loop has written other rates than the schedule's;
    # `lr_body_factors`: of each group, if they differ
    | {"lr_body_factor": float, "lr_body_factors": _BY_NAME}
    | {"eta_s": float, "frozen_tensors": int}
    | {"host_memory_bytes": int, "host_memory_peak_bytes": int, "device_memory_peak_bytes": int},
    # an epoch that ended at this step: means over its applied steps, also of values of `step.log`;
    # the seconds without evaluations and saves
    "epoch": {"step": int, "epoch": int, "epoch_s": float, "loss": float, "targets": float},
    # an evaluation; `lr_factor` only with a plateau schedule
    "eval": {"step": int, "lr_factor": float},
    # the evaluation at the end of a run; the evaluated weights are the "best" or the "last"
    "final_eval": {"step": int, "weights_step": int, "weights": str},
    "sample": {"step": int, "text": str, "texts": list[str], "drawn": str},
    # one step with layer statistics (`train/layer_stats.py`)
    "layer_stats": {
        "step": int,
        "measured_step": int,
        "never_updated": list[str],
        "grad_noise": _BY_NAME,
    }
    | {"grad_norm": _BY_NAME, "weight_norm": _BY_NAME, "update_norm": _BY_NAME}
    | {
        "zero_grad_row_fraction": _BY_NAME,
        "saturated_fraction": _BY_NAME,
        "activation_rms": _BY_NAME,
    },
    # the check of the data before the first step (`first_look`)
    "data_check": {"step": int, "samples": int, "checked": int, "targets": dict[str, Any]}
    | {"overlap": dict[str, dict[str, Any]], "scored_by_training_loss": list[str]}
    | {"has_loss": bool, "loss_contract": dict[str, Any]},
    # steps from `first` to `last` that the journal of changes skips
    "skipped_range": {"step": int, "first": int, "last": int},
    # a rank that became slow, or that recovered (then with `until_step`); seconds per step
    # (`run/rank_checks.py`)
    "slow_rank": {
        "step": int,
        "rank": int,
        "host": str,
        "work": str,
        "since_step": int,
        "until_step": int,
    }
    | {"own_s": float, "median_s": float, "share": float},
    # an event of the run: how a session ended
    "event": _SPENT | {"step": int, "event": str},
    # a resume from this step; earlier records of later steps are superseded
    "resume": {"step": int},
}
"""The keys and types of each record kind in metrics.jsonl."""

COMPLETE = ("finished", "stopped early")
AT_CHANGE = "a change of settings"  # a cause for which a session stops
"""The events of runs that have reached their end; nothing but the page is written after them."""

OWN = frozenset({"kind", "text", "nonfinite"} | KINDS["train"].keys() | KINDS["eval"].keys())
BY_OPTIMIZER = ("lr/", "momentum/")  # beginnings of the names of further rates and momenta
# TensorBoard and trackers show their values as "KIND/NAME"
_KINDS_OF_NUMBERS = frozenset(KINDS) - {"eval", "final_eval", "sample", "resume"}
# a value that the user logs under such a name stays, as in runs of versions without them
_RESERVED = OWN - {"momentum", "ms_per_step", "skipped_samples"}


def is_own(name: str) -> bool:
    """Return True if the run itself writes a value of this name into training records.

    >>> is_own("lr"), is_own("lr/critic"), is_own("accuracy")
    (True, True, False)
    """
    return name in OWN or name.startswith(BY_OPTIMIZER)


def is_rate(name: str) -> bool:
    """Return True for the names of learning rates and momenta.

    >>> is_rate("momentum"), is_rate("lr/critic"), is_rate("grad_norm")
    (True, True, False)
    """
    return name in ("lr", "momentum") or name.startswith(BY_OPTIMIZER)


def logged_names(record: Record) -> list[str]:
    """Return the names of a training record whose values the user's code logged.

    >>> logged_names({"lr": 0.1, "momentum": 0.5, "accuracy": 1.0, "logged_rates": ["momentum"]})
    ['momentum', 'accuracy']
    """
    logged_rates = record.get("logged_rates", [])
    return [name for name in record if name in logged_rates or not is_own(name)]


def scores_in(record: Record) -> dict[str, float]:
    """Return the numeric metrics in a record, without texts and confusion matrices.

    >>> scores_in(
    ...     {"kind": "eval", "step": 3, "all/accuracy": 0.5, "all/confusion": [[1, 0], [1, 0]]}
    ... )
    {'all/accuracy': 0.5}
    """
    scores = {}
    for name, value in record.items():
        if "/" in name and isinstance(value, int | float):
            scores[name] = value
    return scores


def numbers_in(record: Record) -> dict[str, float]:
    """Return the numeric values of a record by tracker name; nested values are named "NAME/KEY".

    Metrics ("SPLIT/METRIC") keep their names. Other names are prefixed with the record's kind, as
    in TensorBoard.

    >>> numbers_in({"kind": "train", "step": 3, "loss": 0.5, "grad_noise": {"small": 1.0}})
    {'train/loss': 0.5, 'train/grad_noise/small': 1.0}
    >>> numbers_in({"kind": "eval", "step": 3, "val/loss": 0.5, "val/confusion": [[1, 0], [0, 1]]})
    {'val/loss': 0.5}
    """
    prefix = "" if record["kind"] in ("eval", "final_eval") else f"{record['kind']}/"
    numbers = {}
    for name, value in _flat(record).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name != "step":
            numbers[prefix + name] = value
    return numbers


class Sink(Protocol):
    """A receiver of records."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


def refuse_own(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a user-defined value has a reserved name."""
    reserved = _RESERVED.intersection(names)
    if reserved:
        name = min(reserved)
        raise ConfigError(
            "logged-name-reserved",
            problem=f"a value named {name!r} cannot be logged: records already have this key",
            remedy=f"choose another name, such as my_{name}",
            name=name,
        )


def refuse_split_names(names: Iterable[str]) -> None:
    """Raise `ConfigError` if trackers would show the scores of a split under the names of other
    records' values, such as "train/loss".
    """
    for name in names:
        if name in _KINDS_OF_NUMBERS:
            raise ConfigError(
                "split-name-reserved",
                problem=f"split {name!r}: {name}/loss would be the loss of the split, and a value of"
                f" the records of kind {name!r}",
                remedy=f"choose another name, such as {name}_part",
                split=name,
            )


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    # slashes separate the keys, because parameter names contain dots
    by_name: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            by_name |= _flat(value, f"{prefix}{name}/")
        else:
            by_name[f"{prefix}{name}"] = value
    return by_name
