"""What ranks tell each other of a user's values: it comes back as what it was. (3 s)"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics

import surefoot as sf
from refused import refused
from surefoot.train.metric_results import Messages


class Named(NamedTuple):
    label: int
    loss: float


def test_outputs_come_back_as_what_they_were() -> None:
    messages = Messages()
    outputs = [Named(1, 0.5), {"a": (1, None)}, torch.tensor([True, False])]

    named, dictionary, tensor = messages.read(messages.written(outputs))

    assert named == Named(1, 0.5)
    assert type(named) is Named
    assert dictionary == {"a": (1, None)}
    torch.testing.assert_close(tensor, torch.tensor([True, False]))


def test_outputs_of_an_unknown_kind_are_refused() -> None:
    with refused("outputs-not-sendable", returned="object"):
        Messages().written([object()])


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str
    length: int = field(init=False, default=0)


Other = type("Answer", (list,), {"__module__": "elsewhere"})


def test_outputs_of_kinds_with_the_same_name_and_of_arguments_by_name_come_back() -> None:
    messages = Messages()
    outputs = [Answer(text="a"), Other(["b", 1]), torch.Size([2, 3])]

    returned = messages.read(messages.written(outputs))

    assert returned == outputs
    assert [type(output) for output in returned] == [Answer, Other, torch.Size]


def fails(*_: object) -> float:
    raise ValueError("a bug of one's own")


class Failing(torchmetrics.Metric):
    """A metric of torchmetrics with a bug in `update` or `compute`."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def update(self, *_: object) -> None:
        if self.method == "update":
            fails()

    def compute(self) -> float:
        if self.method == "compute":
            fails()
        return 0.0


@pytest.mark.parametrize(
    "metric",
    [fails, sf.metrics.whole_split(fails), Failing("update"), Failing("compute")],
    ids=["a function", "of the whole split", "in update", "in compute"],
)
def test_an_error_in_a_metric_names_the_metric_and_the_split(metric: object) -> None:
    with pytest.raises(ValueError, match="a bug of one's own") as raised:
        evaluator_run(metric).evaluate("val")

    notes = raised.value.__notes__
    assert [note for note in notes if note.endswith(" metric 'own'")]
    assert [note for note in notes if note.endswith(" split 'val'")]


def too_few(outputs: torch.Tensor, _targets: torch.Tensor) -> sf.Mean:
    return sf.Mean((outputs == torch.zeros(3, 1)).sum(), 3)


@pytest.mark.parametrize(
    "metric", [too_few, sf.metrics.whole_split(too_few)], ids=["mean", "whole split"]
)
def test_a_metric_that_cannot_use_its_shapes_is_one_error_with_these_shapes(metric: object) -> None:
    with refused("shapes-misfit", where="the metric 'own'") as raised:
        evaluator_run(metric).evaluate("val")

    assert raised.value.places == ("split 'val'",)
    frames = traceback.extract_tb(cause_of(raised.value).__traceback__)
    assert "too_few" in [frame.name for frame in frames]


def cause_of(problem: BaseException) -> BaseException:
    assert problem.__cause__ is not None
    return problem.__cause__


@pytest.mark.parametrize(
    ("labels", "error", "code", "fields"),
    [
        (
            torch.zeros(3, 2),
            sf.ConfigError,
            "shapes-misfit",
            {"where": "the loss", "shapes": ["(2, 2), (2, 2)"]},
        ),
        (
            torch.full((3,), 7),
            sf.DataError,
            "target-out-of-range",
            {"value": 7, "samples": [0, 1], "where": "in the evaluation"},
        ),
    ],
    ids=["a shape", "a class"],
)
def test_a_loss_that_cannot_use_the_data_of_a_split_is_one_error(
    labels: torch.Tensor, error: type[sf.SurefootError], code: str, fields: dict[str, Any]
) -> None:
    split = (torch.ones(3, 2), labels.long())
    run = sf.Run(
        model=torch.nn.Linear(2, 3),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        train_data=(torch.ones(4, 2), torch.zeros(4).long()),
        splits={"val": sf.Split(split, batch_size=2)},
        batch_size=2,
        length="1 steps",
        optimizer=sf.optim.adamw(lr=0.1),
        console=False,
    )
    with refused(code, error, **fields) as raised:
        run.evaluate("val")

    assert raised.value.places == ("split 'val'",)
    assert not isinstance(cause_of(raised.value), sf.SurefootError)


def evaluator_run(metric: object) -> sf.Run:
    rows = (torch.ones(4, 2), torch.zeros(4, 1))

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> object:
        outputs = model(batch[0])
        return torch.nn.functional.mse_loss(outputs, batch[1]), (outputs, batch[1])

    return sf.Run(
        model=torch.nn.Linear(2, 1),
        loss=loss,
        train_data=rows,
        splits={"val": sf.Split(rows, metrics={"own": metric})},
        batch_size=2,
        length="2 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        console=False,
    )


def test_an_error_in_a_step_names_the_step_and_the_samples() -> None:
    calls = []

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append(len(batch[0]))
        if len(calls) > 3:
            fails()
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    rows = (torch.ones(8, 2), torch.zeros(8, 1))
    run = sf.Run(
        model=torch.nn.Linear(2, 1),
        loss=loss,
        train_data=rows,
        batch_size=2,
        length="9 steps",
        optimizer=sf.optim.sgd(lr=0.1),
        order="sequential",
        check_state=False,
        console=False,
    )
    with pytest.raises(ValueError, match="a bug of one's own") as raised:
        run.train()
    assert raised.value.__notes__ == ["at step 3, samples 6, 7"]


def gradient_of_inputs(
    model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    inputs = batch[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return gradient.square().mean()


def of_user(_model: torch.nn.Module, _batch: Any) -> torch.Tensor:
    raise ValueError("the reference file has no batch_size column")


def of_label(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    columns = batch[1][:, None]
    if not torch.is_grad_enabled():
        columns = columns + 7
    return model(batch[0]).gather(1, columns).mean()


@pytest.mark.parametrize(
    ("loss", "error", "says"),
    [
        (gradient_of_inputs, sf.ConfigError, r"\[gradients-in-evaluation\]$"),
        (of_user, ValueError, "^the reference file has no batch_size column"),
        (of_label, RuntimeError, "^index 7 is out of bounds"),
    ],
)
def test_other_errors_of_an_evaluation_are_not_said_to_be_about_shapes(
    loss: Any, error: type[Exception], says: str
) -> None:
    run = sf.Run(
        model=torch.nn.Linear(2, 3),
        loss=loss,
        train_data=(torch.ones(4, 2), torch.zeros(4).long()),
        splits={"val": sf.Split((torch.ones(3, 2), torch.zeros(3).long()))},
        batch_size=2,
        length="1 steps",
        optimizer=sf.optim.adamw(lr=0.1),
        console=False,
        check_state=False,
    )
    with pytest.raises(error, match=says):
        run.evaluate("val")
