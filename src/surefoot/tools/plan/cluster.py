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
        stays = (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.averages
            + self.buffers
            + self.sums
        )
        return stays + max(
            self.whole_gradients + self.gathered + self.exchanged + self.passing, self.updating
        )


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
    shards, sharded = strategy.shards, strategy.kind == "fsdp"
    parameters = sum(weight.shard_bytes(shards) for weight in work.weights)
    own = {
        "parameters": parameters,
        "gradients": sum(weight.shard_bytes(shards) for weight in work.weights if weight.trained),
        "optimizer": work.state_bytes(shards),
        "averages": work.averages * parameters,
    }
    exact = sharded and is_exact(strategy.kind, strategy.sync, exact=strategy.exact_sums)
    kept_whole = sharded and strategy.sync == "last" and micro_batches > 1
    return Memory(
        **(dict.fromkeys(own, 0) if strategy.cpu_offload else own),
        buffers=work.buffer_bytes * (1 + work.averages),
        sums=own["gradients"]
        * (strategy.pending_sums(micro_batches) + (exact and strategy.cpu_offload)),
        whole_gradients=sum(weight.memory_bytes for weight in work.weights if weight.trained)
        if kept_whole
        else 0,
        gathered=_gathered_bytes(work, strategy) if sharded else 0,
        exchanged=_exchanged_bytes(work, strategy, buffers=1 + exact) if sharded else 0,
        passing=work.pass_bytes,
        updating=0 if strategy.cpu_offload else work.update_bytes(shards),
        host=sum(own.values()) if strategy.cpu_offload else 0,
    )


def _gathered_bytes(work: Workload, strategy: Spread) -> int:
    outside, *blocks = (strategy.unit_bytes(unit) for unit in (work.outside, *work.blocks))
    if not strategy.reshard_after_forward:
        return outside + sum(blocks) + max(blocks, default=0)
    return outside + max(
        (sum(blocks[index : index + 2]) for index in range(len(blocks))), default=0
    )


def _exchanged_bytes(work: Workload, strategy: Spread, *, buffers: int) -> int:
    # a block's gradients in the dtype of the pass, plus what is sent and, with exact sums, received
    # in float32
    units = [[weight for weight in unit if weight.trained] for unit in (work.outside, *work.blocks)]
    return max(
        strategy.unit_bytes(unit)
        + buffers * replace(strategy, gather_dtype="fp32").unit_bytes(unit)
        for unit in units
    )


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
    sizes, rows, each = parts.pipeline.sizes, len(parts.pipeline.again(0)[0].sample_ids), 1
    if sizes.pieces == 1:  # without an explicit size, each rank computes one
        rows, shared_by_all = max(1, round(rows / ranks)), sizes.batch_size
    else:
        each = -(-sizes.pieces // ranks)
        shared_by_all = ranks * (ranks <= sizes.pieces)
    if shared_by_all and shared_by_all % ranks == 0:
        return rows, each, None
    cut = "" if sizes.pieces == 1 else f" in {sizes.pieces} micro-batches"
    refused = f"train would refuse this: {ranks:,} ranks cannot share {sizes.batch_size:,} {sizes.unit}{cut or ' evenly'}"
    return rows, each, f"{refused}; this estimate assumes a step that they can share"


def tokens_each(parts: RunComponents) -> float | None:
    """Return the tokens per sample with padding. Returns None if the data do not report sample
    lengths.
    """
    pipeline = parts.pipeline
    if pipeline.sizes.unit == "tokens":
        return pipeline.sizes.micro_batch_size / len(pipeline.again(0)[0].sample_ids)
    lengths = pipeline.dataset.lengths if isinstance(pipeline.dataset, Lengthy) else None
    return float(lengths) if isinstance(lengths, int) else None


def spread(parts: RunComponents, *, ranks: int) -> Spread:
    """Return the parallel strategy of a run over `ranks` ranks."""
    how = parts.plan.parallel
    assert how.kind != "auto"  # `chosen` has replaced "auto"
    assert how.sync != "auto"
    own = (
        how.reshard_after_forward,
        how.sync,
        how.gather_dtype,
        how.cpu_offload,
        parts.plan.identity["exact_sums"],
    )
    return Spread(how.kind, ranks, how.replicas, *own)


def fits(memory: Memory, machine: Machine) -> str:
    """Return "fits", "barely fits" or the excess over a machine's memory."""
    if memory.total > machine.memory_bytes:
        return f"{in_words(memory.total - machine.memory_bytes)} too much"
    return "barely fits" if memory.total > _SPARE * machine.memory_bytes else "fits"
