"""One window of steps made again from a checkpoint, and what comes out compared with what was saved on the way."""

from collections.abc import Callable
from typing import Any

import torch

from surefoot.checkpoint.format import Contents
from surefoot.errors import CheckpointError, first_line
from surefoot.replay.rerun import Execution, Made, execution, unlike
from surefoot.run import periodic
from surefoot.run.components import RunComponents
from surefoot.tracking.record import OWN
from surefoot.verify.compare import judged, numbers, tensors
from surefoot.verify.files import Checkpoint, Files
from surefoot.verify.metrics_log import FILE, curve
from surefoot.verify.records import shortened
from surefoot.verify.verdict import Difference, Outcome, Problem, Window, as_largest, as_problem

Watching = Callable[[int], None]
"""Told after every step that is made again how many are made of the run."""


def made_again(
    parts: RunComponents, files: Files, window: Window, *, tolerance: float, watch: Watching, workers: int = 0
) -> Outcome:
    """Make the steps of a window again and compare every record and checkpoint on the way with what came out.

    Where a checkpoint differs, the steps go on from what was computed, so that it is seen whether what follows was made from
    that or from what is saved; where the next one differs too, from the saved one.
    """
    remaking = _Remaking(parts, files, window, tolerance=tolerance, watch=watch, workers=workers)
    start: Checkpoint | None = files.checkpoints[window.start]
    while start is not None and start.step < window.stop:
        try:
            start = remaking.made_from(start)
        except CheckpointError as problem:
            if not any(checkpoint.gone for checkpoint in files.checkpoints.values()):
                raise
            remaking.outcome.lost = first_line(problem)
            break
    return remaking.outcome


