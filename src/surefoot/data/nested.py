"""Walks over nested batches: mappings, dataclasses, named tuples, lists, tuples, and objects that
move themselves by `.to`.

Every part of surefoot that looks into a batch uses these functions, so all of them know the same
kinds of batches.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Movable(Protocol):
    """A batch or a part of one that moves itself: `PackedSequence`, `BatchEncoding`, a graph, a
    tensor.
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batch on a device."""


def has_fields(value: Any) -> bool:
    """Return True for an instance of a dataclass, and False for the class itself."""
    return is_dataclass(value) and not isinstance(value, type)


def is_opaque(value: Any) -> bool:
    """Return True for an object other than a container that moves itself: its rows need not be its
    samples.
    """
    if type(value) in (list, tuple, dict):  # a test for a protocol takes 8 us
        return False
    is_open = has_fields(value) or isinstance(value, Tensor | Mapping | type)
    return not is_open and isinstance(value, Movable)


def children(value: Any) -> dict[str, Any] | None:
    """Return the parts of a container by the Python expression that reads them from it, or None for
    a leaf.

    >>> children({"x": 1}), children((2, 3)), children(4)
    ({"['x']": 1}, {'[0]': 2, '[1]': 3}, None)
    """
    if isinstance(value, Tensor | str | bytes):
        return None
    if has_fields(value):
        return {f".{field.name}": getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)  # of a named tuple
        if names is None:
            return {f"[{index}]": part for index, part in enumerate(value)}
        return {f".{name}": part for name, part in zip(names, value, strict=True)}
    if is_opaque(value) and hasattr(value, "__dict__"):
        return {f".{name}": part for name, part in vars(value).items()}
    return None


def rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """Return a container like `value`, which has `children` and is not opaque, with other parts in
    their order.
    """
    if has_fields(value):
        clone = copy(value)  # no __init__: it might compute fields anew
        for field, part in zip(fields(value), parts, strict=True):
            object.__setattr__(clone, field.name, part)
        return clone
    if isinstance(value, Mapping):
        named = dict(zip(value, parts, strict=True))
        if type(value) is dict or not isinstance(value, MutableMapping):
            return named
        clone = copy(value)
        clone.update(named)
        return clone
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def leaves(batch: Any, *, into_opaque: bool = True) -> Iterator[Any]:
    """Yield the leaves of a nested batch in order; with `into_opaque`, also the attributes of
    objects that move themselves.

    >>> list(leaves({"x": [1, 2], "y": (3, {"z": "a"})}))
    [1, 2, 3, 'a']
    """
    parts = None if is_opaque(batch) and not into_opaque else children(batch)
    if parts is None:
        yield batch
    for part in (parts or {}).values():
        yield from leaves(part, into_opaque=into_opaque)


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield all tensors in a batch, also those in attributes of objects that move themselves."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


def named_tensors(batch: Any, name: str = "batch") -> list[tuple[str, Tensor]]:
    """Return the tensors in a batch, each with the Python expression that reads the tensor.

    >>> [name for name, _ in named_tensors({"x": torch.zeros(1), "y": (torch.zeros(1), 2)})]
    ["batch['x']", "batch['y'][0]"]
    """
    if isinstance(batch, Tensor):
        return [(name, batch)]
    named = []
    for key, part in (children(batch) or {}).items():
        named += named_tensors(part, f"{name}{key}")
    return named


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return a batch with changed tensors; objects other than containers stay as they are."""
    if isinstance(batch, Tensor):
        return change(batch)
    parts = None if is_opaque(batch) else children(batch)
    if parts is None:
        return batch
    return rebuilt(batch, [map_tensors(change, part) for part in parts.values()])


def select_rows(batch: Any, chosen: Sequence[int], *, of: int) -> Any | None:
    """Return a batch of the chosen samples, or None if rows do not correspond to samples.

    Rows correspond to samples if every tensor has size `of` in its first dimension, and no part is
    opaque (a graph). A list of `of` texts or numbers is cut too. Other values belong to all
    samples.

    >>> select_rows((torch.tensor([[1, 1], [2, 2]]), ["a", "b"]), [1], of=2)
    (tensor([[2, 2]]), ['b'])
    >>> select_rows(torch.zeros(7, 2), [1], of=2) is None
    True
    """
    parts = [*leaves(batch, into_opaque=False)]
    if any(map(is_opaque, parts)):
        return None
    rows = [part for part in parts if isinstance(part, Tensor)]
    if not rows or any(tensor.ndim == 0 or len(tensor) != of for tensor in rows):
        return None
    index = torch.tensor(list(chosen), dtype=torch.int64)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.index_select(0, index.to(value.device))
        inner = children(value)
        if inner is None:
            return value
        if isinstance(value, list) and len(value) == of and all(map(_is_plain, value)):
            return [value[row] for row in chosen]
        return rebuilt(value, [cut(part) for part in inner.values()])

    return cut(batch)


def _is_plain(entry: Any) -> bool:
    """Return True for a text or a number, for example."""
    return not isinstance(entry, Tensor) and children(entry) is None
