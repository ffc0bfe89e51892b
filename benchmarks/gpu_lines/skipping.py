"""A step whose gradient is not finite changes no bit of weights, buffers and optimizer.

That it waits for nothing is checked by `waiting`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import surefoot as sf
from gpu_lines.runs import breaking_run, optimizers


def check(device: str) -> str:
    """Train with each optimizer on data that break one step in five."""
    counts = []
    for name, optimizer in optimizers(device).items():
        run = breaking_run(
            device, optimizer=optimizer, ema=None if name == "schedule_free" else 0.9
        )
        skipped = 0
        with run:
            before: list[Tensor] = []
            for step in run:
                after = state_of(run)
                if step.skipped is not None and bool(step.skipped):
                    skipped += 1
                    if before:  # nothing precedes the first step
                        assert_same_bits(
                            after,
                            before,
                            f"{name}: step {step.index}, which was skipped, changed bits",
                        )
                before = after
        assert skipped >= 2, f"{name}: {skipped} steps were skipped, and one in five is broken"
        counts.append(skipped)
    return f"{len(counts)} optimizers, {sum(counts)} skipped steps"


def state_of(run: sf.Run) -> list[Tensor]:
    """Copies of all tensors of models and optimizers."""
    tensors: list[Any] = [
        tensor for model in run.state.models.values() for tensor in model.state_dict().values()
    ]
    for trained in run.state.optimizers.values():
        for state in trained.optimizer.state.values():
            tensors += [tensor for tensor in state.values() if isinstance(tensor, Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def assert_same_bits(tensors: list[Tensor], expected: list[Tensor], message: str) -> None:
    assert len(tensors) == len(expected), message
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True)), (
        message
    )
