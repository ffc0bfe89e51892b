"""How well a classifier does: top-k accuracy as a counted mean while training, and of a whole split all scores at once.

Shapes: B batch, K classes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.mean import Mean

_MANY = 5  # classes, of which "among the five likeliest" says nothing


class Classified(NamedTuple):
    """What a model made of one sample."""

    label: int
    guess: int
    # How many classes are likelier than the right one, or as likely and before it; all, where its logit is no number
    rank: int
    surprise: float  # negative logarithm of the right one's probability, in nats


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


def classified(model: Any, batch: Any) -> list[Classified]:
    """What a model makes of each sample of a batch (inputs, labels): `outputs` of a `Split`; waits for the device.

    >>> import torch
    >>> classified(torch.nn.Identity(), (torch.tensor([[0.0, 9.0]]), torch.tensor([1])))[0].guess
    1
    """
    inputs, labels_B = batch
    logits_BK = model(inputs).float()
    right_B1 = logits_BK.gather(1, labels_B[:, None])
    before_BK = torch.arange(logits_BK.shape[1], device=logits_BK.device) < labels_B[:, None]
    # of equals the first is the guess, as argmax has it; a logit that is not a number is likelier than any, itself too
    likelier_BK = ~(logits_BK <= right_B1) | ((logits_BK == right_B1) & before_BK)
    surprise_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
    columns = (labels_B, logits_BK.argmax(dim=1), likelier_BK.sum(dim=1), surprise_B)
    return [Classified(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def classification_scores(found: Sequence[Classified], *, classes: int) -> dict[str, Any]:
    """Of a whole split: loss, accuracy, top_5_accuracy (of more than five classes), confusion; `judge` of a `Split`.

    confusion: how many samples of each class (row) were taken for each class (column).

    >>> one, two = Classified(0, 0, 0, 0.5), Classified(1, 0, 1, 1.5)
    >>> classification_scores([one, two], classes=2)
    {'loss': 1.0, 'accuracy': 0.5, 'confusion': [[1, 0], [1, 0]]}
    """
    confusion = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(confusion, ([one.label for one in found], [one.guess for one in found]), 1)
    scores: dict[str, Any] = {
        "loss": float(np.mean([one.surprise for one in found], dtype=np.float64)),
        "accuracy": sum(one.rank == 0 for one in found) / len(found),
    }
    if classes > _MANY:
        scores["top_5_accuracy"] = sum(one.rank < _MANY for one in found) / len(found)
    return scores | {"confusion": confusion.tolist()}


def accuracy(model: Any, batch: Any) -> Mean:
    """The fraction of samples whose largest output is the labelled one; `batch` is (inputs, labels).

    Outputs are (B, C) or (B, C, ...), labels (B,) or (B, ...); labels below 0 are not counted.
    """
    inputs, labels = batch
    counted = labels >= 0
    return Mean(((model(inputs).argmax(dim=1) == labels) & counted).sum(), counted.sum())


def perplexity(scores: Mapping[str, float]) -> float:
    """The exponential of the mean loss in nats; infinite where that is. Only of a loss that is not smoothed.

    >>> round(perplexity({"loss": math.log(50.0)}), 6)
    50.0
    """
    return math.exp(scores["loss"]) if scores["loss"] < 709.0 else math.inf  # of more, math.exp overflows
