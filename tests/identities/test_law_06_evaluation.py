"""Law 6: a score over a split does not depend on the evaluation batch size; a partial batch counts
for what it holds. (2 s)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from ragged import (
    CLASSES,
    FEATURES,
    IGNORED,
    LENGTH,
    Batch,
    counted_mean,
    counted_targets,
    plain_mean,
    tokens,
)
from surefoot.data.loader import MicroBatch
from surefoot.mean import append_read
from surefoot.train.evaluate import evaluate_batches, metric_by_batch
from surefoot.train.precision import precision

SAMPLES = 23  # prime: every batch size but 1 and 23 is ragged
SIZES = [1, 2, 5, 8, 11, 22, 23, 64]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES)
        )
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.layers(self.norm(inputs)))


def with_further(model: Any, batch: Batch) -> Any:
    return counted_mean(model, batch), {"entropy": entropy(model(batch[0]), batch[1])}


def with_outputs(model: Any, batch: Batch) -> Any:
    return counted_mean(model, batch), (model(batch[0]), batch[1])


def entropy(outputs: Any, targets: Any) -> sf.Mean:
    logs = F.log_softmax(outputs, dim=2)
    return sf.Mean(-(logs.exp() * logs).sum(), logs.shape[0] * logs.shape[1])


def several(outputs: Any, targets: Any) -> dict[str, sf.Mean]:
    right = (outputs.argmax(2) == targets) & (targets != IGNORED)
    return {
        "right": sf.Mean(right.sum(), (targets != IGNORED).sum()),
        "of samples": sf.Mean(right.sum(), len(outputs)),
    }


def scores(
    size: int | None, loss: Any, *, ema: float | None = None, dataset: Any = None, **changes: Any
) -> Any:
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "count_fn": counted_targets,
        "train_data": tokens(SAMPLES, seed=2),
        "batch_size": 23,
        "length": "4 steps",
        "optimizer": sf.optim.adamw(lr=1e-2),
        "splits": {
            "val": sf.Split(
                dataset or tokens(SAMPLES, seed=2), metrics=[entropy, several], batch_size=size
            )
        },
        "evaluate_every": "1000 steps",
        "ema": ema,
        "precision": "fp32",
        "device": "cpu",
        "console": False,
    }
    run = sf.Run(**(settings | changes))
    last = {}
    with run:
        for step in run:
            last = step.metrics
    return run, last


def by_hand(run: sf.Run, ema: float | None) -> dict[str, float]:
    """The whole split at once, in evaluation mode and float64."""
    model: Any = run.state.models["model"] if ema is None else run.state.ema_models["model"].model
    model = model.double().eval()
    inputs, targets = tokens(SAMPLES, seed=2)
    with torch.no_grad():
        logits = model(inputs.double())
        each = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        counted = targets != IGNORED
        right = ((logits.argmax(2) == targets) & counted).sum()
        logs = logits.log_softmax(2)
    return {
        "val/loss": float(each.sum() / counted.sum()),
        "val/entropy": float(-(logs.exp() * logs).sum() / (SAMPLES * LENGTH)),
        "val/right": float(right / counted.sum()),
        "val/of samples": float(right / SAMPLES),
    }


@in_one
@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("loss", [plain_mean, counted_mean, with_further, with_outputs])
@pytest.mark.parametrize("size", SIZES)
def test_a_score_is_that_of_the_whole_split(size: int, loss: Any, ema: float | None) -> None:
    run, found = scores(size, loss, ema=ema)

    assert found == pytest.approx(by_hand(run, ema), rel=1e-6)


class OneByOne:
    """The same samples through a data set that is read one by one."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> Batch:
        inputs, targets = tokens(SAMPLES, seed=2)
        return inputs[sample], targets[sample]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_split_read_by_workers_counts_every_sample_once(workers: int) -> None:
    run, found = scores(5, plain_mean, dataset=OneByOne(), workers=workers)

    assert found == pytest.approx(by_hand(run, None), rel=1e-6)


def test_without_a_batch_size_the_micro_batch_size_is_taken_and_changes_nothing() -> None:
    run, found = scores(None, counted_mean, batch_size=22, micro_batch_size=11)

    assert found == pytest.approx(by_hand(run, None), rel=1e-6)


def test_a_split_with_a_batch_that_counts_nothing_has_a_finite_score() -> None:
    inputs, targets = tokens(SAMPLES, seed=2)
    targets[:12] = IGNORED
    expected = scores(23, counted_mean, dataset=(inputs, targets))[1]["val/loss"]

    found = [
        scores(4, loss, dataset=(inputs, targets))[1]["val/loss"]
        for loss in (plain_mean, counted_mean)
    ]

    assert found == pytest.approx([expected, expected], rel=1e-6)


def test_every_batch_draws_random_numbers_of_its_own_and_the_same_each_time() -> None:
    """Else masks drawn in a score, or samples of a decoder, would be the same in every batch of a
    split.
    """
    drawn: list[float] = []

    def draws(outputs: Any, targets: Any) -> sf.Mean:
        drawn.append(float(torch.rand(())))
        return sf.Mean(drawn[-1], 1)

    settings: dict[str, Any] = {"loss": None, "precision": precision("fp32", torch.device("cpu"))}
    none = np.zeros(0, dtype=np.int64)
    split = sf.Split(None, metrics=[draws])
    batches = [
        MicroBatch((torch.ones(2, 1), torch.ones(2)), 2, place, none, none) for place in range(5)
    ]
    evaluate_batches(nn.Linear(1, 1), batches, split, seed=3, **settings)
    together = drawn
    drawn = []
    assert len(set(together)) == 5
    each = metric_by_batch(nn.Linear(1, 1), batches, split, metric="draws", seed=3, **settings)
    assert drawn == together
    assert [float(mean.total) for mean in each or []] == pytest.approx(together)
    drawn.clear()
    evaluate_batches(nn.Linear(1, 1), batches, split, seed=4, **settings)
    assert not set(drawn).intersection(together)


def test_many_small_batches_do_not_round_away_what_they_count() -> None:
    """In float32 2**24 + 1 is 2**24, so every later batch would be lost; the totals are kept in
    float64.
    """
    values = torch.ones(1000)
    values[0] = 2.0**24

    def value(outputs: Any, targets: Any) -> sf.Mean:
        return sf.Mean(targets.sum(), len(targets))

    run = sf.Run(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch[0][:, None]).square().mean(),
        train_data=(values,),
        batch_size=100,
        length="1 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        splits={
            "all": sf.Split((values[:, None], values), metrics=value, batch_size=1, loss=False)
        },
        console=False,
    )

    assert run.evaluate() == {"all/value": pytest.approx(float(values.double().mean()), rel=1e-9)}


def test_totals_on_a_device_are_kept_in_float64() -> None:
    kept: dict[str, list[sf.Mean]] = {}
    append_read(kept, {"value": sf.Mean(torch.ones((), device="meta"), 1)})
    total = kept["value"][0].total
    assert isinstance(total, Tensor)
    assert total.dtype == torch.float64
