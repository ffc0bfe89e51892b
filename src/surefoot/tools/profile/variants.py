"""Variants of a run's own step that may be faster."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surefoot.config.batch_size import Batching
from surefoot.config.tree import did_you_mean
from surefoot.data.buckets import Buckets
from surefoot.data.pipeline import DataPipeline
from surefoot.errors import ConfigError
from surefoot.optim.build import RunOptimizer
from surefoot.optim.skip_step import skipping
from surefoot.run.components import RunComponents
from surefoot.tools.profile.flops import kept_activations, recomputed_blocks
from surefoot.tools.profile.timed_step import Stepping, stopwatch
from surefoot.train.compile import compiled, sole_or_all
from surefoot.train.loop import State, Task
from surefoot.train.precision import Precision

NAMES = (
    "workers",
    "precision",
    "fused",
    "checkpointing",
    "channels-last",
    "micro-batch",
    "compile",
)
USUAL = NAMES[:-1]


@dataclass(frozen=True)
class StepVariant:
    """One variant to measure. `flag` is the text to type, `changes` describes how results differ,
    `entered` modifies the run.
    """

    name: str
    flag: str
    make: Callable[[], Stepping]
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    changes: str = ""
    workers: int | None = (
        None  # if set, it is measured alone, from its first step on, since workers prefetch
    )


def speedups_of(text: str) -> tuple[str, ...]:
    """Return the names in `--speedups`, which is "none", "usual" (all but compile), "all", or names
    separated by commas.

    >>> speedups_of("workers,compile"), speedups_of("none")
    (('workers', 'compile'), ())
    """
    sets = {"none": (), "usual": USUAL, "all": NAMES}
    if text in sets:
        return sets[text]
    available = [*sets, *NAMES]
    names = tuple(part.strip().replace("_", "-") for part in text.split(","))
    for name in names:
        if name not in NAMES:
            raise ConfigError(
                "speedup-unknown",
                problem=f"no speedup is called {name!r}",
                remedy=did_you_mean(name, NAMES, otherwise=f"available: {', '.join(available)}"),
                setting="speedups",
                value=name,
            )
    return names


_DIGITS = {
    "bf16": "bf16 has 3 decimal digits, fp32 has 7",
    "tf32": "products have 4 decimal digits instead of 7",
    "fp32": "more decimal digits",
}
_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)


def variants(parts: RunComponents, names: Sequence[str]) -> list[StepVariant]:
    """Return the variants of these names for a run. Names that do not apply to the run are
    skipped.
    """
    makers = (
        _workers,
        _precisions,
        _fused,
        _without_recompute,
        _channels_last,
        _micro_batches,
        _compiled,
    )
    of_run = []
    for name in names:
        of_run += makers[NAMES.index(name)](parts)
    return of_run


def stepping(
    parts: RunComponents,
    *,
    task: Task | None = None,
    state: State | None = None,
    pipeline: DataPipeline | None = None,
    workers: int | None = None,
) -> Stepping:
    """Return the steps of a run, with the given parts replaced."""
    pipeline = pipeline or parts.pipeline
    feed = pipeline.feed(workers=pipeline.workers if workers is None else workers)
    return Stepping(task or parts.task, state or parts.state, feed, stopwatch(parts.device))


def _precisions(parts: RunComponents) -> list[StepVariant]:
    own = parts.run_state.precision
    if own.loss_scale is not None:  # loss scaling would interfere
        return []
    names = ["fp32", "bf16"]
    if parts.device.type == "cuda":
        names.insert(1, "tf32")
    tried = []
    for name in names:
        if name != own.name:
            precision = Precision(name, parts.device)
            make = partial(stepping, parts, task=replace(parts.task, precision=precision))
            flag = f"--precision {name}"
            tried.append(StepVariant(name, flag, make, precision.numerics, _DIGITS[name]))
    return tried


def _workers(parts: RunComponents) -> list[StepVariant]:
    # batches are gathered from memory, without workers
    if parts.pipeline.feed(workers=0).gather is not None:
        return []
    present = parts.pipeline.workers
    most = min(2 * max(present, 1), os.cpu_count() or 1)
    tried = []
    for count in sorted({0, 1, 2, 4, 8, 2 * present} - {present}):
        if count <= most:
            make = partial(stepping, parts, workers=count)
            flag = f"--workers {count}"
            tried.append(StepVariant(f"workers {count}", flag, make, workers=count))
    return tried


def _micro_batches(parts: RunComponents) -> list[StepVariant]:
    pipeline = parts.pipeline
    sizes = pipeline.sizes
    min_size = 1
    changes = ""
    if isinstance(pipeline.plan, Buckets):
        min_size = int(pipeline.plan.longest.max())
        changes = "other samples share a micro-batch"
    elif any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in _modules(parts)):
        changes = "batch normalization averages over each micro-batch"
    up_to_batch = range(min_size, sizes.batch_size + 1)
    divisors = [size for size in up_to_batch if sizes.batch_size % size == 0]
    below = [size for size in divisors if size < sizes.micro_batch_size][-1:]
    above = [size for size in divisors if size > sizes.micro_batch_size][:1]

    def build(size: int) -> Stepping:
        cut = Batching(sizes.batch_size, size, sizes.unit)
        return stepping(parts, pipeline=replace(pipeline, plan=pipeline.plan_with(cut), sizes=cut))

    flag = "--micro-batch-size {}" if sizes.unit == "samples" else '--micro-batch-size "{} tokens"'
    tried = []
    for size in [*below, *above]:
        name = f"micro-batches of {size:,}"
        make = partial(build, size)
        tried.append(StepVariant(name, flag.format(size), make, changes=changes))
    return tried


def _fused(parts: RunComponents) -> list[StepVariant]:
    slow = {
        name: trained
        for name, trained in parts.state.optimizers.items()
        if type(trained.optimizer) in _FUSED
        and not trained.takes_closure
        and not all(group.get("fused") for group in trained.optimizer.param_groups)
    }
    if not slow or parts.device.type not in ("cpu", "cuda"):
        return []

    def fused(trained: RunOptimizer) -> RunOptimizer:
        groups = [dict(group) for group in trained.optimizer.param_groups]
        for group in groups:
            for name in ("fused", "foreach", "capturable"):
                group.pop(name, None)
        optimizer_class: Any = type(trained.optimizer)
        optimizer = optimizer_class(groups, lr=groups[0]["lr"], fused=True)
        return replace(trained, optimizer=optimizer, skip=skipping(optimizer, parts.device))

    def make() -> Stepping:
        quick = parts.state.optimizers | {name: fused(trained) for name, trained in slow.items()}
        return stepping(parts, state=replace(parts.state, optimizers=quick))

    class_names = dict.fromkeys(type(trained.optimizer).__name__ for trained in slow.values())
    how = f"{' and '.join(class_names)}(..., fused=True)"
    return [StepVariant("fused optimizer", how, make, changes="equal up to rounding")]


def _channels_last(parts: RunComponents) -> list[StepVariant]:
    last = torch.channels_last
    weights = [module.weight for module in _modules(parts) if isinstance(module, nn.Conv2d)]
    to_change = []
    for weight in weights:
        if weight.is_contiguous() or not weight.is_contiguous(memory_format=last):
            to_change.append(weight)
    if parts.compiled or parts.layout.channels_last or not to_change:
        return []

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as afterwards:
            for weight in to_change:
                afterwards.callback(setattr, weight, "data", weight.data)
                weight.data = weight.data.contiguous(memory_format=last)
            for model in parts.state.models.values():
                afterwards.callback(model.register_forward_pre_hook(_inputs_too).remove)
            yield

    how = "--channels-last"
    make = partial(stepping, parts)
    alone = StepVariant("channels last", how, make, entered, "equal up to rounding")
    if parts.plan.precision != "fp32":
        return [alone]
    both = f"--precision bf16 {how}"  # a choice of "auto"
    in_bf16 = replace(parts.task, precision=Precision("bf16", parts.device))
    make_both = partial(stepping, parts, task=in_bf16)
    return [
        alone,
        StepVariant("bf16, channels last", both, make_both, entered, _DIGITS["bf16"]),
    ]


def _without_recompute(parts: RunComponents) -> list[StepVariant]:
    blocks = recomputed_blocks(parts.state)
    if not blocks or parts.compiled:
        return []
    how = "--activation-checkpointing off"
    make = partial(stepping, parts)
    entered = partial(kept_activations, blocks)
    return [StepVariant("activations kept", how, make, entered, "more memory, identical results")]


def _compiled(parts: RunComponents) -> list[StepVariant]:
    takes_closure = any(trained.takes_closure for trained in parts.state.optimizers.values())
    in_buckets = isinstance(parts.pipeline.plan, Buckets)
    if parts.compiled or takes_closure or in_buckets or parts.world.size > 1:
        return []

    def make() -> Stepping:
        forward = sole_or_all(compiled(parts.state.models))
        return stepping(parts, task=replace(parts.task, forward=forward))

    return [StepVariant("compiled", "--compile", make, changes="equal up to rounding")]


def _inputs_too(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    changed = []
    for x in inputs:
        is_image = isinstance(x, Tensor) and x.ndim == 4
        changed.append(x.contiguous(memory_format=torch.channels_last) if is_image else x)
    return tuple(changed)


def _modules(parts: RunComponents) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for model in parts.state.models.values():
        modules += model.modules()
    return modules
