"""AdamW straight to its kernel: the same bits as torch's own `step`, and nothing at all where a
step is skipped. (under 2 s)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.optim.adamw_fused import StraightToKernel, straight_to_kernel


def model_and_optimizer(**settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    decaying = [model[0].weight, model[2].weight]
    plain = [model[0].bias, model[1].weight, model[1].bias, model[2].bias]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, fused=True, **settings)


def give_gradients(model, step, *, without=()):
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name in without else gradient


def bits(model, optimizer):
    states = [
        optimizer.state[parameter][key]
        for parameter in model.parameters()
        for key in sorted(optimizer.state[parameter])
    ]
    return [tensor.clone() for tensor in (*model.parameters(), *states)]


def assert_same_bits(first, second):
    assert len(first) == len(second)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_twenty_steps_have_the_bits_of_torchs_own_step():
    (ours, our_optimizer), (theirs, their_optimizer) = (
        model_and_optimizer(betas=(0.8, 0.95)),
        model_and_optimizer(betas=(0.8, 0.95)),
    )
    way = straight_to_kernel(our_optimizer)
    for step in range(20):
        for optimizer in (our_optimizer, their_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
        missing = ("2.bias",) if step in (0, 7) else ()  # a parameter that a step does not use
        give_gradients(ours, step, without=missing)
        give_gradients(theirs, step, without=missing)
        way.apply(our_optimizer, torch.zeros(()))
        their_optimizer.step()
        assert_same_bits(bits(ours, our_optimizer), bits(theirs, their_optimizer))


@pytest.mark.parametrize("skipped_step", [0, 3])
def test_a_skipped_step_changes_no_bit_even_where_gradients_are_nan(skipped_step):
    (ours, our_optimizer), (theirs, their_optimizer) = model_and_optimizer(), model_and_optimizer()
    way = straight_to_kernel(our_optimizer)
    for step in range(6):
        give_gradients(ours, step)
        if step == skipped_step:
            for parameter in ours.parameters():
                parameter.grad.fill_(float("nan"))
            way.apply(our_optimizer, torch.ones(()))
            continue
        way.apply(our_optimizer, torch.zeros(()))
        give_gradients(theirs, step)
        their_optimizer.step()
    assert_same_bits(bits(ours, our_optimizer), bits(theirs, their_optimizer))


def test_state_put_there_by_a_resume_is_taken_up():
    model, optimizer = model_and_optimizer()
    way = StraightToKernel()
    give_gradients(model, 0)
    way.apply(optimizer, torch.zeros(()))
    for state in optimizer.state.values():  # as loading a checkpoint does
        for key, value in state.items():
            state[key] = torch.full_like(value, 2.0)
    give_gradients(model, 1)
    way.apply(optimizer, torch.zeros(()))
    assert all(state["step"] == 3.0 for state in optimizer.state.values())


def test_an_optimizer_that_does_more_than_the_kernel_keeps_its_own_step():
    with_hook = model_and_optimizer()[1]
    with_hook.register_step_post_hook(lambda *_: None)
    assert straight_to_kernel(with_hook) is None
    assert straight_to_kernel(model_and_optimizer(amsgrad=True)[1]) is None
    assert straight_to_kernel(model_and_optimizer(maximize=True)[1]) is None
    assert straight_to_kernel(torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)) is None
