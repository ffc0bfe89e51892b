"""Try the samples of a micro-batch one by one: the loss of each, the gradient of each, and the faulty ones.

The plain models are called, with the random numbers of the micro-batch; all is afterwards as it was.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _NormBase

from surefoot.data.loader import MicroBatch
from surefoot.distributed.strategy import Alone
from surefoot.replay.hooks import parameters_of, value_of
from surefoot.replay.tensor_stats import rows, wide_norm
from surefoot.seeding import fold, seed_generators
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import Step, forward_backward

Mode = Literal["evaluation", "training"]
"""training: as in the step, but batch normalisation by its running statistics, since one sample has none of its own."""


class Probe:
    """One micro-batch of a step, cut by samples if its rows `can_cut`; use it inside `preserved`, which gives `put_back`."""

    def __init__(self, step: Step, micro_batch: MicroBatch, put_back: Callable[..., None]) -> None:
        self.step, self.micro_batch, self.put_back = step, micro_batch, put_back
        self.count = len(micro_batch.sample_ids)
        self.can_cut = self.count > 0 and rows(micro_batch.batch, [0], of=self.count) is not None
        # with a loss scale a single sample's gradient would overflow where the mean's does not
        plain = replace(step._task.precision, loss_scale=None)
        self.task = replace(step._task, forward=sole_or_all(step.state.models), ranks=Alone(), precision=plain)

    def batch(self, chosen: Sequence[int]) -> Any:
        full = self.micro_batch.batch
        return full if len(chosen) == self.count else rows(full, chosen, of=self.count)

    def loss(self, chosen: Sequence[int], *, mode: Mode) -> float | None:
        """The mean loss over some of the samples; None if it has no targets, or cannot be computed for so few."""
        task, loss = self.task, self.task.loss
        assert loss is not None  # who makes steps again has one

        def passed() -> float | None:
            seed_generators(fold(task.key, self.step.index, self.micro_batch.index))
            with torch.no_grad(), task.precision.autocast():
                value, count = value_of(loss(task.forward, self.batch(chosen)))
            return None if count == 0 else value

        return self._try(mode, passed)

    def gradient_norm(self, chosen: Sequence[int], *, mode: Mode) -> float | None:
        """The gradient norm of the mean loss over some of the samples; None if it cannot be computed for so few."""
        few = replace(self.micro_batch, batch=self.batch(chosen), count=1)  # a mean over however many: its share is all
        step = Step(self.step.index, [few], self.task, self.step.state)

        def passed() -> float:
            forward_backward(step)
            assert step._pending is not None
            parameters = parameters_of(step.state.models).values()
            norms = (wide_norm(parameter.grad) for parameter in parameters if parameter.grad is not None)
            return float(step._pending[1]) * math.hypot(*norms)  # which does not overflow where that of the step does

        return self._try(mode, passed)

    def goes_wrong(self, chosen: Sequence[int]) -> bool | None:
        """Whether loss or gradient of some of the samples is not finite; None if that cannot be computed for so few."""
        for number in (self.loss, self.gradient_norm):
            if (value := number(chosen, mode="training")) is None or not math.isfinite(value):
                return None if value is None else True
        return False

    def wrong_samples(self) -> list[int]:
        """The rows of the faulty samples, by bisection: each by itself, or the smallest group that fails together."""
        every = list(range(self.count))
        return self._halved(every) if self.can_cut and self.goes_wrong(every) else []

    def _halved(self, chosen: list[int]) -> list[int]:
        if len(chosen) == 1:
            return chosen
        middle = len(chosen) // 2
        halves = [half for half in (chosen[:middle], chosen[middle:]) if self.goes_wrong(half)]
        return [row for half in halves for row in self._halved(half)] if halves else chosen

    def _try(self, mode: Mode, passed: Callable[[], float | None]) -> float | None:
        """The result of the pass from the state before the step; None if it fails."""
        self.put_back()
        for model in self.step.state.models.values():
            for module in model.modules():
                if mode == "evaluation" or isinstance(module, _NormBase):
                    module.training = False
        try:
            return passed()
        except Exception:  # so few samples, or another mode, may not be what a layer takes
            return None
        finally:
            self.step.state.buffers.undo()
            self.put_back()
