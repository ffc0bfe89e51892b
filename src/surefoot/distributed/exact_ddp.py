"""DDP whose sums have the same bits on any number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.parallel import Strategy
from surefoot.distributed.ddp import Ddp
from surefoot.distributed.rank_sums import Exchange, RankSums
from surefoot.distributed.strategy import Called, OrderedSums
from surefoot.distributed.tree_sum import (
    Gradients,
    GradientSum,
    TreeSum,
    add_gradients,
    erase,
    flat_of,
    parts_of,
)
from surefoot.distributed.world import World


class ExactDdp(Ddp):
    """DDP that adds over micro-batches along a tree (`tree_sum.py`).

    DDP calls `_reduce` during the last backward pass, when a bucket is complete. `shares` has the
    micro-batches of each rank.
    """

    def __init__(
        self,
        shares: list[range],
        world: World,
        parallel: Strategy,
        nominal: float | None,
        called: dict[str, Called],
    ) -> None:
        self.rank_sums = RankSums(shares, rank=world.rank)
        compares_use = len(called) > 1 and not parallel.find_unused_parameters
        self.losses = OrderedSums(world, shares, has_mark=compares_use)
        self.exchanges: list[Exchange] = []
        super().__init__(world, parallel, nominal, called, exact=True)

    @property
    def local_times(self) -> float | None:
        return 1.0

    def watch_buckets(self, wrapped: DistributedDataParallel) -> None:
        wrapped.register_comm_hook(None, self._reduce)

    def begin(self, step: Any) -> None:
        """Set earlier gradients of the step aside, since the ranks have already added them."""
        super().begin(step)
        self.exchanges.clear()
        self.gradients = GradientSum(step.state.parameters, self.rank_sums.own.start)
        before = self.gradients.before
        if self.wrapped and before is not None:
            # they are in the buckets' memory, which the next pass overwrites
            for index, gradient in enumerate(before):
                before[index] = None if gradient is None else gradient.clone()
        self.indices = {
            id(parameter): index for index, parameter in enumerate(self.gradients.parameters)
        }

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        self.micro_batch = micro_batch
        return super().start_pass(micro_batch, last=last)

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        self.world.heartbeat.enter_work("backward")
        self.world.heartbeat.enter("step")
        self.gradients.next_pass(self.micro_batch)
        reduces = bool(self.wrapped) and self.wrapped[0].require_backward_grad_sync
        if reduces and self.parallel.find_unused_parameters:
            # DDP reduces these, even if this pass does not use them
            for index in self.gradients.present():
                parameter = self.gradients.parameters[index]
                parameter.grad = erase(torch.empty_like(parameter))
        return self.losses.started(loss, scale)

    def begin_sum(self, sums: Any) -> None:
        self.losses.begin(sums)

    def summed(
        self,
        total: Tensor,
        counted: Tensor | float | None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and count of all ranks, and finish the sums of gradients."""
        self.refuse_unused()
        unwrapped: list[tuple[list[int], Tensor]] = []
        if self.wrapped:
            self.gradients.micro_batch = None  # its gradients are in the buckets
        else:
            self.world.heartbeat.enter_work("other")
            unwrapped = self._send_unwrapped()
        if self.exchanges:
            self.exchanges[-1].share_slices()
        for exchange in self.exchanges:
            exchange.finish()
        self.exchanges.clear()
        for indices, flat in unwrapped:
            parameters = [self.gradients.parameters[index] for index in indices]
            for parameter, part in zip(parameters, parts_of(flat, parameters), strict=True):
                parameter.grad = part
        self.gradients.tree.subtrees.clear()  # frees memory
        if self.gradients.before is not None:
            self.gradients.add_before([parameter.grad for parameter in self.gradients.parameters])
        self.world.heartbeat.enter(self.phase)
        return self.losses.end(total)

    def _reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.world.heartbeat.enter_work("other")
        flat = bucket.buffer()
        parameters = bucket.parameters()
        views = parts_of(flat, parameters)  # `bucket.gradients()` ignores their memory formats
        indices = [self.indices[id(parameter)] for parameter in parameters]
        tree: TreeSum[Gradients] = TreeSum(add_gradients, self.gradients.tree.start)
        for first, leaves, values in self.gradients.tree.subtrees:
            tree.add(first, values and [values[index] for index in indices], leaves=leaves)
        if self.micro_batch.count:
            tree.add(self.micro_batch.index, [*views])  # which adds in the memory of the bucket
        tree.fill(self.rank_sums.own.stop)
        own_sums = []
        for _leaf, _leaves, values in tree.subtrees:
            if values is not None and values[0] is views[0]:
                own_sums.append(flat)
            else:
                own_sums.append(flat_of(values, views, like=flat))
        self._send(flat, own_sums)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)  # the sum is written to it in `summed`
        return done

    def _send(self, total: Tensor, own_sums: Sequence[Tensor]) -> None:
        exchange = self.rank_sums.start(total, own_sums)
        if self.exchanges:
            self.exchanges[-1].share_slices()
        self.exchanges.append(exchange)

    def _send_unwrapped(self) -> list[tuple[list[int], Tensor]]:
        """Start one exchange for each dtype. Return the indices of the parameters, and the tensor
        that their sum will be in.
        """
        self.gradients.collect()
        tree = self.gradients.tree
        parameters = self.gradients.parameters
        tree.fill(self.rank_sums.own.stop)
        present = self.gradients.present()
        if self.parallel.find_unused_parameters:
            present.update(*self.world.gathered(sorted(present)))
        else:
            self.refuse_unlike_use(self.losses, parameters, present)
        totals = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            indices = [index for index in sorted(present) if parameters[index].dtype == dtype]
            if not indices:
                continue
            of_dtype = [parameters[index] for index in indices]
            like = of_dtype[0].detach()
            own_sums = []
            for _leaf, _leaves, values in tree.subtrees:
                gradients = values and [values[index] for index in indices]
                own_sums.append(flat_of(gradients, of_dtype, like=like))
            total = own_sums[0] if len(own_sums) == 1 else torch.empty_like(own_sums[0])
            self._send(total, own_sums)
            totals.append((indices, total))
        return totals


def leave_graphs_whole(forwards: Mapping[str, Any]) -> None:
    """Keep torch.compile from splitting graphs at DDP's buckets, which would change the
    rounding.
    """
    if any("_orig_mod" in getattr(forward, "_modules", {}) for forward in forwards.values()):
        import torch._dynamo.config

        torch._dynamo.config.optimize_ddp = False
