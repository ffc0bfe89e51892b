"""Passes before the first step that show how buffers without a declared rule change, and what
several ranks refuse.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.config.parallel import Strategy
from surefoot.data.loader import MicroBatch
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.shards import holders
from surefoot.distributed.strategy import without_ranks
from surefoot.errors import ConfigError
from surefoot.metrics.multiple_choice import eagerly
from surefoot.train.batch_norm_buffers import BatchStatistics
from surefoot.train.buffer_rules import (
    OF_COUPLED_LOSS,
    BufferFindings,
    StepBuffer,
    impossible_order,
    undeclared_error,
)
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import Loss, State, Step, Task, forward_backward
from surefoot.train.step_watch import CoupledLoss

_ROUNDING = 1e-3  # of a change: kernels that are not deterministic differ by less


@dataclass
class BufferCheck:
    """Finds the rules of buffers without a declared one. `exact`: equal passes give equal bits."""

    task: Task
    state: State
    pipeline: DataPipeline
    user_state: Mapping[str, Any]
    exact: bool
    first_step: int | None = None  # of a loop of one's own
    losses: list[Loss] = field(default_factory=list)  # whose passes were checked in that step

    def check(self, loss: Loss, *, step: int) -> None:
        """Find the rules in passes of the loss over two micro-batches of a step. Raises
        `ConfigError` if several ranks share a buffer that needs a declared rule. Collective.
        """
        buffers = self.state.buffers
        world = self.pipeline.world
        if not buffers.undeclared or world.on_meta:
            return
        described = None
        try:
            micro_batches = self._two_micro_batches(step)
            if len(micro_batches) == 2:
                findings = self._findings(loss, micro_batches, step=step)
                described = [findings.once, findings.in_order, findings.overwritten]
        except ConfigError:
            raise
        except Exception:  # in the user's code: the step explains it
            described = None
        of_main = world.from_main(described)
        if of_main is None:
            return
        findings = BufferFindings(*map(tuple, of_main))
        if buffers.findings is not None:
            findings = buffers.findings | findings
        buffers.decide(findings)
        self.refuse_undeclared()

    def check_in_first_step(self, step: Step, loss: Loss) -> None:
        """Find the rules before a pass of a loop of one's own, in its first step."""
        if self.first_step is None:
            self.first_step = step.index
        if step.index > self.first_step:
            self.state.buffers.before_call = None
        elif not any(loss is known for known in self.losses):
            self.losses.append(loss)
            self.check(loss, step=step.index)

    def refuse_undeclared(self) -> None:
        """Raise `ConfigError` if several ranks share a buffer that needs a declared rule."""
        findings = self.state.buffers.findings
        ranks = self.pipeline.world.size
        if ranks == 1 or findings is None:
            return
        undeclared = {buffer.name for buffer in self.state.buffers.undeclared}
        names = [name for name in findings.in_order if name in undeclared]
        if names:
            raise undeclared_error(names, ranks=ranks)

    def _two_micro_batches(self, step: int) -> Sequence[MicroBatch]:
        if self.pipeline.sizes.pieces > 1:
            micro_batches = self.pipeline.again(step, share=range(2))
        else:
            first = self.pipeline.again(step, share=range(1))
            second = self.pipeline.again(step + 1, share=range(1))
            micro_batches = [*first, *second]
        return [micro_batch for micro_batch in micro_batches if micro_batch.count > 0]

    def _findings(
        self, loss: Loss, micro_batches: Sequence[MicroBatch], *, step: int
    ) -> BufferFindings:
        """Return what passes over two micro-batches show. All state is restored."""
        buffers = [buffer for buffer in self.state.buffers.owners if not buffer.is_norm]
        first, second = micro_batches
        values = self._pass_over(first, second, loss, buffers, step=step)
        if values is None:
            return BufferFindings()
        start = values.start
        after_first = values.after_first
        after_second = values.after_second
        changed = values.changed_by_first
        same_samples = np.array_equal(first.sample_ids, second.sample_ids)
        dependent_modules = set()
        for buffer in buffers:
            name = buffer.name
            if self._differs(start[name], after_second[name], start[name]):
                changed.add(name)
            depends_on_batch = self._differs(after_first[name], after_second[name], start[name])
            # equal micro-batches cannot tell
            if depends_on_batch or (same_samples and name in changed):
                dependent_modules.add(buffer.module)
        once: list[str] = []
        in_order: list[str] = []
        overwritten: list[str] = []
        for buffer in buffers:
            name = buffer.name
            if buffer.declared is not None or name not in changed:
                continue
            tensor = after_second[name]
            is_float = tensor is not None and tensor.is_floating_point()
            # a running maximum differs from that of one micro-batch in one of the two orders
            keeps_first = self._differs(values.after_both[name], tensor, start[name])
            keeps_second = self._differs(
                values.after_both_reversed[name], after_first[name], start[name]
            )
            if is_float and buffer.module not in dependent_modules:
                once.append(name)
            elif keeps_first or keeps_second:
                in_order.append(name)
            else:
                overwritten.append(name)
        return BufferFindings(
            tuple(sorted(once)), tuple(sorted(in_order)), tuple(sorted(overwritten))
        )

    def _pass_over(
        self,
        first: MicroBatch,
        second: MicroBatch,
        loss: Loss,
        buffers: Sequence[StepBuffer],
        *,
        step: int,
    ) -> "_ValuesOfBuffers | None":
        """Return the values of buffers after passes over two micro-batches in both orders, or None
        if the first one changes none.
        """
        models = self.state.models
        task = replace(self.task, loss=loss)
        if holders(self.state.parameters) is None:  # otherwise all ranks gather weights together
            task = replace(task, ranks=without_ranks(task.ranks), forward=sole_or_all(models))

        def pass_over(micro_batch: MicroBatch) -> None:
            # a loss may write into its batch
            batch = replace(micro_batch, batch=deepcopy(micro_batch.batch))
            forward_backward(Step(step, [batch], task, State(models, {})))

        before = Snapshot(
            models,
            loss,
            user_state=self.user_state,
            parameters=self.state.parameters,
            keep=True,
        )
        with before, eagerly():
            start = _values(buffers)
            unwritten = _versions(buffers)
            pass_over(first)
            after_first = _values(buffers)
            # a power iteration that has converged writes its vector, and may change no bit yet
            versions = _versions(buffers)
            changed = {name for name in start if versions[name] != unwritten[name]}
            for name in start:
                if self._differs(start[name], after_first[name], start[name]):
                    changed.add(name)
            if not changed:
                return None
            pass_over(second)
            after_both = _values(buffers)
            before.restore(only_saved=True)
            _write(start, buffers)  # those that no checkpoint holds, of a loss
            pass_over(second)
            after_second = _values(buffers)
            pass_over(first)
            after_both_reversed = _values(buffers)
        return _ValuesOfBuffers(
            start, after_first, after_second, after_both, after_both_reversed, changed
        )

    def _differs(self, one: Tensor | None, other: Tensor | None, start: Tensor | None) -> bool:
        """Return True if two values of a buffer differ by more than rounding of its change."""
        if one is None or other is None or start is None:
            return one is not other
        if one.shape != other.shape or one.dtype != other.dtype:
            return True
        if torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            return not torch.equal(one.isnan(), other.isnan())
        if self.exact or not one.is_floating_point() or start.shape != one.shape:
            return True
        change = torch.maximum((one - start).abs(), (other - start).abs()).max()
        return bool((one - other).abs().max() > _ROUNDING * change)


