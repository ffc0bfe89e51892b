"""The order of a sampler that lists the batches of each epoch."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Protocol, runtime_checkable

import numpy as np

from surefoot.data.fingerprints import hash_of
from surefoot.data.order import Ids
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_EPOCHS_READ = 20  # a sampler that gives more samples than this many epochs has no end
_REPEATS = (
    32  # bits: a repeated sample of an epoch has the epoch's number plus 2**32 for each repeat
)


@runtime_checkable
class HasEpochs(Protocol):
    """A sampler whose batches depend on the number of the epoch."""

    def set_epoch(self, epoch: int) -> Any:
        """Set the number of the epoch."""


@runtime_checkable
class Wraps(Protocol):
    """A sampler that takes samples from another sampler."""

    sampler: Any


class BatchLists:
    """Plan of the batches that a sampler lists in each epoch: one step per batch, divided evenly
    into `pieces` micro-batches.

    The list of an epoch is read after `set_epoch`, if the sampler has it, with the global
    generators seeded by (seed, epoch). At the start, the first epochs are read twice. Raises
    `ConfigError` if the two lists differ, if a list has no end, or if the number of batches differs
    between epochs.
    """

    def __init__(self, seed: int, sampler: Any, *, samples: int) -> None:
        self.sampler, self.dataset_size = sampler, samples
        self.name = type(sampler.sampler if isinstance(sampler, Wraps) else sampler).__name__
        self.key, self.pieces = stream_key(seed, "order"), 1
        self.cached: dict[int, tuple[Ids, Ids, Ids]] = {}
        first, again, second = (self._read(epoch) for epoch in (0, 0, 1))
        if hash_of(first) != hash_of(again):
            raise self._refusal(
                "lists other batches when it is read again for the same epoch",
                "a resumed run would read other samples",
                "let it draw from random, np.random or torch's global generator, or seed its own in set_epoch(epoch)",
            )
        if len(first) != len(second):
            raise self._refusal(
                f"lists {len(first)} batches in epoch 0 and {len(second)} in epoch 1",
                "then a step's epoch depends on all earlier epochs, so no step has an address",
                "let it list as many batches in every epoch",
            )
        self.steps, self.samples = len(first), sum(map(len, first))
        self.largest, self.kinds = max(map(len, first)), len(set(map(len, first)))
        self.fingerprint = hash_of(first)

    def cut(self, pieces: int) -> "BatchLists":
        plan = copy(self)
        plan.pieces = pieces
        return plan

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        epoch, index = divmod(step, self.steps)
        ids, epochs, ends = self._epoch(epoch)
        part = slice(ends[index], ends[index + 1])
        return list(
            zip(
                *(np.array_split(each[part].copy(), self.pieces) for each in (ids, epochs)),
                strict=True,
            )
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "order": f"batches of {self.name}",
            "samples": self.samples,
            "sha256": self.fingerprint,
        }

    def _epoch(self, epoch: int) -> tuple[Ids, Ids, Ids]:
        if epoch not in self.cached:
            batches = self._read(epoch)
            if len(batches) != self.steps:
                raise DataError(
                    f"{self.name} lists {len(batches)} batches in epoch {epoch}, but {self.steps} in epoch 0\n"
                    "  a step's epoch is computed from the number of batches, so every epoch must have as many"
                )
            ids = np.concatenate(batches)
            ordered = np.argsort(ids, kind="stable")
            repeats = np.empty_like(ids)
            repeats[ordered] = np.arange(len(ids)) - np.searchsorted(ids[ordered], ids[ordered])
            ends = np.cumsum([0, *map(len, batches)])
            self.cached = dict([*self.cached.items()][-1:]) | {
                epoch: (ids, epoch + (repeats << _REPEATS), ends)
            }
        return self.cached[epoch]

    def _read(self, epoch: int) -> list[Ids]:
        batches, left = list[Ids](), _MAX_EPOCHS_READ * self.dataset_size + 1000
        with untouched():
            seed_generators(fold(self.key, epoch))
            for part in _wrapped(self.sampler):
                if isinstance(part, HasEpochs):
                    part.set_epoch(epoch)
            for batch in self.sampler:
                batches.append(self._checked(batch, nth=len(batches)))
                left -= len(batches[-1])
                if left < 0:
                    raise self._refusal(
                        f"lists more samples than {_MAX_EPOCHS_READ} epochs of the data set have",
                        "an epoch without an end cannot be addressed",
                        "let it end after one epoch; the run repeats it",
                    )
        if not batches:
            raise self._refusal("lists no batch", "an epoch needs a step", "check its arguments")
        return batches

    def _checked(self, batch: Any, *, nth: int) -> Ids:
        try:
            ids = np.array([int(sample) for sample in batch], dtype=np.int64)
        except (TypeError, ValueError):
            ids = np.empty(0, np.int64)
        if not ids.size or ids.min() < 0 or ids.max() >= self.dataset_size:
            raise self._refusal(
                f"lists {repr(batch)[:60]} as batch {nth}",
                f"a batch must list one or more numbers of samples, from 0 to {self.dataset_size - 1}",
                "correct the sampler",
            )
        return ids

    def _refusal(self, what: str, why: str, cure: str) -> ConfigError:
        return ConfigError(
            f"train_data is a DataLoader whose {self.name} {what}\n  {why}\n"
            f"  {cure}; or pass the data set: train_data=loader.dataset, batch_size=..."
        )


def _wrapped(sampler: Any) -> Iterator[Any]:
    for _ in range(8):  # a sampler may wrap itself
        yield sampler
        if not isinstance(sampler, Wraps):
            return
        sampler = sampler.sampler
