"""Counted means: the only way anything is averaged here.

A mean of means is wrong if two parts differ in size. So a mean is passed as (total, count) and divided once, at the end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum and the number of things it was taken over; either may be a number or a 0-dimensional tensor on any device.

    >>> (Mean(6.0, 3) + Mean(4.0, 1)).value
    2.5
    """

    total: Tensor | float
    count: Tensor | float

    def __add__(self, other: "Mean") -> "Mean":
        """The mean over both; exact in the counts."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor | float:
        """Total over count; 0 where nothing was counted, so that an empty part never spreads NaN."""
        if isinstance(self.count, Tensor):
            return self.total / torch.where(self.count > 0, self.count, 1)
        return self.total / (self.count if self.count > 0 else 1)

    def detach(self) -> "Mean":
        """The same numbers in float64 (float32 on devices without it), cut from the autograd graph; waits for nothing."""
        return Mean(_detached(self.total), _detached(self.count))


# so that whoever looks for tensors in what a model returns finds those of its means: FSDP2, and `parallel.Called`
pytree.register_pytree_node(
    Mean,
    lambda mean: ([mean.total, mean.count], None),
    lambda parts, _: Mean(*parts),
    serialized_type_name="surefoot.mean.Mean",
)


def summed(means: Iterable[Mean]) -> Mean:
    """The counted mean over all of them; `Mean(0.0, 0)` for none.

    >>> summed([Mean(1.0, 1), Mean(9.0, 3)]).value
    2.5
    """
    return sum(means, Mean(0.0, 0))


def correction(nominal: float, counted: Tensor | float | None, *, like: Tensor) -> Tensor | float:
    """The factor that turns a total divided by `nominal` into one divided by the real count.

    1.0 where `counted` is None, because `nominal` holds; else a tensor on the device of `like`, in float32 at least (a
    count of whole numbers would be divided in float32). Where nothing was counted, a total of 0 stays 0.

    >>> float(correction(8, 6, like=torch.zeros(())))
    1.3333333730697632
    """
    if counted is None:
        return 1.0
    wide_count = torch.as_tensor(counted, device=like.device).to(torch.promote_types(like.dtype, torch.float32))
    return nominal / torch.where(wide_count > 0, wide_count, 1)


def add_each(sums: dict[str, Any], further: Mapping[str, Mean]) -> None:
    """Add counted means by name to those that are there, cut from the graph."""
    for name, mean in further.items():
        sums[name] = sums[name] + mean.detach() if name in sums else mean.detach()


def as_logged(name: str, value: Any) -> Any:
    """The present value of a user's number: detached, and safe from changes in place; `ConfigError` if it is not a number."""
    if isinstance(value, Mean):
        return Mean(as_logged(name, value.total), as_logged(name, value.count))
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).clone()
    if isinstance(value, Tensor):
        raise ConfigError(f"{name!r} cannot be logged: a tensor of shape {tuple(value.shape)} is not one number")
    try:
        return float(value.__float__())
    except (AttributeError, TypeError, ValueError) as problem:  # a text has no __float__
        raise ConfigError(f"{name!r} cannot be logged: {value!r} is not a number") from problem


def _detached(value: Tensor | float) -> Tensor | float:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
