"""The loss and the metrics of a split, equal for any number of ranks. Ranks exchange outputs as
text without pickle.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.data.loader import MicroBatch
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, DivergedError, error_of_dict
from surefoot.mean import Mean, append_read, exact_sums, means_of_sums, summed
from surefoot.metrics.contract import (
    MetricFunction,
    WholeSplitMetric,
    as_recorded,
    by_name,
    is_torchmetric,
    join_batches,
    means_of,
    named_metrics,
    refuse_twice,
    torchmetrics_in,
)
from surefoot.train.error_causes import explaining_metric, noting


class Results:
    """The loss and the metrics of a split, updated batch by batch. Padding batches are not
    counted.
    """

    def __init__(
        self,
        metrics: Any,
        device: torch.device,
        world: World | None,
        coupled_loss: Callable[[list[Any]], float] | None = None,
        *,
        of_nothing: float = math.nan,
    ) -> None:
        self.of_nothing = of_nothing  # the mean of nothing
        self.coupled_loss = coupled_loss  # of the features of all batches
        self.world = world if world is not None and world.size > 1 else None
        self.device = device
        self.prefixed = isinstance(metrics, Mapping)
        self.functions: list[tuple[str, MetricFunction]] = []
        self.objects: list[tuple[str, Any]] = []  # torchmetrics objects
        self.whole_split: list[tuple[str, WholeSplitMetric]] = []
        for name, metric in named_metrics(metrics):
            if isinstance(metric, WholeSplitMetric):
                self.whole_split.append((name, metric))
            elif is_torchmetric(metric):
                self.objects.append((name, self._fresh(metric, shared=self.world is not None)))
            else:
                self.functions.append((name, metric))
        self.means: dict[str, list[Mean]] = {}  # of each batch
        self.collected: list[list[Any]] = []  # by batch, then by metric
        self.samples = 0  # of a batch whose results stand alone
        self.only_pair: Any = None  # of the first batch, dropped at the second
        self.padding: list[bool] = []
        self.dropped: list[bool] = []  # padding, and batches that are left out
        self.skipped_samples = 0  # for which the loss or `collate_fn` returned None

    def add(
        self,
        means: dict[str, Mean],
        pair: tuple[Any, Any] | None,
        features: Any = None,
        *,
        is_padding: bool,
    ) -> None:
        """Add a batch: the means of its loss, (outputs, targets) for the metrics, and the features
        of a coupled loss.
        """
        if pair is not None or self.coupled_loss is not None:
            columns = []
            if pair is not None:
                for name, metric in self.whole_split:
                    with explaining_metric(name, pair):
                        columns.append(_on_cpu(metric.per_batch(*pair)))
            if self.coupled_loss is not None:
                columns.append(_on_cpu(features))
            self.collected.append(columns)
            self.padding.append(is_padding)
            self.dropped.append(is_padding)
            self.only_pair = None
            if len(self.padding) == 1 and self.world is not None:
                self.only_pair = pair
        if is_padding:
            return
        computed: dict[str, Mean] = {}
        if pair is not None:
            of_loss = ["loss"] if "loss" in means else []
            for name, function in self.functions:
                with explaining_metric(name, pair):
                    of_function = means_of(function(*pair), name, prefixed=self.prefixed)
                refuse_twice([*computed, *of_function, *of_loss])
                computed |= of_function
            for name, metric in self.objects:
                with explaining_metric(name, pair):
                    metric.update(*pair)
        # a metric takes precedence over a mean that the loss logs under the same name
        append_read(self.means, means | computed)

    def leave_out(self, batch: MicroBatch) -> None:
        """Count the samples of a batch for which the loss or `collate_fn` returned None."""
        if not batch.is_padding:
            self.skipped_samples += len(batch.sample_ids)
        self.collected.append([])
        self.padding.append(batch.is_padding)
        self.dropped.append(True)

    def values(self, diverged: DivergedError | None = None) -> dict[str, Any]:
        """Return each metric by name. Collective. All ranks raise `DivergedError` if one rank
        passes its error as `diverged`.
        """
        sums = exact_sums(self.means)
        of_ranks = [sums]
        if self.world is not None:
            of_ranks = _of_ranks(self.world, sums, diverged)
        values = dict[str, Any](means_of_sums(of_ranks, of_nothing=self.of_nothing))
        for further in (self._of_objects(), self._of_whole_split()):
            refuse_twice([*values, *further])
            values |= further
        skipped = self.skipped_samples
        if self.world is not None:
            skipped = sum(self.world.gathered(skipped))
        if skipped:
            values["skipped_samples"] = skipped
        return values

    def mean(self, name: str, *, samples: int) -> Mean | None:
        """Return a metric of one batch as a `Mean`. Returns None if the name is unknown or the
        metric needs several batches.
        """
        if name in self.means:
            return summed(self.means[name])
        value = None
        with suppress(Exception):  # the metric may need several batches
            value = self.values().get(name)
        if not isinstance(value, int | float):
            return None
        return Mean(value * samples, samples)

    def of_batches(self, batches: Sequence["Results"]) -> dict[str, Any]:
        """Return each metric by name of a split that has the batches of these `Results`, which may
        occur several times. All are for the same metrics as this one.
        """
        joined = copy(self)
        joined.means = {}
        joined.collected = []
        for batch in batches:
            joined.collected += batch.collected
            for name, means in batch.means.items():
                joined.means.setdefault(name, []).extend(means)
        joined.objects = self._fresh_objects()
        for index, (_, metric) in enumerate(joined.objects):
            for batch in batches:
                metric.merge_state(batch.objects[index][1])
        return joined.values()

    def _of_whole_split(self) -> dict[str, Any]:
        if not self.whole_split and not self.coupled_loss:
            return {}
        batches = self.collected
        if self.world is not None:
            batches = _collected_in_order(self.world, self.collected, self.dropped)
        elif any(self.dropped):
            with_flags = zip(self.collected, self.dropped, strict=True)
            batches = [batch for batch, is_dropped in with_flags if not is_dropped]
        if not batches:
            return {}
        if self.world is not None:
            return _from_main_rank(self.world, partial(self._of_collected, batches))
        return self._of_collected(batches)

    def _of_collected(self, batches: list[list[Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        columns = list(zip(*batches, strict=True))
        if self.coupled_loss is not None:
            values["loss"] = self.coupled_loss(list(columns.pop()))
        for (name, metric), column in zip(self.whole_split, columns, strict=True):
            joined = join_batches(column)
            with explaining_metric(name, joined):
                of_metric = by_name(metric.whole(*joined), name, prefixed=self.prefixed)
            refuse_twice([*values, *of_metric])
            values |= of_metric
        return as_recorded(values)

    def _fresh(self, metric: Any, *, shared: bool) -> Any:
        fresh = deepcopy(metric).to(self.device)  # two splits may share the user's object
        fresh.reset()
        for each in torchmetrics_in(fresh):
            each.sync_on_compute = shared
        return fresh

    def _fresh_objects(self) -> list[tuple[str, Any]]:
        """Return the torchmetrics objects anew, without an exchange between ranks."""
        return [(name, self._fresh(metric, shared=False)) for name, metric in self.objects]

    def _of_objects(self) -> dict[str, Any]:
        """Return the values of the torchmetrics objects, or none if every batch is left out.
        Collective.
        """
        if not self.objects:
            return {}
        is_empty = bool(self.dropped) and all(self.dropped)
        if self.world is None:
            if is_empty:
                return {}
            return self._computed()
        # torchmetrics cannot gather an empty state
        of_ranks = self.world.gathered(is_empty)
        if not any(of_ranks):
            return self._computed()
        if len(self.dropped) == 1:
            return self._of_few_batches(self.world)
        with_batches = [rank for rank, has_none in enumerate(of_ranks) if not has_none]
        if not with_batches:
            return {}
        return self._of_some_ranks(self.world, with_batches)

    def _computed(self) -> dict[str, Any]:
        values = dict[str, Any]()
        for name, metric in self.objects:
            with noting(f"in the metric {name!r}"):
                computed = pytree.tree_map_only(Tensor, Tensor.tolist, metric.compute())
                of_metric = as_recorded(by_name(computed, name, prefixed=self.prefixed))
            refuse_twice([*values, *of_metric])
            values |= of_metric
        return values

    def _of_few_batches(self, world: World) -> dict[str, Any]:
        """Return the values of a split of one batch a rank, which every rank sees."""
        pairs = _collected_in_order(world, [_on_cpu(self.only_pair)], self.dropped)
        if not pairs:
            return {}
        self.objects = self._fresh_objects()
        on_device = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(self.device), pairs)
        for outputs, targets in on_device:
            for _, metric in self.objects:
                metric.update(outputs, targets)
        return self._computed()

    def _of_some_ranks(self, world: World, members: list[int]) -> dict[str, Any]:
        """Return the values of the batches of these ranks; all batches of others are left out."""
        group = dist.new_group(members)
        values = None
        if world.rank in members:
            for _, metric in self.objects:
                for each in torchmetrics_in(metric):
                    each.process_group = group
            values = self._computed()
            dist.destroy_process_group(group)
        return dict(world.gathered(values)[members[0]])


def _on_cpu(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), values)


def _of_ranks(
    world: World, sums: Mapping[str, Any], diverged: DivergedError | None
) -> list[dict[str, list[list[float]]]]:
    described = None if diverged is None else diverged.to_dict()
    of_ranks = world.gathered({"sums": sums, "diverged": described})
    for rank in of_ranks:
        if rank["diverged"] is not None:
            raise error_of_dict(rank["diverged"])
    return [rank["sums"] for rank in of_ranks]


def _collected_in_order(world: World, collected: list[Any], dropped: list[bool]) -> list[Any]:
    messages = Messages()
    texts: list[str | None] = []
    for batch, is_dropped in zip(collected, dropped, strict=True):
        text = messages.written(batch)  # also of one that is dropped: its classes are then known
        texts.append(None if is_dropped else text)
    texts_by_rank = world.gathered(texts)
    # in turn a batch of each rank, as they were handed out
    in_order = chain.from_iterable(zip(*texts_by_rank, strict=True))
    return [messages.read(text) for text in in_order if text is not None]


def _from_main_rank(world: World, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    described = None
    if world.is_main:
        try:
            values = compute()
        except DivergedError as error:
            described = error.to_dict()
    values, described = world.from_main([values, described])
    if described is not None:
        raise error_of_dict(described)
    return dict(values)


class Messages:
    """Converter of values to text and back, for numbers, text, containers, tensors, arrays,
    dataclasses and named tuples.

    A message can refer only to dataclasses and container classes that this process has written
    before.

    >>> messages = Messages()
    >>> messages.read(messages.written([(1, float("inf")), {"a": "b"}]))
    [(1, inf), {'a': 'b'}]
    """

    def __init__(self) -> None:
        self.classes: dict[str, type] = {}

    def written(self, value: Any) -> str:
        """Return the value as text. Raises `ConfigError` for an unsupported type."""
        return json.dumps(self._taken_apart(value))

    def read(self, text: str) -> Any:
        """Return the value that this process, or another process of the same program, has
        written.
        """
        return self._put_together(json.loads(text))

    def _taken_apart(self, value: Any) -> Any:
        if value is None:
            return None
        for plain in (bool, int, float, str):
            if isinstance(value, plain):
                return plain(value)  # of a subclass too, such as an IntEnum
        if isinstance(value, torch.Tensor):
            return {"tensor": _bytes(value)}
        if isinstance(value, np.ndarray | np.generic):
            return {"array": _bytes(torch.from_numpy(np.array(value)))}
        if isinstance(value, dict):
            entries = []
            for key, entry in value.items():
                entries.append([self._taken_apart(key), self._taken_apart(entry)])
            return {"dict": entries}
        if is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in fields(value) if field.init]
        elif isinstance(value, list | tuple):
            parts = list(value)
        else:
            raise ConfigError(
                "outputs-not-sendable",
                problem=f"a {type(value).__name__} cannot be sent to another rank, which a metric"
                " of the whole split needs",
                remedy="let Split(predict=) return numbers, strings, tensors, or lists, tuples and"
                " dictionaries of these",
                setting="predict",
                returned=type(value).__name__,
            )
        kind = type(value).__name__
        if type(value) not in (list, tuple):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            self.classes[kind] = type(value)
        return {kind: [self._taken_apart(part) for part in parts]}

    def _put_together(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        ((kind, payload),) = message.items()
        if kind in ("tensor", "array"):
            tensor = load(base64.b64decode(payload))["values"]
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "dict":
            return {self._put_together(key): self._put_together(value) for key, value in payload}
        parts = [self._put_together(part) for part in payload]
        if kind == "list":
            return parts
        if kind == "tuple":
            return tuple(parts)
        if kind not in self.classes:
            raise ConfigError(
                "outputs-of-unknown-class",
                problem=f"another rank's outputs have the class {kind}, which this rank does not"
                " know",
                returned=kind,
            )
        cls = self.classes[kind]
        if is_dataclass(cls):
            names = [field.name for field in fields(cls) if field.init]
            return cls(**dict(zip(names, parts, strict=True)))
        if "_fields" in vars(cls):  # a named tuple
            return cls(*parts)
        return cls(parts)


def _bytes(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"values": tensor.detach().cpu().contiguous()})).decode()
