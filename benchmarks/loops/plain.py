"""The loop that one writes by hand, and the same with torch's fused AdamW."""

from __future__ import annotations

import torch
from torch import nn

from loops.training import CLIP, WINDOW, Training


def plain(training: Training, *, fused: bool | None = None) -> nn.Module:
    """Plain PyTorch: clip_grad_norm_, AdamW with its defaults, LambdaLR, the loss printed every 50
    steps.
    """
    model = training.work.model()
    optimizer = training.optimizer(model, fused=fused)
    scheduler = training.scheduler(optimizer)
    for step, batch in enumerate(training.batches(), start=1):
        optimizer.zero_grad()
        loss = training.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        if step % WINDOW == 0:
            print(f"step {step}/{training.steps} loss {loss.item():.4f}")
    return model


def fused(training: Training) -> nn.Module:
    """The same with AdamW(fused=True)."""
    return plain(training, fused=True)
