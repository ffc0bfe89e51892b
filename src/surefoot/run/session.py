"""One session of a run, with its loader, record files, signal handlers and torch settings. Each
resume starts another session.
"""

import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, Any
from weakref import proxy

from surefoot.checkpoint.format import Checkpoint
from surefoot.config.extras import refuse_missing_trackers
from surefoot.config.tree import flat
from surefoot.data.loader import MicroBatch, StoppedError
from surefoot.optim.build import import_for_steps
from surefoot.run import after, crash_report, messages
from surefoot.run.components import RunComponents
from surefoot.run.data_changes import DataChanges
from surefoot.run.evaluation import BegunEnd, Evaluations
from surefoot.run.model_kinds import are_built_by_functions
from surefoot.run.periodic import PeriodicWork, build_periodic
from surefoot.run.resume import buffer_check, open_run
from surefoot.run.samples import Samples
from surefoot.run.signals import Signals, is_interactive, to_terminal
from surefoot.run.step_watches import StepWatches, checks_weights, layers_of
from surefoot.run.stop_requests import StopRequests
from surefoot.run.training_check import SessionNotes
from surefoot.run.way_back import name_way_back
from surefoot.seeding import hold_generators
from surefoot.tracking.change_journal import read_changes, take_back
from surefoot.tracking.change_request import REQUEST, end_request
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import AT_CHANGE, Phase, Record, scores_in
from surefoot.train.changed_settings import described
from surefoot.train.error_causes import explaining, of_compiler
from surefoot.train.loop import Step, steps
from surefoot.train.skipped_steps import steps_in
from surefoot.train.step_watch import UNWATCHED

if TYPE_CHECKING:
    from surefoot.distributed.liveness import RankPhase
    from surefoot.run.after import LiveFindings
    from surefoot.tracking.shown import ShownKind
    from surefoot.train.loss_contract import LossContract

# what a heartbeat says of the phases of the clock
_RANK_PHASES: "dict[Phase, RankPhase]" = {
    "opening": "step",
    "starting": "step",
    "training": "step",
    "data_wait": "data",
    "evaluating": "evaluation",
    "saving": "saving",
    "user": "body",
}


