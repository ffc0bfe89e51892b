"""Replays of step windows from checkpoints, compared with every record and checkpoint inside each
window.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from surefoot.checkpoint.format import Checkpoint
from surefoot.errors import CheckpointError, first_line
from surefoot.run import periodic
from surefoot.run.components import RunComponents
from surefoot.tools.replay.rerun import Execution, FinishedStep, describe_changes, execution
from surefoot.tools.verify.compare import numbers, rescale, tensors
from surefoot.tools.verify.files import Files, StoredStep
from surefoot.tools.verify.metrics_log import FILE, curve
from surefoot.tools.verify.records import shortened
from surefoot.tools.verify.verdict import Difference, Outcome, Problem, Window, as_problem
from surefoot.tracking.record import is_rate, logged_names
from surefoot.train.meter import derived

# the defaults
STEPS = 100
WINDOWS = 5


def plan_windows(
    starts: Sequence[int],
    points: Sequence[int],
    *,
    steps: int | None,
    windows: int,
    seed: int | None = None,
    begins: Sequence[int] = (0,),
) -> list[Window]:
    """Return at most `windows` windows of about `steps` steps, or one window to the end if `steps`
    is None; and one from each of the steps `begins` on, at which settings change.

    `starts` are the steps of usable checkpoints. `points` are the steps with a record or a
    checkpoint to compare. A window ends at the last point at most `steps` steps after its start, or
    else at the first later point. Windows never overlap, and no window crosses a change of settings. `seed` selects windows at random. Without
    `seed`, the first, the last and evenly spaced windows are selected.

    >>> plan_windows([0, 80, 90, 100], range(10, 101, 10), steps=20, windows=2)
    [Window(start=0, stop=20), Window(start=80, stop=100)]
    >>> plan_windows([0, 80], [10, 80, 85], steps=None, windows=5)
    [Window(start=0, stop=85)]
    >>> plan_windows([0, 40, 60], [10, 40, 60, 85], steps=None, windows=5, begins=[0, 40])
    [Window(start=0, stop=40), Window(start=40, stop=85)]
    """
    if windows < 1:
        return []
    possible: list[Window] = []
    for begin, end in pairwise([*begins, math.inf]):
        of_segment = [point for point in points if begin < point <= end]
        starts_of_segment = [start for start in starts if begin <= start < end]
        possible += _windows_of(starts_of_segment, of_segment, steps)
    if steps is None or len(possible) <= windows:
        return possible
    if seed is not None:
        chosen = random.Random(seed).sample(possible, windows)
        return sorted(chosen, key=lambda window: window.start)
    if windows == 1:
        return possible[-1:]
    last = len(possible) - 1
    # one division, since a rounded quotient times the index could select another window
    return [possible[round(index * last / (windows - 1))] for index in range(windows)]


def _windows_of(starts: Sequence[int], points: Sequence[int], steps: int | None) -> list[Window]:
    """Return the possible windows between two changes of settings."""
    usable = [start for start in sorted(starts) if any(point > start for point in points)]
    if not usable:
        return []
    if steps is None:
        return [Window(usable[0], max(points))]
    return _without_overlap([_from(start, points, steps) for start in usable], end=max(points))


def gaps(windows: Sequence[Window], *, end: int) -> list[Window]:
    """Return the ranges up to `end` that no window covers.

    >>> gaps([Window(0, 20), Window(80, 100)], end=110)
    [Window(start=20, stop=80), Window(start=100, stop=110)]
    """
    uncovered = []
    covered = 0
    for window in [*sorted(windows, key=lambda window: window.start), Window(end, end)]:
        if window.start > covered:
            uncovered.append(Window(covered, window.start))
        covered = window.stop
    return uncovered


def cost_steps(gap: Window, starts: Sequence[int]) -> int | None:
    """Return the number of steps from the last checkpoint before a gap to its end, or None without
    such a checkpoint.

    >>> cost_steps(Window(20, 80), [0, 10, 80])
    70
    """
    before = max((start for start in starts if start <= gap.start), default=None)
    return None if before is None else gap.stop - before


def _from(start: int, points: Sequence[int], steps: int) -> Window:
    """Return the window from a start to the last point within so many steps, or else to the next
    point.
    """
    later = [point for point in points if point > start]
    near = [point for point in later if point <= start + steps]
    return Window(start, max(near) if near else min(later))


def _without_overlap(possible: Sequence[Window], *, end: int) -> list[Window]:
    """Return windows of which none overlaps another, with one that ends at the `end`."""
    last = next((window for window in possible if window.stop == end), possible[-1])
    separate = []
    stop = 0
    for window in possible:
        if stop <= window.start and window.stop <= last.start:
            separate.append(window)
            stop = window.stop
    return [*separate, last]


def replay_window(
    parts: RunComponents,
    files: Files,
    window: Window,
    *,
    tolerance: float,
    watch: Callable[[], None],
) -> Outcome:
    """Replay a window, and compare every record and checkpoint in the window with the results.

    After a checkpoint that differs, the replay continues from the computed state. After two such
    checkpoints in a row, the replay continues from the saved state.
    """
    replay = _WindowReplay(parts, files, window, tolerance=tolerance, watch=watch)
    start: StoredStep | None = files.checkpoints[window.start]
    while start is not None and start.step < window.stop:
        try:
            start = replay.replay_from(start)
        except CheckpointError as problem:
            if all(checkpoint.path.is_dir() for checkpoint in files.checkpoints.values()):
                raise
            replay.outcome.lost = first_line(problem)
            break
    return replay.outcome


class _WindowReplay:
    def __init__(
        self,
        parts: RunComponents,
        files: Files,
        window: Window,
        *,
        tolerance: float,
        watch: Callable[[], None],
    ) -> None:
        self.parts = parts
        self.files = files
        self.window = window
        self.tolerance = tolerance
        self.watch = watch
        self.lines = {line.step: line for line in files.log.lines_of("train")}
        self.known = {name for line in self.lines.values() for name in line.record}
        self.resumed = {int(record["step"]) for record in files.log.of("resume")}
        self.outcome = Outcome(window, exact=True)
        self.astray = False  # True if the last checkpoint differed

    def replay_from(self, start: StoredStep) -> StoredStep | None:
        """Repeat the steps behind a checkpoint; return the checkpoint from which to go on, or None
        at the end of the window.
        """
        records = [line.record for line in self.files.log.curve]
        with execution(self.parts, start.checkpoint, records=records) as stand:
            self._take_machine(stand, start.step, start.checkpoint)
            for finished in stand.steps(self.window.stop):
                self.outcome.loss_counts |= isinstance(finished.step.target_count, torch.Tensor)
                self._record(finished, stand)
                self.watch()
                checkpoint = self.files.checkpoints.get(stand.done)
                if checkpoint is not None and not self._checkpoint(checkpoint, stand):
                    return checkpoint
                self._take_machine(stand, stand.done, start.checkpoint)
        return None

    def _take_machine(self, stand: Execution, step: int, otherwise: Checkpoint) -> None:
        """Compute the next step with the threads of its session, and note what else differs from
        the machine of that session.
        """
        if step >= self.window.stop:
            return
        machine = self.files.machine_of(step, otherwise=otherwise)
        if stand.parts.device.type == "cpu":
            torch.set_num_threads(int(machine.get("threads", torch.get_num_threads())))
        unlike = describe_changes(machine, stand.parts.machine())
        if unlike:
            self.outcome.exact = False
            self.outcome.unlike = self.outcome.unlike or unlike

    def _record(self, finished: FinishedStep, stand: Execution) -> None:
        outcome = self.outcome
        step = finished.index + 1
        line = self.lines.get(step)
        if line is None:
            return
        outcome.met_records += 1
        if finished.window is None:  # the record covers steps before the checkpoint
            return
        logged = logged_names(line.record)
        # 0.1.0 recorded only `lr`, and left the other names to the user's code
        has_rates = "ms_per_step" in line.record
        computed: dict[str, Any] = {}
        for name, rate in stand.parts.recorded_rates().items():
            if name == "lr" or (has_rates and name in line.record and name not in logged):
                computed[name] = rate
        computed |= finished.window
        computed |= derived(stand.parts.settings.derived, finished.window)
        if "ms_per_step" not in self.known:
            logged += [name for name in line.record if is_rate(name)]
        outcome.unknown |= {name for name in logged if name not in computed}
        unequal = numbers(line.record, computed, known=self.known, exact=outcome.exact)
        wrong = self._beyond(unequal, f"the record of step {step}", "records")
        if not wrong:
            outcome.records.append(step)
            return
        first, *others = wrong
        name = first.where
        where = f"{FILE} line {line.number}"
        count = step - max((earlier for earlier in self.lines if earlier < step), default=0)
        if count > 1:
            where = f"over {count} steps; {where}"
        if others:
            where += f"; also {', '.join(other.where for other in others)}"
        text = (
            f"step {step}: {name} was logged as {first.saved}, and is {first.computed} when"
            f" recomputed ({where})"
        )
        outcome.problems.append(
            Problem("differs", text, step, FILE, name, first.saved, first.computed)
        )

    def _checkpoint(self, checkpoint: StoredStep, stand: Execution) -> bool:
        """Compare the state with a checkpoint; return False if the replay must go on from the
        checkpoint.
        """
        outcome = self.outcome
        step = checkpoint.step
        cleared = self._cleared(checkpoint, stand)
        now = stand.parts.packed()
        differences = tensors(checkpoint.checkpoint, now, exact=outcome.exact, without=cleared)
        if not outcome.exact:
            buffers: set[str] = set()
            for model in stand.parts.state.models.values():
                buffers.update(name for name, _ in model.named_buffers())
            differences = rescale(checkpoint.checkpoint, now, differences, buffers=buffers)
        outcome.has_user_state |= bool(checkpoint.state.user_state)
        wrong = self._beyond(differences, checkpoint.path.name, "tensors")
        if not wrong:
            outcome.checkpoints.append(step)
        outcome.problems += _of_checkpoint(wrong, checkpoint)
        were_both_wrong = self.astray and bool(wrong)
        self.astray = bool(wrong)
        went_on_after_divergence = bool(cleared) and step in self.resumed
        return not were_both_wrong and not went_on_after_divergence

    def _cleared(self, checkpoint: StoredStep, stand: Execution) -> tuple[str, ...]:
        """Return prefixes of the entries that a diverged run clears in its last checkpoint
        (`divergence.ended`).
        """
        if checkpoint.manifest.log is None:
            return ()
        length, _ = checkpoint.manifest.log
        before = curve(self.files.log.up_to(length))
        if any(line.kind == "train" and line.step > checkpoint.step for line in before):
            # of the last good step: later steps were recorded, not applied
            return ("meter/", "skipped_in_a_row")
        latched = periodic.latched(stand.parts.state, stand.parts.settings.max_bad_steps)
        if latched and not checkpoint.state.skipped_in_a_row:
            return ("bad_in_a_row/", "skipped_in_a_row")
        return ()

    def _beyond(self, differences: list[Difference], what: str, kind: str) -> list[Difference]:
        """Return the differences that are no rounding, and keep the largest of the others."""
        if self.outcome.exact:
            return differences
        beyond = []
        for difference in differences:
            if difference.relative > self.tolerance:
                beyond.append(difference)
                continue
            largest = self.outcome.largest.get(kind)
            if largest is None or difference.relative > largest.relative:
                where = f"{what}, {difference.where}"
                if difference.more.startswith("with"):
                    where += f" {difference.more}"
                self.outcome.largest[kind] = replace(difference, where=where)
        return beyond


def _of_checkpoint(wrong: list[Difference], checkpoint: StoredStep) -> list[Problem]:
    first: dict[str, Difference] = {}  # a value may exceed the limit alone and within its group
    for difference in wrong:
        first.setdefault(difference.where, difference)
    weights_first = sorted(first.values(), key=lambda value: not value.where.startswith("model"))
    problems = []
    for difference in weights_first:
        problems.append(as_problem(difference, step=checkpoint.step, what=checkpoint.path.name))
    return shortened(problems, of="more tensors")
