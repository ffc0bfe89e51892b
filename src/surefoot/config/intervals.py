"""When what is due in a run: the durations of its settings, as steps."""

from dataclasses import dataclass

from surefoot.config.durations import Every, Length, planned, seconds
from surefoot.config.setting import cadences
from surefoot.config.train_settings import TrainSettings


@dataclass
class Timetable:
    """All that a run's length decides. Step numbers count steps made."""

    settings: TrainSettings
    length: Length
    every: dict[str, Every]  # by the name of its setting
    stop_step: int  # the session ends here; the schedule does not know
    limit_s: float | None

    def begin_with(self, began: Length) -> None:
        """Take percentages of the length with which the run began, as those of its schedule are."""
        self.every = cadences(self.settings, length=began)

    def evaluate_due(self, done: int) -> bool:
        """After the last step, and every `evaluate_every`."""
        return self.every["evaluate_every"].due(done) or done == self.length.steps

    def sample_due(self, done: int) -> bool:
        """Every `sample_every`, but not after the last step: that has a sample of its own."""
        return self.every["sample_every"].due(done) and done < self.length.steps

    def log_due(self, done: int) -> bool:
        """After the last step, and every `log_every`."""
        return self.every["log_every"].due(done) or done == self.length.steps


def timetable(settings: TrainSettings, *, samples_per_epoch: int, batch_size: int) -> Timetable:
    """The timetable that settings mean for data of that size; `ConfigError` names the one that cannot be understood."""
    length = planned(settings.length, samples_per_epoch=samples_per_epoch, batch_size=batch_size)
    stop_step = length.steps
    if settings.stop_after is not None:
        stop = planned(
            settings.stop_after, samples_per_epoch=samples_per_epoch, batch_size=batch_size, setting="stop_after"
        )
        stop_step = min(stop.steps, length.steps)
    limit_s = None if settings.time_limit is None else seconds(settings.time_limit, setting="time_limit")
    return Timetable(settings, length, cadences(settings, length=length), stop_step, limit_s)
