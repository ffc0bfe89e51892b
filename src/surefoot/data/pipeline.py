"""Data pipeline of a run: batch sizes, the plan of samples, and the feed that reads the samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from surefoot.config.batch_size import Batching, batching, one_each
from surefoot.data.buckets import Buckets, Lengthy
from surefoot.data.dataset_checks import is_stream
from surefoot.data.fingerprints import all_within
from surefoot.data.loader import Feed, MicroBatch, in_order
from surefoot.data.mixture import Mixture
from surefoot.data.order import Cut, MicroBatches, MixtureOrder, Order, Plan
from surefoot.distributed.strategy import refuse_ranks
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import untouched

if TYPE_CHECKING:
    from surefoot.data.streams.tape import Tape


@runtime_checkable
class Arriving(Protocol):
    """A data set whose rows arrive one after another (`data/streams/tape.py`)."""

    def arrival(self, batch_size: int) -> Plan:
        """Return the order of its rows."""


def planned_sizes(
    train: Any,
    batch_size: int | str,
    micro_batch_size: int | str | None,
    *,
    ranks: int = 1,
    began: int | str | None = None,
) -> Batching:
    """Return the batch and micro-batch sizes, in tokens only if samples differ in length.

    If `micro_batch_size` is None, each rank reads one micro-batch per step. `began` is the first micro-batch size of a resumed run.
    """
    if micro_batch_size is None:
        micro_batch_size = began or one_each(batch_size, ranks=ranks)
    sizes = batching(batch_size, micro_batch_size)
    refuse_ranks(ranks, pieces=sizes.pieces, batch_size=batch_size, is_resumed=began is not None)
    if sizes.unit == "samples":
        return sizes
    if not isinstance(train, Lengthy):
        raise ConfigError(
            f"batch_size = {batch_size}: {type(train).__name__} does not report the lengths of its samples\n"
            "  give batch_size in samples, or add an attribute `lengths` to the data set: (samples,) or (samples, sides)"
        )
    return sizes.of_equal_samples(train.lengths) if isinstance(train.lengths, int) else sizes


def tape_of(settings: Any, world: World, *, run_dir: Path | None, sizes: Batching) -> "Tape | None":
    """Return the tape of training data that are a stream, or None (see `opening.build_tape`). Collective."""
    if not is_stream(settings.train_data):
        return None
    from surefoot.data.streams.opening import build_tape

    how = {"length": settings.length, "seed": settings.seed, "workers": settings.workers}
    return build_tape(settings.train_data, world, run_dir=run_dir, sizes=sizes, **how)


def data_plan(train: Any, *, seed: int, samples: int, sizes: Batching) -> MicroBatches:
    """Return the plan of samples: one permutation per epoch, a weighted mixture, batches of similar length, or a stream's own."""
    if isinstance(train, Arriving):
        return Cut(train.arrival(sizes.batch_size), sizes.micro_batch_size)
    if sizes.unit == "tokens":
        lengths = np.asarray(train.lengths)
        is_valid = lengths.ndim in (1, 2) and len(lengths) == samples and lengths.dtype.kind in "iu"
        if not (is_valid and lengths.size and lengths.min() > 0):
            raise DataError(
                f"{type(train).__name__}.lengths is {lengths.dtype} of shape {lengths.shape}, but the data set has {samples} samples\n"
                "  give integer numbers of tokens, 1 or more: (samples,) or (samples, sides)"
            )
        return Buckets(seed, lengths=lengths.astype(np.int64), tokens=sizes.micro_batch_size, pieces=sizes.pieces)
    plan: Plan = Order(seed, samples=samples, batch_size=sizes.batch_size)
    if isinstance(train, Mixture):
        plan = MixtureOrder(seed, sizes=train.sizes, weights=train.weights, batch_size=sizes.batch_size)
    return Cut(plan, sizes.micro_batch_size)


