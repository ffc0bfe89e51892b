"""How large a micro-batch may be, and how large it should be: memory and throughput measured with steps of the run's own."""

import math
from collections.abc import Callable, Sequence

import torch

from surefoot.config.batch_size import Batching
from surefoot.data.pipeline import planned_sizes
from surefoot.errors import ConfigError
from surefoot.memory import free_bytes, in_words, parsed_bytes
from surefoot.models.layers import Dropout
from surefoot.run.run import Run, unchanged
from surefoot.train import error_causes
from surefoot.tune.batch_size_search import BatchSizeSearch, SizeTrial, recommend, search_sizes
from surefoot.tune.micro_batch_trial import ONE_VALUE, Trial

_MARGIN = 0.9  # of the limit: memory is lost between tensors, and kernels take some that no tensor holds


def find_batch_size(
    run: Run,
    *,
    batch_size: int | str | None = None,
    memory: str | None = None,
    progress_fn: Callable[[str], None] | None = None,
) -> BatchSizeSearch:
    """Measure memory and throughput of the run's micro-batch sizes, and recommend one that leaves its batch size as it is.

    Sizes tried are divisors of the batch size (or of `batch_size`, as `Run(batch_size=...)` takes it), in samples or in
    tokens as the run has it. Each size makes steps on the run's own data. Their peak memory and the median time of a pass and of an update
    are measured, without reading data. A size does not fit if it needs more than 90% of the free memory of
    the device, or of `memory` ("8GB"). Every size is tried, but on a CPU those that are predicted to
    need more than is free there: the system would end the process. All changes are undone: training continues bit for bit as if nothing had
    been tried. `progress_fn(text)` receives a line on each trial.

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
    >>> search = find_batch_size(run, memory="1 GB")
    >>> [row.size * row.accumulation for row in search.tried], search.largest.size
    ([16, 16, 16, 16, 16], 16)

    Raises `ConfigError` where no size fits, for a run without a loss of its own, and in the middle of a step.
    """
    sizes = _target(run, batch_size)
    memory_bytes = None if memory is None else parsed_bytes(memory, setting="memory")
    with unchanged(run) as parts:
        trial = Trial(parts, sizes)
        limit = (free_bytes(parts.device) if memory_bytes is None else memory_bytes) * _MARGIN
        standing = trial.standing_bytes()
        limit_bytes = int(limit + (standing if memory_bytes is None else 0))  # what stands already is not free any more

        def attempt(size: int) -> SizeTrial:
            if progress_fn is not None:
                progress_fn(f"trying micro-batches of {size:,} {sizes.unit}")
            return trial.attempt(size, limit_bytes=limit_bytes)

        rows = search_sizes(
            attempt,
            trial.sizes(),
            deadly_bytes=_deadly_bytes(parts.device, limit_bytes=limit_bytes, standing_bytes=standing),
            standing_bytes=standing,
        )
    if (search := recommend(rows, batch_size=sizes.batch_size, unit=sizes.unit, limit_bytes=limit_bytes)) is not None:
        return search
    problem = _nothing_fits(rows, trial.failed, run=run, unit=sizes.unit, limit_bytes=limit_bytes)
    raise problem from None if problem is trial.failed else trial.failed


def _nothing_fits(
    rows: Sequence[SizeTrial], failed: Exception | None, *, run: Run, unit: str, limit_bytes: int
) -> Exception:
    """Why no size can be used."""
    measured = [row for row in rows if row.memory_bytes is not None]
    if failed is not None and not measured:
        if rows[-1].problem != ONE_VALUE:
            return error_causes.explained(failed, step=run.state.step, micro_batches=()) or failed
        return ConfigError(
            f"no micro-batch of up to {rows[-1].size} {unit} can be trained with: {ONE_VALUE}\n"
            "  try: a larger --batch-size"
        )
    refused = [f"\n  {row.size} {unit}: {row.problem}" for row in rows if row.memory_bytes is None]
    return ConfigError(
        f"not even a micro-batch of {measured[0].size} {unit} fits: it needs "
        f"{in_words(measured[0].memory_bytes or 0)}, and {in_words(limit_bytes)} may be used{''.join(refused[:1])}\n"
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


def _target(run: Run, batch_size: int | str | None) -> Batching:
    """The batch that is to be kept; in the unit of the run's own, which its data and settings go by."""
    own = run.parts.pipeline.sizes
    sizes = own if batch_size is None else planned_sizes(run.parts.pipeline.dataset, batch_size, None)
    if sizes.unit != own.unit:
        raise ConfigError(
            f"batch_size = {batch_size} is in {sizes.unit}, and the run's own in {own.unit}\n"
            f"  give it in {own.unit}, or the run another batch_size"
        )
    return sizes
