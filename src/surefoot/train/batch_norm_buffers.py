"""Buffers that change in a forward pass (batch statistics, counters), made independent of how a batch is cut.

Each micro-batch starts from the buffers of the start of the step. At its end floating buffers become the mean over all
micro-batches, others take the last value; after a skipped step all are what they were.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from surefoot.distributed.world import World


class BatchStatistics:
    """The buffers in the state of some models (default: none), from the start of a step to its end; the mean is over all ranks."""

    def __init__(self, models: Iterable[nn.Module] = (), *, world: "World | None" = None) -> None:
        self.world = world if world is not None and world.size > 1 else None
        self.owners = [
            (module, name)
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self.before: list[Tensor] = []
        self.changes: list[Tensor] = []
        self.passes = 0

    def start_pass(self) -> None:
        """Before each forward pass: remember the buffers (first pass of a step), or put them back (later ones)."""
        if not self.owners:
            return
        if not self.before:
            self.before = [buffer.detach().clone() for buffer in self.tensors()]
        else:
            for buffer, before in zip(self.tensors(), self.before, strict=True):
                buffer.detach().copy_(before)

    def end_pass(self, *, counted: bool = True) -> None:
        """After each forward and backward pass: add what it changed, unless nothing was counted in it."""
        if not self.owners or not counted:
            return
        self.passes += 1
        changes = [
            torch.where(now == before, 0.0, now.detach() - before)
            if now.is_floating_point()
            else now  # inf - inf is NaN
            for now, before in zip(self.tensors(), self.before, strict=True)
        ]
        if self.passes > 1:
            changes = [
                before + change if change.is_floating_point() else change
                for before, change in zip(self.changes, changes, strict=True)
            ]
        self.changes = changes

    def finish(self, skipped: Tensor) -> None:
        """At the update: the mean over the passes, or what was before where `skipped` (1.0 on the device) says so."""
        if not self.before:  # no model has buffers, or a step with nothing to count
            return
        applied = (skipped == 0).to(self.before[0].device)  # with weights on the CPU that is where it was decided
        if self.world is not None:
            self._finish_together(self.world, applied)
        else:
            for buffer, before, change in zip(self.tensors(), self.before, self.changes, strict=True):
                # as a change, so that a buffer no pass touched keeps its bits: (x + x + x) / 3 need not be x
                averaged = self.passes > 1 and buffer.is_floating_point()
                after = torch.where(change == 0, before, before + change / self.passes) if averaged else buffer.detach()
                buffer.detach().copy_(torch.where(applied, after, before))
        self.before, self.changes, self.passes = [], [], 0

    def _finish_together(self, world: "World", applied: Tensor) -> None:
        """As `finish`, over the passes of all ranks; counters too move by the mean of their changes, and a flag is
        turned if any pass turned it. Collective."""
        wide = torch.float32 if applied.device.type == "mps" else torch.float64
        sums = torch.cat(
            [change.reshape(-1).to(wide) for change in self._own_changes()]
            + [torch.full_like(applied, self.passes, dtype=wide).reshape(1)]
        )
        world.add_up(sums)
        changes, passes = torch.split(sums[:-1], [before.numel() for before in self.before]), sums[-1].clamp(min=1)
        for buffer, before, flat in zip(self.tensors(), self.before, changes, strict=True):
            change = flat.reshape(before.shape)
            mean = change / passes
            if before.dtype == torch.bool:
                moved = before ^ (change > 0)
            elif before.is_floating_point():
                moved = (before + mean).to(before.dtype)
            else:
                moved = before + mean.round().to(before.dtype)
            buffer.detach().copy_(torch.where(applied, torch.where(mean == 0, before, moved), before))

    def _own_changes(self) -> list[Tensor]:
        """What the passes of this rank changed in all; of no pass nothing. Of a flag: whether it was turned."""
        if not self.passes:
            return [torch.zeros_like(before) for before in self.before]
        return [
            change
            if before.is_floating_point()
            else change ^ before
            if before.dtype == torch.bool
            else (change - before) * self.passes
            for change, before in zip(self.changes, self.before, strict=True)
        ]

    def undo(self) -> None:
        """Put back what passes changed that no update followed; nothing where there were none."""
        for buffer, before in zip(self.tensors(), self.before, strict=False):
            buffer.detach().copy_(before)
        self.before, self.changes, self.passes = [], [], 0

    def tensors(self) -> list[Tensor]:
        return [buffer for module, name in self.owners if (buffer := module._buffers[name]) is not None]
