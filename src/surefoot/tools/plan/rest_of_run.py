"""What is still to come in an existing run: its steps, settings, changes and learning rates, from
its files. Imports no torch, and executes nothing of the run's author.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.config.setting_change import SettingChange, in_effect
from surefoot.errors import CheckpointError, ConfigError
from surefoot.tools.change.preview import drawing
from surefoot.tools.plan.schedule_plot import LOOKED_AT, Trace
from surefoot.tracking.format import text_table
from surefoot.tracking.run_reader import newest_state, read_settings
from surefoot.train.changed_settings import described, in_words
from surefoot.train.recorded_settings import (
    Course,
    origins_of_present,
    read_recorded_settings,
    values_by_step,
)
from surefoot.train.skipped_steps import SKIP_STEPS


@dataclass(frozen=True)
class RestOfRun:
    """The steps of a run after its newest checkpoint.

    settings: those that can change, as the next step has them. to_come: the changes that hold later.
    course: None if only the run's program knows the sizes of its epochs or its schedule.
    """

    run: Path
    step: int
    length: int
    stopped_early: bool
    settings: Mapping[str, Any]
    changes: tuple[SettingChange, ...]
    origins: Mapping[str, str]
    course: Course | None

    @property
    def to_come(self) -> list[SettingChange]:
        return [change for change in self.changes if change.from_step > self.step]

    def lines(self) -> list[str]:
        """Return the plan of the rest as text."""
        lines = [f"{self.run}: {self._steps_left()}", "", "settings of the next step"]
        lines += [f"  {line}" for line in self._settings()]
        if self.to_come:
            lines += ["", "changes to come"]
            lines += [f"  {described(change)}" for change in self.to_come]
        rates = self._rates()
        if rates:
            lines += ["", "learning rate", *(f"  {line}" for line in rates)]
        return lines

    def _steps_left(self) -> str:
        if self.stopped_early:
            return f"early stopping has ended it at step {self.step:,}"
        left = self.length - self.step
        if left <= 0:
            return f"all {self.length:,} steps are completed"
        text = f"step {self.step:,} of {self.length:,}: {left:,} steps are left"
        if self.course is None:
            return text
        if not self.course.counts_samples:
            return text
        length = self.course.length
        samples = self.course.samples(self.step, self.length)
        return f"{text}, {samples / length.samples_per_epoch:,.2f} epochs with {samples:,} samples"

    def _settings(self) -> list[str]:
        histories = values_by_step(change for change in self.changes if change not in self.to_come)
        lines = []
        for name, value in self.settings.items():
            origin = self.origins.get(name, "")
            earlier = histories.get(name)
            if earlier is None and name == "schedule":
                earlier = histories.get("schedule.name")
            if earlier is not None:
                begin, _ = earlier[-1]
                was = ", ".join(in_words(other) for _, other in earlier[:-1])
                origin = f"changed at step {begin:,}, was {was}"
            source = f"  [{origin}]" if origin else ""
            lines.append(f"{name} = {in_words(value)}{source}")
        return lines

    def _rates(self) -> list[str]:
        """Return the rates of the next step, at each change to come, and of the last step, and draw
        those of all steps.
        """
        if self.step >= self.length:
            return []
        if self.course is None:
            return ["only its program knows it"]
        marked = {self.step: "next", self.length - 1: "last"}
        for change in self.to_come:
            if change.setting != SKIP_STEPS:
                marked.setdefault(change.from_step, "changed")
        rows = []
        for step, what in sorted(marked.items()):
            (rate,) = self.course.rates([step])
            rows.append((what, "step", f"{step:,}", f"{rate:.4g}"))
        return [*text_table(rows, left=(0, 3)), *drawing({"run": self.course}, self.step)]

    def trace(self) -> tuple[Trace, float | None] | None:
        """Return the learning rates of all steps, as factors of the highest one of the settings, and
        this one, which is None if no optimizer of ours has one rate; None if they are not known.
        """
        if self.course is None:
            return None
        bases = [lr for lr in self.course.lr_at.values() if lr]
        base = max(bases, default=None)
        stride = -(-self.length // LOOKED_AT)
        steps = np.unique([*range(0, self.length, stride), self.length - 1]).astype(np.int64)
        rates = np.array(self.course.rates(steps.tolist()), dtype=np.float64)
        return Trace(self.run.name, steps, rates / (base or 1.0), 0), base


def read_rest(run: Path) -> RestOfRun:
    """Return what is still to come in a run. Raises `CheckpointError` for a run without a readable
    checkpoint, and for an edited journal.
    """
    step, state = newest_state(run)
    if state is None:
        raise CheckpointError(
            "plan-without-checkpoint",
            problem=f"{run} has no readable checkpoint, from which it could go on",
            run=str(run),
        )
    recorded = read_recorded_settings(run)
    course = recorded.course()
    settings = recorded.at(step)
    settings.pop("optimizer.name", None)
    return RestOfRun(
        run,
        step,
        state.planned_steps if course is None else course.length.steps,
        state.stopped_early,
        settings,
        tuple(in_effect(recorded.changes)),
        _origins(run, recorded.changes),
        course,
    )


def _origins(run: Path, changes: Sequence[SettingChange]) -> dict[str, str]:
    """Return where the settings come from that were not changed, as far as its files say so."""
    origins = origins_of_present(run, changes)
    with suppress(OSError, ValueError, ConfigError):
        origins |= read_settings(run).origins  # which knows presets and flags
    return {name: origin for name, origin in origins.items() if origin != "changed"}
