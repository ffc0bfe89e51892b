"""Ignite: an Engine over a function that makes one step."""

from __future__ import annotations

from typing import Any

from ignite.engine import Engine, Events
from torch import Tensor, nn

from loops.training import CLIP, WINDOW, Training


def ignite(training: Training) -> nn.Module:
    """The step is the plain loop's; a handler prints the loss every 50 steps."""
    model = training.work.model()
    optimizer = training.optimizer(model)
    scheduler = training.scheduler(optimizer)

    def made(_: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = training.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        return loss

    def told(engine: Any) -> None:
        print(
            f"step {engine.state.iteration}/{training.steps} loss {engine.state.output.item():.4f}"
        )

    engine = Engine(made)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=WINDOW), told)
    engine.run(training.batches(), max_epochs=1, epoch_length=training.steps)
    return model
