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
GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)

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
PLAIN = list(OPTIMIZERS)  # those that a restoring step would have to serve
OPTIMIZERS |= OWN
OPTIMIZERS["Muon and AdamW"] = lambda p: MuonWithAdamW(
    [{"params": p[:1], "hidden": True}, {"params": p[1:], "hidden": False}], lr=0.1
)
TAKING_THE_FLAG = (
    {name for name in OPTIMIZERS if name.startswith("fused")} - {"fused SGD dampening"}
) | {*OWN}
WAYS = [
    ("Muon and AdamW", "parts restored"),
    *((name, "chosen") for name in OPTIMIZERS),
    *(
        (name, "restoring") for name in PLAIN if name != "fused SGD dampening"
    ),  # refused where it would be needed
    ("fused AdamW", "told"),
]


def ways(name, optimizer):
    """Those of the three that this optimizer can go here; restoring is what it would go on another
    device.
    """
    restoring = Restoring(type(optimizer).__name__, parameter_bytes=0)
    chosen = skipping(optimizer, CPU)
    ways = {"chosen": chosen, "restoring": restoring, "told": InsideKernel(name)}
    if isinstance(chosen, PartByPart):
        muon, adamw = chosen.parts
        ways["parts restored"] = PartByPart(
            ((muon[0], Restoring("Muon", parameter_bytes=0)), adamw)
        )
    return ways


def made(name):
    torch.manual_seed(0)
    shape = (80, 60) if name == "AdamW8bit" else (6, 5)  # large enough for 8 bits
    parameters = [nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(4, 4))]
    return parameters, OPTIMIZERS[name](parameters)


def give_gradients(parameters, step, value=None):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if value is not None:
            parameter.grad[0, 0] = value


def bits(parameters, optimizer):
    """Copies of everything that a step may change."""
    state = [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[p].items()
        }
        for p in parameters
    ]
    return [parameter.detach().clone() for parameter in parameters], state


def assert_same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@in_one
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_skipped_step_changes_no_bit_of_parameters_and_state(name, way, value):
    parameters, optimizer = made(name)
    skip = ways(name, optimizer)[way]
    for step in range(3):
        give_gradients(parameters, step)
        skip.apply(optimizer, GOOD)
    before = bits(parameters, optimizer)

    give_gradients(parameters, 3, value)
    skip.apply(optimizer, BAD)

    assert_same_bits(bits(parameters, optimizer), before)


@in_one
@pytest.mark.parametrize("skipped", [{0}, {0, 1}, {2}, {0, 3, 4}], ids=str)
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_training_goes_on_as_if_skipped_steps_had_not_been(name, way, skipped):
    parameters, optimizer = made(name)
    skip = ways(name, optimizer)[way]
    for step in range(7):
        give_gradients(parameters, step, math.nan if step in skipped else None)
        skip.apply(optimizer, BAD if step in skipped else GOOD)
    expected, plain = made(name)
    for step in set(range(7)) - skipped:
        give_gradients(expected, step)
        plain.step()

    assert_same_bits([p.detach() for p in parameters], [p.detach() for p in expected])


@in_one
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_way_is_the_cheapest_that_the_optimizer_allows(name):
    _, optimizer = made(name)
    expected = InsideKernel if name in TAKING_THE_FLAG else BranchOnCpu
    expected = {"fused AdamW": StraightToKernel, "Muon and AdamW": PartByPart}.get(name, expected)

    assert type(skipping(optimizer, CPU)) is expected


@in_one
@pytest.mark.parametrize("name", sorted(TAKING_THE_FLAG))
def test_a_fused_step_with_the_flag_reads_nothing_on_the_host(name):
    parameters, optimizer = made(name)
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)

    with NothingRead():
        skip.apply(optimizer, GOOD)
        skip.apply(optimizer, BAD)


# On the CPU these read their own step counter, which lives there; the flag itself must not be read.
@pytest.mark.parametrize("name", ["RMSprop", "Muon", "SGD momentum", "Rprop"])
def test_restoring_reads_nothing_on_the_host(name):
    parameters, optimizer = made(name)
    give_gradients(parameters, 0)

    with NothingRead():
        Restoring(name, parameter_bytes=0).apply(optimizer, BAD)


def test_the_flag_does_not_outlive_the_step_even_where_it_fails():
    parameters, optimizer = made("fused Adam")
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    skip.apply(optimizer, BAD)
    assert not hasattr(optimizer, "found_inf")

    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        skip.apply(optimizer, BAD)
    assert not hasattr(optimizer, "found_inf")


