"""FSDP whose sums have the same bits on any number of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.shards import (
    Shard,
    add_up,
    aligned,
    assign_owners,
    gather_to_owners,
    shard_shape,
)
from surefoot.distributed.tree_sum import TreeSum, erase


@dataclass
class CopyPasses:
    """The micro-batches of the ranks that share a model copy, in the current step. In each pass,
    they take consecutive ones.
    """

    copies: RankSums  # over the copies, with the micro-batches of each
    ranks: int  # that share a copy
    first: int = 0  # the micro-batch of the copy's first rank in this pass
    counted: bool = True  # this rank's micro-batch has targets

    @property
    def stop(self) -> int:
        return self.copies.own.stop

    def begin(self) -> None:
        self.first = self.copies.own.start - self.ranks

    def start_backward(self) -> None:
        self.first += self.ranks


@dataclass
class ReductionSum:
    """The sum over micro-batches of the nth reduction of each pass, flat, and the parameters that
    it has gradients of.
    """

    tree: TreeSum[Tensor]
    present: set[nn.Parameter] = field(default_factory=set)


@dataclass
class UnitSum:
    """The gradients of one unit of FSDP, added over the micro-batches of a step along a tree
    (`tree_sum.py`).

    It replaces torch's reduce-scatter (`torch.distributed.fsdp.ReduceScatter`): each rank receives
    its shard of every rank's gradient, and adds. `parameters` are the unit's own, in torch's order.
    If a loss calls the unit twice, torch may reduce twice in a pass. Each reduction has a tree of
    its own.
    """

    passes: CopyPasses
    shards: dict[nn.Parameter, Shard]
    parameters: list[nn.Parameter]
    reductions: list[ReductionSum] = field(default_factory=list)
    in_pass: int = 0  # reductions of the current pass so far
    # earlier gradients of the step
    before: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
    ) -> None:
        """Exchange the shards, and add those received. `output_tensor` gets one pending sum;
        nothing reads it before `finish`.
        """
        if not self.passes.counted:
            erase(input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self.add(received.view(group.size(), -1), output_tensor)

    def add_own(self, gradient: Tensor) -> None:
        """Add the gradient of a pass, if this rank has the whole copy. Then torch does not reduce
        it.
        """
        if not self.passes.counted:
            erase(gradient)
        self.add(gradient[None])

    def add(self, received: Tensor, memory: Tensor | None = None) -> None:
        """Add one shard for each rank of the group. One pending sum is stored in `memory`. Others
        get new memory.
        """
        self.take_gradients()
        if self.in_pass == len(self.reductions):
            self.reductions.append(ReductionSum(TreeSum(_add, self.passes.copies.own.start)))
        tree = self.reductions[self.in_pass].tree
        self.in_pass += 1
        for leaf, shard in enumerate(received, self.passes.first):
            if leaf < self.passes.stop:
                tree.add(leaf, shard)
        if len(received) > 1:
            shared = received.untyped_storage().data_ptr()
            for index, (leaf, leaves, value) in enumerate(tree.subtrees):
                if value is None or value.untyped_storage().data_ptr() != shared:
                    continue
                if memory is None:
                    own = value.clone()
                else:
                    own = memory.copy_(value)
                    memory = None
                tree.subtrees[index] = (leaf, leaves, own)

    def begin(self) -> None:
        """Set the earlier gradients of the step aside. A gradient cleared on a parameter or its
        shard is cleared on both.
        """
        self.reductions = []
        self.in_pass = 0
        self.before = {}
        for parameter in self.parameters:
            shard = self.shards[parameter]
            if parameter.grad is not None and shard.grad is not None:
                self.before[parameter] = shard.grad
            parameter.grad = None
            shard.grad = None

    def end_pass(self) -> None:
        self.take_gradients()
        self.in_pass = 0

    def take_gradients(self) -> None:
        """Note which parameters have a gradient after a reduction, and drop it: the tree has it."""
        if self.in_pass == 0:
            return
        present = self.reductions[self.in_pass - 1].present
        for parameter in self.parameters:
            if parameter.grad is not None:
                present.add(parameter)
                parameter.grad = None

    def finish(self, idle: set[nn.Parameter]) -> None:
        """Give the shards and parameters the sum over all micro-batches, and earlier gradients.
        `idle` parameters get only these.
        """
        self.end_pass()
        sums = self.before
        for reduction in self.reductions:
            tree = reduction.tree
            like = next(value for _, _, value in tree.subtrees if value is not None)
            total = self.passes.copies.of_tree(tree, like=like)
            summed = [parameter for parameter in self.parameters if parameter in reduction.present]
            sizes = [prod(shard_shape(parameter.shape, self.passes.ranks)) for parameter in summed]
            for parameter, part in zip(summed, torch.split(total, sizes), strict=True):
                shard = self.shards[parameter]
                gradient = part[: shard.numel()].view(shard.shape).to(shard.device, shard.dtype)
                if parameter in idle:
                    continue
                if parameter in sums:
                    gradient.add_(sums[parameter])
                sums[parameter] = gradient
        for parameter, gradient in sums.items():
            self.shards[parameter].grad = gradient
            parameter.grad = _as_dtensor(gradient, parameter)
        self.reductions = []  # frees memory


def sum_exactly(
    parts: Sequence[FSDPModule], shards: dict[nn.Parameter, Shard], passes: CopyPasses
) -> list[UnitSum]:
    """Let the units of a sharded model add along the tree. Returns one sum for each unit."""
    sums = []
    for part in parts:
        groups = fully_shard.state(part)._fsdp_param_groups  # type: ignore[attr-defined]
        if not groups:  # a unit without parameters
            continue
        parameters = [fsdp_param.sharded_param for fsdp_param in groups[0].fsdp_params]
        unit = UnitSum(passes, shards, parameters)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
        if passes.ranks == 1:
            part.set_all_reduce_hook(unit.add_own)
        sums.append(unit)
    return sums


def norms_of_tensors(shards: Sequence[Any], gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each parameter's whole gradient, given this rank's rows. Collective.

    Each whole gradient is gathered on one rank, so that its norm does not depend on the number of
    ranks.
    """
    norms = gradients[0].new_zeros(len(gradients))
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        chosen = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        rows = [shards[index].rows for index in chosen]
        local = [gradients[index] for index in chosen]
        ranks = rows[0].group.size()
        if ranks > 1:
            costs = tuple(prod(tensor_rows.shape) for tensor_rows in rows)
            whole = gather_to_owners(local, rows, assign_owners(costs, ranks))
        else:
            whole = dict(enumerate(aligned(local)))
        if whole:
            own_norms = torch._foreach_norm([*whole.values()])
            for index, norm in zip(whole, own_norms, strict=True):
                norms[chosen[index]] = norm
    return add_up(norms, shards[0].rows.group)  # of zeros but for one rank


def _as_dtensor(local: Tensor, like: Any) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _add(older: Tensor, newer: Tensor) -> Tensor:
    return older.add_(newer)
