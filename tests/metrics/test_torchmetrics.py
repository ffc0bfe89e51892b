"""Objects of torchmetrics on one and two ranks: equal to the object that sees the whole split at
once. (5 s)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics.text import Perplexity

import surefoot as sf
from rank_processes import Ranks
from surefoot.metrics.contract import as_recorded, by_name

CLASSES = 5
OF_CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}


# of lists that grow, and of few samples
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")


def both(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs, labels


def numbers(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, 0], labels + 0.5 + outputs[:, 1].abs()


def sentences(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, None], labels[:, None]


def recall_and_auroc() -> Any:
    metrics = [torchmetrics.Recall(**OF_CLASSES), torchmetrics.AUROC(**OF_CLASSES)]
    return torchmetrics.MetricCollection(metrics)


@dataclass(frozen=True)
class Kind:
    """An object of torchmetrics, and what it takes of outputs and labels."""

    build: Callable[[], Any]
    arguments: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# an object for each kind of state: sums, sums by class, lists of everything, running moments
KINDS = {
    "accuracy": Kind(lambda: torchmetrics.Accuracy(**OF_CLASSES), both),
    "f1": Kind(lambda: torchmetrics.F1Score(**OF_CLASSES, average="macro"), both),
    "auroc": Kind(lambda: torchmetrics.AUROC(**OF_CLASSES), both),
    "binned auroc": Kind(lambda: torchmetrics.AUROC(**OF_CLASSES, thresholds=20), both),
    "confusion": Kind(lambda: torchmetrics.ConfusionMatrix(**OF_CLASSES), both),
    "collection": Kind(recall_and_auroc, both),
    "mean": Kind(torchmetrics.MeanMetric, numbers),
    "r2": Kind(torchmetrics.R2Score, numbers),
    "pearson": Kind(torchmetrics.PearsonCorrCoef, numbers),
    "spearman": Kind(torchmetrics.SpearmanCorrCoef, numbers),
    "perplexity": Kind(Perplexity, sentences),
}


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(samples, 4, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return inputs, labels


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(4, CLASSES)


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def scores_in_run(samples: int) -> dict[str, Any]:
    """The scores of a run with a split for each kind."""

    def split(kind: Kind) -> sf.Split:
        return sf.Split(
            data(samples),
            metrics={"own": kind.build()},
            predict=lambda model, batch: kind.arguments(model(batch[0]), batch[1]),
            batch_size=5,
            loss=False,
        )

    run = sf.Run(
        model=model,
        loss=loss,
        train_data=data(16),
        splits={name: split(kind) for name, kind in KINDS.items()},
        batch_size=8,
        length="1 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
    )
    return run.parts.evaluator.scores([*KINDS])


@pytest.mark.slow
@pytest.mark.parametrize("samples", [42, 6])  # in 9 batches and in 2, of which the last is short
def test_a_score_is_that_of_the_object_that_sees_the_whole_split(
    samples: int, ranks: Ranks
) -> None:
    inputs, labels = data(samples)
    expected: dict[str, Any] = {}
    for name, kind in KINDS.items():
        metric = kind.build()
        with torch.no_grad():
            metric.update(*kind.arguments(model()(inputs), labels))
            values = as_recorded(by_name(metric.compute(), "own", prefixed=True))
        for key, value in values.items():
            expected[f"{name}/{key}"] = value

    alone = scores_in_run(samples)
    first, second = ranks(2, scores_in_run, samples=samples)

    for scores in (alone, first, second):
        assert scores.keys() == expected.keys()
        for name, value in scores.items():
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6, msg=name
            )
