"""The data of one run: from the user's data set to the plan that turns samples into steps, and to their reader."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from surefoot.config.batch_size import Batching, batching, one_each
from surefoot.data.buckets import Buckets, Lengthy
from surefoot.data.loader import Feed, MicroBatch, in_order
from surefoot.data.mixture import Mixture
from surefoot.data.order import Cut, MicroBatches, MixtureOrder, Order, Plan
from surefoot.distributed.strategy import refuse_ranks
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import untouched


def planned_sizes(
    train: Any,
    batch_size: int | str,
    micro_batch_size: int | str | None,
    *,
    ranks: int = 1,
    began: int | str | None = None,
) -> Batching:
    """The sizes of a step and its micro-batches; tokens only where the samples differ in length.

    Without a `micro_batch_size` each of `ranks` makes one; a run that has begun keeps the size it began with.
    """
    if micro_batch_size is None:
        micro_batch_size = began or one_each(batch_size, ranks=ranks)
    sizes = batching(batch_size, micro_batch_size)
    refuse_ranks(ranks, pieces=sizes.pieces, batch_size=batch_size, is_resumed=began is not None)
    if sizes.unit == "samples":
        return sizes
    if not isinstance(train, Lengthy):
        raise ConfigError(
            f"batch_size = {batch_size}: {type(train).__name__} does not say how long its samples are\n"
            "  give a number of samples, or the data set an attribute `lengths`: (samples,) or (samples, sides)"
        )
    return sizes.of_equal_samples(train.lengths) if isinstance(train.lengths, int) else sizes


def data_plan(train: Any, *, seed: int, samples: int, sizes: Batching) -> MicroBatches:
    """Which samples a micro-batch sees: one permutation a pass, a weighted mixture of them, or batches of equal length."""
    if sizes.unit == "tokens":
        lengths = np.asarray(train.lengths)
        is_valid = lengths.ndim in (1, 2) and len(lengths) == samples and lengths.dtype.kind in "iu"
        if not (is_valid and lengths.size and lengths.min() > 0):
            raise DataError(
                f"{type(train).__name__}.lengths is {lengths.dtype} of shape {lengths.shape}, and there are {samples} samples\n"
                "  give whole numbers of tokens, 1 or more: (samples,) or (samples, sides)"
            )
        return Buckets(seed, lengths=lengths.astype(np.int64), tokens=sizes.micro_batch_size, pieces=sizes.pieces)
    plan: Plan = Order(seed, samples=samples, batch_size=sizes.batch_size)
    if isinstance(train, Mixture):
        plan = MixtureOrder(seed, sizes=train.sizes, weights=train.weights, batch_size=sizes.batch_size)
    return Cut(plan, sizes.micro_batch_size)


def steps_of_epoch(plan: MicroBatches, sizes: Batching) -> tuple[int, int]:
    """The length of an epoch and of a step, as whole numbers: in samples, or in steps if steps vary in samples."""
    return (plan.steps, 1) if isinstance(plan, Buckets) else (plan.samples, sizes.batch_size)


def refuse_compiled(plan: MicroBatches, *, compiled: bool) -> None:
    """Raise if code compiled for one shape would get another shape in almost every step."""
    if compiled and isinstance(plan, Buckets):
        raise ConfigError(
            "compile: batches by tokens have another shape in almost every step, and each would be compiled anew\n"
            "  leave --compile out, or give batch_size in samples"
        )


@dataclass(frozen=True)
class DataPipeline:
    """The training data with their plan, and how samples become batches on the device."""

    dataset: Any
    plan: MicroBatches
    sizes: Batching
    seed: int
    world: World
    workers: int
    count: Callable[[Any], int] | None
    collate: Callable[[list[Any]], Any] | None

    def feed(self, *, workers: int, say: Callable[[str], None] = print) -> Feed:
        """This rank's micro-batches by step, not yet started; for a loop, which seeds the global generators after each step's."""
        return self._feed(workers=workers, own=self._own if self.world.size > 1 else None, puts_back=False, say=say)

    def samples(self, step: int) -> list[list[int]]:
        """Which samples this rank's micro-batches of a step hold, by the plan: none is read."""
        try:
            pieces = self.plan.micro_batches(step)
        except Exception:  # a plan of the user's own: an error being reported must not be hidden by another
            return []
        return [pieces[index][0].tolist() for index in self._own]

    def first(self, step: int = 0) -> MicroBatch | None:
        """The first micro-batch that this rank makes in a step, read ahead; None where it cannot be read."""
        return next(iter(self.again(step, own=self._own[:1])), None)

    def beginning(self) -> MicroBatch | None:
        """The first micro-batch of the whole run, the same on every rank; None where it cannot be read."""
        return next(iter(self.again(0, own=range(1))), None)

    def again(self, step: int, *, own: range | None = None) -> Sequence[MicroBatch]:
        """The micro-batches of any step, those of `own` or of all ranks, read once more; none where the data cannot be read."""
        feed = self._feed(own=own)
        with untouched():
            try:
                feed.start(step, stop=step + 1)
                return feed.micro_batches(step)
            except Exception:  # an error being reported must not be hidden by reading once more
                return []
            finally:
                feed.close()

    def split(self, dataset: Any, *, batch_size: int | None, max_batches: int | None = None) -> Iterator[MicroBatch]:
        """Every sample of another data set once, in order, shared with the other ranks; at most `max_batches` of them, here."""
        rows = self.sizes.micro_batch_size
        if isinstance(self.plan, Buckets):  # so many fit a micro-batch, however long they are
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

    @property
    def _own(self) -> range:
        """Which micro-batches of a step are this rank's."""
        share = self.plan.pieces // self.world.size
        return range(self.world.rank * share, (self.world.rank + 1) * share)

    @property
    def _feed(self) -> partial[Feed]:
        device, count, collate = self.world.device, self.count, self.collate
        return partial(Feed, self.dataset, self.plan, seed=self.seed, device=device, count=count, collate=collate)
