"""Runs of a comparison that nobody trained: their scores are given, and all else is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.tools.compare.results import compared
from surefoot.tools.compare.statistics import ScoreDifference
from surefoot.tools.compare.trained import Compared, Trained, VariantRow
from surefoot.tools.compare.variants import Variant

ORDER = {"seed": 0, "batch_size": 8, "data": "same", "precision": "fp32", "weights": "same"}
SCORES = [(10, 2.0), (20, 1.0), (30, 1.5)]


def trained(scores: Sequence[tuple[int, float]] = SCORES, **changes: Any) -> Trained:
    """What the records of a run with these scores say."""
    fields: dict[str, Any] = {
        "settings": {},
        "watch": ("min", "val/loss"),
        "loss": [(step, score + 0.1) for step, score in scores],
        "scores": scores,
        "times": [(10, 1.0), (20, 2.0), (30, 4.0)],
        "targets": 400.0,
        "order": ORDER,
    }
    return Trained(**(fields | changes))


def variant(name: str, group: str | None = None, **settings: Any) -> Variant:
    varied = {setting: value for setting, value in settings.items() if setting != "seed"}
    return Variant(name, group or name, varied or {"optimizer.lr": 0.1}, settings)


def run(
    name: str,
    scores: Sequence[tuple[int, float]] = SCORES,
    batches: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Compared:
    return Compared(variant(name), trained(scores, **changes), batches=batches)


def repeats(
    scores: Mapping[str, Sequence[float]], *, failed: tuple[str, int] | None = None
) -> list[Compared]:
    """For each variant a run of each seed from 0 on, with one score; one of them may have failed."""
    runs = []
    for name, scores_by_seed in scores.items():
        for seed, score in enumerate(scores_by_seed):
            of_seed = trained([(10, score)], order=ORDER | {"seed": seed})
            status = "failed" if (name, seed) == failed else "finished"
            runs.append(Compared(variant(f"{name},seed={seed}", name, seed=seed), of_seed, status))
    return runs


def batches(*means: float, split: str = "x", targets: float = 2.0) -> dict[str, Any]:
    """Scores of each batch of a split at the best step."""
    return {
        "split": {"sha256": split},
        "counts": [targets] * len(means),
        "best": {"step": 20, "means": list(means)},
    }


def row_of(name: str, runs: Sequence[Compared], **options: Any) -> VariantRow:
    (row,) = [row for row in compared(runs, **options).rows if row.name == name]
    return row


def difference_of(name: str, runs: Sequence[Compared], **options: Any) -> ScoreDifference:
    """The difference between a variant and the baseline, which must be known."""
    difference = row_of(name, runs, **options).difference
    assert difference is not None
    return difference


def verdicts(runs: Sequence[Compared], **options: Any) -> dict[str, str]:
    return {row.name: row.verdict for row in compared(runs, **options).rows}
