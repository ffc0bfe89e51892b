"""One run's data, however they are read: step by step to train, any step again to look at it, a split in order to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from surefoot.batching import Batching
from surefoot.data.buckets import Buckets
from surefoot.data.feed import Feed, in_order
from surefoot.data.plan import MicroBatches
from surefoot.micro_batch import MicroBatch
from surefoot.seeding import untouched


@dataclass(frozen=True)
class Supply:
    """The training data with their plan, and how samples become batches on the device."""

    dataset: Any
    plan: MicroBatches
    sizes: Batching
    seed: int
    device: torch.device
    workers: int
    count: Callable[[Any], int] | None
    collate: Callable[[list[Any]], Any] | None

    def feed(self, *, workers: int) -> Feed:
        """Micro-batches by step, not yet started."""
        return Feed(
            self.dataset,
            self.plan,
            seed=self.seed,
            device=self.device,
            workers=workers,
            count=self.count,
            collate=self.collate,
        )

    def again(self, step: int) -> Sequence[MicroBatch]:
        """The micro-batches of any step, read once more; none where the data themselves cannot be read."""
        feed = self.feed(workers=0)
        with untouched():
            try:
                feed.start(step, stop=step + 1)
                return feed.micro_batches(step)
            except Exception:  # an error being reported must not be hidden by reading once more
                return []
            finally:
                feed.close()

    def split(self, dataset: Any, *, batch_size: int | None, most: int | None = None) -> Iterator[MicroBatch]:
        """Every sample of another data set once, in order; with `most` only so many batches, spread over it."""
        return in_order(
            dataset,
            batch_size=batch_size or self._rows,
            seed=self.seed,
            device=self.device,
            workers=self.workers,
            count=self.count,
            collate=self.collate,
            most=most,
        )

    @property
    def _rows(self) -> int:
        """So many samples fit a micro-batch, however long they are."""
        if isinstance(self.plan, Buckets):
            return max(1, self.sizes.micro_batch_size // int(self.plan.longest.max()))
        return self.sizes.micro_batch_size
