"""Decisions based on a score: the best step, early stopping, and learning-rate reduction on a
plateau.
"""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

from surefoot.checkpoint.state_json import Lowered, Watched
from surefoot.config.keywords import known_keywords, parsed, unmonitored
from surefoot.errors import ConfigError


@known_keywords
@dataclass(frozen=True)
class EarlyStopping:
    """A rule that ends a run after `patience` evaluations without an improvement of the monitored
    score.

    `monitor` is "min SPLIT/METRIC" or "max SPLIT/METRIC". Only a change of more than `min_delta` is
    an improvement.

    >>> EarlyStopping("min val/loss", patience=5)
    EarlyStopping(monitor='min val/loss', patience=5, min_delta=0.0)
    """

    monitor: str
    patience: int
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        parsed(self.monitor, by="early_stopping: ")
        if self.patience < 1:
            raise ConfigError(
                f"early stopping: patience = {self.patience} must be 1 evaluation or more"
            )
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(
                f"early stopping: min_delta = {self.min_delta} must be a finite number of at least 0"
            )


@known_keywords
@dataclass(frozen=True)
class ReduceLROnPlateau:
    """A rule that multiplies every learning rate by `factor` after `patience` evaluations without
    an improvement.

    `monitor` and `min_delta` mean the same as in `EarlyStopping`. Each learning rate is the
    schedule's value times the product of all reductions, which never falls below `min_lr_ratio`.
    The `cooldown` evaluations after a reduction do not count toward `patience`. The rule equals
    torch's ReduceLROnPlateau with threshold_mode="abs" and a patience smaller by 1.

    >>> print(ReduceLROnPlateau("max val/accuracy", patience=2, factor=0.1).in_words)
    multiplied by 0.1 after 2 evaluations without a better val/accuracy, repeatedly, down to 0.01 of the schedule
    """

    monitor: str
    patience: int
    factor: float = 0.5
    min_lr_ratio: float = 0.01
    cooldown: int = 0
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        parsed(self.monitor, by="plateau: ")
        ratio, min_delta = self.min_lr_ratio, self.min_delta
        needs = {
            f"patience = {self.patience} must be 1 evaluation or more": self.patience >= 1,
            f"factor = {self.factor} must be between 0 and 1 (it multiplies the learning rate)": 0
            < self.factor
            < 1,
            f"min_lr_ratio = {ratio} must be at least 0 and below 1 (the lowest factor)": 0
            <= ratio
            < 1,
            f"cooldown = {self.cooldown} must be 0 evaluations or more": self.cooldown >= 0,
            f"min_delta = {min_delta} must be a finite number of at least 0": 0
            <= min_delta
            < math.inf,
        }
        if problems := [f"plateau: {problem}" for problem, is_met in needs.items() if not is_met]:
            raise ConfigError("\n".join(problems))

    @property
    def score(self) -> str:
        """The name of the monitored score."""
        return parsed(self.monitor)[1]

    @property
    def in_words(self) -> str:
        """A one-line description of the rule for the header.

        >>> print(ReduceLROnPlateau("max val/accuracy", patience=3).in_words)
        multiplied by 0.5 after 3 evaluations without a better val/accuracy, repeatedly, down to 0.01 of the schedule
        """
        after = f"after {self.evaluations} without a better {self.score}"
        return f"multiplied by {self.factor:g} {after}, repeatedly, down to {self.min_lr_ratio:g} of the schedule"

    @property
    def evaluations(self) -> str:
        """The patience as text, such as "3 evaluations"."""
        return "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"


class Watch:
    """The best value of one score, its step, and the number of evaluations since. NaN scores are
    ignored.

    >>> watch = Watch("min val/loss")
    >>> [watch.improved(step, loss) for step, loss in enumerate([2.0, 1.5, math.nan, 1.7])]
    [True, True, False, False]
    >>> watch.step, watch.value, watch.waited
    (1, 1.5, 1)
    """

    def __init__(self, text: str, early_stopping: EarlyStopping | None = None) -> None:
        self.direction, self.score = parsed(text)
        self.patience = None if early_stopping is None else early_stopping.patience
        self.min_delta = 0.0 if early_stopping is None else early_stopping.min_delta
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0

    @property
    def monitored(self) -> dict[str, str]:
        """The keyword that names the score, and its text."""
        return {
            "best" if self.patience is None else "early_stopping": f"{self.direction} {self.score}"
        }

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def improved(self, step: int, value: float) -> bool:
        """Record the score after `step` steps; return True if it is the best so far."""
        if math.isnan(value):
            return False
        gain = (
            math.inf
            if self.value is None
            else (self.value - value) * (1 if self.direction == "min" else -1)
        )
        if gain > self.min_delta:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def state(self) -> Watched:
        value = None if self.value is None else repr(self.value)
        return Watched(
            direction=self.direction,
            score=self.score,
            value=value,
            step=self.step,
            waited=self.waited,
        )

    def load_state(self, state: Watched | None) -> None:
        """Restore the dictionary returned by `state`, unless the checkpoint monitored another
        score.
        """
        if state is not None and (state["direction"], state["score"]) == (
            self.direction,
            self.score,
        ):
            self.value = None if state["value"] is None else float(state["value"])
            self.step, self.waited = state["step"], state["waited"]


