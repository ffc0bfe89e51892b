"""Metrics of a classifier against torchmetrics; 2 seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import surefoot as sf
from refused import refused
from surefoot.metrics.contract import join_batches

CLASSES = 7
SAMPLES = 60


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return logits, labels


def report_of(logits: Any, labels: Any, *, batch_size: int = SAMPLES) -> dict[str, Any]:
    all_logits = torch.as_tensor(logits)
    all_labels = torch.as_tensor(labels)
    report = sf.metrics.ClassificationReport(all_logits.shape[1])
    batches = zip(all_logits.split(batch_size), all_labels.split(batch_size), strict=True)
    counts = [report.per_batch(*batch) for batch in batches]
    return report.whole(*join_batches(counts))  # type: ignore[no-any-return]


def torchmetrics_accuracy(
    logits: torch.Tensor, labels: torch.Tensor, *, k: int, ignore_index: int | None = None
) -> float:
    from torchmetrics.functional.classification import multiclass_accuracy

    accuracy = multiclass_accuracy(
        logits,
        labels,
        num_classes=CLASSES,
        average="micro",
        top_k=k,
        ignore_index=ignore_index,
    )
    return float(accuracy)


def test_the_confusion_matrix_is_that_of_torchmetrics() -> None:
    from torchmetrics.functional.classification import multiclass_confusion_matrix

    logits, labels = data()

    confusion = report_of(logits, labels)["confusion"]

    expected = multiclass_confusion_matrix(logits, labels, num_classes=CLASSES)
    assert confusion == expected.tolist()


@pytest.mark.parametrize(("name", "k"), [("accuracy", 1), ("top_5_accuracy", 5)])
def test_accuracies_are_those_of_torchmetrics(name: str, k: int) -> None:
    logits, labels = data()

    report = report_of(logits, labels)
    mean = sf.metrics.top_k_accuracy(logits, labels, k=k)

    expected = pytest.approx(torchmetrics_accuracy(logits, labels, k=k), abs=1e-6)
    assert report[name] == expected
    assert float(mean.value) == expected


def test_the_likeliest_class_is_that_of_the_report() -> None:
    logits, labels = data()

    mean = sf.metrics.accuracy(logits, labels)

    assert float(mean.value) == pytest.approx(report_of(logits, labels)["accuracy"])


def data_with_ignored() -> tuple[torch.Tensor, torch.Tensor]:
    """A third of the targets is 255."""
    logits, labels = data()
    labels[::3] = 255
    return logits, labels


def report_without_ignored() -> dict[str, Any]:
    report = sf.metrics.ClassificationReport(CLASSES, ignore_index=255)
    return report.whole(*report.per_batch(*data_with_ignored()))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "k"), [("accuracy", 1), ("top_5_accuracy", 5)])
def test_ignored_targets_count_as_in_torchmetrics(name: str, k: int) -> None:
    logits, labels = data_with_ignored()

    mean = sf.metrics.top_k_accuracy(k=k, ignore_index=255)(logits, labels)

    theirs = torchmetrics_accuracy(logits, labels, k=k, ignore_index=255)
    expected = pytest.approx(theirs, abs=1e-6)
    assert report_without_ignored()[name] == expected
    assert isinstance(mean, sf.Mean)
    assert float(mean.value) == expected


def test_ignored_targets_are_not_counted() -> None:
    logits, labels = data_with_ignored()
    report = report_without_ignored()

    mean = sf.metrics.accuracy(logits, labels, ignore_index=255)
    of_positions = sf.metrics.accuracy(logits.T[None], labels[None], ignore_index=255)

    assert float(mean.value) == pytest.approx(report["accuracy"])
    assert float(of_positions.value) == pytest.approx(report["accuracy"])
    assert int(mean.count) == sum(map(sum, report["confusion"])) == 40


def test_a_class_that_is_ignored_is_not_right_either() -> None:
    logits, _ = data()

    mean = sf.metrics.accuracy(logits, logits.argmax(1), ignore_index=2)

    assert int(mean.count) < SAMPLES


def segmented(model: Any, batch: Any) -> sf.Mean:
    return sf.losses.cross_entropy(model(batch[0]), batch[1], ignore_index=255)


def build_with_ignored(metrics: Any) -> sf.Run:
    """A run whose loss ignores 255, which some targets are."""
    logits, labels = data()
    labels[:20] = 255
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


RIGHT = sf.metrics.accuracy(ignore_index=255)
WRONG = sf.metrics.accuracy(ignore_index=1)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (sf.metrics.accuracy, "accuracy"),
        ({"own": sf.metrics.accuracy()}, "accuracy"),
        (sf.metrics.top_k_accuracy(k=2), "top_k_accuracy"),
        ({"right": RIGHT, "wrong": WRONG}, "accuracy"),
    ],
)
def test_targets_outside_the_classes_are_named_at_the_start(metric: Any, name: str) -> None:
    run = build_with_ignored(metric)

    with refused("targets-outside-classes", metric=name, classes=CLASSES):
        run.train()


def test_targets_outside_the_classes_may_be_ignored() -> None:
    run = build_with_ignored(RIGHT)

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

    assert int(mean.total) == 1
    assert int(mean.count) == 2
    assert report_of(logits, labels) == {
        "accuracy": 0.5,
        "confusion": [[1, 0, 1], [0, 0, 0], [0, 0, 0]],
    }


def test_positions_are_counted_as_samples_are() -> None:
    logits, labels = data()
    classes_second = logits.view(6, 10, CLASSES).movedim(2, 1)
    expected = report_of(logits, labels)
    report = sf.metrics.ClassificationReport(CLASSES)

    of_positions = report.whole(*report.per_batch(classes_second, labels.view(6, 10)))
    mean = sf.metrics.accuracy(classes_second, labels.view(6, 10))

    assert of_positions == expected
    assert float(mean.value) == pytest.approx(expected["accuracy"])


def test_positions_with_classes_last_are_refused() -> None:
    logits, labels = data()

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
    report = report_of(torch.zeros(10, 10), torch.arange(10))

    assert report["accuracy"] == 0.1
    assert report["top_5_accuracy"] == 0.5


def test_a_logit_that_is_no_number_is_never_right_and_is_likelier_than_any() -> None:
    all_nan = report_of(torch.full((2, 10), torch.nan), [0, 5])
    assert all_nan["accuracy"] == all_nan["top_5_accuracy"] == 0

    assert report_of([[1.0, torch.nan, 0.0]], [0]) == {
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

    with refused("outputs-of-one-class", outputs=shape) as caught:
        metric(outputs, targets)

    _, code = caught.value.remedies[-1].split("metrics=")
    written = eval(code, {"sf": sf})["accuracy"]
    assert float(written(outputs, targets).value) == 0.75
