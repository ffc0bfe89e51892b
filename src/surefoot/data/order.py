"""Sample order as a pure function of (seed, step), at a constant cost per step.

Step k reads positions [k * B, (k + 1) * B) of the concatenated permutations of all epochs; B is the
batch size. After a change of the batch size, the first step begins where the step before it ended
(`Passed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from surefoot.seeding import stream_key

Ids = NDArray[np.int64]

_ROUNDS = 6
# for at most six bits, which mix less per round: all orders become equally likely
_ROUNDS_SMALL = 10
# positions computed per NumPy call
_FIRST_SAMPLES = 512  # after a jump
_BLOCK_SAMPLES = 16384  # for consecutive steps
# of SplitMix64; arrays without dimensions are faster than scalars
_GAMMA, _FACTOR, _LAST_FACTOR, *_SHIFTS = (
    np.array(number, np.uint64)
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
)


@dataclass(frozen=True)
class Passed:
    """What the steps of other batch sizes, with which the run began, have read.

    steps: their number. samples: of all of them. epochs: as many as have ended, if every epoch
    begins with a step. An earlier step is only looked at: it is that of a run that always had the
    present batch size.
    """

    steps: int = 0
    samples: int = 0
    epochs: int = 0

    def position(self, step: int, batch_size: int) -> int:
        """Return the position at which a step begins, if every step is full.

        >>> Passed(steps=10, samples=80).position(12, batch_size=16)
        112
        """
        if step < self.steps:
            return step * batch_size
        return self.samples + (step - self.steps) * batch_size

    def epoch_of(self, step: int, steps: int) -> tuple[int, int]:
        """Return the epoch of a step and its index there, if every epoch has `steps` steps.

        >>> Passed(steps=10, epochs=2).epoch_of(14, steps=3)
        (3, 1)
        """
        if step < self.steps:
            return divmod(step, steps)
        epochs, index = divmod(step - self.steps, steps)
        return self.epochs + epochs, index


NOTHING_PASSED = Passed()


@runtime_checkable
class MicroBatches(Protocol):
    """Plan of the samples of each micro-batch; every step has `pieces` micro-batches, possibly
    empty.
    """

    samples: int
    pieces: int

    @property
    def steps(self) -> int | None:
        """The steps of an epoch, if every epoch begins with a step. None: every step is full, and
        may span two epochs.
        """

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        """Return (sample ids, epochs) for each micro-batch of a step, with one entry per sample."""

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters of the order as JSON values, without the seed."""


class Plan(Protocol):
    """Map from a step to its samples; `samples` is the size of an epoch."""

    samples: int
    batch_size: int

    def ids(self, step: int) -> tuple[Ids, Ids]:
        """Return the ids and epochs of the samples of a step."""

    def to_dict(self) -> dict[str, Any]:
        """Return the parameters of the order as JSON values, without the seed."""


@runtime_checkable
class Arriving(Protocol):
    """A data set whose rows arrive one after another (`data/streams/tape.py`)."""

    def arrival(self, batch_size: int) -> Plan:
        """Return the order of its rows."""


