"""Whether the records of a run agree with themselves, with the clock in its checkpoints, and with its schedule. Nothing is made again.

Speeds and rates are compared to the last bit, since they were computed from numbers that stand on the record; times to a
millionth, since they are sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.tracking.record import PHASES, Record
from surefoot.train.early_stopping import Watch
from surefoot.verify.files import Checkpoint
from surefoot.verify.metrics_log import FILE, Line, Log, curve
from surefoot.verify.verdict import Problem


def in_order(log: Log) -> list[Problem]:
    """Records of training, and those of scores, must go up in steps from each resume to the next."""
    problems = []
    last: dict[str, int] = {}
    for line in log.lines:
        if line.record is None:
            continue
        kind, step = str(line.record["kind"]), int(line.record["step"])
        if kind == "resumed":
            last = {name: min(before, step) for name, before in last.items()}
        elif kind in ("train", "scores"):
            if step <= last.get(kind, 0):
                before = f"after those of step {last[kind]}" if kind in last else "before the first step"
                problems.append(_at(line, f"it tells of {kind} {before}"))
            last[kind] = step
    return problems


def speeds(log: Log) -> list[Problem]:
    """Targets per second times seconds must be the targets, both without first steps: exactly, as the speed was computed."""
    problems = []
    for line in log.curve:
        record = line.record
        if record is None or record["kind"] != "train" or "targets_per_s" not in record:
            continue
        took_s = _number(record, "training_s") + _number(record, "waiting_s")
        targets = _number(record, "targets") - (
            _number(record, "starting_targets") if "starting_targets" in record else 0.0
        )
        speed = targets / took_s if took_s > 0 else math.nan
        if repr(speed) != repr(_number(record, "targets_per_s")):
            problems.append(
                _at(
                    line,
                    f"targets_per_s is {record['targets_per_s']!r}, and targets by training_s and waiting_s make {speed!r}"
                    " (first steps apart)",
                    quantity="targets_per_s",
                    saved=repr(record["targets_per_s"]),
                    computed=repr(speed),
                )
            )
    return problems


def times(log: Log, checkpoint: Checkpoint) -> list[Problem]:
    """The seconds of all records up to a checkpoint, and those not yet on record, must be those of its clock."""
    if checkpoint.manifest.log is None or not has_times(log, checkpoint):
        return []
    lines = [line for line in log.lines if line.stop <= checkpoint.manifest.log[0]]
    every, made = ([line.record for line in held if line.record] for held in (lines, curve(lines)))
    clock = checkpoint.found.saved.clock
    for phase in PHASES:
        told_s = float(clock["total_s"].get(phase, "0"))
        waiting_s = float(clock["window_s"].get(phase, "0"))
        added_s, most_s = (
            waiting_s + math.fsum(_number(record, f"{phase}_s") for record in held if record["kind"] == "train")
            for held in (made, every)  # one that had diverged goes on with a clock that has counted all of it
        )
        if not (_close(told_s, added_s) or _close(told_s, most_s) or added_s < told_s < most_s):
            return [
                Problem(
                    "inconsistent",
                    f"{checkpoint.path.name} tells of {told_s!r} s of {phase}, and the records up to it of {added_s!r} s",
                    step=checkpoint.step,
                    quantity=f"{phase}_s",
                    saved=repr(told_s),
                    computed=repr(added_s),
                )
            ]
    return []


def has_times(log: Log, checkpoint: Checkpoint) -> bool:
    """Whether the clock of a checkpoint can be compared: of records that are not what they were nothing is to be added up."""
    return checkpoint.manifest.log is not None and checkpoint.manifest.log[0] <= log.proved_bytes


def has_best(checkpoint: Checkpoint) -> bool:
    """Whether the best score of a checkpoint can be compared: one that is only watched may be so from any sitting on."""
    early, told = checkpoint.described.get("early_stopping"), checkpoint.found.saved.watch
    return early is not None and told is not None and checkpoint.manifest.log is not None


def watched(log: Log, checkpoint: Checkpoint) -> list[Problem]:
    """The best score of a checkpoint, and how many evaluations ago it was, must follow from the scores on the record."""
    early, saved = checkpoint.described.get("early_stopping"), checkpoint.found.saved.watch
    if early is None or saved is None or checkpoint.manifest.log is None:
        return []
    watch = Watch(early["watch"], minimum_improvement=early["minimum_improvement"], patience=early["patience"])
    for line in curve(line for line in log.lines if line.stop <= checkpoint.manifest.log[0]):
        if line.record is not None and line.record["kind"] == "scores" and watch.score in line.record:
            watch.improved(int(line.record["step"]), _number(line.record, watch.score))
    found, told = dict(watch.state()), dict(saved)
    return [
        Problem(
            "inconsistent",
            f"{checkpoint.path.name} tells of {watch.score}: {name} {told[name]}, and the scores on the record of {found[name]}",
            step=checkpoint.step,
            quantity=name,
            saved=str(told[name]),
            computed=str(found[name]),
        )
        for name in found
        if found[name] != told[name]
    ][:1]


def rates(log: Log, rate: Callable[[int, float], float]) -> list[Problem]:
    """Every learning rate on the record must be the schedule's: `rate` of a step's index and the factor of a plateau."""
    problems = []
    factors = [
        (0, 1.0)
    ]  # from which step on; of a step that is both scored and logged the rate was set before the scores
    for line in log.curve:
        record = line.record
        if record is None:
            continue
        step = int(record["step"])
        if record["kind"] == "scores" and "rate_factor" in record:
            factors.append((step, _number(record, "rate_factor")))
        if record["kind"] != "train" or "learning_rate" not in record:
            continue
        planned = rate(step - 1, next(factor for begun, factor in reversed(factors) if begun < step))
        if repr(planned) != repr(record["learning_rate"]):
            problems.append(
                _at(
                    line,
                    f"learning_rate is {record['learning_rate']!r}, and that of the schedule {planned!r}",
                    kind="differs",
                    quantity="learning_rate",
                    saved=repr(record["learning_rate"]),
                    computed=repr(planned),
                )
            )
    return problems


def targets(log: Log, each: float) -> list[Problem]:
    """Where every step counts the same, as many targets as steps since the last record make.

    A run that went on after it had diverged may have lost the first of them.
    """
    problems, before, resumed = [], 0, 0
    for line in log.curve:
        record = line.record
        if record is not None and record["kind"] == "resumed":
            resumed = int(record["step"])
        if record is None or record["kind"] != "train":
            continue
        made = {int(record["step"]) - begun for begun in (before, max(before, resumed))}
        before = int(record["step"])
        if "targets" in record and _number(record, "targets") not in {steps * each for steps in made}:
            steps = max(made)
            problems.append(
                _at(
                    line,
                    f"targets are {record['targets']!r}, and {steps} steps of {each:g} make {steps * each:g}",
                    quantity="targets",
                    saved=repr(record["targets"]),
                    computed=repr(float(steps * each)),
                )
            )
    return problems


def shortened(problems: Sequence[Problem], most: int = 3) -> list[Problem]:
    """The first few problems of one kind; the last of these tells how many more there are."""
    if len(problems) <= most:
        return list(problems)
    last = problems[most - 1]
    more = f"{last.text}; and {len(problems) - most} more like it"
    return [*problems[: most - 1], Problem(**{**vars(last), "text": more})]


def _close(one_s: float, other_s: float) -> bool:
    return math.isclose(one_s, other_s, rel_tol=1e-6, abs_tol=1e-6)


def _at(line: Line, text: str, *, kind: Any = "inconsistent", **numbers: str) -> Problem:
    step = None if line.record is None else int(line.record["step"])
    return Problem(
        kind, f"{FILE}, line {line.number}, the record of step {step}: {text}", step=step, file=FILE, **numbers
    )


def _number(record: Record | Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
