"""The exchange between a step and the other ranks, for every strategy: sums, norms, and calls of
the model.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from surefoot.distributed.tree_sum import GradientSum
from surefoot.errors import ConfigError, Remedy, Setting
from surefoot.memory import equal_on_cpu

if TYPE_CHECKING:
    from surefoot.distributed.world import World


def refuse_ranks(
    ranks: int, *, pieces: int, batch_size: int | str, is_resumed: bool = False
) -> None:
    """Raise `ConfigError` if a step has fewer micro-batches than ranks. A resumed run cannot change
    its micro-batches.
    """
    if ranks <= pieces:
        return
    remedies: list[Remedy] = [f"use at most {pieces} of them"]
    if not is_resumed:
        remedies.append(("a smaller", Setting("micro_batch_size")))
    raise ConfigError(
        "more-ranks-than-micro-batches",
        problem=f"{ranks} ranks cannot share the {pieces} of a step's micro-batches"
        f" (batch_size = {batch_size})",
        reason="each rank needs a micro-batch",
        remedy=remedies,
        ranks=ranks,
        micro_batches=pieces,
    )


def is_exact(kind: str, sync: str, *, exact: bool) -> bool:
    """Return whether sums have the same bits on any number of ranks, given the strategy and the
    setting `exact_sums`.
    """
    inexact_sync = "last" if kind == "fsdp" else "every"
    return exact and sync != inexact_sync


class Ranks(Protocol):
    """The exchange of a step with the other ranks. No method waits for a device other than the
    CPU.
    """

    nominal: float | None
    """The provisional divisor of losses, equal on every rank; None if this process knows all counts
    of a step.
    """

    @property
    def exact(self) -> bool:
        """Whether sums over micro-batches have the same bits on any number of ranks."""

    @property
    def world(self) -> "World | None":
        """The ranks that share a step; None for a single process."""

    @property
    def local_times(self) -> float | None:
        """The constant factor in this rank's own gradient before the last pass of a step. None if
        that gradient is unavailable.
        """

    def begin(self, step: Any) -> None:
        """Prepare the passes of one call of `forward_backward`."""

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        """Prepare a micro-batch, and return whether its pass runs. A pass without targets has zero
        gradients and only joins collectives.
        """

    def begin_sum(self, sums: Any) -> None:
        """Start the sum of the losses of all ranks (`sums`: a `LossSum`), before the last backward
        pass.
        """

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        """Return the tensor that starts the backward pass: a loss, times the loss scale if
        given.
        """

    def summed(
        self, total: Tensor, counted: Tensor | float | None
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and count of all ranks after the last backward pass. Each rank then has
        the global gradient, or a shard.
        """

    def norm_inputs(
        self, parameters: Sequence[nn.Parameter], gradients: list[Tensor]
    ) -> list[Tensor]:
        """Return tensors that together have the norm of the global gradient, given this rank's
        gradients of some parameters.
        """

    def follow_trainable(self) -> None:
        """Share the gradients of the currently trainable parameters. Every rank must have frozen
        the same parameters.
        """

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:
        """Return a context in which each rank may call these models, or parts of them,
        independently. Collective at entry and exit.
        """


@dataclass
class Alone:
    """The exchange of a single process, which computes all micro-batches.

    With `exact`, gradients are added along a tree (`tree_sum.py`). `nominal` is then that of
    several ranks.
    """

    nominal: float | None = None
    exact: bool = True
    world: "World | None" = None
    local_times: float | None = 1.0
    gradients: GradientSum | None = None  # of a step of several micro-batches
    micro_batch: Any = None

    def begin(self, step: Any) -> None:
        several = self.exact and len(step.micro_batches) > 1
        self.gradients = GradientSum(step.state.parameters, 0) if several else None

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:  # noqa: ARG002
        """Return whether the micro-batch has targets. A micro-batch without targets is skipped."""
        self.micro_batch = micro_batch
        return bool(micro_batch.count > 0)

    def begin_sum(self, sums: Any) -> None: ...

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        if self.gradients is not None:
            self.gradients.next_pass(self.micro_batch)
        return loss if scale is None else loss * scale

    def summed(
        self, total: Tensor, counted: Tensor | float | None
    ) -> tuple[Tensor, Tensor | float | None]:
        if self.gradients is not None:
            self.gradients.finish()
            self.gradients = None
        return total, counted

    def norm_inputs(
        self,
        parameters: Sequence[nn.Parameter],  # noqa: ARG002
        gradients: list[Tensor],
    ) -> list[Tensor]:
        return gradients

    def follow_trainable(self) -> None: ...

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()


