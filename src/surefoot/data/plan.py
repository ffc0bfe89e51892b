"""Which samples a step sees: a pure function of (seed, step), at the same cost for step 1,000,000 as for step 0.

The order of samples is the concatenation of one permutation per epoch, and step k takes positions [k * B, (k + 1) * B) of it.
A permutation is never built or stored: it is a keyed bijection, evaluated at the positions that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import ConfigError
from surefoot.seeding import fold, stream_key

Ids = NDArray[np.int64]

_ROUNDS = 6
_BLOCK_SAMPLES = 16384  # so many positions are computed together: NumPy's cost per call is shared by several steps
_SLOTS = 1000  # a mixture keeps its weights exactly in every block of so many samples


class Plan(Protocol):
    """Step -> samples. `samples` make one pass; a step holds `batch_size` of them."""

    samples: int
    batch_size: int

    def ids(self, step: int) -> tuple[Ids, Ids]:
        """The samples of a step and the epoch each belongs to, both (batch_size,)."""

    def described(self) -> dict[str, Any]:
        """What the order depends on besides the seed, as JSON."""


class Order:
    """One permutation of all samples per epoch, one after the other; every step is full.

    >>> order = Order(0, samples=5, batch_size=5)
    >>> sorted(order.ids(7)[0].tolist()), order.ids(7)[1].tolist()
    ([0, 1, 2, 3, 4], [7, 7, 7, 7, 7])
    """

    def __init__(self, seed: int, *, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.key = stream_key(seed, "order")
        self.block_steps = max(1, _BLOCK_SAMPLES // batch_size)
        self.block = -1
        self.held: tuple[Ids, Ids] = (np.empty(0, np.int64), np.empty(0, np.int64))

    def ids(self, step: int) -> tuple[Ids, Ids]:
        """The samples of a step and their epochs."""
        block, within = divmod(step, self.block_steps)
        if block != self.block:
            first = block * self.block_steps * self.batch_size
            self.held = self._at(np.arange(first, first + self.block_steps * self.batch_size, dtype=np.int64))
            self.block = block
        chosen = slice(within * self.batch_size, (within + 1) * self.batch_size)
        return self.held[0][chosen], self.held[1][chosen]

    def described(self) -> dict[str, Any]:
        """The order's name and size."""
        return {"order": "permutation per epoch", "samples": self.samples}

    def _at(self, positions: Ids) -> tuple[Ids, Ids]:
        epochs, offsets = np.divmod(positions, self.samples)
        return _by_epoch(self.key, self.samples, epochs, offsets), epochs


class MixtureOrder:
    """Several sources in fixed proportions, each in its own order and with its own epochs.

    Every block of 1,000 samples holds each source's exact quota (largest remainder), in an order of its own. Ids are
    global: a source's offset plus the id within it. One epoch of the mixture is as many samples as all sources hold.
    """

    def __init__(self, seed: int, *, sizes: Sequence[int], weights: Sequence[float], batch_size: int) -> None:
        self.samples, self.batch_size = sum(sizes), batch_size
        self.key, self.slot_key = stream_key(seed, "order"), stream_key(seed, "mixture")
        self.sizes, self.weights = list(sizes), list(weights)
        self.quotas = quotas(weights)
        self.offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.block = -1
        self.held: tuple[Ids, Ids] = (np.empty(0, np.int64), np.empty(0, np.int64))

    def ids(self, step: int) -> tuple[Ids, Ids]:
        """The samples of a step and the epoch of each within its source."""
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        blocks, slots = np.divmod(positions, _SLOTS)
        ids, epochs = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks):
            if block != self.block:
                self.held, self.block = self._block(int(block)), int(block)
            here = blocks == block
            ids[here], epochs[here] = self.held[0][slots[here]], self.held[1][slots[here]]
        return ids, epochs

    def described(self) -> dict[str, Any]:
        """The sources' sizes and weights."""
        return {"order": "mixture", "sizes": self.sizes, "weights": self.weights}

    def _block(self, block: int) -> tuple[Ids, Ids]:
        sources = np.repeat(np.arange(len(self.quotas)), self.quotas)
        sources = sources[permutation(fold(self.slot_key, block), _SLOTS, np.arange(_SLOTS))]
        ids, epochs = np.empty(_SLOTS, np.int64), np.empty(_SLOTS, np.int64)
        for source, (quota, size) in enumerate(zip(self.quotas, self.sizes, strict=True)):
            places = np.arange(block * quota, (block + 1) * quota, dtype=np.int64)
            within, offsets = np.divmod(places, size)
            here = sources == source
            ids[here] = self.offsets[source] + _by_epoch(fold(self.key, source), size, within, offsets)
            epochs[here] = within
        return ids, epochs


class InOrder:
    """Every sample once, first to last, for evaluation: the last step holds what is left."""

    def __init__(self, *, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def ids(self, step: int) -> tuple[Ids, Ids]:
        """Samples step * B up to the end of the data; epoch 0."""
        first = step * self.batch_size
        ids = np.arange(first, min(first + self.batch_size, self.samples), dtype=np.int64)
        return ids, np.zeros_like(ids)

    def described(self) -> dict[str, Any]:
        """The order's name and size."""
        return {"order": "in order", "samples": self.samples}


def permutation(key: int, size: int, positions: Ids) -> Ids:
    """Where a keyed permutation of range(size) sends each of `positions`.

    A Feistel network over the smallest even number of bits that holds `size`, walked on until it falls inside (Black and
    Rogaway 2002, sections 3 and 4: https://doi.org/10.1007/3-540-45760-7_9). At most four walks are expected.

    >>> sorted(permutation(7, 6, np.arange(6)).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    return _permuted(size, positions, _round_keys([key]), np.zeros_like(positions))


def quotas(weights: Sequence[float]) -> list[int]:
    """How many of 1,000 slots each source gets: the largest remainder method, ties to the earlier source.

    >>> quotas([1, 1, 1])
    [334, 333, 333]
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"mixture weights {list(weights)} must all be above 0 and finite")
    exact = [weight / sum(weights) * _SLOTS for weight in weights]
    held = [int(share) for share in exact]
    for place in sorted(range(len(exact)), key=lambda place: (held[place] - exact[place], place))[: _SLOTS - sum(held)]:
        held[place] += 1
    if 0 in held:
        raise ConfigError(f"mixture weights {list(weights)}: the smallest comes to less than 1 sample in {_SLOTS}; leave it out or raise it")
    return held


def _by_epoch(key: int, size: int, epochs: Ids, offsets: Ids) -> Ids:
    """Each offset under the permutation of its epoch, all epochs in one pass."""
    first = int(epochs.min())
    keys = _round_keys([fold(key, epoch) for epoch in range(first, int(epochs.max()) + 1)])
    return _permuted(size, offsets, keys, epochs - first)


def _round_keys(keys: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([[fold(key, number) for key in keys] for number in range(_ROUNDS)], dtype=np.uint64)


def _permuted(size: int, positions: Ids, keys: NDArray[np.uint64], which: Ids) -> Ids:
    half = max(1, -(-(size - 1).bit_length() // 2))
    values = _feistel(positions.astype(np.uint64), half, keys[:, which])
    outside = np.flatnonzero(values >= np.uint64(size))
    while outside.size:
        walked = _feistel(values[outside], half, keys[:, which[outside]])
        values[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # wraps at 64 bits, as it should
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << shift) | right
