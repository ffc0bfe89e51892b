"""Exact replays of steps from a checkpoint, without changes to the run directory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from surefoot.checkpoint.format import Checkpoint, Damage, DamageError
from surefoot.checkpoint.store import Store
from surefoot.config.batch_size import Batching
from surefoot.errors import CheckpointError, ConfigError
from surefoot.optim.clipping import clear
from surefoot.seeding import untouched
from surefoot.tracking.record import Record
from surefoot.train import state_dict
from surefoot.train.components import Components
from surefoot.train.error_causes import explaining
from surefoot.train.loop import Step, forward_backward, update
from surefoot.train.run_identity import machine_changes
from surefoot.train.skipped_steps import skipped_count

ROUNDED = "equal up to rounding"  # in a note on conditions that changed


class Numbers(NamedTuple):
    """The loss, the gradient norm and the skip flag of a step, on the host."""

    loss: float
    norm: float
    skipped: bool


@dataclass(frozen=True)
class FinishedStep:
    """A replayed step with its tensors on the device.

    `window` has the values of a record after this step (loss, targets, gradient norm since the last
    record), without user-logged values. `window` is None without a record, or if the window
    contains a diverged run's last good state.
    """

    step: Step
    window: dict[str, Any] | None = None

    @property
    def index(self) -> int:
        return self.step.index

    def numbers(self) -> Numbers:
        """Return the loss, the gradient norm and the skip flag; wait for the device."""
        tensors = (self.step.loss, self.step.grad_norm, self.step.skipped)
        loss, norm, skipped = (
            float(tensor) for tensor in tensors if tensor is not None
        )  # the step has run
        return Numbers(loss, norm, bool(skipped))


class Execution:
    """Replayed steps of a run from a checkpoint. Bits are equal unless `notes` reports changed
    conditions.
    """

    def __init__(
        self, parts: Components, checkpoint: Checkpoint, records: Sequence[Record]
    ) -> None:
        self.parts = parts
        self.logged = {int(record["step"]) for record in records if record["kind"] == "train"}
        self.scored = {
            int(record["step"]): record for record in records if record["kind"] == "eval"
        }
        self.notes = _notes(parts, checkpoint)
        self._steer()  # apply an evaluation still due when the checkpoint was written

    @property
    def done(self) -> int:
        """The number of completed steps, including steps before the checkpoint."""
        return self.parts.state.step

    def steps(self, until: int) -> Iterator[FinishedStep]:
        """Run and yield steps until `until` steps are complete. The user's code between steps does
        not run.
        """
        parts = self.parts
        state = parts.state
        if self.done >= until:
            return
        if parts.skips is not None:
            yield from self._skipped_steps(until)
            return
        with closing(parts.pipeline.feed(workers=parts.pipeline.workers)) as feed:
            feed.start(self.done, stop=until)
            while self.done < until:
                step = Step(state.step, feed.micro_batches(state.step), parts.task, state)
                with explaining(step):
                    forward_backward(step)
                update(step)
                yield self.finish_step(step)

    def _skipped_steps(self, until: int) -> Iterator[FinishedStep]:
        """Pass over the steps that the journal of changes skips, as the run has done."""
        state = self.parts.state
        while self.done < until:
            step = Step(state.step, (), self.parts.task, state)
            state.step += 1
            self._steer()
            yield FinishedStep(step)

    def next_step(self) -> Step:
        with closing(self.parts.pipeline.feed(workers=0)) as feed:
            feed.start(self.done, stop=self.done + 1)
            return Step(self.done, feed.micro_batches(self.done), self.parts.task, self.parts.state)

    def finish_step(self, step: Step) -> FinishedStep:
        """Count a step, and update the record's values and a plateau's learning rate."""
        meter = self.parts.run_state.meter
        self.parts.state.step += 1
        meter.add(step)
        self._steer()
        if self.logged:
            is_logged = self.done in self.logged
        else:
            is_logged = self.parts.plan.times.log_due(self.done)
        if not is_logged:
            return FinishedStep(step)
        begins = max((logged for logged in self.logged if logged < self.done), default=0)
        skipped_steps = skipped_count(self.parts.changes, after=begins, until=self.done)
        whole_window = not self.logged or len(meter.rows) == self.done - begins - skipped_steps
        values, skipped = meter.read()
        meter.note_skipped(skipped, done=self.done)
        return FinishedStep(step, values if whole_window else None)

    def _steer(self) -> None:
        feedback = self.parts.run_state.feedback
        record = self.scored.get(self.done)
        if feedback is None or record is None or feedback.standing.step >= self.done:
            return
        is_due = self.parts.plan.times.every["evaluate_every"].due(self.done)
        score = feedback.plateau.score
        if is_due and score in record:
            feedback.update(self.done, float(record[score]))
            self.parts.state.lr_factor = feedback.standing.factor


@contextmanager
def execution(
    parts: Components, checkpoint: Checkpoint, *, records: Sequence[Record] = ()
) -> Iterator[Execution]:
    """Yield an `Execution` of a run from a checkpoint; restore torch's settings and generators on
    exit.

    `parts` must be built and not open. The models of `parts` change. The run directory is neither
    locked, read nor written. A plateau needs the scores in `records`. Torch uses the checkpoint's
    number of threads. Raises `ConfigError` for steps that need the user's own code, and
    `CheckpointError` for a checkpoint of another run.
    """
    refuse_own_steps(parts, step=checkpoint.step)
    _refuse_earlier_settings(parts, checkpoint)
    threads = torch.get_num_threads()
    try:
        if parts.device.type == "cpu":
            torch.set_num_threads(checkpoint.saved.machine["threads"])
        with _explain_refusal():
            parts.refuse_other_settings(checkpoint)
        if parts.pipeline.tape is not None:
            parts.pipeline.tape.require(checkpoint.saved.tape)
        with untouched(), parts.numerics():
            with _explain_refusal():
                state_dict.restore(
                    parts.run_state,
                    checkpoint,
                    where=f"step-{checkpoint.step:08d}",
                    changed=[change.setting for change in parts.changes_since(checkpoint)],
                )
                parts.refuse_another_architecture(checkpoint)
            clear(parts.state.parameters)
            parts.state.buffers.undo()
            parts.make_ready()
            yield Execution(parts, checkpoint, records)
    finally:
        torch.set_num_threads(threads)


def _refuse_earlier_settings(parts: Components, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a checkpoint before the change with which the settings of the
    repeated steps begin.
    """
    begin = parts.settings_begin
    if checkpoint.step < begin:
        raise CheckpointError(
            "step-before-change",
            problem=f"no checkpoint is left from step {begin} on, where the settings of this step"
            " begin",
            reason=f"the nearest one, step-{checkpoint.step:08d}, has those before the change",
            step=checkpoint.step,
            begin=begin,
        )


