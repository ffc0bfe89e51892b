"""One sitting of a run: from opening it to closing it, with what the loop finds due in between.

A run that is never interrupted has one; each resume adds another. What lives only as long (the loader, the files of records,
signal handlers, torch's settings) lives here. How a directory is opened is in `opening.py`, what ends a run early in `wishes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from surefoot import crash, divergence, events, narration
from surefoot.alike import refuse_unequal
from surefoot.checkpoint.format import Contents
from surefoot.clock import Phase
from surefoot.data.first_look import first_look
from surefoot.errors import ConfigError
from surefoot.evaluations import Evaluations
from surefoot.failing import left, reported, told_to_others
from surefoot.journal import Journal
from surefoot.layers import Layers
from surefoot.loop import Step, steps
from surefoot.memory import used_bytes
from surefoot.micro_batch import MicroBatch
from surefoot.opening import opened
from surefoot.pace import make_ready
from surefoot.parts import Parts
from surefoot.remarks import Remarks, remarks_of
from surefoot.replicas import Comparison
from surefoot.reporting.writing import report_at_end
from surefoot.signals import Signals, to_terminal
from surefoot.sinks.tracking.names import refuse_missing
from surefoot.watching import UNWATCHED, Watch, Watched
from surefoot.wishes import Wishes


class Sitting:
    """The duties of the loop (`surefoot.loop.Duties`), and opening and closing around it."""

    def __init__(self, parts: Parts, *, configuration: str | None) -> None:
        self.parts, self.whole, self.state = parts, parts.whole, parts.state
        self.heart = parts.world.heart
        self.configuration = configuration
        self.looped_at = time.monotonic()
        self.fresh_line = parts.console.fresh_line if parts.console else "\n"
        say = to_terminal(self.fresh_line) if parts.rank_log is None else parts.rank_log.at_once
        self.signals = Signals(lambda: narration.standing(parts), say=say)
        self.settings = ExitStack()
        self.journal = Journal(parts.console)
        self.evaluations = Evaluations(parts, self.journal)
        self.feed = parts.supply.feed(workers=parts.supply.workers)
        self.first_step = 0
        self.wishes = Wishes(parts.world, self.signals, parts.saving, limit_s=parts.timetable.limit_s)
        self.skipped = 0  # steps, as far as the records tell
        self.running: Generator[Step] | None = None
        self.alone = False  # no code of the user's runs between steps
        self.logged_step = 0
        self.comparison = Comparison(parts.world, parts.timetable.compare)
        self.layers = Layers(
            self.state.models,
            {name: trained.parameters for name, trained in self.state.trained.items()},
            world=parts.world,
            local_times=parts.task.ranks.local_times,
            compiled=parts.compiled,
            seen=self.whole.seen,
        )
        self.remarks: list[Remarks] = []
        self.evaluated_step = 0  # the last one after which scores or a sample were due

    # --- opening and closing -------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take over signals and the directory; go on from its newest intact checkpoint, or commit step 0."""
        self.signals.install()
        self.heart.opened(
            logs=None if self.parts.directory is None else self.parts.directory.path / "logs",
            fresh_line=self.fresh_line,
        )
        try:
            refuse_unequal(self.parts.world, self.parts.compared())
            refuse_missing(self.parts.trackers)
            self.settings.enter_context(self.parts.numerics())
            now = opened(self.parts, configuration=self.configuration)
            self.parts = now.parts
            if now.found is not None:
                self.evaluations.resumed(now.parts, now.found)
            if now.parts.directory is not None and now.parts.world.is_main:
                self.journal.open(now.parts.directory, step=self.state.step, found=now.found)
                self.journal.follow(now.parts.trackers, now.parts.directory, settings=now.parts.described)
            self.remarks = remarks_of(self.parts, resumed=now.found is not None)
            self.journal.sinks[1:1] = self.remarks  # behind the console
            if self.journal.metrics is not None and now.found is None:
                self._look_at_data()
            make_ready(self.parts)
        except BaseException as problem:
            lost = told_to_others(problem, self.parts)
            self.release()
            if lost is not None:
                raise lost from problem
            raise
        self.first_step = self.state.step
        self.parts.say(narration.header(self.parts, precision_chosen=now.precision_chosen))

    def close(self, problem: BaseException | None) -> None:
        """Save what is not saved yet, or, where `problem` ended the sitting, keep a report of it; then let go of everything."""
        try:
            lost = told_to_others(problem, self.parts)
            if lost is not None:
                raise lost from problem
            if problem is None or isinstance(problem, GeneratorExit):
                try:
                    self._finish()
                except Exception as failed:
                    if (lost := told_to_others(failed, self.parts)) is not None:
                        raise lost from failed
                    reported(failed, self.parts, step=self._step)
                    raise
            elif isinstance(problem, Exception):
                reported(problem, self.parts, step=self._step)
            else:
                left(self.parts, step=self._step)
            if problem is not None and not isinstance(problem, GeneratorExit):
                self._happened(events.failed(problem))
        except BaseException as failed:
            self._happened(events.failed(failed))
            raise
        finally:
            self.release()
            self.heart.closed()
            self._report()
        stopped_too = isinstance(problem, Exception) and crash.of_compiler(problem)  # by the same signal
        if self.wishes.ended_by is not None and (problem is None or stopped_too):
            raise SystemExit(128 + self.wishes.ended_by) from problem

    def release(self) -> None:
        """Give signals, settings and files back."""
        with ExitStack() as last_first:  # each of them, whichever fails
            if self.parts.directory is not None:
                last_first.callback(self.parts.directory.close)
            last_first.callback(self.journal.close)
            if self.parts.saving is not None:
                last_first.callback(self.parts.saving.writer.close)
            last_first.callback(self.settings.close)
            last_first.callback(self.signals.restore)

    def _report(self) -> None:
        """Write the page on the run, once all else is on disk; it never breaks what it tells of."""
        parts = self.parts
        if parts.report and parts.directory is not None and parts.world.is_main:
            report_at_end(parts.directory.path, warn=parts.say)

    def _finish(self) -> None:
        parts, evaluations = self.parts, self.evaluations
        if self.running is not None:
            self.running.close()  # a loop over a variable leaves it open
        self._catch_up()
        self.wishes.settle()
        if evaluations.end_due() and self.wishes.ended_by is None:
            if parts.saving is not None:  # first: scoring may take minutes, in which much can happen
                parts.saving.finish(self.state.step, self._packed, protected=self._best)
            self.whole.clock.enter("evaluating")
            evaluations.score_at_end(stop=self.wishes.told_to_stop)
            self.whole.clock.enter("saving")
        if parts.saving is not None:
            parts.doing("saving")
            parts.saving.finish(self.state.step, self._packed, protected=self._best)
        due = evaluations.due
        went_on = self.state.step > self.first_step or bool(evaluations.scores) or evaluations.at_end is not None
        if went_on and self.state.step >= parts.length.steps and parts.sample is not None and not due:
            evaluations.sample()
        if went_on and parts.finished and not due and self.wishes.ended_by is None:
            self._show()
        if went_on or self.wishes.ended_by is not None:
            self._happened(events.ended(parts, self.wishes))  # first: findings know by it that the run is over
            found = [finding for remarks in self.remarks for finding in remarks.at_end()]
            told_by = self.wishes.told_by
            parts.say(narration.ending(parts, evaluations, skipped=self.skipped, told_by=told_by, found=found))

    def _look_at_data(self) -> None:
        """Record what is seen of the data before the first step."""
        supply, splits = self.parts.supply, self.parts.scoring.splits
        looked = first_look(supply.dataset, {name: split.dataset for name, split in splits.items()}, seed=supply.seed)
        alike = [name for name, split in splits.items() if split.loss]
        self.journal.write({"kind": "data", "step": self.state.step, **looked, "scored_by_training_loss": alike})

    def _happened(self, what: str) -> None:
        """Record what ended the sitting; no checkpoint holds that, and a resume goes on after it."""
        self.journal.write({"kind": "event", "step": self.state.step, "what": what})

    def _show(self) -> None:
        """What is shown of a run that is over, when all of it is safe."""
        if self.parts.panels is not None and self.parts.directory is not None:
            self.whole.clock.enter("evaluating")
            self.evaluations.show(stop=lambda: self.signals.stop is not None)
            self.whole.clock.enter("saving")
        self.evaluations.conclude()

    def _catch_up(self) -> None:
        """Do what was due after the step at which a loop was left by `break`."""
        done = self.state.step
        if done == self.first_step:
            return
        if self.evaluated_step != done and self.evaluate_due(done):
            self._evaluate()
        if self.whole.meter.rows and self.log_due(done):
            self.log()

    # --- the loop and its duties ---------------------------------------------------------------------------------

    def steps(self, *, opened: bool) -> Iterator[Step]:
        """The steps that are left, made or (`opened`) to be made."""
        if self.running is not None:
            self.running.close()
        self._catch_up()
        self.running = self._steps(opened=opened)
        return self.running

    def _steps(self, *, opened: bool) -> Generator[Step]:
        parts = self.parts
        self.whole.kept.refuse_unclaimed()
        if self.evaluations.due:
            self._make_up_for_evaluation()
        if parts.finished:
            if not self.evaluations.scores and not self.evaluations.end_due():
                parts.say(narration.finished(parts))
            return
        if self.state.step >= parts.timetable.stop_step:
            parts.say(
                f"nothing to do: {self.state.step:,} steps are made, and stop_after is {parts.timetable.stop_step:,}"
            )
        self.feed.start(self.state.step, stop=parts.length.steps)
        self.looped_at = time.monotonic()
        self.whole.clock.start()
        parts.doing("training")
        try:
            yield from steps(
                parts.task,
                self.state,
                feed=self._fed,
                record=self._made,
                clock=self._enter,
                duties=self,
                length=parts.length.steps,
                opened=opened,
                watch=self._watch,
            )
        except Exception as problem:
            cause = crash.explained(problem, step=self._step, micro_batches=parts.supply.again(self._step))
            if cause is None:
                raise
            raise cause from problem
        finally:
            self.feed.close()

    def _enter(self, phase: Phase) -> None:
        """Between steps nothing of the user's runs where the run trains by itself."""
        self.whole.clock.enter("training" if self.alone and phase == "user" else phase)

    def _fed(self, step: int) -> Sequence[MicroBatch]:
        self.heart.at(step, "training")
        return self.feed.micro_batches(step)

    def _watch(self, index: int) -> Watch:
        """What looks at a step, where one is due to be looked at when it is made."""
        return self.layers.watch(index) if self.parts.timetable.watch.due(index + 1) else UNWATCHED

    def _made(self, step: Step) -> None:
        """Keep what was measured of a step; of one that was watched that is read at once, so a checkpoint never owes it."""
        self.whole.meter.add(step)
        if isinstance(step.watch, Watched):
            seen = self.layers.read(step.watch, count=step.count)
            if seen is not None:
                self.journal.write(seen)

    def _make_up_for_evaluation(self) -> None:
        """Make the evaluation that was given up for a signal, and save the step with it, so that it is made once."""
        self.evaluations.due = False
        self.whole.clock.start()
        self.whole.clock.enter("evaluating")
        self._evaluate()
        self.whole.clock.enter("waiting")
        if self.parts.saving is not None and not self.evaluations.due:
            self.parts.saving.begun_step = None
            self.parts.saving.finish(self.state.step, self._packed, protected=self._best)

    @property
    def stopping(self) -> bool:
        """True when no further step is to be made; asked once before each step, by all ranks."""
        made = self.parts.out_of_patience or self.state.step >= self.parts.timetable.stop_step
        return made or self.wishes.stopping()

    def evaluate_due(self, done: int) -> bool:
        """When scores are due or a sample is; neither where there is nothing to score or to sample with."""
        return self.evaluations.scores_due(done) or self.evaluations.sample_due(done)

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`; once."""
        return self.logged_step != done and self.parts.timetable.log_due(done)

    def save_due(self, done: int) -> bool:
        """After the last step, every `save_every`, at a new best score, when asked by a signal, and again after a failure."""
        saving = self.parts.saving
        return saving is not None and (done == self.parts.length.steps or self.wishes.save or saving.due(done))

    def evaluate(self, step: Step) -> None:
        """Score every split after a step, record it, and watch the score that decides what is best; show a sample."""
        self._evaluate()
        if self.evaluations.scores_due(step.index + 1):
            step.scores = self.evaluations.scores

    def log(self) -> None:
        """Wait for the device, write the record of the steps since the last one, and end a run that has diverged."""
        self.logged_step = self.state.step
        self.whole.meter.collect(self.parts.world)
        window = self.whole.meter.read()
        times = self.whole.clock.window()
        values: dict[str, Any] = dict(window.values)
        trained_s = times["training_s"] + times["waiting_s"]
        if "targets" in values and trained_s > 0:
            values["targets_per_s"] = values["targets"] / trained_s
        first = next(iter(self.state.trained.values())).optimizer.param_groups[0]
        values["learning_rate"] = first["lr"]
        step_s = (time.monotonic() - self.looped_at) / max(self.state.step - self.first_step, 1)
        values["left_s"] = step_s * (self.parts.length.steps - self.state.step)
        values |= used_bytes(self.parts.device)
        self.journal.write({"kind": "train", "step": self.state.step, **values, **times})
        self.skipped += len(window.skipped)
        self.whole.bad_steps.saw(window.skipped, done=self.state.step)
        if self.parts.world.size > 1:
            self.comparison.made(self.state.models, done=self.state.step, last=self.parts.length.steps)
        if divergence.latched(self.state, self.parts.task.max_bad_steps):
            raise divergence.ended(self.parts, self._packed, protected=self._best)

    def ask_to_save(self) -> None:
        """Have a checkpoint written when the step that is being made, or its body, is over."""
        if self.parts.saving is None:
            raise ConfigError("this run has no directory to save to: give Run(out=...)")
        self.wishes.asked_to_save = True

    def save(self) -> None:
        """Copy the state and write it as a checkpoint in the background."""
        assert self.parts.saving is not None  # save_due says so
        self.wishes.saved()
        self.parts.saving.save(self._packed, protected=self._best)

    def _evaluate(self) -> None:
        done = self.evaluated_step = self.state.step
        if self.alone and self.whole.meter.rows and self.log_due(done):
            self.whole.clock.enter("training")  # the device may still be busy with it
            self.log()  # nothing can be added to it: the loss stands before the scores
            self.whole.clock.enter("evaluating")
        if self.evaluations.scores_due(done):
            self.evaluations.score(stop=self.wishes.told_to_stop if self.alone else lambda: False)
        if self.evaluations.sample_due(done) and not self.evaluations.due:
            self.evaluations.sample()

    @property
    def _step(self) -> int:
        """The step that was last begun, whether its end was reached or not."""
        return self.state.step if self.feed.latest is None else self.feed.latest

    @property
    def _best(self) -> tuple[int, ...]:
        watch = self.whole.watch
        return () if watch is None or watch.step is None else (watch.step,)

    def _packed(self) -> Contents:
        owed = self.evaluations
        self.whole.meter.collect(self.parts.world)
        contents = self.parts.packed(evaluation_due=owed.due, ended=owed.ended, first_scores=owed.first)
        return replace(contents, log=self.journal.state())
