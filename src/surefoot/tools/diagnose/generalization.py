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
    Healthy,
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
_SAME_FILE = "the same file for training and evaluation"


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
    rises = {split: _rise(history, series) for split, series in history.splits.items()}
    split = max(rises, key=lambda name: rises[name])
    rise = rises[split]
    well(
        rise <= WORSE,
        f"the loss of {join_names(list(rises))} does not rise while the training loss falls",
    )
    described = history.described
    loss = history.loss
    series = history.splits[split]
    best = _best_step(series)
    then = _level_near(loss, best)
    now = _level_near(loss, int(loss.step[-1]))
    lowest = float(series.value.min())
    last = float(series.value[-1])
    evidence = [
        f"{split}/loss {lowest:.4g} at step {best:,}, {last:.4g} at step {series.step[-1]:,}"
        f" ({rise:+.0%} or more in the last two evaluations)",
        f"training loss {then:.4g} then, {now:.4g} now",
        *_other_scores(history, split, best),
    ]
    remedies = [
        f"{described.evaluate_best(f'{split}/loss')}  (step {best:,} is the best by min {split}/loss)"
    ]
    if described.program == "recipe":
        remedies.append(described.typed("early_stopping.patience", 3))
    else:
        remedies.append(f'Run(early_stopping=sf.EarlyStopping("min {split}/loss", patience=3))')
    decay = described.optimizer.get("weight_decay")
    if isinstance(decay, int | float):
        stronger = float(f"{max(3 * decay, 0.1):.2g}")
        remedies.append(described.typed("optimizer.weight_decay", stronger))
    dropout = described.written.get("model.dropout")
    if dropout is not None:
        remedies.append(described.typed("model.dropout", round(float(dropout) + 0.1, 2)))
    remedies.append("more data, or augmentation; a smaller model")
    return wrong(
        "warning",
        f"Overfitting since step {best:,}: {split}/loss rises while the training loss falls.",
        evidence,
        causes=(
            "too many epochs for this data set",
            "a model that is too large for the number of samples, without dropout or weight decay",
        ),
        try_=remedies,
        step=best,
        numbers={"rise": rise, "best": lowest, "last": last},
    )


def _best_step(series: Series) -> int:
    return int(series.step[np.argmin(series.value)])


def _rise(history: History, series: Series) -> float:
    """Return the rise of a split's loss in its last two evaluations above its lowest, relative to
    it, or 0 if it may be chance or the training loss has not fallen since.
    """
    after = series.value[np.argmin(series.value) + 1 :]
    if len(series) < EVALUATIONS or len(after) < 2:
        return 0.0
    if not _fell_since(history, _best_step(series)):
        return 0.0
    first = float(series.value[0])
    best = float(series.value.min())
    rise = float(after[-2:].min()) - best
    if rise < NOTHING * abs(first):
        return 0.0
    if len(series) >= MANY_EVALUATIONS and rise < BY_CHANCE * noise(series.value):
        return 0.0
    # a loss below 0 is scaled by its total improvement
    scale = best if best > 0 else max(-best, first - best)
    return rise / scale


@check("train-validation-overlap")
def overlap(history: History) -> Verdict:
    """Check for samples of a split in the training data, and for text windows that share a
    passage.
    """
    training_splits = []  # the training data itself, on purpose if the name says so
    others = {}
    for split, counts in history.overlaps.items():
        if not counts.get("checked"):
            continue
        if counts.get("same"):
            training_splits.append(split)
        else:
            others[split] = counts
    need(
        training_splits or others,
        "the records do not say how many samples the splits share with the training data",
    )
    findings = []
    for split, counts in others.items():
        if counts.get("overlapping") and counts.get("passages"):
            findings.append(_shared_passages(split, counts, history))
        elif counts.get("overlapping"):
            findings.append(_shared_samples(split, counts, history))
    unnamed = [split for split in training_splits if "train" not in split]
    if unnamed:
        findings.append(_is_training_data(unnamed))
    if not findings and others:
        samples = sum(int(counts["checked"]) for counts in others.values())
        return Healthy(f"none of {samples:,} checked samples is in the training data")
    if not findings:
        return Healthy(f"{join_names(training_splits)} is the training data, as its name says")
    findings.sort(key=lambda finding: -finding.numbers["share"])
    evidence = [line for finding in findings for line in finding.evidence]
    return replace(worst_first(findings)[0], evidence=tuple(evidence))


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


