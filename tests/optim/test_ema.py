"""Averaged weights: their closed form, and that nothing changes what it should not; 1 second."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from surefoot.errors import ConfigError
from surefoot.optim.ema import Ema, copy_model

YES, NO = torch.tensor(True), torch.tensor(False)


def live_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def change(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def copies(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_average_is_its_closed_form(decay):
    model = live_model()
    average, history = Ema(copy_model(model), decay), [copies(model)]
    for step in range(5):
        change(model, step)
        average.update(YES)
        history.append(copies(model))

    weights = [decay**5, *((1 - decay) * decay ** (5 - k) for k in range(1, 6))]
    expected = [
        sum(w * held for w, held in zip(weights, over_time, strict=True))
        for over_time in zip(*history, strict=True)
    ]
    torch.testing.assert_close(copies(average.model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("applied", [NO, torch.tensor(0.0)])
def test_a_skipped_step_changes_no_bit(applied):
    model = live_model().float()
    with torch.no_grad():
        model[0].bias.zero_().neg_()  # negative zeros, which adding a zero would turn
    average = Ema(copy_model(model), 0.9)
    change(model, 0)
    average.update(YES)
    before = [held.view(torch.int32) for held in copies(average.model)]
    average.update(applied)

    assert all(
        torch.equal(now.view(torch.int32), then)
        for now, then in zip(copies(average.model), before, strict=True)
    )


def test_a_skipped_step_changes_no_bit_of_a_fresh_average():
    model = live_model().float()
    with torch.no_grad():
        model[0].bias.zero_().neg_()
    average = Ema(copy_model(model), 0.9)
    before = [held.view(torch.int32) for held in copies(average.model)]
    change(model, 0)
    average.update(NO)

    assert all(
        torch.equal(now.view(torch.int32), then)
        for now, then in zip(copies(average.model), before, strict=True)
    )


def test_the_live_model_is_left_alone():
    model = live_model()
    before = copies(model)
    average = Ema(copy_model(model), 0.9)
    average.update(YES)
    average.refresh(model)

    torch.testing.assert_close(copies(model), before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_buffers_are_the_live_ones_after_copying():
    model = live_model()
    average = Ema(copy_model(model), 0.9)
    model(torch.randn(8, 4, dtype=torch.float64))
    assert not torch.equal(average.model[1].running_mean, model[1].running_mean)
    average.refresh(model)

    torch.testing.assert_close(
        dict(average.model.named_buffers()), dict(model.named_buffers()), rtol=0, atol=0
    )


def test_tied_weights_stay_tied_and_are_moved_once():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    average = Ema(copy_model(model), 0.5)
    start = model[0].weight.detach().clone()
    change(model, 0)
    average.update(YES)

    assert average.model[1].weight is average.model[0].weight
    torch.testing.assert_close(average.model[0].weight, (start + model[0].weight.detach()) / 2)


def test_a_frozen_mask_of_infinities_stays_what_it_is():
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    average = Ema(copy_model(model), 0.5)
    average.update(YES)

    assert torch.equal(average.model.mask, model.mask)


def test_weights_of_several_types_keep_theirs():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    Ema(copy_model(model), 0.5).update(YES)

    assert [parameter.dtype for parameter in Ema(copy_model(model), 0.5).model.parameters()] == [
        torch.float32
    ] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5, float("nan")])
def test_a_decay_that_cannot_be_is_refused(decay):
    with pytest.raises(ConfigError, match="ema = "):
        Ema(copy_model(live_model()), decay)
