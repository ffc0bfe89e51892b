"""Statistics of tensors, and a description of a sample."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.data.nested import named_tensors

_TOGETHER = 1 << 22  # values per float64 computation
_VALUES = 6  # values of a tensor in a description


@dataclass(frozen=True)
class Tally:
    """Statistics of `numbers` values. `nans`, `plus` and `minus` count NaN, infinity and minus
    infinity.

    Mean, root mean square and largest absolute value are computed over the finite values. `zeros`
    is the fraction of values that are 0.
    """

    numbers: int = 0
    mean: float = 0.0
    rms: float = 0.0
    largest: float = 0.0
    zeros: float = 0.0
    nans: int = 0
    plus: int = 0
    minus: int = 0

    @property
    def nonfinite(self) -> int:
        """The number of nonfinite values.

        >>> tally(torch.tensor([1.0, math.inf, math.nan])).nonfinite
        2
        """
        return self.nans + self.plus + self.minus

    @property
    def only_minus(self) -> bool:
        """True if all nonfinite values are minus infinity, as in a mask before a softmax."""
        return self.minus > 0 and not (self.nans or self.plus)

    def __add__(self, other: "Tally") -> "Tally":
        """Return the statistics over both sets of values.

        >>> both = tally(torch.tensor([3.0, 0.0])) + tally(torch.tensor([-4.0, 0.0]))
        >>> both.mean, round(both.rms, 12), both.largest, both.zeros
        (-0.25, 2.5, 4.0, 0.5)
        """
        own = self.numbers - self.nonfinite
        others = other.numbers - other.nonfinite
        finite = max(own + others, 1)
        every = max(self.numbers + other.numbers, 1)
        own_rms = self.rms * math.sqrt(own / finite)
        other_rms = other.rms * math.sqrt(others / finite)
        return Tally(
            numbers=self.numbers + other.numbers,
            mean=(self.mean * own + other.mean * others) / finite,
            rms=math.hypot(own_rms, other_rms),
            largest=max(self.largest, other.largest),
            zeros=(self.zeros * self.numbers + other.zeros * other.numbers) / every,
            nans=self.nans + other.nans,
            plus=self.plus + other.plus,
            minus=self.minus + other.minus,
        )


def tally(tensor: Tensor) -> Tally:
    """Return the statistics of a floating-point tensor; wait for the device.

    >>> stats = tally(torch.tensor([[1.0, -3.0], [0.0, math.nan]]))
    >>> stats.numbers, round(stats.mean, 3), stats.largest, stats.zeros, stats.nans
    (4, -0.667, 3.0, 0.25, 1)
    """
    x = tensor.detach()
    if x.numel() > _TOGETHER:
        return sum((tally(part) for part in torch.split(x.reshape(-1), _TOGETHER)), Tally())
    good = torch.isfinite(x)
    bad = x.numel() - int(good.sum())
    nans = 0
    plus = 0
    finite = x
    if bad:
        nans = int(torch.isnan(x).sum())
        plus = int((x == math.inf).sum())
        finite = x[good]
    minus = bad - nans - plus
    wide = _wide(x)
    finite = finite.to(wide)
    if not finite.numel():
        return Tally(numbers=x.numel(), nans=nans, plus=plus, minus=minus)
    numbers = (
        finite.mean(),
        finite.square().mean().sqrt(),
        finite.abs().max(),
        (x == 0).to(wide).mean(),
    )
    mean, rms, largest, zeros = torch.stack(numbers).tolist()
    return Tally(x.numel(), mean, rms, largest, zeros, nans, plus, minus)


def wide_norm(tensor: Tensor) -> float:
    """Return the norm of a tensor, in float64 if the device supports float64; wait for the
    device.
    """
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=_wide(tensor)))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def bad_rows(tensor: Tensor, rows: int) -> list[int] | None:
    """Return the rows (dimension 0) with a nonfinite value, or None unless the tensor has `rows`
    rows.

    >>> bad_rows(torch.tensor([[0.0], [math.inf]]), 2), bad_rows(torch.zeros(3), 2)
    ([1], None)
    """
    if tensor.ndim == 0 or len(tensor) != rows:
        return None
    is_good = torch.isfinite(tensor.detach().reshape(rows, -1)).all(dim=1)
    return [int(row) for row in (~is_good).nonzero()]


def floating(nested: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested tuples, lists and dictionaries.

    >>> [len(tensor) for tensor in floating({"a": (torch.zeros(2), 3), "b": torch.tensor([1])})]
    [2]
    """
    leaves = pytree.tree_leaves(nested)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def describe_sample(batch: Any) -> str:
    """Return a text for a batch of one sample: one line per tensor, with its shape and first
    values.

    >>> print(describe_sample((torch.tensor([[0.5, 2.0]]), torch.tensor([3]))))
    batch[0]  (2)  0.5, 2
    batch[1]  3
    """
    lines = []
    for name, tensor in named_tensors(batch):
        sample = tensor.detach()
        if sample.ndim:
            sample = sample[0]
        line = name
        if sample.ndim:
            line += f"  ({' x '.join(map(str, sample.shape))})"
        texts = []
        for value in sample.reshape(-1)[:_VALUES].tolist():
            texts.append(f"{value:.4g}" if isinstance(value, float) else str(value))
        line += f"  {', '.join(texts)}"
        if sample.numel() > _VALUES:
            line += " ..."
        lines.append(line)
    return "\n".join(lines) or repr(batch)
