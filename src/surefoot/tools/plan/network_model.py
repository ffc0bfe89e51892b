"""A model of a step's communication: the bytes that a GPU sends, the passes that overlap them, and
the step's time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.strategy import is_exact
from surefoot.distributed.tree_sum import subtrees_of
from surefoot.tools.plan.workload import Spread, Workload


@dataclass(frozen=True)
class Machine:
    """One GPU of a cluster, from its data sheet. `mfu` is the fraction of the peak FLOP/s that
    training reaches.
    """

    flops: float
    mfu: float
    memory_bytes: int
    # bytes per second sent to other nodes, and as many received: this GPU's share of the network
    bandwidth: float
    node_bandwidth: float  # the same between GPUs of one node
    node_size: int = 8
    origins: Mapping[str, str] = field(default_factory=dict)  # the source of each value


def ring_gathered(number: float, ranks: int) -> float:
    """Return the bytes that each of `ranks` ranks sends in an all-gather or reduce-scatter of
    `number` bytes.

    The ring takes n - 1 rounds with 1/n of the bytes each, the minimum of all algorithms (Patarasuk
    and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

    >>> ring_gathered(800.0, 8)
    700.0
    """
    return number * (ranks - 1) / ranks


def ring_reduced(number: float, ranks: int) -> float:
    """Return the bytes that each of `ranks` ranks sends in an all-reduce of `number` bytes: a
    reduce-scatter and an all-gather.

    >>> ring_reduced(800.0, 8)
    1400.0
    """
    return 2 * ring_gathered(number, ranks)


@dataclass(frozen=True)
class PassWindow:
    """A forward or backward pass of a micro-batch, and the bytes that each GPU sends during the
    pass to shards and to replicas.
    """

    part: Literal["forward", "backward"]
    times: int  # per step
    to_shards: float
    to_replicas: float


def windows(work: Workload, strategy: Spread, *, micro_batches: int) -> list[PassWindow]:
    """Return a GPU's communication in a step, grouped by the pass that overlaps it.

    For Psi parameters, DDP sends 2 Psi elements to all-reduce gradients. FSDP sends 3 Psi elements
    (Rajbhandari et al. 2020, section 7.2): it gathers parameters for the forward pass and, if
    resharded, for the backward pass, and reduce-scatters gradients. Parameters outside of blocks
    stay gathered between the passes. Replicas all-reduce the gradients of each shard (Zhao et al.
    2023, 3.2.2). With exact sums, copies exchange subtrees once in a step, and shards send 1/W of a
    reduction more for the norm.

    >>> from surefoot.tools.plan.workload import Spread, Weight, Workload
    >>> work = Workload(
    ...     (), ((Weight((1024, 1024)),),) * 4, lambda n: 0, lambda n: 0, 0, 0, 0, (1.0, 2.0), 1
    ... )
    >>> [
    ...     sum(
    ...         window.to_shards + window.to_replicas
    ...         for window in windows(work, Spread(kind, 8), micro_batches=1)
    ...     )
    ...     / 2**20
    ...     for kind in ("ddp", "fsdp")
    ... ]  # of 16 MiB of weights
    [28.0, 42.0]
    """
    shards = strategy.shards
    trained = [weight for weight in work.weights if weight.trained]
    gradient_bytes = float(sum(weight.gathered_bytes(shards, "fp32") for weight in trained))
    block_bytes = sum(strategy.unit_bytes(block) for block in work.blocks)
    weight_bytes = strategy.unit_bytes(work.outside) + block_bytes

    forward = ring_gathered(weight_bytes, shards)
    backward = 0.0
    if strategy.reshard_after_forward:
        backward = ring_gathered(block_bytes, shards)
    scattered = ring_gathered(gradient_bytes, shards)
    reduces_every = strategy.sync == "every"
    if is_exact(strategy.kind, strategy.sync, exact=strategy.exact_sums):
        # copies exchange subtrees, once in a step
        shares = strategy.shares_of_copies(micro_batches)
        busiest = max(range(len(shares)), key=lambda copy: len(subtrees_of(shares[copy])))
        to_replicas = float(RankSums(shares, rank=busiest).bytes_sent(int(gradient_bytes / shards)))
        with_sums = 1
        to_shards = backward + scattered * (1 + 1 / shards)  # with the norms' gathers
    else:
        to_replicas = ring_reduced(gradient_bytes / shards, strategy.copies)
        with_sums = micro_batches if reduces_every else 1
        to_shards = backward + scattered
    before_sums = backward + scattered if reduces_every else backward
    all_windows = [
        PassWindow("forward", micro_batches, forward, 0.0),
        PassWindow("backward", micro_batches - with_sums, before_sums, 0.0),
        PassWindow("backward", with_sums, to_shards, to_replicas),
    ]
    return [window for window in all_windows if window.times]


def ring_bandwidth(machine: Machine, *, members: int, stride: int) -> float:
    """Return the bytes per second that each member of a ring sends. Members are `stride` ranks
    apart; consecutive ranks fill a node.

    Parallel rings use the network bandwidth of all members in a node. Their sum is limited by the
    bandwidth inside the node (NCCL's bus bandwidth).

    >>> machine = Machine(1e15, 0.4, 80 * 10**9, bandwidth=50e9, node_bandwidth=450e9)
    >>> [ring_bandwidth(machine, members=n, stride=s) / 1e9 for n, s in ((8, 1), (512, 1), (64, 8))]
    [450.0, 400.0, 50.0]
    """
    if (members - 1) * stride < machine.node_size:
        return machine.node_bandwidth
    parallel_rings = max(1, machine.node_size // stride)
    if parallel_rings == 1:
        return machine.bandwidth
    return min(machine.node_bandwidth, machine.bandwidth * parallel_rings)


@dataclass(frozen=True)
class Timing:
    """The seconds of a step without the optimizer update: computation, communication, and the
    exposed part of communication.
    """

    compute_s: float
    communication_s: float
    exposed_s: float
    sent_bytes: float  # by each GPU, and as many received
    # the smallest micro-batch of a GPU, in samples, whose passes hide all communication
    hidden_from: int

    @property
    def step_s(self) -> float:
        """The seconds of computation and of exposed communication."""
        return self.compute_s + self.exposed_s


def timing(work: Workload, strategy: Spread, machine: Machine, *, micro_batches: int) -> Timing:
    """Estimate the time of a step. Communication is exposed only for the time that exceeds the
    overlapping pass.

    >>> from surefoot.tools.plan.workload import Spread, Weight, Workload
    >>> work = Workload(
    ...     (), ((Weight((1024, 1024)),),) * 4, lambda n: 0, lambda n: 0, 0, 0, 0, (1e9, 2e9), 1
    ... )
    >>> machine = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10)
    >>> step = timing(
    ...     work, Spread("ddp", 8), machine, micro_batches=2
    ... )  # 28 MiB at 10 GB/s, beside one backward pass
    >>> round(step.compute_s, 4), round(step.communication_s, 5), step.exposed_s
    (0.012, 0.00294, 0.0)
    >>> machine = Machine(1e12, 0.5, 10**9, bandwidth=1e9, node_bandwidth=1e10, node_size=1)
    >>> timing(
    ...     work, Spread("ddp", 8), machine, micro_batches=2
    ... ).hidden_from  # 29.4 ms, against 4 ms of a sample's backward pass
    8
    """
    sends = windows(work, strategy, micro_batches=micro_batches)
    flops_per_s = machine.flops * machine.mfu
    to_shards = ring_bandwidth(machine, members=strategy.shards, stride=1)
    to_replicas = ring_bandwidth(machine, members=strategy.copies, stride=strategy.shards)
    forward_flops, backward_flops = work.flops
    communication_s = []
    exposed_s = []
    hidden_from = 1
    for window in sends:
        flops = forward_flops if window.part == "forward" else backward_flops
        computing_s = flops / flops_per_s
        # one after the other
        sending_s = window.to_shards / to_shards + window.to_replicas / to_replicas
        communication_s.append(window.times * sending_s)
        exposed_s.append(window.times * max(0.0, sending_s - computing_s))
        samples = math.ceil(sending_s / (computing_s / work.samples))
        hidden_from = max(hidden_from, samples)
    return Timing(
        compute_s=micro_batches * sum(work.flops) / flops_per_s,
        communication_s=sum(communication_s),
        exposed_s=sum(exposed_s),
        sent_bytes=sum(window.times * (window.to_shards + window.to_replicas) for window in sends),
        hidden_from=hidden_from,
    )
