"""A skipped step changes no bit, in each of the three ways; 1 second."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from in_one import in_one
from refused import refused
from surefoot.optim.adamw_fused import StraightToKernel
from surefoot.optim.kinds.adafactor import Adafactor
from surefoot.optim.kinds.adamw8bit import AdamW8bit
from surefoot.optim.kinds.lion import Lion
from surefoot.optim.kinds.muon import MuonWithAdamW
from surefoot.optim.kinds.schedule_free import ScheduleFree
from surefoot.optim.skip_step import (
    BranchOnCpu,
    InsideKernel,
    PartByPart,
    Restoring,
    skipping,
    step_unless_on_cpu,
    update_bytes,
)

CPU = torch.device("cpu")
GOOD = torch.tensor(0.0)
BAD = torch.tensor(1.0)

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, fused=True),
    "fused AdamW amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, fused=True, weight_decay=0.1),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True, weight_decay=0.1),
    "fused SGD momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, fused=True, weight_decay=0.1
    ),
    "fused SGD nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, fused=True
    ),
    "fused SGD dampening": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, fused=False),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, weight_decay=0.1),
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
}
OWN = {
    "Lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
    "own Adafactor": lambda p: Adafactor(p, weight_decay=0.1),
    "AdamW8bit": lambda p: pytest.importorskip("bitsandbytes") and AdamW8bit(p),
    "ScheduleFree": lambda p: ScheduleFree(p, weight_decay=0.1),
}
DAMPENED = "fused SGD dampening"  # refused where it would be needed to restore it
RESTORABLE = [name for name in OPTIMIZERS if name != DAMPENED]
FUSED = [name for name in RESTORABLE if name.startswith("fused")]
TAKING_THE_FLAG = {*FUSED, *OWN}
OPTIMIZERS |= OWN
OPTIMIZERS["Muon and AdamW"] = lambda p: MuonWithAdamW(
    [{"params": p[:1], "hidden": True}, {"params": p[1:], "hidden": False}], lr=0.1
)
WAYS = [
    *((name, "chosen") for name in OPTIMIZERS),
    *((name, "restoring") for name in RESTORABLE),
    ("Muon and AdamW", "parts restored"),
    ("fused AdamW", "told"),
]


def skip_by(way, name, optimizer):
    """One of the ways to skip; restoring is what the optimizer would go on another device."""
    match way:
        case "chosen":
            return skipping(optimizer, CPU)
        case "restoring":
            return Restoring(name, parameter_bytes=0)
        case "parts restored":
            (muon, _), adamw = skipping(optimizer, CPU).parts
            return PartByPart(((muon, Restoring("Muon", parameter_bytes=0)), adamw))
        case "told":
            return InsideKernel(name)


def build(name):
    torch.manual_seed(0)
    shape = (6, 5)
    if name == "AdamW8bit":
        shape = (80, 60)  # large enough for 8 bits
    parameters = [nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(4, 4))]
    return parameters, OPTIMIZERS[name](parameters)


def give_gradients(parameters, step, value=None):
    """Random gradients, which begin with a value if one is given."""
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if value is not None:
            parameter.grad[0, 0] = value


def copy_of(parameters, optimizer):
    """Copies of everything that a step may change."""
    states = [copy.deepcopy(optimizer.state[parameter]) for parameter in parameters]
    return values_of(parameters), states


def values_of(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def assert_same_bits(values, expected):
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


@in_one
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_skipped_step_changes_no_bit_of_parameters_and_state(name, way, value):
    parameters, optimizer = build(name)
    skip = skip_by(way, name, optimizer)
    for step in range(3):
        give_gradients(parameters, step)
        skip.apply(optimizer, GOOD)
    before = copy_of(parameters, optimizer)

    give_gradients(parameters, 3, value)
    skip.apply(optimizer, BAD)

    assert_same_bits(copy_of(parameters, optimizer), before)


@in_one
@pytest.mark.parametrize("skipped", [{0}, {0, 1}, {2}, {0, 3, 4}], ids=str)
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_training_goes_on_as_if_skipped_steps_had_not_been(name, way, skipped):
    parameters, optimizer = build(name)
    skip = skip_by(way, name, optimizer)
    expected, plain = build(name)

    for step in range(7):
        if step in skipped:
            give_gradients(parameters, step, math.nan)
            skip.apply(optimizer, BAD)
        else:
            give_gradients(parameters, step)
            skip.apply(optimizer, GOOD)
            give_gradients(expected, step)
            plain.step()

    assert_same_bits(values_of(parameters), values_of(expected))


@in_one
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_way_is_the_cheapest_that_the_optimizer_allows(name):
    _, optimizer = build(name)
    if name == "fused AdamW":
        cheapest = StraightToKernel
    elif name == "Muon and AdamW":
        cheapest = PartByPart
    elif name in TAKING_THE_FLAG:
        cheapest = InsideKernel
    else:
        cheapest = BranchOnCpu

    assert type(skipping(optimizer, CPU)) is cheapest


@in_one
@pytest.mark.parametrize("name", sorted(TAKING_THE_FLAG))
def test_a_fused_step_with_the_flag_reads_nothing_on_the_host(name):
    parameters, optimizer = build(name)
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)

    with NothingRead():
        skip.apply(optimizer, GOOD)
        skip.apply(optimizer, BAD)


# On the CPU these read their own step counter, which lives there; the flag itself must not be read.
@pytest.mark.parametrize("name", ["RMSprop", "Muon", "SGD momentum", "Rprop"])
def test_restoring_reads_nothing_on_the_host(name):
    parameters, optimizer = build(name)
    give_gradients(parameters, 0)

    with NothingRead():
        Restoring(name, parameter_bytes=0).apply(optimizer, BAD)


def test_the_flag_does_not_outlive_the_step_even_where_it_fails():
    parameters, optimizer = build("fused Adam")
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    skip.apply(optimizer, BAD)
    assert not hasattr(optimizer, "found_inf")

    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        skip.apply(optimizer, BAD)
    assert not hasattr(optimizer, "found_inf")


def test_a_parameter_that_gets_its_first_gradient_later_starts_from_zero_momentum():
    parameters, optimizer = build("fused SGD momentum")
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    parameters[1].grad = None
    skip.apply(optimizer, GOOD)
    start = parameters[1].detach().clone()
    give_gradients(parameters, 1)
    gradient = parameters[1].grad.clone()

    skip.apply(optimizer, GOOD)

    expected = start - 0.1 * (gradient + 0.1 * start)
    torch.testing.assert_close(parameters[1].detach(), expected)


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_a_parameter_without_a_gradient_is_left_alone(name):
    parameters, optimizer = build(name)
    skip = skipping(optimizer, CPU)
    for step in range(2):
        give_gradients(parameters, step)
        skip.apply(optimizer, GOOD)
    before = copy_of(parameters[1:], optimizer)
    give_gradients(parameters, 2)
    parameters[1].grad = None
    skip.apply(optimizer, GOOD)

    assert_same_bits(copy_of(parameters[1:], optimizer), before)


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_parameters_of_several_types_and_missing_gradients_are_trained_as_by_torch(name):
    def train(apply_step):
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(3, 3, dtype=torch.float32)),
            nn.Parameter(torch.randn(3, 3, dtype=torch.float64)),
        ]
        optimizer = OPTIMIZERS[name](parameters)
        skip = skipping(optimizer, CPU)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            for place, parameter in enumerate(parameters):
                gradient = torch.randn(3, 3, generator=generator).to(parameter.dtype)
                if step % 3 == place:
                    gradient = None
                parameter.grad = gradient
            apply_step(skip, optimizer)
        return values_of(parameters)

    skipped_nowhere = train(lambda skip, optimizer: skip.apply(optimizer, GOOD))
    by_torch = train(lambda _, optimizer: optimizer.step())

    assert_same_bits(skipped_nowhere, by_torch)


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_state_that_was_loaded_in_between_is_the_one_that_is_used(name):
    parameters, optimizer = build(name)
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    skip.apply(optimizer, GOOD)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = values_of(parameters)
    give_gradients(parameters, 1)
    skip.apply(optimizer, GOOD)
    expected = copy_of(parameters, optimizer)

    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    give_gradients(parameters, 1)
    skip.apply(optimizer, GOOD)

    assert_same_bits(copy_of(parameters, optimizer), expected)


def test_hooks_are_called_where_there_are_some_from_the_start():
    parameters, optimizer = build("fused AdamW")
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    give_gradients(parameters, 0)

    skipping(optimizer, CPU).apply(optimizer, GOOD)

    assert calls == ["step"]


def test_a_subclass_is_not_trusted_to_honour_the_flag():
    class Noisy(torch.optim.AdamW):
        pass

    optimizer = Noisy([nn.Parameter(torch.ones(2))], fused=True)

    assert isinstance(skipping(optimizer, CPU), BranchOnCpu)


def test_away_from_the_cpu_what_cannot_count_on_the_device_is_refused_with_what_to_type():
    optimizer = torch.optim.NAdam([nn.Parameter(torch.ones(2))])

    with refused("optimizer-not-capturable", value="NAdam"):
        skipping(optimizer, torch.device("cuda"))


def test_away_from_the_cpu_dampening_is_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    with refused("sgd-with-dampening"):
        skipping(optimizer, torch.device("cuda"))


def test_away_from_the_cpu_others_are_restored_and_say_what_it_costs():
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(20, 30))])

    skip = skipping(optimizer, torch.device("cuda"))

    assert isinstance(skip, Restoring)
    assert "+2,400 bytes" in skip.description


class CountingInGroup(torch.optim.SGD):
    def step(self, closure=None):
        (group,) = self.param_groups
        group["calls"] = group.get("calls", 0) + 1


class CountingInState(torch.optim.SGD):
    def step(self, closure=None):
        (parameter,) = self.param_groups[0]["params"]
        state = self.state[parameter]
        state["calls"] = state.get("calls", 0) + 1


@pytest.mark.parametrize("counting", [CountingInGroup, CountingInState])
def test_a_counter_in_python_that_cannot_be_undone_is_refused(counting):
    optimizer = counting([nn.Parameter(torch.ones(2))], lr=0.1)

    with refused("optimizer-state-on-host"):
        Restoring("Counting", parameter_bytes=0).apply(optimizer, GOOD)


def test_sparse_adam_is_refused_by_name():
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(2))])

    with refused("optimizer-of-sparse-gradients"):
        skipping(optimizer, CPU)


def test_the_branch_refuses_a_flag_it_would_have_to_wait_for():
    _, optimizer = build("NAdam")

    with pytest.raises(RuntimeError, match="meta"):
        step_unless_on_cpu(optimizer, torch.zeros((), device="meta"))


def test_resumed_momentum_goes_on():
    parameters, optimizer = build("fused SGD momentum")
    give_gradients(parameters, 0)
    skipping(optimizer, CPU).apply(optimizer, GOOD)
    saved = copy.deepcopy(optimizer.state_dict())

    resumed = OPTIMIZERS["fused SGD momentum"](parameters)
    skipping(resumed, CPU)
    resumed.load_state_dict(saved)

    assert_same_bits(copy_of(parameters, resumed), copy_of(parameters, optimizer))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.NAdam(p, capturable=True),
        lambda p: torch.optim.RMSprop(p, capturable=True),
        torch.optim.Muon,
        *OWN.values(),
        lambda p: MuonWithAdamW([{"params": p, "hidden": True}], lr=0.1),
    ],
)
def test_on_a_gpu_a_skipped_step_changes_no_bit_and_waits_for_nothing(make):
    device = torch.device("cuda")
    parameters = [nn.Parameter(torch.randn(6, 5, device=device))]
    optimizer = make(parameters)
    skip = skipping(optimizer, device)
    good = GOOD.to(device)
    bad = BAD.to(device)
    for flag in (bad, good, good):
        parameters[0].grad = torch.randn(6, 5, device=device)
        skip.apply(optimizer, flag)
    before = copy_of(parameters, optimizer)
    parameters[0].grad = torch.full((6, 5), math.nan, device=device)

    torch.cuda.set_sync_debug_mode("error")
    try:
        skip.apply(optimizer, bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert_same_bits(copy_of(parameters, optimizer), before)


class NothingRead(TorchDispatchMode):
    """Raises where a tensor becomes a number on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_fused_sgd_that_would_not_train_is_refused():
    weights = [nn.Parameter(torch.ones(99, dtype=torch.bfloat16))]
    fused = torch.optim.SGD(weights, lr=0.1, fused=True)
    plain = torch.optim.SGD(weights, lr=0.1)

    with refused("fused-sgd-of-16-bits"):
        skipping(fused, CPU)
    assert isinstance(skipping(plain, CPU), BranchOnCpu)


def test_a_subclass_is_not_taken_for_what_it_extends():
    class Louder(Lion):
        """Writes whatever the flag says."""

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(2.0)

    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = Louder([weight], lr=0.1)

    skipping(optimizer, CPU).apply(optimizer, BAD)

    assert weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_composite_restores_one_part_at_a_time_so_its_copies_are_those_of_the_largest(order):
    small = torch.optim.NAdam([nn.Parameter(torch.zeros(3))])
    large = torch.optim.NAdam([nn.Parameter(torch.zeros(70))])
    skip = Restoring("NAdam", parameter_bytes=0)
    parts = [(small, skip), (large, skip)]

    composite = PartByPart(tuple(parts[place] for place in order))

    assert 0 < update_bytes(skip, small) < update_bytes(skip, large)
    assert update_bytes(composite, large) == update_bytes(skip, large)
