"""One pass of the model for each batch, whatever the number of metrics; each metric as its reference has it. (4 s)"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

CLASSES, SAMPLES, BATCHES = 7, 97, 20  # 19 batches of 5, and one of 2
TOP_3 = partial(sf.metrics.top_k_accuracy, k=3)


class Counting(nn.Module):
    """A linear classifier that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, CLASSES), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return torch.as_tensor(self.layer(inputs))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 8, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)


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
        "MulticlassF1Score": float(np.mean([2 * hit / max(1, size) for hit, size in zip(hits, sizes, strict=True)])),
        "largest": float(logits.max()),
    }


def largest(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.max())


def metrics() -> list[Any]:
    from torchmetrics.classification import MulticlassF1Score

    return [sf.metrics.accuracy, TOP_3, MulticlassF1Score(CLASSES, average="macro"), sf.metrics.whole_split(largest)]


@pytest.mark.parametrize("loss", [plain, with_outputs, counted_with_outputs, with_means])
def test_a_batch_is_passed_once_whatever_the_number_of_metrics(loss: Any) -> None:
    counting = model()
    values = sf.evaluate(counting, sf.Split(data(), metrics=metrics(), batch_size=5), loss=loss)
    assert counting.calls == BATCHES
    values.pop("entropy", None)
    assert values == pytest.approx(by_hand(), rel=1e-5)
    assert not counting._forward_hooks, "and the model is left as it was"


def test_without_a_loss_the_model_gives_the_outputs() -> None:
    counting = model()
    values = sf.evaluate(counting, sf.Split(data(), metrics=metrics(), batch_size=5))
    assert counting.calls == BATCHES
    assert values == pytest.approx({name: value for name, value in by_hand().items() if name != "loss"}, rel=1e-5)


def test_predict_gives_the_outputs_if_there_is_one() -> None:
    def reversed_targets(model: Any, batch: Any) -> Any:
        return model(batch[0]), CLASSES - 1 - batch[1]

    inputs, labels = data()
    split = sf.Split((inputs, CLASSES - 1 - labels), metrics=metrics(), predict=reversed_targets, loss=False)
    values = sf.evaluate(model(), split, loss=with_outputs)
    assert values == pytest.approx({name: value for name, value in by_hand().items() if name != "loss"}, rel=1e-5)


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

    collection = MetricCollection([MulticlassAccuracy(CLASSES, average="micro"), MulticlassPrecision(CLASSES)])
    named = {"first": sf.metrics.accuracy, "both": collection, "n": lambda outputs, targets: sf.Mean(len(outputs), 1)}
    values = sf.evaluate(model(), sf.Split(data(), metrics=named, batch_size=SAMPLES))
    assert set(values) == {"first", "both_MulticlassAccuracy", "both_MulticlassPrecision", "n"}
    assert values["first"] == pytest.approx(values["both_MulticlassAccuracy"])
    assert values["n"] == SAMPLES
    assert collection["MulticlassAccuracy"].update_count == 0, "the user's object has seen nothing"
    with pytest.raises(sf.ConfigError, match="a metric without a name returned a single value"):
        sf.evaluate(model(), sf.Split(data(), metrics=named["n"]))


def test_a_metric_of_the_same_name_takes_the_place_of_what_the_loss_logs() -> None:
    def wrong_accuracy(model: Any, batch: Any) -> Any:
        return plain(model, batch), {"accuracy": sf.Mean(5.0, 1)}

    values = sf.evaluate(model(), sf.Split(data(), metrics=sf.metrics.accuracy), loss=wrong_accuracy)
    assert values["accuracy"] == pytest.approx(by_hand()["accuracy"])


def test_two_metrics_that_return_one_name_are_refused() -> None:
    def again(outputs: Any, targets: Any) -> Any:
        return {"accuracy": sf.metrics.accuracy(outputs, targets)}

    with pytest.raises(sf.ConfigError, match="two metrics have the name 'accuracy'"):
        sf.evaluate(model(), sf.Split(data(), metrics=[sf.metrics.accuracy, again]))


def test_a_batch_that_is_not_of_two_needs_a_pair() -> None:
    split = sf.Split((*data(), torch.arange(SAMPLES)), metrics=sf.metrics.accuracy)
    with pytest.raises(sf.ConfigError, match=r"return loss, \(outputs, targets\)"):
        sf.evaluate(model(), split, loss=plain)
    assert sf.evaluate(model(), split, loss=with_outputs)["accuracy"] == pytest.approx(by_hand()["accuracy"])


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (sf.Mean(torch.ones(5), 5), r"total is a tensor of shape \(5,\)"),
        (sf.Mean(torch.ones(()), torch.ones(5)), r"count is a tensor of shape \(5,\)"),
        (torch.ones(5), "returned a Tensor"),
        ((1, 2), "returned a tuple"),
    ],
)
def test_a_metric_that_returns_no_mean_of_scalars_is_refused_with_its_split(returned: Any, says: str) -> None:
    metrics = {"share": lambda outputs, targets: returned}
    run = sf.Run(
        model=model,
        loss=plain,
        train_data=data(),
        batch_size=5,
        length="1 step",
        optimizer=sf.optim.sgd(lr=0.1),
        splits={"held_out": sf.Split(data(), metrics=metrics, batch_size=5)},
        console=False,
    )
    with pytest.raises(sf.ConfigError, match=rf"^split 'held_out': the metric 'share' .*{says}") as refused:
        run.train()
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("returned", [(1, 2), ([1], [2]), 3, {"logits": 3}])
def test_a_loss_with_anything_else_beside_it_is_refused(returned: Any) -> None:
    def wrong(model: Any, batch: Any) -> Any:
        beside = returned if isinstance(returned, tuple) else (returned,)
        return plain(model, batch), *beside

    with pytest.raises(sf.ConfigError, match=r"return loss, \(outputs, targets\)"):
        sf.evaluate(model(), sf.Split(data()), loss=wrong)


def run_with(loss: Any, out: Path | None = None, **changes: Any) -> sf.Run:
    torch.manual_seed(1)
    run = sf.Run(
        model=Counting,
        loss=loss,
        train_data=data(),
        batch_size=24,
        micro_batch_size=8,
        length="6 steps",
        optimizer=sf.optim.adamw(lr=1e-2),
        run_dir=out,
        check_state=False,  # the model counts its calls
        console=False,
        **changes,
    )
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
