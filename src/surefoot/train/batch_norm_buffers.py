"""Buffers that a forward pass changes (batch statistics, queues, counters), made independent of the
number of ranks.

Each buffer has a rule (`buffer_rules.py`). By most rules each micro-batch starts from the buffers
at the start of the step, and the step then sets them to the mean, sum, maximum, minimum or last
value over its micro-batches. Buffers "in order" go from one micro-batch to the next. A skipped step
restores all buffers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.config.behavior import BUFFERS_IN_ORDER, newest_behavior
from surefoot.errors import ConfigError
from surefoot.optim.in_place import read_on_cpu
from surefoot.train.buffer_groups import BufferGroup, groups_of
from surefoot.train.buffer_rules import (
    OF_COUPLED_LOSS,
    BufferFindings,
    BufferRule,
    StepBuffer,
    StepRule,
    buffers_of,
    declared_rule,
    impossible_order,
    refuse_unmatched,
    rule_of,
    undeclared_error,
)
from surefoot.train.step_watch import CoupledLoss

if TYPE_CHECKING:
    from surefoot.distributed.rank_sums import RankSums
    from surefoot.distributed.relay import Relay
    from surefoot.distributed.world import World


class BatchStatistics:
    """The persistent buffers of some models (default: no models), and of a loss that is a module,
    during one step; equal on all ranks after it.

    `shares` has the micro-batches of each rank. Changes are added along their tree, with the same
    bits on any number of ranks. `declared` has rules by patterns of names.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module] | None = None,
        *,
        world: "World | None" = None,
        shares: Sequence[range] = (range(1),),
        loss: Any = None,
        declared: Mapping[str, BufferRule] | None = None,
        behavior: int | None = None,
    ) -> None:
        self.world = world if world is not None and world.size > 1 else None
        self.rank = 0 if self.world is None else self.world.rank
        self.shares = shares
        self.several = sum(map(len, shares)) > 1  # micro-batches in a step
        self.behavior = newest_behavior() if behavior is None else behavior
        self.declared = dict(declared or {})
        # above 0: the number of the last pass with targets, over all calls of `forward_backward`
        self.latest = 0
        self.owners: list[StepBuffer] = []
        self.findings: BufferFindings | None = None  # None: no pass has shown it yet
        self.groups: list[BufferGroup] = []
        self.kinds: list[Any] = []  # shapes, dtypes and devices of the buffers in `groups`
        self.started = False
        self.calls = 0  # of `forward_backward` in this step, without the first
        self.micro_batch = -1  # of the latest pass
        self.passes = 0  # of this step
        self.collected = 0  # passes whose change is in `groups`
        self.is_repeating = False  # inside `repeated`
        self.unwritten: dict[str, tuple[int, int]] = {}  # see `_resting`
        self.own_kept: list[Tensor] | None = None  # buffers in order before a pass without targets
        self.relay: Relay | None = None  # of buffers in order on several ranks
        # called before each call of `forward_backward`, as (step, loss); None: nothing
        self.before_call: Callable[[Any, Any], None] | None = None
        self.follow(models or {})
        self.follow_object("loss", getattr(loss, "__self__", loss))  # a module's own method too
        refuse_unmatched(self.declared, [buffer.name for buffer in self.owners])

    # --- which buffers, and their rules -----------------------------------------------------------

    def follow_object(self, name: str, thing: Any) -> None:
        """Own the buffers of a loss or a registered object too, if it is a module."""
        if isinstance(thing, nn.Module) and self.behavior >= BUFFERS_IN_ORDER:
            self.follow({name: thing}, prefixed=True)

    def follow(self, models: Mapping[str, nn.Module], *, prefixed: bool | None = None) -> None:
        """Own the buffers of these models too (`prefixed` as in `buffers_of`)."""
        known = {(id(buffer.module), buffer.key) for buffer in self.owners}
        for buffer in buffers_of(models, prefixed=prefixed):
            tensor = buffer.tensor
            if (id(buffer.module), buffer.key) not in known and tensor is not None:
                rule = declared_rule(buffer.name, self.declared, tensor=tensor)
                self.owners.append(replace(buffer, declared=rule))
        self.kinds = []  # builds the groups at the next start
        if self.in_order_by_rule and self.world is not None:
            from surefoot.distributed.relay import Relay

            self.relay = Relay(self.world.rank, self.world.size)

    @property
    def in_order_by_rule(self) -> list[str]:
        """The names of the buffers that are declared in order."""
        return [buffer.name for buffer in self.owners if buffer.declared == "in order"]

    @property
    def undeclared(self) -> list[StepBuffer]:
        """The buffers whose rule depends on what passes show."""
        if self.behavior < BUFFERS_IN_ORDER:
            return []
        return [each for each in self.owners if not each.is_norm and each.declared is None]

    def decide(self, findings: BufferFindings) -> None:
        """Take what passes have shown of the buffers without a declared rule. Before the first pass
        of a call of `forward_backward`.
        """
        self.findings = findings
        if not self.started:
            self.kinds = []  # builds the groups at the next start
            return
        # earlier calls of this step have not changed the buffers that get another rule now
        tensors = self.tensors()
        self._collect(tensors)
        former = {(group.rule, *group.indices): group for group in self.groups}
        before: dict[int, Tensor] = {}
        for group in self.groups:
            before |= dict(zip(group.indices, group.views, strict=True))
        self.groups = []
        for group in groups_of(tensors, self._rules(tensors)):
            same = former.get((group.rule, *group.indices))
            if same is not None:
                self.groups.append(same)
                continue
            torch._foreach_copy_(group.views, [before[index] for index in group.indices])
            if group.rule == "last":
                group.last = group.join(tensors)
            self.groups.append(group)

    def findings_to_save(self) -> dict[str, list[str]] | None:
        """Return as JSON what passes have shown, or None before they have."""
        findings = self.findings
        if findings is None:
            return None
        return {
            "once": [*findings.once],
            "in_order": [*findings.in_order],
            "overwritten": [*findings.overwritten],
        }

    def load_findings(self, saved: Mapping[str, Sequence[str]] | None) -> None:
        """Take what passes have shown in an earlier session. Between two steps."""
        self.findings = None
        if saved is not None:
            self.findings = BufferFindings(
                tuple(saved["once"]),
                tuple(saved["in_order"]),
                tuple(saved.get("overwritten", ())),
            )
        self.kinds = []

    def _rules(self, tensors: Sequence[Tensor]) -> list[StepRule]:
        present = [buffer for buffer in self.owners if buffer.tensor is not None]
        rules = []
        for buffer, tensor in zip(present, tensors, strict=True):
            rule = rule_of(
                buffer,
                tensor,
                behavior=self.behavior,
                several_ranks=self.world is not None,
                once=self.findings is not None and buffer.name in self.findings.once,
            )
            rules.append(rule)
        return rules

    def begin(self, step: Any, loss: Any) -> None:
        """Prepare a call of `forward_backward`. Raises `ConfigError` for a loss whose passes cannot
        follow one another from rank to rank, as buffers in order need it.
        """
        is_function = isinstance(loss, FunctionType | MethodType)  # the other check takes 6 us
        if self.relay is not None and not is_function and isinstance(loss, CoupledLoss):
            raise impossible_order(self.in_order_by_rule, OF_COUPLED_LOSS)
        if self.before_call is not None:
            self.before_call(step, loss)

    # --- the passes of a step ---------------------------------------------------------------------

    def start_pass(self, micro_batch: int | None = None, *, counted: bool = True) -> None:
        """Prepare the buffers for the pass of the micro-batch with this index (default: the next).
        Save them before a step's first pass.

        Set `counted` to False for a micro-batch without targets.
        """
        if not self.owners:
            return
        if micro_batch is None:
            micro_batch = self.micro_batch + 1
        is_again = micro_batch <= self.micro_batch  # `forward_backward` was called again
        begins_call = is_again or self.micro_batch < 0
        tensors = self.tensors()
        if self.started:
            self._collect(tensors)
            self._write(
                tensors, [group.before if group.restarts else None for group in self.groups]
            )
            self.calls += is_again
        else:
            kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
            if kinds != self.kinds:
                self.kinds = kinds
                self.groups = groups_of(tensors, self._rules(tensors))
            for group in self.groups:
                group.start(tensors)
            self.started = True
        self.micro_batch = micro_batch
        if begins_call:
            self._begin_call(tensors)
        for group in self.groups:
            group.is_unchanged = False  # the pass that follows may change them
        self.unwritten = self._resting()
        if not counted:
            self.own_kept = [tensor.clone() for tensor in self._in_order(tensors)]

    def _begin_call(self, tensors: Sequence[Tensor]) -> None:
        in_order = self._in_order(tensors)
        if self.is_repeating:
            self._write(
                tensors, [None if group.restarts else group.before for group in self.groups]
            )
        elif self.relay is not None and self.calls > 0:
            self.relay.share(in_order)  # as an earlier call of this step has left them
        if self.relay is not None:
            self.relay.receive(in_order)

    def pass_on(self) -> None:
        """Let the next rank begin its passes, after this rank's last forward pass. Its backward pass
        may wait for the other ranks.
        """
        if self.relay is not None:
            tensors = self._undo_uncounted(self.tensors())
            if any(group.has_other_shapes(tensors) for group in self.groups if not group.restarts):
                raise ConfigError(
                    "buffer-shape-changed",
                    problem="a pass has given a buffer that is declared in order another shape",
                    reason="the next rank expects the shape of the start",
                    remedy="give it its full size when the model is built",
                    setting="buffers",
                )
            self.relay.send(self._in_order(tensors))

    def end_pass(self, *, counted: bool = True) -> None:
        """Count one forward and backward pass; `counted` as at its start."""
        if not self.owners:
            return
        if not counted:
            self._undo_uncounted(self.tensors())
            return
        self._refuse_late_changes()
        self.passes += 1
        self.latest = self.calls * sum(map(len, self.shares)) + self.micro_batch + 1
        if self.passes > 1:  # a step of one pass needs no change
            self._collect(self.tensors())

    def _resting(self) -> dict[str, tuple[int, int]]:
        """Return the identity and version of each buffer that no pass has written so far, on
        several ranks.
        """
        if self.world is None or self.findings is None:
            return {}
        findings = self.findings
        written = {*findings.once, *findings.in_order, *findings.overwritten}
        resting = {}
        for buffer in self.undeclared:
            tensor = buffer.tensor
            if tensor is not None and buffer.name not in written:
                resting[buffer.name] = (id(tensor), tensor._version)
        return resting

    def _refuse_late_changes(self) -> None:
        """Raise `ConfigError` if a pass has written a buffer that the passes before the first step
        left alone: its rule is not known.
        """
        if not self.unwritten:
            return
        still_unwritten = self._resting()
        names = [
            name for name, version in self.unwritten.items() if still_unwritten.get(name) != version
        ]
        if names:
            assert self.world is not None
            began = "; its first change came after the first step"
            raise undeclared_error(names, ranks=self.world.size, began=began)

    def _in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        in_order = []
        for group in self.groups:
            if not group.restarts:
                in_order += group.of(tensors)
        return in_order

    def _undo_uncounted(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.own_kept:
            self._restore_shapes()
            tensors = self.tensors()
            torch._foreach_copy_(self._in_order(tensors), self.own_kept)
        self.own_kept = None
        return tensors

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Discard the changes of passes inside the block, which repeat the passes so far at other
        weights.
        """
        tensors = self.tensors()
        self._collect(tensors)
        numbers_before = [tensor.clone() for tensor in tensors]
        groups = self.groups
        changes = [group.saved() for group in groups]
        counters = self.passes, self.calls, self.micro_batch, self.latest
        was_repeating = self.is_repeating
        self.is_repeating = True
        try:
            yield
        finally:
            for tensor, numbers in zip(self.tensors(), numbers_before, strict=True):
                tensor.copy_(numbers)
            if self.groups is groups:
                for group, copies in zip(groups, changes, strict=True):
                    group.restore(copies)
            else:  # the first passes of the step were inside the block
                self._forget_changes()
            self.passes, self.calls, self.micro_batch, self.latest = counters
            self.collected = self.passes
            self.is_repeating = was_repeating

    def finish(self, skipped: Tensor) -> None:
        """Set each buffer to what its rule says of the passes, or restore it if `skipped` (a device
        tensor) is 1.0.
        """
        if not self.started:  # no buffers, or a step without targets
            return
        is_plain = not self.several and self.passes == 1
        if is_plain and skipped.is_cpu:  # `skipped` is on the CPU if the weights are
            if read_on_cpu(skipped) != 0:
                self.undo()
            else:
                self._forget()
            return
        tensors = self.tensors()
        if self.relay is not None:
            self.relay.share(self._in_order(tensors))
        if any(group.has_other_shapes(tensors) for group in self.groups if not group.restarts):
            if read_for_other_shapes(skipped) != 0:
                self.undo()
                return
            skipped = skipped.new_zeros((), device="cpu")
        after = self._after(tensors, is_plain=is_plain)
        if not skipped.is_cpu:
            chosen = []
            for group, moved in zip(self.groups, after, strict=True):
                applied = (skipped == 0).to(group.before.device)
                values = group.join(tensors) if moved is None else moved
                chosen.append(torch.where(applied, values, group.before))
            self._write(tensors, chosen)
        elif read_on_cpu(skipped) == 0:
            self._write(tensors, after)
        else:
            self._write(tensors, [group.before for group in self.groups])
        self._forget()

    def _after(self, tensors: Sequence[Tensor], *, is_plain: bool) -> list[Tensor | None]:
        """Return the buffers of each group after the step, or None if they are in place."""
        if is_plain:
            return [None for _ in self.groups]  # with the bits of the pass
        self._collect(tensors)
        restarting = [group for group in self.groups if group.restarts]
        if self.world is None:
            after = iter([group.after(self.passes) for group in restarting])
        else:
            after = iter(self._after_all_ranks(restarting))
        return [next(after) if group.restarts else None for group in self.groups]

    @cached_property
    def _rank_sums(self) -> "RankSums":
        from surefoot.distributed.rank_sums import RankSums

        return RankSums(self.shares, rank=self.rank)

    def _after_all_ranks(self, groups: Sequence[BufferGroup]) -> list[Tensor]:
        assert self.world is not None
        if not groups:
            return []
        device = groups[0].before.device
        passes = torch.full((), self.passes, dtype=torch.float64, device=device)
        self.world.add_up(passes)
        passes = passes.clamp(min=1)
        latest = iter(self._latest_of_ranks([group for group in groups if group.rule == "last"]))
        after = []
        for group in groups:
            if group.rule == "last":
                after.append(next(latest))
            else:
                after.append(group.after_all_ranks(passes, self.calls + 1, self._rank_sums))
        return after

    def _latest_of_ranks(self, groups: Sequence[BufferGroup]) -> list[Tensor]:
        # the values after the last micro-batch with targets, as bytes of the rank that has it
        assert self.world is not None
        if not groups:
            return []
        of_rank = torch.full((), self.latest, device=groups[0].before.device)
        last = of_rank.clone()
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        has_last = (of_rank == last).logical_and_(last > 0)
        buffers = [group.before if group.last is None else group.last for group in groups]
        as_bytes = torch.cat([buffer.view(torch.uint8) for buffer in buffers]) * has_last
        self.world.add_up(as_bytes)
        by_group = torch.split(as_bytes, [buffer.nbytes for buffer in buffers])
        latest = []
        for group, of_group in zip(groups, by_group, strict=True):
            values = of_group.clone().view(group.before.dtype)
            latest.append(torch.where(last > 0, values, group.before))
        return latest

    def undo(self) -> None:
        """Restore the buffers that were changed by passes without an update."""
        if self.started:
            self.tensors()  # which refuses a buffer that became None
            self._restore_shapes()
            self._write(self.tensors(), [group.before for group in self.groups])
            self._forget()

    def _restore_shapes(self) -> None:
        present = [buffer for buffer in self.owners if buffer.tensor is not None]
        for buffer, (shape, dtype, device) in zip(present, self.kinds, strict=True):
            tensor = buffer.tensor
            if tensor is not None and tensor.shape != shape:
                empty = torch.empty(shape, dtype=dtype, device=device)
                buffer.module._buffers[buffer.key] = empty

    def tensors(self) -> list[Tensor]:
        """Return aliases to write to. Writing counts as a change for autograd, except in norms:
        their backward passes do not read the statistics, so a graph may outlive the change.
        """
        tensors = []
        for buffer in self.owners:
            tensor = buffer.module._buffers[buffer.key]
            if tensor is not None:
                tensors.append(tensor.data if buffer.is_norm else tensor.detach())
        if self.started and len(tensors) != len(self.kinds):
            raise ConfigError(
                "buffer-none",
                problem="a buffer became None, or was None, within a step",
                reason="a skipped step restores all buffers",
                remedy="register it with a tensor: self.register_buffer(name, torch.zeros(...))",
            )
        return tensors

    def _collect(self, tensors: Sequence[Tensor]) -> None:
        if self.collected < self.passes:
            for group in self.groups:
                if group.restarts:
                    group.collect(
                        tensors,
                        call=self.calls,
                        micro_batch=self.micro_batch,
                        own=self.shares[self.rank],
                    )
            self.collected = self.passes

    def _write(self, tensors: Sequence[Tensor], flats: Sequence[Tensor | None]) -> None:
        for group, flat in zip(self.groups, flats, strict=True):
            if flat is None:
                continue
            if flat is not group.before:
                torch._foreach_copy_(group.of(tensors), group.split(flat))
            elif not group.is_unchanged:
                torch._foreach_copy_(group.of(tensors), group.views)

    def _forget(self) -> None:
        self.started = False
        self.calls = 0
        self.micro_batch = -1
        self.passes = self.collected = self.latest = 0
        self.own_kept = None
        self._forget_changes()

    def _forget_changes(self) -> None:
        for group in self.groups:
            group.last = None
            group.changes.clear()


def read_for_other_shapes(skipped: Tensor) -> float:
    """Return whether an update was skipped, for buffers whose shapes changed in the step. The host
    waits for the device: no operator writes a tensor of one shape or another.
    """
    return float(skipped)
