"""What every loop is given, and how its time is told: by the moments at which it asks for the data
of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from loops.models import Work
from surefoot.data.order import Order
from surefoot.optim.param_groups import parameter_groups
from surefoot.run.run import Run
from surefoot.tracking.record import Phase

WINDOW, WARMUP, CLIP = 50, 100, 1.0  # steps, steps, norm
RATE, DECAY = 1e-3, 0.01  # of AdamW, whose other numbers are torch's defaults, as the decay is

_PHASES: tuple[Phase, ...] = ("starting", "training", "data_wait")


def seconds_of_training(run: Run) -> float:
    """The seconds of a run's steps with the wait for their data: without opening, evaluating and
    saving.
    """
    spent_s = run.parts.run_state.clock.state()["total_s"]
    return sum(float(spent_s.get(phase, 0.0)) for phase in _PHASES)


@dataclass
class Training:
    """`steps` updates of `work.model()` by AdamW: the norm limited to 1.0, warm-up then cosine, the
    loss told every 50 steps.

    The order of the samples is the one that surefoot computes for itself; all others are given it
    ready.
    """

    work: Work
    steps: int
    place: Path  # for what a loop writes
    loader: bool = False  # samples are read one by one by a DataLoader, else indexed in memory
    spares: bool = False  # biases, norms and embeddings do not decay, as surefoot has it
    now: Callable[[], float] = perf_counter
    moments: list[float] = field(default_factory=list)  # of asking for each fiftieth step
    losses: list[Tensor] | None = None  # of each step, where they are to be kept

    def loss(self, model: Any, batch: Any) -> Tensor:
        """The mean loss of a batch."""
        return self.compared(model(batch[0]), batch[1])

    def compared(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the model's outputs."""
        loss = self.work.loss(outputs, targets)
        if self.losses is not None:
            self.losses.append(loss.detach())
        return loss

    def batches(self) -> Iterable[list[Tensor]]:
        """Inputs and targets of one step after the other, as a user would have them: rows taken
        from memory, or a DataLoader.
        """
        order = Asked(self)
        if self.loader:
            return DataLoader(Rows(self.work.inputs, self.work.targets), batch_sampler=order)
        return InMemory(self.work, order)

    def optimizer(self, model: nn.Module, *, fused: bool | None = None) -> torch.optim.AdamW:
        """Torch's; `fused` as torch has it where nobody asks: off on the CPU."""
        if not self.spares:
            return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        groups = parameter_groups(model, weight_decay=DECAY)
        return torch.optim.AdamW(
            [{"params": group.parameters, "weight_decay": group.decay} for group in groups],
            lr=RATE,
            fused=fused,
        )

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """One step of it after each update."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """On the rate: a rise over 100 steps (of fewer steps a fifth), then half a cosine."""
        warmup = self.warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup)))

    @property
    def warmup(self) -> int:
        """Steps."""
        return min(WARMUP, self.steps // 5)

    def asked(self, step: int) -> None:
        """Take the time, each fiftieth step."""
        if step % WINDOW == 0:
            self.moments.append(self.now())

    @property
    def step_s(self) -> list[float]:
        """Seconds of a step in each window of 50, but for the first two."""
        return [(after - before) / WINDOW for before, after in pairwise(self.moments)][2:]


class Asked:
    """Which samples each step holds, in lists as a DataLoader takes them; the time is taken when
    they are asked for.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        plan = Order(0, samples=len(training.work.inputs), batch_size=training.work.batch_size)
        self.ids = [torch.from_numpy(plan.ids(step)[0].copy()) for step in range(training.steps)]
        self.chosen: list[Any] = [ids.tolist() for ids in self.ids] if training.loader else self.ids

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Any]:
        for step, chosen in enumerate(self.chosen):
            self.training.asked(step)
            yield chosen


class InMemory:
    """Rows of two tensors."""

    def __init__(self, work: Work, order: Asked) -> None:
        self.work = work
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for chosen in self.order:
            yield [self.work.inputs[chosen], self.work.targets[chosen]]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set of one's own: nothing says that its samples lie in tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]
