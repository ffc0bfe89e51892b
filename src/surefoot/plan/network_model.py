"""How many bytes a GPU sends in a step under a strategy, beside which pass, and how long the step takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.plan.workload import Spread, Workload


@dataclass(frozen=True)
class Machine:
    """One GPU among many, as a data sheet has it; `mfu` is the fraction of its FLOP/s that training uses."""

    flops: float
    mfu: float
    memory_bytes: int
    bandwidth: float  # bytes per second to other nodes, and as many received: this GPU's share of the network
    node_bandwidth: float  # the same to others of its node
    node_size: int = 8
    origins: Mapping[str, str] = field(default_factory=dict)  # of each number, where it comes from


def ring_gathered(number: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends while they gather `number` bytes, or add them up and keep a part each.

    Patarasuk and Yuan 2009 (https://doi.org/10.1016/j.jpdc.2008.09.002): n - 1 rounds, a part of n in each; no
    algorithm sends less.

    >>> ring_gathered(800.0, 8)
    700.0
    """
    return number * (ranks - 1) / ranks


def ring_reduced(number: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends while they add `number` bytes up and all have the sum: both halves of it, after each other.

    >>> ring_reduced(800.0, 8)
    1400.0
    """
    return 2 * ring_gathered(number, ranks)


@dataclass(frozen=True)
class Window:
    """A forward or backward pass of a micro-batch, and bytes that each GPU sends beside it: to its shards, to its replicas."""

    part: Literal["forward", "backward"]
    times: int  # in a step
    to_shards: float
    to_replicas: float


def windows(work: Workload, strategy: Spread, *, micro_batches: int) -> list[Window]:
    """Everything that a GPU sends in a step, beside which pass.

    DDP adds gradients up once, Psi numbers twice over the ring; FSDP gathers parameters for the forward pass and, resharded,
    for the backward pass, and scatters the sums of gradients: 3 Psi (Rajbhandari et al. 2020, section 7.2). Parameters outside of
    blocks stay gathered between the two passes. With replicas the sums of a shard are added up over them (Zhao et al. 2023, 3.2.2).

    >>> from surefoot.plan.workload import Spread, Weight, Workload
    >>> work = Workload((), ((Weight((1024, 1024)),),) * 4, lambda n: 0, lambda n: 0, 0, 0, 0, (1.0, 2.0), 1)
    >>> [sum(window.to_shards + window.to_replicas for window in windows(work, Spread(kind, 8), micro_batches=1)) / 2**20
    ...     for kind in ("ddp", "fsdp")]  # of 16 MiB of weights
    [28.0, 42.0]
    """
    shards, copies = strategy.shards, strategy.copies
    sums = float(sum(weight.gathered_bytes(shards, "fp32") for weight in work.weights if weight.trained))
    units = [strategy.unit_bytes(unit) for unit in (work.outside, *work.blocks)]
    backward = ring_gathered(sum(units[1:]), shards) if strategy.reshard_after_forward else 0.0
    scattered, added = ring_gathered(sums, shards), ring_reduced(sums / shards, copies)
    summed = micro_batches if strategy.sync == "every" else 1
    all_windows = [
        Window("forward", micro_batches, ring_gathered(sum(units), shards), 0.0),
        Window("backward", micro_batches - summed, backward, 0.0),
        Window("backward", summed, backward + scattered, added),
    ]
    return [window for window in all_windows if window.times]


def ring_bandwidth(machine: Machine, *, members: int, stride: int) -> float:
    """Bytes per second that each member of a ring sends; its ranks are `stride` apart, and nodes are filled rank by rank.

    Several members in a node make as many rings, each through another one's share of the network. Together they have those shares,
    up to the bandwidth inside the node: NCCL's bus bandwidth.

    >>> machine = Machine(1e15, 0.4, 80 * 10**9, bandwidth=50e9, node_bandwidth=450e9)
    >>> [ring_bandwidth(machine, members=n, stride=s) / 1e9 for n, s in ((8, 1), (512, 1), (64, 8))]
    [450.0, 400.0, 50.0]
    """
    if (members - 1) * stride < machine.node_size:
        return machine.node_bandwidth
    beside = max(1, machine.node_size // stride)
    return machine.bandwidth if beside == 1 else min(machine.node_bandwidth, machine.bandwidth * beside)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step without its update: computing, and beside or after that sending, of which some is exposed."""

    compute_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: float  # by each GPU, and as many received
    hidden_from: int  # the smallest micro-batch of a GPU, in samples, whose passes hide all communication

    @property
    def step_s(self) -> float:
        """Seconds of computing, and of communication that it does not hide."""
        return self.compute_s + self.exposed_s


def timing(work: Workload, strategy: Spread, machine: Machine, *, micro_batches: int) -> Timing:
    """The time of a step: communication runs beside its pass, and only its excess over the pass is exposed.

    >>> from surefoot.plan.workload import Spread, Weight, Workload
    >>> work = Workload((), ((Weight((1024, 1024)),),) * 4, lambda n: 0, lambda n: 0, 0, 0, 0, (1e9, 2e9), 1)
    >>> machine = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10)
    >>> step = timing(work, Spread("ddp", 8), machine, micro_batches=2)  # 28 MiB at 10 GB/s, beside one backward pass
    >>> round(step.compute_s, 4), round(step.communication_s, 5), step.exposed_s
    (0.012, 0.00294, 0.0)
    >>> machine = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10, node_size=1)
    >>> timing(work, Spread("ddp", 8), machine, micro_batches=2).hidden_from  # 29.4 ms, against 4 ms of a sample's backward pass
    8
    """
    sends = windows(work, strategy, micro_batches=micro_batches)
    flops_per_s = machine.flops * machine.mfu
    to_shards = ring_bandwidth(machine, members=strategy.shards, stride=1)
    to_replicas = ring_bandwidth(machine, members=strategy.copies, stride=strategy.shards)
    took = [
        (
            window.times,
            work.flops[window.part == "backward"] / flops_per_s,
            window.to_shards / to_shards + window.to_replicas / to_replicas,  # one after the other
        )
        for window in sends
    ]
    return Timing(
        compute_s=micro_batches * sum(work.flops) / flops_per_s,
        communication_s=sum(times * sending for times, _, sending in took),
        exposed_s=sum(times * max(0.0, sending - computing) for times, computing, sending in took),
        sent_bytes=sum(window.times * (window.to_shards + window.to_replicas) for window in sends),
        hidden_from=max(1, *(math.ceil(sending / (computing / work.samples)) for _, computing, sending in took)),
    )
