"""One pass of the model for each batch, whatever the number of metrics; each metric as its
reference has it. (4 s)
"""

from __future__ import annotations

import json
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
from surefoot.errors import Setting

CLASSES, SAMPLES, BATCHES = 7, 97, 20  # 19 batches of 5, and one of 2
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
    return torch.randn(SAMPLES, 8, generator=generator), torch.randint(
        CLASSES, (SAMPLES,), generator=generator
    )


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
    hits = [np.sum((guesses == each) & (truth == each)) for each in range(CLASSES)]
    sizes = [np.sum(guesses == each) + np.sum(truth == each) for each in range(CLASSES)]
    return {
        "loss": float(-np.log(shares[np.arange(SAMPLES), truth]).mean()),
        "accuracy": float((guesses == truth).mean()),
        "top_k_accuracy": float((order[:, :3] == truth[:, None]).any(axis=1).mean()),
        "MulticlassF1Score": float(
            np.mean([2 * hit / max(1, size) for hit, size in zip(hits, sizes, strict=True)])
        ),
        "largest": float(logits.max()),
    }


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
    assert values == pytest.approx(
        {name: value for name, value in by_hand().items() if name != "loss"}, rel=1e-5
    )


def test_predict_gives_the_outputs_if_there_is_one() -> None:
    def reversed_targets(model: Any, batch: Any) -> Any:
        return model(batch[0]), CLASSES - 1 - batch[1]

    inputs, labels = data()
    split = sf.Split(
        (inputs, CLASSES - 1 - labels), metrics=metrics(), predict=reversed_targets, loss=False
    )
    values = sf.evaluate(model(), split, loss=with_outputs)
    assert values == pytest.approx(
        {name: value for name, value in by_hand().items() if name != "loss"}, rel=1e-5
    )


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
    with refused("metric-without-name"):
        sf.evaluate(model(), sf.Split(data(), metrics=named["n"]))


def test_a_metric_of_the_same_name_takes_the_place_of_what_the_loss_logs() -> None:
    def wrong_accuracy(model: Any, batch: Any) -> Any:
        return plain(model, batch), {"accuracy": sf.Mean(5.0, 1)}

    values = sf.evaluate(
        model(), sf.Split(data(), metrics=sf.metrics.accuracy), loss=wrong_accuracy
    )
    assert values["accuracy"] == pytest.approx(by_hand()["accuracy"])


def test_two_metrics_that_return_one_name_are_refused() -> None:
    def again(outputs: Any, targets: Any) -> Any:
        return {"accuracy": sf.metrics.accuracy(outputs, targets)}

    with refused("metric-name-twice", metric="accuracy"):
        sf.evaluate(model(), sf.Split(data(), metrics=[sf.metrics.accuracy, again]))


def test_a_batch_that_is_not_of_two_needs_a_pair() -> None:
    split = sf.Split((*data(), torch.arange(SAMPLES)), metrics=sf.metrics.accuracy)
    with refused("outputs-and-targets-unknown"):
        sf.evaluate(model(), split, loss=plain)
    assert sf.evaluate(model(), split, loss=with_outputs)["accuracy"] == pytest.approx(
        by_hand()["accuracy"]
    )


@pytest.mark.parametrize("returned", [torch.ones(5), (1, 2)])
def test_a_metric_that_returns_no_mean_is_refused_with_its_split(returned: Any) -> None:
    metrics = {"share": lambda outputs, targets: returned}
    run = run_of(plain, splits={"held_out": sf.Split(data(), metrics=metrics, batch_size=5)})
    kind = type(returned).__name__
    with refused("metric-not-a-mean", metric="share", returned=kind) as refusal:
        run.train()
    assert refusal.value.places == ("split 'held_out'",)


@pytest.mark.parametrize("returned", [(1, 2), ([1], [2]), 3, {"logits": 3}])
def test_a_loss_with_anything_else_beside_it_is_refused(returned: Any) -> None:
    def wrong(model: Any, batch: Any) -> Any:
        beside = returned if isinstance(returned, tuple) else (returned,)
        return plain(model, batch), *beside

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
    run = run_of(lambda model, batch: (plain(model, batch), second))
    with refused("loss-second-value", returned=returned):
        run.train()
    assert run.state.step == 0


@pytest.mark.parametrize(
    ("mean", "part"),
    [(sf.Mean(torch.ones(5), 5), "total"), (sf.Mean(5.0, torch.ones(5)), "count")],
)
def test_a_mean_of_tensors_of_several_numbers_is_refused(mean: sf.Mean, part: str) -> None:
    run = run_of(lambda model, batch: (plain(model, batch), {"accuracy": mean}))
    with refused("mean-of-tensors", part=part, shape=(5,)):
        run.train()
    metrics = {"share": lambda outputs, targets: mean}
    run = run_of(plain, splits={"held_out": sf.Split(data(), metrics=metrics, batch_size=5)})
    with refused("mean-of-tensors", part=part, shape=(5,)) as caught:
        run.train()
    assert caught.value.places == ("split 'held_out'",)


def run_of(loss: Any, **changes: Any) -> sf.Run:
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


def run_with(loss: Any, out: Path | None = None, **changes: Any) -> sf.Run:
    run = run_of(loss, run_dir=out, **changes)
    run.train()
    return run


