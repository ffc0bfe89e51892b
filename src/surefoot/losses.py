"""Losses as counted means, so that ignored targets and ragged batches weigh what they should."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.means import Mean


def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> Mean:
    """Cross-entropy in nats over all targets but the ignored ones, as (sum, count) on the device.

    logits (..., C) of any float type, computed in float32; targets (...) of class numbers. Where every target is ignored the
    sum is 0 with zero gradients, not NaN. Label smoothing as in Szegedy et al. 2016, section 7 (https://arxiv.org/abs/1512.00567).

    >>> mean = cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [3, -100, -100]]))
    >>> round(float(mean.value), 4), int(mean.count)
    (1.3863, 3)
    """
    flat_targets = targets.reshape(-1)
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        flat_targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return Mean(total, (flat_targets != ignore_index).sum())


def scalar(loss: Any) -> Tensor:
    """A loss that a step can start from: one number that depends on a parameter; anything else is a `ConfigError`."""
    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad:
        return loss
    if not isinstance(loss, Tensor):
        raise ConfigError(f"the loss returned {type(loss).__name__}, not a tensor: return F.cross_entropy(...) or the like")
    if loss.ndim > 0:
        raise ConfigError(
            f"the loss is not one number but a tensor of shape {tuple(loss.shape)}: return its mean,\n"
            "  or surefoot.Mean(total, count) where targets are not one per sample"
        )
    raise ConfigError("the loss does not depend on any trainable parameter: was it detached, or computed under no_grad?")
