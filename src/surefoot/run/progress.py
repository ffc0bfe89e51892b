"""The progress of a run: the remaining time, and the record of each completed epoch."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from surefoot.config.durations import NEVER
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.tracking.record import Record
from surefoot.train.meter import EpochTotals
from surefoot.train.timer import Event, RemainingTime


class Progress:
    """The remaining work and its expected time. `evaluated_step` is the last step with a due
    evaluation or sample.
    """

    def __init__(self, parts: RunComponents, evaluations: Evaluations) -> None:
        self.parts, self.state, self.evaluations = parts, parts.state, evaluations
        self.remaining = RemainingTime()
        self.epoch_end = NEVER  # the step at the end of the current epoch

    def opened(self) -> None:
        every, epoch = self.parts.timetable.epoch, self.parts.run_state.meter.epoch
        if every.period is None:
            return
        self.epoch_end = every.next(self.state.step)
        if epoch is None or epoch.start != every.last(self.state.step):
            self._begin_epoch()

    @contextmanager
    def timed(self, event: Event) -> Iterator[None]:
        """Time an evaluation, a sample or a save. The time of an interrupted evaluation is
        ignored.
        """
        now = self.parts.run_state.clock.now
        start_s = now()
        yield
        if not self.evaluations.due:
            self.remaining.add_event(
                event,
                now() - start_s,
                steps=self._evaluation_steps[0] if event == "evaluation" else 1.0,
            )

    def eta(self, *, evaluated_step: int) -> dict[str, float]:
        """Return {"eta_s": seconds}, the remaining time with evaluations, samples and saves.
        Returns {} before a step is timed.
        """
        done, last, every = self.state.step, self.parts.length.steps, self.parts.timetable.every
        evaluated = done - (
            evaluated_step != done
        )  # the evaluation of this step follows its record
        evaluations = every["evaluate_every"].count(evaluated, last) + (
            not every["evaluate_every"].due(last)
        )
        saves = every["save_every"].count(done - 1, last) + (not every["save_every"].due(last))
        samples = every["sample_every"].count(evaluated, last - 1) + 1
        during, at_end = self._evaluation_steps
        eta_s = self.remaining.seconds(
            steps=last - done,
            evaluations=evaluations * during * (evaluated < last) + at_end,
            samples=samples * (self.parts.settings.sample_fn is not None),
            saves=saves * (self.parts.checkpointing is not None),
            save_every_s=every["save_every"].seconds,
        )
        return {} if eta_s is None else {"eta_s": eta_s}

    def epoch_record(self) -> Record | None:
        """Return the record of the epoch that ended at this step, and begin the next one. Returns
        None if the checkpoint of an older version left out the beginning of the epoch.
        """
        step, every = self.state.step, self.parts.timetable.epoch
        meter, clock = self.parts.run_state.meter, self.parts.run_state.clock
        ended, means = meter.epoch, meter.read_epoch()
        epoch_s = clock.trained_s() - clock.epoch_start_s
        self._begin_epoch()
        if ended is None or ended.start != every.last(step - 1):
            return None
        about = {"kind": "epoch", "step": step, "epoch": every.count(0, step)}
        return {**means, **about, "epoch_s": epoch_s}

    def _begin_epoch(self) -> None:
        step, run_state = self.state.step, self.parts.run_state
        run_state.meter.epoch = EpochTotals(start=step)
        run_state.clock.epoch_start_s = run_state.clock.trained_s()
        self.epoch_end = self.parts.timetable.epoch.next(step)

    @cached_property
    def _evaluation_steps(self) -> tuple[float, float]:
        samples_per_step = (
            self.parts.pipeline.plan.samples * self.parts.length.epochs / self.parts.length.steps
        )
        scoring = self.parts.evaluator
        during, at_end = (
            scoring.training_samples(scoring.names(at_end=at_end)) for at_end in (False, True)
        )
        return during / (3 * samples_per_step), at_end / (
            3 * samples_per_step
        )  # a forward pass is a third of a step
