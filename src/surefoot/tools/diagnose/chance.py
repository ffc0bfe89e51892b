"""The check of the loss against that of a guess, which ignores the inputs."""

import math
from dataclasses import dataclass

from surefoot.tools.diagnose.finding import (
    Finding,
    Healthy,
    Unknown,
    Verdict,
    check,
    need,
    well,
    wrong,
)
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.learning_rate import (
    ABOVE_START,
    CERTAIN,
    OPPOSED,
    Course,
    course,
    has_opposed_losses,
    is_judged,
)

FEWEST_STEPS = 50
"""Minimum number of steps. A healthy run of 20 steps may have learned nothing yet."""
TIMES_SEEN = 20
"""Minimum number of targets in all steps for each different target. With a thousand classes, the
first hundred steps of a healthy run are at chance.
"""
PART_OF_RUN = 0.5
"""Fraction of its steps from which a run that still trains is judged. Some losses stay at the
frequencies of the targets for a long time, and fall then.
"""
NEAR = 0.02
"""Relative distance within which a loss is that of a guess. Levels vary by about 1%."""
CLEARLY = 0.1
"""How far below a guess the loss of a split is, relatively, or above it an accuracy, if the model
has learned something. Two splits may have other frequencies."""
EVALUATIONS = 2
"""Minimum number of evaluations for a finding in a split alone."""
SURE = 3.0
"""Minimum significance of a fall, in standard errors, for a loss that is still learning. Of runs
that stay at chance, one in a thousand exceeds 3.
"""
USUAL_START = (1.5, 0.5)
"""The highest loss of new weights: a factor on that of a uniform guess, and nats. Logits with a
variance of 1 cost half a nat. The sum of a batch, and most weighted losses, are above it."""
_LOOK = "look at some samples as the model receives them: train_data[0], train_data[1]"


@dataclass(frozen=True)
class Guess:
    """What guesses among the targets cost, in nats."""

    count: int  # of different targets
    frequencies: float  # always predicting how frequent each target is: their entropy

    @property
    def uniform(self) -> float:
        return math.log(self.count)

    @property
    def in_words(self) -> str:
        uniform = f"a guess among {self.count:,} targets has ln {self.count:,} = {self.uniform:.4g}"
        if self.frequencies > (1 - NEAR) * self.uniform:
            return uniform
        return f"{uniform}, and a guess by their frequencies {self.frequencies:.4g}"


@check("no-better-than-chance")
def no_better_than_chance(history: History) -> Verdict:
    """Compare the loss of training and of each split with the loss of a guess among the recorded
    targets.
    """
    guess = _guess(history)
    seen = history.total("targets")
    has_enough_steps = history.step >= max(FEWEST_STEPS, 2 * history.described.warmup)
    is_half_done = history.over or history.step >= PART_OF_RUN * (history.described.steps or 0)
    need(
        is_judged(history)
        and has_enough_steps
        and seen >= TIMES_SEEN * guess.count
        and is_half_done,
        f"{history.step:,} steps, {seen:,.0f} targets and {len(history.loss)} loss records are too"
        f" few to compare the loss with a guess among {guess.count:,} targets",
    )
    need(not has_opposed_losses(history), OPPOSED)
    accuracies = _accuracies(history)
    for name, (accuracy, of_guess) in accuracies.items():
        well(accuracy > of_guess, f"{name} is {accuracy:.3g}, clearly above that of a guess")
    levels = course(history)
    splits = _splits(history)
    learned = (1 - CLEARLY) * guess.frequencies
    better = [split for split, series in splits.items() if series.value.min() < learned]
    if _is_at_chance(history, guess, levels) and not better:
        return _training_at_chance(history, guess, levels, splits)
    last = levels.quarters[-1]
    bad = {}
    for split, series in splits.items():
        if len(series) >= EVALUATIONS and series.value.min() >= guess.uniform:
            bad[split] = series
    if last < learned and bad:
        return _splits_at_chance(history, guess, levels, bad)
    if better:
        split = better[0]
        lowest = splits[split].value.min()
        return Healthy(f"{split}/loss reached {lowest:.4g}; {guess.in_words}")
    well(last < (1 - NEAR) * guess.frequencies, f"the loss reached {last:.4g}; {guess.in_words}")
    return Unknown(
        f"the loss is {last:.4g}{_before_first_update(history)}; {guess.in_words}: it may still be"
        " falling, or be a sum, weighted, or of another kind"
    )


def _guess(history: History) -> Guess:
    count = int(history.targets.get("distinct") or 0)
    share = float(history.targets.get("most_common_fraction") or 0.0)
    need(count and share, "the records do not count the different targets")
    need(count > 1, "there is only one target")
    entropy = history.targets.get("entropy")
    if entropy is None and share < 1:  # of an older version: as if the other targets were equal
        others = (1 - share) * math.log((1 - share) / (count - 1))
        entropy = -share * math.log(share) - others
    return Guess(count, float(entropy or 0.0))


