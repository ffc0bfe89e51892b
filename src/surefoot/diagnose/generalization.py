"""Findings on what the scores mean: overfitting, data that are in both parts, targets without information, smoothed perplexity."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.diagnose.finding import Finding, Severity, Unclear, Verdict, Well, worst_first
from surefoot.diagnose.history import History, Series
from surefoot.diagnose.statistics import level, noise
from surefoot.diagnose.text import listed

EVALUATIONS = 4
"""The fewest: a best one, a first, and two after it that agree."""
WORSE = 0.02
"""Of the best loss: two evaluations in a row that are worse by 2 % are beyond what batches of one size do to an average over a split
(their noise is under 1 % from a few hundred samples on)."""
MANY_EVALUATIONS = 12
"""From here on their own noise can be told from the bend of their course."""
BY_CHANCE = 3.0
"""Deviations of that noise: the lowest of some dozens of evaluations is two below their level, and the last two may be one above it."""
NOTHING = 0.01
"""Of the first evaluation's loss: less is a rise among what is all but 0."""
NEARLY_ALL = 0.95
"""Of the targets: who always gives the commonest answer is right in 19 of 20 cases, so a high accuracy says nothing."""
SHARED = 0.01
"""Of a split: more is seen in the first digits of a score. Real data have a few duplicates."""
PASSAGES_SHARED = 0.1
"""Of a split's windows over a text: of two texts of the same kind a few in a hundred share a passage (2 % of Python's own library), and of
one text cut in two ways a fifth of the windows have the same one. A shared passage is a part of a window, so a score moves less."""
MOSTLY_SHARED = 0.5
"""Of a split: its score is one of the training data."""
_MOST_SCORES = 3  # that are told beside a loss


def overfitting(history: History) -> Verdict:
    """A split's loss that rises while that of training falls, since its best evaluation."""
    name = "overfitting"
    if not any(len(series) >= EVALUATIONS for series in history.splits.values()):
        return Unclear(name, f"no split was scored {EVALUATIONS} times yet")
    worst: tuple[float, str, Series, int] | None = None
    for split, series in history.splits.items():
        place = int(np.argmin(series.value))
        after = series.value[place + 1 :]
        if len(series) < EVALUATIONS or len(after) < 2 or not _fell_since(history, int(series.step[place])):
            continue
        best, first = float(series.value[place]), float(series.value[0])
        lost = float(min(after[-1], after[-2])) - best
        surely = BY_CHANCE * noise(series.value) if len(series) >= MANY_EVALUATIONS else 0.0
        if lost < max(NOTHING * abs(first), surely):
            continue
        rise = lost / (best if best > 0 else max(-best, first - best))  # below 0 a loss is as large as what was gained
        if rise > WORSE and (worst is None or rise > worst[0]):
            worst = (rise, split, series, place)
    if worst is None:
        return Well(name, f"the loss of {listed(list(history.splits))} does not rise while that of training falls")
    rise, split, series, place = worst
    best = int(series.step[place])
    described = history.described
    loss = history.loss
    tries = [f"surefoot evaluate {described.name} --checkpoint best  (step {best:,}, where best is min {split}/loss)"]
    tries.append(
        described.typed("early_stopping", 3)
        if described.program == "recipe"
        else f'Run(early_stopping=sf.EarlyStopping("min {split}/loss", patience=3))'
    )
    decay = described.optimizer.get("weight_decay")
    if isinstance(decay, int | float):
        tries.append(described.typed("optimizer.weight_decay", float(f"{max(3 * decay, 0.1):.2g}")))
    if described.written.get("model.dropout") is not None:
        tries.append(described.typed("model.dropout", round(float(described.written["model.dropout"]) + 0.1, 2)))
    tries.append("more or augmented data; a smaller model")
    return Finding(
        name,
        "warning",
        f"Overfitting since step {best:,}: the loss of {split} rises while that of training falls.",
        evidence=(
            f"{split}/loss {series.value[place]:.4g} at step {best:,}, {series.value[-1]:.4g} at step {series.step[-1]:,}"
            f" ({rise:+.0%} at least in the last two)",
            f"training loss {_level_near(loss, best):.4g} then, {_level_near(loss, int(loss.step[-1])):.4g} now",
            *_other_scores(history, split, best),
        ),
        causes=(
            "more passes over the data than they bear",
            "a model that is large for so few samples, without dropout or decay",
        ),
        try_=tuple(tries),
        step=best,
        numbers={"rise": rise, "best": float(series.value[place]), "last": float(series.value[-1])},
    )