def _shared_samples(split: str, counts: dict[str, Any], history: History) -> Finding:
    shared = int(counts["overlapping"])
    checked = int(counts["checked"])
    share = shared / checked
    compared = _compared_samples(counts, history)
    severity = _severity_of_overlap(share, SHARED)
    if severity == "note":
        message = f"A few samples of {split} are also in the training data."
    elif compared:
        message = f"At least {share:.0%} of {split} is also in the training data."
    else:
        message = f"{share:.0%} of {split} is also in the training data."
    return wrong(
        severity,
        message,
        (f"{split}: {shared:,} of {checked:,} checked samples are in the training data{compared}",),
        causes=(
            "a split that was made after the data were copied or augmented",
            "duplicates in the data",
            _SAME_FILE,
        ),
        try_=(
            "remove duplicates before splitting; split by source (document, patient, speaker), not by sample",
        ),
        numbers={"share": share},
    )


def _shared_passages(split: str, counts: dict[str, Any], history: History) -> Finding:
    shared = int(counts["overlapping"])
    checked = int(counts["checked"])
    share = shared / checked
    compared = _compared_samples(counts, history)
    severity = _severity_of_overlap(share, PASSAGES_SHARED)
    causes = ["text that many files share: licenses, headers, copied code or phrases"]
    if severity == "note":
        where = "checked part of the training text"
        if 2 * _known_samples(history) >= _training_samples(history):
            where = "training text, as in most texts: its metrics hardly change"
        message = f"A few passages of {split} are also in the {where}."
        remedy = "no change is needed; remove copied documents for stricter metrics"
    else:
        message = (
            f"At least {share:.0%} of {split} shares a passage with the training text, so its"
            " metrics say less about new text."
        )
        causes += [_SAME_FILE, "documents that occur twice in the data"]
        remedy = "remove copied documents before splitting; split by document, not by position in the text"
    return wrong(
        severity,
        message,
        (
            f"{split}: {shared:,} of {checked:,} checked windows share a passage with the training"
            f" text{compared}",
        ),
        causes=causes,
        try_=(remedy,),
        numbers={"share": share},
    )


def _severity_of_overlap(share: float, affects_scores: float) -> Severity:
    if share >= MOSTLY_SHARED:
        return "error"
    return "warning" if share >= affects_scores else "note"


def _compared_samples(counts: dict[str, Any], history: History) -> str:
    """Say with which part of the training data a split was compared, or "" if with all."""
    known = _known_samples(history)
    trained_on = _training_samples(history)
    if known >= trained_on or counts.get("among_all"):
        return ""
    return f", compared with {known:,} of {trained_on:,} training samples"


def _known_samples(history: History) -> int:
    return int(history.data.get("checked") or 0)


def _training_samples(history: History) -> int:
    return int(history.data.get("samples") or 0)


