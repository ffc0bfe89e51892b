"""Checks for overfitting, overlap between splits, constant targets, and label-smoothed perplexity."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.diagnose.finding import Finding, Severity, Verdict, check, join_names, need, well, worst_first, wrong
from surefoot.diagnose.history import History, Series
from surefoot.diagnose.statistics import level, noise

EVALUATIONS = 4
"""Minimum number of evaluations: the first, the best, and two later ones."""
WORSE = 0.02
"""Minimum rise above the best loss, in two evaluations. Noise is below 1 % for splits of at least a few hundred samples."""
MANY_EVALUATIONS = 12
"""Number of evaluations from which the noise can be estimated."""
BY_CHANCE = 3.0
"""Minimum rise in standard deviations of the noise. The lowest of some dozens of evaluations is two standard deviations
below the mean, and the last two evaluations may be one above the mean."""
NOTHING = 0.01
"""Minimum rise as a fraction of the first loss. Losses near 0 fluctuate by less."""
NEARLY_ALL = 0.95
"""Fraction of equal targets at which a constant answer is right in 19 of 20 cases."""
SHARED = 0.01
"""Fraction of a split's samples in the training data that affects scores. Real data have a few duplicates."""
PASSAGES_SHARED = 0.1
"""Fraction of a split's text windows that share a passage with the training data. Similar texts share a few percent (2 % in
Python's own library), and two splits of one text share a fifth. A passage is only a part of a window."""
MOSTLY_SHARED = 0.5
"""Fraction of shared samples above which a split's score is a training score."""
_MOST_SCORES = 3  # metrics printed beside a loss


@check("overfitting")
def overfitting(history: History) -> Verdict:
    """Check for a split's loss that rises after its best evaluation while the training loss falls."""
    need(
        any(len(series) >= EVALUATIONS for series in history.splits.values()),
        f"no split was scored {EVALUATIONS} times yet",
    )
    rises = [(_rise(history, series), split) for split, series in history.splits.items()]
    rise, split = max(rises, key=lambda pair: pair[0])
    well(rise <= WORSE, f"the loss of {join_names(list(history.splits))} does not rise while that of training falls")
    described, loss, series = history.described, history.loss, history.splits[split]
    row = int(np.argmin(series.value))
    best, lowest, last = int(series.step[row]), float(series.value[row]), float(series.value[-1])
    decay, dropout = described.optimizer.get("weight_decay"), described.written.get("model.dropout")
    return wrong(
        "warning",
        f"Overfitting since step {best:,}: the loss of {split} rises while that of training falls.",
        (
            f"{split}/loss {lowest:.4g} at step {best:,}, {last:.4g} at step {series.step[-1]:,}"
            f" ({rise:+.0%} at least in the last two)",
            f"training loss {_level_near(loss, best):.4g} then, {_level_near(loss, int(loss.step[-1])):.4g} now",
            *_other_scores(history, split, best),
        ),
        causes=(
            "more passes over the data than they bear",
            "a model that is large for so few samples, without dropout or decay",
        ),
        try_=(
            f"surefoot evaluate {described.name} --checkpoint best  (step {best:,}, where best is min {split}/loss)",
            described.typed("early_stopping.patience", 3)
            if described.program == "recipe"
            else f'Run(early_stopping=sf.EarlyStopping("min {split}/loss", patience=3))',
            described.typed("optimizer.weight_decay", float(f"{max(3 * decay, 0.1):.2g}"))
            if isinstance(decay, int | float)
            else "",
            "" if dropout is None else described.typed("model.dropout", round(float(dropout) + 0.1, 2)),
            "more or augmented data; a smaller model",
        ),
        step=best,
        numbers={"rise": rise, "best": lowest, "last": last},
    )


