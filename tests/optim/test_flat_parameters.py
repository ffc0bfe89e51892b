"""AdamW on one tensor for all parameters: torch's own steps, skipped steps, absent gradients,
resumed state. (3 s)
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from same_bits import assert_same_bits, newest_checkpoint
from surefoot.checkpoint import Store
from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.flat_parameters import FlatAdamW, lay_out, none_shared, worth_it

SKIPPED = torch.ones(())
APPLIED = torch.zeros(())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 16), nn.Linear(16, 3))


def adamw_of(model: nn.Module) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), fused=True)


def give_gradients(model: nn.Module, step: int, *, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name in without:
            parameter.grad = None


class Pair:
    """A model with an AdamW on one tensor, and an equal one with torch's own."""

    def __init__(self) -> None:
        self.flat = net()
        self.flat_adamw = adamw_of(self.flat)
        self.way = FlatAdamW(self.flat_adamw, StraightToKernel())
        self.plain = net()
        self.plain_adamw = adamw_of(self.plain)

    @property
    def parameter_count(self) -> int:
        return len(list(self.flat.parameters()))

    def give_gradients(self, step: int, *, without: tuple[str, ...] = ()) -> None:
        give_gradients(self.flat, step, without=without)
        give_gradients(self.plain, step, without=without)

    def step(self) -> None:
        self.way.apply(self.flat_adamw, APPLIED)
        self.plain_adamw.step()

    def assert_close(self) -> None:
        """To the last bit or the one before: where a tensor ends, torch's kernel rounds otherwise
        than in its middle.
        """
        pairs = zip(self.flat.parameters(), self.plain.parameters(), strict=True)
        for parameter, expected in pairs:
            torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
            state = self.flat_adamw.state[parameter]
            expected_state = self.plain_adamw.state[expected]
            torch.testing.assert_close(state, expected_state, rtol=1e-6, atol=1e-9)


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


def test_twenty_steps_are_those_of_torch() -> None:
    pair = Pair()
    for step in range(20):
        for group in pair.flat_adamw.param_groups + pair.plain_adamw.param_groups:
            group["lr"] = 0.01 / (step + 1)
        pair.give_gradients(step)
        assert len(pair.way.gradients()) == 1
        pair.step()

    pair.assert_close()


def test_a_skipped_step_changes_no_bit_and_its_nan_is_gone_in_the_next() -> None:
    pair = Pair()
    for step in range(6):
        pair.give_gradients(step)
        if step in (0, 3):
            scale_gradients(pair.flat, torch.nan)
            before = values_of(pair.flat)
            for gradient in pair.way.gradients():
                gradient.mul_(torch.nan)  # as a limit of NaN does
            pair.way.apply(pair.flat_adamw, SKIPPED)
            assert all(map(torch.equal, values_of(pair.flat), before))
        else:
            pair.way.gradients()
            pair.step()

    pair.assert_close()


@pytest.mark.parametrize("first", [0, 2])
def test_a_parameter_without_a_gradient_neither_decays_nor_coasts(first: int) -> None:
    pair = Pair()
    for step in range(6):
        without: tuple[str, ...] = ()
        if step in (first, first + 2):
            without = ("2.weight", "1.bias")
        pair.give_gradients(step, without=without)
        gradients = pair.way.gradients()
        if step < first:
            assert len(gradients) == 1
        else:
            assert len(gradients) == pair.parameter_count - len(without)
        pair.step()

    pair.assert_close()
    counters = {float(state["step"]) for state in pair.flat_adamw.state.values()}
    assert counters == {4.0, 6.0}


@pytest.mark.parametrize("are_equal", [True, False])
def test_state_that_a_resume_puts_there_is_taken_up_and_unequal_counters_are_kept_apart(
    are_equal: bool,
) -> None:
    pair = Pair()
    without = () if are_equal else ("2.weight",)
    give_gradients(pair.plain, 0, without=without)
    pair.plain_adamw.step()
    for step in (1, 2):
        give_gradients(pair.plain, step)
        pair.plain_adamw.step()
    parameters = zip(pair.flat.parameters(), pair.plain.parameters(), strict=True)
    with torch.no_grad():
        for parameter, trained in parameters:
            parameter.copy_(trained)
            pair.flat_adamw.state[parameter] = deepcopy(pair.plain_adamw.state[trained])

    pair.give_gradients(9)
    # a limit, which is not to be lost where the group turns out to be updated apart
    for gradient in pair.way.gradients():
        gradient.mul_(0.5)
    scale_gradients(pair.plain, 0.5)
    pair.step()

    pair.assert_close()
    updated_apart = pair.flat_adamw.param_groups[0].get("updated_apart", False)
    assert updated_apart == (not are_equal)


