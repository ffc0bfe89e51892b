"""DistributedDataParallel: replicated models, summed gradients, and synchronized batch normalization."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.batch_size import Batching
from surefoot.config.parallel import Strategy
from surefoot.distributed.strategy import Alone, Called, Ranks, Sums, is_exact
from surefoot.distributed.tree_sum import (
    Exchange,
    Gradients,
    GradientSum,
    RankSums,
    TreeSum,
    add_gradients,
    flat_of,
)
from surefoot.distributed.world import World
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.distributed.fsdp import Fsdp  # its torch imports take seconds


@dataclass
class Ddp:
    """The strategy for models replicated on every rank under `DistributedDataParallel`.

    `train/batch_norm_buffers.py` broadcasts the buffers instead of DDP. Several models are not wrapped, since DDP would wait for
    gradients of a model that a loss uses but does not train. The gradients of several models are averaged after the last backward
    pass. With `find_unused_parameters`, the average includes every parameter that has a gradient on any rank.
    """

    world: World
    parallel: Strategy
    nominal: float | None
    called: dict[str, Called]
    exact: bool = False
    wrapped: list[DistributedDataParallel] = field(default_factory=list)
    watched: list[nn.Parameter] = field(default_factory=list)  # parameters whose gradients DDP reduces

    def __post_init__(self) -> None:
        self.sums = Sums(self.world)
        if len(self.called) > 1 and self.parallel.sync == "every":
            raise ConfigError(
                f"sync = every: gradients of several models ({', '.join(self.called)}) are reduced once per step\n"
                "  leave it out, or use --parallel fsdp"
            )
        self.follow_trainable()

    @property
    def local_times(self) -> float | None:
        """The constant factor of a rank's own gradient before averaging: the number of ranks. None if every pass reduces gradients."""
        return None if self.parallel.sync == "every" else float(self.world.size)

    def follow_trainable(self) -> None:
        """Wrap a single model in DDP again if the set of trainable parameters has changed."""
        called = next(iter(self.called.values()))
        trainable = [parameter for parameter in called.model.parameters() if parameter.requires_grad]
        if len(self.called) > 1 or [*map(id, trainable)] == [*map(id, self.watched)]:
            return
        if self.wrapped:
            called.through = self.wrapped.pop().module  # this also removes DDP's hooks on parameters
        self.watched = trainable
        if trainable:
            with warnings.catch_warnings():
                # torch 2.13 would have forward_sync_buffers, which torch 2.11 does not know
                warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
                called.through = DistributedDataParallel(
                    called.through,
                    broadcast_buffers=False,
                    init_sync=False,
                    find_unused_parameters=self.parallel.find_unused_parameters,
                    gradient_as_bucket_view=True,
                )
            self.wrapped.append(called.through)
            self.watch_buckets(called.through)

    def watch_buckets(self, wrapped: DistributedDataParallel) -> None:
        """Register what replaces DDP's own reduction of gradients."""

    def begin(self, step: Any) -> None: ...

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        """Set whether the next pass reduces gradients. Returns whether the pass runs: a reducing pass runs even without targets."""
        counted, together = micro_batch.count > 0, last or self.parallel.sync == "every"
        for through in self.wrapped:
            through.require_backward_grad_sync = together
        for called in self.called.values():
            called.void = not counted
        return counted or together

    def begin_sum(self, sums: Any) -> None:
        self.sums.begin(sums)

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        return self.sums.started(loss, scale)

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:  # noqa: ARG002
        """Return the loss and count of all ranks, after averaging the gradients of several models."""
        if not self.wrapped:
            self._take_means()
        return self.sums.end(total)

    def _take_means(self) -> None:
        parameters = [parameter for called in self.called.values() for parameter in called.model.parameters()]
        if self.parallel.find_unused_parameters:
            own_indices = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
            for index in {index for used in self.world.gathered(own_indices) for index in used}.difference(own_indices):
                parameters[index].grad = torch.zeros_like(parameters[index])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            own = [gradient for gradient in gradients if gradient.dtype == dtype]
            together = torch.cat([gradient.reshape(-1) for gradient in own]) / self.world.size
            self.world.add_up(together)
            parts = torch.split(together, [gradient.numel() for gradient in own])
            torch._foreach_copy_(own, [part.view_as(gradient) for part, gradient in zip(parts, own, strict=True)])

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm

    def through(self, forwards: Mapping[str, Any]) -> dict[str, Called]:
        """Replace the forward callable of each model, inside DDP if wrapped. The new callable must use the same parameters."""
        for name, called in self.called.items():
            if isinstance(called.through, DistributedDataParallel):
                called.through.module = forwards[name]
            else:
                called.through = forwards[name]
        return self.called

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()


