"""Scores of a classifier against torchmetrics, and in a run; 5 seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import surefoot as sf
from surefoot.metrics.classification import classification_scores, classified, top_k_accuracy

CLASSES, SAMPLES = 7, 60


def outputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, CLASSES, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)


def found(batch_size: int) -> dict[str, Any]:
    logits, labels = outputs()
    batches = zip(logits.split(batch_size), labels.split(batch_size), strict=True)
    rows = [row for batch in batches for row in classified(torch.nn.Identity(), batch)]
    return classification_scores(rows, classes=CLASSES)


def test_scores_are_those_of_torchmetrics_and_torch() -> None:
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_confusion_matrix

    logits, labels = outputs()
    scores = found(SAMPLES)
    assert scores["confusion"] == multiclass_confusion_matrix(logits, labels, num_classes=CLASSES).tolist()
    for name, k in (("accuracy", 1), ("top_5_accuracy", 5)):
        theirs = multiclass_accuracy(logits, labels, num_classes=CLASSES, average="micro", top_k=k).item()
        assert scores[name] == pytest.approx(theirs, abs=1e-6)
        assert top_k_accuracy(logits, labels, k=k).value.item() == pytest.approx(theirs, abs=1e-6)  # type: ignore[union-attr]
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 59])
def test_scores_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    scores, whole = found(batch_size), found(SAMPLES)
    assert scores.pop("confusion") == whole.pop("confusion")
    assert scores == pytest.approx(whole, abs=1e-6)


def test_of_few_classes_the_five_likeliest_are_not_told() -> None:
    rows = classified(torch.nn.Identity(), (torch.eye(5), torch.arange(5)))
    assert classification_scores(rows, classes=5).keys() == {"loss", "accuracy", "confusion"}


def test_labels_below_nought_are_not_counted_while_training() -> None:
    mean = top_k_accuracy(torch.eye(3), torch.tensor([0, -100, 0]))
    assert (int(mean.total), int(mean.count)) == (1, 2)


@pytest.mark.parametrize("k", [0, 4])
def test_a_k_that_is_no_number_of_classes_is_refused(k: int) -> None:
    with pytest.raises(sf.ConfigError, match=f"k = {k} of 3 classes"):
        top_k_accuracy(torch.eye(3), torch.arange(3), k=k)


def test_the_confusion_matrix_stands_in_the_records_and_sums_to_the_split(tmp_path: Path) -> None:
    logits, labels = outputs()
    run = sf.Run(
        model=lambda: torch.nn.Linear(CLASSES, CLASSES),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        train_data=(logits, labels),
        batch_size=20,
        length="3 steps",
        optimizer=sf.optim.sgd(0.1),
        splits={
            "val": sf.Split(
                (logits, labels),
                loss=False,
                outputs=sf.metrics.classified,
                judge=lambda rows: sf.metrics.classification_scores(rows, classes=CLASSES),
            )
        },
        run_dir=tmp_path,
        precision="fp32",
        console=False,
    )
    run.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    matrix = next(line["val/confusion"] for line in lines if "val/confusion" in line)
    assert [sum(row) for row in matrix] == labels.bincount(minlength=CLASSES).tolist()
    assert run.evaluate()["val/accuracy"] == sum(matrix[place][place] for place in range(CLASSES)) / SAMPLES


def scores_of(logits: list[list[float]], labels: list[int]) -> dict[str, Any]:
    rows = classified(torch.nn.Identity(), (torch.tensor(logits), torch.tensor(labels)))
    return classification_scores(rows, classes=len(logits[0]))


def test_of_equal_logits_five_are_among_the_five_likeliest() -> None:
    """All alike, as at step 0 with a head of zeros: each label once, of ten."""
    scores = scores_of([[0.0] * 10] * 10, list(range(10)))
    assert (scores["accuracy"], scores["top_5_accuracy"]) == (0.1, 0.5)


def test_a_logit_that_is_no_number_is_never_right_and_is_likelier_than_any() -> None:
    nan = float("nan")
    assert scores_of([[nan] * 10] * 2, [0, 5])["accuracy"] == scores_of([[nan] * 10] * 2, [0, 5])["top_5_accuracy"] == 0
    rows = classified(torch.nn.Identity(), (torch.tensor([[1.0, nan, 0.0]]), torch.tensor([0])))
    assert (rows[0].guess, rows[0].rank) == (1, 1)
