"""Batch normalisation over the micro-batches that all ranks compute at the same time, where that is asked for.

Without it each micro-batch normalises by itself, so that a run is the same on any number of ranks. With it the statistics are of
as many samples as ranks times micro-batch size: what a normalisation sees depends on the world size, and law 2 does not hold
across world sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.errors import ConfigError


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` for a device on which torch does not synchronise batch normalisation."""
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
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    return {name: convert(model) for name, model in models.items()}  # type: ignore[no-untyped-call]
