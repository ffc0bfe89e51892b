"""A forward pass that writes weights is refused by name, by whatever loop it is run. (2 s)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from refused import refused

Write = Callable[[nn.Parameter], Any]


def clamp_without_effect(weight: nn.Parameter) -> None:
    weight.clamp_(-100, 100)


def write_past_version_counter(weight: nn.Parameter) -> None:
    weight.data.mul_(0.99)


def write_through_numpy(weight: nn.Parameter) -> None:
    array = weight.detach().numpy()
    array *= 0.99


def assign_other_memory(weight: nn.Parameter) -> None:
    weight.data = 0.99 * weight.data


WRITES: list[Write] = [
    clamp_without_effect,
    write_past_version_counter,
    write_through_numpy,
    assign_other_memory,
]


class Writing(nn.Module):
    def __init__(self, write: Write | None = None, *, once: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.write = write
        self.once = once
        self.begun = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.write is not None and not (self.once and self.begun):
            with torch.no_grad():
                self.write(self.layer.weight)
            self.begun = True
        return self.layer(inputs)  # type: ignore[no-any-return]


def loss(model: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()  # type: ignore[no-any-return]


def run_of(model: Callable[[], nn.Module], **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "train_data": (torch.ones(32, 4),),
        "batch_size": 8,
        "length": "3 steps",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run, *, own_steps: bool) -> None:
    if not own_steps:
        run.train()
        return
    with run:
        for step in run.steps():
            sf.forward_backward(step)
            sf.update(step)


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("has_directory", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_pass_that_writes_weights_is_refused_by_name_before_an_update(
    write: Write, has_directory: bool, own_steps: bool, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run" if has_directory else None
    run = run_of(lambda: Writing(write), run_dir=run_dir)

    with refused("pass-writes-weights", names=["model.layer.weight"]):
        train(run, own_steps=own_steps)

    assert run.state.step == 0


@pytest.mark.parametrize("has_directory", [False, True])
def test_initialization_by_the_first_batch_is_refused(has_directory: bool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run" if has_directory else None
    run = run_of(lambda: Writing(write_past_version_counter, once=True), run_dir=run_dir)
    with refused("pass-writes-weights", names=["model.layer.weight"]):
        run.train()


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_body_may_write_weights(has_directory: bool, tmp_path: Path) -> None:
    run = run_of(Writing, run_dir=tmp_path / "run" if has_directory else None)
    weight = run.state.model.get_parameter("layer.weight")
    with run:
        for _ in run:
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)

    assert run.state.step == 3


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_loop_of_ones_own_may_write_weights_before_and_after_its_passes(
    has_directory: bool, tmp_path: Path
) -> None:
    run = run_of(Writing, run_dir=tmp_path / "run" if has_directory else None)
    weight = run.state.model.get_parameter("layer.weight")
    with run:
        for step in run.steps():
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)
            sf.forward_backward(step)
            with torch.no_grad():
                weight.mul_(0.9)
            sf.update(step)

    assert run.state.step == 3


@pytest.mark.parametrize("has_directory", [False, True])
def test_without_check_state_a_pass_may_write(has_directory: bool, tmp_path: Path) -> None:
    run = run_of(
        lambda: Writing(write_past_version_counter),
        run_dir=tmp_path / "run" if has_directory else None,
        check_state=False,
    )
    run.train()

    assert run.state.step == 3


@pytest.mark.parametrize(
    ("embedding", "value"),
    [
        (lambda: nn.Embedding(3, 4, max_norm=1.0), 1.0),
        (lambda: nn.EmbeddingBag(3, 4, max_norm=0.5), 0.5),
    ],
)
def test_an_embedding_with_max_norm_is_refused_by_name(
    embedding: Callable[[], nn.Module], value: float
) -> None:
    model = nn.Sequential(nn.Sequential(embedding()))
    with refused("max-norm-writes-weights", name="model.0.0", value=value):
        run_of(lambda: model)
    with refused("max-norm-writes-weights", name="model.0.0"):
        sf.evaluate(model, sf.Split((torch.ones(4, 4),)), loss=loss, device="cpu")


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(2))

    def forward(self, model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - self.center).square().mean()


def steps_made_with(loss: Any, run: sf.Run) -> Iterator[sf.Step]:
    """In a loop of one's own, where only the step knows its loss."""
    for step in run.steps():
        sf.forward_backward(step, loss)
        sf.update(step)
        yield step


@pytest.mark.parametrize("own_steps", [False, True])
@pytest.mark.parametrize("form", ["module", "closure", "tensor"])
def test_a_parameter_of_a_loss_that_the_body_trains_is_named_unless_it_is_registered(
    form: str, own_steps: bool, tmp_path: Path
) -> None:
    def attempt(run_dir: Path, *, is_registered: bool) -> None:
        margin = Margin()
        if form == "tensor":
            del margin.center
            margin.center = torch.zeros(2, requires_grad=True)  # type: ignore[assignment]

        def closure(model: Any, batch: Any) -> Tensor:
            return margin(model, batch)  # type: ignore[no-any-return]

        loss_fn = margin if form == "module" else closure
        optimizer = torch.optim.SGD([margin.center], lr=0.1)
        loss_of_run = None if own_steps else loss_fn
        run = run_of(lambda: nn.Linear(4, 2), loss=loss_of_run, run_dir=run_dir)
        if is_registered:
            run.register_state("margin", margin if form == "module" else [margin.center])
            run.register_state("optimizer", optimizer)
        with run:
            for _ in steps_made_with(loss_fn, run) if own_steps else run:
                optimizer.step()
                optimizer.zero_grad()

    with refused("state-not-saved", when="between two steps") as caught:
        attempt(tmp_path / "unsaved", is_registered=False)

    name, *_ = caught.value.fields["names"]
    assert name.endswith("center")
    if form != "closure":
        attempt(tmp_path / "saved", is_registered=True)


def test_a_name_of_registered_state_is_taken_once() -> None:
    run = run_of(lambda: nn.Linear(4, 2))
    counts: list[int] = []
    run.register_state("counts", counts)
    run.register_state("counts", counts)
    with refused("state-name-taken", name="counts"):
        run.register_state("counts", [0])
    assert run.parts.run_state.user_state.objects["counts"] is counts
