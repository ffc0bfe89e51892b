"""Metrics of a split: functions of (outputs, targets), whole-split metrics and torchmetrics
objects.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError
from surefoot.mean import Mean, refuse_tensors


@runtime_checkable
class WholeSplitMetric(Protocol):
    """A metric that is not a mean: computed from the outputs and targets of all batches
    together.
    """

    def per_batch(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the values to collect from a batch."""

    def whole(self, outputs: Any, targets: Any) -> Any:
        """Return a value, or values by name, from the collected values of all batches in the order
        of the split.
        """


MetricFunction = Callable[[Any, Any], Mean | Mapping[str, Mean]]
# objects of torchmetrics are functions too, for a type checker
Metric = MetricFunction | WholeSplitMetric


@dataclass(frozen=True)
class _FunctionMetric:
    function: Callable[[Any, Any], Any]
    __name__: str

    def per_batch(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        return outputs, targets

    def whole(self, outputs: Any, targets: Any) -> Any:
        return self.function(outputs, targets)


def whole_split(function: Callable[[Any, Any], Any]) -> WholeSplitMetric:
    """Return a metric for `Split(metrics=)` that calls a function, such as BLEU, once with the
    whole split.

    `function(outputs, targets)` returns a number, or values by name. A value that is not a number
    (a list, a string) appears only in the records. Tensors of all batches are concatenated on the
    CPU, lists are joined, and tuples and dictionaries are joined entry by entry. With several
    ranks, rank 0 calls the function, with the samples in the order of the split.

    >>> correlation = whole_split(
    ...     lambda outputs, targets: {
    ...         "r": float(torch.corrcoef(torch.stack([outputs, targets]))[0, 1])
    ...     }
    ... )
    >>> correlation.whole(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
    {'r': 1.0}
    """
    if not callable(function):
        _refuse_non_metric(function)
    _refuse_sklearn(function)
    return _FunctionMetric(function, name_of(function))


def name_of(metric: Metric) -> str:
    """Return the name of a metric's value, or "" for a lambda.

    >>> name_of(partial(name_of)), name_of(lambda outputs, targets: 0.0)
    ('name_of', '')
    """
    while isinstance(metric, partial):
        metric = metric.func
    name = str(getattr(metric, "__name__", type(metric).__name__))
    return "" if name == "<lambda>" else name


def named_metrics(metrics: Any) -> list[tuple[str, Metric]]:
    """Return the names and metrics of a `Split`; raise `ConfigError` for an object that is not a
    metric.
    """
    if isinstance(metrics, Mapping) and not is_metric(metrics):
        named = list(metrics.items())
    elif isinstance(metrics, Sequence) and not isinstance(metrics, str):
        named = [(name_of(metric), metric) for metric in metrics]
    else:
        named = [(name_of(metrics), metrics)]
    for _, metric in named:
        if not is_metric(metric):
            _refuse_non_metric(metric)
        _refuse_sklearn(metric)
    return named


def refuse_twice(names: Sequence[str]) -> None:
    """Raise `ConfigError` if a name other than "" appears twice."""
    for index, name in enumerate(names):
        if name and name in names[:index]:
            raise ConfigError(
                "metric-name-twice",
                problem=f"Split: two metrics have the name {name!r}, so one would replace the other",
                remedy=f"choose names: metrics={{'my_{name}': metric, ...}}",
                setting="metrics",
                metric=name,
            )


def is_metric(metric: Any) -> bool:
    """Return whether a split can compute `metric`, which may be an instance but not a class."""
    if isinstance(metric, type):
        return False
    if is_torchmetric(metric) or isinstance(metric, WholeSplitMetric):
        return True
    return callable(metric) and not _updates(metric)


def is_torchmetric(metric: Any) -> bool:
    """Return whether `metric` is a Metric or MetricCollection of torchmetrics, without importing
    torchmetrics.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(
        metric, torchmetrics.Metric | torchmetrics.MetricCollection
    )


def torchmetrics_in(module: Any) -> list[Any]:
    """Return the torchmetrics objects in a module, including the module itself."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None or not isinstance(module, nn.Module):
        return []
    return [part for part in module.modules() if isinstance(part, torchmetrics.Metric)]


def means_of(result: Any, name: str, *, prefixed: bool) -> dict[str, Mean]:
    """Return a metric function's result by name; raise `ConfigError` for values that are not a
    `Mean` of scalars.
    """
    values = result.values() if isinstance(result, Mapping) else [result]
    for value in values:
        if isinstance(value, Mean):
            continue
        raise ConfigError(
            "metric-not-a-mean",
            problem=f"the metric {name or 'without a name'!r} returned a {type(value).__name__},"
            " without the number of values it averages",
            remedy=[
                "return sf.Mean(total, count), the sum over the batch and its number of values, or"
                " a dictionary of such means",
                f"compute it once: metrics={{{name or 'some_name'!r}:"
                " sf.metrics.whole_split(function)}",
            ],
            metric=name,
            returned=type(value).__name__,
        )
    means: dict[str, Mean] = by_name(result, name, prefixed=prefixed)
    for key, mean in means.items():
        refuse_tensors(mean, f"the metric {key!r} returned")
    return means


def by_name(result: Any, name: str, *, prefixed: bool) -> dict[str, Any]:
    """Return a metric's result as a dictionary; `prefixed` puts the metric's name before each key.

    >>> (
    ...     by_name(0.5, "f1", prefixed=True),
    ...     by_name({"low": 0.5}, "f1", prefixed=True),
    ...     by_name({"low": 0.5}, "f1", prefixed=False),
    ... )
    ({'f1': 0.5}, {'f1_low': 0.5}, {'low': 0.5})
    """
    if isinstance(result, Mapping):
        return {f"{name}_{key}" if prefixed else str(key): value for key, value in result.items()}
    if not name:
        raise ConfigError(
            "metric-without-name",
            problem="Split: a metric without a name returned a single value",
            remedy="name it: metrics={'some_name': ...}, or define it with `def`",
            setting="metrics",
        )
    return {name: result}


def as_recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a metric's result as JSON values for the records; raise `ConfigError` for other types.

    >>> as_recorded({"f1": torch.tensor(1), "of_classes": [0.5, float("nan")]})
    {'f1': 1.0, 'of_classes': [0.5, None]}
    """
    recorded: dict[str, Any] = {}
    for name, value in values.items():
        plain = pytree.tree_map(_without_arrays, value)
        if isinstance(plain, int | float):
            recorded[name] = float(plain)
        else:
            recorded[name] = pytree.tree_map(_finite_or_none, plain)
    # a number that is not finite has its own field in a record
    not_numbers = [value for value in recorded.values() if not isinstance(value, float)]
    try:
        json.dumps(not_numbers, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise ConfigError(
            "metric-not-recordable",
            problem=f"a metric returned a value that cannot be recorded: {problem}",
            remedy="return numbers, tensors, lists or strings",
            metrics=list(recorded),
        ) from problem
    return recorded


def join_batches(parts: Sequence[Any]) -> Any:
    """Join the values of all batches: tensors, arrays and lists end to end, tuples and dictionaries
    entry by entry.

    >>> join_batches([(torch.tensor([1]), ["a"]), (torch.tensor([2, 3]), ["b", "c"])])
    (tensor([1, 2, 3]), ['a', 'b', 'c'])
    """
    first = parts[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat(list(parts))
        if isinstance(first, np.ndarray):
            return np.concatenate(parts)
    except (RuntimeError, ValueError) as problem:
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise _not_joinable(f"the shapes {shapes}") from problem
    if isinstance(first, Mapping):
        return {key: join_batches([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        entries = [join_batches(entries) for entries in zip(*parts, strict=True)]
        is_named = hasattr(first, "_fields")
        return type(first)(*entries) if is_named else tuple(entries)
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    raise _not_joinable(f"the type {type(first).__name__}")


def _not_joinable(what: str) -> ConfigError:
    return ConfigError(
        "outputs-not-joinable",
        problem=f"whole_split: outputs of {what} cannot be concatenated over batches",
        reason="batches are joined along the first dimension",
        remedy="let Split(predict=) return lists with one entry per sample",
        outputs=what,
    )


def _without_arrays(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_sklearn(metric: Any) -> None:
    while isinstance(metric, partial):
        metric = metric.func
    if str(getattr(metric, "__module__", "")).startswith("sklearn."):
        name = name_of(metric)
        raise ConfigError(
            "metric-of-sklearn",
            problem=f"Split: scikit-learn's {name} takes (targets, predictions), but a metric gets"
            " (outputs, targets)",
            reason="exchanged, precision would be recall, for example",
            remedy=f"write: metrics={{'{name}': sf.metrics.whole_split(lambda outputs, targets:"
            f" {name}(targets, outputs.argmax(1)))}}",
            setting="metrics",
            metric=name,
        )


def _updates(metric: Any) -> bool:
    return callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None))


def _refuse_non_metric(metric: Any) -> NoReturn:
    name = getattr(metric, "__name__", type(metric).__name__)
    if isinstance(metric, str):
        what = "is a string"
        known = metric if metric in sys.modules["surefoot.metrics"].__all__ else "accuracy"
        example = f"metrics=sf.metrics.{known}"
    elif isinstance(metric, type):
        what = "is a class"
        example = f"metrics={name}(...), with its arguments"
    elif _updates(metric):
        what = "is not from torchmetrics, so ranks cannot combine its state"
        example = "metrics=sf.metrics.whole_split(function)"
    else:
        what = "cannot be called"
        example = "metrics=sf.metrics.accuracy, a list of them, or {name: metric}"
    raise ConfigError(
        "not-a-metric",
        problem=f"Split: the metric {name if callable(metric) else repr(metric)} {what}",
        reason="a metric is an object of torchmetrics, or a function of (outputs, targets) that"
        " returns sf.Mean(total, count)",
        remedy=f"write: {example}",
        setting="metrics",
        value=metric,
    )