def overlap(history: History) -> Verdict:
    """Samples of a split that are samples of the training data, or windows over a text that share a passage with it."""
    name = "train-validation-overlap"
    told = history.data.get("overlap")
    found = {
        split: counts
        for split, counts in (told.items() if isinstance(told, dict) else ())
        if isinstance(counts, dict) and counts.get("looked_at") and not counts.get("same")  # which is on purpose
    }
    if not found:
        return Unclear(name, "the records do not say how many samples are in both parts")
    verdicts = [_overlap_of(split, counts, history) for split, counts in found.items() if counts.get("found")]
    if not verdicts:
        looked_at = sum(int(counts["looked_at"]) for counts in found.values())
        return Well(name, f"none of {looked_at:,} samples looked at is one of training")
    verdicts.sort(key=lambda verdict: -verdict.numbers["share"])
    worst = worst_first(verdicts)[0]
    return replace(worst, evidence=tuple(line for verdict in verdicts for line in verdict.evidence))


def _overlap_of(split: str, counts: dict[str, Any], history: History) -> Finding:
    looked_at, same, of_text = int(counts["looked_at"]), int(counts["found"]), bool(counts.get("passages"))
    share, bound = same / looked_at, PASSAGES_SHARED if of_text else SHARED
    severity: Severity = "error" if share >= MOSTLY_SHARED else "warning" if share >= bound else "note"
    trained_on, known = int(history.data.get("samples") or 0), int(history.data.get("looked_at") or 0)
    part = known < trained_on and not counts.get("among_all")
    among = f" among the {known:,} of {trained_on:,} training samples looked at" if part else ""
    if of_text:
        evidence = f"{split}: {same:,} of {looked_at:,} windows{among}"
        return _passages_shared(split, share, severity, evidence=evidence, mostly_seen=2 * known >= trained_on)
    return Finding(
        "train-validation-overlap",
        severity,
        f"A few samples of {split} are training data too."
        if severity == "note"
        else f"{'At least ' * part}{share:.0%} of {split} are samples of the training data.",
        evidence=(f"{split}: {same:,} of {looked_at:,} looked at{among}",),
        causes=(
            "a split that was taken after the data were copied or augmented",
            "duplicates in the data",
            "the same file given for both",
        ),
        try_=("take duplicates out before splitting; split by source (document, patient, speaker), not by sample",),
        numbers={"share": share},
    )


def _passages_shared(split: str, share: float, severity: Severity, *, evidence: str, mostly_seen: bool) -> Finding:
    few = severity == "note"
    message = (
        f"At least {share:.0%} of {split} share a passage with the training text, so its score says less of new text."
    )
    if few and mostly_seen:
        message = (
            f"A few passages of {split} stand in the training text too, as in most texts: its score is hardly touched."
        )
    elif few:
        message = f"A few passages of {split} stand in the part of the training text that was looked at."
    return Finding(
        "train-validation-overlap",
        severity,
        message,
        evidence=(evidence,),
        causes=(
            "what many files have in common: licences, headers, code or phrases that were copied",
            *(() if few else ("the same file given for both", "documents that are in the data twice")),
        ),
        try_=(
            "nothing need be done; for a stricter score take copied documents out"
            if few
            else "take copied documents out before splitting; split by document, not by place in the text",
        ),
        numbers={"share": share},
    )


