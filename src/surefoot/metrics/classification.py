"""Classification metrics. Shapes: B batch, K classes, N samples or positions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from surefoot.errors import ConfigError, out_of_range
from surefoot.mean import Mean
from surefoot.metrics.contract import MetricFunction

_MANY = 5  # with at most five classes, top-5 accuracy is always 1


@overload
def accuracy(outputs: Tensor, targets: Tensor, *, ignore_index: int | None = None) -> Mean: ...


@overload
def accuracy(*, ignore_index: int | None = None) -> MetricFunction: ...


def accuracy(
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    ignore_index: int | None = None,
) -> Mean | MetricFunction:
    """Return the fraction of targets whose class has the largest output, ignoring targets below 0
    and those equal to `ignore_index`.

    Outputs are (B, K) or (B, K, ...); targets are (B,) or (B, ...). Without outputs and targets,
    the metric itself is returned: `metrics=sf.metrics.accuracy(ignore_index=255)`.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).value.item()
    0.5
    >>> accuracy(ignore_index=255)(torch.tensor([[0.1, 0.9]]), torch.tensor([255])).count.item()
    0
    """
    if outputs is None or targets is None:
        return partial(accuracy, ignore_index=ignore_index)
    _refuse_one_class("accuracy", outputs)
    guesses = outputs.argmax(dim=1)
    if guesses.shape != targets.shape:
        raise ConfigError(
            "targets-misfit-outputs",
            problem=f"accuracy: outputs of shape {tuple(outputs.shape)} do not fit targets of shape"
            f" {tuple(targets.shape)}",
            reason="the second dimension of outputs must be the classes",
            remedy="if classes are last, use: lambda outputs, targets:"
            " sf.metrics.accuracy(outputs.movedim(-1, 1), targets)",
            outputs=tuple(outputs.shape),
            targets=tuple(targets.shape),
        )
    counted = _counted(targets, ignore_index)
    return Mean(((guesses == targets) & counted).sum(), counted.sum())


@overload
def top_k_accuracy(
    outputs: Tensor, targets: Tensor, *, k: int = 1, ignore_index: int | None = None
) -> Mean: ...


@overload
def top_k_accuracy(*, k: int = 1, ignore_index: int | None = None) -> MetricFunction: ...


def top_k_accuracy(
    outputs: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    k: int = 1,
    ignore_index: int | None = None,
) -> Mean | MetricFunction:
    """Return the fraction of targets (B,) among the `k` largest outputs (B, K), ignoring targets
    below 0 and those equal to `ignore_index`.

    Without outputs and targets, the metric itself is returned, for a split:
    `metrics=sf.metrics.top_k_accuracy(k=5)`.

    >>> top_k_accuracy(
    ...     torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.4, 0.1]]), torch.tensor([2, 2]), k=2
    ... ).value.item()
    0.5
    """
    if outputs is None or targets is None:
        return partial(top_k_accuracy, k=k, ignore_index=ignore_index)
    _refuse_one_class("top_k_accuracy", outputs)
    if not 1 <= k <= outputs.shape[-1]:
        raise out_of_range("k", k, f"from 1 to the {outputs.shape[-1]} classes")
    right = (outputs.topk(k, dim=-1).indices == targets[:, None]).any(dim=-1)
    counted = _counted(targets, ignore_index)
    return Mean((right & counted).sum(), counted.sum())


@dataclass(frozen=True)
class ClassificationReport:
    """Accuracy, top_5_accuracy (for more than five classes) and confusion matrix of a split, for
    `Split(metrics=)`.

    `classes` is the list of class names or the number of classes. Outputs and targets have the same
    shapes as for `accuracy`. "confusion" counts samples by target (row) and prediction (column),
    and appears only in the records. Targets below 0 and those equal to `ignore_index` are ignored.
    Among equal outputs, the first counts as the largest. A NaN
    output counts as larger than any other output, but never as correct.

    >>> report = ClassificationReport(["cat", "dog"])
    >>> report.whole(
    ...     *report.per_batch(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    ... )
    {'accuracy': 0.5, 'confusion': [[0, 0], [1, 1]]}
    """

    classes: Sequence[str] | int
    ignore_index: int | None = None

    def per_batch(self, outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        """Return the predicted class and the rank of the right class for each target, and the
        targets.
        """
        _refuse_one_class("ClassificationReport", outputs)
        logits_NK = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).float()
        targets_N = targets.reshape(-1)
        if self.ignore_index is not None:
            targets_N = targets_N.where(targets_N != self.ignore_index, -1)
        right_N1 = logits_NK.gather(1, targets_N.clamp(min=0)[:, None])
        before_NK = torch.arange(logits_NK.shape[1], device=logits_NK.device) < targets_N[:, None]
        above_NK = ~(logits_NK <= right_N1) | ((logits_NK == right_N1) & before_NK)
        return (logits_NK.argmax(dim=1), above_NK.sum(dim=1)), targets_N

    def whole(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> dict[str, Any]:
        """Return the metrics over all results of `per_batch`."""
        counted = (targets >= 0).numpy()
        guesses, ranks = (tensor.numpy()[counted] for tensor in outputs)
        labels = targets.numpy()[counted]
        class_count = self.classes if isinstance(self.classes, int) else len(self.classes)
        largest = int(max(labels.max(), guesses.max())) if len(labels) else -1
        if largest >= class_count:
            raise ConfigError(
                "class-beyond-report",
                problem="ClassificationReport: a target or prediction has class index"
                f" {largest}, but the report has only {class_count} classes",
                remedy="pass all classes of the model: ClassificationReport(classes)",
                metric="ClassificationReport",
                value=largest,
                classes=class_count,
            )

        def fraction_within(k: int) -> float:
            return float(Mean(int((ranks < k).sum()), len(labels)).value)

        metrics: dict[str, Any] = {"accuracy": fraction_within(1)}
        if class_count > _MANY:
            metrics["top_5_accuracy"] = fraction_within(_MANY)
        confusion = np.zeros((class_count, class_count), dtype=np.int64)
        np.add.at(confusion, (labels, guesses), 1)
        metrics["confusion"] = confusion.tolist()
        return metrics


def refuse_other_targets(metric: Any, outputs: Any, targets: Any) -> None:
    """Raise `ConfigError` if targets outside the classes would count as wrong, which a loss can
    ignore. `metric` is any metric of a split; only those of this module are known. Waits for the
    device.
    """
    function = metric.func if isinstance(metric, partial) else metric
    is_report = isinstance(metric, ClassificationReport)
    # not ==, which a metric of torchmetrics defines otherwise
    if not is_report and function is not accuracy and function is not top_k_accuracy:
        return
    ignored = metric.ignore_index if is_report else None
    if isinstance(metric, partial):
        ignored = metric.keywords.get("ignore_index")
    is_usual = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim > 1
    if not is_usual or targets.is_floating_point():
        return
    classes = outputs.shape[1]
    others = targets[(targets >= classes) & _counted(targets, ignored)].unique().tolist()
    if not others:
        return
    arguments = ""
    if is_report:
        name = "ClassificationReport"
        arguments = "classes, "
    else:
        name = function.__name__
        if function is top_k_accuracy:
            arguments = "k=..., "
    listed = ", ".join(map(str, others[:4]))
    raise ConfigError(
        "targets-outside-classes",
        problem=f"{name}: targets have the value {listed}, but outputs have {classes} classes, 0 to"
        f" {classes - 1}",
        reason="the loss ignores these targets, and the metric would count them as wrong",
        remedy=f"write metrics=sf.metrics.{name}({arguments}ignore_index={others[0]})",
        metric=name,
        values=others,
        classes=classes,
    )


def _counted(targets: Tensor, ignore_index: int | None) -> Tensor:
    counted = targets >= 0
    return counted if ignore_index is None else counted & (targets != ignore_index)


def _refuse_one_class(metric: str, outputs: Tensor) -> None:
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        return
    raise ConfigError(
        "outputs-of-one-class",
        problem=f"{metric}: outputs of shape {tuple(outputs.shape)} do not have two or more classes"
        " in their second dimension",
        remedy=[
            "give the model one output for each class",
            "if it has one output, above 0 for class 1, write metrics={'accuracy': lambda outputs,"
            " targets: sf.Mean(((outputs.view_as(targets) > 0) == (targets > 0)).sum(),"
            " targets.numel())}",
        ],
        metric=metric,
        outputs=tuple(outputs.shape),
    )


def perplexity(means: Mapping[str, float]) -> float:
    """Return exp(mean unsmoothed loss in nats), infinite on overflow and NaN without targets, for
    `Split(derived={"perplexity": perplexity})`.

    >>> round(perplexity({"loss": math.log(50.0)}), 6)
    50.0
    """
    # beyond, math.exp overflows
    return math.inf if means["loss"] >= 709.0 else math.exp(means["loss"])
