"""Optimizers on shards made by hand, without a model; each function is called on every rank, and
compares with the whole there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import surefoot as sf
from surefoot.distributed.shards import Rows, Shard
from surefoot.distributed.world import joined
from surefoot.memory import instruction_set
from surefoot.optim.build import build_optimizer
from surefoot.optim.clipping import clipping_of
from surefoot.optim.kinds.kind import state_bytes
from surefoot.optim.kinds.muon import BatchedMuon, MuonWithAdamW
from surefoot.optim.param_groups import ParameterGroup
from surefoot.optim.skip_step import skipping

SHAPES = [(8, 8), (7, 3), (2, 9), (1, 5), (16, 4)]  # with fewer rows than ranks too
KERNEL = (5, 2, 3)


def part(whole: Tensor, group: dist.ProcessGroup) -> Shard:
    empty = Rows(tuple(whole.shape), 0, 0, group)
    start = empty.starts[group.rank()]
    stop = empty.starts[group.rank() + 1]
    return Shard(whole[start:stop].clone(), Rows(empty.shape, start, stop, group))


def group_of_all() -> dist.ProcessGroup:
    joined("cpu", sharded=True)
    group = dist.group.WORLD
    assert group is not None
    return group


def random(shapes: list[tuple[int, ...]], *, seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def muon_steps(*, double: bool, nesterov: bool) -> list[bool]:
    """Whether each rank's rows are, bit for bit, those of torch's Muon on the whole matrices:
    weights, then momenta.
    """
    group = group_of_all()
    dtype = torch.float64 if double else torch.float32
    whole = [nn.Parameter(values) for values in random([*SHAPES], seed=0, dtype=dtype)]
    shards = [part(values, group) for values in whole]
    settings: dict[str, Any] = {
        "lr": 0.1,
        "nesterov": nesterov,
        "adjust_lr_fn": "match_rms_adamw",
        "weight_decay": 0.1,
    }
    # `orthogonal` has its own bits there
    like_torch: Any = BatchedMuon if instruction_set() == "none" else torch.optim.Muon
    reference = like_torch(whole, **settings)
    ours = BatchedMuon(shards, **settings)
    for step in range(3):
        for held, shard, gradient in zip(
            whole, shards, random([*SHAPES], seed=step, dtype=dtype), strict=True
        ):
            rows = shard.rows
            held.grad = gradient
            shard.grad = gradient[rows.start : rows.stop].clone()
        reference.step()
        ours.step()
    pairs = list(zip(whole, shards, strict=True))
    key = "momentum_buffer"
    return [torch.equal(held[s.rows.start : s.rows.stop], s) for held, s in pairs] + [
        torch.equal(reference.state[held][key][s.rows.start : s.rows.stop], ours.state[s][key])
        for held, s in pairs
    ]


def composite_steps() -> dict[str, Any]:
    """A kernel, a matrix and a vector under Muon and AdamW, a bad step among them; the largest
    difference from the whole.
    """
    group = group_of_all()
    shapes: list[tuple[int, ...]] = [KERNEL, (7, 3), (7,)]
    whole = [nn.Parameter(values) for values in random(shapes, seed=0, dtype=torch.float64)]
    shards: list[Any] = [part(values, group) for values in whole]
    made = [build_optimizer(sf.optim.muon(lr=0.1), groups_of(held)) for held in (whole, shards)]
    skips = [skipping(optimizer, torch.device("cpu")) for optimizer in made]
    kept = []
    for step in range(4):
        for held, shard, gradient in zip(
            whole, shards, random(shapes, seed=step, dtype=torch.float64), strict=True
        ):
            bad = torch.full_like(gradient, torch.nan) if step == 2 else gradient
            held.grad = bad
            shard.grad = bad[shard.rows.start : shard.rows.stop].clone()
        for optimizer, skip in zip(made, skips, strict=True):
            skip.apply(optimizer, torch.tensor(float(step == 2)))
        kept.append([shard.detach().clone() for shard in shards])
    assert isinstance(made[1], MuonWithAdamW)
    differences = [
        (held[s.rows.start : s.rows.stop] - s).abs().max().item()
        for held, s in zip(whole, shards, strict=True)
        if s.numel()
    ]
    return {
        "difference": max(differences, default=0.0),
        "unmoved": all(
            torch.equal(one, other) for one, other in zip(kept[1], kept[2], strict=True)
        ),
        "by": [group["by"] for group in made[1].param_groups]
        == [group["by"] for group in made[0].param_groups],
        "keys": [sorted(group) for group in made[1].param_groups]
        == [sorted(group) for group in made[0].param_groups],
        "bytes": state_bytes(made[1]),
        "whole_bytes": state_bytes(made[0]),
    }


def groups_of(held: list[Any]) -> list[ParameterGroup]:
    return [
        ParameterGroup("a", 0.1, held[:2], ["kernel", "matrix"], hidden=True),
        ParameterGroup("b", 0.0, held[2:], ["vector"]),
    ]


def limited_by(*, clip: str, number: float) -> dict[str, Any]:
    """The rows of limited gradients, and the fraction, against those of the whole."""
    group = group_of_all()
    shapes: list[tuple[int, ...]] = [KERNEL, (7, 3), (7,), (3,)]
    whole = [nn.Parameter(values) for values in random(shapes, seed=0, dtype=torch.float64)]
    shards: list[Any] = [part(values, group) for values in whole]
    gradients = random(shapes, seed=1, dtype=torch.float64)
    parts = [
        gradient[s.rows.start : s.rows.stop].clone()
        for gradient, s in zip(gradients, shards, strict=True)
    ]
    found = []
    for held, own in ((whole, gradients), (shards, parts)):
        for parameter, gradient in zip(held, own, strict=True):
            parameter.grad = gradient
        limit = clipping_of((clip, number), held)  # type: ignore[arg-type]
        found.append(
            limit.apply(
                own, factor=torch.tensor(0.5), norm=torch.tensor(2.0), skipped=torch.tensor(0.0)
            )
        )
    rows = [
        (gradient[s.rows.start : s.rows.stop], p)
        for gradient, s, p in zip(gradients, shards, parts, strict=True)
    ]
    return {
        "difference": max(
            ((one - other).abs().max().item() for one, other in rows if other.numel()), default=0.0
        ),
        "fractions": [float(share) for share in found if share is not None],
    }
