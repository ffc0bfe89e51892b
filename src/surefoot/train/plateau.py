"""A lower learning rate where a score no longer improves: feedback from evaluations to the steps that follow them.

The decision is made between steps, from scores that are on the record anyway; no step reads a tensor for it. How the factor
reaches the optimizers: `State.rate_factor`, with which the loop multiplies what the schedule says.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from surefoot.checkpoint.state_json import Lowered
from surefoot.errors import ConfigError
from surefoot.train.early_stopping import EarlyStopping, parsed, refuse_unknown_split


@dataclass(frozen=True)
class Plateau:
    """Multiply every learning rate by `factor` whenever the watched score has not improved for `patience` evaluations.

    `watch` is "min SPLIT/SCORE" or "max SPLIT/SCORE"; only a change of more than `minimum_improvement` counts as one. A step's
    rate is its schedule's times all reductions so far, which together are never less than `floor`. After a reduction
    `cooldown` evaluations use up no patience. As torch's ReduceLROnPlateau with threshold_mode="abs" and a patience one less.
    """

    watch: str
    patience: int
    factor: float = 0.5
    floor: float = 0.01
    cooldown: int = 0
    minimum_improvement: float = 0.0

    def __post_init__(self) -> None:
        parsed(self.watch)
        wrong = {
            f"patience = {self.patience}: how many evaluations to wait, 1 or more": self.patience < 1,
            f"factor = {self.factor}: what the learning rate is multiplied by, between 0 and 1": not 0
            < self.factor
            < 1,
            f"floor = {self.floor}: the lowest factor on the schedule, from 0 to below 1": not 0 <= self.floor < 1,
            f"cooldown = {self.cooldown}: how many evaluations, 0 or more": self.cooldown < 0,
            f"minimum_improvement = {self.minimum_improvement}: a number from 0 on": not 0
            <= self.minimum_improvement
            < math.inf,
        }
        if problems := [f"plateau: {problem}" for problem, found in wrong.items() if found]:
            raise ConfigError("\n".join(problems))

    @property
    def score(self) -> str:
        """The name of the watched score."""
        return parsed(self.watch)[1]

    @property
    def in_words(self) -> str:
        """What it does, in a line.

        >>> print(Plateau("max held-out/accuracy", patience=3).in_words)
        times 0.5 after 3 evaluations without a better held-out/accuracy, and again, down to 0.01 of these
        """
        return f"times {self.factor:g} after {self.evaluations} without a better {self.score}, and again, down to {self.floor:g} of these"

    @property
    def evaluations(self) -> str:
        """How many it waits, in words."""
        return "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"


@dataclass(frozen=True)
class Standing:
    """What the scores so far have come to."""

    factor: float = 1.0
    best: float | None = None
    waited: int = 0  # evaluations without a better score, since the best or the last reduction
    cooling: int = 0  # evaluations to come that use up no patience
    not_numbers: int = 0  # scores that were NaN
    step: int = 0  # of the last score


def following(plateau: Plateau, before: Standing, *, step: int, score: float) -> Standing:
    """Where a plateau stands after one more score: a pure function of the recorded scores.

    They are equal on every rank, and so is the decision, without asking anybody. A score that is not a number leaves all as it
    was: it is no improvement, and uses up neither patience nor cool-down; it is counted.

    >>> plateau, standing = Plateau("min held-out/loss", patience=2), Standing()
    >>> for step, loss in enumerate([2.0, 2.5, math.nan, 3.0, 1.0], start=1):
    ...     standing = following(plateau, standing, step=step, score=loss)
    ...     print(standing.factor, standing.waited, standing.not_numbers)
    1.0 0 0
    1.0 1 0
    1.0 1 1
    0.5 0 1
    0.5 0 1
    """
    if math.isnan(score):
        return replace(before, step=step, not_numbers=before.not_numbers + 1)
    sign = 1.0 if parsed(plateau.watch)[0] == "min" else -1.0
    best = sign * math.inf if before.best is None else before.best
    improved = sign * (best - score) > plateau.minimum_improvement  # never for infinity against infinity, which is NaN
    waited = 0 if improved or before.cooling else before.waited + 1
    seen = replace(before, step=step, best=score if improved else before.best)
    if waited < plateau.patience:
        return replace(seen, waited=waited, cooling=max(0, before.cooling - 1))
    lowered = max(before.factor * plateau.factor, plateau.floor)
    return replace(seen, waited=0, cooling=plateau.cooldown, factor=lowered)


class Feedback:
    """A plateau over a run: where it stands now, in words and in a checkpoint."""

    def __init__(self, plateau: Plateau) -> None:
        self.plateau = plateau
        self.standing = Standing()

    def saw(self, step: int, score: float) -> str | None:
        """Take notice of the score after `step` steps; what there is to tell of it, in one line."""
        before, plateau = self.standing, self.plateau
        self.standing = now = following(plateau, before, step=step, score=score)
        if now.not_numbers > before.not_numbers:
            return (
                f"warning: {plateau.score} after step {step:,} is not a number ({now.not_numbers} so far):"
                " neither better nor worse, and no patience is used up"
            )
        if now.factor == before.factor:
            return None
        how = "halved" if now.factor == 0.5 * before.factor else f"multiplied by {now.factor / before.factor:.3g}"
        floor = ", its floor" if now.factor == plateau.floor else ""
        return (
            f"learning rate {how} after {plateau.evaluations} without a better {plateau.score}:"
            f" {now.factor:.3g} of the schedule's from step {step:,} on{floor}"
        )

    def state(self) -> Lowered:
        """What a checkpoint holds, as JSON."""
        now = self.standing
        best = None if now.best is None else repr(now.best)
        return {**asdict(now), "best": best}  # type: ignore[typeddict-item]

    def load_state(self, state: Lowered | None) -> None:
        """Put back what `state` gave; nothing where a run without a plateau was saved."""
        if state is not None:
            best = None if state["best"] is None else float(state["best"])
            self.standing = Standing(**{**state, "best": best})  # type: ignore[arg-type]


def feedback(
    plateau: Plateau | None, early_stopping: EarlyStopping | None, *, splits: Collection[str]
) -> Feedback | None:
    """The plateau of a run that scores these splits; `ConfigError` for one that could never lower a rate."""
    if plateau is None:
        return None
    refuse_unknown_split(plateau.score, splits, by="plateau: ")
    if early_stopping is not None:
        refuse_end_before_reduction(plateau, early_stopping)
    return Feedback(plateau)


def refuse_end_before_reduction(plateau: Plateau, early_stopping: EarlyStopping) -> None:
    """Raise `ConfigError` where early stopping ends the run no later than its learning rate is lowered for the first time."""
    same = plateau.watch == early_stopping.watch
    never_later = early_stopping.minimum_improvement >= plateau.minimum_improvement
    if same and never_later and early_stopping.patience <= plateau.patience:
        waits, several = early_stopping.patience, early_stopping.patience != 1
        shorter = f"--plateau {max(1, waits // 3)}, or " if several else ""  # nothing is shorter than 1
        raise ConfigError(
            f"early stopping waits {waits} evaluation{'s' * several} and plateau {plateau.patience} for the same score:"
            " the run would end before its learning rate is ever lowered\n"
            f"  try: {shorter}--early-stopping {3 * plateau.patience}"
        )
