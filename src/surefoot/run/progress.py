"""The progress of a run: the remaining time for its records, and completed epochs for the
console.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from surefoot.mean import Mean
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.tracking.record import Record
from surefoot.train.timer import Event, RemainingTime


class Progress:
    """The remaining work and its expected time. `evaluated_step` is the last step with a due
    evaluation or sample.
    """

    def __init__(self, parts: RunComponents, evaluations: Evaluations) -> None:
        self.parts, self.state, self.evaluations = parts, parts.state, evaluations
        self.remaining = RemainingTime()
        self.epochs = 0  # completed epochs
        self.epoch_loss, self.epoch_s = Mean(0.0, 0), 0.0  # since the end of the last epoch

    def opened(self) -> None:
        self.epochs = self.parts.timetable.epoch.count(0, self.state.step)

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

    def show_epoch(
        self, values: Record, times: Mapping[str, float], *, evaluated_step: int
    ) -> None:
        """Print the epoch that ended since the last record: its mean loss, and its time in this
        session.
        """
        step, epoch = self.state.step, self.parts.timetable.epoch
        targets = values.get("targets", 0.0)
        if targets:  # else the loss is NaN
            loss = values.get("loss_applied", values.get("loss", 0.0))
            self.epoch_loss += Mean(loss * targets, targets)
        self.epoch_s += (
            times["starting_s"] + times["training_s"] + times["data_wait_s"] + times["user_s"]
        )
        if epoch.count(0, step) == self.epochs:
            return
        self.epochs = epoch.count(0, step)
        record: Record = {
            "kind": "epoch",
            "step": step,
            "epoch": self.epochs,
            "epoch_s": self.epoch_s,
        }
        record |= {"epochs": epoch.count(0, self.parts.length.steps), "loss": self.epoch_loss.value}
        record["is_evaluated"] = evaluated_step != step and self.evaluations.scores_due(
            step
        )  # evaluated next
        self.epoch_loss, self.epoch_s = Mean(0.0, 0), 0.0
        if self.parts.console is not None:
            self.parts.console.write(record)

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
