"""What a run does between two steps, where it is due: it logs, scores, saves, and reads what was seen of a step.

The loop asks (`surefoot.train.loop.Duties`); only here may a run wait for the device.
"""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from surefoot.checkpoint.format import Checkpoint
from surefoot.distributed.consistency import compare_when_due
from surefoot.errors import ConfigError
from surefoot.mean import Mean
from surefoot.memory import used_bytes
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.run.stop_requests import Wishes
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import Record
from surefoot.tracking.run_reader import read_records
from surefoot.train.layer_stats import Layers, Watched
from surefoot.train.loop import State, Step
from surefoot.train.meter import derived
from surefoot.train.step_watch import UNWATCHED, Watch
from surefoot.train.timer import Event, RemainingTime

if TYPE_CHECKING:
    from surefoot.train.state_check import StateCheck


class BetweenSteps:
    """The duties of one sitting. `alone`: no code of the user's runs between its steps."""

    def __init__(self, parts: RunComponents, wishes: Wishes) -> None:
        self.parts, self.whole, self.state, self.wishes = parts, parts.whole, parts.state, wishes
        self.journal = Journal(parts.console)
        self.evaluations = Evaluations(parts, self.journal)
        self.alone = False
        self.state_check: StateCheck | None = None
        self.first_step = 0  # of the sitting
        self.later_step = 0  # the first that is no more "starting"
        self.skipped = 0  # steps, as far as the records tell
        self.logged_step = 0
        self.evaluated_step = 0  # the last one after which scores or a sample were due
        self.remaining = RemainingTime()
        self.epochs = 0  # that are over
        self.epoch_loss, self.epoch_s = Mean(0.0, 0), 0.0  # since the end of the last one
        self.changes: set[str] = set()  # of what is trained, as they were said

    def opened(self, state_check: "StateCheck | None") -> None:
        self.state_check, self.first_step = state_check, self.state.step
        self.compared: int | None = None  # the step after which ranks compared their weights last
        self.layers, self.flags = self._layers(), self.state.trainable.flags
        self.epochs = self.parts.timetable.epoch.count(0, self.state.step)

    def started(self) -> None:
        self.later_step = self.state.step + (1 if self.state_check is None else self.state_check.steps)
        self.whole.clock.first_steps += range(self.state.step, self.later_step)
        if self.parts.console is not None:
            self.parts.console.started(self.whole.clock.all_s())

    # --- asked by the loop ---------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True when no further step is to be made; asked once before each step, by all ranks."""
        is_over = self.parts.out_of_patience or self.state.step >= self.parts.timetable.stop_step
        trainable = self.state.trainable
        trainable.follow()
        if is_over or self.wishes.stopping(trainable=trainable.fingerprint):
            return True
        if trainable.flags is not self.flags and trainable.flags != self.flags:
            self._follow_trainable()
        return False

    def evaluate_due(self, done: int) -> bool:
        return self.evaluations.scores_due(done) or self.evaluations.sample_due(done)

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`; once."""
        return self.logged_step != done and self.parts.timetable.log_due(done)

    def save_due(self, done: int) -> bool:
        """After the last step, every `save_every`, at a new best score, when asked by a signal, and again after a failure."""
        saving = self.parts.saving
        return saving is not None and (done == self.parts.length.steps or self.wishes.save or saving.due(done))

    def evaluate(self, step: Step) -> None:
        self._evaluate()
        if self.evaluations.scores_due(step.index + 1):
            step.metrics = self.evaluations.scores

    def log(self) -> None:
        """Wait for the device, write the record of the steps since the last one, and end a run that has diverged."""
        self.logged_step = self.state.step
        self.whole.meter.collect(self.parts.world)
        first_steps = self.whole.clock.first_steps
        later_steps = sum(index not in first_steps for index, *_ in self.whole.meter.rows)
        values, skipped = self.whole.meter.read(first_steps=first_steps)
        values |= derived(self.parts.settings.derived, values)
        times = self.whole.clock.window()
        trained_s = times["training_s"] + times["data_wait_s"]
        # first steps are not in those seconds
        counted = values.get("targets", 0.0) - values.get("starting_targets", 0.0)
        if counted > 0 and trained_s > 0:
            values["targets_per_s"] = counted / trained_s
        values["lr"] = next(iter(self.state.optimizers.values())).optimizer.param_groups[0]["lr"]
        self.remaining.add_steps(later_steps, training_s=trained_s, user_s=times["user_s"])
        if (eta_s := self._eta_s()) is not None:
            values["eta_s"] = eta_s
        values |= used_bytes(self.parts.device)
        self.journal.write({"kind": "train", "step": self.state.step, **values, **times})
        self._show_epoch(values, times)
        self.skipped += len(skipped)
        self.whole.meter.saw(skipped, done=self.state.step)
        if self.parts.world.size > 1:
            self.compared = compare_when_due(
                self.state.models,
                self.parts.world,
                self.parts.timetable.every["check_ranks_every"],
                compared=self.compared,
                done=self.state.step,
                last=self.parts.length.steps,
            )
        if latched(self.state, self.parts.settings.max_bad_steps):
            from surefoot.run.divergence import ended

            raise ended(self.parts, self._packed, protected=self._best)

    def save(self) -> None:
        assert self.parts.saving is not None  # save_due says so
        self._keep_directory()
        self.wishes.saved()
        with self._timed("save"):
            self.parts.saving.save(self._packed, protected=self._best)

    def watch(self, index: int) -> Watch:
        due = self.parts.timetable.every["layer_stats_every"].due(index + 1)
        watch: Watch = Watched(index, self.layers) if due else UNWATCHED
        if self.state_check is not None and index < self.state_check.steps:
            self.state_check.inner, watch = watch, self.state_check
        return watch

    def made(self, step: Step) -> None:
        """Keep what was measured of a step; of one that was watched that is read at once, so a checkpoint never owes it."""
        if self.state_check is not None and step.index < self.state_check.steps:
            self.state_check.check_step(step)
        self.whole.meter.add(step)
        if (
            isinstance(step.watch, Watched)
            and (seen := self.layers.read(step.watch, count=step.target_count)) is not None
        ):
            self.journal.write(seen)

    # --- asked by whoever holds the sitting ----------------------------------------------------------------------

    def catch_up(self) -> None:
        """Do what was due after the step at which a loop was left by `break`."""
        done = self.state.step
        if done == self.first_step:
            return
        if self.evaluated_step != done and self.evaluate_due(done):
            self._evaluate()
        if self.whole.meter.rows and self.log_due(done):
            self.log()

    def make_up_for_evaluation(self) -> None:
        """Make the evaluation that was given up for a signal, and save the step with it, so that it is made once."""
        self.evaluations.due = False
        self.whole.clock.start()
        self.whole.clock.enter("evaluating")
        self._evaluate()
        self.whole.clock.enter("data_wait")
        if self.parts.saving is not None and not self.evaluations.due:
            self.parts.saving.begun_step = None
            self.save_last()

    def evaluate_at_start(self) -> None:
        """Evaluate before the first step, unless the records of a session that was ended then hold it already. Collective."""
        parts, world = self.parts, self.parts.world
        is_due = False
        if world.is_main:
            before = () if parts.directory is None else read_records(parts.directory.path)
            is_due = all(record["kind"] != "eval" for record in before)
        if not world.from_main(is_due) or not parts.scoring.names(at_end=False):
            return
        self.whole.clock.start()
        self.whole.clock.enter("evaluating")
        with self._timed("evaluation"):
            self.evaluations.score_at_start(stop=self._evaluation_stop)
        self.whole.clock.enter("data_wait")

    def save_last(self) -> None:
        if self.parts.saving is not None:
            self._keep_directory()
            self.parts.saving.finish(self.state.step, self._packed, protected=self._best)

    def _keep_directory(self) -> None:
        """Make the run's directory again if it was deleted while the run trained, and say so; rank 0 looks."""
        directory, saving = self.parts.directory, self.parts.saving
        if directory is None or saving is None or not self.parts.world.is_main:
            return
        try:
            directory.refuse_links()
            deleted = [directory.make_again(), self.journal.make_again(directory), saving.lost()]
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            return  # the save that follows fails of the same, and says so
        if any(deleted):
            saving.asked = True
            self.parts.say(
                f"WARNING: {directory.path}, or a part of it, was deleted while the run trained\n"
                "  it is made again and the run is saved whole; whatever else was deleted with it is lost"
            )

    def _evaluate(self) -> None:
        done = self.state.step
        if self.alone and self.whole.meter.rows and self.log_due(done):
            self.whole.clock.enter("training")  # the device may still be busy with it
            self.log()  # nothing can be added to it: the loss stands before the scores
            self.whole.clock.enter("evaluating")
        self.evaluated_step = done
        if self.evaluations.scores_due(done):
            with self._timed("evaluation"):
                self.evaluations.score(stop=self._evaluation_stop)
        if self.evaluations.sample_due(done) and not self.evaluations.due:
            with self._timed("sample"):
                self.evaluations.sample()

    def _evaluation_stop(self) -> bool:
        """Whether an evaluation is to be given up; never if code of the user's waits for its numbers."""
        return self.alone and self.wishes.told_to_stop()

    def _show_epoch(self, values: Record, times: Mapping[str, float]) -> None:
        """Show the epoch that ended since the last record: the mean loss of its steps, and their time in this session."""
        step, epoch = self.state.step, self.parts.timetable.epoch
        targets = values.get("targets", 0.0)
        self.epoch_loss += Mean(values.get("loss_applied", values.get("loss", 0.0)) * targets, targets)
        self.epoch_s += times["starting_s"] + times["training_s"] + times["data_wait_s"] + times["user_s"]
        if epoch.count(0, step) == self.epochs:
            return
        self.epochs = epoch.count(0, step)
        record: Record = {"kind": "epoch", "step": step, "epoch": self.epochs, "epoch_s": self.epoch_s}
        record |= {"epochs": epoch.count(0, self.parts.length.steps), "loss": self.epoch_loss.value}
        record["is_evaluated"] = self.evaluated_step != step and self.evaluations.scores_due(step)  # right after this
        self.epoch_loss, self.epoch_s = Mean(0.0, 0), 0.0
        if self.parts.console is not None:
            self.parts.console.write(record)

    @contextmanager
    def _timed(self, event: Event) -> Iterator[None]:
        """Time an evaluation, a sample or a save, for the time that is left; not one that was given up."""
        begun = self.whole.clock.now()
        yield
        if not self.evaluations.due:
            steps = self._evaluation_steps[0] if event == "evaluation" else 1.0
            self.remaining.add_event(event, self.whole.clock.now() - begun, steps=steps)

    @cached_property
    def _evaluation_steps(self) -> tuple[float, float]:
        """About how many steps' time an evaluation takes, and the one at the end alone; a forward pass is a third of a step."""
        samples_per_step = self.parts.supply.plan.samples * self.parts.length.epochs / self.parts.length.steps
        scoring = self.parts.scoring
        during, at_end = (scoring.training_samples(scoring.names(at_end=at_end)) for at_end in (False, True))
        return during / (3 * samples_per_step), at_end / (3 * samples_per_step)

    def _eta_s(self) -> float | None:
        """Seconds until the run's last step is made, evaluated and saved, with the samples and the evaluation at the end."""
        done, last, every = self.state.step, self.parts.length.steps, self.parts.timetable.every
        evaluated = done - (self.evaluated_step != done)  # what is due after this step comes after its record
        evaluations = every["evaluate_every"].count(evaluated, last) + (not every["evaluate_every"].due(last))
        saves = every["save_every"].count(done - 1, last) + (not every["save_every"].due(last))
        samples = every["sample_every"].count(evaluated, last - 1) + 1
        during, at_end = self._evaluation_steps
        return self.remaining.seconds(
            steps=last - done,
            evaluations=evaluations * during * (evaluated < last) + at_end,
            samples=samples * (self.parts.settings.sample_fn is not None),
            saves=saves * (self.parts.saving is not None),
            save_every_s=every["save_every"].seconds,
        )

    def _follow_trainable(self) -> None:
        """Go on with what was frozen or unfrozen since the last step: agree on it, have it watched, and say it. Collective."""
        parts, trainable = self.parts, self.state.trainable
        changes, self.flags = trainable.changes(self.flags), trainable.flags
        if not self.wishes.alike():
            raise ConfigError(
                f"after step {self.state.step} rank {parts.world.rank} and others train different parameters; here: {changes[0]}\n"
                "  gradients are added up over all ranks, which would wait for each other for ever\n"
                "  freeze and unfreeze by step.index, the same on every rank"
            )
        if parts.world.size > 1:
            if parts.task.loss is not None:
                from surefoot.train.parallel_check import check_first_pass

                check_first_pass(
                    self.state.models,
                    parts.task.loss,
                    parts.supply.first(self.state.step),
                    precision=self.whole.precision,
                    world=parts.world,
                    allow_unused=parts.parallel.find_unused_parameters,
                )
            parts.task.ranks.follow_trainable()
            parts.make_ready()
        self.layers = self._layers()
        for change in changes:
            if change not in self.changes:  # of what alternates each is said once
                parts.say(f"after step {self.state.step:,}: {change}")
        self.changes.update(changes)

    def _layers(self) -> Layers:
        return Layers(
            self.state.models,
            {name: trained.parameters for name, trained in self.state.optimizers.items()},
            world=self.parts.world,
            local_times=self.parts.task.ranks.local_times,
            compiled=self.parts.compiled,
            seen=self.whole.seen,
        )

    @property
    def _best(self) -> tuple[int, ...]:
        watch = self.whole.watch
        return () if watch is None or watch.step is None else (watch.step,)

    def _packed(self) -> Checkpoint:
        owed = self.evaluations
        self.whole.meter.collect(self.parts.world)
        self.state.trainable.follow()  # scores after the last step may have frozen something
        contents = self.parts.packed(evaluation_due=owed.due, ended=owed.ended, first_scores=owed.first)
        return replace(contents, log=self.journal.state())


def latched(state: State, most: int) -> bool:
    """Whether some optimizer has skipped more than `most` steps in a row; waits for the device."""
    return any(trained.bad_in_a_row.item() > most for trained in state.optimizers.values())
