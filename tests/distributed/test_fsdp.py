"""FSDP2 around models of many kinds: gradients, norms, evaluation, and what cannot be sharded.
(25 s)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sharded_models
import surefoot as sf
from rank_processes import Ranks
from refused import refused
from surefoot.config.parallel import Strategy
from surefoot.distributed.blocks import refuse_unshardable, separable_blocks
from surefoot.distributed.exact_fsdp import CopyPasses, UnitSum
from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.sharded_model import shard_model
from surefoot.distributed.shards import Rows, Shard, class_name, rows_of, rows_of_state
from surefoot.distributed.world import World, on_meta


@pytest.mark.fast("two")
@pytest.mark.parametrize(
    ("size", "models"),
    [(2, ["counting", "gpt"]), (3, [*sharded_models.MODELS])],
    ids=["two", "all"],
)
def test_rows_of_gradients_and_the_norm_are_those_of_a_plain_model(
    ranks: Ranks, size: int, models: list[str]
) -> None:
    """Added along the tree of micro-batches, or by torch."""
    kinds = [{"kind": kind, "exact": exact} for kind in models for exact in (True, False)]
    for kind, found in zip(kinds, ranks.each(size, sharded_models.differences, kinds), strict=True):
        assert max(map(max, found)) < 1e-12, kind


@pytest.mark.slow
def test_so_they_are_with_every_setting(ranks: Ranks) -> None:
    settings: list[dict[str, Any]] = [
        {"sync": "last"},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
    ]
    settings += [{"find_unused_parameters": True}, {"replicas": 2}, {"void": True}]
    settings += [{"exact": True, **setting} for setting in settings[1:]]
    for setting, found in zip(
        settings, ranks.each(2, sharded_models.differences, settings, kind="gpt"), strict=True
    ):
        assert max(map(max, found)) < 1e-12, setting


def test_a_loss_inside_forward_is_found_in_its_mean_and_void_passes_give_zeros(
    ranks: Ranks,
) -> None:
    for differences in ranks(2, sharded_models.cross_entropy_in_forward):
        assert max(differences) < 1e-12


def test_gathered_in_bfloat16_outputs_and_gradients_are_float32(ranks: Ranks) -> None:
    kinds = [{"kind": kind} for kind in ("gpt", "gpt2", "recurrent", "counting")]
    for kind, by_rank in zip(kinds, ranks.each(2, sharded_models.in_halves, kinds), strict=True):
        for found in by_rank:
            assert (found["loss"], found["gradients"]) == ("torch.float32", {"torch.float32"}), kind
            assert 0 < found["error"] < 0.1, kind


@pytest.mark.slow
def test_blocks_of_torchs_own_classes_are_compiled_too(ranks: Ranks) -> None:
    ((operations, difference),) = ranks(1, sharded_models.compiled_graphs)
    assert operations >= 6
    assert difference < 1e-6


def test_running_statistics_stay_float32_where_weights_are_gathered_in_bfloat16(
    ranks: Ranks,
) -> None:
    assert max(ranks(2, sharded_models.normalised)) < 1e-2


def test_after_a_pass_that_failed_a_model_is_called_with_its_newest_weights(ranks: Ranks) -> None:
    for differences in ranks(1, sharded_models.after_failed_passes):
        assert differences == [0.0, 0.0]


def test_a_whole_model_has_no_mark_by_which_code_waits_for_all_ranks(ranks: Ranks) -> None:
    assert ranks(1, sharded_models.marks) == [[[True, False, True]]]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.kernel = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.small = nn.Parameter(torch.ones(2, dtype=torch.float16))


def test_all_that_cannot_be_sharded_is_named_at_once_in_five_lines() -> None:
    with refused("model-not-shardable", count=4) as caught:
        refuse_unshardable(Odd())
    listed = str(caught.value.reason).splitlines()
    assert [line.split()[0] for line in listed] == ["scale", "phase", "and"]


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last), "weight"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "float64"),
    ],
)
def test_each_reason_names_the_parameter_or_the_dtypes(part: nn.Module, named: str) -> None:
    with refused("model-not-shardable", count=1) as caught:
        refuse_unshardable(part)
    assert named in str(caught.value.reason)


def test_blocks_are_gathered_by_themselves_innermost_first_unless_they_share_a_parameter() -> None:
    inner, outer = nn.Linear(2, 2), nn.Linear(2, 2)
    block = nn.Sequential(inner, nn.Tanh())
    tied = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(block, outer, tied, nn.Tanh())
    tied[0].weight = outer.weight
    assert separable_blocks(model, [block, inner, tied, model[3], model]) == [inner, block]


def test_a_part_that_two_blocks_share_is_gathered_around_both() -> None:
    shared = nn.Linear(2, 2)
    blocks = [nn.Sequential(nn.Linear(2, 2), shared) for _ in range(2)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(2, 2))
    assert separable_blocks(model, [*blocks, model[0]]) == [model[0]]


def test_a_class_has_its_own_name() -> None:
    assert class_name(Odd()) == "Odd"


class Ranked:
    """A group of four, of which this is the third."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 2


