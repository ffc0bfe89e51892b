"""AdamW straight to its kernel: the same bits as torch's own `step`, and nothing at all where a
step is skipped. (under 2 s)
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from same_bits import assert_same_bits
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
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name in without:
            parameter.grad = None


def tensors_of(model, optimizer):
    """Weights and optimizer state, by name."""
    tensors = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = value
    return tensors


def test_twenty_steps_have_the_bits_of_torchs_own_step():
    model, optimizer = model_and_optimizer(betas=(0.8, 0.95))
    way = straight_to_kernel(optimizer)
    plain, plain_optimizer = model_and_optimizer(betas=(0.8, 0.95))
    for step in range(20):
        for group in optimizer.param_groups + plain_optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        without = ("2.bias",) if step in (0, 7) else ()  # a parameter that a step does not use
        give_gradients(model, step, without=without)
        give_gradients(plain, step, without=without)

        way.apply(optimizer, torch.zeros(()))
        plain_optimizer.step()

        assert_same_bits(tensors_of(model, optimizer), tensors_of(plain, plain_optimizer))


@pytest.mark.parametrize("skipped_step", [0, 3])
def test_a_skipped_step_changes_no_bit_even_where_gradients_are_nan(skipped_step):
    model, optimizer = model_and_optimizer()
    way = straight_to_kernel(optimizer)
    plain, plain_optimizer = model_and_optimizer()
    for step in range(6):
        give_gradients(model, step)
        if step == skipped_step:
            for parameter in model.parameters():
                parameter.grad.fill_(torch.nan)
            way.apply(optimizer, torch.ones(()))
        else:
            way.apply(optimizer, torch.zeros(()))
            give_gradients(plain, step)
            plain_optimizer.step()

    assert_same_bits(tensors_of(model, optimizer), tensors_of(plain, plain_optimizer))


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
    _, with_hook = model_and_optimizer()
    with_hook.register_step_post_hook(lambda *_: None)
    _, amsgrad = model_and_optimizer(amsgrad=True)
    _, maximizing = model_and_optimizer(maximize=True)
    adam = torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)

    for optimizer in (with_hook, amsgrad, maximizing, adam):
        assert straight_to_kernel(optimizer) is None
