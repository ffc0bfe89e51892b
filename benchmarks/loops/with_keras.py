"""Keras on torch: `compile` and `fit`, around the same module, with Keras's own AdamW and
clipping.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # read when keras is imported

import keras
import torch
from torch import Tensor, nn

from loops.training import CLIP, DECAY, RATE, WINDOW, Asked, Training


class Model(keras.Model):  # type: ignore[misc]  # it has no types where it is not installed
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_ = training
        self.wrapped = keras.layers.TorchModuleWrapper(training.work.model())

    def call(self, inputs: Tensor) -> Any:
        return self.wrapped(inputs)

    def compute_loss(
        self,
        x: Any,  # noqa: ARG002
        y: Any,
        y_pred: Any,
        sample_weight: Any = None,  # noqa: ARG002
        training: bool = True,  # noqa: ARG002
    ) -> Tensor:
        return self.training_.compared(y_pred, y)


class Factor(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The rates of all steps, ready: a step has its number as a tensor."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.rates = torch.tensor(
            [RATE * training.factor(step) for step in range(training.steps + 1)]
        )

    def __call__(self, step: Tensor) -> Tensor:
        return self.rates[step]


class Told(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints; and takes the time, where no loader is asked."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_ = training

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if not self.training_.loader:
            self.training_.asked(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % WINDOW == 0:
            print(f"step {batch + 1}/{self.training_.steps} loss {float(logs['loss']):.4f}")


def keras_fit(training: Training) -> nn.Module:
    """Without a bar; a callback prints the mean loss every 50 steps. In memory: arrays that lie in
    the order of the run.
    """
    model = Model(training)
    model.compile(
        optimizer=keras.optimizers.AdamW(
            Factor(training), weight_decay=DECAY, epsilon=1e-8, global_clipnorm=CLIP
        ),
        jit_compile=False,
    )
    if training.loader:
        model.fit(training.batches(), verbose=0, shuffle=False, callbacks=[Told(training)])
    else:
        order = torch.cat(Asked(training).ids)
        work = training.work
        model.fit(
            work.inputs[order],
            work.targets[order],
            batch_size=work.batch_size,
            verbose=0,
            shuffle=False,
            callbacks=[Told(training)],
        )
    return model.wrapped.module  # type: ignore[no-any-return]
