"""The work of a run between two steps, which the training loop calls. Only this work may
synchronize the device.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.config.behavior import BUFFERS_IN_ORDER
from surefoot.data.order import samples_of
from surefoot.errors import ConfigError
from surefoot.memory import used_bytes
from surefoot.run.body_rates import BodyRates, own_schedule
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.run.progress import Progress
from surefoot.run.stop_requests import StopRequests
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import is_rate
from surefoot.train.loop import State, Step
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES
from surefoot.train.meter import derived
from surefoot.train.patience import training_scores
from surefoot.train.state_dict import Bases
from surefoot.train.step_watch import UNWATCHED, NamedCalls, Watch
from surefoot.train.weight_check import WeightCheck

if TYPE_CHECKING:
    from surefoot.run.rank_checks import RankChecks
    from surefoot.tracking.shown import ShownKind
    from surefoot.train.layer_stats import Layers, Watched
    from surefoot.train.state_check import StateCheck

_JUDGED_STEPS = 10  # after which a run with nothing to train ends


class SessionNotes:
    """Lines that a session prints once, by their subject."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.subjects: set[str] = set()

    def say_once(self, subject: str, text: str) -> None:
        if subject not in self.subjects:
            self.subjects.add(subject)
            self.say(text)


class Periodic:
    """The periodic duties of one session. `alone` means that no user code runs between steps."""

    rank_checks: "RankChecks | None"

    def __init__(
        self,
        parts: RunComponents,
        stop_requests: StopRequests,
        journal: Journal,
        evaluations: Evaluations,
        *,
        state_check: "StateCheck | None",
    ) -> None:
        self.parts = parts
        self.run_state = parts.run_state
        self.meter = parts.run_state.meter
        self.clock = parts.run_state.clock
        self.state = parts.state
        self.times = parts.plan.times
        self.stop_requests = stop_requests
        self.journal = journal
        self.evaluations = evaluations
        self.state_check = state_check
        self.rank_checks = None
        if parts.world.size > 1:
            from surefoot.run.rank_checks import RankChecks

            self.rank_checks = RankChecks(
                self.state.models,
                parts.world,
                self.times,
                micro_batches=[len(own) for own in parts.pipeline.shares],
                journal=journal,
                say=parts.say,
            )
        self.alone = False
        self.user_updates = False  # the user's loop calls `forward_backward` and `update`
        self._layers: Layers | None = None
        self.watched: Watched | None = None  # of a step whose layers are recorded
        self.first_step = self.state.step  # of this session
        self.skipped = 0  # skipped steps in the records
        self.logged_step = 0  # of the last record
        self.evaluated_step = 0  # of the last due evaluation or sample
        saves = parts.checkpointing is not None
        self.progress = Progress(
            parts.run_state,
            self.times,
            evaluations,
            parts.evaluator,
            samples_per_epoch=parts.pipeline.plan.samples,
            draws_samples=parts.settings.sample_fn is not None,
            saves=saves,
            say=parts.say,
        )
        checks_schedulers = saves and parts.settings.check_state
        self.body_rates = BodyRates(
            self.state,
            parts.world,
            own_schedule=own_schedule(parts.plan.schedule, parts.run_state.feedback),
            registered=parts.run_state.user_state.objects if checks_schedulers else None,
            say=parts.say,
        )
        self.flags = self.state.trainable.flags
        self.notes = SessionNotes(parts.say)
        self.has_updated = False  # an update was seen in this session
        self.steps_without_update = 0  # of this session, up to the first update
        rows = self.meter.rows
        has_earlier_record = self.first_step > 0 and not (rows and rows[0][0] == 0)
        self.has_trained = has_earlier_record  # a record has samples that were not left out

    # --- called by the training loop --------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True if no further step follows. All ranks read this property once before each step."""
        self.parts.world.heartbeat.enter("step")  # the body has ended
        is_over = self.parts.out_of_patience or self.state.step >= self.times.stop_step
        trainable = self.state.trainable
        trainable.follow()
        has_written = self.body_rates.follow(has_body=not self.alone)
        trained = trainable.fingerprint ^ self.body_rates.fingerprint
        if is_over or self.stop_requests.stopping(step=self.state.step, trainable=trained):
            return True
        if has_written and not self.stop_requests.same_on_all_ranks():
            self.body_rates.refuse_other_ranks()
        if self.stop_requests.save_agreed:
            self.clock.enter("saving")
            self.save()
        if trainable.flags is not self.flags and trainable.flags != self.flags:
            self._follow_trainable()
        return False

    def evaluate_due(self, done: int) -> bool:
        return self.evaluations.scores_due(done) or self.evaluations.sample_due(done)

    def log_due(self, done: int) -> bool:
        """Return True every `log_every`, after an epoch that is not shorter and after the last
        step, but only once per step.
        """
        return self.logged_step != done and (
            done >= self.progress.epoch_recorded_at or self.times.log_due(done)
        )

    def save_due(self, done: int) -> bool:
        """Return True after the last step, every `save_every`, at a new best score, on a signal, or
        after a failed save.
        """
        saving = self.parts.checkpointing
        return saving is not None and (
            done == self.parts.length.steps or self.stop_requests.save or saving.due(done)
        )

    def metrics_after(self, done: int) -> dict[str, float]:
        """Return the metrics of the evaluation after `done` steps, or nothing without one."""
        scored_step, metrics = self.evaluations.latest
        return metrics if scored_step == done else {}

    def evaluate(self, step: Step) -> None:
        self._evaluate()
        step.metrics = self.metrics_after(step.index + 1)

    def log(self) -> None:
        """Synchronize the device, and write the record of training and of an epoch, if due. Raises
        `DivergedError` after too many consecutive skipped steps.
        """
        done = self.logged_step = self.state.step
        self.parts.world.read_announced()
        with self._call("writing the record"):
            self.meter.collect(self.parts.world)
        is_recorded = done >= self.progress.epoch_recorded_at
        epoch = self.progress.epoch_record() if is_recorded else None
        if self.times.log_due(done):
            self._log_training()
        if epoch is not None:
            self.journal.write(epoch)
        if self.evaluated_step == done or not self.evaluations.scores_due(done):
            self._show_step()

    def _log_training(self) -> None:
        self._tell_of_no_update()
        first_steps = self.clock.first_steps
        steps, plan = [index for index, *_ in self.meter.rows], self.parts.pipeline.plan
        later = [index for index in steps if index not in first_steps] if first_steps else steps
        values, skipped = self.meter.read(first_steps=first_steps)
        _refuse_scores(values, self.parts.evaluator.splits)
        values |= derived(self.parts.settings.derived, values)
        times = self.clock.window()
        self.clock.first_steps = [index for index in first_steps if index >= self.state.step]
        trained_s = times["training_s"] + times["data_wait_s"]
        counted = values.get("targets", 0.0) - values.get(
            "starting_targets", 0.0
        )  # during `trained_s`
        values["samples"] = samples_of(plan, steps)
        if counted > 0 and trained_s > 0:
            values |= {
                "targets_per_s": counted / trained_s,
                "samples_per_s": samples_of(plan, later) / trained_s,
            }
        if later:
            values.setdefault("ms_per_step", 1000 * trained_s / len(later))
        values |= {"frozen_tensors": count} if (count := self.flags.count(False)) else {}
        # the body may have logged values of such names, which stay
        if logged_rates := [name for name in values if is_rate(name)]:
            values["logged_rates"] = logged_rates
        for name, rate in self.parts.recorded_rates().items():
            values.setdefault(name, rate)
        values |= self.body_rates.factors()
        self.progress.remaining.add_steps(len(later), training_s=trained_s, user_s=times["user_s"])
        values |= self.progress.eta(evaluated_step=self.evaluated_step) | used_bytes(
            self.parts.device
        )
        self.journal.write({"kind": "train", "step": self.state.step, **values, **times})
        self._tell_of_skipped(values)
        self._watch_training(values)
        self.skipped += len(skipped)
        self.meter.note_skipped(skipped, done=self.state.step)
        if self.rank_checks is not None:
            self.rank_checks.check(self.state.step)
        if latched(self.state, self.parts.settings.max_bad_steps):
            from surefoot.run.divergence import diverged

            raise diverged(self.parts, self._packed, protected=self._best)

    def _tell_of_no_update(self) -> None:
        """Say once in a session that the body of a loop over `run.steps()` has updated nothing."""
        if self.has_updated:
            return
        norms = [grad_norm for _, _, _, grad_norm, _, _ in self.meter.rows]
        if any(norm is not None for norm in norms):
            self.has_updated = True
            return
        self.steps_without_update += len(norms)
        if self.steps_without_update >= min(_JUDGED_STEPS, self.parts.length.steps):
            self.notes.say_once(
                "no-update",
                f"note: none of {self.steps_without_update:,} steps has called"
                " forward_backward(step) and update(step), so no weight has changed;"
                " `for step in run:` calls both",
            )

    def _tell_of_skipped(self, values: dict[str, Any]) -> None:
        """Say once in a session that samples were left out. Raises `ConfigError` if none of the
        first steps of a run had others.
        """
        skipped = values.get(SKIPPED_SAMPLES, 0.0)
        self.has_trained |= skipped < values["samples"]
        if not skipped:
            return
        step = self.state.step
        if not self.has_trained and step >= min(_JUDGED_STEPS, self.parts.length.steps):
            raise ConfigError(
                "every-sample-left-out",
                problem=f"the loss or collate_fn returned None for all samples of {step} steps",
                reason="None leaves samples out of a step, and nothing was left to train",
                remedy="return the loss: return F.cross_entropy(model(inputs), targets)",
                setting="loss",
                step=step,
            )
        self.notes.say_once(
            "samples-left-out",
            f"note: up to step {step:,} the loss or collate_fn returned None for {skipped:,.0f}"
            f" of {values['samples']:,} samples, which are left out",
        )

    def show(self, kind: "ShownKind", name: str, value: Any, step: int) -> None:
        """Show a text, image or histogram of the body in TensorBoard and trackers. If nothing would
        show it, this is said once.
        """
        if not self.parts.world.is_main:
            return
        if self.journal.board is None and not self.journal.trackers:
            self.notes.say_once(
                "not-shown",
                f"note: step.log_{kind}({name}=...) is not shown: the run writes no TensorBoard"
                " files and has no tracker",
            )
            return
        from surefoot.tracking.shown import record_of

        self.journal.show(record_of(kind, name, value, step=step))

    def _watch_training(self, values: dict[str, Any]) -> None:
        """Show a training record's values to the rules that monitor them. If a rule ends the run,
        an evaluation follows, as after any last step. Collective.
        """
        if not any(each.of_training for each in self.run_state.watches):
            return
        # only rank 0 has the values that your own code logs
        scores = self.parts.world.from_main(training_scores(values))
        self.evaluations.watch(scores, of_training=True)
        if self.parts.out_of_patience and self.evaluated_step != self.state.step:
            self.evaluations.due = bool(self.parts.evaluator.names(at_end=False))

    def save(self) -> None:
        """Save a checkpoint and protect the best one from pruning. Collective."""
        assert self.parts.checkpointing is not None
        self._keep_directory()
        self.stop_requests.saved()
        with self.progress.timed("save"), self._call("saving"):
            self.parts.checkpointing.save(self._packed, protected=self._best)

    def watch(self, index: int) -> Watch:
        """Return the watch of a step: layer statistics if due, and the checks of weights and state
        in the first steps.
        """
        watch: Watch = UNWATCHED
        self.watched = None
        if self.times.every["layer_stats_every"].due(index + 1):
            watch = self.watched = self.layers.watch(index)
        if index == 0 and self._checks_weights():
            watch = WeightCheck(self.state.models, watch)
        if self.state_check is not None and index < self.state_check.steps:
            self.state_check.inner, watch = watch, self.state_check
        if self.user_updates and self.parts.world.size > 1:
            return NamedCalls(watch, self.parts.world, index)
        return watch

    def _checks_weights(self) -> bool:
        """Return True if no check before the first step has compared the weights around a pass."""
        parts, check = self.parts, self.state_check
        return (
            parts.settings.check_state
            and self.state.buffers.behavior >= BUFFERS_IN_ORDER
            and parts.plan.parallel.kind != "fsdp"  # a pass writes to gathered copies there
            and not (check is not None and check.has_passed)
        )

    def record(self, step: Step) -> None:
        """Store the measurements of a step. Layer statistics are read immediately, so that
        checkpoints do not store them.
        """
        if self.state_check is not None and step.index < self.state_check.steps:
            self.state_check.check_step(step)
        self.meter.add(step)
        if self.watched is not None:
            record = self.layers.read(self.watched, count=step.target_count)
            if record is not None:
                self.journal.write(record)

    # --- called by the session --------------------------------------------------------------------

    def catch_up(self) -> None:
        """Run the due duties after `break` has left the loop."""
        done = self.state.step
        if done == self.first_step:
            return
        if self.evaluated_step != done and self.evaluate_due(done):
            self._evaluate()
        if self.meter.rows and self.log_due(done):
            self.log()

    def make_up_for_evaluation(self) -> None:
        """Run the evaluation that a signal interrupted. Then save the step, so that a resume does
        not evaluate again.
        """
        self.clock.start()
        self.clock.enter("evaluating")
        self._evaluate()
        self.clock.enter("data_wait")
        if self.parts.checkpointing is not None and not self.evaluations.due:
            self.parts.checkpointing.started_step = None
            self.save_last()

    def save_last(self) -> None:
        if self.parts.checkpointing is not None:
            self._keep_directory()
            self.parts.checkpointing.finish(self.state.step, self._packed, protected=self._best)

    def _keep_directory(self) -> None:
        directory, saving = self.parts.directory, self.parts.checkpointing
        if directory is None or saving is None or not self.parts.world.is_main:
            return
        try:
            directory.refuse_links()
            deleted = [directory.make_again(), self.journal.make_again(directory), saving.lost()]
        except OSError as problem:
            if problem.errno != errno.ELOOP:
                raise
            return  # the next save fails for the same reason and prints it
        if any(deleted):
            saving.save_requested = True
            self.parts.say(
                f"WARNING: {directory.shown}, or a part of it, was deleted during training\n"
                "  the directory is created again and the complete run is saved; other deleted files are lost"
            )

    def _evaluate(self) -> None:
        done = self.state.step
        if self.alone and self.meter.rows and self.log_due(done):
            self.clock.enter("training")  # the device may still execute the step
            self.log()  # the training record comes before the scores
            self.clock.enter("evaluating")
        self.evaluated_step = done
        scores_due = self.evaluations.scores_due(done)
        self.evaluations.due = False
        if scores_due:
            with self.progress.timed("evaluation"), self._call("in the evaluation"):
                self.evaluations.score(
                    stop=self.stop_requests.stop_requested if self.alone else lambda: False
                )
            if not (self.meter.rows and self.log_due(done)):  # else the record follows
                self._show_step()
        if self.evaluations.sample_due(done) and not self.evaluations.due:
            with self.progress.timed("sample"), self._call("in sample_fn"):
                self.evaluations.sample()
        self.stop_requests.agree()

    def _show_step(self) -> None:
        self.journal.step_recorded()
        news, self.evaluations.news = self.evaluations.news, []
        for message in news:
            self.parts.say(message)

    def _call(self, what: str) -> AbstractContextManager[None]:
        return self.parts.world.during(f"{what} after step {self.state.step}")

    def _follow_trainable(self) -> None:
        parts, trainable = self.parts, self.state.trainable
        changes, self.flags = trainable.changes(self.flags), trainable.flags
        if not self.stop_requests.same_on_all_ranks():
            raise ConfigError(
                "ranks-train-other-parameters",
                problem=f"after step {self.state.step} rank {parts.world.rank} trains other"
                f" parameters than other ranks: {changes[0]}",
                reason="gradients are summed over all ranks, which would wait for each other forever",
                remedy="freeze and unfreeze by step.index, in the same way on every rank",
                step=self.state.step,
                rank=parts.world.rank,
            )
        if parts.world.size > 1:
            if parts.task.loss is not None:
                from surefoot.train.parallel_check import check_first_pass

                check_first_pass(
                    self.state.models,
                    parts.task.loss,
                    parts.pipeline.first(self.state.step),
                    precision=self.run_state.precision,
                    world=parts.world,
                    allow_unused=parts.plan.parallel.find_unused_parameters,
                )
            parts.task.ranks.follow_trainable()
            parts.make_ready()
        self._layers = None
        for change in changes:  # alternating changes are printed once
            self.notes.say_once(change, f"after step {self.state.step:,}: {change}")

    @property
    def layers(self) -> "Layers":
        """The statistics of layers, from the first step whose layers are recorded."""
        from surefoot.train.layer_stats import Layers

        if self._layers is None:
            self._layers = Layers(
                self.state.models,
                {name: trained.parameters for name, trained in self.state.optimizers.items()},
                world=self.parts.world,
                local_times=self.parts.task.ranks.local_times,
                compiled=self.parts.compiled,
                updated=self.run_state.updated_parameters,
            )
        return self._layers

    @property
    def _best(self) -> tuple[int, ...]:
        return () if self.run_state.best is None else self.run_state.best.steps

    def _packed(self, bases: Bases | None = None) -> Checkpoint:
        owed = self.evaluations
        self.meter.collect(self.parts.world)
        if self.state.step > self.first_step:  # by the body of the last step
            self.run_state.data_values.compare(registered=self.run_state.user_state.objects)
        # an evaluation after the last step may have frozen parameters
        self.state.trainable.follow()
        contents = self.parts.packed(
            bases,
            evaluation_due=owed.due,
            ended=owed.ended,
            first_scores=owed.first,
            scores=self.metrics_after(self.state.step),
        )
        return replace(contents, log=self.journal.state())


def latched(state: State, max_bad_steps: int) -> bool:
    """Return True if an optimizer skipped more than `max_bad_steps` consecutive steps. Synchronizes
    the device.
    """
    return any(trained.bad_in_a_row.item() > max_bad_steps for trained in state.optimizers.values())


def _refuse_scores(values: Mapping[str, Any], splits: Iterable[str]) -> None:
    """Raise `ConfigError` if the body of the loop logged a value that a split's score may have as
    its name.
    """
    for split in splits:
        for name in values:
            if name.startswith(f"{split}/"):
                raise ConfigError(
                    "logged-name-of-a-split",
                    problem=f"step.log has a value named {name!r}",
                    reason=f"names that begin with {split}/ are those of the scores of a split",
                    remedy="log it under another name",
                    name=name,
                    split=split,
                )
