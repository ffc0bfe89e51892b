"""Whether the first steps of a session train: the body of the loop updates, and some samples count."""

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.errors import ConfigError
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES
from surefoot.train.meter import Meter

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


class TrainingCheck:
    """The check of one session. `first_step` is its first one, `last_step` the length of the run."""

    def __init__(
        self, meter: Meter, notes: SessionNotes, *, first_step: int, last_step: int
    ) -> None:
        self.meter = meter
        self.notes = notes
        self.judged_steps = min(_JUDGED_STEPS, last_step)
        self.has_updated = False
        self.steps_without_update = 0  # up to the first update
        begins_with_first_step = bool(meter.rows) and meter.rows[0][0] == 0
        # a record of an earlier session has samples that were not left out
        self.has_trained = first_step > 0 and not begins_with_first_step

    def check_updates(self) -> None:
        """Say once that the body of a loop over `run.steps()` has updated nothing."""
        if self.has_updated:
            return
        norms = [grad_norm for _, _, _, grad_norm, _, _ in self.meter.rows]
        if any(norm is not None for norm in norms):
            self.has_updated = True
            return
        self.steps_without_update += len(norms)
        if self.steps_without_update >= self.judged_steps:
            self.notes.say_once(
                "no-update",
                f"note: none of {self.steps_without_update:,} steps has called"
                " forward_backward(step) and update(step), so no weight has changed;"
                " `for step in run:` calls both",
            )

    def check_samples(self, values: Mapping[str, Any], *, step: int) -> None:
        """Say once that samples of a training record were left out. Raises `ConfigError` if none of
        the first steps of a run had others.
        """
        skipped = values.get(SKIPPED_SAMPLES, 0.0)
        if skipped < values["samples"]:
            self.has_trained = True
        if not skipped:
            return
        if not self.has_trained and step >= self.judged_steps:
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
