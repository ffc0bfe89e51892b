"""Search for the micro-batch size: measures memory and throughput with the run's own steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from surefoot.config.batch_size import Batching
from surefoot.data.pipeline import planned_sizes
from surefoot.errors import ConfigError, Setting
from surefoot.memory import free_bytes, in_words, parsed_bytes
from surefoot.models.layers import Dropout
from surefoot.run.run import Run, check_run, trial_steps
from surefoot.tools.tune.batch_size_search import (
    BatchSizeSearch,
    SizeTrial,
    recommend,
    search_sizes,
)
from surefoot.tools.tune.micro_batch_trial import ONE_VALUE, MicroBatchTrial
from surefoot.train.error_causes import explained

_MARGIN = 0.9  # of the limit: fragmentation and kernel workspaces take memory that no tensor holds


def find_batch_size(
    run: Run,
    *,
    batch_size: int | str | None = None,
    memory: str | None = None,
    progress_fn: Callable[[str], None] | None = None,
) -> BatchSizeSearch:
    """Measure memory and throughput of micro-batch sizes, and recommend a size that keeps the run's
    batch size.

    The tried sizes are divisors of the batch size, in the run's unit (samples or tokens).
    `batch_size` replaces the run's batch size, in the form of `Run(batch_size=...)`. Each size runs
    steps on the run's data. The search measures the peak memory of these steps and the median times
    of a micro-batch and of an update, without data loading. A size fits if it needs at most 90% of
    the device's free memory, or of `memory` ("8GB"). On a CPU, sizes predicted to exceed the free
    memory are skipped, because the system would kill the process. All changes are undone: training
    continues bit for bit as without the search. `progress_fn(text)` receives one line per trial.

    >>> data = torch.randn(64, 4), torch.randn(64, 1)
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
    ...     train_data=data,
    ...     batch_size=16,
    ...     length="9 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> search = find_batch_size(run, memory="1 GB")
    >>> [row.size * row.accumulation for row in search.tried], search.largest.size
    ([16, 16, 16, 16, 16], 16)

    Raises `ConfigError` if no size fits, for a run without a `loss`, and in the middle of a step.
    """
    check_run(run, call="sf.tune.find_batch_size()", verb="find-batch-size")
    if run.world_size > 1:
        raise ConfigError(
            "find-batch-size-on-ranks",
            problem=f"sf.tune.find_batch_size runs in one process, and this run has {run.world_size} ranks",
            reason="each rank would measure other sizes, and wait for the others",
            remedy="call it in one process, with the batch size of one rank",
        )
    sizes = _target(run, batch_size)
    memory_bytes = None if memory is None else parsed_bytes(memory, setting="memory")
    with trial_steps(run, call="sf.tune.find_batch_size()") as parts:
        trial = MicroBatchTrial(parts, sizes)
        if memory_bytes is None:
            limit = free_bytes(parts.device) * _MARGIN
            standing = trial.standing_bytes()
            limit_bytes = int(limit + standing)  # free memory excludes standing bytes
        else:
            standing = trial.standing_bytes()
            limit_bytes = int(memory_bytes * _MARGIN)

        def attempt(size: int) -> SizeTrial:
            if progress_fn is not None:
                progress_fn(f"trying micro-batches of {size:,} {sizes.unit}")
            return trial.attempt(size, limit_bytes=limit_bytes)

        rows = search_sizes(
            attempt,
            trial.sizes(),
            deadly_bytes=_deadly_bytes(
                parts.device, limit_bytes=limit_bytes, standing_bytes=standing
            ),
            standing_bytes=standing,
        )
    search = recommend(rows, batch_size=sizes.batch_size, unit=sizes.unit, limit_bytes=limit_bytes)
    if search is not None:
        return search
    problem = _nothing_fits(rows, trial.failed, run=run, unit=sizes.unit, limit_bytes=limit_bytes)
    raise problem from None if problem is trial.failed else trial.failed


def _nothing_fits(
    rows: Sequence[SizeTrial], failed: Exception | None, *, run: Run, unit: str, limit_bytes: int
) -> Exception:
    measured = [row for row in rows if row.memory_bytes is not None]
    if failed is not None and not measured:
        if rows[-1].problem != ONE_VALUE:
            return explained(failed, where=f"at step {run.state.step}", micro_batches=()) or failed
        return ConfigError(
            "micro-batches-too-small",
            problem=f"micro-batches of up to {rows[-1].size} {unit} are too small: {ONE_VALUE}",
            remedy=("a larger", Setting("batch_size")),
            size=rows[-1].size,
        )
    smallest = measured[0]
    needed_bytes = smallest.memory_bytes or 0
    failures = [f"{row.size} {unit}: {row.problem}" for row in rows if row.memory_bytes is None]
    return ConfigError(
        "micro-batch-exceeds-memory",
        problem=f"even a micro-batch of {smallest.size} {unit} does not fit: it needs"
        f" {in_words(needed_bytes)}, but the limit is {in_words(limit_bytes)}",
        reason=failures[0] if failures else None,
        remedy=[Setting("precision", "bf16"), "use a smaller model or shorter samples"],
        size=smallest.size,
        needed_bytes=needed_bytes,
        limit_bytes=limit_bytes,
    )


def what_changes_with_it(run: Run) -> str:
    """Return a sentence on the effects of the micro-batch size on dropout and batch
    normalization.
    """
    modules: list[torch.nn.Module] = []
    for model in run.state.models.values():
        modules += model.modules()
    changed = []
    if any(_drops_units(module) for module in modules):
        changed.append("the units that dropout drops")
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in modules):
        changed.append("the statistics of batch normalization")
    sentence = "the samples of a step do not depend on the micro-batch size"
    return f"{sentence}; {' and '.join(changed)} do" if changed else sentence


def _drops_units(module: torch.nn.Module) -> bool:
    if isinstance(module, Dropout):
        return module.drop_fraction > 0
    return isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0


def _deadly_bytes(device: torch.device, *, limit_bytes: int, standing_bytes: int) -> float:
    if device.type != "cpu":  # an out-of-memory error of an accelerator can be caught
        return math.inf
    try:
        return free_bytes(device) * _MARGIN + standing_bytes
    except ConfigError:  # this system does not report free memory
        return limit_bytes


def _target(run: Run, batch_size: int | str | None) -> Batching:
    own = run.parts.pipeline.sizes
    if batch_size is None:
        return own
    sizes = planned_sizes(replace(run.parts.pipeline.data, batch_size=batch_size), None)
    if sizes.unit != own.unit:
        raise ConfigError(
            "batch-size-in-other-unit",
            problem=f"batch_size = {batch_size} is in {sizes.unit},"
            f" but the run's own batch_size is in {own.unit}",
            remedy=f"give it in {own.unit}, or change the run's batch_size",
            setting="batch_size",
            value=batch_size,
            expected=own.unit,
        )
    return sizes
