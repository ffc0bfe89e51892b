"""Batches of samples of similar length, limited by a number of tokens and reshuffled every
epoch.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from surefoot.data.order import NOTHING_PASSED, Ids, Passed, folded, permutation
from surefoot.errors import DataError, Setting
from surefoot.seeding import fold, stream_key

_WIDER = 1.1  # largest ratio of the longest to the shortest sample of a bucket
_FEW_SHAPES = 2  # a full batch, and the last of an epoch
# tokens: samples of a bucket are in random order if their total lengths differ by less
_NOISE = 3.0


@runtime_checkable
class Lengthy(Protocol):
    """A data set with an attribute `lengths`, the integer number of tokens of each sample."""

    @property
    def lengths(self) -> Ids | int:
        """Lengths of shape (samples,) or (samples, sides), or one integer if all samples have the
        same length.
        """


@runtime_checkable
class Padded(Protocol):
    """A data set that pads each batch to its longest row, so that batches differ in shape."""

    @property
    def pads_to_longest(self) -> bool:
        """Whether it does."""


class Buckets:
    """Plan of micro-batches with at most `tokens` tokens each, padding included.

    lengths: tokens per sample, (samples,) or (samples, sides). A micro-batch of n rows counts as n
    times its largest length. Every step has `pieces` micro-batches. The last micro-batches of an
    epoch may be empty.

    >>> plan = Buckets(0, lengths=np.array([3, 3, 3, 4, 9]), tokens=9, pieces=1)
    >>> (
    ...     plan.samples,
    ...     plan.steps,
    ...     sorted(ids.tolist() for step in range(3) for ids, _ in plan.micro_batches(step))[-1],
    ... )
    (5, 3, [4])
    """

    def __init__(
        self,
        seed: int,
        *,
        lengths: Ids,
        tokens: int,
        pieces: int,
        passed: Passed = NOTHING_PASSED,
    ) -> None:
        sides = lengths.reshape(len(lengths), -1)
        self.samples = len(sides)
        self.pieces = pieces
        self.tokens = tokens
        self.passed = passed
        self.key = stream_key(seed, "order")
        self.batch_key = stream_key(seed, "batches")
        self.sides = sides
        self.longest = sides.max(axis=1)
        self.all_sides = sides.sum(axis=1)
        worst = int(self.longest.argmax())
        if self.longest[worst] > tokens:
            raise DataError(
                "sample-exceeds-micro-batch",
                problem=f"sample {worst} is {self.longest[worst]} tokens long, and a micro-batch"
                f" holds {tokens}",
                remedy=[
                    "leave out such long samples",
                    ("a larger", Setting("batch_size"), "and", Setting("micro_batch_size")),
                ],
                sample=worst,
                length=int(self.longest[worst]),
                tokens=tokens,
            )
        self.bucket, self.ends = _cut(self.longest, tokens)
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.steps = -(-len(self.ends) // pieces)
        self.cached_order: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def micro_batches(self, step: int) -> list[tuple[Ids, Ids]]:
        """Return (sample ids, epochs) for each micro-batch of a step."""
        epoch, batch_index = self.passed.epoch_of(step, self.steps)
        first = batch_index * self.pieces
        last = min(first + self.pieces, len(self.ends))
        positions = np.arange(first, last, dtype=np.int64)
        batches = permutation(fold(self.batch_key, epoch), len(self.ends), positions)
        order = self._order(epoch)
        batch_ids = [order[self.starts[batch] : self.ends[batch]].copy() for batch in batches]
        batch_ids += [np.empty(0, np.int64) for _ in range(self.pieces - len(batches))]
        return [(ids, np.full_like(ids, epoch)) for ids in batch_ids]

    def padded_fraction(self, epoch: int = 0) -> float:
        """Return the fraction of padding in the batches of an epoch; rows are padded to the longest
        row of each side.
        """
        widest = np.maximum.reduceat(self.sides[self._order(epoch)], self.starts, axis=0)
        rows = self.ends - self.starts
        padded_tokens = (widest * rows[:, None]).sum()
        return 1.0 - float(self.sides.sum() / padded_tokens)

    def to_dict(self) -> dict[str, Any]:
        return {
            "order": "length buckets per epoch",
            "samples": self.samples,
            "batches": len(self.ends),
        }

    def _order(self, epoch: int) -> Ids:
        if self.cached_order[0] != epoch:
            numbers = np.arange(self.samples, dtype=np.uint64)
            drawn = folded(np.full_like(numbers, fold(self.key, epoch)), numbers)
            noise = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
            noisy_lengths = self.all_sides + _NOISE * noise
            self.cached_order = (epoch, np.lexsort((noisy_lengths, self.bucket)))
        return self.cached_order[1]


def _cut(longest: Ids, tokens: int) -> tuple[Ids, Ids]:
    order = np.argsort(longest, kind="stable")
    of_sample = np.empty(len(longest), np.int64)
    ends: list[Ids] = []
    for number, (first, last, length) in enumerate(_buckets(longest[order], tokens)):
        of_sample[order[first:last]] = number
        batches = -(-(last - first) // (tokens // length))
        # batch sizes differ by one sample at most, so the last batch is not much smaller
        ends.append(first + np.arange(1, batches + 1, dtype=np.int64) * (last - first) // batches)
    return of_sample, np.concatenate(ends)


def _buckets(lengths: Ids, tokens: int) -> list[tuple[int, int, int]]:
    """Return the first sample, the end and the largest length of each bucket of sorted lengths."""
    values, counts = np.unique(lengths, return_counts=True)
    ends = np.cumsum(counts)
    buckets: list[tuple[int, int, int]] = []
    first = 0
    shortest = int(values[0])
    following = [*values[1:].tolist(), None]
    for length, end, longer in zip(values.tolist(), ends.tolist(), following, strict=True):
        fills_a_batch = (end - first) * length >= tokens
        if longer is None:
            if buckets and not fills_a_batch:  # the rest joins the bucket before
                first, _, _ = buckets.pop()
            buckets.append((first, end, length))
        elif fills_a_batch and longer > shortest * _WIDER:
            buckets.append((first, end, length))
            first = end
            shortest = longer
    return buckets


def varied_batches(plan: Any, data: Any) -> str:
    """Return a name of the batches if they change shape in almost every step, so that compiled code
    would be compiled for each, else "".
    """
    if isinstance(data.dataset, Padded) and data.dataset.pads_to_longest:
        return "batches padded to their longest row"
    if isinstance(plan, Buckets):
        return "batches sized in tokens"
    if data.lists_batches and data.order.size_count > _FEW_SHAPES:
        return f"the batches of {data.order.name}"
    return ""