def refuse_own_steps(parts: Components, *, step: int) -> None:
    """Raise `ConfigError` for a run whose steps need several processes or the user's own code."""
    if parts.task.loss is None:
        raise ConfigError(
            "steps-of-own-loop",
            problem=f"the steps from {step} on cannot be repeated: this run has no loss function",
            reason="its script computes each step itself",
            remedy="in the script: resume from a copy of its directory with Run(stop_after=...), and"
            " inspect\nthat step in the loop over run.steps(), between forward_backward(step, loss)"
            " and update(step),\nwhere every gradient is available",
            step=step,
        )
    refuse_ranks(parts)
    refuse_open_run(parts)


def refuse_ranks(parts: Components) -> None:
    """Raise `ConfigError` for a run of several ranks: its steps are repeated in one process."""
    ranks = parts.world.size
    if ranks > 1:
        raise ConfigError(
            "steps-repeated-on-ranks",
            problem=f"steps are repeated in one process, and this run has {ranks} ranks",
            remedy="start it without torchrun or srun",
            ranks=ranks,
        )


def refuse_open_run(parts: Components) -> None:
    """Raise `ConfigError` for a run that is open."""
    if parts.directory is not None and parts.directory.lock is not None:
        raise ConfigError(
            "run-is-open",
            problem="this run is open",
            reason="it trains, so its weights and checkpoints change",
            remedy="do this before or after `with run:`, or build the run a second time",
            path=parts.directory.path,
        )


def describe_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the changed settings that affect the bits of results as text, or "" without
    changes.
    """
    changes = machine_changes(then, now, how="repeated in one process")
    if now["device"] == "cuda" and not then.get("deterministic"):
        changes = ["trained without --deterministic on a GPU", *changes]
    return "; ".join(changes)


def shares_of(machine: Mapping[str, Any], sizes: Batching) -> list[range]:
    """Return the micro-batches of each rank of a saved run."""
    return sizes.shares(machine["ranks"], shards=machine.get("shards", 1))


def nearest_checkpoint(store: Store, step: int) -> tuple[Checkpoint, list[Damage]]:
    """Return the newest intact checkpoint up to `step`, and the damage of later checkpoints; raise
    `CheckpointError` if none is intact.
    """
    newest = store.newest_intact(up_to=step)
    if newest is not None:
        return newest
    steps = store.steps()
    raise CheckpointError(
        "no-earlier-checkpoint",
        problem=f"no checkpoint at or before step {step} in {store.directory}",
        reason=f"available: {', '.join(map(str, steps)) or 'none'}",
        step=step,
        path=store.directory,
        available=steps,
    )


@contextmanager
def _explain_refusal() -> Iterator[None]:
    try:
        yield
    except DamageError:
        raise
    except CheckpointError as problem:
        # its own places and remedies are those of a resume
        error = copy(problem)
        error.places = ("no step can be repeated",)
        error.remedies = ("use the data, the settings and the program that trained the run",)
        raise error from problem


def _notes(parts: Components, checkpoint: Checkpoint) -> list[str]:
    changes = describe_changes(checkpoint.saved.machine, parts.machine())
    return [f"{changes}: {ROUNDED}, not bit for bit"] if changes else []