def _rise(history: History, series: Series) -> float:
    row = int(np.argmin(series.value))
    after = series.value[row + 1 :]
    if len(series) < EVALUATIONS or len(after) < 2 or not _fell_since(history, int(series.step[row])):
        return 0.0
    best, first = float(series.value[row]), float(series.value[0])
    lost = float(min(after[-1], after[-2])) - best
    surely = BY_CHANCE * noise(series.value) if len(series) >= MANY_EVALUATIONS else 0.0
    if lost < max(NOTHING * abs(first), surely):
        return 0.0
    return lost / (best if best > 0 else max(-best, first - best))  # a loss below 0 is scaled by its total improvement


@check("train-validation-overlap")
def overlap(history: History) -> Verdict:
    """Check for samples of a split in the training data, and for text windows that share a passage."""
    recorded = history.data.get("overlap")
    splits = {
        split: counts
        for split, counts in (recorded.items() if isinstance(recorded, dict) else ())
        if isinstance(counts, dict) and counts.get("checked") and not counts.get("same")  # "same": overlap is intended
    }
    need(splits, "the records do not say how many samples are in both parts")
    verdicts = [_overlap_of(split, counts, history) for split, counts in splits.items() if counts.get("overlapping")]
    verdicts.sort(key=lambda verdict: -verdict.numbers["share"])
    checked = sum(int(counts["checked"]) for counts in splits.values())
    well(not verdicts, f"none of {checked:,} samples looked at is one of training")
    return replace(worst_first(verdicts)[0], evidence=tuple(line for verdict in verdicts for line in verdict.evidence))


def _overlap_of(split: str, counts: dict[str, Any], history: History) -> Finding:
    checked, same, of_text = int(counts["checked"]), int(counts["overlapping"]), bool(counts.get("passages"))
    share, bound = same / checked, PASSAGES_SHARED if of_text else SHARED
    severity: Severity = "error" if share >= MOSTLY_SHARED else "warning" if share >= bound else "note"
    trained_on, known = int(history.data.get("samples") or 0), int(history.data.get("checked") or 0)
    part = known < trained_on and not counts.get("among_all")
    among = f" among the {known:,} of {trained_on:,} training samples looked at" if part else ""
    where = "part of the training text that was looked at"
    if 2 * known >= trained_on:
        where = "training text too, as in most texts: its score is hardly touched"
    of_samples = "take duplicates out before splitting; split by source (document, patient, speaker), not by sample"
    texts = {  # keyed by text data and small overlap: the finding and its remedy
        (False, False): (f"{'At least ' * part}{share:.0%} of {split} are samples of the training data.", of_samples),
        (False, True): (f"A few samples of {split} are training data too.", of_samples),
        (True, False): (
            f"At least {share:.0%} of {split} share a passage with the training text, so its score says less of new text.",
            "take copied documents out before splitting; split by document, not by place in the text",
        ),
        (True, True): (
            f"A few passages of {split} stand in the {where}.",
            "nothing need be done; for a stricter score take copied documents out",
        ),
    }
    message, cure = texts[of_text, severity == "note"]
    both = "the same file given for both"
    causes = ("a split that was taken after the data were copied or augmented", "duplicates in the data", both)
    if of_text:
        in_common = "what many files have in common: licences, headers, code or phrases that were copied"
        causes = (in_common, *(("", "") if severity == "note" else (both, "documents that are in the data twice")))
    evidence = f"{split}: {same:,} of {checked:,} {'windows' if of_text else 'looked at'}{among}"
    return wrong(severity, message, (evidence,), causes=causes, try_=(cure,), numbers={"share": share})


@check("constant-targets")
def constant_targets(history: History) -> Verdict:
    """Check for targets that are all or nearly all equal."""
    distinct = int(history.targets.get("distinct") or 0)
    share = float(history.targets.get("most_common_fraction") or 0.0)
    need(distinct, "the records do not say which targets there are")
    well(distinct > 1 and share < NEARLY_ALL, f"{distinct:,} different targets, the commonest is {share:.0%} of them")
    return wrong(
        "error" if distinct == 1 else "warning",
        "All targets are the same." if distinct == 1 else f"{share:.1%} of the targets are the same.",
        (f"{distinct:,} different targets, the commonest is {share:.1%} of those looked at",),
        causes=(
            "labels read from the wrong column, or lost on the way",
            "a filter that left one class",
            "padding counted as targets",
        ),
        try_=(
            "print a few samples as the model gets them: train[0], train[1]",
            "where the classes are so uneven, score by class, not by accuracy",
        ),
        numbers={"distinct": distinct, "most_common_fraction": share},
    )