class Cut:
    """Plan that cuts each step of another plan into micro-batches; the last micro-batch of a step
    may be smaller.
    """

    def __init__(self, plan: Plan, micro_batch_size: int, *, steps: int | None = None) -> None:
        self.plan = plan
        self.size = micro_batch_size
        self.samples = plan.samples
        self.steps = steps
        self.pieces = -(-plan.batch_size // micro_batch_size)

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        """Return sample ids and epochs of each micro-batch of a step. The last ones may be shorter
        or empty.
        """
        ids, epochs = self.plan.ids(step)
        if self.pieces == 1:
            return ((ids, epochs),)
        firsts = range(0, self.pieces * self.size, self.size)
        return [
            (ids[first : first + self.size], epochs[first : first + self.size]) for first in firsts
        ]

    def to_dict(self) -> dict[str, Any]:
        return self.plan.to_dict()


def samples_of(plan: MicroBatches, steps: Sequence[int]) -> int:
    """Return the number of samples in these steps, without computing ids if every step is full."""
    if isinstance(plan, Cut) and plan.steps is None:
        return plan.plan.batch_size * len(steps)
    samples = 0
    for step in steps:
        samples += sum(len(ids) for ids, _ in plan.micro_batches(step))
    return samples


class Order:
    """Order with one permutation of all samples per epoch; every step is full and may span two
    epochs.

    If `num_samples` is given, an epoch has the first samples of a permutation, or of several
    permutations.

    >>> order = Order(0, samples=5, batch_size=5)
    >>> sorted(order.ids(7)[0].tolist()), order.ids(7)[1].tolist()
    ([0, 1, 2, 3, 4], [7, 7, 7, 7, 7])
    """

    def __init__(
        self,
        seed: int,
        *,
        samples: int,
        batch_size: int,
        num_samples: int | None = None,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        self.size = samples
        self.samples = num_samples or samples
        self.batch_size = batch_size
        self.key = stream_key(seed, "order")
        self.blocks = Blocks(batch_size, passed)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        return self.blocks.step(step, self._at)

    def to_dict(self) -> dict[str, Any]:
        return {"order": "permutation per epoch", "samples": self.samples}

    def _at(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, offsets = np.divmod(positions, self.samples)
        if self.samples != self.size:
            passes, offsets = np.divmod(offsets, self.size)
            epochs = epochs * -(-self.samples // self.size) + passes
        return by_epoch(self.key, self.size, epochs, offsets), epochs


class InOrder:
    """Order of evaluation: every sample once, first to last; the last step may be smaller.

    Rank r reads batches r, r + ranks, ...; a rank without a further batch repeats the last batch of
    the data set.

    >>> plan = InOrder(samples=5, batch_size=2, rank=1, ranks=2)
    >>> plan.batches, [plan.ids(step)[0].tolist() for step in range(2)]
    (3, [[2, 3], [4]])
    """

    def __init__(self, *, samples: int, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.rank = rank
        self.ranks = ranks
        self.batches = -(-samples // batch_size)

    def ids(self, step: int) -> tuple[Ids, Ids]:
        first = min(step * self.ranks + self.rank, self.batches - 1) * self.batch_size
        ids = np.arange(first, min(first + self.batch_size, self.samples), dtype=np.int64)
        return ids, np.zeros_like(ids)

    def to_dict(self) -> dict[str, Any]:
        return {"order": "in order", "samples": self.samples}


def permutation(key: int, size: int, positions: Ids) -> Ids:
    """Apply the pseudorandom permutation of range(size) with key `key` to positions.

    A Feistel network on the smallest even number of bits for `size` is applied until the value is
    below `size` (Black and Rogaway 2002, sections 3 and 4:
    https://doi.org/10.1007/3-540-45760-7_9). The expected number of applications is at most four.

    >>> sorted(permutation(7, 6, np.arange(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    keys = _round_keys(np.array([key], dtype=np.uint64), size)
    return _permute(size, positions, keys, np.zeros_like(positions))


def folded(keys: NDArray[np.uint64], parts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply `seeding.fold` to arrays: fold each part into its key.

    >>> from surefoot.seeding import fold
    >>> int(folded(np.array([7], np.uint64), np.array([3], np.uint64))[0]) == fold(7, 3)
    True
    """
    mixed = keys + parts + _GAMMA  # wraps at 64 bits, as intended
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _FACTOR
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _LAST_FACTOR
    return mixed ^ (mixed >> _SHIFTS[2])


def sample_bits(key: int, ids: Ids, epochs: Ids) -> NDArray[np.uint64]:
    """Return 64 random bits (B,) for each sample and epoch: `fold(key, epoch, sample)`.

    >>> from surefoot.seeding import fold
    >>> int(sample_bits(7, np.array([3]), np.array([1]))[0]) == fold(7, 1, 3)
    True
    """
    keys_of_epochs = folded(np.array([key], np.uint64), epochs.astype(np.uint64))
    return folded(keys_of_epochs, ids.astype(np.uint64))


class Blocks:
    """The ids of consecutive steps, computed for many steps at once."""

    def __init__(self, batch_size: int, passed: Passed = NOTHING_PASSED) -> None:
        self.batch_size = batch_size
        self.passed = passed
        self.first = 0  # step
        self.ids = np.empty(0, np.int64)
        self.epochs = np.empty(0, np.int64)

    def step(self, step: int, at: Callable[[Ids], tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
        """Return the ids and epochs of a step; `at` returns those of positions."""
        begin = (step - self.first) * self.batch_size
        if not 0 <= begin < len(self.ids):
            position = self.passed.position(step, self.batch_size)
            if step < self.passed.steps:
                return at(position + np.arange(self.batch_size, dtype=np.int64))
            samples = _BLOCK_SAMPLES if begin == len(self.ids) > 0 else _FIRST_SAMPLES
            count = max(1, samples // self.batch_size) * self.batch_size
            self.first = step
            begin = 0
            self.ids, self.epochs = at(position + np.arange(count, dtype=np.int64))
        end = begin + self.batch_size
        return self.ids[begin:end], self.epochs[begin:end]


def by_epoch(key: int, size: int, epochs: Ids, offsets: Ids) -> Ids:
    """Return the samples at these offsets of the permutations of these epochs."""
    first = int(epochs.min())
    last = int(epochs.max())
    numbers = np.arange(first, last + 1, dtype=np.uint64)
    keys = folded(np.full(len(numbers), key, np.uint64), numbers)
    return _permute(size, offsets, _round_keys(keys, size), epochs - first)


def _half(size: int) -> int:
    return max(1, -(-(size - 1).bit_length() // 2))


def _round_keys(keys: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    rounds = range(_ROUNDS if _half(size) > 3 else _ROUNDS_SMALL)
    return np.stack([folded(keys, np.full_like(keys, number)) for number in rounds])


def _permute(size: int, positions: Ids, keys: NDArray[np.uint64], which: Ids) -> Ids:
    half = _half(size)
    values = _feistel(positions.astype(np.uint64), half, keys, which)
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        walked = _feistel(values[outside], half, keys, which[outside])
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64], which: Ids
) -> NDArray[np.uint64]:
    mask = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    left = values >> shift
    right = values & mask
    for key in keys:
        mixed = right + (key if len(key) == 1 else key[which])
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed >>= np.uint64(32)
        mixed &= mask
        mixed ^= left
        left, right = right, mixed
    return (left << shift) | right
