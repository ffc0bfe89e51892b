"""Muon for hidden matrices, sharded or not, and torch's AdamW for all other parameters, in one
optimizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as with_changes
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim._muon import _adjust_lr

from surefoot.config.behavior import MUON_OF_CONV1D
from surefoot.distributed.shards import Shard
from surefoot.errors import ConfigError, Setting
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
    """Muon for groups with `hidden` set and AdamW for other groups; this optimizer owns the state
    and the groups.

    Muon's updates are scaled to AdamW's root mean square, 0.2 (Liu et al., 2025, section 2.2,
    equation 4: https://arxiv.org/abs/2502.16982). A convolution's kernel is flattened to (outputs,
    rest), as in Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/). Sharded matrices
    are gathered completely (`BatchedMuon`). `hand_over` passes the state and learning rates of this
    optimizer to `parts`, the two inner optimizers.
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
                "muon-without-matrices",
                problem="muon: no hidden matrix or kernel is trained, only embeddings, a head,"
                " vectors or layers of unknown types",
                remedy=[
                    Setting("optimizer.name", "adamw"),
                    (
                        "name the modules for AdamW, so that all other matrices count as hidden:",
                        Setting("optimizer.adamw_modules", ("MODULE",)),
                    ),
                ],
                setting="optimizer.name",
                value="muon",
            )
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.matrices = [
            [_as_matrix(parameter) for parameter in group["params"]] for group in hidden
        ]
        flat = [
            {**_plain(group), "params": matrices}
            for group, matrices in zip(hidden, self.matrices, strict=True)
        ]
        self.parts: list[Optimizer] = [
            BatchedMuon(flat, lr=lr, adjust_lr_fn="match_rms_adamw", **settings)  # type: ignore[arg-type]
        ]
        if others:
            self.parts.append(
                AdamW([_plain(group) for group in others], lr=lr, betas=betas, eps=eps, fused=True)
            )
        own = [
            {**inner, "params": group["params"], "by": by}
            for part, part_groups, by in zip(
                self.parts, (hidden, others), ("Muon", "AdamW"), strict=False
            )
            for inner, group in zip(part.param_groups, part_groups, strict=True)
        ]
        super().__init__(own, {"lr": lr})

    def hand_over(self) -> None:
        """Give groups, state and gradients to the inner Muon and AdamW; a parameter of more than
        two dimensions becomes a matrix.
        """
        for part in self.parts:
            part.state.clear()
        inner_groups = [(part, inner) for part in self.parts for inner in part.param_groups]
        for (part, inner), group in zip(inner_groups, self.param_groups, strict=True):
            inner |= {key: value for key, value in group.items() if key not in ("params", "by")}
            for matrix, parameter in zip(inner["params"], group["params"], strict=True):
                part.state[matrix] = self.state[parameter]
                if matrix is not parameter:
                    matrix.grad = (
                        None if parameter.grad is None else parameter.grad.reshape(matrix.shape)
                    )

    def release(self) -> None:
        """Drop the gradient views of kernels, which would keep the gradients in memory until the
        next step.
        """
        for group, matrices in zip(
            self.param_groups, self.matrices, strict=False
        ):  # Muon's groups are the first
            for parameter, matrix in zip(group["params"], matrices, strict=True):
                if matrix is not parameter:
                    matrix.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step Muon and AdamW; return the closure's loss, or None without a closure."""
        loss = loss_of(closure)
        self.hand_over()
        for part in self.parts:
            part.step()
        self.release()
        return loss


class BatchedMuon(Optimizer):
    """`torch.optim.Muon` (2.13), with matrices of one shape orthogonalized together: see
    `orthogonal` for its bits on the CPU.

    Its parameters are all unsharded, or all `Shard`s of matrices. With shards, a step is
    collective, and momentum stays sharded. If the attribute `found_inf` (equal on every rank) is 1,
    a step changes no bit.
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
        settings = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
        }
        iteration = {
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, {**settings, **iteration})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Orthogonalize matrices of one shape together and update them. Parameters without a
        gradient stay.
        """
        loss, found_inf = loss_of(closure), vars(self).get("found_inf")
        members = [
            (each, group)
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        if not members:
            return loss
        how = [
            NewtonSchulz(group["ns_steps"], tuple(group["ns_coefficients"]), group["eps"])
            for _, group in members
        ]
        one_batch = isinstance(members[0][0], Shard)  # shards: two exchanges for all matrices
        for batch in (
            [range(len(members))]
            if one_batch
            else batches([each.shape for each, _ in members], how)
        ):
            self._step(
                [members[index] for index in batch], [how[index] for index in batch], found_inf
            )
        return loss

    def _step(
        self,
        members: Sequence[tuple[Tensor, dict[str, Any]]],
        how: Sequence[NewtonSchulz],
        found_inf: Tensor | None,
    ) -> None:
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
                replace(
                    each, each.mul(decay_factor).add_(direction, alpha=-rate), found_inf=found_inf
                )

    def _momentum_moved(
        self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None
    ) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, share = state["momentum_buffer"], 1 - group["momentum"]
        moved: Tensor = (
            buffer.lerp_(gradient, share) if found_inf is None else buffer.lerp(gradient, share)
        )
        if found_inf is not None:
            replace(buffer, moved, found_inf=found_inf)
        update: Tensor = gradient.lerp(moved, group["momentum"]) if group["nesterov"] else moved
        return update.to(torch.bfloat16)


def _as_matrix(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.ndim == 2:
        return parameter
    if not parameter.is_contiguous():
        raise ConfigError(
            "muon-kernel-not-contiguous",
            problem=f"muon: a kernel of shape {list(parameter.shape)} is not contiguous in memory"
            " (channels last?)",
            remedy="give the model contiguous weights, or use adamw",
            shape=list(parameter.shape),
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
        split=lambda model, groups, own, behavior: split_hidden(
            groups,
            hidden_matrices(
                model, excepted=own["adamw_modules"], conv1d=behavior >= MUON_OF_CONV1D
            ),
        ),
        shardable=True,
        on_shards="each hidden matrix gathered on one rank, orthogonalized there and redistributed",
        skip="part by part",
    ),
    OptimizerKind(
        cls=BatchedMuon,
        state_bytes=copies(1),
        update_bytes=update_bytes,
        shardable=False,
        on_shards="it is only one part of muon",
        skip="own arithmetic off the CPU",
    ),
)
