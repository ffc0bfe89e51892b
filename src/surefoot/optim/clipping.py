"""Gradient norms, gradient clipping and the clearing of gradients, without waiting for the
device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.distributed.shards import add_up, aligned, holders
from surefoot.errors import ConfigError
from surefoot.optim.in_place import read_on_cpu

Clip = tuple[Literal["norm", "value", "adaptive", "auto", "off"], float]

RECENT = 100  # norms in the quantile of "auto"
_TINY = np.float32(1e-6)
# lower bound on a unit's weight norm, so that weights that start at 0 can change
_LEAST_NORM = 1e-3


class Clipping(Protocol):
    """A gradient-clipping method; checkpoints save its `remembered` tensors."""

    remembered: dict[str, Tensor]

    def apply(
        self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor
    ) -> Tensor | None:
        """Multiply all gradients by `factor` (1.0 or a tensor), clip them, and return the clipped
        fraction, 0 to 1.

        `norm` is the gradient norm after `factor`. If `skipped` (0.0 or 1.0, on the device) is 1,
        the update will be skipped, and `remembered` does not change. Returns None if the method has
        no limit.
        """


def clipping_of(clip: Clip, parameters: Sequence[nn.Parameter]) -> Clipping:
    """Return the clipping method of `clip`; `parameters` are the clipped parameters or their shards
    on this rank.

    >>> by_norm = clipping_of(("norm", 1.0), [nn.Parameter(torch.zeros(1))])
    >>> gradient = torch.tensor([[3.0]])
    >>> (
    ...     by_norm.apply(
    ...         [gradient], factor=1.0, norm=torch.tensor(3.0), skipped=torch.tensor(0.0)
    ...     ),
    ...     gradient.item(),
    ... )
    (tensor(True), 0.9999996423721313)
    """
    wide = torch.promote_types(parameters[0].dtype.to_real(), torch.float32)
    device = parameters[0].device
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
    """A clipping method without a limit."""

    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(
        self,
        gradients: list[Tensor],
        *,
        factor: Tensor | float,
        norm: Tensor,  # noqa: ARG002
        skipped: Tensor,  # noqa: ARG002
    ) -> None:
        _multiply(gradients, factor)


class ByNorm:
    """Scaling by min(1, max_norm / (norm + 1e-6)) (Pascanu et al., 2013, section 3.2:
    https://arxiv.org/abs/1211.5063).
    """

    def __init__(self, max_norm: float, *, dtype: torch.dtype, device: torch.device) -> None:
        # tensors, since torch adds two tensors twice as fast as a tensor and a number
        numbers = torch.tensor([max_norm, 1e-6, 1.0], dtype=dtype, device=device)
        self._max_norm, self._tiny, self._one = numbers.unbind()
        self._max_norm_on_host = np.float32(max_norm)
        self._limited, self._not_limited = torch.tensor([True, False], device=device).unbind()
        self.remembered: dict[str, Tensor] = {}

    def apply(
        self,
        gradients: list[Tensor],
        *,
        factor: Tensor | float,
        norm: Tensor,
        skipped: Tensor,  # noqa: ARG002
    ) -> Tensor:
        """Clip like `clip_grad_norm_`, but skip a multiplication by 1 on the CPU. Return whether
        the norm exceeded `max_norm`.
        """
        if (
            norm.is_cpu
            and norm.dtype == self._max_norm.dtype == torch.float32
            and isinstance(factor, float)
        ):
            return self._apply_on_cpu(gradients, np.float32(read_on_cpu(norm)))  # to the same bits
        limit = torch.minimum(torch.div(self._max_norm, torch.add(norm, self._tiny)), self._one)
        _multiply(gradients, limit if isinstance(factor, float) else limit * factor)
        return torch.lt(limit, self._one)

    def _apply_on_cpu(self, gradients: list[Tensor], norm: np.float32) -> Tensor:
        if not norm + _TINY > self._max_norm_on_host:  # or norm is NaN: the update is skipped
            return self._not_limited
        torch._foreach_mul_(gradients, float(self._max_norm_on_host / (norm + _TINY)))
        return self._limited


@dataclass
class ByValue:
    """Clipping of every gradient element to -limit ... limit, as in
    `torch.nn.utils.clip_grad_value_`.
    """

    limit: float
    group: dist.ProcessGroup | None = None  # ranks that share the gradients
    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(
        self,
        gradients: list[Tensor],
        *,
        factor: Tensor | float,
        norm: Tensor,  # noqa: ARG002
        skipped: Tensor,
    ) -> Tensor:
        """Clip and return the fraction of elements beyond the limit, over all ranks if gradients
        are sharded.
        """
        if not gradients:
            return torch.zeros_like(skipped)
        _multiply(gradients, factor)
        sizes = torch._foreach_abs(gradients)
        beyond = torch.stack([torch.count_nonzero(size > self.limit) for size in sizes]).sum()
        torch._foreach_clamp_min_(gradients, -self.limit)
        torch._foreach_clamp_max_(gradients, self.limit)
        total = sum(gradient.numel() for gradient in gradients)
        return _fraction(beyond, total, self.group)


@dataclass
class Adaptive:
    """Clipping of each unit's gradient norm to `max_ratio` times the norm of its weights.

    The formula is G <- G * min(1, max_ratio * max(|W|, 1e-3) / |G|) (Brock et al., 2021, section 4.1, equation 3:
    https://arxiv.org/abs/2102.06171). A unit is a matrix row, an output channel of a convolution,
    or a complete vector, as in the authors' code. `clipped` holds all parameters except the final
    layer's.
    """

    max_ratio: float
    clipped: list[nn.Parameter]
    remembered: dict[str, Tensor] = field(default_factory=dict)

    def apply(
        self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor
    ) -> Tensor:
        """Clip and return the fraction of units above their limit; ranks that share a vector
        measure its norm together.
        """
        _multiply(gradients, factor)
        clipped = [parameter for parameter in self.clipped if parameter.grad is not None]
        if not clipped:
            return torch.zeros_like(skipped)
        weights = [parameter.detach() for parameter in clipped]
        own_gradients = present(clipped)
        group = holders(self.clipped)
        norms = _norms_of_units([*weights, *own_gradients], group)
        weight_norms = torch._foreach_clamp_min(norms[: len(weights)], _LEAST_NORM)
        limits = torch._foreach_div(weight_norms, norms[len(weights) :])
        torch._foreach_mul_(limits, self.max_ratio)
        torch._foreach_clamp_max_(limits, 1.0)  # a gradient of 0 has an infinite limit
        torch._foreach_mul_(own_gradients, limits)
        if group is None:
            units = torch.cat([limit.flatten() for limit in limits])
            return torch.lt(units, 1.0).float().mean()
        # all ranks have the same limit for a vector, so only rank 0 counts it
        counted = [limit.flatten() for limit in limits if limit.ndim or group.rank() == 0]
        units = torch.cat([*counted, norm.new_ones(0)])
        return _fraction(torch.count_nonzero(torch.lt(units, 1.0)), len(units), group)


class ByRecentNorms:
    """Clipping to a quantile of the norms of the last 100 applied steps, including the current
    step.

    Seetharaman et al., 2020, algorithm 1 (https://arxiv.org/abs/2007.14469), uses all norms since
    the start. Fewer than 100 norms are enough, and the first step is never clipped. The quantile is
    interpolated linearly, as in `numpy.quantile`.
    """

    def __init__(self, quantile: float, *, dtype: torch.dtype, device: torch.device) -> None:
        # the place of the quantile among `number` sorted norms, between two whole indices
        positions = [max(number - 1, 0) * quantile for number in range(RECENT + 1)]
        fractions = [position % 1.0 for position in positions]
        self._lower = torch.tensor([math.floor(position) for position in positions], device=device)
        self._upper = torch.tensor([math.ceil(position) for position in positions], device=device)
        self._between = torch.tensor(fractions, dtype=dtype, device=device)
        self._all = torch.arange(RECENT, device=device)
        self.remembered = {
            # missing norms are infinite, so that they sort last
            "norms": torch.full((RECENT,), math.inf, dtype=dtype, device=device),
            "entered": torch.zeros((), dtype=torch.int64, device=device),
        }

    def apply(
        self, gradients: list[Tensor], *, factor: Tensor | float, norm: Tensor, skipped: Tensor
    ) -> Tensor:
        """Clip and return whether the norm exceeded the quantile; a step without gradients is not
        remembered.
        """
        if not gradients:
            return torch.zeros_like(skipped)
        # the norm of an applied step takes the place of the oldest one
        applied = torch.eq(skipped, 0)
        entered = self.remembered["entered"]
        is_replaced = torch.eq(self._all, torch.remainder(entered, RECENT)) & applied
        norms = torch.where(is_replaced, norm, self.remembered["norms"])
        entered = entered + applied
        self.remembered["norms"] = norms
        self.remembered["entered"] = entered
        ordered = norms.sort().values
        number = entered.clamp(max=RECENT)
        lower = ordered.take(self._lower.take(number))
        upper = ordered.take(self._upper.take(number))
        max_norm = torch.lerp(lower, upper, self._between.take(number))
        above = torch.gt(norm, max_norm)
        limit = torch.where(above, max_norm / norm, 1.0)
        _multiply(gradients, limit if isinstance(factor, float) else limit * factor)
        return above


def present(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None, in the order of their parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor], *, factor: Tensor | float) -> Tensor:
    """Return the 2-norm (0 without gradients) of all gradients times `factor` (1.0 or a tensor), on
    their device.
    """
    if not gradients:
        return torch.zeros(())
    if len(gradients) > 1:
        numbers = torch.stack(torch._foreach_norm(aligned(gradients)))
    else:
        numbers = gradients[0]
    norm: Tensor = torch.linalg.vector_norm(numbers)
    return norm if isinstance(factor, float) else norm * factor


def clear(parameters: list[nn.Parameter]) -> None:
    """Set every gradient to None; with zeros, weight decay and momentum would move an unused
    parameter.
    """
    for parameter in parameters:
        parameter.grad = None


def refuse_unused(parameters: list[nn.Parameter], *, step: int) -> None:
    """Raise `ConfigError` if gradients remain at the end of a step, because the next step would
    accumulate onto them.
    """
    if any(parameter.grad is not None for parameter in parameters):
        clear(parameters)
        raise ConfigError(
            "gradients-unused",
            problem=f"step {step} ended with gradients that no update used",
            reason="they would leak into the next step",
            remedy="call update(step) after forward_backward(step), or set unwanted gradients to"
            " None",
            step=step,
        )


def _multiply(gradients: list[Tensor], factor: Tensor | float) -> None:
    if gradients and not isinstance(factor, float):
        torch._foreach_mul_(gradients, factor)


def _fraction(count: Tensor, total: int, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return count / total
    wide = torch.zeros((), dtype=torch.float64, device=count.device)
    sums = add_up(torch.stack([wide + count, wide + total]), group)
    return (sums[0] / sums[1].clamp_(min=1)).float()


def _norms_of_units(tensors: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    norms = [_norm_of_units(values) for values in aligned(tensors)]
    vectors = [index for index, norm in enumerate(norms) if norm.ndim == 0]
    if group is None or not vectors:
        return norms
    own_squares = torch.stack([norms[index] for index in vectors]).to(torch.float64).square_()
    squares = add_up(own_squares, group)
    for index, vector_norm in zip(vectors, squares.sqrt_().unbind(), strict=True):
        norms[index] = vector_norm.to(norms[index].dtype)
    return norms


def _norm_of_units(values: Tensor) -> Tensor:
    norm: Tensor
    if values.ndim > 1:
        dimensions = tuple(range(1, values.ndim))
        norm = torch.linalg.vector_norm(values, dim=dimensions, keepdim=True)
    else:
        norm = torch.linalg.vector_norm(values)
    return norm