class ExactDdp(Ddp):
    """DDP whose sums over micro-batches are added along a tree (`tree_sum.py`), and have the same bits on any number of ranks.

    DDP calls `_reduce` when the gradients of a bucket are complete, during the last backward pass. `share` is the number of
    micro-batches of each rank in a step.
    """

    def __init__(
        self, share: int, world: World, parallel: Strategy, nominal: float | None, called: dict[str, Called]
    ) -> None:
        self.rank_sums = RankSums(share, rank=world.rank, size=world.size)
        self.exchanges: list[Exchange] = []
        super().__init__(world, parallel, nominal, called, exact=True)

    @property
    def local_times(self) -> float | None:
        return 1.0

    def watch_buckets(self, wrapped: DistributedDataParallel) -> None:
        wrapped.register_comm_hook(None, self._reduce)

    def begin(self, step: Any) -> None:
        """Set earlier gradients of the step aside, since the ranks have already added them."""
        self.exchanges.clear()
        self.gradients = GradientSum(step.state.parameters, self.rank_sums.first)
        self.indices = {id(parameter): index for index, parameter in enumerate(self.gradients.parameters)}

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        self.micro_batch = micro_batch
        return super().start_pass(micro_batch, last=last)

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        self.gradients.next_pass(self.micro_batch)
        return loss if scale is None else loss * scale

    def begin_sum(self, sums: Any) -> None:
        """Send the losses and counts of this rank's micro-batches to all ranks, without waiting for the device."""
        counted = sums.plain if sums.counted is None else sums.counted
        own = torch.zeros(self.rank_sums.stop - self.rank_sums.first + 1, dtype=torch.float64, device=self.world.device)
        if sums.parts:
            own[: len(sums.parts)] = torch.stack(sums.parts)
        own[-1] = counted
        self.losses = [torch.empty_like(own) for _ in range(self.world.size)]
        self.work = dist.all_gather(self.losses, own, async_op=True)

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:  # noqa: ARG002
        """Return the loss and count of all ranks, and finish the sums of gradients."""
        together: list[tuple[list[int], Tensor]] = []
        if self.wrapped:
            self.gradients.micro_batch = None  # its gradients are in the buckets
        else:
            together = self._send_unwrapped()
        if self.exchanges:
            self.exchanges[-1].share_slices()
        for exchange in self.exchanges:
            exchange.finish()
        self.exchanges.clear()
        for indices, flat in together:
            parameters = [self.gradients.parameters[index] for index in indices]
            parts = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        if self.gradients.before is not None:
            self.gradients.add_before([parameter.grad for parameter in self.gradients.parameters])
        self.work.wait()
        losses = torch.stack(self.losses)
        return reduce(torch.add, losses[:, :-1].reshape(-1).to(total.dtype).unbind()), losses[:, -1].sum()

    def _reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        flat, views = bucket.buffer(), bucket.gradients()
        indices = [self.indices[id(parameter)] for parameter in bucket.parameters()]
        tree: TreeSum[Gradients] = TreeSum(add_gradients, self.gradients.tree.start)
        for first, leaves, values in self.gradients.tree.subtrees:
            tree.add(first, values and [values[index] for index in indices], leaves=leaves)
        if self.micro_batch.count:
            tree.add(self.micro_batch.index, [*views])  # which adds in the memory of the bucket
        tree.fill(self.rank_sums.stop)
        self._send(
            flat,
            [
                flat if values is not None and values[0] is views[0] else flat_of(values, views, like=flat)
                for _, _, values in tree.subtrees
            ],
        )
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)  # the sum is written to it in `summed`
        return done

    def _send(self, result: Tensor, own: Sequence[Tensor]) -> None:
        exchange = self.rank_sums.start(result, own)
        if self.exchanges:
            self.exchanges[-1].share_slices()
        self.exchanges.append(exchange)

    def _send_unwrapped(self) -> list[tuple[list[int], Tensor]]:
        # one exchange for each dtype; returns the indices of the parameters, and the tensor that their sum will be in
        self.gradients.collect()
        tree, parameters = self.gradients.tree, self.gradients.parameters
        tree.fill(self.rank_sums.stop)
        values = [value for _, _, value in tree.subtrees if value is not None]
        present = {index for index in range(len(parameters)) if any(value[index] is not None for value in values)}
        if self.parallel.find_unused_parameters:
            present.update(*self.world.gathered(sorted(present)))
        together = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            indices = [index for index in sorted(present) if parameters[index].dtype == dtype]
            if not indices:
                continue
            own_parameters = [parameters[index] for index in indices]
            own = [
                flat_of(value and [value[index] for index in indices], own_parameters, like=own_parameters[0].detach())
                for _, _, value in tree.subtrees
            ]
            result = own[0] if len(own) == 1 else torch.empty_like(own[0])
            self._send(result, own)
            together.append((indices, result))
        return together


