"""Decisions based on a score: the best step, early stopping, and learning-rate reduction on a
plateau.
"""

import math
import re
from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from surefoot.checkpoint.state_json import PlateauState, RunnerUp, WatchedScore
from surefoot.config.behavior import BEST_IS_STRICT
from surefoot.config.keywords import known_keywords, parse_score, unmonitored
from surefoot.errors import ConfigError, Remedy, Setting, out_of_range, together

TRAINING = "train/"  # the scores of training records, if no split has this name


def gains(min_delta: float | str) -> tuple[float, float]:
    """Return the absolute gain and the gain relative to the best value that an improvement needs.

    >>> gains(0.02), gains("1%")
    ((0.02, 0.0), (0.0, 0.01))
    """
    if isinstance(min_delta, str):
        return 0.0, float(min_delta.removesuffix("%")) / 100
    return min_delta, 0.0


def least_gain(min_delta: float | str, best: float) -> float:
    """Return the gain over the value `best` that is not yet an improvement. "1%" is relative to its
    absolute value.

    >>> least_gain(0.02, 2.0), least_gain("1%", 2.0), least_gain("1%", math.inf)
    (0.02, 0.02, 0.0)
    """
    absolute, relative = gains(min_delta)
    if not math.isfinite(best):
        return absolute
    return absolute + relative * abs(best)


def _improvement(min_delta: float | str) -> str:
    """Return what follows "improved" or "a better score", such as " by more than 1%", or ""."""
    if gains(min_delta) == (0.0, 0.0):
        return ""
    least = min_delta if isinstance(min_delta, str) else f"{min_delta:g}"
    return f" by more than {least}"


def _wrong_waiting(rule: "EarlyStopping | ReduceLROnPlateau", name: str) -> list[ConfigError]:
    """Return what is wrong with the `patience` and the `min_delta` of a rule."""
    problems = []
    if rule.patience < 1:
        problems.append(out_of_range(f"{name}.patience", rule.patience, "1 evaluation or more"))
    delta = rule.min_delta
    if isinstance(delta, str):
        is_delta = re.fullmatch(r"[0-9]+(\.[0-9]+)?%", delta) is not None
    else:
        is_number = isinstance(delta, int | float) and not isinstance(delta, bool)
        is_delta = is_number and 0 <= delta < math.inf
    if not is_delta:
        meaning = 'a finite number of at least 0, or a share of the best value such as "1%"'
        problems.append(out_of_range(f"{name}.min_delta", delta, meaning))
    return problems


def _evaluations(count: int) -> str:
    return "1 evaluation" if count == 1 else f"{count} evaluations"


@known_keywords
@dataclass(frozen=True)
class EarlyStopping:
    """A rule that ends a run after `patience` evaluations without an improvement of the monitored
    score.

    `monitor` is "min SPLIT/METRIC" or "max SPLIT/METRIC". "min train/loss", or "train/" before
    another name in the training records, monitors these records, and `patience` counts records
    then. Only a change of more than `min_delta` is an improvement: a number, or a share of the best
    value such as "1%". Which checkpoint is the best does not depend on `min_delta`.

    >>> EarlyStopping("min val/loss", patience=5)
    EarlyStopping(monitor='min val/loss', patience=5, min_delta=0.0)
    """

    monitor: str
    patience: int
    min_delta: float | str = 0.0

    def __post_init__(self) -> None:
        parse_score(self.monitor, setting="early_stopping.monitor")
        problems = _wrong_waiting(self, "early_stopping")
        if problems:
            raise together(problems)


