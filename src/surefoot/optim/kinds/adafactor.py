"""Adafactor with torch's arithmetic; torch's own class waits for four values per parameter on the
host.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.optim.in_place import by_group, count_step, replace, subtract
from surefoot.optim.kinds.kind import OptimizerKind, Shapes


class Adafactor(Optimizer):
    """Adafactor with torch's deviations (Shazeer and Stern 2018, algorithm 4:
    https://arxiv.org/abs/1804.04235).

    The mean squared gradient of a matrix is approximated by the product of its row means and column
    means, divided by their mean. Rows and columns are the last two dimensions. If the attribute
    `found_inf` is 1, a step changes no bit.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        clip_threshold: float = 1.0,
        min_scale: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {
            "beta2_decay": beta2_decay,
            "clip_threshold": clip_threshold,
            "min_scale": min_scale,
        }
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @by_group
    def step(
        self, parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        count_step([self.state[parameter]["step"] for parameter in parameters], found_inf=found_inf)
        updates = [self._update(parameter, group, found_inf) for parameter in parameters]
        subtract(
            parameters, updates, decay=group["lr"] * group["weight_decay"], found_inf=found_inf
        )

    def _update(self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        smallest = torch.finfo(parameter.dtype).eps
        share = state["step"] ** group["beta2_decay"]
        if gradient.ndim > 1:
            for key, dimension in (("row_var", -1), ("col_var", -2)):
                mean = torch.linalg.vector_norm(gradient, dim=dimension, keepdim=True).square_()
                mean.div_(gradient.shape[dimension])
                replace(state[key], state[key].lerp(mean, share), found_inf=found_inf)
            square = state["row_var"] @ state["col_var"]
            square.div_(state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=smallest))
        else:
            variance = state["variance"]
            replace(variance, variance.lerp(gradient.square(), share), found_inf=found_inf)
            square = variance.clone()
        update: Tensor = square.clamp_(min=smallest * smallest).rsqrt_().mul_(gradient)
        scale = _root_mean_square(parameter).clamp_(min=group["min_scale"])
        excess = (_root_mean_square(update) / group["clip_threshold"]).clamp_(min=1.0)
        rate = state["step"].rsqrt().clamp_(max=group["lr"])
        return update.mul_((scale * rate).div_(excess))

    def first_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return zero variances: by row and by column of a matrix, and whole for a vector."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter, requires_grad=False)}
        *outer, rows, columns = parameter.shape
        return {
            "step": step,
            "row_var": parameter.new_zeros([*outer, rows, 1], requires_grad=False),
            "col_var": parameter.new_zeros([*outer, 1, columns], requires_grad=False),
        }


def _root_mean_square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
    return norm


def _variances(shape: Sequence[int]) -> int:
    """Return the number of variances: of each row and each column, or of each element of a
    vector.
    """
    elements = prod(shape)
    if len(shape) < 2 or not elements:
        return elements
    return elements // shape[-1] + elements // shape[-2]


def _state_bytes(_: Adafactor, shapes: Shapes) -> int:
    return sum(_variances(shape) * item_bytes for shape, item_bytes in shapes)


KINDS = (
    OptimizerKind(
        name="adafactor",
        cls=Adafactor,
        state_bytes=_state_bytes,
        shardable=False,
        on_shards="its row and column means, and its step sizes, need whole matrices",
        skip="own arithmetic",
    ),
)