@dataclass(frozen=True)
class Standing:
    """The state of a plateau after the scores so far."""

    factor: float = 1.0
    best: float | None = None
    waited: int = 0  # evaluations since the best score or the last reduction
    cooling: int = 0  # remaining cooldown evaluations
    not_numbers: int = 0  # scores that were NaN
    step: int = 0  # of the last score


def following(plateau: ReduceLROnPlateau, before: Standing, *, step: int, score: float) -> Standing:
    """Return a plateau's state after one more score. The function is pure, so all ranks agree. NaN
    scores are only counted.

    >>> plateau, standing = ReduceLROnPlateau("min val/loss", patience=2), Standing()
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
    sign = 1.0 if parsed(plateau.monitor)[0] == "min" else -1.0
    best = sign * math.inf if before.best is None else before.best
    improved = sign * (best - score) > plateau.min_delta  # False for inf - inf, which is NaN
    waited = 0 if improved or before.cooling else before.waited + 1
    updated = replace(before, step=step, best=score if improved else before.best)
    if waited < plateau.patience:
        return replace(updated, waited=waited, cooling=max(0, before.cooling - 1))
    lowered = max(before.factor * plateau.factor, plateau.min_lr_ratio)
    return replace(updated, waited=0, cooling=plateau.cooldown, factor=lowered)


@dataclass
class Feedback:
    """The plateau rule of a run with its current state; `State.lr_factor` passes the factor to the
    optimizers.
    """

    plateau: ReduceLROnPlateau
    standing: Standing = Standing()

    def update(self, step: int, score: float) -> str | None:
        """Record the score after `step` steps; return a one-line message about a reduction or a NaN
        score, or None.
        """
        before, plateau = self.standing, self.plateau
        self.standing = now = following(plateau, before, step=step, score=score)
        if now.not_numbers > before.not_numbers:
            return (
                f"warning: {plateau.score} after step {step:,} is NaN ({now.not_numbers} so far):"
                " it counts as neither better nor worse, and uses up no patience"
            )
        if now.factor == before.factor:
            return None
        how = (
            "halved"
            if now.factor == 0.5 * before.factor
            else f"multiplied by {now.factor / before.factor:.3g}"
        )
        return (
            f"learning rate {how} after {plateau.evaluations} without a better {plateau.score}:"
            f" {now.factor:.3g} times the schedule from step {step:,}{', the minimum' * (now.factor == plateau.min_lr_ratio)}"
        )

    def state(self) -> Lowered:
        best = self.standing.best
        return {**asdict(self.standing), "best": None if best is None else repr(best)}  # type: ignore[typeddict-item]

    def load_state(self, state: Lowered | None) -> None:
        if state is not None:
            best = None if state["best"] is None else float(state["best"])
            self.standing = Standing(**{**state, "best": best})  # type: ignore[arg-type]


def watched(
    best: str | None, early_stopping: EarlyStopping | None, *, splits: Collection[str]
) -> Watch | None:
    """Return the tracker of `best` or early stopping, or None. Raises `ConfigError` if the two name
    different scores.
    """
    if early_stopping is not None and best not in (None, early_stopping.monitor):
        other = early_stopping.monitor
        raise ConfigError(
            f"best = {best!r} and early stopping monitors {other!r}: both must name the same metric\n  leave out best, or make them equal"
        )
    text = best if early_stopping is None else early_stopping.monitor
    if text is None:
        return None
    by = "best" if early_stopping is None else "early_stopping"
    parsed(text, by=f"{by}: ")
    _refuse_unknown_split(by, text, splits)
    return Watch(text, early_stopping)


def feedback(
    plateau: ReduceLROnPlateau | None,
    early_stopping: EarlyStopping | None,
    *,
    splits: Collection[str],
) -> Feedback | None:
    """Return the plateau rule of a run, or None. Raises `ConfigError` if the rule could never
    reduce a learning rate.
    """
    if plateau is not None:
        _refuse_unknown_split("plateau", plateau.monitor, splits)
    if plateau is not None and early_stopping is not None:
        refuse_end_before_reduction(plateau, early_stopping)
    return None if plateau is None else Feedback(plateau)


def refuse_end_before_reduction(plateau: ReduceLROnPlateau, early_stopping: EarlyStopping) -> None:
    """Raise `ConfigError` if early stopping would end the run before the first learning-rate
    reduction.
    """
    same = plateau.monitor == early_stopping.monitor and early_stopping.patience <= plateau.patience
    if same and early_stopping.min_delta >= plateau.min_delta:
        waits, several = early_stopping.patience, early_stopping.patience != 1
        shorter = f"--plateau.patience {max(1, waits // 3)} for the plateau, or " * several
        raise ConfigError(
            f"early stopping waits {waits} evaluation{'s' * several} and plateau {plateau.patience} for the same metric:"
            " the run would end before the first learning-rate reduction\n"
            f"  try: {shorter}--early-stopping.patience {3 * plateau.patience} for early stopping"
        )


def _refuse_unknown_split(by: str, text: str, splits: Collection[str]) -> None:
    score = parsed(text)[1]
    if score.split("/", maxsplit=1)[0] not in splits:
        metric = score.rpartition("/")[2]
        why = f"no split has that name; available: {', '.join(splits) or 'none'}"
        raise unmonitored(by, text, why, scores=[f"{split}/{metric}" for split in splits])
