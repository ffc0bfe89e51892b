"""Sequences with different numbers of targets, some with none: data on which any mean of means is
far off.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import surefoot as sf

LENGTH, FEATURES, CLASSES, IGNORED = 6, 5, 4, -100
Batch = tuple[Tensor, Tensor]


def tokens(samples: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Inputs (samples, LENGTH, FEATURES) and targets (samples, LENGTH), of which 0 to 6 a sample
    are counted.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, LENGTH, FEATURES, generator=generator, dtype=dtype)
    targets = torch.randint(CLASSES, (samples, LENGTH), generator=generator)
    for sample in range(samples):
        targets[sample, (sample * 5) % (LENGTH + 1) :] = IGNORED
    return inputs, targets


def plain_mean(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED)


def counted_mean(model: Any, batch: Batch) -> sf.Mean:
    return sf.losses.cross_entropy(model(batch[0]), batch[1])


def counted_targets(batch: Batch) -> int:
    return int((batch[1] != IGNORED).sum())