def spread(
    models: Mapping[str, nn.Module],
    forwards: Mapping[str, Any],
    *,
    world: World,
    parallel: Strategy,
    sizes: Batching,
    exact: bool,
    fsdp: "Fsdp | None" = None,
) -> tuple[Ranks, dict[str, Any]]:
    """Return the strategy of a step (`fsdp` if sharded) and the loss's callables by name. `forwards` are models, compiled or not."""
    nominal = float(sizes.batch_size) if sizes.pieces > 1 else None
    called = {name: Called(model, forwards[name]) for name, model in models.items()}
    if fsdp is not None:
        fsdp.called = called
        return fsdp, dict(called)
    if parallel.kind == "ddp" and world.size > 1:
        if is_exact(parallel, exact=exact):
            return ExactDdp(sizes.pieces // world.size, world, parallel, nominal, called), dict(called)
        return Ddp(world, parallel, nominal, called), dict(called)
    return Alone(nominal if exact else None, exact=exact), dict(forwards)


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` if `torch.nn.SyncBatchNorm` does not support the device."""
    if device.type != "cuda":
        raise ConfigError(
            f"sync_batch_norm needs CUDA, but this run uses {device.type}: torch.nn.SyncBatchNorm has only CUDA kernels\n"
            "  leave it out: each micro-batch is then normalized separately, with the same result on any number of processes"
        )


def synchronized(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Convert every BatchNorm1d, 2d and 3d to a `torch.nn.SyncBatchNorm` with the same parameters and buffers.

    Models are changed in place, except a model that is itself a normalization. Raises `ConfigError` if no model has batch
    normalization.

    >>> type(synchronized({"model": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))})["model"][1]).__name__
    'SyncBatchNorm'
    """
    if not any(isinstance(part, _BatchNorm) for model in models.values() for part in model.modules()):
        kinds = ", ".join(type(model).__name__ for model in models.values())
        raise ConfigError(f"sync_batch_norm: {kinds} has no batch normalization\n  leave it out")
    return {name: nn.SyncBatchNorm.convert_sync_batchnorm(model) for name, model in models.items()}  # type: ignore[no-untyped-call]
