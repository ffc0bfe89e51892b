"""How well a classifier does. Shapes: B batch, K classes, N samples or positions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.mean import Mean

_MANY = 5  # classes: of so few, every one is among the five likeliest


def accuracy(outputs: Tensor, targets: Tensor) -> Mean:
    """The fraction of targets whose output is the largest; targets below 0 are not counted.

    Outputs are (B, K) or (B, K, ...), targets (B,) or (B, ...).

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).value.item()
    0.5
    """
    guesses = outputs.argmax(dim=1)
    if guesses.shape != targets.shape:
        raise ConfigError(
            f"accuracy: outputs of shape {tuple(outputs.shape)} do not fit targets of shape {tuple(targets.shape)}:"
            " classes are the second dimension\n"
            "  with classes last: lambda outputs, targets: sf.metrics.accuracy(outputs.movedim(-1, 1), targets)"
        )
    counted = targets >= 0
    return Mean(((guesses == targets) & counted).sum(), counted.sum())


def top_k_accuracy(outputs: Tensor, targets: Tensor, *, k: int = 1) -> Mean:
    """The fraction of targets (B,) among the `k` largest outputs (B, K); targets below 0 are not counted.

    In a split: `metrics=functools.partial(sf.metrics.top_k_accuracy, k=5)`.

    >>> top_k_accuracy(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]]), torch.tensor([2, 2]), k=2).value.item()
    0.5
    """
    if not 1 <= k <= outputs.shape[-1]:
        raise ConfigError(f"top_k_accuracy: k = {k} of {outputs.shape[-1]} classes")
    right = (outputs.topk(k, dim=-1).indices == targets[:, None]).any(dim=-1)
    counted = targets >= 0
    return Mean((right & counted).sum(), counted.sum())


@dataclass(frozen=True)
class ClassificationReport:
    """Accuracy, top_5_accuracy (of more than five classes) and the confusion matrix of a whole split; for `Split(metrics=)`.

    `classes`: their names, or how many there are. Outputs and targets are those of `accuracy`. "confusion" counts the samples of
    each class (row) by the class with the largest output (column), and appears only in the records. The first of equal outputs
    counts as the largest. An output that is not a number is larger than any other, so it is never right.

    >>> report = ClassificationReport(["cat", "dog"])
    >>> report.whole(*report.per_batch(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
    {'accuracy': 0.5, 'confusion': [[0, 0], [1, 1]]}
    """

    classes: Sequence[str] | int

    def per_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """The class with the largest output, and the rank of the right one, of each target; and the targets."""
        logits_NK = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).float()
        targets_N = targets.reshape(-1)
        right_N1 = logits_NK.gather(1, targets_N.clamp(min=0)[:, None])
        before_NK = torch.arange(logits_NK.shape[1], device=logits_NK.device) < targets_N[:, None]
        above_NK = ~(logits_NK <= right_N1) | ((logits_NK == right_N1) & before_NK)
        return (logits_NK.argmax(dim=1), above_NK.sum(dim=1)), targets_N

    def whole(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> dict[str, Any]:
        """The metrics of all results of `per_batch` together."""
        counted = (targets >= 0).numpy()
        guesses, ranks, labels = (tensor.numpy()[counted] for tensor in (*outputs, targets))
        count = self.classes if isinstance(self.classes, int) else len(self.classes)
        if len(labels) and (largest := int(max(labels.max(), guesses.max()))) >= count:
            raise ConfigError(
                f"ClassificationReport: {count} classes, but a target or an output is of class {largest}, counted from 0\n"
                "  give all classes that the model has: ClassificationReport(classes)"
            )
        confusion = np.zeros((count, count), dtype=np.int64)
        np.add.at(confusion, (labels, guesses), 1)
        within = {"accuracy": 1} | ({"top_5_accuracy": _MANY} if count > _MANY else {})
        metrics = {name: int((ranks < k).sum()) / max(1, len(labels)) for name, k in within.items()}
        return metrics | {"confusion": confusion.tolist()}


def perplexity(means: Mapping[str, float]) -> float:
    """The exponential of the mean loss in nats, for `Split(derived={"perplexity": perplexity})`; infinite if that is.

    It is the model's perplexity only if the loss is not smoothed.

    >>> round(perplexity({"loss": math.log(50.0)}), 6)
    50.0
    """
    return math.exp(means["loss"]) if means["loss"] < 709.0 else math.inf  # beyond, math.exp overflows
