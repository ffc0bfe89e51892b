"""Muon for hidden matrices, whole or of shards, and torch's AdamW for all else, as one optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim._muon import _adjust_lr

from surefoot.distributed.shards import Shard
from surefoot.errors import ConfigError
from surefoot.optim.in_place import loss_of, replace
from surefoot.optim.kinds.kind import OptimizerKind, Settings, copies
from surefoot.optim.newton_schulz import (
    NewtonSchulz,
    batches,
    orthogonal,
    orthogonal_rows,
    update_bytes,
)
from surefoot.optim.param_groups import Group, hidden_matrices, split_hidden, with_rates


class MuonWithAdamW(Optimizer):
    """Groups that say "hidden" are Muon's, the others AdamW's; state and groups are this optimizer's own.

    Updates are scaled to the root mean square of AdamW's, 0.2 (Liu et al. 2025, section 2.2, equation 4:
    https://arxiv.org/abs/2502.16982). A convolution's kernel is flattened to (outputs, rest), as Jordan et al. 2024 have it
    (https://kellerjordan.github.io/posts/muon/).

    With shards, each matrix is gathered completely (`BatchedMuon`). `parts` are the two optimizers; `hand_over` gives them this
    one's state and rates, so that code that loads or writes these need not know the parts.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        hidden = [group for group in groups if group["hidden"]]
        others = [group for group in groups if not group["hidden"]]
        if not hidden:
            raise ConfigError(
                "muon: no hidden matrix or kernel is trained: all there is are embeddings, a head, vectors, or of kinds unknown\n"
                "  use adamw; or name what is no hidden matrix, and all others are: --optimizer.adamw_modules MODULE"
            )
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.matrices = [[_as_matrix(parameter) for parameter in group["params"]] for group in hidden]
        flat = [{**_plain(group), "params": matrices} for group, matrices in zip(hidden, self.matrices, strict=True)]
        self.parts: list[Optimizer] = [BatchedMuon(flat, lr=lr, adjust_lr_fn="match_rms_adamw", **settings)]  # type: ignore[arg-type]
        if others:
            self.parts.append(AdamW([_plain(group) for group in others], lr=lr, betas=betas, eps=eps, fused=True))
        own = [
            {**inner, "params": group["params"], "by": by}
            for part, part_groups, by in zip(self.parts, (hidden, others), ("Muon", "AdamW"), strict=False)
            for inner, group in zip(part.param_groups, part_groups, strict=True)
        ]
        super().__init__(own, {"lr": lr})

    def hand_over(self) -> None:
        for part in self.parts:
            part.state.clear()
        inner_groups = [(part, inner) for part in self.parts for inner in part.param_groups]
        for (part, inner), group in zip(inner_groups, self.param_groups, strict=True):
            inner |= {key: value for key, value in group.items() if key not in ("params", "by")}
            for matrix, parameter in zip(inner["params"], group["params"], strict=True):
                part.state[matrix] = self.state[parameter]
                if matrix is not parameter:
                    matrix.grad = None if parameter.grad is None else parameter.grad.reshape(matrix.shape)

    def release(self) -> None:
        """Drop the views of kernels' gradients: until the next step they would hold their memory once more."""
        for group, matrices in zip(self.param_groups, self.matrices, strict=False):  # Muon's groups are the first
            for parameter, matrix in zip(group["params"], matrices, strict=True):
                if matrix is not parameter:
                    matrix.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with each part. A run steps or skips them one by one: `skip_step.PartByPart`."""
        loss = loss_of(closure)
        self.hand_over()
        for part in self.parts:
            part.step()
        self.release()
        return loss


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
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        iteration = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, {**settings, **iteration})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, found_inf = loss_of(closure), vars(self).get("found_inf")
        members = [(each, group) for group in self.param_groups for each in group["params"] if each.grad is not None]
        if not members:
            return loss
        how = [NewtonSchulz(group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"]) for _, group in members]
        one_batch = isinstance(members[0][0], Shard)  # two exchanges for all
        for batch in [range(len(members))] if one_batch else batches([each.shape for each, _ in members], how):
            self._step([members[index] for index in batch], [how[index] for index in batch], found_inf)
        return loss

    def _step(
        self, members: Sequence[tuple[Tensor, dict[str, Any]]], how: Sequence[NewtonSchulz], found_inf: Tensor | None
    ) -> None:
        """The step of some parameters, each with its group."""
        updates = [self._momentum_moved(each, group, found_inf) for each, group in members]
        shards = [each.rows for each, _ in members if isinstance(each, Shard)]
        directions = orthogonal_rows(updates, shards, how) if shards else orthogonal(updates, how)
        for (each, group), direction in zip(members, directions, strict=True):
            shape = torch.Size(each.rows.shape) if isinstance(each, Shard) else each.shape
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
            decay_factor = 1 - group["lr"] * group["weight_decay"]
            if found_inf is None:
                each.mul_(decay_factor).add_(direction, alpha=-rate)
            else:
                replace(each, each.mul(decay_factor).add_(direction, alpha=-rate), found_inf=found_inf)

    def _momentum_moved(self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
        """The matrix to orthogonalize for one parameter; moves its momentum."""
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


def _as_matrix(parameter: nn.Parameter) -> nn.Parameter:
    """A matrix itself; a kernel's numbers seen as one of (outputs, rest)."""
    if parameter.ndim == 2:
        return parameter
    if not parameter.is_contiguous():
        raise ConfigError(
            f"muon: a kernel of shape {list(parameter.shape)} does not lie row by row in memory (channels last?)\n"
            "  give the model contiguous weights, or use adamw"
        )
    matrix = parameter.detach().flatten(1)
    if isinstance(parameter, Shard):
        shape = (parameter.rows.shape[0], matrix.shape[1])
        return Shard(matrix, with_changes(parameter.rows, shape=shape), called=parameter.called)
    return nn.Parameter(matrix)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "hidden"}


def _build(groups: Sequence[Group], lr: float, settings: Settings) -> Optimizer:
    own: dict[str, Any] = dict(settings)
    of_adamw, _ = own.pop("adamw_lr"), own.pop("adamw_modules")
    rated = with_rates(groups, lr)
    for group, rated_group in zip(groups, rated, strict=True):
        rated_group["hidden"] = group.hidden
        if of_adamw is not None and not group.hidden:
            rated_group["lr"] = of_adamw * group.rate
    return MuonWithAdamW(rated, lr=lr, **own)


KINDS = (
    OptimizerKind(
        name="muon",
        cls=MuonWithAdamW,
        build=_build,
        split=lambda model, groups, own: split_hidden(groups, hidden_matrices(model, excepted=own["adamw_modules"])),
        shardable=True,
        on_shards="hidden matrices are gathered whole, each by one rank, made orthogonal there and spread again",
        skip="part by part",
    ),
    OptimizerKind(
        cls=BatchedMuon,
        state_bytes=copies(1),
        update_bytes=update_bytes,
        shardable=False,
        on_shards="it trains a part of what muon does",
        skip="own arithmetic off the CPU",
    ),
)
