"""How well a classifier does: top-k accuracy as a counted mean, and which classes it confuses.

Shapes: B batch, K classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.means import Mean


def top_k_accuracy(logits_BK: Tensor, labels_B: Tensor, *, k: int = 1) -> Mean:
    """How often the right class is among the k likeliest, as (sum, count) on the device; labels below 0 are not counted.

    >>> import torch
    >>> top_k_accuracy(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]]), torch.tensor([2, 2]), k=2).value.item()
    0.5
    """
    if not 1 <= k <= logits_BK.shape[-1]:
        raise ConfigError(f"top_k_accuracy: k = {k} of {logits_BK.shape[-1]} classes")
    right_B = (logits_BK.topk(k, dim=-1).indices == labels_B[:, None]).any(dim=-1)
    counted_B = labels_B >= 0
    return Mean((right_B & counted_B).sum(), counted_B.sum())


def guesses(model: Any, batch: Any) -> list[tuple[int, int]]:
    """(label, likeliest class) of each sample of a batch (inputs, labels): `outputs` of a `Split`; waits for the device."""
    inputs, labels_B = batch
    return list(zip(labels_B.tolist(), model(inputs).argmax(dim=-1).tolist(), strict=True))


def confusion_matrix(pairs: Iterable[tuple[int, int]], *, classes: int) -> list[list[int]]:
    """How many samples of each class (row) were taken for each class (column); labels below 0 are not counted.

    >>> confusion_matrix([(0, 0), (0, 1), (1, 1), (1, 1)], classes=2)
    [[1, 1], [0, 2]]
    """
    counts = np.zeros((classes, classes), dtype=np.int64)
    for label, guess in pairs:
        if label >= 0:
            counts[label, guess] += 1
    found: list[list[int]] = counts.tolist()
    return found
