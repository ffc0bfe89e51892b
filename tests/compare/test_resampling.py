"""Scores of resampled splits: their spread is that of theory, and they are those of the splits that
were drawn. (4 s)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from surefoot.cli.compare_worker import scores_by_batch
from surefoot.tools.compare.resampling import DRAWS, resampled_scores
from surefoot.tools.compare.statistics import paired_difference
from surefoot.tools.compare.trained import read_run

INPUTS = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(dim=1) > 0).long()


def test_the_spread_of_resampled_means_is_their_standard_error() -> None:
    """And that of a difference is the standard error of the paired difference."""
    first, second = np.random.default_rng(0).normal(size=(2, 100))
    second += first  # what is hard for one is hard for the other

    def draw_means(values: np.ndarray) -> np.ndarray:
        def mean_of(chosen: Sequence[int]) -> float:
            return float(values[chosen].mean())

        scores = resampled_scores(mean_of, batches=100, expected=values.mean())
        assert not isinstance(scores, str)
        return np.array(scores)

    spread = (draw_means(first) - draw_means(second)).std(ddof=1)

    paired = paired_difference(list(first), list(second), counts=[1.0] * 100)
    assert spread == pytest.approx(paired.standard_error, rel=3 / (2 * DRAWS) ** 0.5)


def raises_for_a_part(chosen: Sequence[int]) -> float:
    if len(set(chosen)) < 6:
        raise ValueError("only one class")
    return 1.0


def is_nan_for_a_part(chosen: Sequence[int]) -> float:
    return 1.0 if len(set(chosen)) == 6 else math.nan


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (lambda chosen: 2.0, "is not computed from the outputs"),
        (lambda chosen: 1.0 + (chosen[0] != 0), "depends on the order of its samples"),
        (raises_for_a_part, "ValueError: only one class"),
        (is_nan_for_a_part, "is not finite"),
    ],
)
def test_what_cannot_be_resampled_is_said(score: Callable[..., float], why: str) -> None:
    reason = resampled_scores(score, batches=6, expected=1.0)
    assert isinstance(reason, str)
    assert why in reason


def f1(outputs: Tensor, targets: Tensor) -> float:
    predicted = outputs.argmax(dim=1)
    hits = float((predicted * targets).sum())
    return 2 * hits / max(1.0, float(predicted.sum() + targets.sum()))


def measure_best(place: Path, score: str, *, draws: bool = True, **split: Any) -> dict[str, Any]:
    """Train a run with this split. Returns what is measured of its best weights."""

    def loss(model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs, batch[1]), (outputs, batch[1])

    run = sf.Run(
        model=lambda: nn.Linear(3, 2),
        loss=loss,
        train_data=(INPUTS, TARGETS),
        batch_size=10,
        length="6 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        splits={"val": sf.Split((INPUTS, TARGETS), **split)},
        best=score,
        run_dir=place,
        device="cpu",
        precision="fp32",
        console=False,
        report=False,
    )
    run.train()
    return scores_by_batch(run, read_run(place), draws=draws)


def outputs_of(place: Path) -> Tensor:
    model = sf.load(place).load_model(nn.Linear(3, 2), device="cpu")
    return model(INPUTS).detach()


def drawn_scores(place: Path, metric: Callable[[Tensor, Tensor], float]) -> list[float]:
    """The metric on each draw of single samples, which the batches of so small a split are."""
    outputs = outputs_of(place)
    generator = np.random.default_rng(0)
    draws = generator.integers(len(INPUTS), size=(DRAWS, len(INPUTS)))
    return [metric(outputs[draw], TARGETS[draw]) for draw in torch.from_numpy(draws)]


def test_a_metric_of_the_whole_split_is_computed_of_each_draw(tmp_path: Path) -> None:
    measured = measure_best(tmp_path / "run", "max val/f1", metrics=sf.metrics.whole_split(f1))
    assert measured["counts"] == [1.0] * 60
    assert measured["best"]["resampled"] == pytest.approx(drawn_scores(tmp_path / "run", f1))


def test_a_derived_metric_is_derived_of_each_draw(tmp_path: Path) -> None:
    measured = measure_best(
        tmp_path / "run", "min val/perplexity", derived={"perplexity": sf.metrics.perplexity}
    )

    def perplexity(outputs: Tensor, targets: Tensor) -> float:
        return float(nn.functional.cross_entropy(outputs.double(), targets).exp())

    expected = drawn_scores(tmp_path / "run", perplexity)
    assert measured["best"]["resampled"] == pytest.approx(expected, rel=1e-5)


def test_a_metric_of_torchmetrics_is_computed_of_each_draw(tmp_path: Path) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    measured = measure_best(
        tmp_path / "run",
        "max val/mcc",
        metrics={"mcc": classification.MulticlassMatthewsCorrCoef(2)},
    )
    oracle = classification.MulticlassMatthewsCorrCoef(2)
    expected = drawn_scores(tmp_path / "run", lambda *pair: float(oracle(*pair)))
    assert measured["best"]["resampled"] == pytest.approx(expected)


def test_a_mean_over_samples_needs_no_draws(tmp_path: Path) -> None:
    measured = measure_best(tmp_path / "run", "max val/accuracy", metrics=sf.metrics.accuracy)
    hits = outputs_of(tmp_path / "run").argmax(dim=1) == TARGETS
    assert measured["best"]["means"] == hits.double().tolist()


def test_a_metric_that_knows_the_places_of_its_samples_is_not_resampled(tmp_path: Path) -> None:
    def against_all(outputs: Tensor, targets: Tensor) -> float:
        return f1(outputs, TARGETS)

    metric = sf.metrics.whole_split(against_all)
    measured = measure_best(tmp_path / "run", "max val/against_all", metrics=metric)
    assert measured.keys() == {"why"}
    assert measured["why"].startswith("val/against_all ")


def test_a_variant_of_one_seed_is_not_resampled(tmp_path: Path) -> None:
    metric = sf.metrics.whole_split(f1)
    measured = measure_best(tmp_path / "run", "max val/f1", draws=False, metrics=metric)
    assert measured.keys() == {"why"}
    assert measured["why"].startswith("val/f1 ")