def constant_targets(history: History) -> Verdict:
    """Targets that are all, or nearly all, the same."""
    name = "constant-targets"
    told = history.data.get("targets")
    if not isinstance(told, dict) or not told.get("distinct"):
        return Unclear(name, "the records do not say which targets there are")
    distinct, share = int(told["distinct"]), float(told.get("most_common_fraction") or 0.0)
    if distinct > 1 and share < NEARLY_ALL:
        return Well(name, f"{distinct:,} different targets, the commonest is {share:.0%} of them")
    return Finding(
        name,
        "error" if distinct == 1 else "warning",
        "All targets are the same." if distinct == 1 else f"{share:.1%} of the targets are the same.",
        evidence=(f"{distinct:,} different targets, the commonest is {share:.1%} of those looked at",),
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


def smoothed_perplexity(history: History) -> Verdict:
    """A score called perplexity while the training loss is smoothed: the exponential of a smoothed loss is none."""
    name, described = "smoothed-perplexity", history.described
    scores = [score for score in history.score_names if "perplexity" in score.lower() or score.lower().endswith("ppl")]
    smoothing = described.label_smoothing
    if not scores:
        return Well(name, "no score is called perplexity")
    if smoothing == 0.0:
        return Well(name, "no label smoothing is among the settings")
    if described.program == "recipe":
        return Well(name, "the recipes score the loss without smoothing")
    trained_on = history.data.get("scored_by_training_loss")
    if isinstance(trained_on, list):
        scores = [score for score in scores if score.rpartition("/")[0] in trained_on]
    if not scores:
        return Well(name, "it is not of the loss that is trained on")
    targets = history.data.get("targets")
    distinct = int(targets.get("distinct") or 0) if isinstance(targets, dict) else 0
    floor = smoothed_floor(smoothing, distinct) if distinct > 1 else math.nan
    for score in scores:
        values = np.array([record[score] for record in history.scores if isinstance(record.get(score), int | float)])
        lowest = float(values.min()) if values.size else math.nan
        if math.isfinite(floor) and lowest < 0.98 * math.exp(floor):
            return Well(
                name, f"{score} reached {lowest:.4g}, below {math.exp(floor):.4g}: it is of a loss without smoothing"
            )
    evidence = [f"label smoothing {smoothing:g}, scored as {listed(scores)}"]
    if math.isfinite(floor):
        evidence.append(
            f"with {distinct:,} different targets a smoothed loss cannot fall below {floor:.3g},"
            f" nor its exponential below {math.exp(floor):.3g}"
        )
    return Finding(
        name,
        "warning",
        f"{scores[0]} may be of a smoothed loss, and then is no perplexity.",
        evidence=tuple(evidence),
        causes=("the split is scored by the loss that is trained on",),
        try_=(
            "in the loss, smooth only where model.training is true; or Split(loss=False, scores=...) with the plain cross-entropy",
        ),
        numbers={"label_smoothing": smoothing, "floor": floor}
        if math.isfinite(floor)
        else {"label_smoothing": smoothing},
    )


def smoothed_floor(smoothing: float, classes: int) -> float:
    """The least a label-smoothed cross-entropy can be, in nats: the entropy of its target (Szegedy et al. 2016, section 7).

    >>> round(math.exp(smoothed_floor(0.1, 1000)), 1), round(math.exp(smoothed_floor(0.1, 32000)), 1)
    (2.8, 3.9)
    """
    other = smoothing / classes
    own = 1 - smoothing + other
    return -own * math.log(own) - (classes - 1) * other * math.log(other)


def _other_scores(history: History, split: str, best: int) -> list[str]:
    """How the split's other scores went since: an accuracy may still rise while wrong answers are given more surely."""
    names = [name for name in history.score_names if name.rpartition("/")[0] == split and not name.endswith("/loss")]
    told = []
    for name in names[:_MOST_SCORES]:
        values = {
            record["step"]: record[name] for record in history.scores if isinstance(record.get(name), int | float)
        }
        if best in values:
            told.append(f"{name} {values[best]:.4g} then, {values[max(values)]:.4g} now")
    return told


def _fell_since(history: History, step: int) -> bool:
    """Whether the training loss is lower now than it was about a step, beyond its noise."""
    loss = history.loss
    if len(loss) < EVALUATIONS:
        return False
    surely = 1.6 * noise(loss.value)  # two standard errors of the difference of two medians of five
    return _level_near(loss, int(loss.step[-1])) < _level_near(loss, step) - surely


def _level_near(loss: Series, step: int) -> float:
    """The level of the five records about a step."""
    place = int(np.searchsorted(loss.step, step))
    first = max(0, min(place - 2, len(loss) - 5))
    return level(loss.value[first : first + 5])