def test_rows_lie_as_torch_cuts_them_and_state_lies_as_its_parameter() -> None:
    rows = Rows((5, 3, 2), 4, 5, Ranked())  # type: ignore[arg-type]
    chunks = torch.arange(5).chunk(4)
    assert rows.starts == [int(chunk[0]) for chunk in chunks] + [5] * (5 - len(chunks))
    shard = Shard(torch.zeros(1, 3, 2), rows, called="kernel")
    momentum = rows_of_state(shard, torch.zeros(1, 6))
    assert momentum is not None
    assert (momentum.shape, momentum.start, momentum.stop) == ((5, 6), 4, 5)
    assert rows_of_state(shard, torch.zeros(())) is None
    assert rows_of(torch.zeros(5)) is None


def unit_of(first: int) -> UnitSum:
    """The sum of a unit on one of two ranks, before the pass whose first micro-batch is `first`."""
    unit = UnitSum(CopyPasses(RankSums([range(8)], rank=0), 2, first), {}, [])
    unit.begin()
    return unit


def test_pending_sums_do_not_keep_what_was_received() -> None:
    unit = unit_of(0)
    received = torch.ones(2, 1000)
    unit.add(received)
    ((_, _, pending),) = unit.reductions[0].tree.subtrees
    assert pending is not None
    assert pending.untyped_storage().nbytes() == 4000
    assert pending.eq(2).all()


def test_the_sum_of_a_pass_is_in_the_memory_that_torch_allocated_for_it() -> None:
    """Else a rank would hold one more copy of its shard during the backward pass."""
    unit = unit_of(0)
    received = torch.ones(2, 1000)
    output = torch.zeros(1000)
    unit.add(received, output)
    assert unit.reductions[0].tree.subtrees[0][2] is output
    assert output.eq(2).all()

    unit.passes.ranks = 1
    unit.begin()
    unit.add_own(output)
    pending = unit.reductions[0].tree.subtrees[0][2]
    assert pending is not None
    assert pending.data_ptr() == output.data_ptr()


def test_the_loss_scale_is_where_the_shards_are_updated() -> None:
    """A scale on the GPU would multiply gradients on the CPU, which torch refuses."""
    with on_meta(2):
        run = sf.Run(
            model=lambda: nn.Linear(4, 2),
            loss=lambda model, batch: model(batch[0]).mean(),
            train_data=(torch.randn(8, 4),),
            batch_size=8,
            length="2 steps",
            optimizer=sf.optim.adamw(lr=1e-3),
            precision="fp16",
            parallel=sf.fsdp(cpu_offload=True),
            console=False,
        )
    precision = run.parts.run_state.precision
    for tensors in (
        precision.tensors(),
        {name: each.clone() for name, each in precision.tensors().items()},
    ):
        precision.load_tensors(tensors)
        assert all(each.is_cpu for each in precision.tensors().values())


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule.reset_iter_state")  # as in torch 2.12
    with refused("fsdp-needs-newer-torch"):
        shard_model(nn.Linear(2, 2), World(torch.device("cpu")), Strategy(kind="fsdp"))
