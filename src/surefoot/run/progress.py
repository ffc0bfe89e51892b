"""The progress of a run: the remaining time, and the record of each completed epoch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cached_property

from surefoot.config.durations import NEVER, Interval
from surefoot.config.train_settings import Timetable
from surefoot.run.evaluation import Evaluations
from surefoot.tracking.record import Record
from surefoot.train.meter import EpochTotals
from surefoot.train.scorer import Evaluator
from surefoot.train.state_dict import RunState
from surefoot.train.timer import Event, RemainingTime


class Progress:
    """The remaining work and its expected time. `evaluated_step` is the last step with a due
    evaluation or sample.

    samples_per_epoch: of the training data. draws_samples and saves: the run does so.
    """

    def __init__(
        self,
        run_state: RunState,
        times: Timetable,
        evaluations: Evaluations,
        evaluator: Evaluator,
        *,
        samples_per_epoch: int,
        draws_samples: bool,
        saves: bool,
        say: Callable[[str], None],
    ) -> None:
        self.run_state = run_state
        self.state = run_state.state
        self.times = times
        self.evaluations = evaluations
        self.evaluator = evaluator
        self.samples_per_epoch = samples_per_epoch
        self.draws_samples = draws_samples
        self.saves = saves
        self.say = say
        self.remaining = RemainingTime()
        self.said_taken = False
        self.epoch_recorded_at = NEVER  # the step with the record of the current epoch
        every = times.epoch
        meter = run_state.meter
        if every.period is not None:
            if meter.epoch is None or not self._is_current(meter.epoch.start):
                self._begin_epoch(self.state.step)
            assert meter.epoch is not None
            self.epoch_recorded_at = self._recorded_at(every.next(meter.epoch.start))

    @contextmanager
    def timed(self, event: Event) -> Iterator[None]:
        """Time an evaluation, a sample or a save. The time of an interrupted evaluation is
        ignored.
        """
        now = self.run_state.clock.now
        start_s = now()
        yield
        if self.evaluations.due:
            return
        steps = 1.0
        if event == "evaluation":
            steps, _ = self._evaluation_steps
        self.remaining.add_event(event, now() - start_s, steps=steps)

    def eta(self, *, evaluated_step: int) -> dict[str, float]:
        """Return {"eta_s": seconds}, the remaining time with evaluations, samples and saves.
        Returns {} before a step is timed.
        """
        done = self.state.step
        last = self.times.length.steps
        every = self.times.every
        # the evaluation of this step follows its record
        evaluated = done if evaluated_step == done else done - 1
        evaluation_steps, final_evaluation_steps = self._evaluation_steps
        evaluations = 0
        if evaluated < last:
            evaluations = _count(every["evaluate_every"], evaluated, last)
        saves = 0
        if self.saves:
            saves = _count(every["save_every"], done - 1, last)
        samples = 0
        if self.draws_samples:
            samples = every["sample_every"].count(evaluated, last - 1) + 1
        eta_s = self.remaining.seconds(
            steps=last - done,
            evaluations=evaluations * evaluation_steps + final_evaluation_steps,
            samples=samples,
            saves=saves,
            save_every_s=every["save_every"].seconds,
        )
        return {} if eta_s is None else {"eta_s": eta_s}

    def epoch_record(self) -> Record | None:
        """Return the record of the last epoch that ended, before the meter is read, and begin the
        next one. Returns None if the checkpoint of an older version left out the beginning of the
        epoch.
        """
        step = self.state.step
        every = self.times.epoch
        meter, clock = self.run_state.meter, self.run_state.clock
        assert meter.epoch is not None
        end = every.last(step)
        start = every.last(end - 1)
        timed_from = self._recorded_at(meter.epoch.start) if meter.epoch.start else 0
        means = meter.read_epoch(start, end)
        spent_s = clock.trained_s() - clock.epoch_start_s
        self._begin_epoch(end)
        self.epoch_recorded_at = self._recorded_at(every.next(end))
        if means is None:
            return None
        epoch_s = spent_s * (end - start) / max(1, step - timed_from)
        about = {"kind": "epoch", "step": step, "epoch": every.count(0, end), "epoch_s": epoch_s}
        self._tell_of_taken(sorted(means.keys() & about.keys()))
        return {**means, **about}

    def _tell_of_taken(self, names: list[str]) -> None:
        """Say once in a session which values of the user a record of an epoch has no place for."""
        if names and not self.said_taken:
            self.said_taken = True
            self.say(
                f"note: the mean over an epoch of your own {' and '.join(names)} is not recorded,"
                " because records of epochs have a key of this name; training records have your"
                " values"
            )

    def _begin_epoch(self, start: int) -> None:
        clock = self.run_state.clock
        self.run_state.meter.epoch = EpochTotals(start)
        clock.epoch_start_s = clock.trained_s()

    def _is_current(self, start: int) -> bool:
        """Return True if an epoch begins with this step, and no change of the data has ended it."""
        every = self.times.epoch
        changed_at, _ = self.times.length.before
        is_ended = start < changed_at and every.last(changed_at) == changed_at
        return every.last(start) == start and not is_ended

    def _recorded_at(self, end: int) -> int:
        """Return the step with the record of an epoch that ends at step `end`. Epochs that are
        shorter than the interval of training records wait for the next one, as reading waits for
        the device.
        """
        log_every = self.times.every["log_every"]
        epoch, interval = self.times.epoch.period, log_every.period
        assert epoch is not None
        if interval is not None and Fraction(*epoch) >= Fraction(*interval):
            return end
        next_records = [log_every.next(end - 1), self.times.length.steps]
        if log_every.early is not None and log_every.early >= end:
            next_records.append(log_every.early)
        return min(next_records)

    @cached_property
    def _evaluation_steps(self) -> tuple[float, float]:
        """The cost of an evaluation during training, and of the one at the end, in training
        steps. A forward pass is a third of a step.
        """
        length = self.times.length
        samples_per_step = self.samples_per_epoch * length.epochs / length.steps
        during = self.evaluator.training_samples(self.evaluator.names(at_end=False))
        at_end = self.evaluator.training_samples(self.evaluator.names(at_end=True))
        return during / (3 * samples_per_step), at_end / (3 * samples_per_step)


def _count(every: Interval, done: int, last: int) -> int:
    """Return how often something is due after `done` steps, up to the last step, where it always
    is.
    """
    count = every.count(done, last)
    return count if every.due(last) else count + 1
