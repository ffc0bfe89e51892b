"""Averaged weights: their closed form, and that nothing changes what it should not; 1 second."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from same_bits import assert_same_bits
from surefoot.config.averaging import Averaging
from surefoot.config.behavior import FIRST
from surefoot.optim.ema import Ema, copy_model

YES = torch.tensor(True)
NO = torch.tensor(False)


def first_average(model, decay):
    """An average of a run of the first behavior."""
    return Ema(copy_model(model), Averaging(decay, behavior=FIRST))


def new_average(model, decay, **settings):
    """An average of a run that begins now."""
    return Ema(copy_model(model), Averaging(decay, **settings))


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
    average = first_average(model, decay)
    expected = [decay**5 * start for start in copies(model)]
    for step in range(5):
        change(model, step)
        average.update(YES)
        share = (1 - decay) * decay ** (4 - step)
        for place, weight in enumerate(copies(model)):
            expected[place] += share * weight

    torch.testing.assert_close(copies(average.model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("applied", [NO, torch.tensor(0.0)])
def test_a_skipped_step_changes_no_bit(applied):
    model = live_model().float()
    with torch.no_grad():
        model[0].bias.zero_().neg_()  # negative zeros, which adding a zero would turn
    average = first_average(model, 0.9)
    change(model, 0)
    average.update(YES)
    before = bits_of(average.model)

    average.update(applied)

    assert all(map(torch.equal, bits_of(average.model), before))


def test_a_skipped_step_changes_no_bit_of_a_fresh_average():
    model = live_model().float()
    with torch.no_grad():
        model[0].bias.zero_().neg_()
    average = first_average(model, 0.9)
    before = bits_of(average.model)
    change(model, 0)

    average.update(NO)

    assert all(map(torch.equal, bits_of(average.model), before))


def bits_of(model):
    return [weight.view(torch.int32) for weight in copies(model)]


def test_the_live_model_is_left_alone():
    model = live_model()
    before = copies(model)
    average = first_average(model, 0.9)

    average.update(YES)
    average.refresh(model)

    torch.testing.assert_close(copies(model), before, rtol=0, atol=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def test_buffers_are_the_live_ones_after_copying():
    model = live_model()
    average = first_average(model, 0.9)
    model(torch.randn(8, 4, dtype=torch.float64))
    assert not torch.equal(average.model[1].running_mean, model[1].running_mean)

    average.refresh(model)

    buffers = dict(average.model.named_buffers())
    torch.testing.assert_close(buffers, dict(model.named_buffers()), rtol=0, atol=0)


def test_tied_weights_stay_tied_and_are_moved_once():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    average = first_average(model, 0.5)
    start = model[0].weight.detach().clone()
    change(model, 0)
    average.update(YES)

    assert average.model[1].weight is average.model[0].weight
    torch.testing.assert_close(average.model[0].weight, (start + model[0].weight.detach()) / 2)


def test_a_frozen_mask_of_infinities_stays_what_it_is():
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
    average = first_average(model, 0.5)
    average.update(YES)

    assert torch.equal(average.model.mask, model.mask)


def test_weights_of_several_types_keep_theirs():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    average = first_average(model, 0.5)

    average.update(YES)

    dtypes = [parameter.dtype for parameter in average.model.parameters()]
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_without_a_ramp_it_is_the_average_of_torch(decay):
    model = live_model()
    average = new_average(model, decay, ramp=False)
    of_torch = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for step in range(7):
        change(model, step)
        average.update(YES)
        of_torch.update_parameters(model)

    expected = copies(of_torch.module)
    torch.testing.assert_close(copies(average.model), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (0, 4), (5, 3)])
def test_a_ramp_is_that_of_num_updates(start, every):
    model = live_model()
    average = new_average(model, 0.7, start=start, every=every)
    weights = [copies(model)[0].numpy()]
    for step in range(20):
        change(model, step)
        average.update(YES)
        weights.append(copies(model)[0].numpy())
    average.refresh(model)

    expected = weights[start]
    for move, step in enumerate(range(start + every, 21, every), 1):
        decay = np.minimum(0.7, (1 + move) / (10 + move))
        expected = decay * expected + (1 - decay) * weights[step]
    np.testing.assert_allclose(copies(average.model)[0].numpy(), expected, rtol=1e-12)


def test_before_its_start_it_is_the_model():
    model = live_model().float()
    average = new_average(model, 0.9, start=3)
    for step in range(3):
        change(model, step)
        average.refresh(model)
        assert all(map(torch.equal, copies(average.model), copies(model)))
        average.update(YES)
        change(model, 10 + step)
    average.refresh(model)

    assert not torch.equal(copies(average.model)[0], copies(model)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_16_bits_are_kept_in_float32(dtype):
    model = nn.Linear(3, 2).to(dtype)
    nn.init.zeros_(model.weight)
    average = new_average(model, 0.999, ramp=False)
    average.update(YES)
    nn.init.constant_(model.weight, 2.5)
    for _ in range(1000):  # the difference of a step is a thousandth: below half a bit of 16
        average.update(YES)
    average.refresh(model)

    expected = torch.full((2, 3), 2.5 * (1 - 0.999**1000))
    torch.testing.assert_close(average.precise[model.weight], expected, rtol=1e-4, atol=0.0)
    assert torch.equal(average.model.weight, average.precise[model.weight].to(dtype))


class Student(nn.Module):
    """A model with everything that is not averaged."""

    def __init__(self):
        super().__init__()
        self.online = nn.Linear(2, 2)
        self.target = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("gone", torch.zeros(2))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.temperature = 1.0
        self.norm = nn.BatchNorm1d(2)


def move_rest(model):
    """Move everything that is not averaged."""
    with torch.no_grad():
        for parameter in model.target.parameters():
            parameter.add_(1)
    model.queue = torch.ones(4)  # longer than before
    model.scratch.add_(2)
    model.late = torch.ones(1)
    model.gone = None
    model.expanded = torch.ones(1).expand(3)
    model.temperature = 0.07
    model.norm.running_mean.add_(3)
    model.norm.momentum = 0.5


def test_what_is_not_averaged_is_that_of_the_model():
    model = Student()
    average = new_average(model, 0.9)
    move_rest(model)

    average.refresh(model)

    averaged = average.model
    buffers = dict(averaged.named_buffers())
    expected_buffers = dict(model.named_buffers())
    assert torch.equal(averaged.target.weight, model.target.weight)
    assert_same_bits(buffers, expected_buffers)
    assert not any(buffers[name] is expected_buffers[name] for name in buffers)
    assert averaged.gone is None
    assert averaged.temperature == 0.07
    assert averaged.norm.momentum == 0.5


def test_the_mode_of_an_average_is_its_own():
    model = Student()
    average = new_average(model, 0.9)
    average.model.train(False)

    average.refresh(model)

    assert not average.model.training
    assert model.training


class Configured(nn.Module):
    """A model whose passes depend on attributes and on modules without parameters."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.act = nn.Sequential(nn.Tanh(), nn.Tanh())
        self.config = SimpleNamespace(scale=1.0)
        self.by_name = {"scale": [1.0]}
        self.mask = torch.ones(2)  # no buffer
        self.modules_by_name = {"layer": self.layer}

    def forward(self, inputs):
        hidden = self.act(self.modules_by_name["layer"](inputs)) * self.mask
        return hidden * self.config.scale * self.by_name["scale"][0]


