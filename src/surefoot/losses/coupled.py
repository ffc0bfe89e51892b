"""Losses that couple the samples of a batch, such as SimCLR's and CLIP's."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from surefoot.config.keywords import known_keywords
from surefoot.errors import ConfigError


@dataclass(frozen=True)
class WholeBatchLoss:
    """The loss that `whole_batch` returns. A call computes the loss of one batch by itself."""

    encode_fn: Callable[[Any, Any], Any]
    loss_fn: Callable[[Any, Any], Any]

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.loss_fn(model, self.encode_fn(model, batch))


@known_keywords
def whole_batch(
    encode_fn: Callable[[Any, Any], Any], loss_fn: Callable[[Any, Any], Any]
) -> WholeBatchLoss:
    """Return a loss over the features of the whole batch, for any micro-batch size and any number
    of processes.

    `encode_fn(model, batch)` returns the features of a micro-batch: a tensor, or tuples and
    dictionaries of tensors, with one row for each sample. A tensor without dimensions, such as
    CLIP's logit scale, is used as it is. `loss_fn(model, features)` gets the rows of all
    micro-batches and processes in the order of the batch. The function returns the mean loss, also
    with `{name: Mean}`, and may use parameters of the model.

    Accumulation costs a second forward pass (Gao et al. 2021, https://arxiv.org/abs/2101.06983),
    with the same dropout masks. A split's loss is the mean over groups of `batch_size` samples.

    >>> import torch
    >>> from torch import nn
    >>> def spread(model, features):
    ...     return torch.pdist(features).mean()
    >>> loss = whole_batch(lambda model, batch: model(batch), spread)
    >>> float(loss(nn.Identity(), torch.tensor([[0.0], [1.0], [3.0]])))
    2.0
    """
    for name, arguments, function in (
        ("encode_fn", "model, batch", encode_fn),
        ("loss_fn", "model, features", loss_fn),
    ):
        try:
            inspect.signature(function).bind("model", "features")
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                "whole-batch-function",
                problem=f"whole_batch: {function!r} cannot be called as {name}({arguments}):"
                f" {problem}",
                reason="encode_fn turns a micro-batch into features, and loss_fn turns all features"
                " into a loss",
                remedy="write: whole_batch(lambda model, batch: model(batch), loss_fn)",
                setting=name,
                value=function,
            ) from problem
    return WholeBatchLoss(encode_fn, loss_fn)