@check("smoothed-perplexity")
def smoothed_perplexity(history: History) -> Verdict:
    """Check for a metric named perplexity with label smoothing: the exponential of a smoothed loss is not a perplexity."""
    described, smoothing = history.described, history.described.label_smoothing
    scores = [score for score in history.score_names if "perplexity" in score.lower() or score.lower().endswith("ppl")]
    trained_on = history.data.get("scored_by_training_loss")
    of_loss = [score for score in scores if not isinstance(trained_on, list) or score.rpartition("/")[0] in trained_on]
    reasons = {
        "no score is called perplexity": not scores,
        "no label smoothing is among the settings": smoothing == 0.0,
        "the recipes score the loss without smoothing": described.program == "recipe",
        "it is not of the loss that is trained on": not of_loss,
    }
    for reason, holds in reasons.items():
        well(holds, reason)
    distinct = int(history.targets.get("distinct") or 0)
    floor = smoothed_floor(smoothing, distinct) if distinct > 1 else -math.inf
    for score in of_loss:
        values = [record[score] for record in history.scores if isinstance(record.get(score), int | float)]
        lowest, bound = min(values, default=math.inf), math.exp(floor)
        well(
            lowest < 0.98 * bound, f"{score} reached {lowest:.4g}, below {bound:.4g}: it is of a loss without smoothing"
        )
    return wrong(
        "warning",
        f"{of_loss[0]} may be of a smoothed loss, and then is no perplexity.",
        (
            f"label smoothing {smoothing:g}, scored as {join_names(of_loss)}",
            f"with {distinct:,} different targets a smoothed loss cannot fall below {floor:.3g},"
            f" nor its exponential below {math.exp(floor):.3g}"
            if distinct > 1
            else "",
        ),
        causes=("the split is scored by the loss that is trained on",),
        try_=(
            "in the loss, smooth only where model.training is true; or Split(loss=False, metrics=...) with the plain cross-entropy",
        ),
        numbers={"label_smoothing": smoothing} | ({"floor": floor} if distinct > 1 else {}),
    )


def smoothed_floor(smoothing: float, classes: int) -> float:
    """Return the minimum of a label-smoothed cross-entropy in nats: the target's entropy (Szegedy et al. 2016, section 7).

    >>> round(math.exp(smoothed_floor(0.1, 1000)), 1), round(math.exp(smoothed_floor(0.1, 32000)), 1)
    (2.8, 3.9)
    """
    other, own = smoothing / classes, 1 - smoothing + smoothing / classes
    return -own * math.log(own) - (classes - 1) * other * math.log(other)


def _other_scores(history: History, split: str, best: int) -> list[str]:
    names = [name for name in history.score_names if name.rpartition("/")[0] == split and not name.endswith("/loss")]
    texts = []
    for name in names[:_MOST_SCORES]:
        values = {each["step"]: each[name] for each in history.scores if isinstance(each.get(name), int | float)}
        if best in values:
            texts.append(f"{name} {values[best]:.4g} then, {values[max(values)]:.4g} now")
    return texts


def _fell_since(history: History, step: int) -> bool:
    loss = history.loss
    surely = 1.6 * noise(loss.value)  # two standard errors of the difference of two medians of five
    return len(loss) >= EVALUATIONS and _level_near(loss, int(loss.step[-1])) < _level_near(loss, step) - surely


def _level_near(loss: Series, step: int) -> float:
    first = max(0, min(int(np.searchsorted(loss.step, step)) - 2, len(loss) - 5))
    return level(loss.value[first : first + 5])
