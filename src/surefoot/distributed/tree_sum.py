"""Sums over a step's micro-batches in an order that does not depend on the number of ranks, so that every bit is the same.

The micro-batches 0, 1, ... are the leaves of a binary tree, and each node is the sum of its two children. A rank adds whole
subtrees while it accumulates. The ranks then exchange subtrees, add them along the same tree, and share the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")
Gradients = list[Tensor | None]  # of each parameter

_NOTHING = -0.0  # the only number that changes no bit of a float that it is added to


@dataclass
class TreeSum(Generic[Value]):
    """The sum of consecutive leaves, as the sums of the largest whole subtrees so far. Leaves may be missing.

    >>> tree = TreeSum(lambda older, newer: f"({older}+{newer})")
    >>> for leaf, value in enumerate("abcdef"):
    ...     tree.add(leaf, value)
    >>> [value for _, _, value in tree.subtrees], tree.total()
    (['((a+b)+(c+d))', '(e+f)'], '(((a+b)+(c+d))+(e+f))')
    """

    combine: Callable[[Value, Value], Value]
    start: int = 0  # the first leaf
    subtrees: list[tuple[int, int, Value | None]] = field(default_factory=list)  # first leaf, number of leaves, sum

    def add(self, leaf: int, value: Value | None, *, leaves: int = 1) -> None:
        """Add the sum of a subtree after all leaves before it. None stands for a subtree whose leaves are all missing."""
        self.fill(leaf)
        self._join(leaf, leaves, value)

    def fill(self, stop: int) -> None:
        """Count the leaves before `stop` that were not added as missing."""
        first = self.subtrees[-1][0] + self.subtrees[-1][1] if self.subtrees else self.start
        for leaf, leaves in subtrees_of(first, stop):
            self._join(leaf, leaves, None)

    def total(self) -> Value | None:
        """Return the sum of all leaves, or None if all are missing."""
        value: Value | None = None
        for _, _, older in reversed(self.subtrees):
            value = self._sum(older, value)
        return value

    def _join(self, leaf: int, leaves: int, value: Value | None) -> None:
        while self.subtrees:
            first, size, older = self.subtrees[-1]
            if size != leaves or first % (2 * size):
                break
            self.subtrees.pop()
            leaf, leaves, value = first, 2 * size, self._sum(older, value)
        self.subtrees.append((leaf, leaves, value))

    def _sum(self, older: Value | None, newer: Value | None) -> Value | None:
        if older is None or newer is None:
            return newer if older is None else older
        return self.combine(older, newer)


def subtrees_of(first: int, stop: int) -> list[tuple[int, int]]:
    """Return the first leaf and the number of leaves of the largest whole subtrees that make up the leaves from `first` to `stop`.

    >>> subtrees_of(0, 8), subtrees_of(3, 8)
    ([(0, 8)], [(3, 1), (4, 4)])
    """
    subtrees = []
    while first < stop:
        subtrees.append((first, _largest(first, stop)))
        first += subtrees[-1][1]
    return subtrees


class GradientSum:
    """The gradients of one call of `forward_backward` on this rank, added along the tree, apart from earlier gradients of the step."""

    def __init__(self, parameters: list[nn.Parameter], first: int) -> None:
        self.parameters = parameters
        self.before = self._take()
        self.tree: TreeSum[Gradients] = TreeSum(add_gradients, first)
        self.micro_batch: Any = None  # whose gradients the parameters hold

    def next_pass(self, micro_batch: Any) -> None:
        """Collect the gradients of the pass before, and note the micro-batch of the backward pass that follows."""
        self.collect()
        self.micro_batch = micro_batch

    def collect(self) -> None:
        """Move the gradients of the last pass from the parameters into the tree. Those of a micro-batch without targets are dropped."""
        if self.micro_batch is not None:
            gradients = self._take()
            self.tree.add(self.micro_batch.index, gradients if self.micro_batch.count else None)
            self.micro_batch = None

    def finish(self) -> None:
        """Give the parameters the sum of all passes and of earlier gradients."""
        self.collect()
        self.add_before(self.tree.total() or [None] * len(self.parameters))

    def add_before(self, total: Gradients) -> None:
        """Give the parameters these gradients, added to the earlier ones of the step."""
        total = total if self.before is None else add_gradients(self.before, total)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient

    def _take(self) -> Gradients | None:
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return None
        for parameter in self.parameters:
            parameter.grad = None
        return gradients


def sums_in_memory(leaves: int) -> int:
    """Return the number of sums that `TreeSum` holds at most while the last of consecutive leaves is computed.

    >>> [sums_in_memory(leaves) for leaves in (1, 2, 3, 4, 8)]
    [0, 1, 1, 2, 3]
    """
    return leaves.bit_length() - 1


def add_gradients(older: Gradients, newer: Gradients) -> Gradients:
    """Add gradients in the memory of `newer`. A parameter may have none."""
    pairs = [pair for pair in zip(newer, older, strict=True) if pair[0] is not None and pair[1] is not None]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return [o if n is None else n for o, n in zip(older, newer, strict=True)]


class RankSums:
    """The exchange of flat tensors between ranks: each ends with the sum of all leaves, added along the tree.

    Each rank has the leaves `share * rank` to `share * (rank + 1)`. A rank adds one slice of the tensor for all ranks, unless two
    ranks have one subtree each, which they swap. A single exchange is made of two phases, `start` and `share_slices`; several
    exchanges overlap if the second phase of one follows the first phase of the next, in the same order on every rank.
    """

    def __init__(self, share: int, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.first, self.stop = share * rank, share * (rank + 1)
        self.subtrees = [subtrees_of(share * each, share * (each + 1)) for each in range(size)]
        self.swaps = size == 2 and all(len(each) == 1 for each in self.subtrees)

    def start(self, total: Tensor, own: Sequence[Tensor]) -> "Exchange":
        """Send this rank's subtrees, flat tensors in the order of `subtrees`. They are overwritten, and `total` gets the sum."""
        return Exchange(self, total, own)

    def of_tree(self, tree: TreeSum[Tensor], *, like: Tensor) -> Tensor:
        """Return the sum over all ranks, a flat tensor like `like`, given the tree of this rank. Waits for the other ranks."""
        tree.fill(self.stop)
        own = [torch.full_like(like, _NOTHING) if value is None else value for _, _, value in tree.subtrees]
        total = own[0].clone() if len(own) == 1 else torch.empty_like(like)
        exchange = self.start(total, [total] if len(own) == 1 else own)
        exchange.share_slices()
        exchange.finish()
        return total

    def bytes_sent(self, numbers: int) -> int:
        """Return what this rank sends, in the unit of `numbers`, the size of the tensor."""
        if self.swaps:
            return numbers
        start, stop = slices(numbers, self.size)[self.rank]
        return len(self.subtrees[self.rank]) * (numbers - (stop - start)) + (self.size - 1) * (stop - start)


