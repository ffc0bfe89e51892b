"""Means stored as (total, count) and divided once at the end. A mean of means is wrong if the parts
differ in size.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mean:
    """A total and the number of its addends. Both are Python numbers or 0-dimensional tensors on
    any device.

    >>> (Mean(6.0, 3) + Mean(4.0, 1)).value
    2.5
    """

    total: Tensor | float
    count: Tensor | float

    def __add__(self, other: "Mean") -> "Mean":
        """Return the mean with the sum of both totals and the sum of both counts."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> Tensor | float:
        """The total divided by the count. A mean of nothing is NaN, but 0 if it requires a
        gradient: a loss of nothing adds nothing to a step.

        >>> Mean(0.0, 0).value, Mean(torch.zeros((), requires_grad=True), 0).value.item()
        (nan, 0.0)
        """
        is_loss = isinstance(self.total, Tensor) and self.total.requires_grad
        return self.value_or(0.0 if is_loss else math.nan)

    def value_or(self, of_nothing: float) -> Tensor | float:
        """The total divided by the count, or `of_nothing` (0 or NaN) for a mean of nothing.

        >>> Mean(6.0, 3).value_or(0.0), Mean(0.0, 0).value_or(0.0)
        (2.0, 0.0)
        """
        if isinstance(self.count, Tensor):
            value = self.total / torch.where(self.count > 0, self.count, 1)
            return torch.where(self.count > 0, value, of_nothing) if of_nothing else value
        if self.count > 0:
            return self.total / self.count
        return self.total + of_nothing

    def detach(self) -> "Mean":
        """Return a copy detached from the autograd graph, in float64 (float32 on MPS). Does not
        synchronize the device.
        """
        return Mean(_detached(self.total), _detached(self.count))


# FSDP2 and `distributed.strategy.Called` find the tensors of a model's return value with pytree
pytree.register_pytree_node(
    Mean,
    lambda mean: ([mean.total, mean.count], None),
    lambda parts, _: Mean(*parts),
    serialized_type_name="surefoot.mean.Mean",
)


def summed(means: Iterable[Mean]) -> Mean:
    """Return the sum of means. Returns `Mean(0.0, 0)` without means.

    >>> summed([Mean(1.0, 1), Mean(9.0, 3)]).value
    2.5
    """
    return sum(means, Mean(0.0, 0))


def correction(nominal: float, counted: Tensor | float | None, *, like: Tensor) -> Tensor | float:
    """Return `nominal / counted` to correct a total that was divided by `nominal`, or 1.0 if
    `counted` is None.

    A tensor result is on the device of `like`, in the dtype of `like` but at least float32. A count
    of 0 is replaced by 1.

    >>> float(correction(8, 6, like=torch.zeros(())))
    1.3333333730697632
    """
    if counted is None:
        return 1.0
    wide = torch.promote_types(like.dtype, torch.float32)
    if not isinstance(counted, Tensor):
        return nominal / like.new_full((), counted or 1, dtype=wide)
    wide_count = counted.to(like.device, wide)
    return nominal / torch.where(wide_count > 0, wide_count, 1)


def add_each(sums: dict[str, Any], further: Mapping[str, Mean]) -> None:
    """Add detached means to the means in `sums` by name, in place."""
    for name, mean in further.items():
        sums[name] = sums[name] + mean.detach() if name in sums else mean.detach()


def append_read(lists: dict[str, list[Mean]], further: Mapping[str, Mean]) -> None:
    """Append means to the lists of their names, as Python numbers if they are on the CPU, where
    reading is cheaper.
    """
    for name, mean in further.items():
        lists.setdefault(name, []).append(Mean(_read_on_cpu(mean.total), _read_on_cpu(mean.count)))


