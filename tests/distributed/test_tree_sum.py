"""Sums along a tree: the same additions for any division of the leaves, and the exchange between
ranks.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rank_processes import Ranks
from surefoot.config.batch_size import batching
from surefoot.distributed import rank_sums
from surefoot.distributed.rank_sums import Exchange, RankSums
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
def test_ranks_with_any_shares_add_what_one_process_adds(
    count: int, missing: set[int], cuts: list[int]
) -> None:
    """Texts, so that the order of the additions shows; some leaves are missing."""
    present = {*range(count)} - missing
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    together = tree()
    for start, stop in pairwise(bounds):
        own = of_leaves(range(start, stop), present, start)
        assert [(first, leaves) for first, leaves, _ in own.subtrees] == subtrees_of(
            range(start, stop)
        )
        for first, leaves, value in own.subtrees:
            together.add(first, value, leaves=leaves)
    assert together.total() == of_leaves(range(count), present).total()


def test_a_process_holds_no_more_sums_than_the_bits_of_its_leaves() -> None:
    own = tree()
    for leaf in range(64):
        own.add(leaf, str(leaf))
        assert len(own.subtrees) == (leaf + 1).bit_count()


def sums_of_ranks_and_of_one_process(shares: list[range], *, numbers: int) -> tuple[Tensor, Tensor]:
    """One leaf is missing."""
    count = sum(map(len, shares))
    leaves = torch.randn(count, numbers, generator=torch.Generator().manual_seed(count))
    leaves[:, 0] = -0.0

    def added(own: range) -> TreeSum[Tensor]:
        tree: TreeSum[Tensor] = TreeSum(torch.add, own.start, own.step)
        for index in own:
            if index != count // 2 or count == len(shares):
                tree.add(index, leaves[index].clone())
        return tree

    ranks = RankSums(shares, rank=torch.distributed.get_rank())
    total = ranks.of_tree(added(ranks.own), like=leaves[0])
    whole = added(range(count)).total()
    assert whole is not None
    return total, whole


def sums_of_all_shares() -> list[tuple[Tensor, Tensor]]:
    """Also for fewer numbers than ranks, for shares that are several subtrees or unequal, and for
    ranks that take turns.
    """
    from surefoot.distributed.world import joined

    size = joined("cpu").size
    sums = []
    for pieces in (2, 3, 4, 5, 8, 12, 18):
        if pieces < size:
            continue
        for shards in (1, size):
            shares = batching(pieces, 1).shares(size, shards=shards)
            for numbers in (1, 2, 1001):
                sums.append(sums_of_ranks_and_of_one_process(shares, numbers=numbers))
    return sums


@pytest.mark.parametrize("size", [2, 3])
def test_the_exchange_gives_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    for sums in ranks(size, sums_of_all_shares):
        assert sums
        for total, whole in sums:
            assert torch.equal(total, whole)
            assert torch.equal(total.signbit(), whole.signbit())


@pytest.mark.parametrize(("device", "timeouts"), [("cpu", [timedelta(days=1)]), ("meta", [None])])
def test_an_exchange_waits_for_a_day_and_on_a_device_the_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, device: str, timeouts: list[timedelta | None]
) -> None:
    """A work of NCCL that gets a timeout makes the host wait; one of gloo without has another."""
    waits: list[timedelta | None] = []

    class Work:
        def wait(self, timeout: timedelta | None = None) -> None:
            waits.append(timeout)

    monkeypatch.setattr(rank_sums, "_posted", lambda _: [Work()])
    monkeypatch.setattr(Exchange, "_pair", lambda *_: [])
    total = torch.ones(4, device=device)
    RankSums([range(1), range(1, 2)], rank=0).start(total, [total]).finish()
    assert waits == timeouts


def test_bytes_are_those_of_an_all_reduce_for_powers_of_two() -> None:
    for size in (1, 2, 4, 8):
        sums = RankSums(batching(8, 1).shares(size), rank=0)
        assert sums.bytes_sent(1000) == 1000 * 2 * (size - 1) / size


def test_of_several_subtrees_the_bytes_of_each_are_sent() -> None:
    """Leaves 0 and 1, and leaf 2."""
    sums = RankSums([range(3), range(3, 6)], rank=0)
    assert sums.bytes_sent(1000) == 2 * 500 + 500


def all_divisions() -> list[tuple[int, int, int]]:
    """Micro-batches, ranks, and shards that divide the ranks."""
    divisions = []
    for pieces in range(1, 20):
        for ranks in range(1, pieces + 1):
            for shards in range(1, ranks + 1):
                if ranks % shards == 0:
                    divisions.append((pieces, ranks, shards))
    return divisions


def indices_of(shares: list[range]) -> list[int]:
    return sorted(chain.from_iterable(shares))


def test_micro_batches_are_shared_by_all_ranks_and_each_copy_has_consecutive_ones() -> None:
    for pieces, ranks, shards in all_divisions():
        shares = batching(pieces, 1).shares(ranks, shards=shards)
        sizes = [len(share) for share in shares]
        assert indices_of(shares) == [*range(pieces)]
        assert min(sizes) > 0
        if shards == 1:
            assert max(sizes) - min(sizes) <= 1
        for first in range(0, ranks, shards):
            shares_of_copy = shares[first : first + shards]
            indices = indices_of(shares_of_copy)
            assert indices == [*range(indices[0], indices[-1] + 1)]
            # the ranks of a copy take turns
            assert [share[0] for share in shares_of_copy] == indices[:shards]


def test_earlier_gradients_of_a_step_are_added_once() -> None:
    weight = nn.Parameter(torch.zeros(2))
    unused = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([10.0, 20.0])
    sums = GradientSum([weight, unused], 0)
    assert weight.grad is None
    for index in range(3):
        sums.next_pass(type("MicroBatch", (), {"index": index, "count": int(index != 1)}))
        weight.grad = torch.full((2,), 4.0**index)  # 4.0 is of a micro-batch without targets
    sums.finish()
    assert weight.grad.tolist() == [27.0, 37.0]
    assert unused.grad is None
