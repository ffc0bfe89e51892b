"""A mean of nothing is NaN: no best value, null in the records, and nothing in a step. (5 s)"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from recorded import training_records
from refused import refused
from scored_runs import build, rows
from stated import lines_naming
from surefoot.mean import Mean, means_of_sums
from surefoot.metrics import ClassificationReport, accuracy, perplexity
from surefoot.tracking.table import Table

CLASSES = 3


# --- means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("total", [0, 0.0, torch.tensor(0.0), torch.tensor(0)])
def test_a_mean_of_nothing_is_not_a_number(total: Any, count: Any) -> None:
    assert math.isnan(Mean(total, count).value)
    assert float(Mean(total, count).value_or(0.0)) == 0.0
    assert float((Mean(total, count) + Mean(6.0, 3)).value) == 2.0


def test_a_loss_of_nothing_is_zero_with_zero_gradients() -> None:
    logits = torch.zeros(2, CLASSES, requires_grad=True)
    mean = sf.losses.cross_entropy(logits, torch.tensor([-100, -100]))
    value = torch.as_tensor(mean.value)
    value.backward()

    assert value.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_without_gradients_a_loss_of_nothing_is_not_a_number() -> None:
    mean = sf.losses.cross_entropy(torch.zeros(2, CLASSES), torch.tensor([-100, -100]))

    assert torch.as_tensor(mean.value).isnan()


def test_under_no_grad_a_loss_of_nothing_is_not_a_number() -> None:
    logits = torch.zeros(2, CLASSES, requires_grad=True)
    with torch.no_grad():
        mean = sf.losses.cross_entropy(logits, torch.tensor([-100, -100]))

        assert torch.as_tensor(mean.value).isnan()


def test_a_rank_without_a_value_adds_nothing_and_all_without_one_are_nan() -> None:
    assert means_of_sums([{"loss": [[], []]}, {"loss": [[6.0], [3]]}, {}]) == {"loss": 2.0}
    assert math.isnan(means_of_sums([{"loss": [[], []]}, {"loss": [[], []]}])["loss"])


def test_the_perplexity_of_nothing_is_not_a_number() -> None:
    assert math.isnan(perplexity({"loss": math.nan}))
    assert perplexity({"loss": 800.0}) == math.inf


def test_the_accuracy_in_a_report_of_nothing_is_not_a_number() -> None:
    report = ClassificationReport(CLASSES)
    outputs, targets = report.per_batch(torch.zeros(2, CLASSES), torch.tensor([-1, -1]))

    assert math.isnan(report.whole(outputs, targets)["accuracy"])


def test_records_without_a_target_are_merged_into_those_with_some() -> None:
    table = Table(recent=0, stretches=4)
    for step, (loss, targets) in enumerate([(math.nan, 0.0), (2.0, 4.0), (1.0, 4.0)] * 2, start=1):
        table.append({"kind": "train", "step": step, "loss": loss, "targets": targets})

    _, losses = table.values(["loss"], "mean")
    assert losses.tolist() == [[2.0, 1.0, 1.5]]


# --- evaluations ----------------------------------------------------------------------------------


def of_confident(outputs: Tensor, targets: Tensor) -> sf.Mean:
    """Over nothing until step 4, then ever worse."""
    del targets
    confident = outputs >= 4
    return sf.Mean((outputs * confident).sum(), confident.sum())


def test_a_score_over_nothing_is_null_and_never_the_best(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run",
        splits={"val": sf.Split(rows(), metrics=of_confident)},
        best="min val/of_confident",
        early_stopping=sf.EarlyStopping("min val/of_confident", patience=3),
    )
    run.train()

    first, *_ = lines_naming((tmp_path / "run" / "metrics.jsonl").read_text(), '"eval"')
    raw = json.loads(first)
    assert raw["val/of_confident"] is None
    assert raw["nonfinite"] == {"val/of_confident": "nan"}
    assert run.parts.run_state.best is not None
    assert run.parts.run_state.best.step == 4
    assert run.state.step == 7


def classified(ignored: float, targets: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which this share at the front is ignored."""
    inputs = torch.randn(targets, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(targets) % CLASSES
    labels[: int(ignored * targets)] = -100
    return inputs, labels


def counted_loss(model: nn.Module, batch: Any) -> sf.Mean:
    return sf.losses.cross_entropy(model(batch[0]), batch[1])


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def built(run_dir: Path | None, loss: Any, split: sf.Split | None, **settings: Any) -> sf.Run:
    fixed: dict[str, Any] = {
        "model": lambda: nn.Linear(4, CLASSES),
        "loss": loss,
        "train_data": classified(0.0),
        "splits": None if split is None else {"val": split},
        "check_state": True,
        "length": "2 steps",
    }
    return build(run_dir, **(fixed | settings))


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (counted_loss, {}),
        (counted_loss, {"metrics": accuracy}),
        (counted_loss, {"metrics": accuracy, "loss": False}),
        (plain_loss, {}),
        (plain_loss, {"metrics": accuracy}),
    ],
)
def test_a_split_without_a_target_is_refused_before_the_first_step(
    loss: Any, options: dict[str, Any], at_end: bool
) -> None:
    split = sf.Split(classified(1.0), batch_size=3, at_end=at_end, **options)
    run = built(None, loss, split)
    with refused("split-without-targets", sf.DataError, split="val", batches=3):
        run.train()

    assert run.state.step == 0


