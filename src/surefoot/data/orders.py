"""Orders of training samples other than a permutation per epoch: sequential, in lanes, weighted, and in the batches of a sampler."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from surefoot.config.batch_size import Batching
from surefoot.config.order import Weighted as Weighted  # noqa: PLC0414  # public as sf.data.Weighted
from surefoot.data.fingerprints import hash_of
from surefoot.data.order import Blocks, Cut, Ids, MicroBatches, Order, Plan, folded
from surefoot.errors import ConfigError, DataError
from surefoot.seeding import fold, seed_generators, stream_key, untouched

_MAX_EPOCHS_READ = 20  # a sampler that gives more samples than this many epochs has no end
_REPEATS = 32  # bits: a repeated sample of an epoch has the epoch's number plus 2**32 for each repeat


def plan_order(order: Any, *, seed: int, samples: int, sizes: Batching) -> MicroBatches:
    """Return the plan of an order other than "shuffled". Raises `ConfigError` if it does not fit the number of samples."""
    size, steps = sizes.batch_size, None
    if isinstance(order, BatchLists):
        return order.cut(sizes.pieces)
    if order == "sequential":
        plan: Plan = SequentialOrder(samples=samples, batch_size=size)
    elif order == "lanes":
        plan = lanes = Lanes(samples=samples, batch_size=size)
        steps = lanes.steps
    elif isinstance(order, Shuffled):
        plan = Order(seed, samples=samples, batch_size=size, num_samples=order.num_samples)
    else:
        if len(order.weights) != samples:
            raise ConfigError(
                f"order = Weighted(...) has {len(order.weights)} weights, but the data set has {samples} samples\n"
                "  each sample needs one weight\n  give a sample the weight 0 to leave it out"
            )
        plan = WeightedOrder(seed, order, batch_size=size)
    return Cut(plan, sizes.micro_batch_size, steps=steps)


@dataclass(frozen=True)
class Shuffled:
    """The order "shuffled" with another size of an epoch than the data set's."""

    num_samples: int


class SequentialOrder:
    """Order from the first sample to the last, epoch after epoch; every step is full and may span two epochs.

    >>> [SequentialOrder(samples=5, batch_size=3).ids(step)[0].tolist() for step in range(3)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    """

    def __init__(self, *, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def ids(self, step: int) -> tuple[Ids, Ids]:
        epochs, ids = np.divmod(np.arange(self.batch_size, dtype=np.int64) + step * self.batch_size, self.samples)
        return ids, epochs

    def to_dict(self) -> dict[str, Any]:
        return {"order": "sequential", "samples": self.samples}


class Lanes:
    """Order for a state that is carried from step to step: `batch_size` lanes, each a stretch of consecutive samples.

    The lanes are `torch.arange(samples).tensor_split(batch_size)`: the first `samples % batch_size` lanes have one sample more.
    Step k of an epoch reads the k-th sample of each lane, in the order of the lanes. If some lanes have one sample more, the
    last step of the epoch reads these lanes only. Every epoch starts again at the first sample of each lane.

    >>> plan = Lanes(samples=8, batch_size=3)
    >>> [plan.ids(step)[0].tolist() for step in range(4)]
    [[0, 3, 6], [1, 4, 7], [2, 5], [0, 3, 6]]
    """

    def __init__(self, *, samples: int, batch_size: int) -> None:
        if samples < batch_size:
            raise ConfigError(
                f"order = lanes: a step has batch_size = {batch_size} lanes, but the data set has {samples} samples\n"
                "  each lane needs a sample of its own: lower batch_size"
            )
        self.samples, self.batch_size = samples, batch_size
        self.shortest, self.longer = divmod(samples, batch_size)
        self.steps = self.shortest + (self.longer > 0)
        lanes = np.arange(batch_size, dtype=np.int64)
        self.starts = lanes * self.shortest + np.minimum(lanes, self.longer)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        epoch, offset = divmod(step, self.steps)
        ids = self.starts[: self.longer if offset == self.shortest else None] + offset
        return ids, np.full_like(ids, epoch)

    def to_dict(self) -> dict[str, Any]:
        return {"order": "lanes", "samples": self.samples}


class WeightedOrder:
    """Order of random draws with given weights. With replacement, each draw is a function of (seed, number of the draw) only.

    With replacement, the second array of `ids` has the number of each draw in place of its epoch, so that two draws of a sample are
    augmented differently. Without replacement, an epoch has the samples with the smallest exponential variates of rate `weights`
    (Efraimidis and Spirakis 2006: https://doi.org/10.1016/j.ipl.2005.11.003).

    >>> WeightedOrder(0, Weighted([0, 1, 0]), batch_size=2).ids(1)
    (array([1, 1]), array([2, 3]))
    """

    def __init__(self, seed: int, weighted: Weighted, *, batch_size: int) -> None:
        self.weighted, self.batch_size = weighted, batch_size
        self.weights = np.array(weighted.weights)
        self.samples = weighted.num_samples or len(self.weights)
        self.key, ends = stream_key(seed, "order"), np.cumsum(self.weights / self.weights.max())
        self.ends = ends / ends[-1]
        self.blocks = Blocks(self._draw if weighted.replacement else self._draw_once, batch_size)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        return self.blocks.step(step)

    def to_dict(self) -> dict[str, Any]:
        how = {"replacement": self.weighted.replacement, "sha256": hash_of(self.weights)}
        return {"order": "weighted", "samples": self.samples, "weights": how}

    def _draw(self, positions: Ids) -> tuple[Ids, Ids]:
        return np.searchsorted(self.ends, _uniform(self.key, positions), side="right"), positions

    def _draw_once(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, offsets = np.divmod(positions, self.samples)
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):
            exponential = -np.log1p(-_uniform(fold(self.key, int(epoch)), np.arange(len(self.weights))))
            variates = np.divide(
                exponential, self.weights, out=np.full_like(exponential, np.inf), where=self.weights > 0
            )
            here = epochs == epoch
            ids[here] = np.argsort(variates, kind="stable")[offsets[here]]
        return ids, epochs


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
    """Plan of the batches that a sampler lists in each epoch: one step per batch, divided evenly into `pieces` micro-batches.

    The list of an epoch is read after `set_epoch`, if the sampler has it, with the global generators seeded by (seed, epoch). At the
    start, the first epochs are read twice. Raises `ConfigError` if the two lists differ, if a list has no end, or if
    the number of batches differs between epochs.
    """

    def __init__(self, seed: int, sampler: Any, *, samples: int) -> None:
        self.sampler, self.dataset_size, self.name = sampler, samples, type(sampler).__name__
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
        return list(zip(*(np.array_split(each[part].copy(), self.pieces) for each in (ids, epochs)), strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {"order": f"batches of {self.name}", "samples": self.samples, "sha256": self.fingerprint}

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
            self.cached = dict([*self.cached.items()][-1:]) | {epoch: (ids, epoch + (repeats << _REPEATS), ends)}
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


def _uniform(key: int, numbers: Ids) -> "np.ndarray[Any, np.dtype[np.float64]]":
    drawn = folded(np.full(len(numbers), key, np.uint64), numbers.astype(np.uint64))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
