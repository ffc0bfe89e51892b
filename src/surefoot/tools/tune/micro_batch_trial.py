"""The trial of one micro-batch size: runs steps of the run, and measures their peak memory and
time.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from surefoot.config.batch_size import Batching
from surefoot.data.buckets import Buckets
from surefoot.data.loader import MicroBatch
from surefoot.data.nested import tensors
from surefoot.data.order import Ids
from surefoot.distributed.tree_sum import sums_in_memory
from surefoot.errors import first_line
from surefoot.memory import peak, tensor_bytes
from surefoot.optim.clipping import clear
from surefoot.optim.kinds.kind import state_bytes, state_tensors
from surefoot.run.components import RunComponents
from surefoot.tools.tune.batch_size_search import SizeTrial
from surefoot.tracking.format import shortened
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import Step, forward_backward, update
from surefoot.train.timed_pass import timed_pass, zero_rates

ONE_VALUE = "batch normalization needs more than one value per channel"
_ROUNDS = 5
_ENOUGH_S = 3.0  # time limit for timing one size
_LOOKED_AT = 200  # micro-batches among which the largest is searched for, if sizes differ


class _FixedPlan:
    def __init__(self, chosen: Sequence[tuple[Ids, Ids]], samples: int) -> None:
        self.chosen = chosen
        self.samples = samples
        self.pieces = len(chosen)
        self.steps = 1

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        assert step == 0
        return self.chosen

    def to_dict(self) -> dict[str, Any]:
        return {"order": "chosen"}


class MicroBatchTrial:
    """Steps of one run with micro-batches of any size, and the rates of `zero_rates`, so that
    training does not diverge.
    """

    def __init__(self, parts: RunComponents, sizes: Batching) -> None:
        self.parts = parts
        self.state = parts.state
        self.target = sizes
        self.task = zero_rates(parts.task, parts.state)
        # memory is counted per operator, which compiled code hides; an uncompiled step needs at
        # least as much
        self.measured_task = self.task
        if parts.compiled and parts.device.type != "cuda":
            self.measured_task = replace(self.task, forward=sole_or_all(self.state.models))
        self.failed: Exception | None = None
        self.update_s: float | None = None
        self.evaluations = 1  # of each step; more with a closure

    def sizes(self) -> list[int]:
        """Return the divisors of the batch size, from the smallest that fits the longest sample."""
        plan = self.parts.pipeline.plan
        total = self.target.batch_size
        min_size = int(plan.longest.max()) if isinstance(plan, Buckets) else 1
        return [size for size in range(min_size, total + 1) if total % size == 0]

    def standing_bytes(self) -> int:
        """Return the bytes of models, weight averages and optimizer state; unknown state is missing
        before the first update.
        """
        averages = [average.model for average in self.state.ema_models.values()]
        weights: list[Tensor] = []
        for model in [*self.state.models.values(), *averages]:
            weights += model.parameters()
            weights += model.buffers()
        total = tensor_bytes(weights)
        for trained in self.state.optimizers.values():
            expected = state_bytes(trained.optimizer) or 0
            present = tensor_bytes(state_tensors(trained.optimizer))
            total += max(expected, present)
        return total

    def attempt(self, size: int, *, limit_bytes: int) -> SizeTrial:
        """Run and measure steps with micro-batches of one size. If a step fails, `problem` of the
        result holds the reason.
        """
        pieces = self.target.batch_size // size
        try:
            return self._measured(size, pieces, limit_bytes)
        except Exception as problem:
            failed = problem
        clear(self.state.parameters)  # free leftover gradients
        self.state.buffers.undo()
        gc.collect()
        if self.parts.device.type == "cuda":
            torch.cuda.empty_cache()
        out_of_memory = isinstance(failed, torch.OutOfMemoryError | MemoryError)
        # the CPU's allocator raises a plain RuntimeError
        if out_of_memory or "allocate memory" in str(failed):
            return SizeTrial(size, pieces, limit_bytes + 1, problem="out of memory")
        self.failed = self.failed or failed
        text = first_line(failed) or type(failed).__name__
        reason = shortened(text, 60)
        # torch's batch norm
        if isinstance(failed, ValueError) and "more than 1 value per channel" in text:
            reason = ONE_VALUE
        return SizeTrial(size, pieces, None, problem=reason)

    def _measured(self, size: int, pieces: int, limit_bytes: int) -> SizeTrial:
        if self.parts.compiled:
            # each size is compiled separately, and torch gives up after 8 compilations
            torch.compiler.reset()
        timed, fullest = self._micro_batches(size)
        # the second micro-batch runs while the gradients of the first are in memory
        twice = min(pieces, 2)
        self._step(self.task, [timed[0]] * twice)  # allocates optimizer state and caches
        peak_bytes = 0
        for micro_batch in fullest:
            with peak(self.parts.device) as usage:
                self._step(self.measured_task, [micro_batch] * twice)
            # all batches of a step are loaded before its first pass; on an accelerator also those
            # of the next step
            copies = pieces * (1 if self.parts.device.type == "cpu" else 2)
            batch_bytes = tensor_bytes(tensors(micro_batch.batch))
            peak_bytes = max(peak_bytes, usage.memory_bytes + copies * batch_bytes)
        # longer steps hold more sums of gradients than the measured one
        if self.parts.task.ranks.exact:
            more_sums = sums_in_memory([range(pieces)]) - sums_in_memory([range(twice)])
            peak_bytes += more_sums * tensor_bytes(self.state.parameters)
        memory_bytes = self.standing_bytes() + peak_bytes
        if memory_bytes > limit_bytes:
            return SizeTrial(size, pieces, memory_bytes, problem="does not fit")
        if self.update_s is None:
            update_s = median(self._step(self.task, [timed[0]]) for _ in range(_ROUNDS))
            # most of it is passes, which are counted below
            self.update_s = update_s if self.evaluations == 1 else 0.0
        targets = sum(timed_pass(self.task, self.state, micro_batch)[1] for micro_batch in timed)
        samples = sum(len(micro_batch.sample_ids) for micro_batch in timed)
        start_s = perf_counter()
        times: list[float] = []
        while len(times) < _ROUNDS and (len(times) < 2 or perf_counter() - start_s < _ENOUGH_S):
            passes = [timed_pass(self.task, self.state, micro_batch) for micro_batch in timed]
            times.append(sum(took_s for took_s, _ in passes))
        passes_s = pieces * self.evaluations * median(times)
        steps_s = passes_s + self.update_s * len(timed)  # seconds of len(timed) steps
        samples_per_s = pieces * samples / steps_s
        targets_per_s = pieces * targets / steps_s
        return SizeTrial(size, pieces, memory_bytes, samples_per_s, targets_per_s)

    def _micro_batches(self, size: int) -> tuple[list[MicroBatch], list[MicroBatch]]:
        # micro-batches for timing and for memory; in buckets, memory is measured with the largest
        # and the longest
        pipeline = self.parts.pipeline
        sizes = Batching(size, size, self.target.unit)
        plan = pipeline.plan_with(sizes)
        if isinstance(plan, Buckets):
            longest = plan.longest
            checked = [plan.micro_batches(step)[0] for step in range(min(plan.steps, _LOOKED_AT))]
            largest = max(checked, key=lambda drawn: len(drawn[0]) * int(longest[drawn[0]].max()))
            with_longest = max(checked, key=lambda drawn: int(longest[drawn[0]].max()))
            ids = [*checked[:4], largest, with_longest]
        else:
            ids = [plan.micro_batches(self.state.step)[0]]
        feed = replace(pipeline, plan=_FixedPlan(ids, plan.samples), sizes=sizes).feed(workers=0)
        feed.start(0, stop=1)
        micro_batches = feed.micro_batches(0)
        if isinstance(plan, Buckets):
            return micro_batches[:-2], micro_batches[-2:]
        return micro_batches, micro_batches

    def _step(self, task: Any, micro_batches: list[MicroBatch]) -> float:
        step = Step(self.state.step, micro_batches, task, self.state)
        forward_backward(step)
        _wait(step)
        before = self._closure_evaluations()
        start_s = perf_counter()
        update(step)
        _wait(step)
        self.evaluations = max(self.evaluations, 1 + self._closure_evaluations() - before)
        return perf_counter() - start_s

    def _closure_evaluations(self) -> int:
        return sum(trained.evaluations for trained in self.state.optimizers.values())


def _wait(step: Step) -> None:
    assert step.loss is not None
    float(step.loss + 0.0)  # the sum is queued last, so reading it waits for the device
