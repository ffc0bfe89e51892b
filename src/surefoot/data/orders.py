"""Orders of training samples other than a permutation per epoch: sequential, in lanes, and
weighted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.config.batch_size import Batching
from surefoot.config.order import Weighted as Weighted  # noqa: PLC0414  # public as sf.data.Weighted
from surefoot.data.batch_lists import BatchLists
from surefoot.data.fingerprints import hash_of
from surefoot.data.order import (
    NOTHING_PASSED,
    Blocks,
    Cut,
    Ids,
    MicroBatches,
    Order,
    Passed,
    Plan,
    folded,
)
from surefoot.errors import ConfigError, Setting
from surefoot.seeding import fold, stream_key


def plan_order(
    order: Any, *, seed: int, samples: int, sizes: Batching, passed: Passed = NOTHING_PASSED
) -> MicroBatches:
    """Return the plan of an order other than "shuffled". Raises `ConfigError` if it does not fit
    the number of samples.
    """
    size = sizes.batch_size
    steps = None
    if isinstance(order, BatchLists):
        return order.cut(sizes.pieces, passed)
    if order == "sequential":
        plan: Plan = SequentialOrder(samples=samples, batch_size=size, passed=passed)
    elif order == "lanes":
        lanes = Lanes(samples=samples, batch_size=size, passed=passed)
        plan = lanes
        steps = lanes.steps
    elif isinstance(order, Shuffled):
        plan = Order(
            seed, samples=samples, batch_size=size, num_samples=order.num_samples, passed=passed
        )
    else:
        if len(order.weights) != samples:
            raise ConfigError(
                "weights-not-of-samples",
                problem=f"order = Weighted(...) has {len(order.weights)} weights, and the data set"
                f" {samples} samples",
                remedy="give each sample one weight, and 0 to a sample to leave out",
                setting="order",
                weights=len(order.weights),
                samples=samples,
            )
        plan = WeightedOrder(seed, order, batch_size=size, passed=passed)
    return Cut(plan, sizes.micro_batch_size, steps=steps)


@dataclass(frozen=True)
class Shuffled:
    """The order "shuffled" with another size of an epoch than the data set's."""

    num_samples: int


class SequentialOrder:
    """Order from the first sample to the last, epoch after epoch; every step is full and may span
    two epochs.

    >>> [SequentialOrder(samples=5, batch_size=3).ids(step)[0].tolist() for step in range(3)]
    [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    """

    def __init__(self, *, samples: int, batch_size: int, passed: Passed = NOTHING_PASSED) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.passed = passed

    def ids(self, step: int) -> tuple[Ids, Ids]:
        first = self.passed.position(step, self.batch_size)
        positions = np.arange(self.batch_size, dtype=np.int64) + first
        epochs, ids = np.divmod(positions, self.samples)
        return ids, epochs

    def to_dict(self) -> dict[str, Any]:
        return {"order": "sequential", "samples": self.samples}


class Lanes:
    """Order for a state that is carried from step to step: `batch_size` lanes, each a stretch of
    consecutive samples.

    The lanes are `torch.arange(samples).tensor_split(batch_size)`: the first `samples % batch_size`
    lanes have one sample more. Step k of an epoch reads the k-th sample of each lane, in the order
    of the lanes. If some lanes have one sample more, the last step of the epoch reads these lanes
    only. Every epoch starts again at the first sample of each lane.

    >>> plan = Lanes(samples=8, batch_size=3)
    >>> [plan.ids(step)[0].tolist() for step in range(4)]
    [[0, 3, 6], [1, 4, 7], [2, 5], [0, 3, 6]]
    """

    def __init__(self, *, samples: int, batch_size: int, passed: Passed = NOTHING_PASSED) -> None:
        if samples < batch_size:
            raise ConfigError(
                "lanes-exceed-samples",
                problem=f"order = lanes: a step has batch_size = {batch_size} lanes, and the data set"
                f" {samples} samples",
                reason="each lane needs a sample of its own",
                remedy=("a smaller", Setting("batch_size")),
                setting="batch_size",
                value=batch_size,
                samples=samples,
            )
        self.samples = samples
        self.batch_size = batch_size
        self.passed = passed
        self.shortest, self.longer = divmod(samples, batch_size)
        self.steps = self.shortest + (self.longer > 0)
        lanes = np.arange(batch_size, dtype=np.int64)
        self.starts = lanes * self.shortest + np.minimum(lanes, self.longer)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        epoch, offset = self.passed.epoch_of(step, self.steps)
        starts = self.starts
        if offset == self.shortest:  # only some lanes have one sample more
            starts = starts[: self.longer]
        ids = starts + offset
        return ids, np.full_like(ids, epoch)

    def to_dict(self) -> dict[str, Any]:
        return {"order": "lanes", "samples": self.samples}


class WeightedOrder:
    """Order of random draws with given weights. With replacement, each draw is a function of (seed,
    number of the draw) only.

    With replacement, the second array of `ids` has the number of each draw in place of its epoch,
    so that two draws of a sample are augmented differently. Without replacement, an epoch has the
    samples with the smallest exponential variates of rate `weights` (Efraimidis and Spirakis 2006:
    https://doi.org/10.1016/j.ipl.2005.11.003).

    >>> WeightedOrder(0, Weighted([0, 1, 0]), batch_size=2).ids(1)
    (array([1, 1]), array([2, 3]))
    """

    def __init__(
        self,
        seed: int,
        weighted: Weighted,
        *,
        batch_size: int,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        self.weighted = weighted
        self.batch_size = batch_size
        self.weights = np.array(weighted.weights)
        self.samples = weighted.num_samples or len(self.weights)
        self.key = stream_key(seed, "order")
        ends = np.cumsum(self.weights / self.weights.max())
        self.ends = ends / ends[-1]
        self.blocks = Blocks(batch_size, passed)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        at = self._draw if self.weighted.replacement else self._draw_once
        return self.blocks.step(step, at)

    def to_dict(self) -> dict[str, Any]:
        how = {"replacement": self.weighted.replacement, "sha256": hash_of(self.weights)}
        return {"order": "weighted", "samples": self.samples, "weights": how}

    def _draw(self, positions: Ids) -> tuple[Ids, Ids]:
        return np.searchsorted(self.ends, _uniform(self.key, positions), side="right"), positions

    def _draw_once(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, offsets = np.divmod(positions, self.samples)
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs):
            uniform = _uniform(fold(self.key, int(epoch)), np.arange(len(self.weights)))
            exponential = -np.log1p(-uniform)
            variates = np.divide(
                exponential,
                self.weights,
                out=np.full_like(exponential, np.inf),
                where=self.weights > 0,
            )
            here = epochs == epoch
            ids[here] = np.argsort(variates, kind="stable")[offsets[here]]
        return ids, epochs


def _uniform(key: int, numbers: Ids) -> "np.ndarray[Any, np.dtype[np.float64]]":
    drawn = folded(np.full(len(numbers), key, np.uint64), numbers.astype(np.uint64))
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
