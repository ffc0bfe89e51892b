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
from surefoot.optim.param_groups import ParameterGroup, hidden_matrices, split_hidden, with_rates


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
        self.matrices = [
            [_as_matrix(parameter) for parameter in group["params"]] for group in hidden
        ]
        matrix_groups = [
            {**_plain(group), "params": matrices}
            for group, matrices in zip(hidden, self.matrices, strict=True)
        ]
        muon = BatchedMuon(
            matrix_groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self.parts: list[Optimizer] = [muon]
        if others:
            other_groups = [_plain(group) for group in others]
            adamw = AdamW(other_groups, lr=lr, betas=betas, eps=eps, fused=True)
            self.parts.append(adamw)
        # the groups of this optimizer have the settings of the parts, and the model's parameters
        own_groups = []
        for group, inner in zip(hidden, muon.param_groups, strict=True):
            own_groups.append({**inner, "params": group["params"], "by": "Muon"})
        if others:
            for group, inner in zip(others, adamw.param_groups, strict=True):
                own_groups.append({**inner, "params": group["params"], "by": "AdamW"})
        super().__init__(own_groups, {"lr": lr})

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
                    gradient = parameter.grad
                    matrix.grad = None if gradient is None else gradient.reshape(matrix.shape)

    def release(self) -> None:
        """Drop the gradient views of kernels, which would keep the gradients in memory until the
        next step.
        """
        # Muon's groups are the first
        for group, matrices in zip(self.param_groups, self.matrices, strict=False):
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
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Orthogonalize matrices of one shape together and update them. Parameters without a
        gradient stay.
        """
        loss = loss_of(closure)
        found_inf = vars(self).get("found_inf")
        members: list[tuple[Tensor, dict[str, Any]]] = []
        how: list[NewtonSchulz] = []
        for group in self.param_groups:
            coefficients = tuple(group["ns_coefficients"])
            how_group = NewtonSchulz(group["ns_steps"], coefficients, group["eps"])
            for parameter in group["params"]:
                if parameter.grad is not None:
                    members.append((parameter, group))
                    how.append(how_group)
        if not members:
            return loss
        if isinstance(members[0][0], Shard):  # two exchanges for all matrices
            self._step(members, how, found_inf)
            return loss
        for batch in batches([parameter.shape for parameter, _ in members], how):
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
        updates = [self._move_momentum(matrix, group, found_inf) for matrix, group in members]
        rows = [matrix.rows for matrix, _ in members if isinstance(matrix, Shard)]
        directions = orthogonal_rows(updates, rows, how) if rows else orthogonal(updates, how)
        for (matrix, group), direction in zip(members, directions, strict=True):
            shape = torch.Size(matrix.rows.shape) if isinstance(matrix, Shard) else matrix.shape
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], shape)
            decay_factor = 1 - group["lr"] * group["weight_decay"]
            if found_inf is None:
                matrix.mul_(decay_factor).add_(direction, alpha=-rate)
            else:
                replace(
                    matrix,
                    matrix.mul(decay_factor).add_(direction, alpha=-rate),
                    found_inf=found_inf,
                )

    def _move_momentum(
        self, parameter: Tensor, group: dict[str, Any], found_inf: Tensor | None
    ) -> Tensor:
        """Move the momentum toward the gradient, and return the update before orthogonalization."""
        state = self.state[parameter]
        gradient = parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = state["momentum_buffer"]
        share = 1 - group["momentum"]
        if found_inf is None:
            moved = buffer.lerp_(gradient, share)
        else:
            moved = buffer.lerp(gradient, share)
            replace(buffer, moved, found_inf=found_inf)
        update = gradient.lerp(moved, group["momentum"]) if group["nesterov"] else moved
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


def _build(groups: Sequence[ParameterGroup], lr: float, settings: Settings) -> Optimizer:
    keywords: dict[str, Any] = dict(settings)
    adamw_lr = keywords.pop("adamw_lr")
    del keywords["adamw_modules"]  # `_split` used them
    groups_with_rates = with_rates(groups, lr)
    for group, with_rate in zip(groups, groups_with_rates, strict=True):
        with_rate["hidden"] = group.hidden
        if adamw_lr is not None and not group.hidden:
            with_rate["lr"] = adamw_lr * group.rate
    return MuonWithAdamW(groups_with_rates, lr=lr, **keywords)


def _split(
    model: nn.Module, groups: Sequence[ParameterGroup], settings: Settings, behavior: int
) -> list[ParameterGroup]:
    hidden = hidden_matrices(
        model, excepted=settings["adamw_modules"], conv1d=behavior >= MUON_OF_CONV1D
    )
    return split_hidden(groups, hidden)


KINDS = (
    OptimizerKind(
        name="muon",
        cls=MuonWithAdamW,
        build=_build,
        split=_split,
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
