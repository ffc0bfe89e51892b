"""torchtnt: an AutoUnit."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtnt 0.2.4 imports pkg_resources
    from torchtnt.framework.auto_unit import AutoUnit
    from torchtnt.framework.train import train

from loops.training import CLIP, WINDOW, Training


class Unit(AutoUnit):  # type: ignore[misc]  # it has no types where it is not installed
    def __init__(self, training: Training) -> None:
        super().__init__(
            module=training.work.model(),
            device=torch.device("cpu"),
            clip_grad_norm=CLIP,
            step_lr_interval="step",
        )
        self.training_ = training

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        optimizer = self.training_.optimizer(module)
        return optimizer, self.training_.scheduler(optimizer)

    def compute_loss(self, _: Any, data: Any) -> tuple[Tensor, None]:
        return self.training_.loss(self.module, data), None

    def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:  # noqa: ARG002
        if (step + 1) % WINDOW == 0:
            print(f"step {step + 1}/{self.training_.steps} loss {results.loss.item():.4f}")


def torchtnt(training: Training) -> nn.Module:
    """Its clipping and its stepping of the scheduler; the loss printed every 50 steps."""
    unit = Unit(training)
    train(unit, training.batches(), max_epochs=1)
    return unit.module  # type: ignore[no-any-return]
