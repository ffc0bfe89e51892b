"""DistributedDataParallel: replicated models, summed gradients, and synchronized batch
normalization.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.parallel import Strategy
from surefoot.distributed.liveness import RankPhase
from surefoot.distributed.strategy import Called, OrderedSums, Sums
from surefoot.distributed.used_parameters import (
    indices_in,
    mark_of,
    refuse_unlike_use,
    without_gradient,
)
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting


@dataclass
class Ddp:
    """The strategy for models replicated on every rank under `DistributedDataParallel`.

    `train/batch_norm_buffers.py` broadcasts the buffers instead of DDP. Several models are not
    wrapped, since DDP would wait for gradients of a model that a loss uses but does not train. The
    gradients of several models are averaged after the last backward pass. With
    `find_unused_parameters`, the average includes every parameter that has a gradient on any rank.
    """

    world: World
    parallel: Strategy
    nominal: float | None
    called: dict[str, Called]
    exact: bool = False
    wrapped: list[DistributedDataParallel] = field(default_factory=list)
    watched: list[nn.Parameter] = field(default_factory=list)  # whose gradients DDP reduces
    step: int = 0  # whose passes run
    phase: RankPhase = "step"  # before these passes

    def __post_init__(self) -> None:
        self.sums = Sums(self.world)
        if len(self.called) > 1 and self.parallel.sync == "every":
            raise ConfigError(
                "sync-every-with-several-models",
                problem=f"sync = every: gradients of several models ({', '.join(self.called)}) are"
                " reduced once per step",
                remedy=[("leave out", Setting("ddp.sync")), Setting("parallel", "fsdp")],
                setting="ddp.sync",
                value="every",
            )
        self.follow_trainable()

    @property
    def local_times(self) -> float | None:
        """The constant factor of a rank's own gradient before averaging: the number of ranks. None
        if every pass reduces gradients.
        """
        return None if self.parallel.sync == "every" else float(self.world.size)

    def follow_trainable(self) -> None:
        """Wrap a single model in DDP again if the set of trainable parameters has changed."""
        if len(self.called) > 1:
            return
        called = next(iter(self.called.values()))
        trainable = [
            parameter for parameter in called.model.parameters() if parameter.requires_grad
        ]
        if list(map(id, trainable)) == list(map(id, self.watched)):
            return
        if self.wrapped:
            # this also removes DDP's hooks on parameters
            called.through = self.wrapped.pop().module
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

    def begin(self, step: Any) -> None:
        """Forget which parameters were used in passes outside of a step, such as checks, which DDP
        notes too.
        """
        self.step = step.index
        self.phase = self.world.heartbeat.phase
        if self.wrapped and step.state.buffers.relay is not None:
            # otherwise in the next forward pass, which waits for one rank after the other
            self.wrapped[0].reducer._rebuild_buckets()
        if self.parallel.find_unused_parameters and self.wrapped:
            self.wrapped[0].reducer._reset_state()

    def start_pass(self, micro_batch: Any, *, last: bool) -> bool:
        """Set whether the next pass reduces gradients. Returns whether the pass runs: a reducing
        pass runs even without targets.
        """
        if self.parallel.sync == "every":
            self._refuse_unfinished()
        has_targets = micro_batch.count > 0
        reduces = last or self.parallel.sync == "every"
        for through in self.wrapped:
            through.require_backward_grad_sync = reduces
        for called in self.called.values():
            called.void = not has_targets
            called.has_graph = False
        self.world.heartbeat.enter_work("forward")
        self.world.heartbeat.enter("loss")
        return has_targets or reduces

    def begin_sum(self, sums: Any) -> None:
        self.sums.begin(sums)

    def started(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        reduces = bool(self.wrapped) and self.wrapped[0].require_backward_grad_sync
        self.world.heartbeat.enter_work("other" if reduces else "backward")
        self.world.heartbeat.enter("step")
        return self.sums.started(loss, scale)

    def summed(
        self,
        total: Tensor,
        counted: Tensor | float | None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and count of all ranks, after averaging the gradients of several
        models.
        """
        self.refuse_unused()
        if not self.wrapped:
            self.world.heartbeat.enter_work("other")
            self._take_means()
        self.world.heartbeat.enter(self.phase)
        return self.sums.end(total)

    def refuse_unused(self) -> None:
        """Raise `ConfigError` if a parameter of the wrapped model got no gradient in the last pass.
        Other ranks wait for it, and torch would tell only in the next pass, after an update.
        """
        called = next(iter(self.called.values()))
        if self.wrapped and not called.has_graph and not self.parallel.find_unused_parameters:
            raise self._without_gradient(range(len(self.watched)))
        self._refuse_unfinished()

    def _refuse_unfinished(self) -> None:
        if not self.wrapped or self.parallel.find_unused_parameters:
            return
        try:
            self.wrapped[0]._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as problem:
            unused = indices_in(problem)
            if unused:
                raise self._without_gradient(unused) from None
            raise

    def _without_gradient(self, indices: Iterable[int]) -> ConfigError:
        names = self._names()
        return without_gradient([names[id(self.watched[index])] for index in indices], self.step)

    def refuse_unlike_use(
        self, sums: Sums | OrderedSums, parameters: Sequence[nn.Parameter], used: Collection[int]
    ) -> None:
        """Raise `ConfigError` on all ranks if not all have gradients of the same parameters (`used`:
        their indices), which alone can be added. Collective.
        """
        if not sums.agree(mark_of(used)):
            names = self._names()
            parameter_names = [names[id(parameter)] for parameter in parameters]
            refuse_unlike_use(self.world, parameter_names, used, self.step)

    def _names(self) -> dict[int, str]:
        names = {}
        for model_name, called in self.called.items():
            prefix = f"{model_name}." if len(self.called) > 1 else ""
            for name, parameter in called.model.named_parameters():
                names[id(parameter)] = f"{prefix}{name}"
        return names

    def _take_means(self) -> None:
        parameters: list[nn.Parameter] = []
        for called in self.called.values():
            parameters += called.model.parameters()
        used = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        if not self.parallel.find_unused_parameters:
            self.refuse_unlike_use(self.sums, parameters, used)
        else:
            used_anywhere = set(chain.from_iterable(self.world.gathered(used)))
            for index in used_anywhere.difference(used):
                parameters[index].grad = torch.zeros_like(parameters[index])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            of_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in of_dtype]) / self.world.size
            self.world.add_up(flat)
            parts = torch.split(flat, [gradient.numel() for gradient in of_dtype])
            means = [part.view_as(grad) for part, grad in zip(parts, of_dtype, strict=True)]
            torch._foreach_copy_(of_dtype, means)

    def norm_inputs(
        self,
        parameters: Sequence[nn.Parameter],  # noqa: ARG002
        gradients: list[Tensor],
    ) -> list[Tensor]:
        return gradients

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()


def synchronized(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Convert every BatchNorm1d, 2d and 3d to a `torch.nn.SyncBatchNorm` with the same parameters
    and buffers.

    Models are changed in place, except a model that is itself a normalization. Raises `ConfigError`
    if no model has batch normalization.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    >>> type(synchronized({"model": model})["model"][1]).__name__
    'SyncBatchNorm'
    """
    modules = chain.from_iterable(model.modules() for model in models.values())
    if not any(isinstance(module, _BatchNorm) for module in modules):
        kinds = ", ".join(type(model).__name__ for model in models.values())
        raise ConfigError(
            "sync-batch-norm-without-batch-norm",
            problem=f"sync_batch_norm: {kinds} has no batch normalization",
            remedy="leave it out",
            setting="sync_batch_norm",
        )
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    return {name: convert(model) for name, model in models.items()}  # type: ignore[no-untyped-call]
