"""FSDP2 as one strategy of `distributed/strategy.py`: models whose parameters are sharded over the
ranks (`sharded_model.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.parallel import Strategy
from surefoot.distributed.exact_fsdp import CopyPasses, norms_of_tensors
from surefoot.distributed.liveness import RankPhase
from surefoot.distributed.rank_sums import RankSums
from surefoot.distributed.rendezvous import replicated
from surefoot.distributed.sharded_model import FullySharded
from surefoot.distributed.shards import add_up
from surefoot.distributed.strategy import Called, OrderedSums, Sums
from surefoot.distributed.used_parameters import (
    mark_of,
    refuse_unlike_calls,
    refuse_unlike_use,
)
from surefoot.distributed.world import World


@dataclass
class Fsdp:
    """The strategy for models whose parameters are sharded over the ranks (`strategy.Ranks`)."""

    world: World
    parallel: Strategy
    nominal: float | None
    models: dict[str, FullySharded]
    model_copies: list[FullySharded] = field(default_factory=list)  # weight averages
    shares: list[range] | None = None  # of each rank, with exact sums
    local_times: float | None = None  # local gradients are unavailable before the last pass
    called: dict[str, Called] = field(default_factory=dict)
    passes: CopyPasses | None = None
    step: int = 0  # whose passes run
    phase: RankPhase = "step"  # before these passes

    def __post_init__(self) -> None:
        self.sums: Sums | OrderedSums = Sums(self.world)
        if self.shares is not None:
            self.sums = OrderedSums(self.world, self.shares, has_mark=True)
        self.begin_sum = self.sums.begin

    @property
    def exact(self) -> bool:
        return self.shares is not None

    def sum_exactly(self) -> None:
        """Add along a tree of micro-batches (`exact_fsdp.py`), if the ranks' shares are given."""
        if self.shares is None or not self.models:
            return
        ranks = next(iter(self.models.values())).group.size()  # that share a model copy
        copies = []
        for first in range(0, self.world.size, ranks):
            share = self.shares[first]
            copies.append(range(share.start, share.stop))
        group = None
        if len(copies) > 1:
            group, *_ = replicated(self.parallel.replicas)
        rank_sums = RankSums(copies, rank=self.world.rank // ranks, group=group)
        self.passes = CopyPasses(rank_sums, ranks)
        for model in self.models.values():
            model.sum_exactly(self.passes)

    def begin(self, step: Any) -> None:
        self.step = step.index
        self.phase = self.world.heartbeat.phase
        if self.passes is not None:
            self.passes.begin()
        for model in self.models.values():
            model.begin()

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        """Return True: every rank runs every pass, since each pass gathers weights."""
        has_targets = micro_batch.count > 0
        if self.passes is not None:
            self.passes.counted = has_targets
        for model in self.models.values():
            model.start_pass(last=last, counted=has_targets)
        for called in self.called.values():
            called.void = not has_targets
        self.world.heartbeat.enter("loss")
        return True

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        # `sf.losses.whole_batch` starts passes without a backward pass too
        if self.passes is not None:
            self.passes.start_backward()
        for model in self.models.values():
            model.note_order()
        self.world.heartbeat.enter("step")
        return self.sums.started(loss, scale)

    def summed(
        self,
        total: Tensor,
        counted: Tensor | float | None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | float | None]:
        """Copy gradients to the shards, and return the loss and count of all ranks, on the CPU if
        `cpu_offload` is set.
        """
        self._refuse_unlike_use()
        for model in self.models.values():
            model.copy_gradients_to_shards(self.step)
            model.end()
        self.world.heartbeat.enter(self.phase)
        total_loss, number = self.sums.end(total)
        if self.parallel.cpu_offload:
            return total_loss.cpu(), number.cpu()
        return total_loss, number

    def _refuse_unlike_use(self) -> None:
        """Raise `ConfigError` on all ranks if these called other blocks, or have gradients of other
        parameters: gathered weights and added gradients are then wrong. Collective.
        """
        used: list[int] = []
        order: list[int] = []
        parameters: list[str] = []
        units: list[str] = []
        for name, model in self.models.items():
            if not self.parallel.find_unused_parameters:
                used += [len(parameters) + index for index in model.touched]
            order += [len(units) + unit for unit in model.order]
            prefix = f"{name}." if len(self.models) > 1 else ""
            parameters += [prefix + shard.called for _, shard in model.trained]
            units += [".".join(filter(None, [name, path])) for path in model.unit_paths]
        if self.sums.agree(mark_of(used, order)):
            return
        names_in_order = []
        for order_of_rank in self.world.gathered(order):
            names_in_order.append([units[unit] for unit in order_of_rank])
        refuse_unlike_calls(names_in_order, self.step)
        refuse_unlike_use(self.world, parameters, used, self.step)

    def norm_inputs(
        self, parameters: Sequence[nn.Parameter], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return one tensor: the norm of each whole gradient, or else the root of the sum of
        squares over a sharded copy.
        """
        group = next(iter(self.models.values())).group
        if not gradients:
            return gradients
        if self.exact:
            with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
            return [norms_of_tensors(with_gradient, gradients)]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return [add_up(norm.to(torch.float64).square_(), group).sqrt_().to(norm.dtype)]

    def follow_trainable(self) -> None:
        """Do nothing. `Trainable` refuses to change the trainable parameters of sharded models."""

    @contextmanager
    def whole(self, models: Iterable[nn.Module]) -> Iterator[None]:
        """Gather all weights of these models inside the block. Collective."""
        wanted = set(models)
        with ExitStack() as last_first:
            for sharded_model in [*self.models.values(), *self.model_copies]:
                if sharded_model.model in wanted:
                    last_first.enter_context(sharded_model.unshard())
            yield
