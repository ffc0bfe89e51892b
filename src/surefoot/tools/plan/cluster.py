"""A run on many GPUs: the estimated memory of each GPU by purpose, compared with the available
memory.
"""

from dataclasses import dataclass, replace

from surefoot.data.buckets import Lengthy
from surefoot.distributed.strategy import is_exact
from surefoot.memory import in_words
from surefoot.run.components import RunComponents
from surefoot.tools.plan.network_model import Machine, Timing, timing
from surefoot.tools.plan.workload import Spread, Workload

_SPARE = 0.9  # usable fraction of a GPU's memory; CUDA, NCCL and fragmentation use some of the rest


@dataclass(frozen=True)
class Memory:
    """The bytes on one GPU by purpose. `total` is the peak. `host` counts the bytes in host
    memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    averages: int
    buffers: int
    sums: int  # of gradients, pending along the tree of micro-batches
    whole_gradients: int  # kept unsharded until the last micro-batch
    gathered: int  # parameters of the current blocks
    exchanged: int  # communication buffers of the gradients
    passing: int  # activations and temporaries of a forward and backward pass
    updating: int  # copies during the optimizer update, which does not overlap `passing`
    host: int = 0

    @property
    def total(self) -> int:
        """The permanent memory plus the additional memory of a pass or of an update, whichever is
        larger.
        """
        state = self.parameters + self.gradients + self.optimizer + self.averages
        stays = state + self.buffers + self.sums
        during_pass = self.whole_gradients + self.gathered + self.exchanged + self.passing
        return stays + max(during_pass, self.updating)


def memory(work: Workload, strategy: Spread, *, micro_batches: int) -> Memory:
    """Estimate the memory of the fullest GPU if each rank computes `micro_batches` per step.

    Parameters are sharded by FSDP2's rows (Rajbhandari et al. 2020, section 5, stage 3,
    https://arxiv.org/abs/1910.02054). Besides its own rows, a GPU holds the gathered current block
    and the next block in transit, or all blocks without resharding (Zhao et al. 2023, section 3.3,
    https://arxiv.org/abs/2304.11277). The gradients of one block and their communication buffer are
    added.

    >>> from surefoot.tools.plan.workload import Spread, Weight, Workload
    >>> block = (Weight((1024, 1024)),)
    >>> work = Workload(
    ...     (), (block,) * 4, lambda n: 2 * 4 * 4 * 2**20 // n, lambda n: 0, 0, 0, 0, (1.0, 2.0), 1
    ... )
    >>> held = memory(work, Spread("fsdp", 8), micro_batches=1)
    >>> (
    ...     [held.parameters, held.gradients, held.optimizer, held.gathered, held.exchanged],
    ...     held.total,
    ... )  # of 16 MiB of weights
    ([2097152, 2097152, 4194304, 8388608, 8388608], 25165824)
    """
    shards = strategy.shards
    trained = [weight for weight in work.weights if weight.trained]
    parameters = sum(weight.shard_bytes(shards) for weight in work.weights)
    gradients = sum(weight.shard_bytes(shards) for weight in trained)
    optimizer = work.state_bytes(shards)
    averages = work.averages * parameters
    pending_sums = strategy.pending_sums(micro_batches)
    whole_gradients = 0
    gathered = 0
    exchanged = 0
    if strategy.kind == "fsdp":
        buffers = 1
        if is_exact(strategy.kind, strategy.sync, exact=strategy.exact_sums):
            buffers = 2
            if strategy.cpu_offload:
                pending_sums += 1
        if strategy.sync == "last" and micro_batches > 1:
            whole_gradients = sum(weight.memory_bytes for weight in trained)
        gathered = _gathered_bytes(work, strategy)
        exchanged = _exchanged_bytes(work, strategy, buffers=buffers)
    without_offload = Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        averages=averages,
        buffers=work.buffer_bytes * (1 + work.averages),
        sums=gradients * pending_sums,
        whole_gradients=whole_gradients,
        gathered=gathered,
        exchanged=exchanged,
        passing=work.pass_bytes,
        updating=work.update_bytes(shards),
    )
    if not strategy.cpu_offload:
        return without_offload
    return replace(
        without_offload,
        parameters=0,
        gradients=0,
        optimizer=0,
        averages=0,
        updating=0,
        host=parameters + gradients + optimizer + averages,
    )


def _gathered_bytes(work: Workload, strategy: Spread) -> int:
    outside = strategy.unit_bytes(work.outside)
    blocks = [strategy.unit_bytes(block) for block in work.blocks]
    if not strategy.reshard_after_forward:
        return outside + sum(blocks) + max(blocks, default=0)
    with_next = [sum(blocks[index : index + 2]) for index in range(len(blocks))]
    return outside + max(with_next, default=0)


def _exchanged_bytes(work: Workload, strategy: Spread, *, buffers: int) -> int:
    # a block's gradients in the dtype of the pass, plus what is sent and, with exact sums, received
    # in float32
    in_float32 = replace(strategy, gather_dtype="fp32")
    largest = 0
    for unit in (work.outside, *work.blocks):
        trained = [weight for weight in unit if weight.trained]
        size = strategy.unit_bytes(trained) + buffers * in_float32.unit_bytes(trained)
        largest = max(largest, size)
    return largest


@dataclass(frozen=True)
class Case:
    """A strategy with its estimates: the memory of a GPU and the time of a step."""

    name: str
    strategy: Spread
    work: Workload
    micro_batches: int
    machine: Machine

    @property
    def memory(self) -> Memory:
        return memory(self.work, self.strategy, micro_batches=self.micro_batches)

    @property
    def timing(self) -> Timing:
        return timing(self.work, self.strategy, self.machine, micro_batches=self.micro_batches)


def shared(parts: RunComponents, *, ranks: int) -> tuple[int, int, str | None]:
    """Return the samples per micro-batch, the micro-batches per rank, and the error that `train`
    would raise, or None.
    """
    sizes = parts.pipeline.sizes
    rows = len(parts.pipeline.again(0)[0].sample_ids)
    if sizes.pieces == 1:  # without an explicit size, each rank computes one
        rows = max(1, round(rows / ranks))
        micro_batches = 1
        can_share = sizes.batch_size % ranks == 0
        division = "evenly"
    else:
        micro_batches = -(-sizes.pieces // ranks)
        can_share = ranks <= sizes.pieces
        division = f"in {sizes.pieces} micro-batches"
    if can_share:
        return rows, micro_batches, None
    note = (
        f"train would refuse this: {ranks:,} ranks cannot share"
        f" {sizes.batch_size:,} {sizes.unit} {division};"
        " this estimate assumes a step that they can share"
    )
    return rows, micro_batches, note


def tokens_each(parts: RunComponents) -> float | None:
    """Return the tokens per sample with padding. Returns None if the data do not report sample
    lengths.
    """
    pipeline = parts.pipeline
    if pipeline.sizes.unit == "tokens":
        return pipeline.sizes.micro_batch_size / len(pipeline.again(0)[0].sample_ids)
    if not isinstance(pipeline.dataset, Lengthy):
        return None
    lengths = pipeline.dataset.lengths
    return float(lengths) if isinstance(lengths, int) else None


def spread(parts: RunComponents, *, ranks: int) -> Spread:
    """Return the parallel strategy of a run over `ranks` ranks."""
    how = parts.plan.parallel
    assert how.kind != "auto"  # `chosen` has replaced "auto"
    assert how.sync != "auto"
    return Spread(
        how.kind,
        ranks,
        replicas=how.replicas,
        reshard_after_forward=how.reshard_after_forward,
        sync=how.sync,
        gather_dtype=how.gather_dtype,
        cpu_offload=how.cpu_offload,
        exact_sums=parts.plan.identity["exact_sums"],
    )


def fits(memory: Memory, machine: Machine) -> str:
    """Return "fits", "barely fits" or the excess over a machine's memory."""
    if memory.total > machine.memory_bytes:
        return f"{in_words(memory.total - machine.memory_bytes)} too much"
    return "barely fits" if memory.total > _SPARE * machine.memory_bytes else "fits"
