"""How large a micro-batch may be, and how large it should be: memory and throughput measured with steps of the run's own."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from surefoot.config.batch_size import Batching
from surefoot.data.buckets import Buckets
from surefoot.data.loader import MicroBatch
from surefoot.data.order import Ids
from surefoot.data.order_build import data_plan, planned_sizes
from surefoot.errors import ConfigError, first_line
from surefoot.memory import free_bytes, in_words, parsed_bytes, peak, tensor_bytes
from surefoot.models.layers import Dropout
from surefoot.optim.clipping import clear
from surefoot.run.components import RunComponents
from surefoot.run.run import Run
from surefoot.run.unchanged import unchanged
from surefoot.train import error_causes
from surefoot.train.loop import Step, forward_backward, update
from surefoot.train.scratch import timed_pass
from surefoot.tune.batch_size_search import FoundBatch, Tried, chosen, searched

_ONE_VALUE = "batch normalisation cannot train on one value"
_MARGIN = 0.9  # of the limit: memory is lost between tensors, and kernels take some that no tensor holds
_ROUNDS = 5
_ENOUGH_S = 3.0  # of timing one size
_LOOKED_AT = 200  # micro-batches, for the fullest of those that differ


def find_batch_size(
    run: Run,
    *,
    target_batch: int | str | None = None,
    memory: str | None = None,
    watch: Callable[[str], None] | None = None,
) -> FoundBatch:
    """Measure memory and throughput of the run's micro-batch sizes, and recommend one that leaves its batch size as it is.

    Sizes tried are divisors of the batch size (or of `target_batch`, as `Run(batch_size=...)` takes it), in samples or in
    tokens as the run has it. For each, steps are made on the run's own data: their peak of memory is measured, and the
    median time of a pass and of an update; reading data is not in it. A size that needs more than nine tenths of what is
    free on the device, or of `memory` ("8GB"), does not fit. Every size is tried, but on a CPU those that are predicted to
    need more than is free there: the system would end the process. What is done is undone: training goes on bit for bit
    as if nothing had been tried. `watch(text)` is told what is being tried.

    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     train_data=data,
    ...     optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    ...     batch_size=16,
    ...     length="9 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> found = find_batch_size(run, memory="1 GB")
    >>> [row.size * row.accumulation for row in found.tried], found.largest.size
    ([16, 16, 16, 16, 16], 16)

    Raises `ConfigError` where no size fits, for a run without a loss of its own, and in the middle of a step.
    """
    sizes = _target(run, target_batch)
    given = None if memory is None else parsed_bytes(memory, setting="memory")
    with unchanged(run) as parts:
        trial = _Trial(parts, sizes)
        limit = (free_bytes(parts.device) if given is None else given) * _MARGIN
        standing = trial.standing_bytes()
        limit_bytes = int(limit + (standing if given is None else 0))  # what stands already is not free any more

        def attempt(size: int) -> Tried:
            if watch is not None:
                watch(f"trying micro-batches of {size:,} {sizes.unit}")
            return trial.attempt(size, limit_bytes=limit_bytes)

        deadly_bytes = _deadly_bytes(parts.device, limit_bytes=limit_bytes, standing_bytes=standing)
        rows = searched(attempt, trial.sizes(), deadly_bytes=deadly_bytes, standing_bytes=standing)
    found = chosen(rows, batch_size=sizes.batch_size, unit=sizes.unit, limit_bytes=limit_bytes)
    if found is not None:
        return found
    measured = [row for row in rows if row.memory_bytes is not None]
    if trial.failed is not None and not measured:
        if rows[-1].problem == _ONE_VALUE:
            raise ConfigError(
                f"no micro-batch of up to {rows[-1].size} {sizes.unit} can be trained with: {_ONE_VALUE}\n"
                "  try: a larger --batch-size"
            )
        cause = error_causes.explained(trial.failed, step=run.state.step, micro_batches=())
        if cause is None:
            raise trial.failed
        raise cause from trial.failed
    refused = [f"\n  {row.size} {sizes.unit}: {row.problem}" for row in rows if row.memory_bytes is None]
    raise ConfigError(
        f"not even a micro-batch of {measured[0].size} {sizes.unit} fits: it needs "
        f"{in_words(measured[0].memory_bytes or standing)}, and {in_words(limit_bytes)} may be used{''.join(refused[:1])}\n"
        "  try: a smaller model, --precision bf16, or shorter samples"
    )


def what_changes_with_it(run: Run) -> str:
    """Which parts of a model see another thing with another micro-batch size, in a sentence."""
    parts = [part for model in run.state.models.values() for part in model.modules()]
    dropping = any(
        (isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0)
        or (isinstance(part, Dropout) and part.drop_fraction > 0)
        for part in parts
    )
    batch_norm = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in parts)
    changed = ["which units dropout drops"] * dropping + ["what batch normalisation sees at once"] * batch_norm
    does = f"; {' and '.join(changed)} {'do' if len(changed) > 1 else 'does'}" if changed else ""
    return f"which samples a step sees does not depend on it{does}"


def _deadly_bytes(device: torch.device, *, limit_bytes: int, standing_bytes: int) -> float:
    """How much a trial may be predicted to take: of an accelerator any amount, since running out of it can be caught."""
    if device.type != "cpu":
        return math.inf
    try:
        return free_bytes(device) * _MARGIN + standing_bytes
    except ConfigError:  # not told by this system
        return limit_bytes


def _target(run: Run, target_batch: int | str | None) -> Batching:
    """The batch that is to be kept; in the unit of the run's own, which its data and settings go by."""
    own = run.parts.supply.sizes
    if target_batch is None:
        return own
    sizes = planned_sizes(run.parts.supply.dataset, target_batch, None)
    if sizes.unit != own.unit:
        raise ConfigError(
            f"target_batch = {target_batch} is in {sizes.unit}, and this run's batch_size in {own.unit}\n"
            f"  give it in {own.unit}, or the run another batch_size"
        )
    return sizes


