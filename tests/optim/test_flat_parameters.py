"""AdamW on one tensor for all parameters: torch's own steps, skipped steps, absent gradients,
resumed state. (3 s)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from in_one import in_one
from surefoot.checkpoint import Store
from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.flat_parameters import FlatAdamW, lay_out, none_shared, worth_it

SKIPPED = torch.ones(())
APPLIED = torch.zeros(())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 16), nn.Linear(16, 3))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    matrices = [held for held in model.parameters() if held.ndim > 1]
    others = [held for held in model.parameters() if held.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95), fused=True)


def give_gradients(model: nn.Module, step: int, *, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name in without else gradient


def close(ours: nn.Module, our: Any, theirs: nn.Module, their: Any) -> None:
    """To the last bit or the one before: where a tensor ends, torch's kernel rounds otherwise than
    in its middle.
    """
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        assert our.state[one].keys() == their.state[other].keys()
        for key, value in our.state[one].items():
            torch.testing.assert_close(value, their.state[other][key], rtol=1e-6, atol=1e-9)


def both() -> tuple[nn.Module, Any, FlatAdamW, nn.Module, Any]:
    ours, theirs = net(), net()
    our = optimizer_of(ours)
    return ours, our, FlatAdamW(our, StraightToKernel()), theirs, optimizer_of(theirs)


def test_twenty_steps_are_those_of_torch() -> None:
    ours, our, way, theirs, their = both()
    for step in range(20):
        for optimizer in (our, their):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert len(way.gradients()) == 1
        way.apply(our, APPLIED)
        their.step()
    close(ours, our, theirs, their)


def test_a_skipped_step_changes_no_bit_and_its_nan_is_gone_in_the_next() -> None:
    ours, our, way, theirs, their = both()
    for step in range(6):
        give_gradients(ours, step)
        if step in (0, 3):
            for parameter in ours.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(torch.nan)
            before = [parameter.clone() for parameter in ours.parameters()]
            for gradient in way.gradients():
                gradient.mul_(torch.nan)  # as a limit of NaN does
            way.apply(our, SKIPPED)
            assert all(
                torch.equal(one, other)
                for one, other in zip(ours.parameters(), before, strict=True)
            )
            continue
        way.gradients()
        way.apply(our, APPLIED)
        give_gradients(theirs, step)
        their.step()
    close(ours, our, theirs, their)


@pytest.mark.parametrize("first", [0, 2])
def test_a_parameter_without_a_gradient_neither_decays_nor_coasts(first: int) -> None:
    ours, our, way, theirs, their = both()
    for step in range(6):
        missing = ("2.weight", "1.bias") if step in (first, first + 2) else ()
        give_gradients(ours, step, without=missing)
        give_gradients(theirs, step, without=missing)
        gathered = way.gradients()
        assert (
            len(gathered) == 1
            if step < first
            else len(gathered) == len(list(ours.parameters())) - len(missing)
        )
        way.apply(our, APPLIED)
        their.step()
    close(ours, our, theirs, their)
    assert {float(our.state[parameter]["step"]) for parameter in ours.parameters()} == {4.0, 6.0}


def test_state_that_a_resume_puts_there_is_taken_up_and_unequal_counters_are_kept_apart() -> None:
    for steps in (3, (3, 2)):
        ours, our, way, theirs, their = both()
        for step in range(3):
            give_gradients(
                theirs, step, without=("2.weight",) if steps == (3, 2) and step == 0 else ()
            )
            their.step()
        with torch.no_grad():
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                one.copy_(other)
                our.state[one] = {key: value.clone() for key, value in their.state[other].items()}
        give_gradients(ours, 9)
        give_gradients(theirs, 9)
        for gradient in way.gradients():
            gradient.mul_(
                0.5
            )  # a limit, which is not to be lost where the group turns out to be updated apart
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        way.apply(our, APPLIED)
        their.step()
        close(ours, our, theirs, their)
        assert our.param_groups[0].get("updated_apart", False) == (steps == (3, 2))


def test_parameters_stay_the_same_objects_with_the_same_bits_matrices_at_round_places() -> None:
    model = net()
    before = [(parameter, parameter.clone()) for parameter in model.parameters()]
    with torch.no_grad():
        _, _, (flat,) = lay_out([[parameter for parameter, _ in before]])
    for parameter, (held, value) in zip(model.parameters(), before, strict=True):
        assert parameter is held
        assert torch.equal(parameter, value)
        if parameter.numel() % 16 == 0:
            assert (parameter.data_ptr() - flat.weights.data_ptr()) % 64 == 0
    assert flat.weights.numel() == sum(parameter.numel() for parameter in model.parameters())


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
    ours, our, way, theirs, their = both()
    for step in range(4):
        for model in (ours, theirs):
            if step >= 2:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clamp(-0.3, 0.3)
            give_gradients(model, step)
        assert len(way.gradients()) == (1 if step < 2 else len(list(ours.parameters())))
        way.apply(our, APPLIED)
        their.step()
    close(ours, our, theirs, their)


class Joined(nn.Module):
    """Two parameters, or a parameter and a buffer, that lie in the same memory."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if as_buffer:
            self.register_buffer("seen", self.first.weight.data[:2])
        else:
            self.second.weight.data = self.first.weight.data

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.first(inputs))


