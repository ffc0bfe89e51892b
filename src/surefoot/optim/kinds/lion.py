"""Lion: each element of a parameter moves by the learning rate, in the direction of a momentum's
sign.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.optim.clipping import present
from surefoot.optim.in_place import by_group, move_towards, subtract
from surefoot.optim.kinds.kind import OptimizerKind, copies


class Lion(Optimizer):
    """Lion, with one momentum as state (Chen et al., 2023, algorithm 2:
    https://arxiv.org/abs/2302.06675).

    direction = sign(beta1 * momentum + (1 - beta1) * gradient); weight -= lr * (direction +
    weight_decay * weight); momentum = beta2 * momentum + (1 - beta2) * gradient. If the attribute
    `found_inf` is 1, a step changes no bit.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> weight.grad = torch.tensor([1e-9, -5.0])
    >>> Lion([weight], lr=0.25).step(), weight.detach()
    (None, tensor([0.7500, 1.2500]))
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @by_group
    def step(
        self, parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        """Move parameters along the sign of the interpolated momentum, except where `found_inf` is
        1. https://arxiv.org/abs/2302.06675
        """
        gradients = present(parameters)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        beta1, beta2 = group["betas"]
        directions = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
        torch._foreach_sign_(directions)
        subtract(
            parameters,
            directions,
            rate=group["lr"],
            decay=group["weight_decay"],
            found_inf=found_inf,
        )
        move_towards(momenta, gradients, share=1.0 - beta2, found_inf=found_inf)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}


KINDS = (
    OptimizerKind(
        name="lion", cls=Lion, state_bytes=copies(1), shardable=True, skip="own arithmetic"
    ),
)
