"""A run on many GPUs as numbers: what the machine is assumed to be, and what fits on it."""

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.data.buckets import Lengthy
from surefoot.memory import in_words
from surefoot.plan.memory_model import Memory, memory
from surefoot.plan.network_model import Machine, Timing, hidden_from, sent_bytes, timing
from surefoot.plan.workload import Spread, Workload
from surefoot.run.components import RunComponents

_SPARE = 0.9  # of a GPU's memory: CUDA, NCCL and fragments take their part of the rest


@dataclass(frozen=True)
class Assumed:
    """A machine, and for each of its numbers where that comes from."""

    machine: Machine
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """A strategy, and what is computed of it: bytes of a GPU, seconds and bytes sent of a step, the micro-batch that hides these."""

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

    @property
    def sent(self) -> float:
        return sent_bytes(self.work, self.strategy, micro_batches=self.micro_batches)

    @property
    def hidden_from(self) -> int:
        return hidden_from(self.work, self.strategy, self.machine, micro_batches=self.micro_batches)


def shared(parts: RunComponents, *, ranks: int) -> tuple[int, int, str | None]:
    """Samples of a micro-batch, micro-batches of each rank, and what `train` would refuse of that."""
    sizes = parts.supply.sizes
    first = len(parts.supply.again(0)[0].ids)
    if sizes.pieces == 1:  # without a size of its own each rank makes one
        rows, each = max(1, round(first / ranks)), 1
        fits = sizes.batch_size % ranks == 0
    else:
        rows, each = first, max(1, round(sizes.pieces / ranks))
        fits = sizes.pieces % ranks == 0
    if fits:
        return rows, each, None
    cut = "" if sizes.pieces == 1 else f" in {sizes.pieces} micro-batches"
    refused = f"train would refuse that: {ranks:,} ranks cannot share {sizes.batch_size:,} {sizes.unit}{cut} evenly"
    return rows, each, f"{refused}; here a step is as large as they need"


def tokens_each(parts: RunComponents) -> float | None:
    """Tokens of a sample, with the padding, where the data say how long samples are."""
    supply = parts.supply
    if supply.sizes.unit == "tokens":
        return supply.sizes.micro_batch_size / len(supply.again(0)[0].ids)
    lengths = supply.dataset.lengths if isinstance(supply.dataset, Lengthy) else None
    return float(lengths) if isinstance(lengths, int) else None


def spread(parts: RunComponents, *, ranks: int) -> Spread:
    how = parts.parallel
    assert how.kind != "auto"  # `chosen` has decided
    assert how.synchronise != "auto"
    return Spread(how.kind, ranks, how.replicas, how.reshard, how.synchronise, how.gather, how.offload)


def fits(found: Memory, machine: Machine) -> str:
    left = machine.memory_bytes - found.total
    if left < 0:
        return f"{in_words(-left)} too much"
    return "hardly fits" if found.total > _SPARE * machine.memory_bytes else "fits"