@known_keywords
@dataclass(frozen=True)
class ReduceLROnPlateau:
    """A rule that multiplies every learning rate by `factor` after `patience` evaluations without
    an improvement.

    `monitor` and `min_delta` mean the same as in `EarlyStopping`. Each learning rate is the
    schedule's value times the product of all reductions, which never falls below `min_lr_ratio`.
    The `cooldown` evaluations after a reduction do not count toward `patience`. The rule equals
    torch's ReduceLROnPlateau with a patience smaller by 1, and threshold_mode="abs" for a number as
    `min_delta` or "rel" for a share such as "0.01%", torch's default. For a score below 0, torch's
    share has the other sign.

    >>> print(ReduceLROnPlateau("max val/accuracy", patience=2, factor=0.1).in_words)
    multiplied by 0.1 after 2 evaluations without a better val/accuracy, repeatedly, down to 0.01 of the schedule
    """

    monitor: str
    patience: int
    factor: float = 0.5
    min_lr_ratio: float = 0.01
    cooldown: int = 0
    min_delta: float | str = 0.0

    def __post_init__(self) -> None:
        parse_score(self.monitor, setting="plateau.monitor")
        problems = _wrong_waiting(self, "plateau")
        if not 0 < self.factor < 1:
            meaning = "between 0 and 1 (it multiplies the learning rate)"
            problems.append(out_of_range("plateau.factor", self.factor, meaning))
        if not 0 <= self.min_lr_ratio < 1:
            meaning = "at least 0 and below 1 (the lowest factor)"
            problems.append(out_of_range("plateau.min_lr_ratio", self.min_lr_ratio, meaning))
        if self.cooldown < 0:
            problems.append(
                out_of_range("plateau.cooldown", self.cooldown, "0 or more evaluations")
            )
        if problems:
            raise together(problems)

    @property
    def score(self) -> str:
        """The name of the monitored score."""
        return parse_score(self.monitor)[1]

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
        return _evaluations(self.patience)


