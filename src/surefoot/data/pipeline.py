"""One run's data, however they are read: step by step to train, any step again to look at it, a split in order to score."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from surefoot.config.batch_size import Batching
from surefoot.data.buckets import Buckets
from surefoot.data.loader import Feed, MicroBatch, in_order
from surefoot.data.order import MicroBatches
from surefoot.distributed.world import World
from surefoot.seeding import untouched


@dataclass(frozen=True)
class Supply:
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
        share = self.plan.pieces // self.world.size
        own = range(self.world.rank * share, (self.world.rank + 1) * share) if self.world.size > 1 else None
        return self._feed(workers=workers, own=own, puts_back=False, say=say)

    def samples(self, step: int) -> list[list[int]]:
        """Which samples this rank's micro-batches of a step hold, by the plan: none is read."""
        try:
            pieces = self.plan.micro_batches(step)
        except Exception:  # a plan of the user's own: an error being reported must not be hidden by another
            return []
        share = self.plan.pieces // self.world.size
        own = pieces[self.world.rank * share : (self.world.rank + 1) * share]
        return [ids.tolist() for ids, _ in own]

    def again(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of any step, of all ranks, read once more; none where the data themselves cannot be read."""
        return self._once(step, own=None)

    def first(self, step: int = 0) -> MicroBatch | None:
        """The first micro-batch that this rank makes in a step, read ahead; None where it cannot be read."""
        place = self.plan.pieces // self.world.size * self.world.rank
        return next(iter(self._once(step, own=range(place, place + 1))), None)

    def beginning(self) -> MicroBatch | None:
        """The first micro-batch of the whole run, the same on every rank; None where it cannot be read."""
        return next(iter(self._once(0, own=range(1))), None)

    def _once(self, step: int, *, own: range | None) -> Sequence[MicroBatch]:
        feed = self._feed(own=own)
        with untouched():
            try:
                feed.start(step, stop=step + 1)
                return feed.micro_batches(step)
            except Exception:  # an error being reported must not be hidden by reading once more
                return []
            finally:
                feed.close()

    def split(self, dataset: Any, *, batch_size: int | None, most: int | None = None) -> Iterator[MicroBatch]:
        """Every sample of another data set once, in order, shared with the other ranks; with `most` only so many batches, here."""
        return in_order(
            dataset,
            batch_size=batch_size or self._rows,
            seed=self.seed,
            device=self.world.device,
            workers=self.workers,
            count=self.count,
            collate=self.collate,
            most=most,
            rank=self.world.rank if most is None else 0,
            ranks=self.world.size if most is None else 1,
        )

    @property
    def _feed(self) -> partial[Feed]:
        made: dict[str, Any] = {
            "seed": self.seed,
            "device": self.world.device,
            "count": self.count,
            "collate": self.collate,
        }
        return partial(Feed, self.dataset, self.plan, **made)

    @property
    def _rows(self) -> int:
        """So many samples fit a micro-batch, however long they are."""
        if isinstance(self.plan, Buckets):
            return max(1, self.sizes.micro_batch_size // int(self.plan.longest.max()))
        return self.sizes.micro_batch_size