class _Remaking:
    """What has come of a window so far."""

    def __init__(
        self, parts: RunComponents, files: Files, window: Window, *, tolerance: float, watch: Watching, workers: int
    ) -> None:
        self.parts, self.files, self.window = parts, files, window
        self.tolerance, self.watch, self.workers = tolerance, watch, workers
        self.lines = {line.step: line for line in files.log.curve if line.kind == "train"}
        self.known = {name for line in self.lines.values() for name in line.record}
        self.resumed = {int(record["step"]) for record in files.log.of("resumed")}
        self.outcome = Outcome(window, exact=True)
        self.astray = False  # whether the last checkpoint differed

    def made_from(self, start: Checkpoint) -> Checkpoint | None:
        """Make steps from a checkpoint on; where it is to be gone on from another one, that."""
        records = [line.record for line in self.files.log.curve]
        with execution(self.parts, start.found, records=records, workers=self.workers) as stand:
            self._on(stand, start.step, start.found)
            for made in stand.steps(self.window.stop):
                self.outcome.loss_counts = self.outcome.loss_counts or isinstance(made.step.count, torch.Tensor)
                self._record(made, stand)
                self.watch(stand.done)
                checkpoint = self.files.checkpoints.get(stand.done)
                if checkpoint is not None and not self._checkpoint(checkpoint, stand):
                    return checkpoint
                self._on(stand, stand.done, start.found)
        return None

    def _on(self, stand: Execution, step: int, otherwise: Contents) -> None:
        """Compute the step of that index with as many threads as it was, and know whether equal bits can be asked for."""
        if step >= self.window.stop:
            return
        machine = self.files.machine_of(step, otherwise=otherwise)
        threads = int(machine.get("threads", torch.get_num_threads()))
        if stand.parts.device.type == "cpu" and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        other = unlike(machine, stand.parts.machine())
        if other:
            self.outcome.exact, self.outcome.unlike = False, self.outcome.unlike or other

    def _record(self, made: Made, stand: Execution) -> None:
        line = self.lines.get(made.index + 1)
        if line is None:
            return
        outcome, step = self.outcome, made.index + 1
        outcome.met_records += 1
        if made.window is None:  # of steps before the checkpoint, which it does not hold
            return
        rate = next(iter(stand.parts.state.trained.values())).optimizer.param_groups[0]["lr"]
        computed: dict[str, Any] = {**made.window, "learning_rate": rate}
        outcome.unknown |= line.record.keys() - computed.keys() - OWN
        found = numbers(line.record, computed, known=self.known, exact=outcome.exact)
        wrong = self._beyond(found, f"the record of step {step}", "records")
        if not wrong:
            outcome.records.append(step)
            return
        count = step - max((other for other in self.lines if other < step), default=0)
        over = f"over {count} steps; " if count > 1 else ""
        too = f"; {', '.join(each.where for each in wrong[1:])} too" if len(wrong) > 1 else ""
        name, saved, now = wrong[0].where, wrong[0].saved, wrong[0].computed
        text = f"step {step}: {name} was logged as {saved}, and is {now} when computed again"
        where = f"({over}{FILE} line {line.number}{too})"
        outcome.problems.append(Problem("differs", f"{text} {where}", step, FILE, name, saved, now))

    def _checkpoint(self, checkpoint: Checkpoint, stand: Execution) -> bool:
        """Compare; whether the steps that follow can be made from what was computed."""
        outcome, step = self.outcome, checkpoint.step
        cleared = self._cleared(checkpoint, stand)
        now = stand.parts.packed()
        found = tensors(checkpoint.found, now, exact=outcome.exact, without=cleared)
        if not outcome.exact:
            models = stand.parts.state.models.values()
            buffers = {name for model in models for name, _ in model.named_buffers()}
            found = judged(checkpoint.found, now, found, buffers=buffers)
        outcome.kept = outcome.kept or bool(checkpoint.found.saved.kept)
        wrong = self._beyond(found, checkpoint.path.name, "tensors")
        if not wrong:
            outcome.checkpoints.append(step)
        else:
            outcome.problems += _of_checkpoint(wrong, checkpoint)
        both, self.astray = bool(wrong) and self.astray, bool(wrong)
        return not (both or (bool(cleared) and step in self.resumed))

    def _cleared(self, checkpoint: Checkpoint, stand: Execution) -> tuple[str, ...]:
        """What the end of a run that had diverged has cleared in the checkpoint that it wrote (`divergence.ended`)."""
        if checkpoint.manifest.log is None:
            return ()
        before = curve(self.files.log.up_to(checkpoint.manifest.log[0]))
        last = max((line.step for line in before if line.kind == "train"), default=0)
        if last > checkpoint.step:  # it is that of the last good step: later ones were on record, and not applied
            return "meter/", "skipped_in_a_row"
        latched = periodic.latched(stand.parts.state, stand.parts.settings.max_bad_steps)
        if latched and not checkpoint.found.saved.skipped_in_a_row:
            return "bad_in_a_row/", "skipped_in_a_row"
        return ()

    def _beyond(self, found: list[Difference], what: str, kind: str) -> list[Difference]:
        """The differences that rounding does not explain; the largest of the others is remembered."""
        if self.outcome.exact:
            return found
        for difference in found:
            held = self.outcome.largest.get(kind)
            if difference.relative <= self.tolerance and (held is None or difference.relative > held.difference):
                self.outcome.largest[kind] = as_largest(difference, what=what)
        return [difference for difference in found if difference.relative > self.tolerance]


def _of_checkpoint(wrong: list[Difference], checkpoint: Checkpoint) -> list[Problem]:
    """One problem for each tensor that differs, the weights first; of many the first few."""
    first: dict[str, Difference] = {}  # a number that is too far by itself may be so with all others too
    for difference in wrong:
        first.setdefault(difference.where, difference)
    weights_first = sorted(first.values(), key=lambda each: not each.where.startswith("model"))
    problems = (as_problem(each, step=checkpoint.step, what=checkpoint.path.name) for each in weights_first)
    return shortened(problems, of="tensors more")
