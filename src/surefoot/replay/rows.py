"""A batch cut by its samples: the rows of its tensors, and one of them in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_VALUES = 6  # of a tensor, in words


def rows(batch: Any, chosen: Sequence[int], *, of: int) -> Any | None:
    """The batch of some of its `of` samples; None where it does not say which rows are whose.

    That it does where every tensor in it (in nested tuples, lists and dictionaries) has `of` as its first dimension. What is no
    tensor goes with all samples alike.

    >>> rows((torch.tensor([[1, 1], [2, 2]]), torch.tensor([5, 6])), [1], of=2)
    (tensor([[2, 2]]), tensor([6]))
    >>> rows(torch.zeros(7, 2), [1], of=2) is None
    True
    """
    tensors = list(named_tensors(batch))
    if not tensors or any(tensor.ndim == 0 or len(tensor) != of for _, tensor in tensors):
        return None
    return _cut(batch, torch.tensor(list(chosen)))


def named_tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a batch with the expression that reaches each.

    >>> [name for name, _ in named_tensors({"x": torch.zeros(1), "y": (torch.zeros(1), 2)})]
    ["batch['x']", "batch['y'][0]"]
    """
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from named_tensors(value, f"{name}[{place}]")


def in_words(batch: Any) -> str:
    """A batch of one sample: the shapes of its tensors and their first values, a line each; of any data set.

    >>> print(in_words((torch.tensor([[0.5, 2.0]]), torch.tensor([3]))))
    batch[0]  (2)  0.5, 2
    batch[1]  3
    """
    lines = []
    for name, tensor in named_tensors(batch):
        held = tensor.detach()[0] if tensor.ndim else tensor.detach()
        values = held.reshape(-1)[:_VALUES].tolist()
        shown = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
        more = " ..." if held.numel() > _VALUES else ""
        shape = f"({' x '.join(map(str, held.shape))})  " if held.ndim else ""
        lines.append(f"{name}  {shape}{shown}{more}")
    return "\n".join(lines) or repr(batch)


def _cut(batch: Any, chosen: Tensor) -> Any:
    if isinstance(batch, Tensor):
        return batch.index_select(0, chosen.to(batch.device))
    if isinstance(batch, dict):
        return {key: _cut(value, chosen) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_cut(value, chosen) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_cut(value, chosen) for value in batch)
    return batch
