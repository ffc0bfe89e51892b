"""Checks of records against each other, checkpoints and the schedule, and of step 0 against the
rebuilt run.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from surefoot.checkpoint.state_json import WatchedScore
from surefoot.config.keywords import parse_score
from surefoot.run.components import RunComponents
from surefoot.tools.replay.rerun import describe_changes
from surefoot.tools.verify.compare import TOLERANCE, tensors
from surefoot.tools.verify.files import Files, StoredStep
from surefoot.tools.verify.metrics_log import FILE, Log, LogLine, curve
from surefoot.tools.verify.verdict import Kind, Problem, Verdict, as_problem
from surefoot.tracking.record import PHASES, Record
from surefoot.train.patience import TRAINING, EarlyStopping, ScoreWatch, is_of_training

_SHOWN = 3  # problems reported per kind


def in_order(log: Log) -> Iterator[Problem]:
    """Yield training and evaluation records whose steps do not increase between two resumes."""
    last: dict[str, int] = {}
    for line in log.lines:
        match line.kind:
            case "resume":
                last = {name: min(before, line.step) for name, before in last.items()}
            case "train" | "eval":
                before_first = -1 if line.kind == "eval" else 0  # splits can be evaluated at step 0
                if line.step <= last.get(line.kind, before_first):
                    where = "before the first step"
                    if line.kind in last:
                        where = f"after the record of step {last[line.kind]}"
                    yield _at(line, f"this {line.kind} record comes {where}")
                last[line.kind] = line.step


def speeds(log: Log) -> Iterator[Problem]:
    """Yield records whose speed differs from targets divided by seconds. The first steps of
    sessions are not counted.
    """
    name = "targets_per_s"
    for line in log.lines_of("train", name):
        record = line.record
        took_s = _number(record, "training_s") + _number(record, "data_wait_s")
        starting = _number(record, "starting_targets") if "starting_targets" in record else 0.0
        speed = (_number(record, "targets") - starting) / took_s if took_s > 0 else math.nan
        if repr(speed) != repr(_number(record, name)):
            why = f"{record[name]!r}, but targets / (training_s + data_wait_s) is {speed!r} (without first steps)"
            yield _at(line, f"{name} is {why}", name=name, computed=speed)


def times(log: Log, checkpoint: StoredStep) -> list[Problem]:
    """Return a problem if recorded plus unrecorded seconds differ from a checkpoint's clock."""
    if checkpoint.manifest.log is None or not has_times(log, checkpoint):
        return []
    lines = log.up_to(checkpoint.manifest.log[0])
    clock = checkpoint.state.clock
    for phase in PHASES:
        clock_s = float(clock["total_s"].get(phase, "0"))
        unrecorded_s = float(clock["window_s"].get(phase, "0"))
        added_s = unrecorded_s + _recorded_s(curve(lines), phase)
        max_s = unrecorded_s + _recorded_s(lines, phase)  # which the clock has after a divergence
        if not added_s < clock_s < max_s and not _is_close(clock_s, added_s, max_s):
            why = f"reports {clock_s!r} s of {phase}, but the records up to it add up to {added_s!r} s"
            return [_of_checkpoint(checkpoint, why, f"{phase}_s", repr(clock_s), repr(added_s))]
    return []


def _recorded_s(lines: Iterable[LogLine], phase: str) -> float:
    recorded = [line.record for line in lines if line.kind == "train"]
    return math.fsum(_number(record, f"{phase}_s") for record in recorded)


def _is_close(clock_s: float, *sums_s: float) -> bool:
    """Return True if a clock agrees with one of several sums, up to rounding."""
    return any(math.isclose(clock_s, sum_s, rel_tol=1e-6, abs_tol=1e-6) for sum_s in sums_s)


def has_times(log: Log, checkpoint: StoredStep) -> bool:
    """Return True if the records up to a checkpoint are unchanged, so that their times can be
    summed.
    """
    return checkpoint.manifest.log is not None and checkpoint.manifest.log[0] <= log.proved_bytes


def has_best(checkpoint: StoredStep) -> bool:
    """Return True if the records determine the patience of a checkpoint's early-stopping rules.
    Without rules, monitoring may have begun after the start.
    """
    return bool(_patience(checkpoint)) and checkpoint.manifest.log is not None


def best_metric(log: Log, checkpoint: StoredStep) -> list[Problem]:
    """Return a problem if the records contradict a rule's best metric or the number of evaluations
    since the best.
    """
    if checkpoint.manifest.log is None:
        return []
    lines = curve(log.up_to(checkpoint.manifest.log[0]))
    for watch, saved in _patience(checkpoint):
        kind = "eval"
        name = watch.score
        if watch.of_training:
            kind = "train"
            name = watch.score.removeprefix(TRAINING)
        for line in lines:
            if line.step > 0 and line.kind == kind and name in line.record:
                watch.improved(line.step, _number(line.record, name))
        for name, now in dict(watch.state()).items():
            recorded = dict(saved)[name]
            if now != recorded:
                why = (
                    f"reports {watch.score}: {name} {recorded}, but the recorded metrics give {now}"
                )
                return [_of_checkpoint(checkpoint, why, name, str(recorded), str(now))]
    return []