@check("non-finite-scores")
def non_finite_scores(history: History) -> Verdict:
    """Check for scores that are not finite in the last evaluation although the training loss is."""
    need(len(history.records.scores.steps), "no split was evaluated yet")
    need(history.loss_is_finite, NOT_FINITE)
    since = {}
    for name in history.score_names:
        step = history.not_finite_since(name)
        if step is not None:
            since[name] = step
    well(not since, "the last value of every score is finite")
    names = list(since)
    losses = [name for name in names if name.endswith("/loss")]
    causes = []
    if losses:
        causes.append("a sample of the split with a value that is not finite")
    if losses != names:
        causes.append("a metric that divides by a count of 0")
    causes.append("weights in evaluation mode that overflow, such as running variances of 0")
    is_or_are = "is" if len(names) == 1 else "are"
    return wrong(
        "warning" if losses else "note",
        f"{join_names(names)} {is_or_are} not finite, although the training loss is.",
        [f"{name}: not finite since step {since[name]:,}" for name in names[:4]],
        causes=causes,
        try_=(
            "look for such samples: torch.isfinite over the inputs and targets of the split",
            "a best checkpoint and early stopping need a finite score",
        ),
        step=min(since.values()),
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
    severity: Severity = "warning"
    message = f"{share:.1%} of the targets are the same."
    if distinct == 1:
        severity = "error"
        message = "All targets are the same."
    return wrong(
        severity,
        message,
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
    smoothing = history.described.label_smoothing
    scores = []
    for score in history.score_names:
        name = score.lower()
        if "perplexity" in name or name.endswith("ppl"):
            scores.append(score)
    well(not scores, "no metric is called perplexity")
    well(smoothing == 0.0, "the settings have no label smoothing")
    well(history.described.program == "recipe", "recipes evaluate the loss without smoothing")
    splits = history.data.get("scored_by_training_loss")
    if isinstance(splits, list):
        scores = [score for score in scores if score.rpartition("/")[0] in splits]
    well(not scores, "the perplexity is not computed from the training loss")
    evidence = [
        f"label smoothing {smoothing:g}; metrics from the training loss: {join_names(scores)}"
    ]
    numbers = {"label_smoothing": smoothing}
    distinct = int(history.targets.get("distinct") or 0)
    if distinct > 1:
        floor = smoothed_floor(smoothing, distinct)
        bound = math.exp(floor)
        for score in scores:
            lowest = min(history.score(score).value, default=math.inf)
            well(
                lowest < 0.98 * bound,
                f"{score} reached {lowest:.4g}, below {bound:.4g}, so its loss is not smoothed",
            )
        evidence.append(
            f"with {distinct:,} different targets, a smoothed loss cannot fall below {floor:.3g},"
            f" nor its exponential below {bound:.3g}"
        )
        numbers["floor"] = floor
    return wrong(
        "warning",
        f"{scores[0]} may come from a smoothed loss; if so, it is not a perplexity.",
        evidence,
        causes=("the split is evaluated with the training loss",),
        try_=(
            "in the loss, smooth only if model.training is true; or use Split(loss=False, metrics=...) with the plain cross-entropy",
        ),
        numbers=numbers,
    )


def smoothed_floor(smoothing: float, classes: int) -> float:
    """Return the minimum of a label-smoothed cross-entropy in nats: the target's entropy (Szegedy
    et al. 2016, section 7).

    >>> round(math.exp(smoothed_floor(0.1, 1000)), 1)
    2.8
    >>> round(math.exp(smoothed_floor(0.1, 32000)), 1)
    3.9
    """
    other = smoothing / classes
    target = 1 - smoothing + smoothing / classes
    return -target * math.log(target) - (classes - 1) * other * math.log(other)


def _other_scores(history: History, split: str, best: int) -> list[str]:
    names = []
    for name in history.score_names:
        of_split, _, metric = name.rpartition("/")
        if of_split == split and metric != "loss":
            names.append(name)
    texts = []
    for name in names[:_MOST_SCORES]:
        series = history.score(name)
        then = series.value[series.step == best]
        if len(then):
            texts.append(f"{name} {then[-1]:.4g} then, {series.value[-1]:.4g} now")
    return texts


def _fell_since(history: History, step: int) -> bool:
    """Return True if the training loss has fallen since a step, by more than the noise."""
    loss = history.loss
    if len(loss) < EVALUATIONS:
        return False
    then = _level_near(loss, step)
    now = _level_near(loss, int(loss.step[-1]))
    # two standard errors of the difference of two medians of five
    return now < then - 1.6 * noise(loss.value)


def _level_near(loss: Series, step: int) -> float:
    first = max(0, min(int(np.searchsorted(loss.step, step)) - 2, len(loss) - 5))
    return level(loss.value[first : first + 5])
