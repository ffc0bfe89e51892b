"""Muon for hidden matrices and torch's AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from surefoot.errors import ConfigError
from surefoot.optim.batched_muon import BatchedMuon
from surefoot.sharding import Shard


class MuonWithAdamW(Optimizer):
    """Groups that say "hidden" are Muon's, the others AdamW's; state and groups are this optimizer's own.

    Updates are scaled to the root mean square of AdamW's, 0.2 (Liu et al. 2025, section 2.2, equation 4:
    https://arxiv.org/abs/2502.16982). A convolution's kernel is flattened to (outputs, rest), as Jordan et al. 2024 have it
    (https://kellerjordan.github.io/posts/muon/).

    Of shards each matrix is gathered whole (`batched_muon.py`). `parts` are the two optimizers; each `hand_over` gives them
    what this one holds, so that whatever loads a state, or writes a rate, need not know of them.
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
        fused: bool = True,
    ) -> None:
        hidden = [group for group in groups if group["hidden"]]
        others = [group for group in groups if not group["hidden"]]
        if not hidden:
            raise ConfigError(
                "muon: no hidden matrix or kernel is trained: all there is are embeddings, a head, vectors, or of kinds unknown\n"
                "  use adamw; or name what is no hidden matrix, and all others are: --optimizer.adamw_for MODULE"
            )
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        self.matrices = [[_as_matrix(parameter) for parameter in group["params"]] for group in hidden]
        flat = [{**_plain(group), "params": held} for group, held in zip(hidden, self.matrices, strict=True)]
        self.parts: list[Optimizer] = [BatchedMuon(flat, lr=lr, adjust_lr_fn="match_rms_adamw", **settings)]  # type: ignore[arg-type]
        if others:
            self.parts.append(AdamW([_plain(group) for group in others], lr=lr, betas=betas, eps=eps, fused=fused))
        own = [
            {**inner, "params": group["params"], "by": by}
            for part, given, by in zip(self.parts, (hidden, others), ("Muon", "AdamW"), strict=False)
            for inner, group in zip(part.param_groups, given, strict=True)
        ]
        super().__init__(own, {"lr": lr})

    def hand_over(self) -> None:
        """Give the parts the rates, gradients and state that are here."""
        inner_groups = [inner for part in self.parts for inner in part.param_groups]
        for inner, group in zip(inner_groups, self.param_groups, strict=True):
            inner |= {key: value for key, value in group.items() if key not in ("params", "by")}
        muon = self.parts[0]
        for part in self.parts:
            part.state.clear()
        for inner, group in zip(inner_groups, self.param_groups, strict=True):
            part = muon if group["by"] == "Muon" else self.parts[-1]
            for held, parameter in zip(inner["params"], group["params"], strict=True):
                part.state[held] = self.state[parameter]
                if held is not parameter:
                    held.grad = None if parameter.grad is None else parameter.grad.reshape(held.shape)

    def let_go(self) -> None:
        """Give up the views of kernels' gradients: kept until the next step, they would take their memory once more."""
        for group, matrices in zip(self.param_groups, self.matrices, strict=False):  # Muon's groups are the first
            for parameter, held in zip(group["params"], matrices, strict=True):
                if held is not parameter:
                    held.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with each part. A run steps or skips them one by one: `skipping.PartByPart`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.hand_over()
        for part in self.parts:
            part.step()
        self.let_go()
        return loss


def _as_matrix(parameter: nn.Parameter) -> nn.Parameter:
    """A matrix itself; a kernel's numbers seen as one of (outputs, rest)."""
    if parameter.ndim == 2:
        return parameter
    seen: Tensor = parameter.detach()
    if not seen.is_contiguous():
        raise ConfigError(
            f"muon: a kernel of shape {list(parameter.shape)} does not lie row by row in memory (channels last?)\n"
            "  give the model contiguous weights, or use adamw"
        )
    rest = parameter.shape[1:].numel()
    matrix = seen.view(len(seen), rest)
    if isinstance(parameter, Shard):
        return Shard(matrix, replace(parameter.rows, shape=(parameter.rows.shape[0], rest)), called=parameter.called)
    return nn.Parameter(matrix)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "hidden"}
