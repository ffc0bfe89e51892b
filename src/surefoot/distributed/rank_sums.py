"""The exchange of subtrees between ranks, in point-to-point messages. Each rank then has the sum of
all micro-batches.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.distributed.rendezvous import wait_for_message
from surefoot.distributed.tree_sum import TreeSum, erase, subtrees_of


class RankSums:
    """The exchange of flat tensors between ranks: each ends with the sum of all leaves, added along
    the tree.

    `shares` has the leaves of each rank of `group` (default: all ranks). A rank adds one slice of
    the tensor for all ranks. Two ranks with one subtree each swap them instead. An exchange has two
    phases, `start` and `share_slices`. Exchanges overlap: the second phase of one follows the first
    phase of the next. The order must be the same on every rank.
    """

    def __init__(
        self, shares: Sequence[range], *, rank: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank = rank
        self.size = len(shares)
        self.group = group
        self.own = shares[rank]
        self.subtrees = [subtrees_of(share) for share in shares]
        self.swaps = self.size == 2 and all(len(subtrees) == 1 for subtrees in self.subtrees)
        # of the tree's leaves: first leaf, number of leaves, rank and place in its list
        self.order: list[tuple[int, int, int, int]] = []
        for of_rank, subtrees in enumerate(self.subtrees):
            for place, (leaf, leaves) in enumerate(subtrees):
                self.order.append((leaf, leaves, of_rank, place))
        self.order.sort()

    def start(self, total: Tensor, own_sums: Sequence[Tensor]) -> "Exchange":
        """Send this rank's subtrees, flat tensors in the order of `subtrees`. They are overwritten,
        and `total` gets the sum.
        """
        return Exchange(self, total, own_sums)

    def of_tree(self, tree: TreeSum[Tensor], *, like: Tensor) -> Tensor:
        """Return the sum over all ranks, a flat tensor like `like`, given the tree of this rank.
        Waits for the other ranks.
        """
        total = tree.total() if self.size == 1 else None
        if total is not None:
            return total
        tree.fill(self.own.stop)
        own_sums = []
        for _, _, value in tree.subtrees:
            own_sums.append(erase(torch.empty_like(like)) if value is None else value)
        if len(own_sums) == 1:
            total = own_sums[0].clone()
            own_sums = [total]
        else:
            total = torch.empty_like(like)
        exchange = self.start(total, own_sums)
        exchange.share_slices()
        exchange.finish()
        return total

    def bytes_sent(self, numbers: int) -> int:
        """Return what this rank sends, in the unit of `numbers`, the size of the tensor."""
        if self.swaps:
            return numbers
        start, stop = slices(numbers, self.size)[self.rank]
        own_slice = stop - start
        of_subtrees = len(self.subtrees[self.rank]) * (numbers - own_slice)
        return of_subtrees + (self.size - 1) * own_slice


class Exchange:
    """One exchange of `RankSums`."""

    def __init__(self, ranks: RankSums, total: Tensor, own_sums: Sequence[Tensor]) -> None:
        self.ranks = ranks
        self.total = total
        if ranks.swaps:
            self.bounds = [(0, len(total))] * ranks.size
        else:
            self.bounds = slices(len(total), ranks.size)
        start, stop = self.bounds[ranks.rank]
        self.received: list[list[Tensor]] = []
        operations: list[dist.P2POp] = []
        for rank, (first, last) in enumerate(self.bounds):
            subtrees = ranks.subtrees[rank]
            if rank == ranks.rank:
                self.received.append([flat[start:stop] for flat in own_sums])
                continue
            if len(own_sums) == 1:
                outgoing = own_sums[0][first:last]
            else:
                outgoing = torch.stack([flat[first:last] for flat in own_sums]).view(-1)
            inbox = total.new_empty(len(subtrees) * (stop - start))
            if stop > start:
                self.received.append(list(inbox.chunk(len(subtrees))))
            else:
                self.received.append([inbox] * len(subtrees))
            operations += self._pair(outgoing, inbox, rank)
        self.works = _posted(operations)
        self.sent = operations  # which keep the tensors alive

    def share_slices(self) -> None:
        """Add the received subtrees along the tree, and send the slice to the other ranks."""
        self.finish()
        tree: TreeSum[Tensor] = TreeSum(lambda older, newer: newer.add_(older))
        for leaf, leaves, rank, place in self.ranks.order:
            tree.add(leaf, self.received[rank][place], leaves=leaves)
        slice_sum = tree.total()
        assert slice_sum is not None
        self.received.clear()  # frees memory while later buckets are filled
        start, stop = self.bounds[self.ranks.rank]
        self.total[start:stop] = slice_sum
        operations: list[dist.P2POp] = []
        for rank, (first, last) in enumerate(self.bounds):
            if rank != self.ranks.rank and not self.ranks.swaps:
                operations += self._pair(self.total[start:stop], self.total[first:last], rank)
        self.works = _posted(operations)
        self.sent = operations

    def finish(self) -> None:
        """Wait for the messages of the other ranks. After the second phase, `total` has the sum."""
        for work in self.works:
            wait_for_message(work, self.total)

    def _pair(self, outgoing: Tensor, inbox: Tensor, rank: int) -> list[dist.P2POp]:
        group = self.ranks.group
        operations = []
        if outgoing.numel():
            operations.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=rank))
        if inbox.numel():
            operations.append(dist.P2POp(dist.irecv, inbox, group=group, group_peer=rank))
        return operations


def slices(numbers: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of one slice for each rank.

    >>> slices(5, 2)
    [(0, 3), (3, 5)]
    """
    most = -(-numbers // ranks)
    starts = [min(most * rank, numbers) for rank in range(ranks)]
    return list(pairwise([*starts, numbers]))


def _posted(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