class _Chosen:
    """A plan whose every step is of micro-batches that were chosen (`data.plan.MicroBatches`)."""

    def __init__(self, chosen: Sequence[tuple[Ids, Ids]], samples: int) -> None:
        self.chosen, self.samples, self.pieces = chosen, samples, len(chosen)

    def micro_batches(self, step: int) -> Sequence[tuple[Ids, Ids]]:
        assert step == 0
        return self.chosen

    def described(self) -> dict[str, Any]:
        return {"order": "chosen"}


class _Trial:
    """Steps of one run with micro-batches of any size; its learning rate is 0, so that nothing diverges meanwhile."""

    def __init__(self, parts: RunComponents, sizes: Batching) -> None:
        self.parts, self.state, self.target = parts, parts.state, sizes
        self.task = replace(parts.task, factors=lambda _: 0.0)
        # compiled code is not seen where operators are counted; without it a step needs no less
        models: Any = self.state.models["model"] if list(self.state.models) == ["model"] else self.state.models
        seen = parts.compiled and parts.device.type != "cuda"
        self.measured_task = replace(self.task, forward=models) if seen else self.task
        self.failed: Exception | None = None
        self.update_s: float | None = None

    def sizes(self) -> list[int]:
        """The divisors of the batch, from the smallest that holds every sample."""
        plan = self.parts.supply.plan
        least = int(plan.longest.max()) if isinstance(plan, Buckets) else 1
        whole = self.target.batch_size
        return [size for size in range(least, whole + 1) if whole % size == 0]

    def standing_bytes(self) -> int:
        """Models, averages and optimizer state, as they are kept between steps; before the first update as far as known."""
        held: list[Tensor] = [tensor for model in self.state.models.values() for tensor in _tensors_of(model)]
        held += [tensor for average in self.state.averages.values() for tensor in _tensors_of(average.model)]
        for trained in self.state.trained.values():
            states = trained.optimizer.state.values()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return tensor_bytes(held)

    def attempt(self, size: int, *, limit_bytes: int) -> Tried:
        """Make steps with micro-batches of one size, and measure; what is in the way of that is told in the row."""
        pieces = self.target.batch_size // size
        try:
            return self._measured(size, pieces, limit_bytes)
        except Exception as problem:
            failed = problem
        self._let_go()
        if _is_out_of_memory(failed):
            return Tried(size, pieces, limit_bytes + 1, problem="out of memory")
        self.failed = self.failed or failed
        said = _ONE_VALUE if _is_one_value(failed) else first_line(failed) or type(failed).__name__
        return Tried(size, pieces, None, problem=said if len(said) <= 60 else f"{said[:57]}...")

    def _measured(self, size: int, pieces: int, limit_bytes: int) -> Tried:
        if self.parts.compiled:
            torch.compiler.reset()  # each size is compiled by itself, and torch gives up after the eighth
        timed, fullest = self._micro_batches(size)
        twice = min(pieces, 2)  # the second pass finds the gradients of the first in memory
        self._step(self.task, [timed[0]] * twice)  # what the first step allocates, and what stays of it
        most = 0
        for micro_batch in fullest:
            with peak(self.parts.device) as found:
                self._step(self.measured_task, [micro_batch] * twice)
            # a step's batches are all there before its first pass; on an accelerator the next step's too
            copies = pieces * (1 if self.parts.device.type == "cpu" else 2)
            held = tensor_bytes(held for held in tree_iter(micro_batch.batch) if isinstance(held, Tensor))
            most = max(most, found.memory_bytes + copies * held)
        memory_bytes = self.standing_bytes() + most
        if memory_bytes > limit_bytes:
            return Tried(size, pieces, memory_bytes, problem="does not fit")
        if self.update_s is None:
            self.update_s = median(self._update_s(timed[0]) for _ in range(_ROUNDS))
        passes = [timed_pass(self.task, self.state, micro_batch) for micro_batch in timed]
        targets = sum(count for _, count in passes) / len(timed)
        begun, times = perf_counter(), list[float]()
        while len(times) < _ROUNDS and (len(times) < 2 or perf_counter() - begun < _ENOUGH_S):
            times.append(sum(timed_pass(self.task, self.state, micro_batch)[0] for micro_batch in timed) / len(timed))
        step_s = pieces * median(times) + self.update_s
        samples = sum(len(micro_batch.ids) for micro_batch in timed) / len(timed)
        return Tried(size, pieces, memory_bytes, pieces * samples / step_s, pieces * targets / step_s)

    def _micro_batches(self, size: int) -> tuple[list[MicroBatch], list[MicroBatch]]:
        """Micro-batches of one size to be timed, and to measure memory with: the same, or the fullest where they differ."""
        supply, state = self.parts.supply, self.state
        sizes = Batching(size, size, self.target.unit)
        plan = data_plan(supply.dataset, seed=supply.seed, samples=supply.plan.samples, sizes=sizes)
        if isinstance(plan, Buckets):
            longest = plan.longest
            looked_at = [plan.micro_batches(step)[0] for step in range(min(plan.steps, _LOOKED_AT))]
            by_places = max(looked_at, key=lambda held: len(held[0]) * int(longest[held[0]].max()))
            by_length = max(looked_at, key=lambda held: int(longest[held[0]].max()))
            ids = [*looked_at[:4], by_places, by_length]
        else:
            ids = [plan.micro_batches(state.step)[0]]
        feed = replace(supply, plan=_Chosen(ids, plan.samples), sizes=sizes).feed(workers=0)
        feed.start(0, stop=1)
        made = feed.micro_batches(0)
        return (made[:-2], made[-2:]) if isinstance(plan, Buckets) else (made, made)

    def _step(self, task: Any, micro_batches: list[MicroBatch]) -> None:
        step = Step(self.state.step, micro_batches, task, self.state)
        forward_backward(step)
        update(step)
        _wait(step)

    def _update_s(self, micro_batch: MicroBatch) -> float:
        step = Step(self.state.step, [micro_batch], self.task, self.state)
        forward_backward(step)
        _wait(step)
        begun = perf_counter()
        update(step)
        _wait(step)
        return perf_counter() - begun

    def _let_go(self) -> None:
        """Free what a step that failed has left."""
        clear(self.state.parameters)
        self.state.buffers.undo()
        gc.collect()
        if self.parts.device.type == "cuda":
            torch.cuda.empty_cache()


def _wait(step: Step) -> None:
    """Wait for the device: what is read was asked for last."""
    assert step.loss is not None
    float(step.loss + 0.0)


def _tensors_of(model: torch.nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _is_one_value(problem: Exception) -> bool:
    """Of torch's batch normalisation in training mode, for which there is no variance of one value."""
    return isinstance(problem, ValueError) and "more than 1 value per channel" in str(problem)


def _is_out_of_memory(problem: Exception) -> bool:
    """Of an accelerator, or of the CPU's allocator, which raises a plain RuntimeError."""
    told = isinstance(problem, RuntimeError) and "allocate memory" in str(problem)
    return told or isinstance(problem, torch.OutOfMemoryError | MemoryError)
