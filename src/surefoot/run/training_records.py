"""The records of training: what the meter measured, with rates, speed and the remaining time."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from surefoot.data.order import MicroBatches, samples_of
from surefoot.errors import ConfigError
from surefoot.memory import used_bytes
from surefoot.run.progress import Progress
from surefoot.tracking.logger import Journal
from surefoot.tracking.record import is_rate
from surefoot.train.meter import derived
from surefoot.train.state_dict import RunState

Derived = Mapping[str, Callable[[Mapping[str, float]], float]]


class TrainingRecords:
    """The training records of one session.

    order: the plan of the samples of each step. derived: the user's functions of recorded values.
    rates: returns the learning rates and momenta of the newest step by their names in a record.
    body_factors: returns the factors of the rates that the body of the loop wrote. splits: the names
    of all splits.
    """

    def __init__(
        self,
        run_state: RunState,
        journal: Journal,
        progress: Progress,
        *,
        order: MicroBatches,
        derived: Derived | None,
        rates: Callable[[], dict[str, float]],
        body_factors: Callable[[], dict[str, Any]],
        splits: Iterable[str],
        device: torch.device,
    ) -> None:
        self.state = run_state.state
        self.meter = run_state.meter
        self.clock = run_state.clock
        self.journal = journal
        self.progress = progress
        self.order = order
        self.derived = derived
        self.rates = rates
        self.body_factors = body_factors
        self.splits = splits
        self.device = device
        self.skipped = 0  # skipped steps in the records

    def write(self, *, evaluated_step: int) -> dict[str, Any]:
        """Write the record of the steps since the last one, and return its values. Synchronizes the
        device. `evaluated_step` is the last step with a due evaluation or sample.
        """
        done = self.state.step
        # the first steps of a session are timed separately
        first_steps = self.clock.first_steps
        steps = [index for index, *_ in self.meter.rows]
        timed_steps = [index for index in steps if index not in first_steps]
        values, skipped = self.meter.read(first_steps=first_steps)
        refuse_names_of_scores(values, self.splits)
        values |= derived(self.derived, values)
        times = self.clock.window()
        self.clock.first_steps = [index for index in first_steps if index >= done]

        trained_s = times["training_s"] + times["data_wait_s"]
        timed_targets = values.get("targets", 0.0) - values.get("starting_targets", 0.0)
        values["samples"] = samples_of(self.order, steps)
        if timed_targets > 0 and trained_s > 0:
            values["targets_per_s"] = timed_targets / trained_s
            values["samples_per_s"] = samples_of(self.order, timed_steps) / trained_s
        if timed_steps:
            values.setdefault("ms_per_step", 1000 * trained_s / len(timed_steps))
        frozen_count = self.state.trainable.flags.count(False)
        if frozen_count:
            values["frozen_tensors"] = frozen_count

        # the body may have logged values of such names, which stay
        logged_rates = [name for name in values if is_rate(name)]
        if logged_rates:
            values["logged_rates"] = logged_rates
        for name, rate in self.rates().items():
            values.setdefault(name, rate)
        values |= self.body_factors()
        self.progress.remaining.add_steps(
            len(timed_steps), training_s=trained_s, user_s=times["user_s"]
        )
        values |= self.progress.eta(evaluated_step=evaluated_step)
        values |= used_bytes(self.device)
        self.journal.write({"kind": "train", "step": done, **values, **times})
        self.skipped += len(skipped)
        self.meter.note_skipped(skipped, done=done)
        return values


def refuse_names_of_scores(values: Iterable[str], splits: Iterable[str]) -> None:
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
