"""The argument `rng` of `__getitem__`: a NumPy generator that is set to the seed of each sample."""

from collections.abc import Mapping
from copy import copy
from functools import cache, partial
from inspect import Parameter, signature
from operator import is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset


@runtime_checkable
class Concatenated(Protocol):
    """A data set that concatenates other data sets."""

    datasets: list[Any]

    def concatenated(self) -> Mapping[str, Any]:
        """Return the concatenated data sets by name, in order."""


class SampleRNG:
    """A data set, and the generator that each `__getitem__(index, rng)` in it receives; `dataset[index]` passes the generator on.

    After `seed(bits)`, which takes 0.6 us, the generator equals a new `np.random.Generator(np.random.Philox(key=bits))`, which takes
    20 us. Philox computes its numbers from a key and a counter, and different keys give independent numbers (Salmon et al. 2011:
    https://doi.org/10.1145/2063384.2063405). The data sets in a `Mixture` and in torch's `Subset`, `ConcatDataset` and
    `StackDataset` also receive the generator.

    >>> class Noisy:
    ...     def __getitem__(self, index, rng):
    ...         return index + rng.random()
    >>> samples = SampleRNG(Subset(Noisy(), [5]))
    >>> samples.seed(7)
    >>> samples.is_used, samples.dataset[0] == 5 + np.random.Generator(np.random.Philox(key=7)).random()
    (True, True)
    """

    def __init__(self, dataset: Any) -> None:
        self.generator, self.key = np.random.Generator(np.random.Philox(key=0)), [0, 0]
        counter = {"counter": [0] * 4, "key": self.key}  # as lists, which are read faster than arrays
        buffer = {"buffer": [0] * 4, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}  # an empty one
        self.state = {"bit_generator": "Philox", "state": counter, **buffer}
        self.dataset = _pass_on(dataset, self.generator)
        self.is_used = self.dataset is not dataset

    def seed(self, bits: int) -> None:
        self.key[0] = bits
        self.generator.bit_generator.state = self.state


class Drawing:
    """A data set whose `__getitem__` receives the generator."""

    def __init__(self, dataset: Any, generator: np.random.Generator) -> None:
        self.dataset, self.read = dataset, partial(dataset.__getitem__, rng=generator)

    def __getitem__(self, sample: int) -> Any:
        return self.read(sample)


def _pass_on(dataset: Any, generator: np.random.Generator) -> Any:
    if _takes_rng(type(dataset)):
        return Drawing(dataset, generator)
    if type(dataset) is Subset:
        inner = _pass_on(dataset.dataset, generator)
        return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
    if type(dataset) not in (ConcatDataset, StackDataset) and not isinstance(dataset, Concatenated):
        return dataset
    own, inner = copy(dataset), dataset.datasets
    before = [*inner.values()] if isinstance(inner, dict) else [*inner]
    after = [_pass_on(part, generator) for part in before]
    own.datasets = dict(zip(inner, after, strict=True)) if isinstance(inner, dict) else type(inner)(after)
    return dataset if all(map(is_, before, after)) else own


@cache
def _takes_rng(kind: Any) -> bool:
    try:
        parameter = signature(kind.__getitem__).parameters.get("rng")
    except (AttributeError, TypeError, ValueError):  # no `__getitem__`, or one in C
        return False
    return parameter is not None and parameter.kind is not Parameter.POSITIONAL_ONLY
