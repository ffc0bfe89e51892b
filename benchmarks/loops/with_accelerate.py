"""Accelerate: a plain loop through its wrappers."""

from __future__ import annotations

from accelerate import Accelerator
from torch import nn

from loops.training import CLIP, WINDOW, Training


def accelerate(training: Training) -> nn.Module:
    """Model, optimizer, scheduler and loader prepared; its backward and clipping; the loss printed
    every 50 steps.
    """
    accelerator = Accelerator(cpu=True)
    model = training.work.model()
    bare = training.optimizer(model)
    wrapped, optimizer, scheduler = accelerator.prepare(model, bare, training.scheduler(bare))
    batches = training.batches()
    for step, batch in enumerate(
        accelerator.prepare(batches) if training.loader else batches, start=1
    ):
        optimizer.zero_grad()
        loss = training.loss(wrapped, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        if step % WINDOW == 0:
            accelerator.print(f"step {step}/{training.steps} loss {loss.item():.4f}")
    return model
