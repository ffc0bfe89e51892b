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
    """The rows of this rank."""
    empty = Rows(tuple(whole.shape), 0, 0, group)
    start = empty.starts[group.rank()]
    stop = empty.starts[group.rank() + 1]
    return Shard(whole[start:stop].clone(), Rows(empty.shape, start, stop, group))


def rows_of(whole: Tensor, shard: Any) -> Tensor:
    """The rows of a whole tensor that a shard has."""
    return whole[shard.rows.start : shard.rows.stop]


def give_gradients(whole: list[nn.Parameter], shards: list[Any], gradients: list[Tensor]) -> None:
    for parameter, shard, gradient in zip(whole, shards, gradients, strict=True):
        parameter.grad = gradient
        shard.grad = rows_of(gradient, shard).clone()


def largest_difference(whole: list[Tensor], parts: list[Tensor], shards: list[Any]) -> float:
    """Between parts that lie as the shards do, and the same rows of whole tensors."""
    differences = [0.0]
    for tensor, part_of_it, shard in zip(whole, parts, shards, strict=True):
        if part_of_it.numel():
            difference = rows_of(tensor, shard) - part_of_it
            differences.append(difference.abs().max().item())
    return max(differences)


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
        give_gradients(whole, shards, random([*SHAPES], seed=step, dtype=dtype))
        reference.step()
        ours.step()

    same_weights = []
    same_momenta = []
    for parameter, shard in zip(whole, shards, strict=True):
        same_weights.append(torch.equal(rows_of(parameter, shard), shard))
        momentum = reference.state[parameter]["momentum_buffer"]
        momentum_of_rows = ours.state[shard]["momentum_buffer"]
        same_momenta.append(torch.equal(rows_of(momentum, shard), momentum_of_rows))
    return same_weights + same_momenta


def composite_steps() -> dict[str, Any]:
    """A kernel, a matrix and a vector under Muon and AdamW, a bad step among them; the largest
    difference from the whole.
    """
    group = group_of_all()
    shapes: list[tuple[int, ...]] = [KERNEL, (7, 3), (7,)]
    whole = [nn.Parameter(values) for values in random(shapes, seed=0, dtype=torch.float64)]
    shards: list[Any] = [part(values, group) for values in whole]
    of_whole = build_optimizer(sf.optim.muon(lr=0.1), groups_of(whole))
    of_shards = build_optimizer(sf.optim.muon(lr=0.1), groups_of(shards))
    assert isinstance(of_shards, MuonWithAdamW)
    skip_whole = skipping(of_whole, torch.device("cpu"))
    skip_shards = skipping(of_shards, torch.device("cpu"))
    values_by_step = []
    for step in range(4):
        is_bad = step == 2
        gradients = random(shapes, seed=step, dtype=torch.float64)
        if is_bad:
            gradients = [torch.full_like(gradient, torch.nan) for gradient in gradients]
        give_gradients(whole, shards, gradients)
        skip_whole.apply(of_whole, torch.tensor(float(is_bad)))
        skip_shards.apply(of_shards, torch.tensor(float(is_bad)))
        values_by_step.append([shard.detach().clone() for shard in shards])

    return {
        "difference": largest_difference([*whole], shards, shards),
        "unmoved": all(map(torch.equal, values_by_step[1], values_by_step[2])),
        "by": [group["by"] for group in of_shards.param_groups],
        "whole_by": [group["by"] for group in of_whole.param_groups],
        "keys": [sorted(group) for group in of_shards.param_groups],
        "whole_keys": [sorted(group) for group in of_whole.param_groups],
        "bytes": state_bytes(of_shards),
        "whole_bytes": state_bytes(of_whole),
    }


def groups_of(parameters: list[Any]) -> list[ParameterGroup]:
    return [
        ParameterGroup("a", 0.1, parameters[:2], ["kernel", "matrix"], hidden=True),
        ParameterGroup("b", 0.0, parameters[2:], ["vector"]),
    ]


def limited_by(*, clip: str, number: float) -> dict[str, Any]:
    """The rows of limited gradients, and the fraction, against those of the whole."""
    group = group_of_all()
    shapes: list[tuple[int, ...]] = [KERNEL, (7, 3), (7,), (3,)]
    whole = [nn.Parameter(values) for values in random(shapes, seed=0, dtype=torch.float64)]
    shards: list[Any] = [part(values, group) for values in whole]
    gradients = random(shapes, seed=1, dtype=torch.float64)
    give_gradients(whole, shards, gradients)
    parts = [shard.grad for shard in shards]
    numbers = {
        "factor": torch.tensor(0.5),
        "norm": torch.tensor(2.0),
        "skipped": torch.tensor(0.0),
    }
    limit: Any = (clip, number)

    fraction_of_whole = clipping_of(limit, whole).apply(gradients, **numbers)
    fraction_of_parts = clipping_of(limit, shards).apply(parts, **numbers)

    fractions = []
    if fraction_of_whole is not None and fraction_of_parts is not None:
        fractions = [float(fraction_of_whole), float(fraction_of_parts)]
    return {
        "difference": largest_difference(gradients, parts, shards),
        "fractions": fractions,
    }