@pytest.mark.parametrize(
    "split",
    [
        sf.Split(classified(0.5), batch_size=2),  # its last batches have targets
        sf.Split(classified(0.5), batch_size=2, metrics=accuracy, loss=False),
        # nothing for one metric
        sf.Split(classified(0.0), metrics={"rare": lambda outputs, targets: sf.Mean(0.0, 0)}),
        # one class at the front
        sf.Split((torch.zeros(6, 4), torch.tensor([1, 1, 1, 1, 0, 0])), batch_size=2),
    ],
)
def test_a_split_with_a_target_is_evaluated(split: sf.Split) -> None:
    run = built(None, counted_loss, split)
    run.train()

    assert run.state.step == 2


# --- training -------------------------------------------------------------------------------------


PARTLY_IGNORED: dict[str, Any] = {
    "train_data": classified(0.5),
    "order": "sequential",
    "length": "4 steps",
    "batch_size": 2,
    "derived": {"perplexity": perplexity},
}


def test_steps_without_a_target_are_null_in_the_records_and_move_no_weight(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        mean = counted_loss(model, batch)
        return mean, {"right": accuracy(model(batch[0]), batch[1])}

    run = built(tmp_path / "run", loss, None, **PARTLY_IGNORED)
    weights = []
    with run:
        for _ in run:
            weights.append(run.state.model.weight.detach().clone())

    trained = training_records(tmp_path / "run")
    assert [record["targets"] for record in trained] == [0.0, 0.0, 2.0, 2.0]
    for name in ("loss", "right", "perplexity"):
        is_nan = [math.isnan(record[name]) for record in trained]
        assert is_nan == [True, True, False, False]
    assert [record["skipped"] for record in trained] == [0, 0, 0, 0]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert torch.stack(weights).isfinite().all()
    again = built(tmp_path / "run", loss, None, **PARTLY_IGNORED)
    assert sf.load(again).verify(say=None).exit_status == 0


def value_of_loss(model: nn.Module, batch: Any) -> Any:
    return counted_loss(model, batch).value


@pytest.mark.parametrize("loss", [counted_loss, value_of_loss])
def test_findings_of_a_run_whose_labels_are_all_ignored_name_the_labels(
    loss: Any, tmp_path: Path
) -> None:
    run = built(
        tmp_path / "run", loss, None, train_data=classified(1.0), length="24 steps", batch_size=4
    )
    run.train()

    findings = {finding.name: finding for finding in sf.load(tmp_path / "run").diagnose()}
    assert "diverged" not in findings
    assert any("ignored" in cause for cause in findings["vanishing-gradient"].causes)
    if loss is counted_loss:
        assert any("ignored" in cause for cause in findings["loss-not-falling"].causes)
        assert findings["loss-not-falling"].numbers == {"targets": 0.0}