def test_outputs_beside_the_loss_change_no_bit_of_a_training() -> None:
    weights = [run_with(loss).state.parameters for loss in (plain, with_outputs)]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_confusion_matrix_stands_in_the_records_and_sums_to_the_split(tmp_path: Path) -> None:
    split = sf.Split(data(), metrics=sf.metrics.ClassificationReport([*"abcdefg"]))
    run = run_with(plain, tmp_path, splits={"val": split})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    matrix = [line["val/confusion"] for line in lines if "val/confusion" in line][-1]
    assert [sum(row) for row in matrix] == data()[1].bincount(minlength=CLASSES).tolist()
    values = run.evaluate()
    assert values["val/accuracy"] == sum(matrix[index][index] for index in range(CLASSES)) / SAMPLES
    assert "val/confusion" not in values


def with_accuracy(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]), {"accuracy": sf.metrics.accuracy(logits, batch[1])}


def measured(out: Path, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "log_every": "2 steps",
        "save_every": "3 steps",
        "report": False,
        "run_dir": out,
    }
    settings |= {
        "model": Counting,
        "loss": with_accuracy,
        "train_data": data(),
        "batch_size": 24,
        "micro_batch_size": 8,
    }
    settings |= {
        "length": "6 steps",
        "optimizer": sf.optim.sgd(lr=1e-2),
        "check_state": False,
        "console": False,
    }
    return sf.Run(**(settings | changes))


def train_records(out: Path) -> list[Any]:
    """A resumed run writes the records after its checkpoint again."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [
        (line["step"], line["loss"], line["accuracy"]) for line in lines if line["kind"] == "train"
    ]
    return [*{row[0]: row for row in rows}.values()]


def test_training_metrics_are_those_of_the_training_batches_and_cost_no_pass(
    tmp_path: Path,
) -> None:
    """The reference computes the accuracy of every batch before its update."""
    reference = Counting()
    right = list[int]()
    run = measured(tmp_path / "measured")
    with run:
        reference.load_state_dict(run.state.model.state_dict())
        calls = run.state.model.calls
        for step in run:
            with torch.no_grad():
                guesses = [reference(part.batch[0]).argmax(1) for part in step.micro_batches]
            right.append(
                sum(
                    int((each == part.batch[1]).sum())
                    for each, part in zip(guesses, step.micro_batches, strict=True)
                )
            )
            reference.load_state_dict(run.state.model.state_dict())
        assert run.state.model.calls - calls == 6 * 3
    accuracies = [accuracy for _, _, accuracy in train_records(tmp_path / "measured")]
    assert accuracies == pytest.approx([(right[step] + right[step + 1]) / 48 for step in (0, 2, 4)])


def test_training_metrics_of_a_killed_run_are_those_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """The checkpoint of step 3 lies between two records."""

    def killed() -> None:
        with measured(tmp_path / "killed") as run:
            for step in run:
                if step.index == 4:
                    assert run.parts.checkpointing is not None
                    run.parts.checkpointing.writer.wait()
                    os.kill(os.getpid(), signal.SIGKILL)

    measured(tmp_path / "whole").train()
    with open(os.devnull, "w") as nowhere:
        process = Forked(killed, stdout=nowhere)
        process.stdin.close()
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / "killed" / "checkpoints" / "step-00000003").exists()
    measured(tmp_path / "killed").train()
    assert train_records(tmp_path / "killed") == train_records(tmp_path / "whole")


def test_a_function_of_scikit_learn_scores_the_whole_split() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")

    def recall(outputs: Tensor, targets: Tensor) -> float:
        return float(sklearn.recall_score(targets, outputs.argmax(1), average="macro"))

    values = sf.evaluate(
        model(), sf.Split(data(), metrics=sf.metrics.whole_split(recall), batch_size=5)
    )
    inputs, labels = data()
    with torch.no_grad():
        guesses = model().layer(inputs).argmax(1)
    each = [float((guesses[labels == label] == label).double().mean()) for label in range(CLASSES)]
    assert values["recall"] == pytest.approx(sum(each) / CLASSES)
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
    run = run_of(plain, splits=splits, evaluate_every="5 steps", check_state=True, **settings)
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
    run = run_of(plain, splits=splits, evaluate_every="5 steps", check_state=True)
    with refused(code, **fields) as refusal:
        run.train()
    assert refusal.value.places == ("split 'val'",)
    assert run.state.step == 0


def test_the_check_of_metrics_passes_one_batch_and_changes_no_bit() -> None:
    def trained(**changes: Any) -> tuple[int, list[Tensor]]:
        split = sf.Split(data(), metrics=[sf.metrics.accuracy, *metrics()[2:]], batch_size=5)
        settings: dict[str, Any] = {
            "model": model,
            "loss": plain,
            "train_data": data(),
            "batch_size": 24,
            "length": "2 steps",
        }
        run = sf.Run(
            **settings,
            splits={"val": split},
            optimizer=sf.optim.sgd(lr=0.1),
            console=False,
            **changes,
        )
        run.train()
        return run.state.model.calls, [each.detach() for each in run.state.model.parameters()]

    checked = trained(best="max val/largest")
    unchecked = trained(best="max val/largest", check_state=False)
    assert checked[0] - unchecked[0] == 1
    assert all(torch.equal(one, other) for one, other in zip(checked[1], unchecked[1], strict=True))
