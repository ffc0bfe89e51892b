"""Optimizers as people write them, with a closure or without, and a run small enough to compare
them with plain loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import surefoot as sf

Batch = tuple[Tensor, Tensor]


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as in the implementation that most people copy: an optimizer
    inside, and `closure=None`.
    """

    def __init__(
        self, params: Any, base: Any = torch.optim.SGD, *, rho: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        members = [
            (group, each)
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        norm = torch.norm(torch.stack([each.grad.norm(p=2) for _, each in members]))
        for group, each in members:
            self.state[each]["old_p"] = each.data.clone()
            each.add_(each.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        closure()
        for _, each in members:
            each.data = self.state[each]["old_p"]
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Twice(torch.optim.Optimizer):
    """A gradient step with the mean of the gradients here and after a trial step: its closure is
    required, and comes first.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        loss: Tensor = closure()
        members = [(group["lr"], each) for group in self.param_groups for each in group["params"]]
        first = [each.grad.clone() for _, each in members]
        starts = [each.detach().clone() for _, each in members]
        for (lr, each), gradient in zip(members, first, strict=True):
            each.data.sub_(lr * gradient)  # through .data, which counts no version
        closure()
        for (lr, each), gradient, start in zip(members, first, starts, strict=True):
            each.data.copy_(start - lr * (gradient + each.grad) / 2)
            state = self.state[each]
            state["steps"] = state.get("steps", 0) + 1
        return loss


class HeavyBall(torch.optim.Optimizer):
    """As in somebody's package: parameters move through `.data`, and a list in the state counts on
    the host.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state["ball"] = state.get("ball", 0) * group["beta"] + each.grad
                state.setdefault("norms", []).append(float(each.grad.norm()))
                each.data = each.data - group["lr"] * state["ball"]


CLOSURES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lbfgs": partial(torch.optim.LBFGS, lr=0.3, max_iter=4, history_size=3),
    "lbfgs with a line search": partial(
        torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "sam": partial(SAM, lr=0.1, momentum=0.9),
    "twice": partial(Twice, lr=0.1),
}


def source(name: str) -> Any:
    """What a run gets as `optimizer=`."""
    if name == "of a package":
        return HeavyBall
    return sf.optim.with_closure(CLOSURES[name]) if name == "sam" else CLOSURES[name]


def data(samples: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, 4, generator=generator), torch.randint(
        3, (samples,), generator=generator
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def build(optimizer: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": net,
        "loss": loss,
        "train_data": data(),
        "batch_size": 8,
        "length": "8 steps",
        "optimizer": optimizer,
        "precision": "fp32",
        "device": "cpu",
        "console": False,
        "report": False,
    }
    return sf.Run(**(settings | changes))


def batches(**changes: Any) -> list[Batch]:
    """The samples of each step, which do not depend on the optimizer."""
    with build(sf.optim.sgd(0.1), **changes) as run:
        return [step.micro_batches[0].batch for step in run]


def losses(run: sf.Run) -> list[float]:
    with run:
        return [float(step.loss) for step in run if step.loss is not None]


def bits(run: sf.Run) -> dict[str, Any]:
    """Every bit of weights, buffers, averages and optimizer state, as a checkpoint holds them."""
    checkpoint = run.parts.packed()
    saved = {
        f"{file}/{name}": each.numpy().tobytes()
        for file, held in checkpoint.files.items()
        for name, each in held.items()
        if isinstance(each, Tensor)
    }
    return {**saved, "plain": checkpoint.state["optimizer"]}


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def plain_losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    max_norm: float | None = None,
    factors: Sequence[float] = (),
) -> list[float]:
    """The loop that torch documents for a `step(closure)`: the loss of each step's first
    evaluation.
    """
    values = []
    rates = [group["lr"] for group in optimizer.param_groups]
    for index, batch in enumerate(batches):
        if factors:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factors[index]

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            return value

        values.append(float(closure().detach()))
        optimizer.step(closure)  # type: ignore[arg-type]
    return values
