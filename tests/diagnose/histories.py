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

RECORDS = 60  # of training
EVERY = 10  # steps of each
Column = Callable[[int], Any]  # a value of a record, by the record's place


def wobble(place: int) -> float:
    """Between -1 and 1, spread like chance, and the same in every test."""
    return 2 * (math.sin(12.9898 * (place + 1)) * 43758.5453 % 1.0) - 1


def falling(place: int) -> float:
    """A loss that is learnt: from 4 towards 1."""
    return 1 + 3 * math.exp(-place / 12) + 0.01 * wobble(place)


def flat(place: int) -> float:
    """A loss that is not learnt: it stays at 2.3, which is that of a guess among ten."""
    return 2.3 + 0.02 * wobble(place)


def diverging(place: int) -> float:
    """A loss that is learnt, and lost at record 40."""
    return falling(place) if place < 40 else 9.0


def always(value: Any) -> Callable[..., Any]:
    """The same value in every record and every layer."""
    return lambda *_: value


def jump(before: float, after: float, *, at: int) -> Column:
    """One level, and from a record on another."""
    return lambda place: before if place < at else after


def only_at(place: int, value: float, *, others: float) -> Column:
    """A value of one record, and that of all others."""
    return lambda other: value if other == place else others


def only_in(layer: str, value: float, *, others: float) -> Callable[[str, int], float]:
    """A value of one layer's parameters, and that of all others."""
    return lambda name, _: value if name.startswith(f"{layer}.") else others


def train(
    loss: Callable[[int], float] = falling, *, count: int = RECORDS, **columns: Column
) -> list[Record]:
    """Records of training, each of `EVERY` steps; columns by functions of the record's place."""
    usual: dict[str, Column] = {
        "targets": always(80),
        "grad_norm": lambda place: 0.5 + 0.05 * wobble(place),
        "grad_norm_max": always(0.8),
        "clip_fraction": always(0.02),
        "skipped": always(0),
        "lr": lambda place: 1e-3 * (1 - place / (count + 1)),
        "targets_per_s": lambda place: 100 + wobble(place),
        "training_s": always(0.8),
        "data_wait_s": always(0.01),
        "evaluating_s": always(0.02),
        "saving_s": always(0.001),
        "host_memory_bytes": lambda place: 500e6 + 1e6 * wobble(place),
    }
    all_columns = {"loss": loss, **usual, **columns}
    records = []
    for place in range(count):
        record: Record = {"kind": "train", "step": EVERY * (place + 1)}
        for name, column in all_columns.items():
            record[name] = column(place)
        records.append(record)
    return records


def begun_at(first: float, records: list[Record]) -> list[Record]:
    """Records of a run whose step 0 had this loss."""
    records[0]["first_step_loss"] = first
    return records


def data_check(**fields: Any) -> list[Record]:
    """What was seen of the data before the first step."""
    return [{"kind": "data_check", "step": 0, **fields}]


def targets(count: int, entropy: float | None = None, **fields: Any) -> list[Record]:
    """What was seen of targets before the first step: so many different ones, equally frequent."""
    if entropy is None:
        entropy = math.log(count)
    seen = {"distinct": count, "most_common_fraction": 1 / count, "entropy": entropy}
    return data_check(targets=seen, **fields)


def overlap(overlapping: int, *, checked: int = 100, **fields: Any) -> list[Record]:
    """Of the checked samples of a split so many are among the training samples too."""
    split = {"checked": checked, "overlapping": overlapping, **fields}
    return data_check(overlap={"val": split})


def event(text: str, step: int = RECORDS * EVERY) -> list[Record]:
    return [{"kind": "event", "step": step, "event": text}]


def resume(step: int) -> list[Record]:
    return [{"kind": "resume", "step": step}]


def scores(
    losses: Sequence[float], *, name: str = "val", **others: Sequence[float]
) -> list[Record]:
    """Evaluations, spread evenly over the usual run."""
    between = RECORDS * EVERY // len(losses)
    records = []
    for place, loss in enumerate(losses):
        record: Record = {"kind": "eval", "step": between * (place + 1), f"{name}/loss": loss}
        for score, values in others.items():
            record[f"{name}/{score}"] = values[place]
        records.append(record)
    return records


def layers(
    *,
    watched: int = 6,
    gradient: Callable[[str, int], float] = lambda name, place: 1.0,
    weight: Callable[[str, int], float] = lambda name, place: 10.0,
    update: Callable[[str, int], float] = lambda name, place: 0.01,
    names: Sequence[str] = ("0.weight", "2.weight", "4.weight"),
    **others: Column,
) -> list[Record]:
    """Watched steps; the same names in each."""
    records = []
    for place in range(watched):
        record: Record = {
            "kind": "layer_stats",
            "step": 100 * place + 10,
            "measured_step": 100 * place,
            "grad_norm": {name: gradient(name, place) for name in names},
            "weight_norm": {name: weight(name, place) for name in names},
            "update_norm": {name: update(name, place) for name in names},
            "zero_grad_row_fraction": dict.fromkeys(names, 0.0),
            "never_updated": [],
        }
        for name, column in others.items():
            record[name] = column(place)
        records.append(record)
    return records


def noisy_gradients(batch: int, scale: float, *, watched: int = 8) -> list[Record]:
    """Watched steps of two micro-batches, whose squared norms are those of gradient 1 and a noise
    of `scale`, exactly.
    """
    half = batch // 2
    norms = {
        "small_count": half,
        "small_squared": 1 + scale / half,
        "big_count": batch,
        "big_squared": 1 + scale / batch,
    }
    return layers(watched=watched, grad_noise=always(norms))


KINDS = {"0": "Linear", "1": "ReLU", "2": "Linear", "3": "Tanh", "4": "Linear"}


def described(**changes: Any) -> RunDescription:
    """A finished run of a recipe, of the usual length."""
    identity: dict[str, Any] = {
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
    fields: dict[str, Any] = {
        "program": "recipe",
        "standing": "over",
        "kinds": KINDS,
        "name": "runs/a",
    }
    # a setting of a program may be called "identity" too
    names_of_fields = set(RunDescription.__dataclass_fields__) - {"identity"}
    for name, value in changes.items():
        if name in names_of_fields:
            fields[name] = value
        else:
            identity[name] = value
    return RunDescription(identity=identity, **fields)


def history(*parts: Sequence[Record], **changes: Any) -> History:
    """Records together with the settings of the usual run, some of them changed."""
    records = RunRecords()
    for part in parts:
        records.extend(part)
    return History(described(**changes), records)


def healthy(**changes: Any) -> History:
    """A run in which nothing is to be found."""
    data = data_check(
        targets={"distinct": 10, "most_common_fraction": 0.1},
        overlap={"val": {"checked": 100, "overlapping": 0}},
        loss_contract={
            "holds": True,
            "description": "holds: 2 for a batch, 2 for its two halves combined",
        },
    )
    losses = [1 + 3 * math.exp(-place) for place in range(1, 9)]
    return history(data, train(), scores(losses), layers(), **changes)


def judge(name: str, run: History) -> Verdict:
    """The verdict of one check, by the name of its finding."""
    check = next(check for check in CHECKS if check.name == name)
    return check(run)


def finds(name: str, run: History) -> bool:
    return isinstance(judge(name, run), Finding)


def find(name: str, run: History) -> Finding:
    """The finding of that name, which must be made."""
    verdict = judge(name, run)
    assert isinstance(verdict, Finding), verdict
    return verdict