class Exchange:
    """One exchange of `RankSums`."""

    def __init__(self, ranks: RankSums, total: Tensor, own: Sequence[Tensor]) -> None:
        self.ranks, self.total = ranks, total
        self.bounds = [(0, len(total))] * ranks.size if ranks.swaps else slices(len(total), ranks.size)
        start, stop = self.bounds[ranks.rank]
        self.received: list[list[Tensor]] = []
        operations: list[dist.P2POp] = []
        for rank, (first, last) in enumerate(self.bounds):
            subtrees = ranks.subtrees[rank]
            if rank == ranks.rank:
                self.received.append([flat[start:stop] for flat in own])
                continue
            sent = own[0][first:last] if len(own) == 1 else torch.stack([flat[first:last] for flat in own]).view(-1)
            inbox = total.new_empty(len(subtrees) * (stop - start))
            self.received.append(list(inbox.chunk(len(subtrees))) if stop > start else [inbox] * len(subtrees))
            operations += self._pair(sent, inbox, rank)
        self.works, self.sent = _posted(operations), operations  # which keep the tensors alive

    def share_slices(self) -> None:
        """Add the received subtrees along the tree, and send the slice to the other ranks."""
        for work in self.works:
            work.wait()
        tree: TreeSum[Tensor] = TreeSum(lambda older, newer: newer.add_(older))
        for subtrees, values in zip(self.ranks.subtrees, self.received, strict=True):
            for (first, leaves), value in zip(subtrees, values, strict=True):
                tree.add(first, value, leaves=leaves)
        own = tree.total()
        assert own is not None
        self.received.clear()  # frees memory while later buckets are filled
        start, stop = self.bounds[self.ranks.rank]
        self.total[start:stop] = own
        operations: list[dist.P2POp] = []
        for rank, (first, last) in enumerate(self.bounds):
            if rank != self.ranks.rank and not self.ranks.swaps:
                operations += self._pair(self.total[start:stop], self.total[first:last], rank)
        self.works, self.sent = _posted(operations), operations

    def finish(self) -> None:
        """Wait for the slices of the other ranks: `total` has the sum."""
        for work in self.works:
            work.wait()

    def _pair(self, sent: Tensor, inbox: Tensor, rank: int) -> list[dist.P2POp]:
        send = [dist.P2POp(dist.isend, sent, rank)] if sent.numel() else []
        return send + ([dist.P2POp(dist.irecv, inbox, rank)] if inbox.numel() else [])


def slices(numbers: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of one slice for each rank.

    >>> slices(5, 2)
    [(0, 3), (3, 5)]
    """
    each = -(-numbers // ranks)
    return [(min(each * rank, numbers), min(each * (rank + 1), numbers)) for rank in range(ranks)]


def flat_of(gradients: Gradients | None, like_each: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return gradients in one flat tensor. A missing gradient becomes -0.0, which changes no sum."""
    sizes = [each.numel() for each in like_each]
    flat = like.new_empty(sum(sizes))
    if gradients is None:
        return erase(flat)
    for part, gradient in zip(torch.split(flat, sizes), gradients, strict=True):
        erase(part) if gradient is None else part.copy_(gradient.reshape(-1))
    return flat


def erase(flat: Tensor) -> Tensor:
    """Overwrite a tensor so that adding it changes no bit of a sum."""
    return flat.fill_(_NOTHING)


def _posted(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _largest(first: int, stop: int) -> int:
    size = first & -first if first else 1 << (stop.bit_length() - 1)
    while first + size > stop:
        size //= 2
    return size
