"""DistributedDataParallel: whole models on every rank, gradients summed over ranks, batch normalization over all ranks."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from surefoot.config.parallel import Strategy
from surefoot.distributed.strategy import Alone, Called, Ranks, Sums
from surefoot.distributed.world import World
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.distributed.fsdp import Fsdp  # imports seconds of torch


@dataclass
class Ddp:
    """Whole models on every rank, under `DistributedDataParallel`.

    It broadcasts no buffers: `train/batch_norm_buffers.py` does. Of several models a loss may use one without training it, and
    DDP would wait for its gradients: there the mean is taken after the last backward pass, of whatever has a gradient (on any
    rank, with `find_unused_parameters`).
    """

    world: World
    parallel: Strategy
    nominal: float | None
    called: dict[str, Called]
    wrapped: list[DistributedDataParallel] = field(default_factory=list)
    watched: list[nn.Parameter] = field(default_factory=list)  # whose gradients DDP adds up

    def __post_init__(self) -> None:
        self.sums = Sums(self.world)
        self.begin_sum, self.started = self.sums.begin, self.sums.started
        if len(self.called) > 1 and self.parallel.sync == "every":
            raise ConfigError(
                f"sync = every: gradients of several models ({', '.join(self.called)}) are added up once a step\n"
                "  leave it out, or use --parallel fsdp"
            )
        self.follow_trainable()

    @property
    def local_times(self) -> float | None:
        """The number of ranks, over which the mean is taken in the end."""
        return None if self.parallel.sync == "every" else float(self.world.size)

    def follow_trainable(self) -> None:
        """Have DDP watch the parameters that are trainable now, those of a single model; anew where they were others."""
        called = next(iter(self.called.values()))
        trainable = [parameter for parameter in called.model.parameters() if parameter.requires_grad]
        if len(self.called) > 1 or [*map(id, trainable)] == [*map(id, self.watched)]:
            return
        if self.wrapped:
            called.through = self.wrapped.pop().module  # DDP's hooks on parameters go with it
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

    def start_pass(self, *, counted: bool, last: bool) -> bool:
        """Gradients are added up in the last pass of a step, which each rank makes even where it has nothing to count."""
        together = last or self.parallel.sync == "every"
        for through in self.wrapped:
            through.require_backward_grad_sync = together
        for called in self.called.values():
            called.void = not counted
        return counted or together

    def summed(self, total: Tensor, counted: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:  # noqa: ARG002
        """Loss and count of all ranks, and where several models are trained the mean of their gradients."""
        if not self.wrapped:
            self._take_means()
        return self.sums.end(total)

    def _take_means(self) -> None:
        """Of gradients, over all ranks, one tensor for each kind of number."""
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
        """What watches a model's gradients calls another one in its place, of the same parameters."""
        for name, called in self.called.items():
            if isinstance(called.through, DistributedDataParallel):
                called.through.module = forwards[name]
            else:
                called.through = forwards[name]
        return self.called

    def whole(self, models: Iterable[nn.Module]) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()


def spread(
    models: Mapping[str, nn.Module],
    forwards: Mapping[str, Any],
    *,
    world: World,
    parallel: Strategy,
    nominal: float,
    fsdp: "Fsdp | None" = None,
) -> tuple[Ranks, dict[str, Any]]:
    """What a step shares with the other ranks, and what the loss calls by name; `forwards` are the models, compiled or not.

    `fsdp` is what has sharded them, where they are.
    """
    called = {name: Called(model, forwards[name]) for name, model in models.items()}
    if fsdp is not None:
        fsdp.called = called
        return fsdp, dict(called)
    if parallel.kind == "ddp" and world.size > 1:
        return Ddp(world, parallel, nominal, called), dict(called)
    return Alone(), dict(forwards)


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` where batch statistics cannot be synchronised."""
    if device.type != "cuda":
        raise ConfigError(
            f"sync_batch_norm needs CUDA, and this run is on {device.type}: torch.nn.SyncBatchNorm has no other kernels\n"
            "  leave it out: each micro-batch then normalises by itself, with the same result on any number of processes"
        )


def synchronised(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The models with every BatchNorm1d, 2d and 3d made a `torch.nn.SyncBatchNorm`, which holds the same parameters and buffers.

    They are changed in place, but for a model that is itself a normalisation. Raises `ConfigError` where there are none.

    >>> type(synchronised({"model": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))})["model"][1]).__name__
    'SyncBatchNorm'
    """
    if not any(isinstance(part, _BatchNorm) for model in models.values() for part in model.modules()):
        kinds = ", ".join(type(model).__name__ for model in models.values())
        raise ConfigError(f"sync_batch_norm: {kinds} has no batch normalisation\n  leave it out")
    return {name: nn.SyncBatchNorm.convert_sync_batchnorm(model) for name, model in models.items()}  # type: ignore[no-untyped-call]