def exact_sums(means: Mapping[str, Sequence[Mean]]) -> dict[str, list[list[float]]]:
    """Return, by name, few numbers with exactly the sum of the totals, and few with that of the
    counts. Waits for the device.

    >>> exact_sums({"loss": [Mean(1e16, 1), Mean(1.0, 1), Mean(1.0, 1), Mean(1.0, 1)]})
    {'loss': [[1.0000000000000004e+16, -1.0], [4.0]]}
    """
    read = iter(
        read_numbers(
            [part for each in means.values() for mean in each for part in (mean.total, mean.count)]
        )
    )
    numbers = {name: [(next(read), next(read)) for _ in each] for name, each in means.items()}
    return {
        name: [_exact_parts(parts) for parts in zip(*each, strict=True)]
        for name, each in numbers.items()
    }


def means_of_sums(
    of_ranks: Sequence[Mapping[str, list[list[float]]]], *, of_nothing: float = math.nan
) -> dict[str, float]:
    """Return the mean of each name, given the `exact_sums` of each rank. It is rounded once. The
    order does not matter. A mean of nothing is `of_nothing`.

    >>> means_of_sums([{"loss": [[1.0], [1]]}, {"loss": [[5.0], [2]], "accuracy": [[], [2]]}])
    {'loss': 2.0, 'accuracy': 0.0}
    """
    parts: dict[str, list[list[list[float]]]] = {}
    for sums in of_ranks:
        for name, own in sums.items():
            parts.setdefault(name, []).append(own)
    totals = {
        name: [_sum(chain(*each)) for each in zip(*own, strict=True)] for name, own in parts.items()
    }
    return {
        name: float(Mean(total, count).value_or(of_nothing))
        for name, (total, count) in totals.items()
    }


def _exact_parts(numbers: Iterable[float]) -> list[float]:
    # an expansion of the sum (Shewchuk 1997): each part is what is left, rounded
    left, parts = [float(number) for number in numbers], list[float]()
    while total := _sum(left):
        parts.append(total)
        if not math.isfinite(total):
            break
        left.append(-total)
    return parts


def _sum(numbers: Iterable[float]) -> float:
    every = list(numbers)
    try:
        return math.fsum(every)
    except (OverflowError, ValueError):  # too large, or inf - inf
        return sum(every)


def refuse_tensors(mean: Mean, returned: str) -> None:
    """Raise `ConfigError` if the total or the count is a tensor of several numbers; `returned`
    begins the message.
    """
    for part, number in (("total", mean.total), ("count", mean.count)):
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ConfigError(
                "mean-of-tensors",
                problem=f"{returned} a Mean whose {part} is a tensor of shape"
                f" {tuple(number.shape)}",
                reason="a mean needs the sum over the batch and its number of values, one number each",
                remedy="return sf.Mean(per_sample.sum(), per_sample.numel())",
                part=part,
                shape=tuple(number.shape),
            )


def as_logged(name: str, value: Any) -> Any:
    """Return a detached copy of a value that the user logs. Raises `ConfigError` if the value is
    not a scalar.
    """
    if isinstance(value, Mean):
        return Mean(as_logged(name, value.total), as_logged(name, value.count))
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).clone()
    if isinstance(value, Tensor):
        what = f"a tensor of shape {tuple(value.shape)}"
    else:
        what = repr(value)
        with suppress(AttributeError, TypeError, ValueError):  # str has no __float__
            return float(value.__float__())
    raise ConfigError(
        "logged-not-a-number",
        problem=f"{name!r} cannot be logged: {what} is not a number",
        name=name,
        value=what,
    )


Reduction = Literal["mean", "sum", "max", "min", "last"]
"""How the values of a name are put together over steps and ranks."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A number that is not averaged over the steps of a record."""

    how: Reduction
    number: Tensor | float


