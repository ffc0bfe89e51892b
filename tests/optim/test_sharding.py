"""Optimizers and limits on shards against the same on whole parameters, on three gloo ranks.
(8 s)
"""

from __future__ import annotations

import pytest
import torch

from optim import shard_runs
from rank_processes import Ranks
from refused import refused
from surefoot.distributed.shards import assign_owners
from surefoot.optim.kinds.kind import all_kinds, kind_named, kind_of, refuse_shards


def test_muon_moves_the_rows_of_each_rank_as_torchs_muon_moves_the_whole_to_the_bit(
    ranks: Ranks,
) -> None:
    cases = [{"double": False, "nesterov": True}, {"double": True, "nesterov": False}]

    for by_rank in ranks.each(3, shard_runs.muon_steps, cases):
        assert by_rank == [[True] * 2 * len(shard_runs.SHAPES)] * 3


def test_a_kernel_is_one_matrix_and_no_rank_applies_a_bad_step(ranks: Ranks) -> None:
    by_rank = ranks(3, shard_runs.composite_steps)

    for result in by_rank:
        assert result["difference"] < 1e-12
        assert result["unmoved"]
        # a checkpoint of one strategy is loaded under the other
        assert result["by"] == result["whole_by"]
        assert result["keys"] == result["whole_keys"]
    assert sum(result["bytes"] for result in by_rank) == by_rank[0]["whole_bytes"]


def test_parts_of_gradients_are_limited_as_the_whole_is(ranks: Ranks) -> None:
    limits = {"norm": 0.5, "value": 0.3, "adaptive": 0.4, "auto": 0.5, "off": 0.0}
    cases = [{"clip": clip, "number": number} for clip, number in limits.items()]

    results = ranks.each(3, shard_runs.limited_by, cases)

    for clip, by_rank in zip(limits, results, strict=True):
        for result in by_rank:
            assert result["difference"] < 1e-12, clip
            assert bool(result["fractions"]) == (clip != "off")
            if result["fractions"]:
                whole, of_parts = result["fractions"]
                assert of_parts == pytest.approx(whole, abs=1e-6), clip


def test_each_rank_makes_about_as_many_multiplications_and_every_matrix_is_made_once() -> None:
    shapes = [(64, 64), (64, 256), (256, 64), (64, 64), (64, 64), (64, 64)]
    works = tuple(rows * columns * min(rows, columns) for rows, columns in shapes)

    owners = assign_owners(works, 3)

    work_of_ranks = [0, 0, 0]
    for owner, work in zip(owners, works, strict=True):
        work_of_ranks[owner] += work
    assert max(work_of_ranks) == 64 * 256 * 64


def test_of_every_optimizer_it_is_told_how_it_runs_on_shards_or_why_not() -> None:
    assert all(kind.on_shards for kind in all_kinds())


@pytest.mark.parametrize(
    "name", [kind.name for kind in all_kinds() if kind.name and not kind.shardable]
)
def test_what_needs_whole_parameters_is_refused_by_name_with_a_reason(name: str) -> None:
    with refused("optimizer-of-whole-parameters", value=name):
        refuse_shards(kind_named(name), name=name)


def test_an_optimizer_that_nobody_knows_is_refused_and_a_subclass_of_a_known_one_too() -> None:
    class Mine(torch.optim.SGD):
        pass

    weight = torch.nn.Parameter(torch.ones(2, 2))

    refuse_shards(kind_of(torch.optim.SGD([weight])), name="SGD")
    for unknown in (Mine, torch.optim.Muon, torch.optim.LBFGS):
        name = unknown.__name__
        with refused("optimizer-of-whole-parameters", value=name):
            refuse_shards(kind_of(unknown([weight])), name=name)