def test_parameters_stay_the_same_objects_with_the_same_bits_matrices_at_round_places() -> None:
    model = net()
    before = list(model.parameters())
    values = values_of(model)

    with torch.no_grad():
        _, _, (flat,) = lay_out([before])

    assert [*map(id, model.parameters())] == [*map(id, before)]
    assert all(map(torch.equal, values_of(model), values))
    for parameter in model.parameters():
        if parameter.numel() % 16 == 0:
            assert (parameter.data_ptr() - flat.weights.data_ptr()) % 64 == 0
    assert flat.weights.numel() == sum(value.numel() for value in values)


@pytest.mark.parametrize(
    "parameter",
    [
        nn.Parameter(torch.zeros(1 << 20 | 1)),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
        nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.zeros(2, device="meta")),
        nn.Parameter(torch.zeros(2).share_memory_()),
    ],
    ids=["large", "float64", "channels last", "elsewhere", "shared"],
)
def test_what_should_not_be_moved_is_left_where_it_is(parameter: nn.Parameter) -> None:
    assert not worth_it([nn.Parameter(torch.zeros(3)), parameter])


def test_another_tensor_put_in_a_parameters_place_is_trained_as_torch_trains_it() -> None:
    pair = Pair()
    for step in range(4):
        if step >= 2:
            for parameter in [*pair.flat.parameters(), *pair.plain.parameters()]:
                parameter.data = parameter.data.clamp(-0.3, 0.3)
        pair.give_gradients(step)
        gradient_count = len(pair.way.gradients())
        assert gradient_count == (1 if step < 2 else pair.parameter_count)
        pair.step()

    pair.assert_close()


class TwoParameters(nn.Module):
    """Two parameters that lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data

    @property
    def shared(self) -> Tensor:
        return self.second.weight[:2]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


class ParameterAndBuffer(nn.Module):
    """A parameter and a buffer that lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("shared", self.first.weight.data[:2])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs)


@pytest.mark.parametrize("make", [TwoParameters, ParameterAndBuffer])
def test_tensors_that_lie_in_the_same_memory_still_do_after_training(
    make: Callable[[], nn.Module],
) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    run = sf.Run(
        model=make,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, -inputs),
        batch_size=4,
        length="3 steps",
        optimizer=sf.optim.adamw(lr=0.01),
        console=False,
    )
    model: Any = run.state.models["model"]
    before = model.first.weight.clone()

    run.train()

    assert not torch.equal(model.first.weight, before)
    assert torch.equal(model.first.weight[:2], model.shared)


class Branching(nn.Module):
    """One of its layers is used only where the first input of a batch is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        if bool(inputs[0, 0] > 0):
            hidden = self.second(hidden)
        return self.last(hidden)


def branching_run(run_dir: Path, *, stop: int = 12) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    return sf.Run(
        model=Branching,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, inputs.sum(1, keepdim=True)),
        batch_size=4,
        length="12 steps",
        stop_after=f"{stop} steps",
        optimizer=sf.optim.adamw(lr=0.01),
        clip="norm 0.5",
        log_every="3 steps",
        run_dir=run_dir,
        console=False,
    )


def test_a_run_in_which_a_layer_is_not_always_used_resumes_to_the_same_bits(tmp_path: Path) -> None:
    branching_run(tmp_path / "whole").train()
    for stop in (1, 2, 5, 7, 12):
        branching_run(tmp_path / "parts", stop=stop).train()

    whole = newest_checkpoint(tmp_path / "whole")
    parts = newest_checkpoint(tmp_path / "parts")
    state = whole.tensors("optimizer")
    counters = {float(value) for name, value in state.items() if name.endswith("/step")}
    assert len(counters) == 2  # else the seed is no example
    assert_same_bits(parts.tensors("optimizer"), state)
    assert_same_bits(parts.tensors("model"), whole.tensors("model"))


def test_a_checkpoint_from_before_a_gradient_was_absent_is_loaded_as_it_was(tmp_path: Path) -> None:
    run = branching_run(tmp_path / "run")
    run.train()
    groups = run.state.optimizers["model"].optimizer.param_groups
    assert any(group.get("updated_apart") for group in groups)
    run.load_checkpoint(Store(tmp_path / "run" / "checkpoints").at(0))
    assert not any(group.get("updated_apart") for group in groups)


@in_one
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("apart", [-2, -1, 0, 1])
def test_two_views_share_memory_where_one_begins_before_the_other_ends(
    length: int, apart: int
) -> None:
    start = length + apart
    if start < 0:
        return  # there is no such view
    memory = torch.zeros(20)
    first = memory[:length]
    second = memory[start : start + 2]

    assert none_shared([first, second]) == (apart >= 0)
    assert none_shared([second, first]) == (apart >= 0)


def test_views_with_gaps_reach_up_to_their_last_number() -> None:
    memory = torch.zeros(4, 5)
    rows = memory[:2]
    with_gaps = memory[:2, :3]  # numbers 0 to 2 and 5 to 7

    assert none_shared([rows, memory[2:]])
    assert none_shared([with_gaps, memory[1, 3:]])  # from 8 on
    assert not none_shared([with_gaps, memory[1, 2:]])  # from 7 on
