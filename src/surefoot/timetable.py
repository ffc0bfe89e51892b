"""When what is due in a run: the durations of its settings, as steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from surefoot.durations import Every, Length, every, planned, seconds


@dataclass(frozen=True)
class Timetable:
    """All that a run's length decides. Step numbers count steps made."""

    length: Length
    log: Every
    evaluate: Every
    sample: Every  # besides the one after the last step
    watch: Every  # steps of which the layers are looked at
    compare: Every  # the weights of ranks with each other
    save: Every  # in steps or in seconds
    keep: Every | None  # checkpoints kept for good
    stop_step: int  # the sitting ends here; the schedule does not know
    limit_s: float | None
    written: dict[str, str | None]  # log, evaluate, sample and watch as they were given, percentages and all

    def begun_with(self, began: Length) -> Timetable:
        """The same for a run that began with another length, of which its percentages are, as are those of its schedule."""
        found = _intervals(self.written, began)
        return replace(self, log=found["log"], evaluate=found["evaluate"], sample=found["sample"], watch=found["watch"])

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
    compare_ranks_every: str = "1000 steps",
    watch_every: str | None = None,
) -> Timetable:
    """The timetable that these settings mean; `ConfigError` names the one that cannot be understood."""
    whole = planned(length, samples_per_epoch=samples_per_epoch, batch_size=batch_size)
    stop_step = whole.steps
    if stop_after is not None:
        stop = planned(stop_after, samples_per_epoch=samples_per_epoch, batch_size=batch_size, setting="stop_after")
        stop_step = min(stop.steps, whole.steps)
    written = {"log": log_every, "evaluate": evaluate_every, "sample": sample_every, "watch": watch_every}
    return Timetable(
        length=whole,
        **_intervals(written, whole),
        compare=every(compare_ranks_every, length=whole, setting="compare_ranks_every"),
        save=every(save_every, length=whole, time=True, setting="save_every"),
        keep=every(keep_every, length=whole, setting="keep_every") if keep_every else None,
        stop_step=stop_step,
        limit_s=seconds(time_limit, setting="time_limit") if time_limit else None,
        written=written,
    )


def _intervals(written: dict[str, str | None], length: Length) -> dict[str, Every]:
    return {name: every(text, length=length, setting=f"{name}_every") for name, text in written.items()}
