"""Watching a score: which step was the best so far, and how many evaluations ago."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from surefoot.checkpoint.state_json import Watched
from surefoot.errors import ConfigError


@dataclass(frozen=True)
class EarlyStopping:
    """End a run whose watched score has not improved for `patience` evaluations.

    `watch` is "min SPLIT/SCORE" or "max SPLIT/SCORE"; only a change of more than `minimum_improvement` counts as one.
    """

    watch: str
    patience: int
    minimum_improvement: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ConfigError(f"early stopping: patience = {self.patience}: how many evaluations to wait, 1 or more")
        if not 0 <= self.minimum_improvement < math.inf:
            raise ConfigError(f"early stopping: minimum_improvement = {self.minimum_improvement}: a number from 0 on")


class Watch:
    """The best value of one score, the step it was seen at, and the evaluations since.

    A score that is not a number is neither an improvement nor a failed attempt: it uses up no patience.

    >>> watch = Watch("min held-out/loss")
    >>> [watch.improved(step, loss) for step, loss in enumerate([2.0, 1.5, math.nan, 1.7])]
    [True, True, False, False]
    >>> watch.step, watch.value, watch.waited
    (1, 1.5, 1)
    """

    def __init__(self, text: str, *, minimum_improvement: float = 0.0, patience: int | None = None) -> None:
        self.direction, self.score = parsed(text)
        self.minimum_improvement, self.patience = minimum_improvement, patience
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0

    @property
    def exhausted(self) -> bool:
        """True when there was no improvement for as many evaluations as there is patience."""
        return self.patience is not None and self.waited >= self.patience

    def improved(self, step: int, value: float) -> bool:
        """Take notice of the score after `step` steps; true where it is the best so far."""
        if math.isnan(value):
            return False
        gain = math.inf if self.value is None else (self.value - value) * (1 if self.direction == "min" else -1)
        if gain > self.minimum_improvement:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def state(self) -> Watched:
        """What a checkpoint holds, as JSON."""
        return {
            "direction": self.direction,
            "score": self.score,
            "value": None if self.value is None else repr(self.value),
            "step": self.step,
            "waited": self.waited,
        }

    def load_state(self, state: Watched | None) -> None:
        """Put back what `state` gave; where another score was watched, what was best of it says nothing of this one."""
        if state is None or (state["direction"], state["score"]) != (self.direction, self.score):
            return
        self.value = None if state["value"] is None else float(state["value"])
        self.step, self.waited = state["step"], state["waited"]


def watched(best: str | None, early_stopping: EarlyStopping | None, *, splits: Collection[str]) -> Watch | None:
    """The one score that a run watches, for what is best or for stopping early; None for neither."""
    if early_stopping is not None and best not in (None, early_stopping.watch):
        raise ConfigError(
            f"best = {best!r} and early stopping watches {early_stopping.watch!r}: a run watches one score"
        )
    text = best if early_stopping is None else early_stopping.watch
    if text is None:
        return None
    watch = Watch(text)
    if early_stopping is not None:
        watch = Watch(text, minimum_improvement=early_stopping.minimum_improvement, patience=early_stopping.patience)
    refuse_unknown_split(watch.score, splits)
    return watch


def refuse_unknown_split(score: str, splits: Collection[str], *, by: str = "") -> None:
    if score.split("/", maxsplit=1)[0] not in splits:
        raise ConfigError(
            f"{by}cannot watch {score!r}: no split of that name; there are: {', '.join(splits) or 'none'}"
        )


def parsed(text: str) -> tuple[Literal["min", "max"], str]:
    """Direction and score of "min SPLIT/SCORE"; anything else is a `ConfigError`.

    >>> parsed("max held-out/accuracy")
    ('max', 'held-out/accuracy')
    """
    match text.split(maxsplit=1):
        case ["min", score]:
            return "min", score
        case ["max", score]:
            return "max", score
    raise ConfigError(
        f"cannot watch {text!r}: say which way is better, as in 'min held-out/loss' or 'max held-out/accuracy'"
    )
