"""Synthetic histories: records by formula, so that what must be found is known. Noise is a fixed
sequence, not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from surefoot.tools.diagnose.checks import CHECKS
from surefoot.tools.diagnose.finding import Finding, Verdict
from surefoot.tools.diagnose.history import History
from surefoot.tools.diagnose.run_settings import RunDescription
from surefoot.tracking.record import Record
from surefoot.tracking.run_records import RunRecords

RECORDS, EVERY = 60, 10  # of training, and steps of each


def wobble(place: int) -> float:
    """Between -1 and 1, spread like chance, and the same in every test."""
    return 2 * (math.sin(12.9898 * (place + 1)) * 43758.5453 % 1.0) - 1


def falling(place: int) -> float:
    """A loss that is learnt: from 4 towards 1."""
    return 1 + 3 * math.exp(-place / 12) + 0.01 * wobble(place)


def train(
    loss: Callable[[int], float] = falling, *, count: int = RECORDS, **columns: Callable[[int], Any]
) -> list[Record]:
    """Records of training, each of `EVERY` steps; columns by functions of the record's place."""
    usual: dict[str, Callable[[int], Any]] = {
        "targets": lambda _: 80,
        "grad_norm": lambda place: 0.5 + 0.05 * wobble(place),
        "grad_norm_max": lambda place: 0.8,
        "clip_fraction": lambda _: 0.02,
        "skipped": lambda _: 0,
        "lr": lambda place: 1e-3 * (1 - place / (count + 1)),
        "targets_per_s": lambda place: 100 + wobble(place),
        "training_s": lambda _: 0.8,
        "data_wait_s": lambda _: 0.01,
        "evaluating_s": lambda _: 0.02,
        "saving_s": lambda _: 0.001,
        "host_memory_bytes": lambda place: 500e6 + 1e6 * wobble(place),
    }
    return [
        {"kind": "train", "step": EVERY * (place + 1), "loss": loss(place)}
        | {name: column(place) for name, column in (usual | columns).items()}
        for place in range(count)
    ]


def begun_at(first: float, records: list[Record]) -> list[Record]:
    """Records of a run whose step 0 had this loss."""
    records[0]["first_step_loss"] = first
    return records


def targets(count: int, entropy: float | None = None) -> list[Record]:
    """What was seen of targets before the first step: so many different ones, equally frequent."""
    seen = {"distinct": count, "most_common_fraction": 1 / count}
    seen["entropy"] = math.log(count) if entropy is None else entropy
    return [{"kind": "data_check", "step": 0, "targets": seen}]


def scores(
    losses: Sequence[float], *, name: str = "val", **others: Sequence[float]
) -> list[Record]:
    """Evaluations, spread evenly over the usual run."""
    between = RECORDS * EVERY // len(losses)
    return [
        {"kind": "eval", "step": between * (place + 1), f"{name}/loss": value}
        | {f"{name}/{score}": values[place] for score, values in others.items()}
        for place, value in enumerate(losses)
    ]


def layers(
    *,
    watched: int = 6,
    gradient: Callable[[str, int], float] = lambda name, place: 1.0,
    weight: Callable[[str, int], float] = lambda name, place: 10.0,
    update: Callable[[str, int], float] = lambda name, place: 0.01,
    names: Sequence[str] = ("0.weight", "2.weight", "4.weight"),
    **others: Callable[[int], Any],
) -> list[Record]:
    """Watched steps; the same names in each."""
    return [
        {
            "kind": "layer_stats",
            "step": 100 * place + 10,
            "measured_step": 100 * place,
            "grad_norm": {name: gradient(name, place) for name in names},
            "weight_norm": {name: weight(name, place) for name in names},
            "update_norm": {name: update(name, place) for name in names},
            "zero_grad_row_fraction": dict.fromkeys(names, 0.0),
            "never_updated": [],
        }
        | {name: value(place) for name, value in others.items()}
        for place in range(watched)
    ]


KINDS = {"0": "Linear", "1": "ReLU", "2": "Linear", "3": "Tanh", "4": "Linear"}


def described(**changes: Any) -> RunDescription:
    """A finished run of a recipe, of the usual length."""
    made: dict[str, Any] = {
        "length": f"{RECORDS * EVERY} steps",
        "schedule_of_steps": RECORDS * EVERY,
        "schedule": {"shape": "linear", "warmup": 30},
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        "batch_size": 8,
        "clip": "norm 1.0",
        "max_bad_steps": 5,
        "init_from": None,
        "data": {"plan": {"samples": 800}},
    }
    whole: dict[str, Any] = {
        "program": "recipe",
        "standing": "over",
        "kinds": KINDS,
        "name": "runs/a",
    }
    known = set(RunDescription.__dataclass_fields__) - {"identity"}
    return RunDescription(
        identity=made | {name: value for name, value in changes.items() if name not in known},
        **(whole | {name: value for name, value in changes.items() if name in known}),
    )


def history(*parts: Sequence[Record], **changes: Any) -> History:
    """Records together with the settings of the usual run, some of them changed."""
    records = RunRecords()
    for part in parts:
        records.extend(part)
    return History(described(**changes), records)


def healthy(**changes: Any) -> History:
    """A run in which nothing is to be found."""
    data: Record = {
        "kind": "data_check",
        "step": 0,
        "targets": {"distinct": 10, "most_common_fraction": 0.1},
        "overlap": {"val": {"checked": 100, "overlapping": 0}},
        "loss_contract": {
            "holds": True,
            "description": "holds: 2 for a batch, 2 for its two halves combined",
        },
    }
    losses = [1 + 3 * math.exp(-place) for place in range(1, 9)]
    return history([data], train(), scores(losses), layers(), **changes)


def verdict(name: str, of: History) -> Verdict:
    """What one check comes to, by the name under which it is told."""
    return next(found for found in (check(of) for check in CHECKS) if found.name == name)


def found(name: str, of: History) -> Finding | None:
    """The finding of that name, or None where it is not found."""
    told = verdict(name, of)
    return told if isinstance(told, Finding) else None
