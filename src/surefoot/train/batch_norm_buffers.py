"""Buffers that a forward pass changes (batch statistics, counters), made independent of the micro-batch size.

Each micro-batch starts from the buffers at the start of the step. The step then sets floating-point buffers to the mean
over all micro-batches and other buffers to the last value. A skipped step restores all buffers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from surefoot.distributed.world import World


class BatchStatistics:
    """The persistent buffers of some models (default: no models) during one step, averaged over all ranks."""

    def __init__(self, models: Iterable[nn.Module] = (), *, world: "World | None" = None) -> None:
        self.world = world if world is not None and world.size > 1 else None
        # backward passes in training mode do not read the statistics of norms, so a graph may outlive their change
        self.owners = [
            (module, name, isinstance(module, _NormBase))
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self.before: list[Tensor] = []
        self.changes: list[Tensor] = []
        self.passes = 0

    def start_pass(self) -> None:
        """Save the buffers before a step's first forward pass; restore them before each later pass."""
        if not self.owners:
            return
        if not self.before:
            self.before = [buffer.clone() for buffer in self.tensors()]
        else:
            for buffer, before in zip(self.tensors(), self.before, strict=True):
                buffer.copy_(before)

    def end_pass(self, *, counted: bool = True) -> None:
        """Add the buffer changes of one forward and backward pass. Set `counted` to False for a micro-batch without targets."""
        if not self.owners or not counted:
            return
        self.passes += 1
        changes = [
            torch.where(now == before, 0.0, now - before) if now.is_floating_point() else now  # inf - inf is NaN
            for now, before in zip(self.tensors(), self.before, strict=True)
        ]
        if self.passes > 1:
            changes = [
                before + change if change.is_floating_point() else change
                for before, change in zip(self.changes, changes, strict=True)
            ]
        self.changes = changes

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Discard the changes of passes inside the block, which repeat the passes so far at other weights."""
        now = [buffer.clone() for buffer in self.tensors()]
        before, changes, passes = self.before, self.changes, self.passes
        try:
            yield
        finally:
            for buffer, numbers in zip(self.tensors(), now, strict=True):
                buffer.copy_(numbers)
            self.before, self.changes, self.passes = before, changes, passes

    def finish(self, skipped: Tensor) -> None:
        """Set each buffer to its mean over the passes, or restore the buffer if `skipped` (a device tensor) is 1.0."""
        if not self.before:  # no buffers, or a step without targets
            return
        applied = (skipped == 0).to(self.before[0].device)  # `skipped` is on the CPU if the weights are
        if self.world is not None:
            self._finish_together(self.world, applied)
        else:
            for buffer, before, change in zip(self.tensors(), self.before, self.changes, strict=True):
                # averages changes, so that an unchanged buffer keeps its bits: (x + x + x) / 3 may differ from x
                averaged = self.passes > 1 and buffer.is_floating_point()
                after = torch.where(change == 0, before, before + change / self.passes) if averaged else buffer
                buffer.copy_(torch.where(applied, after, before))
        self.before, self.changes, self.passes = [], [], 0

    def _finish_together(self, world: "World", applied: Tensor) -> None:
        wide = torch.float32 if applied.device.type == "mps" else torch.float64
        sums = torch.cat(
            [change.reshape(-1).to(wide) for change in self._own_changes()]
            + [torch.full_like(applied, self.passes, dtype=wide).reshape(1)]
        )
        world.add_up(sums)
        changes, passes = torch.split(sums[:-1], [before.numel() for before in self.before]), sums[-1].clamp(min=1)
        for buffer, before, flat in zip(self.tensors(), self.before, changes, strict=True):
            change = flat.reshape(before.shape)
            mean = change / passes  # counters move by it too; a flag flips if any pass flipped it
            if before.dtype == torch.bool:
                moved = before ^ (change > 0)
            elif before.is_floating_point():
                moved = (before + mean).to(before.dtype)
            else:
                moved = before + mean.round().to(before.dtype)
            buffer.copy_(torch.where(applied, torch.where(mean == 0, before, moved), before))

    def _own_changes(self) -> list[Tensor]:
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
        """Restore the buffers that were changed by passes without an update."""
        for buffer, before in zip(self.tensors(), self.before, strict=False):
            buffer.copy_(before)
        self.before, self.changes, self.passes = [], [], 0

    def tensors(self) -> list[Tensor]:
        """Return aliases to write to. Writing counts as a change for autograd, except in norms."""
        every = ((module._buffers[name], is_norm) for module, name, is_norm in self.owners)
        return [buffer.data if is_norm else buffer.detach() for buffer, is_norm in every if buffer is not None]
