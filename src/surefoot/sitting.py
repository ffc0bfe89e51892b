"""One sitting of a run: from opening its directory to closing it, with what the loop finds due in between.

A run that is never interrupted has one; each resume adds another. What lives only as long (the loader, the files of records,
signal handlers, torch's settings) lives here.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot import crash, divergence, narration, snapshot
from surefoot.agreement import Agreement
from surefoot.alike import refuse_unequal
from surefoot.checkpoint.format import Contents
from surefoot.checkpoint.initial import load_initial_weights
from surefoot.clock import Deadline
from surefoot.directory import RunDirectory, environment
from surefoot.errors import CheckpointError, ConfigError, DivergedError, RankLostError, SurefootError
from surefoot.evaluations import Evaluations
from surefoot.journal import Journal
from surefoot.loop import Step, steps
from surefoot.micro_batch import MicroBatch
from surefoot.pace import make_ready, settle_precision
from surefoot.parts import Parts
from surefoot.replicas import refuse_different
from surefoot.saving import Saving
from surefoot.signals import Signals, to_terminal


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
        self.precision_chosen: str | None = None  # why, where it was measured in this sitting
        self.agreement = Agreement(parts.world, names=("signal", "stop", "save"))
        self.ended_by: int | None = None  # a signal, on whichever rank
        self.save_told = self.save_agreed = self.stop_agreed = False
        self.asked_to_stop = False
        self.asked_to_save = False
        self.skipped = 0  # steps, as far as the records tell
        self.running: Generator[Step] | None = None
        self.alone = False  # no code of the user's runs between steps
        self.logged_step = 0
        self.compared_step: int | None = None  # after which the weights of ranks were compared
        self.evaluated_step = 0  # the last one after which scores or a sample were due
        self.deadline = None if parts.timetable.limit_s is None else Deadline(parts.timetable.limit_s)

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
            self.settings.enter_context(self.parts.numerics())
            if self.parts.directory is not None and self.parts.saving is not None:
                self._open_directory(self.parts.directory, self.parts.saving)
            else:
                self._initialise()
            make_ready(self.parts)
        except BaseException as problem:
            lost = self._told_to_others(problem)
            self.release()
            if lost is not None:
                raise lost from problem
            raise
        self.first_step = self.state.step
        self.parts.say(narration.header(self.parts, precision_chosen=self.precision_chosen))

    def close(self, problem: BaseException | None) -> None:
        """Save what is not saved yet, or, where `problem` ended the sitting, keep a report of it; then let go of everything."""
        try:
            lost = self._told_to_others(problem)
            if lost is not None:
                raise lost from problem
            if problem is None or isinstance(problem, GeneratorExit):
                try:
                    self._finish()
                except Exception as failed:
                    if (lost := self._told_to_others(failed)) is not None:
                        raise lost from failed
                    if self.parts.directory is not None:
                        self._report(failed, self.parts.directory)
                    raise
            elif isinstance(problem, Exception) and self.parts.directory is not None:
                self._report(problem, self.parts.directory)
            elif not isinstance(problem, Exception):  # sys.exit() in the body
                self._wait_for_writer()
                if self.parts.saved_step != self.state.step:
                    self.parts.say(f"left in step {self._step}, which is not saved\n{narration.standing(self.parts)}")
        finally:
            self.release()
            self.heart.closed()
        stopped_too = isinstance(problem, Exception) and crash.of_compiler(problem)  # by the same signal
        ended_by = self.signals.stop if self.parts.world.size == 1 else self.ended_by
        if ended_by is not None and (problem is None or stopped_too):
            raise SystemExit(128 + ended_by) from problem

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

    def _told_to_others(self, problem: BaseException | None) -> RankLostError | None:
        """Tell the other ranks that this one begins no further step; which of them was lost, where that is what ended it."""
        if not isinstance(problem, Exception):
            self.heart.goodbye()
            return None
        lost = self.heart.cause(problem)
        if lost is None and isinstance(problem, DivergedError):
            self.heart.goodbye()  # as all of them do
        elif lost is None:
            self.heart.failed(problem)
        return lost

    def _open_directory(self, directory: RunDirectory, saving: Saving) -> None:
        main = self.parts.world.is_main
        if main:
            directory.open()
        found = saving.newest()
        if found is None:
            self._initialise()
            if main:
                directory.write_text("config.toml", self.configuration or narration.script_toml(self.parts.described))
                for name, text in self.parts.files.items():
                    directory.write_text(name, text)
            saving.finish(0, self._packed)
        else:
            self._resume(found)
            saving.resumed(found.step)
            if main and self.configuration is not None:
                directory.write_text("config.toml", self.configuration)
        if self.parts.rank_log is not None:
            self.parts.rank_log.open(directory.path / "logs" / f"rank-{self.parts.world.rank}.log")
        if not main:
            return
        now = self.parts.machine()
        data = self.parts.described["data"]
        directory.add_sitting({"step": self.state.step, "machine": now, **environment(), "data": data})
        self.journal.open(directory, step=self.state.step, found=found)

    def _initialise(self) -> None:
        self.precision_chosen = settle_precision(self.parts)
        if self.parts.init is None or self.state.step > 0:
            return
        self.parts.say(load_initial_weights(self.state.models, Path(self.parts.init), world=self.parts.world))
        for name, average in self.state.averages.items():
            average.restart(self.state.models[name])

    def _resume(self, found: Contents) -> None:
        self.parts = parts = self.parts.going_on_from(found)
        for line in parts.notes(found):
            parts.say(f"note: {line}")
        where, main = f"step-{found.step:08d}", parts.world.is_main
        snapshot.restore(self.whole, found, where=where, main=main)
        parts.refuse_another_architecture(found)
        self.evaluations.resumed(parts, found)

    def _finish(self) -> None:
        parts, evaluations = self.parts, self.evaluations
        if self.running is not None:
            self.running.close()  # a loop over a variable leaves it open
        self._catch_up()
        self._take_notice(self.agreement.now(signal=self.signals.stop or 0))
        if evaluations.end_due() and self.ended_by is None:
            if parts.saving is not None:  # first: scoring may take minutes, in which much can happen
                parts.saving.finish(self.state.step, self._packed, protected=self._best)
            self.whole.clock.enter("evaluating")
            evaluations.score_at_end(stop=self._told_to_stop)
            self.whole.clock.enter("saving")
        if parts.saving is not None:
            parts.doing("saving")
            parts.saving.finish(self.state.step, self._packed, protected=self._best)
        due = evaluations.due
        went_on = self.state.step > self.first_step or bool(evaluations.scores) or evaluations.at_end is not None
        if went_on and self.state.step >= parts.length.steps and parts.sample is not None and not due:
            evaluations.sample()
        if went_on or self.ended_by is not None:
            parts.say(narration.ending(parts, evaluations, skipped=self.skipped))

    def _catch_up(self) -> None:
        """Do what was due after the step at which a loop was left by `break`."""
        done = self.state.step
        if done == self.first_step:
            return
        if self.evaluated_step != done and self.evaluate_due(done):
            self._evaluate()
        if self.whole.meter.rows and self.log_due(done):
            self.log()

    def _wait_for_writer(self) -> None:
        if self.parts.saving is not None:
            self.parts.saving.writer.wait()
            self.parts.saving.say_failure()

    def _report(self, problem: Exception, directory: RunDirectory) -> None:
        self._wait_for_writer()
        try:
            crash.write_report(
                problem,
                step=self._step,
                micro_batches=self.parts.supply.again(self._step),
                how_to_go_on=narration.standing(self.parts),
                directory=directory,
                rank=self.parts.world.rank,
            )
            if not isinstance(problem, SurefootError):  # which says by itself what stands
                self.parts.say(f"\n{narration.standing(self.parts)}\n  what happened is in {directory.path / 'crash'}")
        except (OSError, CheckpointError) as another:  # the error that ended the run must not be hidden by this one
            self.parts.say(f"warning: {another}")

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
                record=self.whole.meter.add,
                clock=self.whole.clock.enter,
                duties=self,
                length=parts.length.steps,
                opened=opened,
            )
        except Exception as problem:
            cause = crash.explained(problem, step=self._step, micro_batches=parts.supply.again(self._step))
            if cause is None:
                raise
            raise cause from problem
        finally:
            self.feed.close()

    def _fed(self, step: int) -> Sequence[MicroBatch]:
        self.heart.at(step, "training")
        return self.feed.micro_batches(step)

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
        told_to = self.ended_by is not None or self.stop_agreed
        if told_to or self.parts.out_of_patience or self.state.step >= self.parts.timetable.stop_step:
            return True
        saving = self.parts.saving
        saving_s = 0.0 if saving is None else saving.longest_s
        near = self.deadline is not None and self.deadline.near(keep_free_s=2 * saving_s + 1)
        asked = self.asked_to_stop or near
        if self.parts.world.size == 1:
            return asked or self.signals.stop is not None
        tells = self._save_wanted and not self.save_told
        self.save_told |= tells  # once: until it is done the wish stands
        self._take_notice(self.agreement.exchange(signal=self.signals.stop or 0, stop=int(asked), save=int(tells)))
        return self.ended_by is not None or self.stop_agreed

    def evaluate_due(self, done: int) -> bool:
        """When scores are due or a sample is; neither where there is nothing to score or to sample with."""
        return self.evaluations.scores_due(done) or self.evaluations.sample_due(done)

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`; once."""
        return self.logged_step != done and self.parts.timetable.log_due(done)

    def save_due(self, done: int) -> bool:
        """After the last step, every `save_every`, at a new best score, when asked by a signal, and again after a failure."""
        saving = self.parts.saving
        asked = self._save_wanted if self.parts.world.size == 1 else self.save_agreed
        return saving is not None and (done == self.parts.length.steps or asked or saving.due(done))

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
        self.journal.write({"kind": "train", "step": self.state.step, **values, **times})
        self.skipped += len(window.skipped)
        self.whole.bad_steps.saw(window.skipped, done=self.state.step)
        self._compare_ranks()
        if divergence.latched(self.state, self.parts.task.max_bad_steps):
            raise divergence.ended(self.parts, self._packed, protected=self._best)

    def _compare_ranks(self) -> None:
        """Where several ranks hold the same weights: now and then, at a record, and at the first and the last one."""
        done, world = self.state.step, self.parts.world
        every = self.parts.timetable.compare
        due = self.compared_step is None or done == self.parts.length.steps
        if world.size > 1 and (due or any(every.due(step) for step in range((self.compared_step or 0) + 1, done + 1))):
            self.compared_step = done
            refuse_different(self.state.models, world, step=done)

    def ask_to_save(self) -> None:
        """Have a checkpoint written when the step that is being made, or its body, is over."""
        if self.parts.saving is None:
            raise ConfigError("this run has no directory to save to: give Run(out=...)")
        self.asked_to_save = True

    def save(self) -> None:
        """Copy the state and write it as a checkpoint in the background."""
        assert self.parts.saving is not None  # save_due says so
        self.signals.save = self.asked_to_save = self.save_told = self.save_agreed = False
        self.parts.saving.save(self._packed, protected=self._best)

    def _evaluate(self) -> None:
        done = self.evaluated_step = self.state.step
        if self.alone and self.whole.meter.rows and self.log_due(done):
            self.whole.clock.enter("training")  # the device may still be busy with it
            self.log()  # nothing can be added to it: the loss stands before the scores
            self.whole.clock.enter("evaluating")
        if self.evaluations.scores_due(done):
            self.evaluations.score(stop=self._told_to_stop if self.alone else lambda: False)
        if self.evaluations.sample_due(done) and not self.evaluations.due:
            self.evaluations.sample()

    def _told_to_stop(self) -> bool:
        """Whether a signal has come, on any rank; asked by all of them."""
        self._take_notice(self.agreement.exchange(signal=self.signals.stop or 0))
        return self.ended_by is not None

    def _take_notice(self, agreed: Mapping[str, int]) -> None:
        self.ended_by = self.ended_by or agreed["signal"] or None
        self.stop_agreed = self.stop_agreed or bool(agreed["stop"])
        self.save_agreed = self.save_agreed or bool(agreed["save"])

    @property
    def _save_wanted(self) -> bool:
        """Whether this rank would save after this step: for a signal, the user's code, the clock."""
        saving = self.parts.saving
        return saving is not None and (self.signals.save or self.asked_to_save or saving.wanted())

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
