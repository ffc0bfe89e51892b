"""Sums over a step's micro-batches with the same bits on any number of ranks.

The micro-batches 0, 1, ... are the leaves of a binary tree. Each node is the sum of its children. A
rank adds whole subtrees while it accumulates. The ranks then exchange subtrees, add them along the
same tree, and share the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
Gradients = list[Tensor | None]  # of each parameter

_NOTHING = -0.0  # the only number that changes no bit of a float that it is added to


@dataclass
class TreeSum(Generic[Value]):
    """The sum of consecutive leaves, as the sums of the largest whole subtrees so far. Leaves may
    be missing.

    If other ranks have the leaves between this rank's leaves (`step` above 1), each leaf is a
    subtree by itself.

    >>> tree = TreeSum(lambda older, newer: f"({older}+{newer})")
    >>> for leaf, value in enumerate("abcdef"):
    ...     tree.add(leaf, value)
    >>> [value for _, _, value in tree.subtrees], tree.total()
    (['((a+b)+(c+d))', '(e+f)'], '(((a+b)+(c+d))+(e+f))')
    """

    combine: Callable[[Value, Value], Value]
    start: int = 0  # the first leaf
    step: int = 1
    # first leaf, number of leaves, sum
    subtrees: list[tuple[int, int, Value | None]] = field(default_factory=list)

    def add(self, leaf: int, value: Value | None, *, leaves: int = 1) -> None:
        """Add the sum of a subtree after all leaves before it. None stands for a subtree whose
        leaves are all missing.
        """
        self.fill(leaf)
        self._join(leaf, leaves, value)

    def fill(self, stop: int) -> None:
        """Count the leaves before `stop` that were not added as missing."""
        first = self.start
        if self.subtrees:
            leaf, leaves, _ = self.subtrees[-1]
            first = leaf + max(leaves, self.step)
        for leaf, leaves in subtrees_of(range(first, stop, self.step)):
            self._join(leaf, leaves, None)

    def total(self) -> Value | None:
        """Return the sum of all leaves, or None if all are missing."""
        value: Value | None = None
        for _, _, older in reversed(self.subtrees):
            value = self._sum(older, value)
        return value

    def _join(self, leaf: int, leaves: int, value: Value | None) -> None:
        while self.subtrees and self.step == 1:
            first, size, older = self.subtrees[-1]
            if size != leaves or first % (2 * size):
                break
            self.subtrees.pop()
            leaf = first
            leaves = 2 * size
            value = self._sum(older, value)
        self.subtrees.append((leaf, leaves, value))

    def _sum(self, older: Value | None, newer: Value | None) -> Value | None:
        if older is None:
            return newer
        if newer is None:
            return older
        return self.combine(older, newer)


def subtrees_of(leaves: range) -> list[tuple[int, int]]:
    """Return the first leaf and the number of leaves of the largest whole subtrees that make up
    some leaves.

    >>> subtrees_of(range(8)), subtrees_of(range(3, 8)), subtrees_of(range(1, 4, 2))
    ([(0, 8)], [(3, 1), (4, 4)], [(1, 1), (3, 1)])
    """
    if leaves.step > 1:
        return [(leaf, 1) for leaf in leaves]
    subtrees = []
    first = leaves.start
    while first < leaves.stop:
        size = _largest(first, leaves.stop)
        subtrees.append((first, size))
        first += size
    return subtrees


class GradientSum:
    """The gradients of one call of `forward_backward` on this rank, added along the tree. Earlier
    gradients are set aside.
    """

    def __init__(self, parameters: list[nn.Parameter], first: int) -> None:
        self.parameters = parameters
        self.before = self._take()
        self.tree: TreeSum[Gradients] = TreeSum(add_gradients, first)
        self.micro_batch: Any = None  # whose gradients the parameters hold
        self.dropped: Gradients | None = None  # of a micro-batch without targets

    def next_pass(self, micro_batch: Any) -> None:
        """Collect the gradients of the pass before, and note the micro-batch of the backward pass
        that follows.
        """
        self.collect()
        self.micro_batch = micro_batch

    def collect(self) -> None:
        """Move the gradients of the last pass into the tree. Without targets, they are dropped."""
        if self.micro_batch is None:
            return
        gradients = self._take()
        if self.micro_batch.count > 0:
            self.tree.add(self.micro_batch.index, gradients)
        else:
            self.tree.add(self.micro_batch.index, None)
            self.dropped = gradients
        self.micro_batch = None

    def finish(self) -> None:
        """Give the parameters the sum of all passes and of earlier gradients."""
        self.collect()
        self.add_before(self.tree.total() or [None] * len(self.parameters))

    def add_before(self, total: Gradients) -> None:
        """Give the parameters these gradients, added to the earlier ones of the step."""
        if self.before is not None:
            total = add_gradients(self.before, total)
        for parameter, gradient in zip(self.parameters, total, strict=True):
            parameter.grad = gradient

    def present(self) -> set[int]:
        """Return the indices of the parameters that had a gradient in a collected pass."""
        indices = set()
        for gradients in [*(value for _, _, value in self.tree.subtrees), self.dropped]:
            for index, gradient in enumerate(gradients or ()):
                if gradient is not None:
                    indices.add(index)
        return indices

    def _take(self) -> Gradients | None:
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return None
        for parameter in self.parameters:
            parameter.grad = None
        return gradients


def sums_in_memory(shares: Sequence[range], *, each: int = 1) -> int:
    """Return the maximal number of sums that a rank holds during a pass, given the leaves of each,
    and how many a pass adds.

    >>> (
    ...     [sums_in_memory([range(leaves)]) for leaves in (1, 2, 3, 4, 8)],
    ...     sums_in_memory([range(3), range(3, 6)]),
    ... )
    ([0, 1, 1, 2, 3], 2)
    >>> sums_in_memory([range(8)], each=2)
    2
    """
    most = 0
    for share in shares:
        for stop in range(share.start + each, share.stop, each):
            most = max(most, len(subtrees_of(range(share.start, stop))))
    return most


def add_gradients(older: Gradients, newer: Gradients) -> Gradients:
    """Add gradients in the memory of `newer`. A parameter may have none."""
    total: Gradients = []
    totals: list[Tensor] = []
    addends: list[Tensor] = []
    for old, new in zip(older, newer, strict=True):
        total.append(old if new is None else new)
        if old is not None and new is not None:
            totals.append(new)
            addends.append(old)
    if totals:
        torch._foreach_add_(totals, addends)
    return total


def flat_of(gradients: Gradients | None, like_each: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """Return gradients in one flat tensor. A missing gradient becomes -0.0, which changes no
    sum.
    """
    flat = like.new_empty(sum(tensor.numel() for tensor in like_each))
    if gradients is None:
        return erase(flat)
    for part, gradient in zip(parts_of(flat, like_each), gradients, strict=True):
        if gradient is None:
            erase(part)
        else:
            part.copy_(gradient)
    return flat


def parts_of(flat: Tensor, like_each: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor with the shapes and the memory formats of dense tensors, as in
    the buckets of DDP.
    """
    parts = torch.split(flat, [tensor.numel() for tensor in like_each])
    views = []
    for part, like in zip(parts, like_each, strict=True):
        if torch.ops.aten.is_non_overlapping_and_dense(like):
            views.append(part.as_strided(like.shape, like.stride(), part.storage_offset()))
        else:
            views.append(part.view(like.shape))
    return views


def erase(flat: Tensor) -> Tensor:
    """Overwrite a tensor so that adding it changes no bit of a sum."""
    return flat.fill_(_NOTHING)


def _largest(first: int, stop: int) -> int:
    size = first & -first if first else 1 << (stop.bit_length() - 1)
    while first + size > stop:
        size //= 2
    return size