def test_a_parameter_that_gets_its_first_gradient_later_starts_from_zero_momentum():
    parameters, optimizer = made("fused SGD momentum")
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    parameters[1].grad = None
    skip.apply(optimizer, GOOD)
    start = parameters[1].detach().clone()
    give_gradients(parameters, 1)
    gradient = parameters[1].grad.clone()
    skip.apply(optimizer, GOOD)

    torch.testing.assert_close(parameters[1].detach(), start - 0.1 * (gradient + 0.1 * start))


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_a_parameter_without_a_gradient_is_left_alone(name):
    parameters, optimizer = made(name)
    skip = skipping(optimizer, CPU)
    for step in range(2):
        give_gradients(parameters, step)
        skip.apply(optimizer, GOOD)
    before = bits(parameters[1:], optimizer)
    give_gradients(parameters, 2)
    parameters[1].grad = None
    skip.apply(optimizer, GOOD)

    assert_same_bits(bits(parameters[1:], optimizer), before)


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_parameters_of_several_types_and_missing_gradients_are_trained_as_by_torch(name):
    def run(step_once):
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(3, 3, dtype=dtype)) for dtype in (torch.float32, torch.float64)
        ]
        optimizer = OPTIMIZERS[name](parameters)
        skip = skipping(optimizer, CPU)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            for place, parameter in enumerate(parameters):
                gradient = torch.randn(3, 3, generator=generator).to(parameter.dtype)
                parameter.grad = None if step % 3 == place else gradient
            step_once(skip, optimizer)
        return [parameter.detach() for parameter in parameters]

    assert_same_bits(
        run(lambda skip, optimizer: skip.apply(optimizer, GOOD)),
        run(lambda _, optimizer: optimizer.step()),
    )


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD momentum"])
def test_state_that_was_loaded_in_between_is_the_one_that_is_used(name):
    parameters, optimizer = made(name)
    skip = skipping(optimizer, CPU)
    give_gradients(parameters, 0)
    skip.apply(optimizer, GOOD)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in parameters]
    give_gradients(parameters, 1)
    skip.apply(optimizer, GOOD)
    expected = bits(parameters, optimizer)

    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    give_gradients(parameters, 1)
    skip.apply(optimizer, GOOD)

    assert_same_bits(bits(parameters, optimizer), expected)


def test_hooks_are_called_where_there_are_some_from_the_start():
    parameters, optimizer = made("fused AdamW")
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    give_gradients(parameters, 0)
    skipping(optimizer, CPU).apply(optimizer, GOOD)

    assert called == [True]


def test_a_subclass_is_not_trusted_to_honour_the_flag():
    class Noisy(torch.optim.AdamW):
        pass

    assert isinstance(skipping(Noisy([nn.Parameter(torch.ones(2))], fused=True), CPU), BranchOnCpu)


def test_away_from_the_cpu_what_cannot_count_on_the_device_is_refused_with_what_to_type():
    with refused("optimizer-not-capturable", value="NAdam"):
        skipping(torch.optim.NAdam([nn.Parameter(torch.ones(2))]), torch.device("cuda"))


def test_away_from_the_cpu_dampening_is_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    with refused("sgd-with-dampening"):
        skipping(
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5), torch.device("cuda")
        )


def test_away_from_the_cpu_others_are_restored_and_say_what_it_costs():
    way = skipping(torch.optim.Muon([nn.Parameter(torch.ones(20, 30))]), torch.device("cuda"))

    assert isinstance(way, Restoring)
    assert "+2,400 bytes" in way.description


@pytest.mark.parametrize("place", ["group", "state"])
def test_a_counter_in_python_that_cannot_be_undone_is_refused(place):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            if place == "group":
                self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            else:
                state = self.state[self.param_groups[0]["params"][0]]
                state["k"] = state.get("k", 0) + 1

    with refused("optimizer-state-on-host"):
        Restoring("Counting", parameter_bytes=0).apply(
            Counting([nn.Parameter(torch.ones(2))], lr=0.1), GOOD
        )


def test_sparse_adam_is_refused_by_name():
    with refused("optimizer-of-sparse-gradients"):
        skipping(torch.optim.SparseAdam([nn.Parameter(torch.ones(2))]), CPU)


def test_the_branch_refuses_a_flag_it_would_have_to_wait_for():
    _, optimizer = made("NAdam")
    with pytest.raises(RuntimeError, match="meta"):
        step_unless_on_cpu(optimizer, torch.zeros((), device="meta"))


def test_resumed_momentum_goes_on():
    parameters, optimizer = made("fused SGD momentum")
    give_gradients(parameters, 0)
    skipping(optimizer, CPU).apply(optimizer, GOOD)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = OPTIMIZERS["fused SGD momentum"](parameters)
    skipping(fresh, CPU)
    fresh.load_state_dict(saved)

    assert_same_bits(bits(parameters, fresh), bits(parameters, optimizer))


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
    flags = GOOD.to(device), BAD.to(device)
    for flag in (flags[1], flags[0], flags[0]):
        parameters[0].grad = torch.randn(6, 5, device=device)
        skip.apply(optimizer, flag)
    before = bits(parameters, optimizer)
    parameters[0].grad = torch.full((6, 5), math.nan, device=device)

    torch.cuda.set_sync_debug_mode("error")
    try:
        skip.apply(optimizer, flags[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert_same_bits(bits(parameters, optimizer), before)


class NothingRead(TorchDispatchMode):
    """Raises where a tensor becomes a number on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_fused_sgd_that_would_not_train_is_refused():
    weights = [nn.Parameter(torch.ones(99, dtype=torch.bfloat16))]
    with refused("fused-sgd-of-16-bits"):
        skipping(torch.optim.SGD(weights, lr=0.1, fused=True), CPU)
    assert isinstance(skipping(torch.optim.SGD(weights, lr=0.1), CPU), BranchOnCpu)


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
    small, large = (torch.optim.NAdam([nn.Parameter(torch.zeros(size))]) for size in (3, 70))
    parts = [(optimizer, Restoring("NAdam", 0)) for optimizer in (small, large)]
    each = [update_bytes(skip, optimizer) for optimizer, skip in parts]
    composite = PartByPart(tuple(parts[place] for place in order))
    assert 0 < each[0] < each[1] == update_bytes(composite, large)
