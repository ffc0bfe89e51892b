"""The work of a run between two steps, which the training loop calls. Only this work may
synchronize the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from surefoot.checkpoint.format import Checkpoint
from surefoot.config.train_settings import Timetable
from surefoot.distributed.world import World
from surefoot.run.body_rates import BodyRates, own_schedule
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.run.progress import Progress
from surefoot.run.samples import Samples
from surefoot.run.saves import Saves
from surefoot.run.stop_requests import StopRequests
from surefoot.run.trainable_changes import TrainableChanges, meet_with_other_parameters
from surefoot.run.training_check import SessionNotes, TrainingCheck
from surefoot.run.training_records import TrainingRecords
from surefoot.tracking.branches import LeftBranches, left_branches
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import Record
from surefoot.train.loop import State, Step
from surefoot.train.patience import training_scores
from surefoot.train.state_dict import Bases, RunState

if TYPE_CHECKING:
    from surefoot.run.rank_checks import RankChecks


@dataclass(eq=False, repr=False, kw_only=True)
class PeriodicWork:
    """The work between the steps of one session: when each kind of work is due, and in which order.
    `alone` means that no user code runs there.

    `build_periodic` makes those that do the work. layers_changed: called when other parameters are
    trained. refuse_divergence: raises `DivergedError` after too many consecutive skipped steps.
    """

    run_state: RunState
    times: Timetable
    world: World
    stop_requests: StopRequests
    journal: Journal
    evaluations: Evaluations
    samples: Samples
    saves: Saves | None
    progress: Progress
    records: TrainingRecords
    training_check: TrainingCheck
    body_rates: BodyRates
    trainable_changes: TrainableChanges
    rank_checks: "RankChecks | None"
    layers_changed: Callable[[], None]
    refuse_divergence: Callable[[], None]
    say: Callable[[str], None]
    first_step: int  # of this session
    alone: bool = False
    logged_step: int = 0  # of the last record
    evaluated_step: int = 0  # of the last due evaluation or sample
    sample: Record | None = None  # of the newest step, whose row is not shown yet

    def __post_init__(self) -> None:
        self.meter = self.run_state.meter
        self.clock = self.run_state.clock
        self.state = self.run_state.state

    # --- called by the training loop --------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """True if no further step follows. All ranks read this property once before each step."""
        self.world.heartbeat.enter("step")  # the body has ended
        step = self.state.step
        is_over = self.run_state.out_of_patience or step >= self.times.stop_step
        trainable = self.state.trainable
        trainable.follow()
        has_written = self.body_rates.follow(has_body=not self.alone)
        trained = trainable.fingerprint ^ self.body_rates.fingerprint
        if is_over or self.stop_requests.stopping(step=step, trainable=trained):
            return True
        if has_written and not self.stop_requests.same_on_all_ranks():
            self.body_rates.refuse_other_ranks()
        if self.stop_requests.save_agreed:
            self.clock.enter("saving")
            self.save()
        if self.trainable_changes.any():
            same = self.stop_requests.same_on_all_ranks()
            self.trainable_changes.follow(same_on_all_ranks=same)
            self.layers_changed()
        return False

    def evaluate_due(self, done: int) -> bool:
        """Return True if an evaluation or a sample follows."""
        return self.evaluations.scores_due(done) or self._sample_due(done)

    def log_due(self, done: int) -> bool:
        """Return True every `log_every`, after an epoch that is not shorter and after the last
        step, but only once per step.
        """
        if self.logged_step == done:
            return False
        return done >= self.progress.epoch_recorded_at or self.times.log_due(done)

    def save_due(self, done: int) -> bool:
        """Return True after the last step, every `save_every`, at a new best score, on a signal, or
        after a failed save.
        """
        if self.saves is None:
            return False
        is_last = done == self.times.length.steps
        return is_last or self.stop_requests.save or self.saves.checkpointing.due(done)

    def metrics_after(self, done: int) -> dict[str, float]:
        """Return the metrics of the evaluation after `done` steps, or nothing without one."""
        return self.evaluations.metrics_after(done)

    def evaluate(self, step: Step) -> None:
        """Evaluate and sample, whatever is due. The step gets the metrics."""
        self._evaluate()
        step.metrics = self.metrics_after(step.index + 1)

    def log(self) -> None:
        """Synchronize the device, and write the record of training and of an epoch, if due. Raises
        `DivergedError` after too many consecutive skipped steps.
        """
        done = self.state.step
        self.logged_step = done
        self.world.read_announced()
        with self._naming("writing the record"):
            self.meter.collect(self.world)
        epoch = None
        if done >= self.progress.epoch_recorded_at:
            epoch = self.progress.epoch_record()
        if self.times.log_due(done):
            self._log_training()
        if epoch is not None:
            self.journal.write(epoch)
        # else the scores of this step follow, and it is shown with them
        if self.evaluated_step == done or not self.evaluations.scores_due(done):
            self._show_step()
        self.samples.show(self.sample)
        self.sample = None

    def save(self) -> None:
        """Save a checkpoint and protect the best one from pruning. Collective."""
        assert self.saves is not None
        self.saves.keep_directory()
        self.stop_requests.saved()
        with self.progress.timed("save"), self._naming("saving"):
            self.saves.save()

    # --- called by the session --------------------------------------------------------------------

    def catch_up(self) -> None:
        """Do the due work after `break` has left the loop."""
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
        if self.saves is not None and not self.evaluations.due:
            self.saves.save_again(self.state.step)

    def save_last(self) -> None:
        """Save the newest step, if there is a directory, and wait until it is on disk. Collective."""
        if self.saves is not None:
            self.saves.save_last(self.state.step)

    def stop_of_evaluation(self) -> Callable[[], bool]:
        """Return the function that says whether an evaluation is interrupted. One that is followed
        by user code is not.
        """
        return self.stop_requests.stop_requested if self.alone else lambda: False

    # --- what is done -----------------------------------------------------------------------------

    def _log_training(self) -> None:
        step = self.state.step
        self.training_check.check_updates()
        values = self.records.write(evaluated_step=self.evaluated_step)
        self.training_check.check_samples(values, step=step)
        self._watch_training(values)
        if self.rank_checks is not None:
            self.rank_checks.check(step)
        self.refuse_divergence()
        self.stop_requests.look_for_change()

    def _watch_training(self, values: dict[str, Any]) -> None:
        """Show a training record's values to the rules that monitor them. If a rule ends the run,
        an evaluation follows, as after any last step. Collective.
        """
        if not any(watch.of_training for watch in self.run_state.watches):
            return
        # only rank 0 has the values that the user's code logs
        scores = self.world.from_main(training_scores(values))
        self.evaluations.watch(scores, of_training=True)
        if self.run_state.out_of_patience and self.evaluated_step != self.state.step:
            self.evaluations.due = self.evaluations.has_splits

    def _sample_due(self, done: int) -> bool:
        return self.samples.settings.sample_fn is not None and self.times.sample_due(done)

    def _evaluate(self) -> None:
        done = self.state.step
        if self.alone and self.meter.rows and self.log_due(done):
            self.clock.enter("training")  # the device may still execute the step
            self.log()  # the training record comes before the scores
            self.clock.enter("evaluating")
        self.evaluated_step = done
        record_follows = bool(self.meter.rows) and self.log_due(done)
        scores_due = self.evaluations.scores_due(done)
        self.evaluations.due = False
        if scores_due:
            with self.progress.timed("evaluation"), self._naming("in the evaluation"):
                self.evaluations.score(stop=self.stop_of_evaluation())
            if not record_follows:
                self._show_step()
        if self._sample_due(done) and not self.evaluations.due:
            with self.progress.timed("sample"), self._naming("in sample_fn"):
                self.sample = self.samples.draw(done)
        if not record_follows:
            self.samples.show(self.sample)
            self.sample = None
        self.stop_requests.agree()

    def _show_step(self) -> None:
        """Show the row of the newest step, and below it what its scores mean."""
        self.journal.step_recorded()
        news = self.evaluations.news
        self.evaluations.news = []
        for message in news:
            self.say(message)

    def _naming(self, what: str) -> AbstractContextManager[None]:
        """Name to the other ranks what this rank does between two steps."""
        return self.world.during(f"{what} after step {self.state.step}")


def build_periodic(
    parts: RunComponents,
    *,
    stop_requests: StopRequests,
    journal: Journal,
    evaluations: Evaluations,
    samples: Samples,
    notes: SessionNotes,
    layers_changed: Callable[[], None],
) -> PeriodicWork:
    """Return the work between the steps of a session that has opened its run."""
    run_state = parts.run_state
    settings = parts.settings
    state = parts.state
    world = parts.world
    times = parts.plan.times

    saves = None
    if parts.checkpointing is not None and parts.directory is not None:
        contents = partial(_contents, parts, evaluations, journal, state.step)
        left = left_branches(parts.directory.path) if world.is_main else LeftBranches()
        saves = Saves(
            parts.checkpointing,
            journal,
            parts.directory,
            packed=contents,
            best=run_state.best,
            is_main=world.is_main,
            say=parts.say,
            left=left,
        )
    progress = Progress(
        run_state,
        times,
        evaluations,
        parts.evaluator,
        samples_per_epoch=parts.pipeline.plan.samples,
        draws_samples=settings.sample_fn is not None,
        saves=saves is not None,
        say=parts.say,
    )
    checks_schedulers = saves is not None and settings.check_state
    body_rates = BodyRates(
        state,
        world,
        own_schedule=own_schedule(parts.plan.schedule, run_state.feedback),
        registered=run_state.user_state.objects if checks_schedulers else None,
        say=parts.say,
    )
    records = TrainingRecords(
        run_state,
        journal,
        progress,
        order=parts.pipeline.plan,
        derived=settings.derived,
        rates=parts.recorded_rates,
        body_factors=body_rates.factors,
        splits=parts.evaluator.splits,
        device=parts.device,
    )
    meet = None
    rank_checks = None
    if world.size > 1:
        from surefoot.run.rank_checks import RankChecks

        meet = partial(meet_with_other_parameters, parts)
        rank_checks = RankChecks(
            state.models,
            world,
            times,
            micro_batches=[len(share) for share in parts.pipeline.shares],
            journal=journal,
            say=parts.say,
        )
    return PeriodicWork(
        run_state=run_state,
        times=times,
        world=world,
        stop_requests=stop_requests,
        journal=journal,
        evaluations=evaluations,
        samples=samples,
        saves=saves,
        progress=progress,
        records=records,
        training_check=TrainingCheck(
            run_state.meter, notes, first_step=state.step, last_step=times.length.steps
        ),
        body_rates=body_rates,
        trainable_changes=TrainableChanges(state, notes, rank=world.rank, meet=meet),
        rank_checks=rank_checks,
        layers_changed=layers_changed,
        refuse_divergence=partial(_refuse_divergence, parts, saves),
        say=parts.say,
        first_step=state.step,
    )


def _contents(
    parts: RunComponents,
    evaluations: Evaluations,
    journal: Journal,
    first_step: int,
    bases: Bases | None = None,
) -> Checkpoint:
    """Return the contents of a checkpoint between two steps of a session that began after
    `first_step` steps. Collective.
    """
    run_state, step = parts.run_state, parts.state.step
    run_state.meter.collect(parts.world)
    if step > first_step:  # by the body of the last step
        run_state.data_values.compare(registered=run_state.user_state.objects)
    # an evaluation after the last step may have frozen parameters
    parts.state.trainable.follow()
    contents = parts.packed(
        bases,
        evaluation_due=evaluations.due,
        ended=evaluations.ended,
        first_scores=evaluations.first,
        scores=evaluations.metrics_after(step),
    )
    return replace(contents, log=journal.state())


def _refuse_divergence(parts: RunComponents, saves: Saves | None) -> None:
    """Raise `DivergedError` if too many consecutive steps were skipped. Collective."""
    if latched(parts.state, parts.settings.max_bad_steps):
        from surefoot.run.divergence import diverged

        raise diverged(parts, saves)


def latched(state: State, max_bad_steps: int) -> bool:
    """Return True if an optimizer skipped more than `max_bad_steps` consecutive steps. Synchronizes
    the device.
    """
    return any(trained.bad_in_a_row.item() > max_bad_steps for trained in state.optimizers.values())
