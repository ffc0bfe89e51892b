"""Sums along a tree: the same additions for any division of the leaves, and the exchange between ranks."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rank_processes import Ranks
from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.tree_sum import GradientSum, TreeSum, subtrees_of


def tree(start: int = 0) -> TreeSum[str]:
    return TreeSum(lambda older, newer: f"({older} {newer})", start)


def of_leaves(leaves: range, present: set[int], start: int = 0) -> TreeSum[str]:
    own = tree(start)
    for leaf in leaves:
        if leaf in present:
            own.add(leaf, str(leaf))
    own.fill(leaves.stop)
    return own


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.lists(st.integers(0, 40), max_size=5))
def test_ranks_with_any_shares_add_what_one_process_adds(count: int, missing: set[int], cuts: list[int]) -> None:
    """Texts, so that the order of the additions shows; some leaves are missing."""
    present = {*range(count)} - missing
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    together = tree()
    for start, stop in pairwise(bounds):
        own = of_leaves(range(start, stop), present, start)
        assert [(first, leaves) for first, leaves, _ in own.subtrees] == subtrees_of(start, stop)
        for first, leaves, value in own.subtrees:
            together.add(first, value, leaves=leaves)
    assert together.total() == of_leaves(range(count), present).total()


def test_a_process_holds_no_more_sums_than_the_bits_of_its_leaves() -> None:
    own = tree()
    for leaf in range(64):
        own.add(leaf, str(leaf))
        assert len(own.subtrees) == (leaf + 1).bit_count()


def exchanged(*, share: int, numbers: int) -> list[Tensor]:
    """The sum over all ranks, and what one process gets; one leaf of a rank is missing."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    leaves = torch.randn(share * size, numbers, generator=torch.Generator().manual_seed(share))
    leaves[:, 0] = -0.0

    def added(indices: range, start: int) -> TreeSum[Tensor]:
        own: TreeSum[Tensor] = TreeSum(torch.add, start)
        for index in indices:
            if index != share - 1 or share == 1:
                own.add(index, leaves[index].clone())
        return own

    ranks = RankSums(share, rank=rank, size=size)
    total = ranks.of_tree(added(range(ranks.first, ranks.stop), ranks.first), like=leaves[0])
    whole = added(range(share * size), 0).total()
    assert whole is not None
    return [total, whole]


def exchanged_in_turns(*, shares: list[int], numbers: list[int]) -> list[list[Tensor]]:
    from surefoot.distributed.world import joined

    joined("cpu")
    return [exchanged(share=share, numbers=count) for share in shares for count in numbers]


def test_the_exchange_gives_the_bits_of_one_process(ranks: Ranks) -> None:
    """Also for fewer numbers than ranks, and for shares that are several subtrees."""
    for size in (2, 3):
        for results in ranks(size, exchanged_in_turns, shares=[1, 2, 3, 6], numbers=[1, 2, 1001]):
            for total, whole in results:
                assert torch.equal(total, whole)
                assert torch.equal(total.signbit(), whole.signbit())


def test_bytes_are_those_of_an_all_reduce_for_powers_of_two() -> None:
    sent = [RankSums(4, rank=0, size=size).bytes_sent(1000) for size in (1, 2, 4, 8)]
    assert sent == [0, 1000, 1500, 1750]  # 2 (ranks - 1) / ranks
    assert RankSums(3, rank=0, size=2).bytes_sent(1000) == 2 * 500 + 500  # leaves 0 and 1, and leaf 2


def test_earlier_gradients_of_a_step_are_added_once() -> None:
    weight, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([10.0, 20.0])
    sums = GradientSum([weight, unused], 0)
    assert weight.grad is None
    for index in range(3):
        sums.next_pass(type("MicroBatch", (), {"index": index, "count": int(index != 1)}))
        weight.grad = torch.full((2,), 4.0**index)  # 4.0 is of a micro-batch without targets
    sums.finish()
    assert weight.grad.tolist() == [27.0, 37.0]
    assert unused.grad is None
