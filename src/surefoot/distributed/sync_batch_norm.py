"""Batch normalization over all ranks, also on a CPU, for which torch has no kernels."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class CpuSyncBatchNorm(_BatchNorm):
    """A `SyncBatchNorm` of a model on the CPU, with the same parameters and buffers. It is no
    subclass, because DDP refuses torch's class on a CPU.
    """

    def _get_name(self) -> str:
        """Return torch's name, so that a run resumes on another device with the same model."""
        return "SyncBatchNorm"

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize by the statistics of all ranks' inputs in training, else as batch normalization
        of one process does.
        """
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
        self._check_input_dim(input)
        axes = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        own_count = values.new_tensor([input.numel() // input.size(1)])
        totals = _over_ranks(torch.cat([values.sum(axes), own_count]))
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centered = values - mean.view(shape)
        variance = _over_ranks(centered.square().sum(axes)) / count
        self._follow(mean.detach(), variance.detach(), count)
        normalized = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = normalized.to(input.dtype)
        return result

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum: Any = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / self.num_batches_tracked
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(torch.lerp(running, value.to(running.dtype), momentum))


def synchronize_on_cpu(models: Iterable[nn.Module]) -> None:
    """Let every `SyncBatchNorm` of these models compute on the CPU."""
    for model in models:
        for part in model.modules():
            if type(part) is nn.SyncBatchNorm:
                part.__class__ = CpuSyncBatchNorm  # type: ignore[assignment]


def has_synchronized_norms(models: Iterable[nn.Module]) -> bool:
    """Return True if a model has a `SyncBatchNorm`, by the setting or by the user's conversion."""
    modules = chain.from_iterable(model.modules() for model in models)
    return any(isinstance(module, nn.SyncBatchNorm | CpuSyncBatchNorm) for module in modules)


def _over_ranks(own: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(own)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:  # noqa: ARG004
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total
