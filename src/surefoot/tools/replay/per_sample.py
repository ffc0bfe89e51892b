"""Losses, gradients and faults of single samples, with the random state of their micro-batch. All
state is restored.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _NormBase

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.data.loader import MicroBatch
from surefoot.data.nested import select_rows
from surefoot.distributed.strategy import without_ranks
from surefoot.seeding import fold, seed_generators
from surefoot.tools.replay.hooks import parameters_of, value_of
from surefoot.tools.replay.tensor_stats import wide_norm
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import Step, forward_backward
from surefoot.train.step_watch import CoupledLoss

Mode = Literal["evaluation", "training"]
""""training": as in the step, but with running statistics, since one sample has no batch
statistics.
"""


class Probe:
    """A micro-batch of a step, split into samples if `can_cut`. Use a probe in the block of the
    snapshot `start`, from which each pass starts.
    """

    def __init__(self, step: Step, micro_batch: MicroBatch, start: Snapshot) -> None:
        self.step = step
        self.micro_batch = micro_batch
        self.start = start
        self.count = len(micro_batch.sample_ids)
        # a loss of the whole batch has no value for one sample
        is_mean = not isinstance(step._task.loss, CoupledLoss)
        self.can_cut = (
            is_mean
            and self.count > 0
            and select_rows(micro_batch.batch, [0], of=self.count) is not None
        )
        # a loss scale could make a sample's gradient overflow while the mean gradient is finite
        plain = replace(step._task.precision, loss_scale=None)
        self.task = replace(
            step._task,
            forward=sole_or_all(step.state.models),
            ranks=without_ranks(step._task.ranks),
            precision=plain,
        )

    def batch(self, chosen: Sequence[int]) -> Any:
        if len(chosen) == self.count:
            return self.micro_batch.batch
        return select_rows(self.micro_batch.batch, chosen, of=self.count)

    def loss(self, chosen: Sequence[int], *, mode: Mode) -> float | None:
        """Return the mean loss of the chosen samples; None without targets, or if a batch of that
        size fails.
        """
        task = self.task
        loss = task.loss
        assert loss is not None  # every replayed step has a loss

        def passed() -> float | None:
            seed_generators(fold(task.key, self.step.index, self.micro_batch.index))
            with torch.no_grad(), task.precision.autocast():
                value, count = value_of(loss(task.forward, self.batch(chosen)))
            return None if count == 0 else value

        return self._loss_or_none(mode, passed)

    def gradient_norm(self, chosen: Sequence[int], *, mode: Mode) -> float | None:
        """Return the gradient norm of the mean loss of the chosen samples; None if a batch of that
        size fails.
        """
        # count=1: this mean has weight 1
        few = replace(self.micro_batch, batch=self.batch(chosen), count=1)
        step = Step(self.step.index, [few], self.task, self.step.state)

        def passed() -> float:
            forward_backward(step)
            assert step._pending is not None
            parameters = parameters_of(step.state.models).values()
            norms = [
                wide_norm(parameter.grad) for parameter in parameters if parameter.grad is not None
            ]
            factor = float(step._pending[1])
            return factor * math.hypot(*norms)  # does not overflow where the step's norm does

        return self._loss_or_none(mode, passed)

    def goes_wrong(self, chosen: Sequence[int]) -> bool | None:
        """Return True if the chosen samples have a nonfinite loss or gradient; None if a batch of
        that size fails.
        """
        for measure in (self.loss, self.gradient_norm):
            value = measure(chosen, mode="training")
            if value is None:
                return None
            if not math.isfinite(value):
                return True
        return False

    def wrong_samples(self) -> list[int]:
        """Return the rows of faulty samples, found by bisection: single samples, or the smallest
        group that fails together.
        """
        every = list(range(self.count))
        return self._halved(every) if self.can_cut and self.goes_wrong(every) else []

    def _halved(self, chosen: list[int]) -> list[int]:
        if len(chosen) == 1:
            return chosen
        middle = len(chosen) // 2
        halves = [half for half in (chosen[:middle], chosen[middle:]) if self.goes_wrong(half)]
        if not halves:  # the samples fail only together
            return chosen
        rows = []
        for half in halves:
            rows += self._halved(half)
        return rows

    def _loss_or_none(self, mode: Mode, passed: Callable[[], float | None]) -> float | None:
        self.start.restore()
        for model in self.step.state.models.values():
            for module in model.modules():
                if mode == "evaluation" or isinstance(module, _NormBase):
                    module.training = False
        try:
            return passed()
        except Exception:  # a layer may not accept this batch size or mode
            return None
        finally:
            self.step.state.buffers.undo()
            self.start.restore()