class Session:
    """The opening, training loop and closing of one session. From the opening on, `periodic` does the
    work between steps, and `watches` has what is watched inside a step.
    """

    periodic: PeriodicWork
    watches: StepWatches

    def __init__(self, parts: RunComponents, *, configuration: str | None) -> None:
        self.parts = parts
        self.run_state = parts.run_state
        self.clock = parts.run_state.clock
        self.state = parts.state
        self.heartbeat = parts.world.heartbeat
        self.configuration = configuration
        self.fresh_line = parts.console.fresh_line if parts.console else "\n"
        say = to_terminal(self.fresh_line) if parts.rank_log is None else parts.rank_log.at_once
        self.signals = Signals(lambda: messages.standing(parts), say=say)
        self.settings = ExitStack()
        self.feed = parts.pipeline.feed(workers=parts.pipeline.workers, say=parts.say)
        self.stop_requests = StopRequests(
            parts.world, self.signals, parts.checkpointing, limit_s=parts.plan.times.limit_s
        )
        if parts.world.is_main and parts.directory is not None and self.takes_changes:
            self.stop_requests.change_file = parts.directory.path / REQUEST
        if parts.pipeline.tape is not None:
            parts.pipeline.tape.stop_requested = self.stop_requests.on_this_rank
        self.journal = Journal(parts.console, parts.text_log)
        self.evaluations = Evaluations(
            parts.evaluator,
            parts.run_state,
            parts.plan.times,
            self.journal,
            checkpointing=parts.checkpointing,
            say=parts.say,
            doing=parts.doing,
        )
        self.samples = Samples(
            parts.evaluator,
            parts.settings,
            self.journal,
            parts.world,
            directory=parts.directory,
            say=parts.say,
            doing=parts.doing,
        )
        self.notes = SessionNotes(parts.say)
        self.later_step = 0  # the first step outside the phase "starting"
        self.data_changes = DataChanges(
            parts.run_state.data_values,
            parts.pipeline,
            registered=parts.run_state.user_state.objects,
            say_unsaved=partial(_say_unsaved, parts),
        )
        self.running: Generator[Step] | None = None
        self.is_over = False  # the run has all that its end writes: nothing is written
        self.begun_end: BegunEnd | None = None  # of a complete run that lacks a part of its end
        self.is_opened = False  # the loop yields a step before its update
        self.has_request = False  # of another process, which waits for the answer
        self.is_followed = False  # by a session with other settings, in this process
        self.live_findings: LiveFindings | None = None

    # --- opening and closing ----------------------------------------------------------------------

    def open(self) -> None:
        """Install signal handlers and open the directory. Resume from its newest intact checkpoint,
        or save step 0.
        """
        self.settings.enter_context(hold_generators())  # first, because it may raise
        self.signals.install()
        logs = None if self.parts.directory is None else self.parts.directory.path / "logs"
        self.heartbeat.opened(logs=logs, fresh_line=self.fresh_line, device=self.parts.device.type)
        try:
            self._refuse_other_settings(self.parts.compared())
            refuse_missing_trackers(self.parts.trackers)
            tensorboard = self.parts.writes_tensorboard  # refused before anything is written
            self.settings.enter_context(self.parts.numerics())
            opened = open_run(self.parts, configuration=self.configuration)
            if opened.checkpoint is not None:
                self.evaluations.resumed(opened.checkpoint)
            self.is_over = opened.is_over
            self.begun_end = opened.begun_end
            if self.begun_end is not None:
                self.evaluations.completed(self.begun_end)
            if self.parts.world.is_main and not self.is_over:
                self._open_sinks(opened.checkpoint, tensorboard=tensorboard)
            contract = self._contract_to_tell(opened.loss_contract)
            if self.journal.metrics is not None and not self._has_checked_data():
                self._look_at_data(contract)
            is_silent = self.parts.console is None and self.parts.world.is_main
            if is_silent and contract is not None and not contract.holds:
                messages.warn(contract.warning)
            self.parts.make_ready()
        except BaseException as problem:
            self._name_way_back(problem)
            try:
                crash_report.tell_others(problem, self.parts)
            finally:
                self.release(keeps_lock=self.parts.follows)
            raise
        if opened.checkpoint is not None:
            for trained in self.state.optimizers.values():
                trained.rates.hold()
        self.watches = StepWatches(
            run_state=self.run_state,
            journal=self.journal,
            layer_stats_every=self.parts.plan.times.every["layer_stats_every"],
            make_layers=partial(layers_of, self.parts),
            state_check=opened.state_check,
            checks_weights=checks_weights(self.parts),
            announces=self.parts.world if self.parts.world.size > 1 else None,
        )
        self.periodic = build_periodic(
            self.parts,
            stop_requests=self.stop_requests,
            journal=self.journal,
            evaluations=self.evaluations,
            samples=self.samples,
            notes=self.notes,
            layers_changed=self.watches.forget_layers,
        )
        self.state.show = _ShownByBody(self.journal, self.notes, self.parts.world.is_main)
        if self.is_over:
            return
        self._say_beginning(contract, resumed=opened.checkpoint is not None)

    def _say_beginning(self, contract: "LossContract | None", *, resumed: bool) -> None:
        if not self.parts.follows:
            self.parts.say(messages.header(self.parts, resumed=resumed))
        if contract is not None and not contract.holds:
            self.parts.say(f"warning: {contract.warning}")
        elif contract is not None and self.parts.pipeline.sizes.pieces > 1:
            self.parts.say(f"loss    contract {contract.description}")

    def _open_sinks(self, checkpoint: Checkpoint | None, *, tensorboard: bool) -> None:
        """Open the record files and trackers of rank 0, and look for findings while the run trains.
        `checkpoint` is that of a resumed run.
        """
        parts = self.parts
        if parts.directory is not None:
            self.journal.open(
                parts.directory,
                step=self.state.step,
                saved=checkpoint,
                unit=parts.settings.count_unit,
                tensorboard=tensorboard,
            )
            self.journal.follow(parts.trackers, parts.directory, settings=dict(parts.plan.identity))
        if parts.console or parts.text_log or parts.alert:
            self.live_findings = after.live_findings_of(
                parts, self.configuration, resumed=checkpoint is not None
            )
            # after the console and the text log
            place = (parts.console is not None) + (parts.text_log is not None)
            self.journal.sinks.insert(place, self.live_findings)
        if self.journal.board is not None or self.journal.trackers:
            self._show_changes()

    def _name_way_back(self, problem: BaseException | None) -> None:
        if problem is not None and self.parts.directory is not None:
            name_way_back(problem, self.parts.directory.shown)

    def _show_changes(self) -> None:
        """Show in TensorBoard and trackers the changes of settings with which this session begins."""
        from surefoot.tracking.shown import record_of

        step = self.state.step
        for change in self.parts.changes:
            if change.from_step == step:
                text = described(change)
                self.journal.show(record_of("text", "change", text, step=step))

    def close(self, problem: BaseException | None) -> None:
        """Save unsaved steps, or report the `problem` that ended the session. Then release all
        resources.
        """
        parts = self.parts
        self._name_way_back(problem)
        try:
            crash_report.tell_others(problem, parts)
            if problem is None or isinstance(problem, GeneratorExit):
                try:
                    self._finish()
                except Exception as failed:
                    crash_report.tell_others(failed, parts)
                    crash_report.write_report(failed, parts, step=self._step)
                    raise
            else:
                if isinstance(problem, Exception):
                    crash_report.write_report(problem, parts, step=self._step)
                else:
                    crash_report.report_left(parts, step=self._step)
                self._record_event(crash_report.failed(problem))
        except BaseException as failed:
            self._record_event(crash_report.failed(failed))
            raise
        finally:
            self.release(keeps_lock=self.is_followed)
            self._end_loop()
            self.heartbeat.closed()
            if parts.world.is_main:
                if not self.is_over or after.page_is_older(parts):
                    after.write_page(parts)  # after all other files
                if parts.console is not None:
                    after.finish_cell(parts)
        signal_number = self.stop_requests.ended_by
        if signal_number is not None and (problem is None or of_compiler(problem)):
            if signal_number == signal.SIGINT and is_interactive():
                from surefoot.tracking.notebook import interrupt

                raise interrupt() from problem  # SystemExit would end the interpreter
            raise SystemExit(128 + signal_number) from problem

    def release(self, *, keeps_lock: bool) -> None:
        """Close sinks and directory, wait for the writer, and restore settings and signal handlers,
        even if one of these fails. Between two sessions the directory stays locked.
        """
        self.state.buffers.before_call = None  # it refers to the state
        self.state.show = None  # it refers to the session
        with ExitStack() as last_first:  # calls all functions even if one fails
            if self.parts.directory is not None and not keeps_lock:
                last_first.callback(self.parts.directory.close)
            last_first.callback(self.journal.close)
            if self.parts.checkpointing is not None:
                last_first.callback(self.parts.checkpointing.writer.wait)
            last_first.callback(self.settings.close)
            last_first.callback(self.signals.restore)
            # first: the reader of a stream inherits handles of signals
            last_first.callback(self.parts.pipeline.close)

    def _finish(self) -> None:
        """End the loop, do what is still due, save, and say how the session ended. Collective."""
        parts = self.parts
        evaluations = self.evaluations
        if self.running is not None:
            self.running.close()  # `break` does not close a generator with another reference
        if parts.world.size > 1:
            self._leave_loop()
        self.periodic.catch_up()
        if not self.is_followed:
            self._take_request()  # it holds when the run goes on
            self.end_request()
        # a session that follows takes care of the end
        is_end = parts.finished and not self.is_followed
        if is_end and evaluations.end_due() and self.stop_requests.ended_by is None:
            self.periodic.save_last()  # first, because the evaluation may take minutes
            self.clock.enter("evaluating")
            evaluations.score_at_end(stop=self.stop_requests.stop_requested)
            self.clock.enter("saving")
        if parts.checkpointing is not None:
            parts.doing("saving")
            self.heartbeat.enter("saving")
            self.periodic.save_last()

        step = self.state.step
        has_scored = bool(evaluations.scores) or evaluations.at_end is not None
        begun_end = self.begun_end
        went_on = has_scored or step > self.periodic.first_step or begun_end is not None
        # a resume repeats the evaluation, and draws and concludes after it
        is_interrupted = self.stop_requests.ended_by is not None
        end_interrupted = is_interrupted and is_end and evaluations.end_due()
        if went_on and not evaluations.due and not end_interrupted:
            has_sample = begun_end is not None and begun_end.has_sample
            draws = parts.settings.sample_fn is not None and not has_sample
            if is_end and step >= parts.length.steps and draws:
                self.samples.show(self.samples.draw(step))
            if is_end and not is_interrupted:
                self._conclude()
        if not self.is_over:
            # also of a session without steps, which else would look killed; first, because findings
            # use this record
            self._record_event(crash_report.ended(parts, self.stop_requests))
        was_stopped = self.stop_requests.ended_by is not None or self.stop_requests.out_of_time
        if (went_on or was_stopped) and not self.is_followed:
            self.journal.step_recorded()
            ending = messages.ending(
                parts,
                evaluations,
                skipped=self.periodic.records.skipped,
                stopped_by=crash_report.stop_cause(parts, self.stop_requests),
                end_interrupted=end_interrupted,
                findings="" if self.live_findings is None else self.live_findings.sentence(),
            )
            parts.say(ending)
        if self.stop_requests.out_of_time and step == self.periodic.first_step:
            parts.say(
                f"note: time_limit = {parts.settings.time_limit} leaves no time for a step: it keeps"
                " 1 s free, and twice the time of a save"
            )

    def _conclude(self) -> None:
        """Show the panels, settings and final scores of a finished run. Collective."""
        parts = self.parts
        evaluations = self.evaluations
        if parts.settings.panels_fn is not None and parts.directory is not None:
            self.clock.enter("evaluating")
            self.samples.show_panels(self.state.step, stop=lambda: self.signals.stop is not None)
            self.clock.enter("saving")
        outcome: Record = {
            "kind": "outcome",
            "step": self.state.step,
            "settings": flat(parts.plan.identity),
            "scores": evaluations.scores,
        }
        if evaluations.at_end is not None:
            _, scores_at_end = evaluations.at_end
            outcome["scores_at_end"] = scores_at_end
        self.journal.show(outcome)

    def _contract_to_tell(self, contract: "LossContract | None") -> "LossContract | None":
        """Return None for a loss that couples samples in steps of one micro-batch, where it is
        right.
        """
        if contract is None or contract.holds or contract.is_sum:
            return contract
        is_one_micro_batch = self.parts.pipeline.sizes.pieces == 1
        return None if is_one_micro_batch else contract

    def _has_checked_data(self) -> bool:
        """Return True if metrics.jsonl has the check of the data, which comes before the first
        step.
        """
        directory = self.parts.directory
        if directory is None:
            return False
        if self.state.step:
            return True
        return any(record["kind"] == "data_check" for record in read_records(directory.metrics))

    def _look_at_data(self, loss_contract: "LossContract | None") -> None:
        """Record what the data of training and splits are."""
        pipeline = self.parts.pipeline
        splits = self.parts.evaluator.splits
        data_of_splits = {name: split.data for name, split in splits.items()}
        record: Record = {"kind": "data_check", "step": self.state.step}
        record |= after.look_at_data(pipeline.checked, data_of_splits, seed=pipeline.seed)
        record["samples"] = pipeline.plan.samples
        record["scored_by_training_loss"] = [
            name for name, split in splits.items() if split.loss is True
        ]
        record["has_loss"] = self.parts.task.loss is not None
        if loss_contract is not None:
            record["loss_contract"] = {
                "holds": loss_contract.holds,
                "description": loss_contract.description,
            }
        self.journal.write(record)

    def _record_event(self, what: str) -> None:
        self.journal.write(
            {
                "kind": "event",
                "step": self.state.step,
                "event": what,
                **self.clock.window(),
            }
        )

    # --- changes of settings ----------------------------------------------------------------------

    @property
    def takes_changes(self) -> bool:
        """True if the run can go on with other settings: it has a journal, and functions build its
        models again.
        """
        return self.parts.directory is not None and are_built_by_functions(
            self.parts.settings.model
        )

    @property
    def finished_steps(self) -> int:
        """The number of finished steps after that whose body calls."""
        if self.running is None or getgeneratorstate(self.running) != GEN_SUSPENDED:
            return self.state.step
        return self.state.step + int(self.is_opened)

    def begin_change(self) -> bool:
        """Return True on rank 0 if the loop has ended because settings change. Changes that another
        process has asked for become lines of the journal.
        """
        parts = self.parts
        if crash_report.stop_cause(parts, self.stop_requests) != AT_CHANGE:
            return False
        assert parts.directory is not None  # else nobody can ask for a change
        self._take_request()
        has_changed = len(read_changes(parts.directory.path)) > len(parts.changes)
        goes_on = has_changed or parts.is_at_change or not parts.finished
        if not goes_on:
            self.end_request()
        return goes_on

    def _take_request(self) -> None:
        """Make lines of the journal of what another process has asked for, on rank 0. It waits until
        `end_request`.
        """
        change_file = self.stop_requests.change_file
        if change_file is not None and change_file.exists():
            self.has_request = True
            refusal = after.take_request(change_file.parent, step=self.state.step)
            if refusal is not None:
                self.parts.say(f"note: {refusal}")

    def take_back_changes(self) -> bool:
        """Take away the lines that the journal has got since the run was built. Return False if
        there are none. Collective.
        """
        parts = self.parts
        assert parts.directory is not None  # only there can settings change
        has_new = False
        if parts.world.is_main:
            keep = len(parts.changes)
            has_new = len(read_changes(parts.directory.path)) > keep
            if has_new:
                take_back(parts.directory.path, keep=keep)
        return bool(parts.world.from_main(has_new))

    def end_request(self) -> None:
        """Let another process know that its request was made or refused."""
        change_file = self.stop_requests.change_file
        if change_file is not None and self.has_request:
            self.has_request = False
            with suppress(OSError):
                end_request(change_file.parent)

    # --- the loop ---------------------------------------------------------------------------------

    def steps(self, *, opened: bool) -> Iterator[Step]:
        """Return the loop over the remaining steps; an earlier loop is closed. If `opened`, the
        caller updates.
        """
        if self.running is not None:
            self.running.close()
        self.periodic.catch_up()
        self.running = self._steps(opened=opened)
        return self.running

    def _end_loop(self) -> None:
        """End a loop that an exception has left: its frame refers to this session."""
        if self.running is not None:
            with suppress(Exception):  # the exception is what went wrong first
                self.running.close()
            self.running = None

    def _refuse_other_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if a setting differs from rank 0's. Collective."""
        if self.parts.world.size > 1:
            from surefoot.distributed.consistency import check_same_on_all_ranks

            check_same_on_all_ranks(self.parts.world, settings)

    def _leave_loop(self) -> None:
        """Wait until all ranks have ended their loop. Collective."""
        from surefoot.distributed.side_channel import LEFT, LeftAloneError

        try:
            self.stop_requests.agree(LEFT)
        except LeftAloneError:
            self.heartbeat.left_alone()
            raise

    def _check_metrics(self) -> None:
        """Check the metrics of the splits before the first step, unless the loss fails on the
        training data too: then the first step says so.
        """
        try:
            with self.parts.world.during("in the check of the metrics"):
                self.evaluations.check_metrics()
        except Exception:
            from surefoot.train.state_check import fails_in_first_step

            if not fails_in_first_step(self.parts):
                raise

    def _evaluate_at_start(self) -> None:
        """Evaluate the splits before the first step, or take the scores that an earlier session
        recorded. Collective.
        """
        scores = None
        if self.parts.world.is_main and self.parts.directory is not None:
            for record in read_records(self.parts.directory.metrics):
                if record["kind"] == "eval" and not record["step"]:
                    scores = scores_in(record)
        scores = self.parts.world.from_main(scores)
        if scores is not None:
            self.evaluations.scored_at_start(scores)
            return
        self.clock.start()
        self.clock.enter("evaluating")
        with self.periodic.progress.timed("evaluation"):
            self.evaluations.score_at_start(stop=self.periodic.stop_of_evaluation())
        self.stop_requests.agree()
        self.clock.enter("data_wait")

    def _steps(self, *, opened: bool) -> Generator[Step]:
        parts = self.parts
        self.is_opened = opened
        self.run_state.user_state.refuse_unclaimed()
        names = sorted(self.run_state.user_state.objects)
        self._refuse_other_settings({"register_state": names})
        self.periodic.body_rates.begin()
        if self.evaluations.due:
            self.periodic.make_up_for_evaluation()
        if parts.finished:
            goes_on = self.evaluations.scores or self.evaluations.end_due() or self.begun_end
            if not goes_on:
                parts.say(messages.finished(parts))
            return
        if self.state.step >= parts.plan.times.stop_step and not parts.is_at_change:
            parts.say(
                f"nothing to do: {self.state.step:,} steps are completed, and stop_after is"
                f" {parts.plan.times.stop_step:,}"
            )
        buffers = self.state.buffers
        if opened and buffers.undeclared and (buffers.findings is None or not self.state.step):
            buffers.before_call = buffer_check(parts).check_in_first_step
        state_check = self.watches.state_check
        if state_check is not None and not opened:
            with parts.world.during("in the check of the state"):
                state_check.check_beginning(parts.pipeline)
        if not self.state.step and parts.settings.check_state:
            self._check_metrics()
        evaluates_at_start = parts.settings.evaluate_at_start and self.evaluations.has_splits
        if evaluates_at_start and not self.state.step:
            self._evaluate_at_start()
        if parts.skips is not None:
            self._pass_over(parts.skips)
            return
        import_for_steps(self.state.optimizers.values())
        self.data_changes.begin(step=self.state.step)
        self.feed.start(self.state.step, stop=parts.length.steps)
        self.watches.user_updates = opened
        self.later_step = self.state.step + (1 if state_check is None else state_check.steps)
        self.clock.first_steps += range(self.state.step, self.later_step)
        if parts.console is not None:
            parts.console.begin_steps(self.clock.all_s())
        self.clock.start()
        parts.doing("training")
        with (
            closing(self.feed),
            explaining(
                lambda: Step(self._step, parts.pipeline.again(self._step), parts.task, self.state)
            ),
            suppress(StoppedError),  # while it waited for a row of a stream
        ):
            loop = self._segments(opened=opened)
            yield from loop if self.periodic.alone else _letting_go(loop)

    def _pass_over(self, skips: str) -> None:
        """Go on behind steps that the journal skips: no data are read, nothing is updated, and no
        body runs. What is due after these steps is done.
        """
        parts = self.parts
        last = steps_in(skips).stop
        if self.state.step == parts.settings_begin:
            first = self.state.step + 1
            self.journal.write(
                {"kind": "skipped_range", "step": first, "first": first, "last": last}
            )
        parts.say(
            f"steps {self.state.step + 1:,} to {last:,} are skipped, by the journal of changes"
        )
        self.data_changes.begin(step=self.state.step)
        self.clock.start()
        parts.doing("training")
        periodic = self.periodic
        while self.state.step < parts.length.steps and not periodic.stopping:
            step = Step(self.state.step, (), parts.task, self.state)
            self.state.step += 1
            done = self.state.step
            periodic.logged_step = done  # the next record has the steps before and behind
            if periodic.evaluate_due(done):
                self._enter("evaluating")
                periodic.evaluate(step)
            if periodic.save_due(done):
                self._enter("saving")
                periodic.save()

    def _segments(self, *, opened: bool) -> Generator[Step]:
        """Yield the steps of each remaining segment of the plan, computed by the segment's task."""
        for segment, task in zip(self.parts.plan.segments, self.parts.tasks, strict=True):
            if self.state.step >= segment.end:
                continue
            yield from steps(
                task,
                self.state,
                feed=self._fed,
                record=self.watches.record,
                clock=self._enter,
                periodic=self.periodic,
                length=segment.end,
                opened=opened,
                watch=self.watches.watch,
            )
            if self.state.step < segment.end:  # the run was stopped
                return

    def _enter(self, phase: Phase) -> None:
        if phase == "user" and self.periodic.alone:
            phase = "training"
        in_body = phase == "training" and self.is_opened
        self.heartbeat.enter("body" if in_body else _RANK_PHASES[phase])
        first = self.state.step < self.later_step and phase in ("training", "data_wait")
        self.clock.enter("starting" if first else phase)

    def _fed(self, step: int) -> Sequence[MicroBatch]:
        self.heartbeat.at(step, "training")
        has_body = not self.periodic.alone
        if has_body:
            self.data_changes.follow(self.feed, step=step)
        micro_batches = self.feed.micro_batches(step)
        self.data_changes.refuse_other_lists(step)
        if has_body:
            self.data_changes.note_reading()
        self.heartbeat.enter_work("other")
        self.heartbeat.enter("step")
        return micro_batches

    @property
    def _step(self) -> int:
        return self.state.step if self.feed.latest is None else self.feed.latest


@dataclass(frozen=True)
class _ShownByBody:
    """What the body of a loop shows: `step.log_text`, `log_image` and `log_histogram`."""

    journal: Journal
    notes: SessionNotes
    is_main: bool

    def __call__(self, kind: "ShownKind", name: str, value: Any, step: int) -> None:
        """Show a value in TensorBoard and trackers. If nothing would show it, this is said once."""
        if not self.is_main:
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


def _say_unsaved(parts: RunComponents, text: str) -> None:
    """Say what a resumed run would not have."""
    if parts.directory is None or not parts.world.is_main:
        return
    if parts.console is None:
        messages.warn(text)
    else:
        parts.say(f"note: {text}")


def _letting_go(loop: Generator[Step]) -> Iterator[Step]:
    """Yield the steps of a loop. A finished step that the user keeps has its numbers, and does not
    keep the run.
    """
    step = None
    try:
        for following in loop:
            _let_go(step)
            step = following
            yield step
    finally:
        loop.close()
        _let_go(step)


def _let_go(step: Step | None) -> None:
    if step is not None:
        step.state = proxy(step.state)
        step._task = proxy(step._task)
        step._watch = UNWATCHED
