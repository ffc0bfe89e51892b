"""Training the variants of a comparison, several at once: who is next, who is done, and what a person sees of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from surefoot.compare.progress import Screen, Standing
from surefoot.compare.trained import Direction, planned_steps, refuse_missing_score, watched
from surefoot.compare.trials import Outcome, Trial, Trials, is_over
from surefoot.tracking.format import duration, number

_LOOK_S = 0.2


class Chooser(Protocol):
    """Which variants are trained.

    total: all of them. over: those that were over before they could be trained here.
    """

    total: int
    over: int

    def next(self) -> str | None:
        """The next to be trained; None where there is none now: it is asked again when one has ended."""

    def saw(self, name: str, step: int, score: float) -> bool:
        """Take notice of a score; true where the variant is to be given up."""

    def ended(self, name: str, outcome: Outcome) -> None:
        """Take notice of how a variant ended."""


class InOrder:
    """One variant after the other, without those that are over."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        self.waiting = [name for name in names if not is_over(directory, name)]
        self.total = len(names)
        self.over = len(names) - len(self.waiting)

    def next(self) -> str | None:
        return self.waiting.pop(0) if self.waiting else None

    def saw(self, name: str, step: int, score: float) -> bool:
        del name, step, score
        return False  # nobody is given up

    def ended(self, name: str, outcome: Outcome) -> None: ...


class Sitting:
    """One stretch of training variants, until none is left or `stopping` says so."""

    def __init__(
        self,
        chooser: Chooser,
        trials: Trials,
        *,
        jobs: int,
        score: tuple[Direction, str] | None,
        screen: Screen,
        stopping: Callable[[], bool],
        shown: Mapping[str, str],
    ) -> None:
        self.chooser, self.trials, self.jobs, self.score = chooser, trials, jobs, score
        self.screen, self.stopping, self.shown = screen, stopping, shown
        self.standing: dict[str, Standing] = {}
        self.done = 0
        self.estimated = self.told = False

    def train(self) -> None:
        """Train all of them; each is saved and ends where it is to stop."""
        try:
            while self._begin() or self.trials.running:
                time.sleep(_LOOK_S)
                if self.stopping() and not self.told:
                    self.told = True
                    self.screen.leave()
                for trial in self.trials.running.values():
                    self._look(trial)
                for trial, outcome in self.trials.ended():
                    self._look(trial)
                    self._end(trial, outcome)
                self.screen.show({self._called(name): self.standing[name] for name in self.trials.running})
        finally:
            self.trials.close()
            self.screen.close()

    def _called(self, name: str) -> str:
        return self.shown.get(name, name)

    def _begin(self) -> bool:
        """Start as many as may run at once; true where one was started."""
        if self.stopping():
            self.trials.stop_all()
            return False
        begun = False
        while len(self.trials.running) < self.jobs and (name := self.chooser.next()) is not None:
            self.standing[name] = Standing()
            self.trials.start(name)
            begun = True
        return begun

    def _look(self, trial: Trial) -> None:
        how = self.standing[trial.name]
        for record in trial.records.new():
            if how.steps is None:
                path = self.trials.directory.path / trial.name
                how.steps, self.score = planned_steps(path), self.score or watched(path)
            how.take(record, score=None if self.score is None else self.score[1])
            if record["kind"] == "scores" and self.score is not None:
                refuse_missing_score(self.score, record, of=trial.name)
                if self.chooser.saw(trial.name, int(record["step"]), float(record[self.score[1]])):
                    self.trials.stop(trial, "pruned")
        if not self.estimated and trial.fresh and how.left_s is not None:
            self._estimate(trial, how.left_s)

    def _estimate(self, trial: Trial, left_s: float) -> None:
        """Say once how long it all takes, as far as the first of them tells."""
        self.estimated = True
        each_s = time.monotonic() - trial.started + left_s
        left = self.chooser.total - self.chooser.over - self.done
        if left > 1:
            rounds = -(-left // self.jobs)
            self.screen.say(f"about {duration(each_s * rounds)} for the {left} that are left, judging by the first")

    def _end(self, trial: Trial, outcome: Outcome) -> None:
        how = self.standing[trial.name]
        if outcome.status != "stopped":
            self.done += 1
        score = "" if how.score is None or self.score is None else f", {self.score[1]} {number(how.score)}"
        said = f": {outcome.said}" if outcome.said else ""
        self.screen.say(f"{self._called(trial.name)}: {outcome.status} at step {how.step}{score}{said}")
        self.chooser.ended(trial.name, outcome)
