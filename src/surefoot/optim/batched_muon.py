"""Muon of whole matrices or of shards of them: momentum, made orthogonal, for the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr

from surefoot.optim.in_place import replace
from surefoot.optim.newton_schulz import NewtonSchulz, batches, orthogonal
from surefoot.optim.sharded_muon import orthogonal_rows
from surefoot.sharding import Shard


class BatchedMuon(Optimizer):
    """`torch.optim.Muon` (2.13), on the CPU to the bit, with matrices of one shape made orthogonal together.

    Its parameters are all whole, or all `Shard`s of matrices: then a step is collective, and momentum stays with its rows. An
    attribute `found_inf` of 1 makes a step change no bit; it must be the same on every rank.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        settings |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **settings})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, or none where `found_inf` says so."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = vars(self).get("found_inf")
        held = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not held:
            return loss
        how = [NewtonSchulz(group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"]) for _, group in held]
        if isinstance(held[0][0], Shard):  # two exchanges for all
            self._step(held, how, found_inf)
            return loss
        for places in batches([each.shape for each, _ in held], how):
            self._step([held[place] for place in places], [how[place] for place in places], found_inf)
        return loss

    def _step(
        self, held: Sequence[tuple[Tensor, dict[str, Any]]], how: Sequence[NewtonSchulz], found_inf: Tensor | None
    ) -> None:
        """The step of some parameters, each with its group."""
        updates = [self._momentum_moved(each, group, found_inf) for each, group in held]
        shards = [each.rows for each, _ in held if isinstance(each, Shard)]
        directions = orthogonal_rows(updates, shards, how) if shards else orthogonal(updates, how)
        for (each, group), direction in zip(held, directions, strict=True):
            shape = torch.Size(each.rows.shape) if isinstance(each, Shard) else each.shape
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
            kept = 1 - group["lr"] * group["weight_decay"]
            if found_inf is None:
                each.mul_(kept).add_(direction, alpha=-rate)
            else:
                replace(each, each.mul(kept).add_(direction, alpha=-rate), found_inf=found_inf)

    def _momentum_moved(self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
        """What is to be made orthogonal, of one parameter; moves its momentum."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, share = state["momentum_buffer"], 1 - group["momentum"]
        moved: Tensor = buffer.lerp_(gradient, share) if found_inf is None else buffer.lerp(gradient, share)
        if found_inf is not None:
            replace(buffer, moved, found_inf=found_inf)
        update: Tensor = gradient.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        return update.to(torch.bfloat16)
