"""Data sets that build a whole micro-batch in one call: tensors in memory, and classes with a method `gather`."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from surefoot.data.order import Ids

Gather = Callable[[Ids, Ids], Any]


@runtime_checkable
class Gathers(Protocol):
    """A data set that builds a whole micro-batch from sample ids and epochs.

    `gather` runs without seeding: draw random numbers from `np.random.default_rng((seed, epoch, id))`.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, ids: Ids, epochs: Ids) -> Any:
        """Return the samples `ids` as one batch; each sample is augmented for its epoch."""


def gather_fn(dataset: Any) -> Gather | None:
    """Return the function of (ids, epochs) that gathers a batch, or None if samples must be read individually.

    Tuples of tensors, `TensorDataset`, classes with `gather`, and a `Subset` or `Mixture` of these support gathering.
    """
    if tensors := tensors_of(dataset):
        return partial(_rows_of, tensors)
    if type(dataset) is Subset and (gather_samples := gather_fn(dataset.dataset)) is not None:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return lambda ids, epochs: gather_samples(indices[ids], epochs)
    return dataset.gather if isinstance(dataset, Gathers) else None


def is_tensors(dataset: Any) -> bool:
    return isinstance(dataset, tuple) and bool(dataset) and all(isinstance(part, Tensor) for part in dataset)


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a `TensorDataset` or a tuple of tensors, or an empty tuple for other data sets."""
    return dataset.tensors if type(dataset) is TensorDataset else dataset if is_tensors(dataset) else ()


def sample_count(dataset: Any) -> int:
    return len(dataset[0]) if is_tensors(dataset) else len(dataset)


def by_sample(dataset: Any) -> Any:
    return TensorDataset(*dataset) if is_tensors(dataset) else dataset


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and dictionaries in order.

    >>> list(leaves({"x": [1, 2], "y": (3, {"z": "a"})}))
    [1, 2, 3, 'a']
    """
    if isinstance(batch, list | tuple):
        for part in batch:
            yield from leaves(part)
    elif not isinstance(batch, Tensor) and isinstance(batch, Mapping):
        yield from leaves(tuple(batch.values()))
    else:
        yield batch


def first_few(ids: Ids) -> str:
    """Format the first four sample ids for a message."""
    return ", ".join(str(sample) for sample in ids[:4]) + (" ..." if len(ids) > 4 else "")


def _rows_of(tensors: tuple[Tensor, ...], ids: Ids, _epochs: Ids) -> list[Tensor]:
    where = torch.from_numpy(ids)
    return [
        tensor.index_select(0, where if tensor.is_cpu else where.to(tensor.device, non_blocking=True))
        for tensor in tensors
    ]