def without_ranks(ranks: Ranks) -> Alone:
    """Return the exchange of a single process that adds as these ranks do."""
    return Alone(ranks.nominal, exact=ranks.exact)


@dataclass
class Sums:
    """The sums of loss and count over all ranks, in one small tensor that is reduced during the
    last backward pass.
    """

    world: "World"
    buffer: Tensor | None = None
    work: dist.Work | None = None

    def agree(self, mark: int) -> bool:
        """Return whether all ranks pass the same number. Collective. The host waits for other
        hosts, never for a device.
        """
        return self.world.agree(mark)

    def begin(self, sums: Any) -> None:
        """Start the reduction, without waiting for the device."""
        total = sums.total
        counted = sums.plain if sums.counted is None else sums.counted
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        self.buffer = torch.zeros(2, dtype=wide, device=self.world.device)
        if total is not None:
            self.buffer[0] = total
        self.buffer[1] = counted
        self.work = None if self.world.side is None else dist.all_reduce(self.buffer, async_op=True)

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        """Multiply a loss by the number of ranks: DDP and FSDP average gradients, but a step needs
        the sum.
        """
        return loss * self.world.size if scale is None else loss * (scale * self.world.size)

    def end(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and count of all ranks. The host waits for other ranks only on the
        CPU.
        """
        assert self.buffer is not None  # every step has a last pass
        if self.work is not None:
            self.work.wait()
        total, counted = self.buffer.unbind()
        self.buffer = self.work = None
        return total.to(like.dtype), counted


@dataclass
class OrderedSums:
    """The sums of loss and count over all ranks. Losses are added in the order of the micro-batches
    (`shares`: of each rank).

    has_mark: ranks also compare a number (`agree`), which the exchange takes along on a CPU. Then it
    starts after the last backward pass.
    """

    world: "World"
    shares: list[range]
    has_mark: bool = False

    def __post_init__(self) -> None:
        self.most = max(map(len, self.shares))
        self.waits_for_mark = self.has_mark and self.world.device.type == "cpu"
        # the places of the losses in one list by rank, each rank with its losses, count and mark
        places: dict[int, int] = {}
        for rank, share in enumerate(self.shares):
            for index, leaf in enumerate(share):
                places[leaf] = rank * (self.most + 2) + index
        self.places = [places[leaf] for leaf in sorted(places)]

    def begin(self, sums: Any) -> None:
        """Send the losses and counts of this rank's micro-batches to all ranks, without waiting for
        the device.
        """
        counted = sums.plain if sums.counted is None else sums.counted
        sent = torch.zeros(self.most + 2, dtype=torch.float64, device=self.world.device)
        losses = sums.parts[: self.most]  # without those of passes that only join collectives
        if losses:
            sent[: len(losses)] = torch.stack(losses)
        sent[-2] = counted
        self.sent = sent
        if not self.waits_for_mark:
            self._send()

    def agree(self, mark: int) -> bool:
        """Return whether all ranks pass the same number of at most 32 bits. Collective. The host
        waits for other hosts, never for a device.
        """
        if not self.waits_for_mark:
            return self.world.agree(mark)
        self.sent[-1] = mark
        self._send()
        if self.work is not None:
            self.work.wait()
        own_mark = self.sent[-1:]
        return all(equal_on_cpu(losses[-1:], own_mark) for losses in self.losses)

    def _send(self) -> None:
        if len(self.shares) > 1:
            self.losses = [torch.empty_like(self.sent) for _ in self.shares]
            self.work = dist.all_gather(self.losses, self.sent, async_op=True)
        else:
            self.losses = [self.sent]
            self.work = None

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        return loss if scale is None else loss * scale

    def end(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and count of all ranks. The host waits for other ranks only on the
        CPU.
        """
        if self.work is not None:
            self.work.wait()
        losses = torch.stack(self.losses)
        by_place = losses.to(like.dtype).view(-1).unbind()
        in_order = [by_place[index] for index in self.places]
        return reduce(torch.add, in_order), losses[:, -2].sum()


class Called:
    """The callable that a loss gets for a model on one of several ranks. A call uses the wrapper
    that reduces gradients, if any.
    """

    def __init__(self, model: nn.Module, through: Any) -> None:
        self.model = model
        self.through = through
        self.void = False  # the micro-batch has no targets
        self.has_graph = False  # the pass has called the model with gradients

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of the model. If the micro-batch has no targets, the gradients of the
        outputs are replaced by 0.
        """
        self.has_graph = self.has_graph or torch.is_grad_enabled()
        outputs = self.through(*inputs, **named)
        if self.void:
            # including those of a `Mean`, a registered pytree node
            for tensor in pytree.tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