def add_logged(
    logged: dict[str, Any],
    values: Mapping[str, Any],
    *,
    reduce: Reduction = "mean",
    of_loss: Collection[str] = (),
) -> None:
    """Add values that the user logs to those of the same step, in place. Sums, maxima and minima
    go on; otherwise a later value replaces an earlier one. Raises `ConfigError` for a name
    `of_loss`, whose value the loss returned.

    >>> logged = {}
    >>> add_logged(logged, {"tokens": 3}, reduce="sum")
    >>> add_logged(logged, {"tokens": 4}, reduce="sum")
    >>> logged
    {'tokens': Reduced(how='sum', number=7.0)}
    """
    if reduce not in get_args(Reduction):
        raise ConfigError(
            "unknown-reduction",
            problem=f"step.log(reduce={reduce!r}): values are reduced by one of"
            f" {', '.join(get_args(Reduction))}",
            remedy="choose one; a value of your own needs another name than reduce",
            setting="reduce",
            value=repr(reduce),
        )
    for name, value in values.items():
        if name in of_loss:
            refuse_name_of_loss(name)
        number = as_logged(name, value)
        before = logged.get(name)
        if before is not None and _how(before) != reduce:
            refuse_two_ways(name)
        if reduce == "mean":
            logged[name] = number
            continue
        if isinstance(number, Mean):
            raise ConfigError(
                "reduced-mean",
                problem=f"step.log(reduce={reduce!r}): {name!r} is a Mean, with its own count",
                remedy="log a number, or leave out reduce",
                setting="reduce",
                value=name,
            )
        if before is not None and reduce != "last":
            number = _reduced(reduce, before.number, number)
        logged[name] = Reduced(reduce, number)


def refuse_two_ways(name: str) -> NoReturn:
    """Raise `ConfigError` for a value that is reduced in two ways."""
    raise ConfigError(
        "logged-two-ways",
        problem=f"step.log: {name!r} is logged with two values of reduce",
        reason="a record has one value of a name",
        remedy="use two names",
        setting="reduce",
        value=name,
    )


def refuse_name_of_loss(name: str) -> NoReturn:
    """Raise `ConfigError` for a value of `step.log` that a metric of the loss has as its name."""
    raise ConfigError(
        "logged-name-of-the-loss",
        problem=f"step.log has a value named {name!r}, and so has the dictionary of the loss",
        reason="a record has one value of a name",
        remedy="use two names",
        name=name,
    )


def _how(value: Any) -> Reduction:
    return value.how if isinstance(value, Reduced) else "mean"


def _reduced(how: Reduction, older: Tensor | float, newer: Tensor | float) -> Tensor | float:
    """Return the sum, maximum or minimum of two numbers. NaN stays NaN."""
    if how == "sum":
        return older + newer
    like = newer if isinstance(newer, Tensor) else older
    device = like.device if isinstance(like, Tensor) else None
    pair = [_on_device(each, device) for each in (older, newer)]
    return torch.maximum(*pair) if how == "max" else torch.minimum(*pair)


def _on_device(number: Tensor | float, device: torch.device | None) -> Tensor:
    """Return a number as a tensor. A float is written on the device: copying it would wait."""
    if isinstance(number, Tensor):
        return number.to(device)
    return torch.full((), number, device=device)


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return the numbers in 0-dimensional tensors, and other numbers as they are. Waits once for
    each device and dtype.

    >>> read_numbers([torch.tensor(0.5), 2, torch.tensor(3)])
    [0.5, 2, 3]
    """
    read: list[Any] = [
        value.item() if isinstance(value, Tensor) and value.is_cpu else value for value in values
    ]
    waiting: dict[Any, dict[int, Tensor]] = {}
    for index, value in enumerate(read):
        if isinstance(value, Tensor):
            waiting.setdefault((value.device, value.dtype), {})[index] = value.detach()
    for own in waiting.values():
        for index, number in zip(own, torch.stack([*own.values()]).tolist(), strict=True):
            read[index] = number
    return read


def _read_on_cpu(value: Tensor | float) -> Tensor | float:
    return value.item() if isinstance(value, Tensor) and value.is_cpu else _detached(value)


def _detached(value: Tensor | float) -> Tensor | float:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
