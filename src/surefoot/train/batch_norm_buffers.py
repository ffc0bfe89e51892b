"""Buffers that a forward pass changes (batch statistics, counters), made independent of the
micro-batch size.

Each micro-batch starts from the buffers at the start of the step. The step then sets floating-point
buffers to the mean over all micro-batches and other buffers to the last value. A skipped step
restores all buffers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surefoot.distributed.rank_sums import RankSums
from surefoot.errors import ConfigError
from surefoot.optim.in_place import read_on_cpu
from surefoot.train.buffer_groups import BufferGroup, groups_of

if TYPE_CHECKING:
    from surefoot.distributed.world import World


class BatchStatistics:
    """The persistent buffers of some models (default: no models) during one step, averaged over all
    ranks.

    `shares` has the micro-batches of each rank. Changes are added along their tree, with the same
    bits on any number of ranks.
    """

    def __init__(
        self,
        models: Iterable[nn.Module] = (),
        *,
        world: "World | None" = None,
        shares: Sequence[range] = (range(1),),
    ) -> None:
        self.world = world if world is not None and world.size > 1 else None
        self.ranks = RankSums(shares, rank=0 if self.world is None else self.world.rank)
        self.shares, self.several = shares, sum(map(len, shares)) > 1
        # above 0: the number of the last pass with targets, over all calls of `forward_backward`
        self.latest = 0
        # backward passes in training mode do not read the statistics of norms, so a graph may
        # outlive their change
        self.owners = [
            (module, name, isinstance(module, _NormBase))
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self.groups: list[BufferGroup] = []
        self.kinds: list[Any] = []  # shapes, dtypes and devices of the buffers in `groups`
        self.started, self.calls, self.micro_batch = False, 0, -1
        self.passes = self.collected = (
            0  # passes of this step, and those whose change is in `groups`
        )

    def start_pass(self) -> None:
        """Save the buffers before a step's first forward pass; restore them before each later
        pass.
        """
        if not self.owners:
            return
        tensors = self.tensors()
        if self.started:
            self._collect(tensors)
            self._write(tensors, [group.before for group in self.groups])
        else:
            kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            if kinds != self.kinds:
                self.kinds, self.groups = kinds, groups_of(tensors)
            for group in self.groups:
                group.start(tensors)
            self.started = True
        for group in self.groups:
            group.is_unchanged = False  # the pass that follows may change them

    def end_pass(self, micro_batch: int | None = None, *, counted: bool = True) -> None:
        """Count one forward and backward pass, of the micro-batch with this index (default: the
        next).

        Set `counted` to False for a micro-batch without targets.
        """
        if not self.owners:
            return
        micro_batch = self.micro_batch + 1 if micro_batch is None else micro_batch
        self.calls += micro_batch <= self.micro_batch  # `forward_backward` was called again
        self.micro_batch = micro_batch
        if not counted:
            return
        self.passes += 1
        self.latest = self.calls * sum(map(len, self.shares)) + micro_batch + 1
        if self.passes > 1:  # a step of one pass needs no change
            self._collect(self.tensors())

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Discard the changes of passes inside the block, which repeat the passes so far at other
        weights.
        """
        tensors = self.tensors()
        self._collect(tensors)
        now, changes = (
            [tensor.clone() for tensor in tensors],
            [group.saved() for group in self.groups],
        )
        counters = self.passes, self.calls, self.micro_batch, self.latest
        try:
            yield
        finally:
            for tensor, numbers in zip(self.tensors(), now, strict=True):
                tensor.copy_(numbers)
            for group, copies in zip(self.groups, changes, strict=True):
                group.restore(copies)
            self.passes, self.calls, self.micro_batch, self.latest = counters
            self.collected = self.passes

    def finish(self, skipped: Tensor) -> None:
        """Set each buffer to its mean over the passes, or restore the buffer if `skipped` (a device
        tensor) is 1.0.
        """
        if not self.started:  # no buffers, or a step without targets
            return
        if (
            not self.several and self.passes == 1 and skipped.is_cpu
        ):  # `skipped` is on the CPU if the weights are
            self.undo() if read_on_cpu(skipped) != 0 else self._forget()
            return
        tensors = self.tensors()
        if not self.several and self.passes == 1:
            after = [group.join(tensors) for group in self.groups]  # with the bits of the pass
        else:
            self._collect(tensors)
            own = [group.after(self.passes) for group in self.groups] if self.world is None else []
            after = own or self._means_of_ranks()
        if skipped.is_cpu:
            self._write(
                tensors,
                after if read_on_cpu(skipped) == 0 else [group.before for group in self.groups],
            )
        else:
            applied = [(skipped == 0).to(group.before.device) for group in self.groups]
            every = zip(self.groups, applied, after, strict=True)
            self._write(
                tensors, [torch.where(flag, moved, group.before) for group, flag, moved in every]
            )
        self._forget()

    def _means_of_ranks(self) -> list[Tensor]:
        assert self.world is not None
        device, calls = self.groups[0].before.device, self.calls + 1
        passes = torch.full((), self.passes, dtype=torch.float64, device=device)
        self.world.add_up(passes)
        latest = iter(self._latest_of_ranks([group for group in self.groups if not group.is_float]))
        return [
            group.after_all_ranks(passes.clamp(min=1), calls, self.ranks)
            if group.is_float
            else next(latest)
            for group in self.groups
        ]

    def _latest_of_ranks(self, groups: Sequence[BufferGroup]) -> list[Tensor]:
        # the values after the last micro-batch with targets, as bytes of the rank that has it
        assert self.world is not None
        if not groups:
            return []
        own = torch.full((), self.latest, device=groups[0].before.device)
        last = own.clone()
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        has_it = (own == last).logical_and_(last > 0)
        buffers = [group.before if group.last is None else group.last for group in groups]
        sent = torch.cat([buffer.view(torch.uint8) for buffer in buffers]) * has_it
        self.world.add_up(sent)
        parts = torch.split(sent, [buffer.nbytes for buffer in buffers])
        every = zip(groups, parts, strict=True)
        return [
            torch.where(last > 0, part.clone().view(group.before.dtype), group.before)
            for group, part in every
        ]

    def undo(self) -> None:
        """Restore the buffers that were changed by passes without an update."""
        if self.started:
            self.tensors()  # which refuses a buffer that became None
            present = [
                (module, name)
                for module, name, _ in self.owners
                if module._buffers[name] is not None
            ]
            for (module, name), (shape, dtype, device) in zip(present, self.kinds, strict=True):
                buffer = module._buffers[name]
                if buffer is not None and buffer.shape != shape:
                    module._buffers[name] = torch.empty(shape, dtype=dtype, device=device)
            self._write(self.tensors(), [group.before for group in self.groups])
            self._forget()

    def tensors(self) -> list[Tensor]:
        """Return aliases to write to. Writing counts as a change for autograd, except in norms."""
        every = ((module._buffers[name], is_norm) for module, name, is_norm in self.owners)
        tensors = [
            buffer.data if is_norm else buffer.detach()
            for buffer, is_norm in every
            if buffer is not None
        ]
        if self.started and len(tensors) != len(self.kinds):
            raise ConfigError(
                "a buffer became None, or was None, within a step\n"
                "  a skipped step restores all buffers, so each needs a tensor from the first pass on\n"
                "  register it with a tensor: self.register_buffer(name, torch.zeros(...))"
            )
        return tensors

    def _collect(self, tensors: Sequence[Tensor]) -> None:
        if self.collected < self.passes:
            for group in self.groups:
                group.collect(
                    tensors, call=self.calls, micro_batch=self.micro_batch, own=self.ranks.own
                )
            self.collected = self.passes

    def _write(self, tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
        for group, flat in zip(self.groups, flats, strict=True):
            if flat is group.before and group.is_unchanged:
                continue
            torch._foreach_copy_(
                group.of(tensors), group.views if flat is group.before else group.split(flat)
            )

    def _forget(self) -> None:
        self.started, self.calls, self.micro_batch = False, 0, -1
        self.passes = self.collected = self.latest = 0
        for group in self.groups:
            group.last = None
            group.changes.clear()
