"""Objects of torchmetrics on one and two ranks: equal to the object that sees the whole split at
once. (5 s)
"""

from __future__ import annotations

from collections.abc import Callable
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


pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torchmetrics"
)  # of lists that grow, and of few samples


def both(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs, labels


def numbers(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, 0], labels + 0.5 + outputs[:, 1].abs()


def sentences(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return outputs[:, None], labels[:, None]


# an object for each kind of state: sums, sums by class, lists of everything, running moments; and
# what it takes
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Tensor, Tensor], Any]]] = {
    "accuracy": (lambda: torchmetrics.Accuracy(**OF_CLASSES), both),
    "f1": (lambda: torchmetrics.F1Score(**OF_CLASSES, average="macro"), both),
    "auroc": (lambda: torchmetrics.AUROC(**OF_CLASSES), both),
    "binned auroc": (lambda: torchmetrics.AUROC(**OF_CLASSES, thresholds=20), both),
    "confusion": (lambda: torchmetrics.ConfusionMatrix(**OF_CLASSES), both),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            [torchmetrics.Recall(**OF_CLASSES), torchmetrics.AUROC(**OF_CLASSES)]
        ),
        both,
    ),
    "mean": (torchmetrics.MeanMetric, numbers),
    "r2": (torchmetrics.R2Score, numbers),
    "pearson": (torchmetrics.PearsonCorrCoef, numbers),
    "spearman": (torchmetrics.SpearmanCorrCoef, numbers),
    "perplexity": (Perplexity, sentences),
}


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(samples, 4, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Linear(4, CLASSES)


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measured(samples: int) -> dict[str, Any]:
    def split(name: str) -> sf.Split:
        build, taken = KINDS[name]
        return sf.Split(
            data(samples),
            metrics={"own": build()},
            predict=lambda model, batch: taken(model(batch[0]), batch[1]),
            batch_size=5,
            loss=False,
        )

    run = sf.Run(
        model=model,
        loss=loss,
        train_data=data(16),
        splits={name: split(name) for name in KINDS},
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
    for name, (build, taken) in KINDS.items():
        metric = build()
        with torch.no_grad():
            metric.update(*taken(model()(inputs), labels))
            own = by_name(metric.compute(), "own", prefixed=True)
        expected |= {f"{name}/{key}": value for key, value in as_recorded(own).items()}

    for scores in (measured(samples), *ranks(2, measured, samples=samples)):
        assert scores.keys() == expected.keys()
        for name, value in scores.items():
            torch.testing.assert_close(
                torch.tensor(value), torch.tensor(expected[name]), rtol=1e-5, atol=1e-6, msg=name
            )