@pytest.mark.parametrize("as_buffer", [False, True])
def test_tensors_that_lie_in_the_same_memory_still_do_after_training(*, as_buffer: bool) -> None:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    run = sf.Run(
        model=lambda: Joined(as_buffer=as_buffer),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, -inputs),
        batch_size=4,
        length="3 steps",
        optimizer=sf.optim.adamw(lr=0.01),
        console=False,
    )
    before = run.state.models["model"].first.weight.clone()
    run.train()
    model: Any = run.state.models["model"]
    assert not torch.equal(model.first.weight, before)
    assert torch.equal(model.first.weight[:2], model.seen if as_buffer else model.second.weight[:2])


class Branching(nn.Module):
    """One of its layers is used only where the first input of a batch is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.first(inputs))
        return self.last(self.second(hidden) if bool(inputs[0, 0] > 0) else hidden)


def branching_run(run_dir: Path, *, until: int) -> sf.Run:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    return sf.Run(
        model=Branching,
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        train_data=(inputs, inputs.sum(1, keepdim=True)),
        batch_size=4,
        length="12 steps",
        stop_after=f"{until} steps",
        optimizer=sf.optim.adamw(lr=0.01),
        clip="norm 0.5",
        log_every="3 steps",
        run_dir=run_dir,
        console=False,
    )


def train(run_dir: Path, *, until: int) -> dict[str, Tensor]:
    branching_run(run_dir, until=until).train()
    found = Store(run_dir / "checkpoints").newest_intact()
    assert found is not None
    return {
        f"{file}/{name}": value
        for file in ("model", "optimizer")
        for name, value in found[0].tensors(file).items()
    }


def test_a_run_in_which_a_layer_is_not_always_used_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", until=12)
    counters = {float(value) for name, value in whole.items() if name.endswith("/step")}
    assert len(counters) == 2  # else the seed is no example
    for until in (1, 2, 5, 7, 12):
        parts = train(tmp_path / "parts", until=until)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_checkpoint_from_before_a_gradient_was_absent_is_loaded_as_it_was(tmp_path: Path) -> None:
    run = branching_run(tmp_path / "run", until=12)
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
    memory = torch.zeros(20)
    start = length + apart
    if start >= 0:
        assert none_shared([memory[:length], memory[start : start + 2]]) == (apart >= 0)
        assert none_shared([memory[start : start + 2], memory[:length]]) == (
            apart >= 0 or start + 2 <= 0
        )


def test_views_with_gaps_reach_up_to_their_last_number() -> None:
    memory = torch.zeros(4, 5)
    assert none_shared([memory[:2], memory[2:]])
    assert none_shared(
        [memory[:2, :3], memory[1, 3:]]
    )  # from 8 on: the first has 0 to 2 and 5 to 7
    assert not none_shared([memory[:2, :3], memory[1, 2:]])
