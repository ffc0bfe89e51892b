"""Transformers: its Trainer, with a model that is none of its own."""

from __future__ import annotations

from typing import Any

import accelerate  # noqa: F401  # its Trainer needs it, and says so only when it is made
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from loops.training import CLIP, WINDOW, Training


def hf_trainer(training: Training) -> nn.Module:
    """Logs every 50 steps; no bar, no evaluation, no checkpoints. AdamW is the fused one, as is its
    default.
    """

    class Ours(Trainer):  # type: ignore[misc]  # it has no types where it is not installed
        def get_train_dataloader(self) -> Any:
            return training.batches()

        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,  # noqa: ARG002
            **_: Any,
        ) -> Tensor:
            return training.loss(model, inputs)

    model = training.work.model()
    optimizer = training.optimizer(model, fused=True)
    trainer = Ours(
        model=model,
        args=TrainingArguments(
            output_dir=str(training.place),
            max_steps=training.steps,
            per_device_train_batch_size=training.work.batch_size,
            max_grad_norm=CLIP,
            logging_steps=WINDOW,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        optimizers=(optimizer, training.scheduler(optimizer)),
    )
    trainer.train()
    return model
