"""The outputs of a whole data set: for each sample once and in order, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import surefoot as sf
from rank_processes import Ranks
from refused import refused

SAMPLES = 11  # no multiple of a batch or of a number of ranks
INPUTS = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2)
TARGETS = torch.arange(SAMPLES) % 3


def plain_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(**changes: Any) -> sf.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)),
        "loss": plain_loss,
        "train_data": (INPUTS, TARGETS),
        "batch_size": 4,
        "micro_batch_size": 1,
        "length": "2 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**(settings | changes))


def expected(run: sf.Run, inputs: Tensor = INPUTS) -> Tensor:
    model = run.state.model.eval()
    with torch.no_grad():
        outputs: Tensor = model(inputs)
    model.train()
    return outputs


class Rows(Dataset[Any]):
    def __init__(self, has_targets: bool) -> None:
        self.has_targets = has_targets

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.has_targets:
            return INPUTS[index], TARGETS[index]
        return INPUTS[index]


DATA: dict[str, Callable[[], Any]] = {
    "name": lambda: "val",
    "pairs": lambda: (INPUTS, TARGETS),
    "inputs in a tuple": lambda: (INPUTS,),
    "a tensor": lambda: INPUTS,
    "TensorDataset": lambda: TensorDataset(INPUTS),
    "data set": lambda: Rows(has_targets=True),
    "data set of inputs": lambda: Rows(has_targets=False),
    "loader": lambda: DataLoader(Rows(has_targets=True), batch_size=5, shuffle=False),
    "Split": lambda: sf.Split((INPUTS, TARGETS), batch_size=3),
    "Split of inputs": lambda: sf.Split((INPUTS,), loss=False, batch_size=SAMPLES),
}


@pytest.mark.parametrize("name", [*DATA])
def test_outputs_are_those_of_the_model_in_order(name: str) -> None:
    run = build(splits={"val": sf.Split((INPUTS, TARGETS), batch_size=2)})
    run.train()
    outputs = run.predict(DATA[name]())

    assert torch.allclose(outputs, expected(run), atol=1e-6)
    assert not outputs.requires_grad


def predict_on_rank() -> list[list[float]]:
    run = build(splits={"val": sf.Split((INPUTS, TARGETS), batch_size=2)})
    run.train()
    outputs = torch.cat([run.predict("val"), run.predict(Rows(has_targets=False))])
    rows: list[list[float]] = outputs.tolist()
    return rows


def test_every_rank_returns_the_outputs_of_one_process(ranks: Ranks) -> None:
    assert ranks(3, predict_on_rank) == [predict_on_rank()] * 3


def test_outputs_that_metrics_get_are_returned() -> None:
    """Those that the loss returns, or else those of `predict`."""

    def loss(model: Any, batch: Any) -> Any:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1]), (outputs.argmax(1), batch[1])

    def doubled(model: Any, batch: Any) -> Any:
        return 2 * model(batch[0]), batch[1]

    splits = {
        "val": sf.Split((INPUTS, TARGETS)),
        "doubled": sf.Split((INPUTS, TARGETS), predict=doubled, at_end=True),
    }
    run = build(loss=loss, splits=splits)

    assert torch.equal(run.predict("val"), expected(run).argmax(1))
    assert torch.allclose(run.predict("doubled"), 2 * expected(run))


class Pair(NamedTuple):
    logits: Tensor
    names: list[str]


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


def as_pair(outputs: Tensor) -> Any:
    return Pair(outputs, [f"{row[0]:.3f}" for row in outputs.tolist()])


# how outputs are given a form, and read from it
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dictionary": (lambda outputs: {"logits": outputs}, lambda joined: joined["logits"]),
    "dataclass": (Output, lambda joined: joined.logits),
    "two heads": (lambda outputs: [outputs, 2 * outputs], lambda joined: joined[1] / 2),
    "named tuple": (as_pair, lambda joined: joined.logits),
    "array": (lambda outputs: outputs.numpy(), torch.from_numpy),
    "texts": (
        lambda outputs: [str(row) for row in outputs.tolist()],
        lambda joined: torch.tensor([eval(text) for text in joined]),
    ),
    "boxes of each image": (
        lambda outputs: [{"boxes": row.repeat(2, 1)} for row in outputs],
        lambda joined: torch.stack([image["boxes"][0] for image in joined]),
    ),
}


def split_with(
    form: Callable[[Tensor], Any], *, batch_size: int | None = None, samples: int = SAMPLES
) -> sf.Split:
    """A split whose outputs have a form."""

    def predict(model: Any, batch: Any) -> Any:
        return form(model(batch[0])), batch[1]

    rows = (INPUTS[:samples], TARGETS[:samples])
    return sf.Split(rows, predict=predict, batch_size=batch_size)


@pytest.mark.parametrize("name", [*FORMS])
def test_outputs_keep_their_form(name: str) -> None:
    form, logits = FORMS[name]
    run = build()

    outputs = run.predict(split_with(form))

    assert torch.allclose(logits(outputs), expected(run), atol=1e-6)


def test_outputs_of_several_lengths_are_a_list_of_samples() -> None:
    def length_of(row: Tensor) -> int:
        return 1 + int(row[0]) % 3

    def cut(model: Any, batch: Any) -> Any:
        (row,) = batch[0]
        return model(batch[0])[:, : length_of(row)], batch[1]

    outputs = build().predict(sf.Split((INPUTS, TARGETS), predict=cut, batch_size=1))

    assert [len(row) for row in outputs] == [length_of(row) for row in INPUTS]


def repeated(outputs: Tensor, rows: int) -> list[Tensor]:
    return [row.repeat(rows, 1) for row in outputs]


@pytest.mark.parametrize("batch_size", [1, 2, 3, SAMPLES])
def test_a_list_with_an_entry_of_each_sample_keeps_the_order_of_the_samples(
    batch_size: int,
) -> None:
    """Also if an entry of the first batch has as many rows as the batch has samples."""
    run = build()
    split = split_with(lambda outputs: repeated(outputs, batch_size), batch_size=batch_size)

    outputs = run.predict(split)

    first_rows = torch.stack([rows[0] for rows in outputs])
    assert torch.allclose(first_rows, expected(run), atol=1e-6)


@pytest.mark.parametrize("batch_size", [2, 3, SAMPLES])
def test_a_list_of_heads_stays_a_list_of_heads(batch_size: int) -> None:
    run = build()
    split = split_with(lambda outputs: [outputs, 2 * outputs], batch_size=batch_size)

    one, other = run.predict(split)

    assert torch.allclose(one, expected(run), atol=1e-6)
    assert torch.equal(other, 2 * one)


def test_a_list_that_may_be_of_samples_or_of_heads_is_refused() -> None:
    split = split_with(lambda outputs: repeated(outputs, 2), batch_size=2, samples=4)
    with refused("outputs-in-two-ways", setting="predict", count=2):
        build().predict(split)


@pytest.mark.parametrize(
    "form",
    [
        lambda outputs: outputs.mean(),
        lambda outputs: outputs[:2],
        lambda outputs: ["one"],
        lambda outputs: float(outputs.sum()),
    ],
    ids=["scalar", "rows are missing", "entries are missing", "a number"],
)
def test_outputs_that_are_not_by_sample_are_refused(form: Any) -> None:
    with refused("outputs-not-by-sample", setting="predict", count=3):
        build().predict(split_with(form, batch_size=3))


def test_nothing_changes() -> None:
    run = build(splits={"val": sf.Split((INPUTS, TARGETS))}, ema=0.9)
    plain = build(splits={"val": sf.Split((INPUTS, TARGETS))}, ema=0.9)
    with run, plain:
        for _, _ in zip(run, plain, strict=True):
            run.predict("val")
    for one, other in zip(run.state.parameters, plain.state.parameters, strict=True):
        assert torch.equal(one, other)


def test_a_split_that_does_not_exist_is_refused() -> None:
    with refused("unknown-split", setting="splits", value="test"):
        build().predict("test")


def test_a_run_that_counts_targets_predicts_data_without_any() -> None:
    run = build(count_fn=lambda batch: int((batch[1] >= 0).sum()))
    assert np.allclose(run.predict(INPUTS), expected(run), atol=1e-6)
