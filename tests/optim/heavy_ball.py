"""An optimizer as somebody would add it: the class with its `OptimizerKind`, beside the declared
function that specifies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from identities import strategy_runs
from optim.heavy_ball_named import added, heavy_ball
from surefoot.optim.in_place import replace, subtract
from surefoot.optim.kinds.kind import OptimizerKind, copies


class HeavyBall(Optimizer):
    """ball = friction * ball + gradient; weight -= lr * (ball + weight_decay * weight)."""

    def __init__(self, params: Any, lr: float, friction: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "friction": friction, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found_inf = vars(self).get("found_inf")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                ball = state.setdefault("ball", torch.zeros_like(parameter, requires_grad=False))
                replace(ball, ball * group["friction"] + parameter.grad, found_inf=found_inf)
                subtract(
                    [parameter],
                    [ball],
                    rate=group["lr"],
                    decay=group["weight_decay"],
                    found_inf=found_inf,
                )


KINDS = (
    OptimizerKind(
        name="heavy_ball",
        cls=HeavyBall,
        state_bytes=copies(1),
        shardable=True,
        skip="own arithmetic",
    ),
)


def trained(**changes: Any) -> dict[str, Any]:
    """What few steps come to, of which one is bad; on every rank."""
    with added():
        return strategy_runs.trained(optimizer=heavy_ball(0.01), steps=5, bad=40, **changes)
