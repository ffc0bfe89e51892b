"""AdamW without a falling learning rate: gradients are computed between a fast point and its
running average.

AdamW without momentum updates z, the fast point. The average of all z is x, and the model is
evaluated at x. Gradients are computed at y = (1 - beta1) z + beta1 x (Defazio et al., 2024,
equations 2 to 4: https://arxiv.org/abs/2405.15682). The parameters are y and the state holds z.
`ScheduleFreeAverage` computes x = y + (1 - 1 / beta1) (z - y) out of place.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.optim.clipping import present
from surefoot.optim.ema import ModelCopy
from surefoot.optim.in_place import add_to_each, by_group, count_step, move_towards, subtract
from surefoot.optim.kinds.kind import OptimizerKind, copies


class ScheduleFree(Optimizer):
    """Algorithm 1 of Defazio et al., 2024: after step t, x moves toward z by the fraction lr_t^2 /
    (lr_1^2 + ... + lr_t^2).

    Weight decay is computed at y, as in the authors' code. Parameters without a gradient do not
    count the step. If the attribute `found_inf` is 1, a step changes no bit.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @by_group
    def step(
        self, parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        """Update the fast weights `z` and the parameters between them and their average, except
        where `found_inf` is 1.
        """
        states = [self.state[parameter] for parameter in parameters]
        gradients = present(parameters)
        squares = [state["exp_avg_sq"] for state in states]
        fast = [state["z"] for state in states]
        beta1, beta2 = group["betas"]
        rate = group["lr"]

        count_step([state["step"] for state in states], found_inf=found_inf)
        weight_sums = [state["weight_sum"] for state in states]
        add_to_each(weight_sums, torch.full_like(weight_sums[0], rate * rate), found_inf=found_inf)
        move_towards(
            squares,
            torch._foreach_mul(gradients, gradients),
            share=1.0 - beta2,
            found_inf=found_inf,
        )

        corrections = (1.0 - beta2 ** torch.stack([state["step"] for state in states])).unbind()
        sums = torch.stack(weight_sums)
        # a sum is 0 if all learning rates were 0, or if the first step is skipped
        towards_fast = rate * rate / sums.clamp(min=torch.finfo(sums.dtype).tiny)
        roots = torch._foreach_div(squares, corrections)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(gradients, roots)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        # as in the authors' code: y moves toward z by c, and by 1 - beta1 (1 - c) of z's own step
        steps_of_y = torch._foreach_sub(parameters, fast)
        torch._foreach_mul_(steps_of_y, towards_fast.unbind())
        shares_of_z = rate * (1.0 - beta1 * (1.0 - towards_fast))
        torch._foreach_add_(steps_of_y, torch._foreach_mul(updates, shares_of_z.unbind()))
        subtract(parameters, steps_of_y, found_inf=found_inf)
        subtract(fast, updates, rate=rate, found_inf=found_inf)

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a copy of the parameter as `z`, and zeros for the squares, the step and the sum of
        weights.
        """
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "weight_sum": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "z": parameter.detach().clone(memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }


class ScheduleFreeAverage:
    """A model copy with the evaluated weights x; call `refresh` before you evaluate, sample from or
    save `model`. A parameter that is frozen by then has no x: the copy has its present value.
    """

    def __init__(self, model_copy: ModelCopy, optimizer: ScheduleFree) -> None:
        self.model_copy = model_copy
        self.model = model_copy.model
        self.optimizer = optimizer
        self.updates = 0
        self.precise: dict[nn.Parameter, Tensor] = {}  # the optimizer's state has it all
        average_of = dict(model_copy.pairs)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter, float]] = []  # and the weight of z
        for group in optimizer.param_groups:
            weight = 1.0 - 1.0 / group["betas"][0]
            for parameter in group["params"]:
                self._pairs.append((parameter, average_of[parameter], weight))
        self._moved = bool(optimizer.state)  # True if the optimizer was rebuilt during the run

    def load(self, updates: int) -> None:
        """Do nothing: the copy was loaded, and the optimizer's state is loaded."""

    def restart(self, live: nn.Module) -> None:
        self.model_copy.copy_parameters()
        self._moved = True
        self.refresh(live)

    def update(self, applied: Tensor) -> None:  # noqa: ARG002
        """Record a step; a skipped step moves neither y nor z, so x does not change either."""
        self._moved = True

    @torch.no_grad()
    def refresh(self, live: nn.Module) -> None:
        """Compute the averaged weights from `z` if a step was taken since the last call, and copy
        everything else from `live`.
        """
        if self._moved:
            for parameter, average, weight in self._pairs:
                fast = self.optimizer.state.get(parameter, {}).get("z")
                average.copy_(parameter if fast is None else torch.lerp(parameter, fast, weight))
            self._moved = False
        averaged = {parameter for parameter, _, _ in self._pairs if parameter.requires_grad}
        self.model_copy.copy_rest(live, averaged=averaged)


KINDS = (
    OptimizerKind(
        name="schedule_free",
        cls=ScheduleFree,
        state_bytes=copies(2),
        shardable=True,
        skip="own arithmetic",
        average=ScheduleFreeAverage,
    ),
)