def _is_at_chance(history: History, guess: Guess, levels: Course) -> bool:
    """Return True if the loss of the second half of the run is that of a guess by frequencies; or
    that of a uniform guess or above it, and no lower than at step 0.

    With several targets for a sample, such as the tokens of a text, a healthy loss stays at their
    frequencies for some time, and falls then.
    """
    first = history.first_step_loss
    before, last = levels.quarters[2:]
    train = history.records.train
    is_sequence = train.last("targets") > train.last("samples") > 0
    farthest = max(abs(before - guess.frequencies), abs(last - guess.frequencies))
    is_near = not is_sequence and farthest <= NEAR * guess.frequencies
    factor, more = USUAL_START
    is_usual = first <= factor * guess.uniform + more  # False if it is not recorded
    is_above = is_usual and min(before, last) >= (1 - NEAR) * max(guess.uniform, first)
    if not is_near and not is_above:
        return False
    if last >= first:
        return True
    # it falls below that of a guess, or would be below it after half as many steps again
    fall = before - last
    is_falling = fall > SURE * math.sqrt(2) * levels.error
    is_below = last < guess.frequencies - CERTAIN * levels.error
    will_be_below = last - 2 * fall < (1 - NEAR) * guess.frequencies
    is_learning = is_falling and (is_below or will_be_below)
    return not is_learning


def _splits(history: History) -> dict[str, Series]:
    """Return the losses of the splits that are scored with the training loss, without step 0."""
    scored = history.data.get("scored_by_training_loss")
    names = [split for split in history.splits if not isinstance(scored, list) or split in scored]
    trained = {split: history.splits[split].since(0) for split in names}
    return {split: series for split, series in trained.items() if len(series)}


def _accuracies(history: History) -> dict[str, tuple[float, float]]:
    """Return each split's last accuracy, and the accuracy that a guess hardly reaches."""
    share = float(history.targets.get("most_common_fraction") or 0.0)
    values = {}
    for name in history.score_names:
        split, _, metric = name.rpartition("/")
        series = history.score(name).since(0)
        if metric not in ("accuracy", "acc") or not len(series):
            continue
        checked = int(history.overlaps.get(split, {}).get("checked") or 0)
        error = math.sqrt(share * (1 - share) / checked) if checked else 0.0
        values[name] = float(series.value[-1]), share + CLEARLY + 2 * error
    return values


def _before_first_update(history: History) -> str:
    first = history.first_step_loss
    return "" if math.isnan(first) else f", and was {first:.4g} before the first update"


def _training_at_chance(
    history: History, guess: Guess, levels: Course, splits: dict[str, Series]
) -> Finding:
    described = history.described
    last = levels.quarters[-1]
    causes = [
        "targets that do not match their inputs (shuffled, or off by one)",
        "inputs that are all the same, or whose values are lost on the way",
    ]
    remedies = [
        _LOOK,
        "check whether the model can overfit 100 samples: if not, the fault is in the data, model"
        " or loss",
    ]
    if last > ABOVE_START * history.first_step_loss:
        causes.insert(0, "a learning rate that is far too high")
        remedies.append(described.lr_divided(10))
    else:
        causes.append("units that are all dead, or outputs that are cut off")
    remedies.append(described.rate_test)
    return wrong(
        "error",
        "The model is no better than a guess.",
        _evidence(history, guess, levels, splits),
        causes=causes,
        try_=remedies,
        numbers={"loss": last, "chance": guess.frequencies},
    )


def _splits_at_chance(
    history: History, guess: Guess, levels: Course, splits: dict[str, Series]
) -> Finding:
    causes = [
        "targets of this split that are numbered otherwise than those of training",
        "other preprocessing than in training",
        "weights that memorize the training data",
    ]
    if history.described.averaging:
        causes.append("an average of weights (ema) that is too slow")
    return wrong(
        "warning",
        f"The model is no better than a guess on {', '.join(splits)}.",
        _evidence(history, guess, levels, splits),
        causes=causes,
        try_=[_LOOK],
        numbers={"loss": levels.quarters[-1], "chance": guess.frequencies},
    )


def _evidence(
    history: History, guess: Guess, levels: Course, splits: dict[str, Series]
) -> list[str]:
    last = levels.quarters[-1]
    evidence = [
        f"the training loss is {last:.4g} in the last quarter of the run"
        f"{_before_first_update(history)}"
    ]
    for split, series in splits.items():
        evidence.append(
            f"{split}/loss {series.value[-1]:.4g} at step {series.step[-1]:,},"
            f" {series.value.min():.4g} at its lowest"
        )
    for name, (accuracy, _) in _accuracies(history).items():
        evidence.append(f"{name} {accuracy:.3g}")
    evidence.append(guess.in_words)
    return evidence
