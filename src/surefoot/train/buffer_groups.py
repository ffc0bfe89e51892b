"""Buffers of one device, dtype and rule during a step, in one tensor."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.distributed.tree_sum import TreeSum
from surefoot.memory import equal_on_cpu
from surefoot.train.buffer_rules import StepRule

if TYPE_CHECKING:
    from surefoot.distributed.rank_sums import RankSums

# elements of a buffer that is compared alone: most large buffers are constants, such as masks
_LARGE = 65_536
# steps: a large buffer that changed is copied at each step, and compared again after so many
_RETRY = 64
_EXTREMES = {"max": torch.maximum, "min": torch.minimum}


class BufferGroup:
    """Buffers of one device, dtype and rule: their values at the start of a step, and the sum of
    their changes, each in one tensor.
    """

    def __init__(
        self, indices: Sequence[int], tensors: Sequence[Tensor], rule: StepRule = "mean"
    ) -> None:
        self.indices = indices
        self.rule = rule
        self.restarts = rule != "in order"  # each micro-batch starts from `before`
        self.shapes = [tensors[index].shape for index in indices]
        self.sizes = [shape.numel() for shape in self.shapes]
        first = tensors[indices[0]]
        self.before = torch.empty(sum(self.sizes), dtype=first.dtype, device=first.device)
        self.views = self.split(self.before)
        self.changes: dict[int, TreeSum[Tensor]] = {}  # by call of `forward_backward`
        # the last, largest or smallest values after a pass; None: no pass changed a bit
        self.last: Tensor | None = None
        self.is_unchanged = False  # the buffers have the bits of `before`
        self.is_large = (
            self.before.is_cpu and self.before.numel() >= _LARGE and not self.before.is_complex()
        )
        self.is_constant = False  # at the last comparison between two steps
        self.copies = 0

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a view of `flat` for each buffer."""
        parts = torch.split(flat, self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

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
        if self.is_large and self.rule not in _EXTREMES:
            self.is_unchanged = self._has_bits_of_before(tensors)
            if self.is_unchanged:
                self.last = None
                return
        values = self.join(tensors)
        if self.rule == "last":
            self.last = values
        elif self.rule in _EXTREMES:
            self.last = values if self.last is None else _EXTREMES[self.rule](self.last, values)
        else:
            # inf - inf is NaN
            nothing = torch.zeros_like(values)
            change = torch.where(values == self.before, nothing, values - self.before)
            sums = self.changes.setdefault(call, TreeSum(torch.add, own.start, own.step))
            sums.add(micro_batch, change)

    def saved(self) -> tuple[Tensor | None, dict[int, TreeSum[Tensor]]]:
        """Return the changes so far, for `restore`."""
        changes = {}
        for call, tree in self.changes.items():
            changes[call] = replace(tree, subtrees=[*tree.subtrees])
        return self.last, changes

    def restore(self, saved: tuple[Tensor | None, dict[int, TreeSum[Tensor]]]) -> None:
        self.last, self.changes = saved
        self.is_unchanged = False

    def has_other_shapes(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if a pass has given a buffer another shape."""
        return [tensor.shape for tensor in self.of(tensors)] != self.shapes

    def after(self, passes: int) -> Tensor:
        """Return the buffers after the passes of one process."""
        if self.rule not in ("mean", "sum"):
            return self.before if self.last is None else self.last
        totals = []
        for tree in self.changes.values():
            total = tree.total()
            if total is not None:
                totals.append(total)
        if not totals:
            return self.before
        return self.moved(reduce(torch.add, totals), passes)

    def after_all_ranks(self, passes: Tensor, calls: int, ranks: "RankSums") -> Tensor:
        """Return the buffers after the passes of all ranks, for a rule other than last.
        Collective.
        """
        if self.rule in _EXTREMES:
            return self._extreme_of_ranks()
        nothing = TreeSum(torch.add, ranks.own.start, ranks.own.step)
        trees = [self.changes.get(call, nothing) for call in range(calls)]
        if self.before.is_floating_point() or self.before.is_complex():
            totals = [ranks.of_tree(tree, like=self.before) for tree in trees]
            return self.moved(reduce(torch.add, totals), passes)
        total = torch.zeros_like(self.before)  # integers have one sum in any order
        for tree in trees:
            of_call = tree.total()
            if of_call is not None:
                total += of_call
        dist.all_reduce(total)
        return self.moved(total, passes)

    def _extreme_of_ranks(self) -> Tensor:
        # gloo compares neither flags nor 16 bits
        wide = {
            torch.bool: torch.uint8,
            torch.float16: torch.float32,
            torch.bfloat16: torch.float32,
        }
        dtype = wide.get(self.before.dtype, self.before.dtype)
        if self.last is None:  # a rank without targets decides nothing
            limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
            neutral = limits.min if self.rule == "max" else limits.max
            extreme = torch.full_like(self.before, neutral, dtype=dtype)
        else:
            extreme = self.last.to(dtype, copy=True)
        operation = dist.ReduceOp.MAX if self.rule == "max" else dist.ReduceOp.MIN
        dist.all_reduce(extreme, op=operation)
        return extreme.to(self.before.dtype)

    def moved(self, change: Tensor, passes: Tensor | int) -> Tensor:
        """Return the buffers moved by a total change over some passes, or by its mean. An unchanged
        buffer keeps its bits.
        """
        if self.rule == "mean":
            if not isinstance(passes, Tensor):
                passes = change.new_full((), passes)  # `as_tensor` would wait
            moved = self.before + change / passes.to(change.device, change.dtype)
        else:
            moved = self.before + change
        return torch.where(change == 0, self.before, moved)


def groups_of(tensors: Sequence[Tensor], rules: Sequence[StepRule]) -> list[BufferGroup]:
    """Return the groups of buffers. A large buffer is a group by itself."""
    indices: dict[Any, list[int]] = {}
    for index, (tensor, rule) in enumerate(zip(tensors, rules, strict=True)):
        alone = index if tensor.numel() >= _LARGE else None
        indices.setdefault((tensor.device, tensor.dtype, rule, alone), []).append(index)
    return [BufferGroup(group, tensors, rule) for (_, _, rule, _), group in indices.items()]
