"""One pass of the model for each batch, whatever the number of metrics; each metric as its
reference has it. (4 s)
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from forked import Forked
from refused import refused
from same_bits import assert_same_bits, weights
from surefoot.errors import Setting
from surefoot.tracking.jsonl import records

CLASSES = 7
SAMPLES = 97
BATCHES = 20  # 19 batches of 5, and one of 2
TOP_3 = partial(sf.metrics.top_k_accuracy, k=3)


class Counting(nn.Module):
    """A linear classifier that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return torch.as_tensor(self.layer(inputs))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return inputs, labels


def model() -> Counting:
    torch.manual_seed(1)
    return Counting()


def plain(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def with_outputs(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), (logits, batch[1])


def counted_with_outputs(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return sf.losses.cross_entropy(logits, batch[1]), (logits, batch[1])


def with_means(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"entropy": sf.Mean(logits.sum() * 0, len(logits))}


def by_hand() -> dict[str, float]:
    """In float64, by NumPy."""
    inputs, labels = data()
    with torch.no_grad():
        logits: Any = model().layer(inputs).double().numpy()
    truth = labels.numpy()
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-logits, axis=1)
    guesses = order[:, 0]
    f1_scores = []
    for label in range(CLASSES):
        hits = np.sum((guesses == label) & (truth == label))
        size = np.sum(guesses == label) + np.sum(truth == label)
        f1_scores.append(2 * hits / max(1, size))
    return {
        "loss": float(-np.log(shares[np.arange(SAMPLES), truth]).mean()),
        "accuracy": float((guesses == truth).mean()),
        "top_k_accuracy": float((order[:, :3] == truth[:, None]).any(axis=1).mean()),
        "MulticlassF1Score": float(np.mean(f1_scores)),
        "largest": float(logits.max()),
    }


def metrics_by_hand() -> dict[str, float]:
    """Without the loss."""
    values = by_hand()
    del values["loss"]
    return values


def largest(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


def metrics() -> list[Any]:
    from torchmetrics.classification import MulticlassF1Score

    return [
        sf.metrics.accuracy,
        TOP_3,
        MulticlassF1Score(CLASSES, average="macro"),
        sf.metrics.whole_split(largest),
    ]


@pytest.mark.parametrize("loss", [plain, with_outputs, counted_with_outputs, with_means])
def test_a_batch_is_passed_once_whatever_the_number_of_metrics(loss: Any) -> None:
    counting = model()
    values = sf.evaluate(counting, sf.Split(data(), metrics=metrics(), batch_size=5), loss=loss)
    assert counting.calls == BATCHES + 3  # half a batch and its halves, for the loss contract
    values.pop("entropy", None)
    assert values == pytest.approx(by_hand(), rel=1e-5)
    assert not counting._forward_hooks, "and the model is left as it was"


def test_without_a_loss_the_model_gives_the_outputs() -> None:
    counting = model()
    values = sf.evaluate(counting, sf.Split(data(), metrics=metrics(), batch_size=5))
    assert counting.calls == BATCHES
    assert values == pytest.approx(metrics_by_hand(), rel=1e-5)


def test_predict_gives_the_outputs_if_there_is_one() -> None:
    def reversed_targets(model: Any, batch: Any) -> Any:
        return model(batch[0]), CLASSES - 1 - batch[1]

    inputs, labels = data()
    reversed_data = (inputs, CLASSES - 1 - labels)
    split = sf.Split(reversed_data, metrics=metrics(), predict=reversed_targets, loss=False)

    values = sf.evaluate(model(), split, loss=with_outputs)

    assert values == pytest.approx(metrics_by_hand(), rel=1e-5)


def test_an_output_that_the_loss_writes_to_is_computed_again() -> None:
    def writing(model: Any, batch: Any) -> Tensor:
        logits = model(batch[0])
        return logits.zero_().sum()  # type: ignore[no-any-return]

    values = sf.evaluate(model(), sf.Split(data(), metrics=sf.metrics.accuracy), loss=writing)
    assert values == pytest.approx({"loss": 0.0, "accuracy": by_hand()["accuracy"]})


def test_an_output_for_other_inputs_is_not_taken() -> None:
    def of_others(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(-batch[0]), batch[1])

    values = sf.evaluate(model(), sf.Split(data(), metrics=sf.metrics.accuracy), loss=of_others)
    assert values["accuracy"] == pytest.approx(by_hand()["accuracy"])


def test_metrics_with_names_of_ones_own() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

    collection = MetricCollection(
        [MulticlassAccuracy(CLASSES, average="micro"), MulticlassPrecision(CLASSES)]
    )
    named = {
        "first": sf.metrics.accuracy,
        "both": collection,
        "n": lambda outputs, targets: sf.Mean(len(outputs), 1),
    }

    values = sf.evaluate(model(), sf.Split(data(), metrics=named, batch_size=SAMPLES))

    assert set(values) == {"first", "both_MulticlassAccuracy", "both_MulticlassPrecision", "n"}
    assert values["first"] == pytest.approx(values["both_MulticlassAccuracy"])
    assert values["n"] == SAMPLES
    assert collection["MulticlassAccuracy"].update_count == 0, "the user's object has seen nothing"


def test_a_metric_without_a_name_is_refused() -> None:
    nameless = sf.Split(data(), metrics=lambda outputs, targets: sf.Mean(len(outputs), 1))

    with refused("metric-without-name"):
        sf.evaluate(model(), nameless)


def test_a_metric_of_the_same_name_takes_the_place_of_what_the_loss_logs() -> None:
    def wrong_accuracy(model: Any, batch: Any) -> Any:
        return plain(model, batch), {"accuracy": sf.Mean(5.0, 1)}

    split = sf.Split(data(), metrics=sf.metrics.accuracy)

    values = sf.evaluate(model(), split, loss=wrong_accuracy)

    assert values["accuracy"] == pytest.approx(by_hand()["accuracy"])


def test_two_metrics_that_return_one_name_are_refused() -> None:
    def again(outputs: Any, targets: Any) -> Any:
        return {"accuracy": sf.metrics.accuracy(outputs, targets)}

    split = sf.Split(data(), metrics=[sf.metrics.accuracy, again])

    with refused("metric-name-twice", metric="accuracy"):
        sf.evaluate(model(), split)


def test_a_batch_that_is_not_of_two_needs_a_pair() -> None:
    split = sf.Split((*data(), torch.arange(SAMPLES)), metrics=sf.metrics.accuracy)

    with refused("outputs-and-targets-unknown"):
        sf.evaluate(model(), split, loss=plain)

    values = sf.evaluate(model(), split, loss=with_outputs)
    assert values["accuracy"] == pytest.approx(by_hand()["accuracy"])


@pytest.mark.parametrize("returned", [torch.ones(5), (1, 2)])
def test_a_metric_that_returns_no_mean_is_refused_with_its_split(returned: Any) -> None:
    metrics = {"share": lambda outputs, targets: returned}
    run = build(plain, splits={"held_out": sf.Split(data(), metrics=metrics, batch_size=5)})

    type_name = type(returned).__name__
    with refused("metric-not-a-mean", metric="share", returned=type_name) as caught:
        run.train()

    assert caught.value.places == ("split 'held_out'",)


@pytest.mark.parametrize("others", [(1, 2), ([1], [2]), (3,), ({"logits": 3},)])
def test_a_loss_with_anything_else_beside_it_is_refused(others: tuple[Any, ...]) -> None:
    def wrong(model: Any, batch: Any) -> Any:
        return plain(model, batch), *others

    with refused("loss-second-value"):
        sf.evaluate(model(), sf.Split(data()), loss=wrong)


@pytest.mark.parametrize(
    ("second", "returned"),
    [
        ({"accuracy": 0.5}, "'accuracy' as float"),
        ({"accuracy": sf.Mean(1, 2), "recall": torch.ones(())}, "'recall' as Tensor"),
        ([1, 2], "(Tensor, list)"),
        (torch.ones(5), "(Tensor, Tensor)"),
        (sf.Mean(1.0, 2), "(Tensor, Mean)"),
        (None, "(Tensor, NoneType)"),
    ],
)
def test_a_second_value_of_a_loss_that_is_neither_is_refused_in_the_first_step(
    second: Any, returned: str
) -> None:
    run = build(lambda model, batch: (plain(model, batch), second))

    with refused("loss-second-value", returned=returned):
        run.train()

    assert run.state.step == 0


several_numbers = pytest.mark.parametrize(
    ("mean", "part"),
    [(sf.Mean(torch.ones(5), 5), "total"), (sf.Mean(5.0, torch.ones(5)), "count")],
)


@several_numbers
def test_a_mean_of_tensors_of_several_numbers_beside_a_loss_is_refused(
    mean: sf.Mean, part: str
) -> None:
    run = build(lambda model, batch: (plain(model, batch), {"accuracy": mean}))

    with refused("mean-of-tensors", part=part, shape=(5,)):
        run.train()


@several_numbers
def test_a_mean_of_tensors_of_several_numbers_from_a_metric_is_refused(
    mean: sf.Mean, part: str
) -> None:
    metrics = {"share": lambda outputs, targets: mean}
    run = build(plain, splits={"held_out": sf.Split(data(), metrics=metrics, batch_size=5)})

    with refused("mean-of-tensors", part=part, shape=(5,)) as caught:
        run.train()

    assert caught.value.places == ("split 'held_out'",)


def build(loss: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": Counting,
        "loss": loss,
        "train_data": data(),
        "batch_size": 24,
        "micro_batch_size": 8,
        "length": "6 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "check_state": False,  # the model counts its calls
        "console": False,
    }
    return sf.Run(**(settings | changes))


def test_outputs_beside_the_loss_change_no_bit_of_a_training() -> None:
    without = build(plain)
    without.train()
    beside = build(with_outputs)
    beside.train()

    assert_same_bits(weights(beside), weights(without))


def test_the_confusion_matrix_stands_in_the_records_and_sums_to_the_split(tmp_path: Path) -> None:
    split = sf.Split(data(), metrics=sf.metrics.ClassificationReport([*"abcdefg"]))
    run = build(plain, run_dir=tmp_path, splits={"val": split})

    run.train()

    val_records = [
        record for record in records(tmp_path / "metrics.jsonl") if "val/confusion" in record
    ]
    matrix = np.array(val_records[-1]["val/confusion"])
    _, labels = data()
    assert matrix.sum(axis=1).tolist() == labels.bincount(minlength=CLASSES).tolist()
    values = run.evaluate()
    assert values["val/accuracy"] == matrix.trace() / SAMPLES
    assert "val/confusion" not in values


def with_accuracy(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"accuracy": sf.metrics.accuracy(logits, batch[1])}


def build_measured(run_dir: Path) -> sf.Run:
    """A run whose loss gives the accuracy of its batches."""
    return build(
        with_accuracy,
        run_dir=run_dir,
        log_every="2 steps",
        save_every="3 steps",
        optimizer=sf.optim.sgd(lr=1e-2),
        report=False,
    )


def logged_values(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Losses and accuracies by step; a resumed run writes the records after its checkpoint
    again.
    """
    values = {}
    for record in records(run_dir / "metrics.jsonl"):
        if record["kind"] == "train":
            values[record["step"]] = (record["loss"], record["accuracy"])
    return values


def test_training_metrics_are_those_of_the_training_batches_and_cost_no_pass(
    tmp_path: Path,
) -> None:
    """The reference computes the accuracy of every batch before its update."""
    reference = Counting()
    right_counts = []
    run = build_measured(tmp_path)
    with run:
        reference.load_state_dict(run.state.model.state_dict())
        calls = run.state.model.calls
        for step in run:
            right_counts.append(count_right(reference, step))
            reference.load_state_dict(run.state.model.state_dict())
        assert run.state.model.calls - calls == 6 * 3

    accuracies = [accuracy for _, accuracy in logged_values(tmp_path).values()]
    expected = [(right_counts[step] + right_counts[step + 1]) / 48 for step in (0, 2, 4)]
    assert accuracies == pytest.approx(expected)


def count_right(model: nn.Module, step: sf.Step) -> int:
    """The samples of a step that a model gets right."""
    count = 0
    for micro_batch in step.micro_batches:
        inputs, labels = micro_batch.batch
        with torch.no_grad():
            count += int((model(inputs).argmax(1) == labels).sum())
    return count


def test_training_metrics_of_a_killed_run_are_those_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """The checkpoint of step 3 lies between two records."""

    def train_and_die() -> None:
        with build_measured(tmp_path / "killed") as run:
            for step in run:
                if step.index == 4:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

    build_measured(tmp_path / "whole").train()
    with open(os.devnull, "w") as nowhere:
        process = Forked(train_and_die, stdout=nowhere)
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints" / "step-00000003").exists()

    build_measured(tmp_path / "killed").train()

    assert logged_values(tmp_path / "killed") == logged_values(tmp_path / "whole")


def test_a_function_of_scikit_learn_scores_the_whole_split() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")

    def recall(outputs: Tensor, targets: Tensor) -> float:
        return float(sklearn.recall_score(targets, outputs.argmax(1), average="macro"))

    split = sf.Split(data(), metrics=sf.metrics.whole_split(recall), batch_size=5)

    values = sf.evaluate(model(), split)

    inputs, labels = data()
    with torch.no_grad():
        guesses = model().layer(inputs).argmax(1)
    recalls = []
    for label in range(CLASSES):
        is_right = guesses[labels == label] == label
        recalls.append(float(is_right.double().mean()))
    assert values["recall"] == pytest.approx(sum(recalls) / CLASSES)


def test_a_function_of_scikit_learn_itself_is_refused() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")

    for metric in (sklearn.recall_score, partial(sklearn.recall_score, average="macro")):
        with refused("metric-of-sklearn", metric="recall_score"):
            sf.Split(data(), metrics=metric)
        with refused("metric-of-sklearn", metric="recall_score"):
            sf.metrics.whole_split(metric)


def rows_last(outputs: Tensor, targets: Tensor) -> sf.Mean:
    return sf.metrics.accuracy(outputs.T, targets)


def a_number(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


@pytest.mark.parametrize(
    ("metrics", "settings", "setting", "remedy"),
    [
        (sf.metrics.accuracy, {"best": "min val/eror"}, "best", "min val/loss"),
        ((), {"best": "max val/acc"}, "best", "min val/loss"),  # a loss is to fall
        (
            sf.metrics.accuracy,
            {"early_stopping": sf.EarlyStopping("max val/acc", patience=3)},
            "early_stopping.monitor",
            "max val/accuracy",
        ),
        (
            (),
            {"plateau": sf.ReduceLROnPlateau("min val/los", patience=3)},
            "plateau.monitor",
            "min val/loss",
        ),
    ],
)
def test_wrong_names_are_refused_before_the_first_step(
    metrics: Any, settings: Any, setting: str, remedy: str
) -> None:
    splits = {"val": sf.Split(data(), metrics=metrics)}
    run = build(plain, splits=splits, evaluate_every="5 steps", check_state=True, **settings)

    with refused("score-unknown", setting=setting) as caught:
        run.train()

    assert caught.value.remedies == (Setting(setting, remedy),)
    assert run.state.step == 0


@pytest.mark.parametrize(
    ("metrics", "code", "fields"),
    [
        (rows_last, "targets-misfit-outputs", {}),
        (lambda *_: [0.5], "metric-not-a-mean", {"metric": "", "returned": "list"}),
        (a_number, "metric-not-a-mean", {"metric": "a_number", "returned": "Tensor"}),
    ],
)
def test_wrong_metrics_are_refused_before_the_first_step(
    metrics: Any, code: str, fields: dict[str, Any]
) -> None:
    splits = {"val": sf.Split(data(), metrics=metrics)}
    run = build(plain, splits=splits, evaluate_every="5 steps", check_state=True)

    with refused(code, **fields) as caught:
        run.train()

    assert caught.value.places == ("split 'val'",)
    assert run.state.step == 0


def test_the_check_of_metrics_passes_one_batch_and_changes_no_bit() -> None:
    def trained(*, check_state: bool) -> sf.Run:
        run = sf.Run(
            model=model,
            loss=plain,
            train_data=data(),
            batch_size=24,
            length="2 steps",
            splits={"val": split},
            optimizer=sf.optim.sgd(lr=0.1),
            best="max val/largest",
            check_state=check_state,
            console=False,
        )
        run.train()
        return run

    split = sf.Split(data(), metrics=[sf.metrics.accuracy, *metrics()[2:]], batch_size=5)
    checked = trained(check_state=True)
    unchecked = trained(check_state=False)

    assert checked.state.model.calls - unchecked.state.model.calls == 1
    assert_same_bits(weights(checked), weights(unchecked))
