"""Data sets that make a whole micro-batch at once: tensors in memory, and whatever has a method `gather`."""

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
    """A data set that makes a whole micro-batch from ids and epochs.

    It is not seeded: derive its random numbers from (seed, epoch, id), as in `np.random.default_rng((seed, epoch, id))`.
    """

    def __len__(self) -> int:
        """How many samples there are."""

    def gather(self, ids: Ids, epochs: Ids) -> Any:
        """The batch of these samples, each as it is in its epoch."""


def gather_fn(dataset: Any) -> Gather | None:
    """How to gather from a data set, a function of ids and epochs; None where it must be read sample by sample.

    Tensors (a `TensorDataset`, or a tuple of tensors), a data set with `gather`, and a `Subset` or a `Mixture` of such.
    """
    if tensors := tensors_of(dataset):
        return partial(_rows_of, tensors)
    if type(dataset) is Subset and (gather_samples := gather_fn(dataset.dataset)) is not None:
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return lambda ids, epochs: gather_samples(indices[ids], epochs)
    return dataset.gather if isinstance(dataset, Gathers) else None


def is_tensors(dataset: Any) -> bool:
    """Whether a data set is a tuple of tensors."""
    return isinstance(dataset, tuple) and bool(dataset) and all(isinstance(part, Tensor) for part in dataset)


def tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    """The columns of a `TensorDataset` or a tuple of tensors; empty for other data sets."""
    return dataset.tensors if type(dataset) is TensorDataset else dataset if is_tensors(dataset) else ()


def sample_count(dataset: Any) -> int:
    """How many samples a data set has; of a tuple of tensors their rows."""
    return len(dataset[0]) if is_tensors(dataset) else len(dataset)


def by_sample(dataset: Any) -> Any:
    """A data set that `dataset[sample]` reads: a tuple of tensors becomes a `TensorDataset`."""
    return TensorDataset(*dataset) if is_tensors(dataset) else dataset


def leaves(batch: Any) -> Iterator[Any]:
    """All leaves of nested lists, tuples and dictionaries, in order.

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
    """The numbers of some samples for a message.

    >>> first_few(np.arange(5))
    '0, 1, 2, 3 ...'
    """
    return ", ".join(str(sample) for sample in ids[:4]) + (" ..." if len(ids) > 4 else "")


def _rows_of(tensors: tuple[Tensor, ...], ids: Ids, _epochs: Ids) -> list[Tensor]:
    where = torch.from_numpy(ids)
    return [
        tensor.index_select(0, where if tensor.is_cpu else where.to(tensor.device, non_blocking=True))
        for tensor in tensors
    ]
