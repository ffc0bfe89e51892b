"""From what a user hands over as data to the plan by which samples become steps: sizes, order, and how many steps a pass has."""

from typing import Any

import numpy as np

from surefoot.config.batch_size import Batching, batching, one_each
from surefoot.data.buckets import Buckets, Lengthy
from surefoot.data.mixture import Mixture
from surefoot.data.order import Cut, Ids, MicroBatches, MixtureOrder, Order, Plan
from surefoot.distributed.strategy import refuse_ranks
from surefoot.errors import ConfigError, DataError


def planned_sizes(
    train: Any,
    batch_size: int | str,
    micro_batch_size: int | str | None,
    *,
    ranks: int = 1,
    began: int | str | None = None,
) -> Batching:
    """The sizes of a step and its micro-batches; tokens only where the samples differ in length.

    Without a `micro_batch_size` each of `ranks` makes one; a run that has begun keeps the size it began with.
    """
    if micro_batch_size is None:
        micro_batch_size = began or one_each(batch_size, ranks=ranks)
    sizes = batching(batch_size, micro_batch_size)
    refuse_ranks(ranks, pieces=sizes.pieces, batch_size=batch_size, begun=began is not None)
    if sizes.unit == "samples":
        return sizes
    if not isinstance(train, Lengthy):
        raise ConfigError(
            f"batch_size = {batch_size}: {type(train).__name__} does not say how long its samples are\n"
            "  give a number of samples, or the data set an attribute `lengths`: (samples,) or (samples, sides)"
        )
    return sizes.of_equal_samples(train.lengths) if isinstance(train.lengths, int) else sizes


def data_plan(train: Any, *, seed: int, samples: int, sizes: Batching) -> MicroBatches:
    """Which samples a micro-batch sees: one permutation a pass, a weighted mixture of them, or batches of equal length."""
    if sizes.unit == "tokens":
        return Buckets(seed, lengths=_lengths(train, samples), tokens=sizes.micro_batch_size, pieces=sizes.pieces)
    plan: Plan
    if isinstance(train, Mixture):
        plan = MixtureOrder(seed, sizes=train.sizes, weights=train.weights, batch_size=sizes.batch_size)
    else:
        plan = Order(seed, samples=samples, batch_size=sizes.batch_size)
    return Cut(plan, sizes.micro_batch_size)


def steps_of_epoch(plan: MicroBatches, sizes: Batching) -> tuple[int, int]:
    """A pass over the data and a step, in units of which each is a whole number: samples, or steps where these vary in samples."""
    return (plan.steps, 1) if isinstance(plan, Buckets) else (plan.samples, sizes.batch_size)


def refuse_compiled(plan: MicroBatches, *, compiled: bool) -> None:
    """Raise where what is compiled for one shape would be given another one in almost every step."""
    if compiled and isinstance(plan, Buckets):
        raise ConfigError(
            "compile: batches by tokens have another shape in almost every step, and each would be compiled anew\n"
            "  leave --compile out, or give batch_size in samples"
        )


def _lengths(train: Any, samples: int) -> Ids:
    """What a data set says of its samples' lengths; `DataError` for what cannot be."""
    found = np.asarray(train.lengths)
    fits = (
        found.ndim in (1, 2) and len(found) == samples and found.dtype.kind in "iu" and found.size and found.min() > 0
    )
    if not fits:
        raise DataError(
            f"{type(train).__name__}.lengths is {found.dtype} of shape {found.shape}, and there are {samples} samples\n"
            "  give whole numbers of tokens, 1 or more: (samples,) or (samples, sides)"
        )
    return found.astype(np.int64)
