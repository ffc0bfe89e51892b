"""Gradients between backward and the optimizer: their norm, their limits, and their end. Nothing here waits for the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.distributed.shards import add_up, holders
from surefoot.errors import ConfigError
from surefoot.optim.in_place import read_on_cpu

Clip = tuple[Literal["norm", "value", "adaptive", "auto", "off"], float]

RECENT = 100  # norms of which "auto" takes a quantile
_TINY = np.float32(1e-6)
_LEAST_NORM = 1e-3  # of a unit's weights, below which it counts as that: weights that start at 0 could never leave it


class Clipping(Protocol):
    """One way to limit gradients; `remembered` are the tensors that a checkpoint must hold of it."""

    remembered: dict[str, Tensor]

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> Tensor | None:
        """Multiply all gradients by `factor` (1.0 or a tensor) and limit them; return the limited fraction, 0 to 1.

        `norm` is that of the gradients after `factor`. If `skipped` (0.0 or 1.0, on the device) is 1 they will not be used, and
        `remembered` does not change. Without a limit: None.
        """


def clipping_of(clip: Clip, parameters: Sequence[nn.Parameter]) -> Clipping:
    """The way that `clip` names, for the parameters that it limits (`build.limited`), or this rank's shards of them.

    >>> by_norm = clipping_of(("norm", 1.0), [nn.Parameter(torch.zeros(1))])
    >>> gradient = torch.tensor([[3.0]])
    >>> by_norm.apply([gradient], factor=1.0, norm=torch.tensor(3.0), skipped=torch.tensor(0.0)), gradient.item()
    (tensor(True), 0.9999996423721313)
    """
    wide, device = torch.promote_types(parameters[0].dtype.to_real(), torch.float32), parameters[0].device
    match clip:
        case "norm", number:
            return ByNorm(number, dtype=wide, device=device)
        case "value", number:
            return ByValue(number, holders(parameters))
        case "adaptive", number:
            return Adaptive(number, list(parameters))
        case "auto", number:
            return ByRecentNorms(number, dtype=wide, device=device)
    return Unlimited()


@dataclass
class Unlimited:
    """No limit."""

    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> None:  # noqa: ARG002
        _multiply(gradients, factor)


class ByNorm:
    """Times min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    Pascanu et al. 2013, section 3.2: https://arxiv.org/abs/1211.5063. Its constants are tensors: torch takes twice as long to
    add a number to one as to add two of them.
    """

    def __init__(self, max_norm: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._max_norm, self._tiny, self._one = torch.tensor([max_norm, 1e-6, 1.0], dtype=dtype, device=device).unbind()
        self._max_norm_on_host = np.float32(max_norm)
        self._limited, self._not_limited = torch.tensor([True, False], device=device).unbind()
        self.remembered: dict[str, Tensor] = {}

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> Tensor:  # noqa: ARG002
        """Whether the norm was above `max_norm`. One pass over the gradients; none if the CPU can tell that it was not."""
        if norm.is_cpu and norm.dtype == self._max_norm.dtype == torch.float32 and isinstance(factor, float):
            return self._apply_on_cpu(gradients, np.float32(read_on_cpu(norm)))
        limit = torch.minimum(torch.div(self._max_norm, torch.add(norm, self._tiny)), self._one)
        _multiply(gradients, limit if isinstance(factor, float) else limit * factor)
        return torch.lt(limit, self._one)

    def _apply_on_cpu(self, gradients: list[Tensor], norm: np.float32) -> Tensor:
        """The same arithmetic on the host, to the same bits; the update of a norm that is NaN is not applied."""
        if not norm + _TINY > self._max_norm_on_host:
            return self._not_limited
        torch._foreach_mul_(gradients, float(self._max_norm_on_host / (norm + _TINY)))
        return self._limited


@dataclass
class ByValue:
    """Every number into -limit ... limit, as `torch.nn.utils.clip_grad_value_` does."""

    limit: float
    group: dist.ProcessGroup | None = None  # the ranks that hold the gradients together
    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> Tensor:  # noqa: ARG002
        """The fraction of numbers that were beyond; of those of all ranks, where each holds a part."""
        if not gradients:
            return torch.zeros_like(skipped)
        _multiply(gradients, factor)
        beyond = torch.stack([torch.count_nonzero(size > self.limit) for size in torch._foreach_abs(gradients)]).sum()
        torch._foreach_clamp_min_(gradients, -self.limit)
        torch._foreach_clamp_max_(gradients, self.limit)
        return _fraction(beyond, sum(gradient.numel() for gradient in gradients), self.group)


@dataclass
class Adaptive:
    """The gradient of every unit to at most `max_ratio` times the norm of its weights: G <- G * min(1, max_ratio * max(|W|, 1e-3) / |G|).

    Brock et al. 2021, section 4.1 and equation 3 (https://arxiv.org/abs/2102.06171). A unit is a row of a matrix, an output channel
    of a convolution; a vector is one unit, as in the authors' code. `clipped` are all parameters but those of the final layer.
    """

    max_ratio: float
    clipped: list[nn.Parameter]
    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> Tensor:
        """The fraction of units that were above their limit; several ranks measure a vector together if each holds a part."""
        _multiply(gradients, factor)
        pairs = [(parameter.detach(), parameter.grad) for parameter in self.clipped if parameter.grad is not None]
        if not pairs:
            return torch.zeros_like(skipped)
        group = holders(self.clipped)
        norms = _norms_of_units([*(weight for weight, _ in pairs), *(gradient for _, gradient in pairs)], group)
        limits = torch._foreach_div(torch._foreach_clamp_min(norms[: len(pairs)], _LEAST_NORM), norms[len(pairs) :])
        torch._foreach_mul_(limits, self.max_ratio)
        torch._foreach_clamp_max_(limits, 1.0)  # a gradient of 0 has an infinite one
        torch._foreach_mul_([gradient for _, gradient in pairs], limits)
        if group is None:
            return torch.lt(torch.cat([limit.flatten() for limit in limits]), 1.0).float().mean()
        # a vector's is the same on every rank
        units = torch.cat([*(limit.flatten() for limit in limits if limit.ndim or group.rank() == 0), norm.new_ones(0)])
        return _fraction(torch.count_nonzero(torch.lt(units, 1.0)), len(units), group)


class ByRecentNorms:
    """To a norm that is a quantile of the last 100 norms of applied steps, the present one among them.

    Seetharaman et al. 2020, algorithm 1 (https://arxiv.org/abs/2007.14469), which takes it of all norms since the start. Fewer
    than 100 are enough: the first step is never limited. Between two norms the quantile is interpolated linearly, as
    `numpy.quantile` does.
    """

    def __init__(self, quantile: float, *, dtype: torch.dtype, device: torch.device) -> None:
        positions = [max(number - 1, 0) * quantile for number in range(RECENT + 1)]  # among so many norms in order
        self._lower = torch.tensor([math.floor(position) for position in positions], device=device)
        self._upper = torch.tensor([math.ceil(position) for position in positions], device=device)
        self._between = torch.tensor([position % 1.0 for position in positions], dtype=dtype, device=device)
        self._all = torch.arange(RECENT, device=device)
        self.remembered = {
            # infinite: not there yet, and last in order
            "norms": torch.full((RECENT,), math.inf, dtype=dtype, device=device),
            "entered": torch.zeros((), dtype=torch.int64, device=device),
        }

    def apply(self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor) -> Tensor:
        """Whether the norm was above the quantile. Without gradients, nothing is limited or remembered."""
        if not gradients:
            return torch.zeros_like(skipped)
        applied, entered = torch.eq(skipped, 0), self.remembered["entered"]
        replaced = torch.eq(self._all, torch.remainder(entered, RECENT)) & applied
        self.remembered["norms"] = norms = torch.where(replaced, norm, self.remembered["norms"])
        self.remembered["entered"] = entered = entered + applied
        ordered, number = norms.sort().values, entered.clamp(max=RECENT)
        lower, upper = ordered.take(self._lower.take(number)), ordered.take(self._upper.take(number))
        max_norm = torch.lerp(lower, upper, self._between.take(number))
        above = torch.gt(norm, max_norm)
        limit = torch.where(above, max_norm / norm, 1.0)
        _multiply(gradients, limit if isinstance(factor, float) else limit * factor)
        return above


def present(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The gradients that there are, in the order of their parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor], *, factor: Tensor | float) -> Tensor:
    """The 2-norm over all of them after they are multiplied by `factor` (1.0 or a tensor), on their device; 0 for none."""
    if not gradients:
        return torch.zeros(())
    numbers = torch.stack(torch._foreach_norm(gradients)) if len(gradients) > 1 else gradients[0]
    norm: Tensor = torch.linalg.vector_norm(numbers)
    return norm if isinstance(factor, float) else norm * factor


def clear(parameters: list[nn.Parameter]) -> None:
    """Let every gradient go. None, not zeros: a parameter that a step does not use must not decay or coast in it."""
    for parameter in parameters:
        parameter.grad = None


def refuse_unused(parameters: list[nn.Parameter], *, step: int) -> None:
    """Raise `ConfigError` where a step ends with gradients that no update took: the next step would add its own to them."""
    if any(parameter.grad is not None for parameter in parameters):
        clear(parameters)
        raise ConfigError(
            f"step {step} ended with gradients that no update used, and they would leak into the next step\n"
            "  call update(step) after forward_backward(step), or set them to None where they are not wanted"
        )


def _multiply(gradients: list[Tensor], factor: Tensor | float) -> None:
    if gradients and not isinstance(factor, float):
        torch._foreach_mul_(gradients, factor)


def _fraction(count: Tensor, total: int, group: dist.ProcessGroup | None) -> Tensor:
    """How many of how many, over all ranks of a group; collective."""
    if group is None:
        return count / total
    wide = torch.zeros((), dtype=torch.float64, device=count.device)
    sums = add_up(torch.stack([wide + count, wide + total]), group)
    return (sums[0] / sums[1].clamp_(min=1)).float()


def _norms_of_units(tensors: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """`_norm_of_units` of each; where ranks hold parts, that of a vector is the root of the sum of all their squares. Collective."""
    norms = [_norm_of_units(values) for values in tensors]
    vectors = [index for index, norm in enumerate(norms) if norm.ndim == 0]
    if group is None or not vectors:
        return norms
    squares = add_up(torch.stack([norms[index] for index in vectors]).to(torch.float64).square_(), group)
    for index, norm_of_all in zip(vectors, squares.sqrt_().unbind(), strict=True):
        norms[index] = norm_of_all.to(norms[index].dtype)
    return norms


def _norm_of_units(values: Tensor) -> Tensor:
    """The norm of each row, shaped so that it multiplies the row; for a vector or a number, the norm of all of it."""
    dimensions = tuple(range(1, values.ndim)) if values.ndim > 1 else None
    norm: Tensor = torch.linalg.vector_norm(values, dim=dimensions, keepdim=values.ndim > 1)
    return norm