def _patience(checkpoint: StoredStep) -> list[tuple[ScoreWatch, WatchedScore]]:
    """Return the early-stopping rules of a checkpoint, each with its saved state."""
    state = checkpoint.state
    described = state.identity.get("early_stopping") or []
    if isinstance(described, dict):
        described = [described]
    watches = []
    for settings in described:
        rule = EarlyStopping(**settings)
        _, score = parse_score(rule.monitor)
        of_training = is_of_training(score, state.splits)
        watches.append(ScoreWatch(rule.monitor, rule, of_training=of_training))
    saved = state.stopping
    if saved is None:  # behavior 1
        saved = [] if state.monitor is None else [state.monitor]
    return list(zip(watches, saved, strict=False))


BODY_FACTOR = "lr_body_factor"  # of the rate that the loop's body has written


def rates(log: Log, rate: Callable[[int, float], float]) -> Iterator[Problem]:
    """Yield learning rates that differ from the schedule `rate`, a function of the step index and
    the plateau factor.
    """
    name = "lr"
    factors = [(0, 1.0)]  # each with the step of its evaluation: it holds for later steps
    for line in log.curve:
        if line.kind == "eval" and "lr_factor" in line.record:
            factors.append((line.step, _number(line.record, "lr_factor")))
        if line.kind != "train" or name not in line.record:
            continue
        factor = next(factor for start, factor in reversed(factors) if start < line.step)
        planned = rate(line.step - 1, factor)
        if BODY_FACTOR in line.record:  # the rate that was written is known up to rounding
            by_body = planned * _number(line.record, BODY_FACTOR)
            if math.isclose(by_body, _number(line.record, name), rel_tol=1e-9):
                continue
        if repr(planned) != repr(line.record[name]):
            why = f"{name} is {line.record[name]!r}, but the schedule gives {planned!r}"
            yield _at(line, why, kind="differs", name=name, computed=planned)


def targets(log: Log, each: float, *, since: int, until: int) -> Iterator[Problem]:
    """Yield records whose steps do not have `each` targets, counted since the last record or since
    a resume after divergence. Steps before `since` and after `until` have other sizes.
    """
    name = "targets"
    before = 0
    resumed = 0
    for line in log.curve:
        if line.kind == "resume":
            resumed = line.step
        if line.kind != "train":
            continue
        steps = line.step - before
        since_resume = line.step - max(before, resumed)
        has_other_sizes = before < since or line.step > until
        before = line.step
        if has_other_sizes:
            continue
        if "skipped_samples" in line.record:  # fewer targets, which a repetition counts
            continue
        if name not in line.record:
            continue
        if _number(line.record, name) not in (steps * each, since_resume * each):
            why = f"{name} is {line.record[name]!r}, but {steps} steps of {each:g} targets give {steps * each:g}"
            yield _at(line, why, name=name, computed=float(steps * each))


def add_beginning(verdict: Verdict, parts: RunComponents, files: Files) -> None:
    """Compare the saved weights of step 0 with those of the rebuilt run.

    If at most half of each differing tensor's entries differ, the model was changed. Otherwise,
    another torch version or code outside the run may have initialized the weights, and step 0 stays
    unproved.
    """
    if 0 not in files.checkpoints or parts.state.step:
        return
    start = files.checkpoints[0]
    init = start.state.identity["init_from"]
    if init is not None:
        verdict.not_proved.append(
            f"the weights of step 0: they came from {init}, and are used as saved"
        )
        return
    then = start.state.machine
    now = parts.machine() | {"threads": then["threads"]}  # weights do not depend on threads
    moved = describe_changes(then, now)
    differing = []
    changed = []
    for difference in tensors(start.checkpoint, parts.packed(), exact=False):
        if difference.file.partition("-")[0] != "model":
            continue
        differing.append(difference)
        is_rounding = moved and difference.relative <= TOLERANCE
        if difference.differing <= 0.5 and not is_rounding:
            changed.append(as_problem(difference, step=0, what=start.path.name))
    if len(changed) < len(differing):
        why = moved
        if not why:
            why = "the model was built without the run's seed, from a file, or by code that has changed"
        verdict.not_proved.append(
            f"the weights of step 0: they differ from the weights that are built now, and are used as saved ({why})"
        )
    elif changed:
        verdict.problems.extend(changed)
    else:
        verdict.proved.append(
            f"step 0: seed {start.state.identity['seed']} builds the same weights"
        )


def shortened(problems: Iterable[Problem], *, of: str = "more like it") -> list[Problem]:
    """Return the first problems; the last of them counts the others, which `of` names."""
    every = list(problems)
    first = every[:_SHOWN]
    if len(every) > _SHOWN:
        first[-1] = replace(first[-1], text=f"{first[-1].text}; and {len(every) - _SHOWN} {of}")
    return first


def _at(
    line: LogLine, text: str, *, kind: Kind = "inconsistent", name: str = "", computed: float = 0.0
) -> Problem:
    """Return the problem of a line; of its value `name`, if that is given."""
    where = f"{FILE}, line {line.number}, the record of step {line.step}"
    problem = Problem(kind, f"{where}: {text}", line.step, FILE)
    if not name:
        return problem
    saved = repr(line.record.get(name))
    return replace(problem, quantity=name, saved=saved, computed=repr(computed))


def _of_checkpoint(
    checkpoint: StoredStep, text: str, quantity: str, saved: str, computed: str
) -> Problem:
    return Problem(
        "inconsistent",
        f"{checkpoint.path.name} {text}",
        checkpoint.step,
        None,
        quantity,
        saved,
        computed,
    )


def _number(record: Record, name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else math.nan