@dataclass(frozen=True)
class _ValuesOfBuffers:
    """The values of buffers by name, before and after passes over two micro-batches."""

    start: dict[str, Tensor | None]
    after_first: dict[str, Tensor | None]
    after_second: dict[str, Tensor | None]
    after_both: dict[str, Tensor | None]
    after_both_reversed: dict[str, Tensor | None]
    changed_by_first: set[str]


def _values(buffers: Sequence[StepBuffer]) -> dict[str, Tensor | None]:
    values = {}
    for buffer in buffers:
        tensor = buffer.tensor
        values[buffer.name] = None if tensor is None else tensor.detach().clone()
    return values


def _versions(buffers: Sequence[StepBuffer]) -> dict[str, tuple[int, int]]:
    versions = {}
    for buffer in buffers:
        tensor = buffer.tensor
        versions[buffer.name] = (id(tensor), 0 if tensor is None else tensor._version)
    return versions


def _write(values: Mapping[str, Tensor | None], buffers: Sequence[StepBuffer]) -> None:
    for buffer in buffers:
        tensor = buffer.tensor
        value = values[buffer.name]
        if tensor is not None and value is not None and tensor.shape == value.shape:
            tensor.data.copy_(value)


def refuse_order(
    buffers: BatchStatistics, *, parallel: Strategy, loss: Any, sync_batch_norm: bool
) -> None:
    """Raise `ConfigError` if the ranks' passes cannot follow one another, as buffers declared "in
    order" need it.
    """
    if buffers.relay is None:
        return
    if parallel.kind == "fsdp":
        why = "FSDP gathers weights in the passes of all ranks at once"
    elif parallel.sync == "every":
        why = "gradients are reduced in every pass of all ranks at once"
    elif sync_batch_norm:
        why = "statistics are computed in the passes of all ranks at once"
    elif isinstance(loss, CoupledLoss):
        why = OF_COUPLED_LOSS
    else:
        return
    raise impossible_order(buffers.in_order_by_rule, why)
