"""Checks for overfitting, overlap between splits, constant targets, and label-smoothed
perplexity.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.tools.diagnose.finding import (
    NOT_FINITE,
    Finding,
    Severity,
    Verdict,
    check,
    join_names,
    need,
    well,
    worst_first,
    wrong,
)
from surefoot.tools.diagnose.history import History, Series
from surefoot.tools.diagnose.statistics import level, noise

EVALUATIONS = 4
"""Minimum number of evaluations: the first, the best, and two later ones."""
WORSE = 0.02
"""Minimum rise above the best loss, in two evaluations. Noise is below 1% for splits of at least a
few hundred samples.
"""
MANY_EVALUATIONS = 12
"""Number of evaluations from which the noise can be estimated."""
BY_CHANCE = 3.0
"""Minimum rise in standard deviations of the noise. The lowest of some dozens of evaluations is two
standard deviations below the mean, and the last two evaluations may be one above the mean."""
NOTHING = 0.01
"""Minimum rise as a fraction of the first loss. Losses near 0 fluctuate by less."""
NEARLY_ALL = 0.95
"""Fraction of equal targets at which a constant answer is right in 19 of 20 cases."""
SHARED = 0.01
"""Fraction of a split's samples in the training data that affects scores. Real data have a few
duplicates.
"""
PASSAGES_SHARED = 0.1
"""Fraction of a split's text windows that share a passage with the training data. Similar texts
share a few percent (2% in Python's own library), and two splits of one text share a fifth. A
passage is only a part of a window."""
MOSTLY_SHARED = 0.5
"""Fraction of shared samples above which a split's score is a training score."""
_MOST_SCORES = 3  # metrics printed beside a loss


@check("overfitting")
def overfitting(history: History) -> Verdict:
    """Check for a split's loss that rises after its best evaluation while the training loss
    falls.
    """
    need(
        any(len(series) >= EVALUATIONS for series in history.splits.values()),
        f"no split was evaluated {EVALUATIONS} times yet",
    )
    for split in history.splits:
        since = history.not_finite_since(f"{split}/loss")
        need(since is None, f"{split}/loss is not finite since step {since}")
    rises = [(_rise(history, series), split) for split, series in history.splits.items()]
    rise, split = max(rises, key=lambda pair: pair[0])
    well(
        rise <= WORSE,
        f"the loss of {join_names(list(history.splits))} does not rise while the training loss falls",
    )
    described, loss, series = history.described, history.loss, history.splits[split]
    row = int(np.argmin(series.value))
    best, lowest, last = int(series.step[row]), float(series.value[row]), float(series.value[-1])
    decay, dropout = described.optimizer.get("weight_decay"), described.written.get("model.dropout")
    return wrong(
        "warning",
        f"Overfitting since step {best:,}: {split}/loss rises while the training loss falls.",
        (
            f"{split}/loss {lowest:.4g} at step {best:,}, {last:.4g} at step {series.step[-1]:,}"
            f" ({rise:+.0%} or more in the last two evaluations)",
            f"training loss {_level_near(loss, best):.4g} then, {_level_near(loss, int(loss.step[-1])):.4g} now",
            *_other_scores(history, split, best),
        ),
        causes=(
            "too many epochs for this data set",
            "a model that is too large for the number of samples, without dropout or weight decay",
        ),
        try_=(
            f"{described.evaluate_best(f'{split}/loss')}  (step {best:,} is the best by min {split}/loss)",
            described.typed("early_stopping.patience", 3)
            if described.program == "recipe"
            else f'Run(early_stopping=sf.EarlyStopping("min {split}/loss", patience=3))',
            described.typed("optimizer.weight_decay", float(f"{max(3 * decay, 0.1):.2g}"))
            if isinstance(decay, int | float)
            else "",
            ""
            if dropout is None
            else described.typed("model.dropout", round(float(dropout) + 0.1, 2)),
            "more data, or augmentation; a smaller model",
        ),
        step=best,
        numbers={"rise": rise, "best": lowest, "last": last},
    )


def _rise(history: History, series: Series) -> float:
    row = int(np.argmin(series.value))
    after = series.value[row + 1 :]
    if (
        len(series) < EVALUATIONS
        or len(after) < 2
        or not _fell_since(history, int(series.step[row]))
    ):
        return 0.0
    best, first = float(series.value[row]), float(series.value[0])
    lost = float(min(after[-1], after[-2])) - best
    surely = BY_CHANCE * noise(series.value) if len(series) >= MANY_EVALUATIONS else 0.0
    if lost < max(NOTHING * abs(first), surely):
        return 0.0
    return lost / (
        best if best > 0 else max(-best, first - best)
    )  # a loss below 0 is scaled by its total improvement


@check("train-validation-overlap")
def overlap(history: History) -> Verdict:
    """Check for samples of a split in the training data, and for text windows that share a
    passage.
    """
    recorded = history.data.get("overlap")
    of_splits = recorded if isinstance(recorded, dict) else {}
    checked = {
        split: counts
        for split, counts in of_splits.items()
        if isinstance(counts, dict) and counts.get("checked")
    }
    need(checked, "the records do not say how many samples the splits share with the training data")
    # the training data itself, on purpose if the name says so
    same = [split for split, counts in checked.items() if counts.get("same")]
    others = {split: counts for split, counts in checked.items() if split not in same}
    verdicts = [
        _overlap_of(split, counts, history)
        for split, counts in others.items()
        if counts.get("overlapping")
    ]
    unnamed = [split for split in same if "train" not in split]
    if unnamed:
        verdicts.append(_is_training_data(unnamed))
    verdicts.sort(key=lambda verdict: -verdict.numbers["share"])
    samples = sum(int(counts["checked"]) for counts in others.values())
    well(
        not verdicts,
        f"none of {samples:,} checked samples is in the training data"
        if others
        else f"{join_names(same)} is the training data, as its name says",
    )
    return replace(
        worst_first(verdicts)[0],
        evidence=tuple(line for verdict in verdicts for line in verdict.evidence),
    )


def _is_training_data(splits: Sequence[str]) -> Finding:
    names = join_names(splits)
    return wrong(
        "note",
        f"{names} {'is' if len(splits) == 1 else 'are'} the training data itself.",
        ("the data set of the split is the one given as train_data",),
        causes=("the same variable passed twice", "scores of the training data on purpose"),
        try_=(
            "give the split samples that the run does not train on",
            "on purpose: a name with train in it, such as train_eval",
        ),
        numbers={"share": 1.0},
    )


def _overlap_of(split: str, counts: dict[str, Any], history: History) -> Finding:
    checked, same, of_text = (
        int(counts["checked"]),
        int(counts["overlapping"]),
        bool(counts.get("passages")),
    )
    share, bound = same / checked, PASSAGES_SHARED if of_text else SHARED
    severity: Severity = (
        "error" if share >= MOSTLY_SHARED else "warning" if share >= bound else "note"
    )
    trained_on, known = int(history.data.get("samples") or 0), int(history.data.get("checked") or 0)
    part = known < trained_on and not counts.get("among_all")
    among = f", compared with {known:,} of {trained_on:,} training samples" if part else ""
    where = "checked part of the training text"
    if 2 * known >= trained_on:
        where = "training text, as in most texts: its metrics hardly change"
    of_samples = "remove duplicates before splitting; split by source (document, patient, speaker), not by sample"
    texts = {  # keyed by text data and small overlap: the finding and its remedy
        (False, False): (
            f"{'At least ' * part}{share:.0%} of {split} is also in the training data.",
            of_samples,
        ),
        (False, True): (f"A few samples of {split} are also in the training data.", of_samples),
        (True, False): (
            f"At least {share:.0%} of {split} shares a passage with the training text, so its metrics say less about new text.",
            "remove copied documents before splitting; split by document, not by position in the text",
        ),
        (True, True): (
            f"A few passages of {split} are also in the {where}.",
            "no change is needed; remove copied documents for stricter metrics",
        ),
    }
    message, cure = texts[of_text, severity == "note"]
    both = "the same file for training and evaluation"
    causes = (
        "a split that was made after the data were copied or augmented",
        "duplicates in the data",
        both,
    )
    if of_text:
        in_common = "text that many files share: licenses, headers, copied code or phrases"
        causes = (
            in_common,
            *(("", "") if severity == "note" else (both, "documents that occur twice in the data")),
        )
    kind = (
        "windows share a passage with the training text"
        if of_text
        else "samples are in the training data"
    )
    evidence = f"{split}: {same:,} of {checked:,} checked {kind}{among}"
    return wrong(
        severity, message, (evidence,), causes=causes, try_=(cure,), numbers={"share": share}
    )


@check("non-finite-scores")
def non_finite_scores(history: History) -> Verdict:
    """Check for scores that are not finite in the last evaluation although the training loss is."""
    need(len(history.records.scores.steps), "no split was evaluated yet")
    need(history.loss_is_finite, NOT_FINITE)
    since = {name: history.not_finite_since(name) for name in history.score_names}
    steps = {name: step for name, step in since.items() if step is not None}
    well(not steps, "the last value of every score is finite")
    names = [*steps]
    losses = [name for name in names if name.endswith("/loss")]
    is_or_are = "is" if len(names) == 1 else "are"
    return wrong(
        "warning" if losses else "note",
        f"{join_names(names)} {is_or_are} not finite, although the training loss is.",
        [f"{name}: not finite since step {step:,}" for name, step in list(steps.items())[:4]],
        causes=(
            "a sample of the split with a value that is not finite" if losses else "",
            "a metric that divides by a count of 0" if losses != names else "",
            "weights in evaluation mode that overflow, such as running variances of 0",
        ),
        try_=(
            "look for such samples: torch.isfinite over the inputs and targets of the split",
            "a best checkpoint and early stopping need a finite score",
        ),
        step=min(steps.values()),
        numbers={},
    )


@check("constant-targets")
def constant_targets(history: History) -> Verdict:
    """Check for targets that are all or nearly all equal."""
    distinct = int(history.targets.get("distinct") or 0)
    share = float(history.targets.get("most_common_fraction") or 0.0)
    need(distinct, "the records do not count the different targets")
    well(
        distinct > 1 and share < NEARLY_ALL,
        f"{distinct:,} different targets; the most common one is {share:.0%} of those checked",
    )
    return wrong(
        "error" if distinct == 1 else "warning",
        "All targets are the same."
        if distinct == 1
        else f"{share:.1%} of the targets are the same.",
        (f"{distinct:,} different targets; the most common one is {share:.1%} of those checked",),
        causes=(
            "labels that were read from the wrong column, or lost in preprocessing",
            "a filter that left only one class",
            "padding that counts as targets",
        ),
        try_=(
            "print a few samples as the model receives them: train_data[0], train_data[1]",
            "if the classes really are this imbalanced, use per-class metrics instead of accuracy",
        ),
        numbers={"distinct": distinct, "most_common_fraction": share},
    )


@check("smoothed-perplexity")
def smoothed_perplexity(history: History) -> Verdict:
    """Check for a metric named perplexity with label smoothing: the exponential of a smoothed loss
    is not a perplexity.
    """
    described, smoothing = history.described, history.described.label_smoothing
    scores = [
        score
        for score in history.score_names
        if "perplexity" in score.lower() or score.lower().endswith("ppl")
    ]
    trained_on = history.data.get("scored_by_training_loss")
    of_loss = [
        score
        for score in scores
        if not isinstance(trained_on, list) or score.rpartition("/")[0] in trained_on
    ]
    reasons = {
        "no metric is called perplexity": not scores,
        "the settings have no label smoothing": smoothing == 0.0,
        "recipes evaluate the loss without smoothing": described.program == "recipe",
        "the perplexity is not computed from the training loss": not of_loss,
    }
    for reason, holds in reasons.items():
        well(holds, reason)
    distinct = int(history.targets.get("distinct") or 0)
    floor = smoothed_floor(smoothing, distinct) if distinct > 1 else -math.inf
    for score in of_loss:
        lowest = min(history.score(score).value, default=math.inf)
        bound = math.exp(floor)
        well(
            lowest < 0.98 * bound,
            f"{score} reached {lowest:.4g}, below {bound:.4g}, so its loss is not smoothed",
        )
    return wrong(
        "warning",
        f"{of_loss[0]} may come from a smoothed loss; if so, it is not a perplexity.",
        (
            f"label smoothing {smoothing:g}; metrics from the training loss: {join_names(of_loss)}",
            f"with {distinct:,} different targets, a smoothed loss cannot fall below {floor:.3g},"
            f" nor its exponential below {math.exp(floor):.3g}"
            if distinct > 1
            else "",
        ),
        causes=("the split is evaluated with the training loss",),
        try_=(
            "in the loss, smooth only if model.training is true; or use Split(loss=False, metrics=...) with the plain cross-entropy",
        ),
        numbers={"label_smoothing": smoothing} | ({"floor": floor} if distinct > 1 else {}),
    )


def smoothed_floor(smoothing: float, classes: int) -> float:
    """Return the minimum of a label-smoothed cross-entropy in nats: the target's entropy (Szegedy
    et al. 2016, section 7).

    >>> (
    ...     round(math.exp(smoothed_floor(0.1, 1000)), 1),
    ...     round(math.exp(smoothed_floor(0.1, 32000)), 1),
    ... )
    (2.8, 3.9)
    """
    other, own = smoothing / classes, 1 - smoothing + smoothing / classes
    return -own * math.log(own) - (classes - 1) * other * math.log(other)


def _other_scores(history: History, split: str, best: int) -> list[str]:
    names = [
        name
        for name in history.score_names
        if name.rpartition("/")[0] == split and not name.endswith("/loss")
    ]
    texts = []
    for name in names[:_MOST_SCORES]:
        series = history.score(name)
        then = series.value[series.step == best]
        if len(then):
            texts.append(f"{name} {then[-1]:.4g} then, {series.value[-1]:.4g} now")
    return texts


def _fell_since(history: History, step: int) -> bool:
    loss = history.loss
    surely = 1.6 * noise(loss.value)  # two standard errors of the difference of two medians of five
    return (
        len(loss) >= EVALUATIONS
        and _level_near(loss, int(loss.step[-1])) < _level_near(loss, step) - surely
    )


def _level_near(loss: Series, step: int) -> float:
    first = max(0, min(int(np.searchsorted(loss.step, step)) - 2, len(loss) - 5))
    return level(loss.value[first : first + 5])
