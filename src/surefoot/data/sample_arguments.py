"""The arguments `rng` and `step` of `__getitem__`: a NumPy generator that is set to the seed of each
sample, and the number of the step that reads it.
"""

from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from ctypes import c_uint64
from functools import cache
from inspect import Parameter, signature
from operator import is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset

# indices of 64-bit words in the state of NumPy's Philox
_POSITION = 2
_HALF = 7
_KEY = 8
_COUNTER = 10
_WORDS = 14  # all of them

_ZEROS = memoryview(array("Q", [0] * (_WORDS - _KEY - 1)))


@runtime_checkable
class Concatenated(Protocol):
    """A data set that concatenates other data sets."""

    datasets: list[Any]

    def concatenated(self) -> Mapping[str, Any]:
        """Return the concatenated data sets by name, in order."""


class SampleArguments:
    """A data set, and the arguments that each `__getitem__(index, rng, step)` in it receives;
    `dataset[index]` passes them on. A `__getitem__` may take both, one or none of them. `step` is 0
    before `set_step`.

    After `seed(bits)` the generator equals a new `np.random.Generator(np.random.Philox(key=bits))`.
    Different keys give independent numbers (Salmon et al. 2011:
    https://doi.org/10.1145/2063384.2063405). See decision 67.
    """

    def __init__(self, dataset: Any) -> None:
        self.original = dataset
        self.bit_generator = np.random.Philox(key=0)
        self.words = _words(self.bit_generator)
        self.generator = np.random.Generator(self.bit_generator)
        self.taken: list[dict[str, Any]] = []  # the arguments of each part that takes some
        self.dataset = self._pass_on(dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleArguments, (self.original,)  # the words are memory of this process

    @property
    def is_seeded(self) -> bool:
        """True if a part of the data set takes the generator."""
        return any("rng" in arguments for arguments in self.taken)

    def set_step(self, step: int) -> None:
        for arguments in self.taken:
            if "step" in arguments:
                arguments["step"] = step

    def seed(self, bits: int) -> None:
        words = self.words
        if words is None:
            self.bit_generator.state = _state(key=[bits, 0])
            return
        words[_KEY] = bits
        words[_KEY + 1 :] = _ZEROS  # the second word of the key, and the counter
        words[_POSITION] = 4  # all four buffered numbers are used
        words[_HALF] = 0

    def _pass_on(self, dataset: Any) -> Any:
        names = _taken(type(dataset))  # type: ignore[arg-type]  # for mypy, a class has no hash
        if names:
            values = {"rng": self.generator, "step": 0}
            self.taken.append({name: values[name] for name in names})
            return WithArguments(dataset, self.taken[-1])
        if type(dataset) is Subset:
            inner = self._pass_on(dataset.dataset)
            return dataset if inner is dataset.dataset else Subset(inner, dataset.indices)
        is_concatenated = isinstance(dataset, Concatenated)
        if type(dataset) not in (ConcatDataset, StackDataset) and not is_concatenated:
            return dataset
        parts = dataset.datasets
        if isinstance(parts, dict):
            before = [*parts.values()]
            after = [self._pass_on(part) for part in before]
            passing = dict(zip(parts, after, strict=True))
        else:
            before = [*parts]
            after = [self._pass_on(part) for part in before]
            passing = type(parts)(after)
        if all(map(is_, before, after)):
            return dataset
        concatenated = copy(dataset)
        concatenated.datasets = passing
        return concatenated


class WithArguments:
    """A data set whose `__getitem__` receives arguments."""

    def __init__(self, dataset: Any, arguments: Mapping[str, Any]) -> None:
        self.dataset = dataset
        self.read = dataset.__getitem__
        self.arguments = arguments

    def __getitem__(self, sample: int) -> Any:
        return self.read(sample, **self.arguments)


def _state(
    *,
    key: Sequence[int],
    counter: Sequence[int] = (0, 0, 0, 0),
    buffer: Sequence[int] = (0, 0, 0, 0),
    position: int = 4,
    half: int = 0,
) -> Any:
    return {
        "bit_generator": "Philox",
        "state": {"counter": counter, "key": key},
        "buffer": buffer,
        "buffer_pos": position,
        "has_uint32": int(half > 0),
        "uinteger": half,
    }


def _words(bit_generator: np.random.Philox) -> memoryview | None:
    """Return the memory of the state, or None if this NumPy has another layout: the setter then
    gives the same numbers in more time.
    """
    address = bit_generator.ctypes.state_address
    if id(bit_generator) + type(bit_generator).__basicsize__ - address != 8 * _WORDS:
        return None
    words = memoryview((c_uint64 * _WORDS).from_address(address)).cast("B").cast("Q")
    bit_generator.state = _state(
        counter=(10, 11, 12, 13), key=(8, 9), buffer=(3, 4, 5, 6), position=2, half=7
    )
    known = [address + 8 * _COUNTER, address + 8 * _KEY, *range(2, 7), 1 + (7 << 32), *range(8, 14)]
    is_known = words.tolist() == known
    bit_generator.state = _state(key=(0, 0))
    return words if is_known else None


@cache
def _taken(kind: Any) -> tuple[str, ...]:
    """Return which of the two arguments the `__getitem__` of a class takes."""
    try:
        parameters = signature(kind.__getitem__).parameters
    except (AttributeError, TypeError, ValueError):  # no `__getitem__`, or one in C
        return ()
    taken = []
    for name in ("rng", "step"):
        if name in parameters and parameters[name].kind is not Parameter.POSITIONAL_ONLY:
            taken.append(name)
    return tuple(taken)