CHANGES = {
    "an attribute of an object": lambda model: setattr(model.config, "scale", 3.0),
    "another object": lambda model: setattr(model, "config", SimpleNamespace(scale=3.0)),
    "an entry of a list in a dict": lambda model: model.by_name["scale"].__setitem__(0, 3.0),
    "a tensor in place": lambda model: model.mask.mul_(3.0),
    "another tensor": lambda model: setattr(model, "mask", torch.zeros(2)),
    "another module": lambda model: setattr(model, "act", nn.ReLU()),
    "another inner module": lambda model: model.act.__setitem__(1, nn.ReLU()),
    "a module less": lambda model: model.act.__delitem__(0),
    "a module more": lambda model: model.act.append(nn.ReLU()),
    "modules in another order": lambda model: model.act.insert(0, nn.Sigmoid()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_and_modules_without_parameters_are_those_of_the_model(change):
    model = Configured()
    inputs = torch.randn(4, 2)
    average = new_average(model, 0.9)
    before = model(inputs).detach()
    CHANGES[change](model)
    average.refresh(model)

    with torch.no_grad():
        assert not torch.equal(model(inputs), before)
        assert torch.equal(average.model(inputs), model(inputs))


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_to_an_average_does_not_reach_the_model(change):
    model = Configured()
    inputs = torch.randn(4, 2)
    average = new_average(model, 0.9)
    CHANGES[change](model)
    average.refresh(model)
    expected = model(inputs).detach()

    average.model.config.scale = 5.0
    average.model.mask.zero_()

    with torch.no_grad():
        assert torch.equal(model(inputs), expected)
        assert average.model.modules_by_name["layer"] is average.model.layer
        average.refresh(model)
        assert torch.equal(average.model(inputs), expected)


def test_a_tensor_of_the_last_pass_is_left_out():
    model = Configured()
    average = new_average(model, 0.9)
    model.last = model(torch.randn(4, 2))
    model.temperature = 2

    average.refresh(model)

    assert average.model.temperature == 2


def test_a_run_of_an_older_behavior_keeps_frozen_parameters():
    model = Student()
    average = Ema(copy_model(model, takes_rest=False), Averaging(0.9, behavior=FIRST))
    before = model.target.weight.clone()
    move_rest(model)

    average.refresh(model)

    assert torch.equal(average.model.target.weight, before)
    assert average.model.temperature == 1.0
    assert torch.equal(average.model.scratch, model.scratch)


def test_weights_that_get_another_storage_are_followed():
    model = nn.Linear(2, 2)
    average = new_average(model, 0.0)
    model.weight.data = torch.full((2, 2), 5.0)
    average.update(YES)

    assert torch.equal(average.model.weight, torch.full((2, 2), 5.0))


def test_parameters_that_join_keep_the_averages_of_the_others():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)).bfloat16()
    average = new_average(model, 0.9)
    change(model, 0)
    average.update(YES)
    before = average.precise[model[0].weight].clone()

    average.model_copy.copy_parameters(set(model[1].parameters()))
    average.follow(set(model.parameters()))

    assert torch.equal(average.precise[model[0].weight], before)
    assert torch.equal(average.precise[model[1].weight], model[1].weight.float())
    assert average.updates == 1
