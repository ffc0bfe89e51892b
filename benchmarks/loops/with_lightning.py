"""Lightning: its Trainer, and Fabric, for loops of one's own."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from loops.training import CLIP, WINDOW, Training


class Module(lightning.LightningModule):  # type: ignore[misc]  # it has no types where it is not installed
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_ = training
        self.model = training.work.model()

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.training_.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.training_.optimizer(self.model)
        scheduler = self.training_.scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def lightning_trainer(training: Training) -> nn.Module:
    """`self.log` and a CSVLogger that writes every 50 steps; no bar, no summary, no checkpoints."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module(training)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that there could be more workers, and that the loss is logged
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=training.steps,
            gradient_clip_val=CLIP,
            logger=CSVLogger(training.place),
            log_every_n_steps=WINDOW,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, training.batches())
    return module.model


def fabric(training: Training) -> nn.Module:
    """A plain loop through Fabric's wrappers, its clipping, and a CSVLogger every 50 steps."""
    fabric_ = lightning.Fabric(accelerator="cpu", devices=1, loggers=FabricLogger(training.place))
    fabric_.launch()
    model = training.work.model()
    bare = training.optimizer(model)
    wrapped, optimizer = fabric_.setup(model, bare)
    scheduler = training.scheduler(bare)
    batches = training.batches()
    for step, batch in enumerate(
        fabric_.setup_dataloaders(batches) if training.loader else batches, start=1
    ):
        optimizer.zero_grad()
        loss = training.loss(wrapped, batch)
        fabric_.backward(loss)
        fabric_.clip_gradients(wrapped, optimizer, max_norm=CLIP)
        optimizer.step()
        scheduler.step()
        if step % WINDOW == 0:
            fabric_.log("loss", loss.item(), step=step)
    return model