def steps_of_epoch(plan: MicroBatches, sizes: Batching) -> tuple[int, int]:
    """Return the size of an epoch and of a step in samples, or in steps if the samples per step vary."""
    return (plan.steps, 1) if isinstance(plan, Buckets) else (plan.samples, sizes.batch_size)


def refuse_compiled(plan: MicroBatches, *, compiled: bool) -> None:
    """Raise `ConfigError` if compiled code would get a new shape in almost every step."""
    if compiled and isinstance(plan, Buckets):
        raise ConfigError(
            "compile: batches sized in tokens change shape in almost every step, and each shape would be compiled\n"
            "  omit --compile, or give batch_size in samples"
        )


@dataclass(frozen=True)
class DataPipeline:
    """The training data set, its sample plan, and the settings of the reader."""

    dataset: Any
    plan: MicroBatches
    sizes: Batching
    seed: int
    world: World
    workers: int
    count: Callable[[Any], int] | None
    collate: Callable[[list[Any]], Any] | None
    tape: "Tape | None" = None  # the data set, if it is a stream

    @property
    def checked(self) -> Any:
        """The part of the data set that checks may read: all of it, or the first rows of a stream."""
        return self.dataset if self.tape is None else self.tape.beginning()

    def feed(self, *, workers: int, say: Callable[[str], None] = print) -> Feed:
        """Return this rank's feed, not yet started; the caller must seed the global generators after each read."""
        return self._feed(workers=workers, own=self._own if self.world.size > 1 else None, puts_back=False, say=say)

    def samples(self, step: int) -> list[list[int]]:
        """Return the sample ids of this rank's micro-batches of a step without reading the samples."""
        try:
            pieces = self.plan.micro_batches(step)
        except Exception:  # an error of the plan must not hide the error that is being reported
            return []
        return [pieces[index][0].tolist() for index in self._own]

    def first(self, step: int = 0) -> MicroBatch | None:
        """Return the first micro-batch of this rank in a step, or None if the read fails."""
        return next(iter(self.again(step, own=self._own[:1])), None)

    def beginning(self) -> MicroBatch | None:
        """Return the first micro-batch of the run, equal on all ranks, or None if the read fails."""
        return next(iter(self.again(0, own=range(1))), None)

    def again(self, step: int, *, own: range | None = None) -> Sequence[MicroBatch]:
        """Read the micro-batches of any step (all, or those in `own`); return an empty list if the read fails."""
        feed = self._feed(own=own)
        with untouched():
            try:
                feed.start(step, stop=step + 1)
                return feed.micro_batches(step)
            except Exception:  # a failed read must not hide the error that is being reported
                return []
            finally:
                feed.close()

    def split(self, dataset: Any, *, batch_size: int | None, max_batches: int | None = None) -> Iterator[MicroBatch]:
        """Yield the batches of a split once, divided among ranks; with `max_batches`, every rank reads the same batches."""
        rows = self.sizes.micro_batch_size
        if isinstance(self.plan, Buckets):  # rows that fit even if all have the maximal length
            rows = max(1, rows // int(self.plan.longest.max()))
        return in_order(
            dataset,
            batch_size=batch_size or rows,
            seed=self.seed,
            device=self.world.device,
            workers=self.workers,
            count=self.count,
            collate=self.collate,
            max_batches=max_batches,
            rank=self.world.rank if max_batches is None else 0,
            ranks=self.world.size if max_batches is None else 1,
        )

    def code(self) -> list[Any]:
        """Return the objects whose source text says how samples are read."""
        return [*all_within(self.checked), *([] if self.tape is None else self.tape.stream.code())]

    def close(self) -> None:
        """Stop reading a stream. Recorded rows can still be read."""
        if self.tape is not None:
            self.tape.close()

    @property
    def _own(self) -> range:
        share = self.plan.pieces // self.world.size
        return range(self.world.rank * share, (self.world.rank + 1) * share)

    @property
    def _feed(self) -> partial[Feed]:
        device, count, collate = self.world.device, self.count, self.collate
        return partial(Feed, self.dataset, self.plan, seed=self.seed, device=device, count=count, collate=collate)
