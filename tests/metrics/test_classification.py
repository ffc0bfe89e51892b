"""Metrics of a classifier against torchmetrics; 2 seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import surefoot as sf
from refused import refused
from surefoot.metrics.contract import join_batches

CLASSES, SAMPLES = 7, 60


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, CLASSES, generator=generator), torch.randint(
        CLASSES, (SAMPLES,), generator=generator
    )


def report_of(logits: Any, labels: Any, *, batch_size: int = SAMPLES) -> dict[str, Any]:
    logits, labels = torch.as_tensor(logits), torch.as_tensor(labels)
    report = sf.metrics.ClassificationReport(logits.shape[1])
    batches = zip(logits.split(batch_size), labels.split(batch_size), strict=True)
    return report.whole(*join_batches([report.per_batch(*batch) for batch in batches]))  # type: ignore[no-any-return]


def test_metrics_are_those_of_torchmetrics() -> None:
    from torchmetrics.functional.classification import (
        multiclass_accuracy,
        multiclass_confusion_matrix,
    )

    logits, labels = data()
    report = report_of(logits, labels)
    assert (
        report["confusion"]
        == multiclass_confusion_matrix(logits, labels, num_classes=CLASSES).tolist()
    )
    for name, k in (("accuracy", 1), ("top_5_accuracy", 5)):
        theirs = multiclass_accuracy(
            logits, labels, num_classes=CLASSES, average="micro", top_k=k
        ).item()
        assert report[name] == pytest.approx(theirs, abs=1e-6)
        mean = sf.metrics.top_k_accuracy(logits, labels, k=k)
        assert float(mean.value) == pytest.approx(theirs, abs=1e-6)
    assert float(sf.metrics.accuracy(logits, labels).value) == pytest.approx(report["accuracy"])


def test_ignored_targets_count_as_in_torchmetrics() -> None:
    from torchmetrics.functional.classification import multiclass_accuracy

    logits, labels = data()
    labels[::3] = 255
    report = sf.metrics.ClassificationReport(CLASSES, ignore_index=255)
    found = report.whole(*report.per_batch(logits, labels))
    for name, k in (("accuracy", 1), ("top_5_accuracy", 5)):
        theirs = multiclass_accuracy(
            logits, labels, num_classes=CLASSES, average="micro", top_k=k, ignore_index=255
        ).item()
        assert found[name] == pytest.approx(theirs, abs=1e-6)
        mean = sf.metrics.top_k_accuracy(k=k, ignore_index=255)(logits, labels)
        assert isinstance(mean, sf.Mean)
        assert float(mean.value) == pytest.approx(theirs, abs=1e-6)
    mean = sf.metrics.accuracy(logits, labels, ignore_index=255)
    assert float(mean.value) == pytest.approx(found["accuracy"])
    assert int(mean.count) == sum(map(sum, found["confusion"])) == 40
    positions = sf.metrics.accuracy(logits.T[None], labels[None], ignore_index=255)
    assert float(positions.value) == pytest.approx(found["accuracy"])
    # a class that is ignored is not right either
    assert int(sf.metrics.accuracy(logits, logits.argmax(1), ignore_index=2).count) < SAMPLES


def segmented(model: Any, batch: Any) -> sf.Mean:
    return sf.losses.cross_entropy(model(batch[0]), batch[1], ignore_index=255)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (sf.metrics.accuracy, "accuracy"),
        ({"own": sf.metrics.accuracy()}, "accuracy"),
        (sf.metrics.top_k_accuracy(k=2), "top_k_accuracy"),
        ([sf.metrics.accuracy(ignore_index=255), sf.metrics.accuracy(ignore_index=1)], "accuracy"),
    ],
)
def test_targets_outside_the_classes_are_named_at_the_start(metric: Any, name: str) -> None:
    logits, labels = data()
    labels[:20] = 255
    if isinstance(metric, list):
        metric = {"right": metric[0], "wrong": metric[1]}

    def run_of(metrics: Any) -> sf.Run:
        return sf.Run(
            model=lambda: torch.nn.Linear(CLASSES, CLASSES),
            loss=segmented,
            train_data=(logits, labels),
            splits={"val": sf.Split((logits, labels), metrics=metrics)},
            optimizer=sf.optim.sgd(lr=0.1),
            batch_size=30,
            length="1 step",
            device="cpu",
            console=False,
        )

    with refused("targets-outside-classes", metric=name, classes=CLASSES):
        run_of(metric).train()
    run = run_of(sf.metrics.accuracy(ignore_index=255))
    run.train()
    assert run.state.step == 1


@pytest.mark.parametrize("batch_size", [1, 7, 59])
def test_the_report_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    assert report_of(*data(), batch_size=batch_size) == report_of(*data())


def test_with_few_classes_the_five_likeliest_are_not_reported() -> None:
    assert report_of(torch.eye(5), torch.arange(5)).keys() == {"accuracy", "confusion"}


def test_labels_below_nought_are_not_counted() -> None:
    logits = torch.eye(3)
    labels = torch.tensor([0, -100, 0])
    mean = sf.metrics.top_k_accuracy(logits, labels)
    assert (int(mean.total), int(mean.count)) == (1, 2)
    assert report_of(logits, labels) == {
        "accuracy": 0.5,
        "confusion": [[1, 0, 1], [0, 0, 0], [0, 0, 0]],
    }


def test_positions_are_counted_as_samples_are() -> None:
    logits, labels = data()
    of_positions = logits.view(6, 10, CLASSES).movedim(2, 1), labels.view(6, 10)
    report = sf.metrics.ClassificationReport(CLASSES)
    assert report.whole(*report.per_batch(*of_positions)) == report_of(logits, labels)
    assert float(sf.metrics.accuracy(*of_positions).value) == pytest.approx(
        report_of(logits, labels)["accuracy"]
    )
    with refused("targets-misfit-outputs", outputs=(6, 10, CLASSES), targets=(6, 10)):
        sf.metrics.accuracy(logits.view(6, 10, CLASSES), labels.view(6, 10))


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_that_is_no_number_of_classes_is_refused(k: int) -> None:
    with refused("setting-out-of-range", setting="k", value=k):
        sf.metrics.top_k_accuracy(torch.eye(3), torch.arange(3), k=k)


def test_a_class_beyond_the_last_is_refused() -> None:
    report = sf.metrics.ClassificationReport(["cat", "dog"])
    with refused("class-beyond-report", value=2, classes=2):
        report.whole(*report.per_batch(torch.eye(3), torch.arange(3)))


def test_of_equal_logits_five_are_among_the_five_likeliest() -> None:
    """All alike, as at step 0 with a head of zeros: each label once, of ten."""
    report = report_of([[0.0] * 10] * 10, list(range(10)))
    assert (report["accuracy"], report["top_5_accuracy"]) == (0.1, 0.5)


def test_a_logit_that_is_no_number_is_never_right_and_is_likelier_than_any() -> None:
    nan = float("nan")
    report = report_of([[nan] * 10] * 2, [0, 5])
    assert report["accuracy"] == report["top_5_accuracy"] == 0
    assert report_of([[1.0, nan, 0.0]], [0]) == {
        "accuracy": 0.0,
        "confusion": [[0, 1, 0], [0, 0, 0], [0, 0, 0]],
    }


@pytest.mark.parametrize(
    "metric",
    [sf.metrics.accuracy, sf.metrics.top_k_accuracy, sf.metrics.ClassificationReport(2).per_batch],
)
@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_one_output_for_two_classes_is_refused_with_what_to_write(
    metric: Any, shape: tuple[int, ...]
) -> None:
    """The largest of one output is always that of class 0: 0.35 of 20 labels were silently
    right.
    """
    outputs = torch.tensor([0.5, -1.0, 2.0, -0.1]).view(shape)
    targets = torch.tensor([1, 0, 0, 0])
    with refused("outputs-of-one-class", outputs=shape) as raised:
        metric(outputs, targets)
    written = eval(raised.value.remedies[-1].split("metrics=")[1], {"sf": sf})["accuracy"]
    assert float(written(outputs, targets).value) == 0.75
