"""When what is due in a run: the durations of its settings, as steps."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.durations import Every, Length, every, planned, seconds


@dataclass(frozen=True)
class Timetable:
    """All that a run's length decides. Step numbers count steps made."""

    length: Length
    log: Every
    evaluate: Every
    sample: Every  # besides the one after the last step
    save: Every  # in steps or in seconds
    keep: Every | None  # checkpoints kept for good
    stop_step: int  # the sitting ends here; the schedule does not know
    limit_s: float | None

    def evaluate_due(self, done: int) -> bool:
        """After the last step, and every `evaluate_every`."""
        return self.evaluate.due(done) or done == self.length.steps

    def sample_due(self, done: int) -> bool:
        """Every `sample_every`, but not after the last step: that has a sample of its own."""
        return self.sample.due(done) and done < self.length.steps

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`."""
        return self.log.due(done) or done == self.length.steps


def timetable(
    *,
    samples_per_epoch: int,
    batch_size: int,
    length: str,
    log_every: str,
    evaluate_every: str,
    sample_every: str | None,
    save_every: str,
    keep_every: str | None,
    stop_after: str | None,
    time_limit: str | None,
) -> Timetable:
    """The timetable that these settings mean; `ConfigError` names the one that cannot be understood."""
    whole = planned(length, samples_per_epoch=samples_per_epoch, batch_size=batch_size)
    stop_step = whole.steps
    if stop_after is not None:
        stop = planned(stop_after, samples_per_epoch=samples_per_epoch, batch_size=batch_size, setting="stop_after")
        stop_step = min(stop.steps, whole.steps)
    return Timetable(
        length=whole,
        log=every(log_every, length=whole, setting="log_every"),
        evaluate=every(evaluate_every, length=whole, setting="evaluate_every"),
        sample=every(sample_every, length=whole, setting="sample_every"),
        save=every(save_every, length=whole, time=True, setting="save_every"),
        keep=every(keep_every, length=whole, setting="keep_every") if keep_every else None,
        stop_step=stop_step,
        limit_s=seconds(time_limit, setting="time_limit") if time_limit else None,
    )
