"""Replay and inspection of one past step, from the nearest earlier checkpoint. The cost is reported
first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from surefoot.checkpoint.format import Damage
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, ConfigError
from surefoot.tools.replay.findings import WIDE, Look, json_values, sections
from surefoot.tools.replay.inspect_step import look
from surefoot.tools.replay.rerun import (
    ROUNDED,
    Execution,
    execution,
    nearest_checkpoint,
    refuse_own_steps,
    shares_of,
)
from surefoot.tracking.format import counted, duration, number
from surefoot.tracking.jsonl import records
from surefoot.tracking.record import Record
from surefoot.train.components import Components
from surefoot.train.error_causes import explaining


@dataclass(frozen=True)
class Logged:
    """The recorded and the replayed values of a step. `where` names a record, or a checkpoint's
    rows.
    """

    where: str
    names: tuple[str, ...]
    equal: bool
    then: dict[str, float]
    now: dict[str, float]

    def in_words(self, notes: Sequence[str]) -> str:
        """Describe the comparison. A note of the replay may say why the last digits differ."""
        if self.equal:
            return f"{' and '.join(self.names)} match {self.where} bit for bit"
        differing = "; ".join(
            f"{name} {self.then[name]!r}, now {self.now[name]!r}" for name in self.names
        )
        # rounding grows with the repeated steps
        is_close = all(
            math.isclose(self.then[name], self.now[name], rel_tol=1e-3) for name in self.names
        )
        if is_close and any(ROUNDED in note for note in notes):
            return f"equal to {self.where} up to rounding, as noted below: {differing}"
        return f"NOT equal to {self.where}: {differing}"


@dataclass(frozen=True)
class Replay:
    """A replayed step; `print` shows the report. `start` is the checkpoint's step, and `length` the
    total number of steps.

    >>> look = Look(step=3, loss=2.0, norm=1.0, first=None)
    >>> replay = Replay(
    ...     "runs/a", look, length=10, start=0, logged=None, notes=(), learning_rate=0.1, samples=8
    ... )
    >>> replay.to_dict()["verdict"]
    'everything in this step is finite'
    """

    run: str
    look: Look
    length: int
    start: int
    logged: Logged | None
    notes: tuple[str, ...]
    learning_rate: float
    samples: int

    def __str__(self) -> str:
        """Return the report, up to 100 columns wide."""
        look = self.look
        steps = counted(look.step - self.start + 1, "step")
        logged = "no record covers this step alone"
        if self.logged:
            logged = self.logged.in_words(self.notes)
        lines = [
            f"{self.run}, step {look.step} of {self.length}",
            f"  {look.verdict}",
            f"  loss {number(look.loss)}, norm {number(look.norm)}, learning rate {number(self.learning_rate)}",
            f"  repeated from step-{self.start:08d}, {steps}; {logged}",
            *(f"  note: {note}" for note in look.notes),
        ]
        wrapped = []
        for line in lines:
            wrapped += wrap(line, WIDE, subsequent_indent="    ")
        return "\n".join([*wrapped, *sections(look, samples=self.samples)])

    def to_dict(self) -> dict[str, Any]:
        """Return the replay as JSON values."""
        return {
            "run": self.run,
            "length": self.length,
            "from_checkpoint": self.start,
            "steps_made_again": self.look.step - self.start,
            "logged": None if self.logged is None else json_values(vars(self.logged)),
            "notes_of_run": list(self.notes),
            "lr": self.learning_rate,
            **self.look.to_dict(),
        }


def replay_step(
    parts: Components, step: int, *, path: Path, samples: int, say: Callable[[str], None] | None
) -> Replay:
    """Replay and inspect a step, as in `SavedRun.replay`. `parts` must not be open, and its models
    are changed.
    """
    notify = say or (lambda _: None)
    refuse_step(step, parts.length.steps, where=path)
    refuse_own_steps(parts, step=step)
    if parts.skips is not None:
        raise ConfigError(
            "step-was-skipped",
            problem=f"step {step} was not made: the journal of changes skips steps {parts.skips}, as"
            " records number them",
            remedy="choose a step before or behind them",
            step=step,
            skips=parts.skips,
        )
    checkpoint, damaged = nearest_checkpoint(Store(path / "checkpoints"), step)
    if parts.pipeline.tape is not None:
        parts.pipeline.tape.refuse_dropped(checkpoint.step, step, parts.pipeline.sizes.batch_size)
    known = records_of(path)
    report_cost(checkpoint.step, step + 1, damaged, known, notify)
    with execution(parts, checkpoint, records=known) as rerun:
        for note in rerun.notes:
            notify(f"note: {note}")
        for _ in rerun.steps(step):
            pass
        step_to_inspect = rerun.next_step()
        notes = [*rerun.notes, *_notes(parts, known, step=step, out=path)]
        with explaining(step_to_inspect):
            inspected = look(
                step_to_inspect,
                samples=samples,
                describe=parts.settings.describe_fn,
                shares=shares_of(checkpoint.saved.machine, parts.pipeline.sizes),
                user_state=parts.run_state.user_state.objects,
            )
        logged = _compare_logged(rerun, known, path, step)
        factor = parts.task.factors(step) * parts.state.lr_factor
    optimizer = next(iter(parts.state.optimizers.values()))
    return Replay(
        run=str(path),
        look=replace(inspected, notes=notes + inspected.notes),
        length=parts.length.steps,
        start=checkpoint.step,
        logged=logged,
        notes=tuple(notes),
        learning_rate=float(optimizer.rates.bases[0]) * factor,
        samples=samples,
    )


def refuse_step(step: int, length: int, *, where: Path) -> None:
    """Raise `ConfigError` if a run does not have a step."""
    if not 0 <= step < length:
        raise ConfigError(
            "step-not-in-run",
            problem=f"step = {step}, and {where} has the steps 0 to {length - 1}",
            setting="step",
            value=step,
            path=where,
            length=length,
        )


def records_of(out: Path) -> list[Record]:
    """Return the records of a run, or an empty list if their file cannot be read."""
    try:
        return records(out / "metrics.jsonl")
    except OSError:
        return []


def report_cost(
    start: int,
    until: int,
    damaged: Sequence[Damage],
    known: Sequence[Record],
    say: Callable[[str], None],
) -> None:
    """Report damaged checkpoints, and how many steps are executed again. Their seconds follow from
    recorded speeds, if there are any.
    """
    for damage in damaged:
        say(f"warning: {damage}: an older checkpoint is used")
    steps = until - start
    text = f"from step-{start:08d}: {counted(steps, 'step')} to repeat"
    step_s = pace_s(known)
    if step_s is not None:
        text += f", about {duration(max(1.0, steps * step_s))} at the recorded speed"
    say(text)


def pace_s(known: Sequence[Record]) -> float | None:
    """Return the seconds per step from the records, including data wait, or None without such
    records.

    >>> pace_s(
    ...     [
    ...         {"kind": "train", "step": step, "training_s": 3.0, "data_wait_s": 1.0}
    ...         for step in (8, 16)
    ...     ]
    ... )
    0.5
    """
    seconds = []
    steps = 0
    for record in known:
        if record["kind"] == "train":
            seconds.append(float(record.get("training_s") or 0.0))
            seconds.append(float(record.get("data_wait_s") or 0.0))
            steps = max(steps, int(record["step"]))
    took_s = sum(seconds)
    return took_s / steps if took_s > 0 else None


def _notes(parts: Components, known: Sequence[Record], *, step: int, out: Path) -> list[str]:
    notes = []
    recorded_steps = [int(record["step"]) for record in known]
    reached = max([*Store(out / "checkpoints").steps(), *recorded_steps])
    if step > reached:
        notes.append(
            f"the run itself has completed {reached} steps, according to its records and checkpoints"
        )
    if parts.compiled:
        notes.append(f"the step is inspected without torch.compile: {ROUNDED}")
    if any(record.get("user_s") for record in known if record["kind"] == "train"):
        notes.append(
            "your own code ran between the steps; neither the code nor its changes are repeated here"
        )
    return notes


def _compare_logged(
    rerun: Execution, known: Sequence[Record], out: Path, step: int
) -> Logged | None:
    (finished,) = rerun.steps(step + 1)
    window = finished.window
    if window is not None:
        for record in known:
            if record["kind"] == "train" and record["step"] == step + 1:
                names = [
                    name for name in ("loss", "grad_norm") if name in record and name in window
                ]
                return _comparison("the record", names, record, window)
    # a checkpoint keeps the rows of the steps since the last record
    store = Store(out / "checkpoints")
    for saved_step in store.steps():
        if saved_step <= step:
            continue
        try:
            rows = store.at(saved_step, only=("state",)).tensors("state")["meter/rows"].tolist()
        except (CheckpointError, LookupError):
            continue
        for row in rows:
            if row[0] == step:
                numbers = finished.numbers()
                then = {"loss": row[1], "grad_norm": row[3]}
                now = {"loss": numbers.loss, "grad_norm": numbers.norm}
                return _comparison(f"step-{saved_step:08d}", ["loss", "grad_norm"], then, now)
    return None


def _comparison(
    where: str, names: Sequence[str], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Logged:
    then = {name: float(before[name]) for name in names}
    now = {name: float(after[name]) for name in names}
    is_equal = repr(then) == repr(now)  # bitwise: NaN equals NaN
    return Logged(where, tuple(names), is_equal, then, now)
