"""The exchange of subtrees between ranks, in point-to-point messages. Each rank then has the sum of
all micro-batches.
"""

from collections.abc import Sequence

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
        self.rank, self.size, self.group = rank, len(shares), group
        self.own = shares[rank]
        self.subtrees = [subtrees_of(each) for each in shares]
        self.swaps = self.size == 2 and all(len(each) == 1 for each in self.subtrees)
        places = [
            (leaf, leaves, each, nth)
            for each, own in enumerate(self.subtrees)
            for nth, (leaf, leaves) in enumerate(own)
        ]
        self.order = sorted(
            places
        )  # of the tree's leaves: first leaf, number of leaves, rank and place in its list

    def start(self, total: Tensor, own: Sequence[Tensor]) -> "Exchange":
        """Send this rank's subtrees, flat tensors in the order of `subtrees`. They are overwritten,
        and `total` gets the sum.
        """
        return Exchange(self, total, own)

    def of_tree(self, tree: TreeSum[Tensor], *, like: Tensor) -> Tensor:
        """Return the sum over all ranks, a flat tensor like `like`, given the tree of this rank.
        Waits for the other ranks.
        """
        if self.size == 1 and (alone := tree.total()) is not None:
            return alone
        tree.fill(self.own.stop)
        own = [
            erase(torch.empty_like(like)) if value is None else value
            for _, _, value in tree.subtrees
        ]
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
        return len(self.subtrees[self.rank]) * (numbers - (stop - start)) + (self.size - 1) * (
            stop - start
        )


class Exchange:
    """One exchange of `RankSums`."""

    def __init__(self, ranks: RankSums, total: Tensor, own: Sequence[Tensor]) -> None:
        self.ranks, self.total = ranks, total
        self.bounds = (
            [(0, len(total))] * ranks.size if ranks.swaps else slices(len(total), ranks.size)
        )
        start, stop = self.bounds[ranks.rank]
        self.received: list[list[Tensor]] = []
        operations: list[dist.P2POp] = []
        for rank, (first, last) in enumerate(self.bounds):
            subtrees = ranks.subtrees[rank]
            if rank == ranks.rank:
                self.received.append([flat[start:stop] for flat in own])
                continue
            sent = (
                own[0][first:last]
                if len(own) == 1
                else torch.stack([flat[first:last] for flat in own]).view(-1)
            )
            inbox = total.new_empty(len(subtrees) * (stop - start))
            self.received.append(
                list(inbox.chunk(len(subtrees))) if stop > start else [inbox] * len(subtrees)
            )
            operations += self._pair(sent, inbox, rank)
        self.works, self.sent = _posted(operations), operations  # which keep the tensors alive

    def share_slices(self) -> None:
        """Add the received subtrees along the tree, and send the slice to the other ranks."""
        self.finish()
        tree: TreeSum[Tensor] = TreeSum(lambda older, newer: newer.add_(older))
        for first, leaves, rank, nth in self.ranks.order:
            tree.add(first, self.received[rank][nth], leaves=leaves)
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
        """Wait for the messages of the other ranks. After the second phase, `total` has the sum."""
        for work in self.works:
            wait_for_message(work, self.total)

    def _pair(self, sent: Tensor, inbox: Tensor, rank: int) -> list[dist.P2POp]:
        group = self.ranks.group
        send = [dist.P2POp(dist.isend, sent, group=group, group_peer=rank)] if sent.numel() else []
        return send + (
            [dist.P2POp(dist.irecv, inbox, group=group, group_peer=rank)] if inbox.numel() else []
        )


def slices(numbers: int, ranks: int) -> list[tuple[int, int]]:
    """Return the bounds of one slice for each rank.

    >>> slices(5, 2)
    [(0, 3), (3, 5)]
    """
    each = -(-numbers // ranks)
    return [(min(each * rank, numbers), min(each * (rank + 1), numbers)) for rank in range(ranks)]


def _posted(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