class ScoreWatch:
    """The best value of one score, its step, and the number of values since: the patience of an
    early-stopping rule. NaN scores are ignored.

    >>> watch = ScoreWatch("min val/loss")
    >>> [watch.improved(step, loss) for step, loss in enumerate([2.0, 1.5, math.nan, 1.7])]
    [True, True, False, False]
    >>> watch.step, watch.value, watch.waited
    (1, 1.5, 1)
    """

    by = "early_stopping"  # the keyword that names the score

    def __init__(
        self, text: str, rule: EarlyStopping | None = None, *, of_training: bool = False
    ) -> None:
        self.direction, self.score = parse_score(text)
        self.of_training = of_training  # the score is a value of training records
        self.patience = None if rule is None else rule.patience
        self.min_delta = 0.0 if rule is None else rule.min_delta
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0

    @property
    def text(self) -> str:
        return f"{self.direction} {self.score}"

    @property
    def exhausted(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    @property
    def in_words(self) -> str:
        """The rule, for the header and the plan.

        >>> rule = EarlyStopping("min val/loss", patience=3, min_delta="1%")
        >>> ScoreWatch(rule.monitor, rule).in_words
        'ends after 3 evaluations without a val/loss better by more than 1%'
        """
        count = _counted(self.patience or 0, of_training=self.of_training)
        better = f"better {self.score}"
        improvement = _improvement(self.min_delta)
        if improvement:
            better = f"{self.score} better{improvement}"
        return f"ends after {count} without a {better}"

    @property
    def why_over(self) -> str:
        """Why the run has ended."""
        return f"{self.score} has not improved{_improvement(self.min_delta)} since step {self.step}"

    def improved(self, step: int, value: float) -> bool:
        """Record the score after `step` steps; return True if it is the best so far."""
        if math.isnan(value):
            return False
        is_better = True
        if self.value is not None:
            gain = self.value - value if self.direction == "min" else value - self.value
            is_better = gain > least_gain(self.min_delta, self.value)
        if is_better:
            self.value = value
            self.step = step
            self.waited = 0
        else:
            self.waited += 1
        return is_better

    def state(self) -> WatchedScore:
        value = None if self.value is None else repr(self.value)
        return WatchedScore(
            direction=self.direction,
            score=self.score,
            value=value,
            step=self.step,
            waited=self.waited,
        )

    def load_state(self, state: WatchedScore | None) -> None:
        """Restore the dictionary returned by `state`, unless the checkpoint monitored another
        score.
        """
        if state is None:
            return
        if (state["direction"], state["score"]) == (self.direction, self.score):
            self.value = None if state["value"] is None else float(state["value"])
            self.step = state["step"]
            self.waited = state["waited"]


class Best:
    """The steps whose checkpoints are kept for their value of one score: the best step, and `keep`
    - 1 runners-up. Any gain is an improvement; of equal values the earlier one is better.

    >>> best = Best("max val/accuracy", keep=2)
    >>> [best.improved(step, value) for step, value in enumerate([0.5, 0.7, 0.6, 0.5, math.nan])]
    [True, True, True, False, False]
    >>> best.step, best.steps
    (1, (1, 2))
    """

    by = "best"

    def __init__(
        self,
        text: str,
        *,
        keep: int = 1,
        min_delta: float | str = 0.0,
        of_training: bool = False,
    ) -> None:
        self.keep = keep
        self.watch = ScoreWatch(text, of_training=of_training)
        self.watch.min_delta = min_delta  # of behavior 1 only
        self.runners_up: list[tuple[int, float]] = []  # (step, value), the best first

    @property
    def text(self) -> str:
        return self.watch.text

    @property
    def score(self) -> str:
        return self.watch.score

    @property
    def direction(self) -> Literal["min", "max"]:
        return self.watch.direction

    @property
    def of_training(self) -> bool:
        return self.watch.of_training

    @property
    def step(self) -> int | None:
        return self.watch.step

    @property
    def value(self) -> float | None:
        return self.watch.value

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the checkpoints to keep, the best first."""
        if self.step is None:
            return ()
        return (self.step, *(step for step, _ in self.runners_up))

    @property
    def in_words(self) -> str:
        """What is kept, for the header and the plan."""
        count = "the best checkpoint" if self.keep == 1 else f"the {self.keep} best checkpoints"
        return f"keeps {count} by {self.text}"

    def improved(self, step: int, value: float) -> bool:
        """Record the score after `step` steps; return True if its checkpoint is to be kept."""
        if math.isnan(value):
            return False
        runner_up = None
        if self.step is not None and self.value is not None:
            runner_up = (self.step, self.value)  # if the new one is better
        is_best = self.watch.improved(step, value)
        if not is_best:
            runner_up = (step, value)
        if runner_up is not None:
            sign = 1 if self.direction == "min" else -1
            insort(self.runners_up, runner_up, key=lambda kept: (sign * kept[1], kept[0]))
            del self.runners_up[self.keep - 1 :]
        return step in self.steps

    def state(self) -> list[RunnerUp]:
        return [RunnerUp(step=step, value=repr(value)) for step, value in self.runners_up]

    def load_state(self, state: WatchedScore | None, runners_up: Sequence[RunnerUp] | None) -> None:
        """Restore what `watch.state` and `state` returned, unless the checkpoint monitored another
        score.
        """
        self.watch.load_state(state)
        if self.step is not None:
            saved = [(each["step"], float(each["value"])) for each in runners_up or ()]
            self.runners_up = saved[: self.keep - 1]


def load_stopping(
    rules: Sequence[ScoreWatch],
    states: Sequence[WatchedScore] | None,
    *,
    monitor: WatchedScore | None,
) -> None:
    """Restore the patience of early-stopping rules, each from the first state of its score that is
    left. In a checkpoint of behavior 1, `monitor` has the patience too.
    """
    if states is None:
        states = [] if monitor is None else [monitor]
    left = list(states)
    for rule in rules:
        for state in left:
            if (state["direction"], state["score"]) == (rule.direction, rule.score):
                rule.load_state(state)
                left.remove(state)
                break


def training_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a training record as the scores that a rule may monitor.

    >>> training_scores({"kind": "train", "step": 5, "loss": 0.5})
    {'train/step': 5, 'train/loss': 0.5}
    """
    return {
        f"{TRAINING}{name}": value
        for name, value in record.items()
        if isinstance(value, int | float)
    }


def is_of_training(score: str, splits: Collection[str]) -> bool:
    """Return True if a score is a value of training records: "train/NAME" without a split "train".

    >>> is_of_training("train/loss", ["val"]), is_of_training("train/loss", ["train"])
    (True, False)
    """
    return score.startswith(TRAINING) and TRAINING.rstrip("/") not in splits


def _counted(count: int, *, of_training: bool) -> str:
    if not of_training:
        return _evaluations(count)
    return "1 record" if count == 1 else f"{count} records"


@dataclass(frozen=True)
class PlateauProgress:
    """The state of a plateau after the scores so far."""

    factor: float = 1.0
    best: float | None = None
    waited: int = 0  # evaluations since the best score or the last reduction
    cooling: int = 0  # remaining cooldown evaluations
    not_numbers: int = 0  # scores that were NaN
    step: int = 0  # of the last score


def following(
    plateau: ReduceLROnPlateau, before: PlateauProgress, *, step: int, score: float
) -> PlateauProgress:
    """Return a plateau's state after one more score. The function is pure, so all ranks agree. NaN
    scores are only counted.

    >>> plateau, standing = ReduceLROnPlateau("min val/loss", patience=2), PlateauProgress()
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
    sign = 1.0 if parse_score(plateau.monitor)[0] == "min" else -1.0
    best = sign * math.inf if before.best is None else before.best
    # False for inf - inf, which is NaN
    is_better = sign * (best - score) > least_gain(plateau.min_delta, best)
    after = replace(before, step=step)
    if is_better:
        after = replace(after, best=score)
    waited = 0 if is_better or before.cooling else before.waited + 1
    if waited < plateau.patience:
        return replace(after, waited=waited, cooling=max(0, before.cooling - 1))
    lowered = max(before.factor * plateau.factor, plateau.min_lr_ratio)
    return replace(after, waited=0, cooling=plateau.cooldown, factor=lowered)


@dataclass
class Feedback:
    """The plateau rule of a run with its current state; `State.lr_factor` passes the factor to the
    optimizers.
    """

    plateau: ReduceLROnPlateau
    standing: PlateauProgress = PlateauProgress()

    def update(self, step: int, score: float) -> str | None:
        """Record the score after `step` steps; return a one-line message about a reduction or a NaN
        score, or None.
        """
        plateau = self.plateau
        before = self.standing
        after = following(plateau, before, step=step, score=score)
        self.standing = after
        if after.not_numbers > before.not_numbers:
            return (
                f"warning: {plateau.score} after step {step:,} is NaN ({after.not_numbers} so far):"
                " it counts as neither better nor worse, and uses up no patience"
            )
        if after.factor == before.factor:
            return None
        change = f"multiplied by {after.factor / before.factor:.3g}"
        if after.factor == 0.5 * before.factor:
            change = "halved"
        limit = ", the minimum" if after.factor == plateau.min_lr_ratio else ""
        return (
            f"learning rate {change} after {plateau.evaluations} without a better {plateau.score}:"
            f" {after.factor:.3g} times the schedule from step {step:,}{limit}"
        )

    def state(self) -> PlateauState:
        best = self.standing.best
        return {**asdict(self.standing), "best": None if best is None else repr(best)}  # type: ignore[typeddict-item]

    def load_state(self, state: PlateauState | None) -> None:
        if state is not None:
            best = None if state["best"] is None else float(state["best"])
            self.standing = PlateauProgress(**{**state, "best": best})  # type: ignore[arg-type]


def rules_of(early_stopping: EarlyStopping | Sequence[EarlyStopping] | None) -> list[EarlyStopping]:
    """Return the early-stopping rules of a run as a list."""
    if early_stopping is None:
        return []
    if isinstance(early_stopping, EarlyStopping):
        return [early_stopping]
    return [*early_stopping]


def watched(
    best: str | None,
    rules: Sequence[EarlyStopping],
    *,
    keep_best: int,
    splits: Collection[str],
    at_end: Collection[str],
    behavior: int,
) -> tuple[Best | None, list[ScoreWatch]]:
    """Return what `best` keeps, and the patience of each early-stopping rule. Raises `ConfigError`
    for a score of none of the `splits`; those `at_end` steer nothing.
    """
    every_split = [*splits, *at_end]
    stopping = []
    for rule in rules:
        score = parse_score(rule.monitor, setting="early_stopping.monitor")[1]
        of_training = is_of_training(score, every_split)
        if not of_training:
            _refuse_unknown_split("early_stopping", rule.monitor, splits)
        stopping.append(ScoreWatch(rule.monitor, rule, of_training=of_training))
    min_delta: float | str = 0.0
    if behavior < BEST_IS_STRICT and rules and best in (None, rules[0].monitor):
        # one watch served both
        best = rules[0].monitor
        min_delta = rules[0].min_delta
    if best is None:
        if keep_best > 1:
            raise ConfigError(
                "keep-best-without-best",
                problem=f"keep_best = {keep_best}, but no score chooses the best checkpoints",
                remedy=Setting("best", "min val/loss"),
                setting="keep_best",
                value=keep_best,
            )
        return None, stopping
    score = parse_score(best, setting="best")[1]
    of_training = is_of_training(score, every_split)
    if not of_training:
        _refuse_unknown_split("best", best, splits)
    kept = Best(best, keep=keep_best, min_delta=min_delta, of_training=of_training)
    return kept, stopping


def feedback(
    plateau: ReduceLROnPlateau | None, rules: Sequence[EarlyStopping], *, splits: Collection[str]
) -> Feedback | None:
    """Return the plateau rule of a run, or None. Raises `ConfigError` if the rule could never
    reduce a learning rate.
    """
    if plateau is None:
        return None
    _refuse_unknown_split("plateau", plateau.monitor, splits)
    for rule in rules:
        refuse_end_before_reduction(plateau, rule)
    return Feedback(plateau)


def refuse_end_before_reduction(plateau: ReduceLROnPlateau, early_stopping: EarlyStopping) -> None:
    """Raise `ConfigError` if early stopping would end the run before the first learning-rate
    reduction.
    """
    waits = early_stopping.patience
    if plateau.monitor != early_stopping.monitor or waits > plateau.patience:
        return
    # an improvement for early stopping is then one for the plateau, which never waits longer
    gain, relative_gain = gains(early_stopping.min_delta)
    gain_of_plateau, relative_gain_of_plateau = gains(plateau.min_delta)
    if gain >= gain_of_plateau and relative_gain >= relative_gain_of_plateau:
        longer = Setting("early_stopping.patience", 3 * plateau.patience)
        remedies: list[Remedy] = [(longer, "for early stopping")]
        if waits > 1:
            shorter = Setting("plateau.patience", max(1, waits // 3))
            remedies.insert(0, (shorter, "for the plateau"))
        raise ConfigError(
            "stopping-before-reduction",
            problem=f"early stopping waits {_evaluations(waits)} and plateau {plateau.patience} for"
            " the same metric",
            reason="the run would end before the first learning-rate reduction",
            remedy=remedies,
            setting="early_stopping.patience",
            value=waits,
            plateau_patience=plateau.patience,
        )


def _refuse_unknown_split(by: str, text: str, splits: Collection[str]) -> None:
    score = parse_score(text)[1]
    if score.split("/", maxsplit=1)[0] not in splits:
        metric = score.rpartition("/")[2]
        why = f"no split has that name; available: {', '.join(splits) or 'none'}"
        raise unmonitored(by, text, why, scores=[f"{split}/{metric}" for split in splits])
