"""Buffers of one device and dtype during a step, in one tensor."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.tree_sum import TreeSum
from surefoot.memory import equal_on_cpu

# elements of a buffer that is compared alone: most large buffers are constants, such as masks
_LARGE = 65_536
# steps: a large buffer that changed is copied at each step, and compared again after so many
_RETRY = 64


class BufferGroup:
    """Buffers of one device and dtype: their values at the start of a step, and the sum of their
    changes, each in one tensor.
    """

    def __init__(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self.indices = indices
        self.shapes = [tensors[index].shape for index in indices]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.before = torch.empty(
            sum(self.sizes), dtype=tensors[indices[0]].dtype, device=tensors[indices[0]].device
        )
        self.views = self.split(self.before)
        self.changes: dict[int, TreeSum[Tensor]] = {}  # of floats, by call of `forward_backward`
        self.last: Tensor | None = (
            None  # the last value of integers and flags; None: no pass changed a bit
        )
        self.is_unchanged = False  # the buffers have the bits of `before`
        self.is_float = self.before.is_floating_point()
        self.is_large = (
            self.before.is_cpu and self.before.numel() >= _LARGE and not self.before.is_complex()
        )
        self.is_constant, self.copies = (
            False,
            0,
        )  # is_constant: so at the last comparison between two steps

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a view of `flat` for each buffer."""
        return [
            part.view(shape)
            for part, shape in zip(torch.split(flat, self.sizes), self.shapes, strict=True)
        ]

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] for index in self.indices]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the buffers in one tensor."""
        return torch.cat([tensor.reshape(-1) for tensor in self.of(tensors)])

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Save the buffers at the start of a step.

        A large buffer with the bits of `before` is not copied. The comparison reads all bytes,
        since version counters miss writes through `.data` or NumPy.
        """
        if self.is_large and (self.is_constant or self.copies % _RETRY == 1):
            self.is_constant = self._has_bits_of_before(tensors)
            if self.is_constant:
                return
        self.copies += 1
        torch._foreach_copy_(self.views, self.of(tensors))

    def _has_bits_of_before(self, tensors: Sequence[Tensor]) -> bool:
        return all(
            equal_on_cpu(tensor.resolve_neg().contiguous(), view)  # neither copies a plain tensor
            for tensor, view in zip(self.of(tensors), self.views, strict=True)
        )

    def collect(
        self, tensors: Sequence[Tensor], *, call: int, micro_batch: int, own: range
    ) -> None:
        """Add the change of one pass, of a micro-batch in a call of `forward_backward`. `own` are
        this rank's micro-batches.
        """
        if self.is_large:
            self.is_unchanged = self._has_bits_of_before(tensors)
            if self.is_unchanged:
                self.last = None
                return
        now = self.join(tensors)
        if not self.is_float:
            self.last = now
            return
        change = torch.where(now == self.before, 0.0, now - self.before)  # inf - inf is NaN
        sums = self.changes.setdefault(call, TreeSum(torch.add, own.start, own.step))
        sums.add(micro_batch, change)

    def saved(self) -> tuple[Tensor | None, dict[int, TreeSum[Tensor]]]:
        """Return the changes so far, for `restore`."""
        return self.last, {
            call: replace(tree, subtrees=[*tree.subtrees]) for call, tree in self.changes.items()
        }

    def restore(self, copies: tuple[Tensor | None, dict[int, TreeSum[Tensor]]]) -> None:
        (self.last, self.changes), self.is_unchanged = copies, False

    def after(self, passes: int) -> Tensor:
        """Return floats moved by the mean change, and the last value of others."""
        if not self.is_float:
            return self.before if self.last is None else self.last
        totals = [total for tree in self.changes.values() if (total := tree.total()) is not None]
        return self.moved(reduce(torch.add, totals), passes) if totals else self.before

    def after_all_ranks(self, passes: Tensor, calls: int, ranks: RankSums) -> Tensor:
        """Return floats moved by the mean change of all ranks. Collective."""
        nothing = TreeSum(torch.add, ranks.own.start, ranks.own.step)
        trees = [self.changes.get(call, nothing) for call in range(calls)]
        return self.moved(
            reduce(torch.add, [ranks.of_tree(tree, like=self.before) for tree in trees]), passes
        )

    def moved(self, change: Tensor, passes: Tensor | int) -> Tensor:
        """Return the buffers moved by a total change over some passes. An unchanged buffer keeps
        its bits.
        """
        # `as_tensor` would wait
        count = passes if isinstance(passes, Tensor) else change.new_full((), passes)
        return torch.where(
            change == 0, self.before, self.before + change / count.to(change.device, change.dtype)
        )


def groups_of(tensors: Sequence[Tensor]) -> list[BufferGroup]:
    """Return the groups of buffers. A large buffer is a group by itself."""
    indices: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        alone = index if tensor.numel() >= _LARGE else None
        indices.setdefault((tensor.device, tensor.dtype, alone), []).append(index)
    return [BufferGroup(group, tensors) for group in indices.values()]
