"""The loss contract: the loss of a batch is the mean over its counted targets, so it is the
count-weighted mean of its two halves.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.data.dataset_checks import rows
from surefoot.data.loader import MicroBatch
from surefoot.data.nested import select_rows
from surefoot.errors import ConfigError
from surefoot.mean import Mean

CLEAR = 0.1
"""Relative difference that rounding cannot explain."""

_ROUNDING = 0.01  # of the tolerance: of two passes over the same batch
_REASON = "the loss is not a mean over what it counts, so gradients depend on the micro-batch size"
_REASON_OF_SUM = (
    "the loss is a sum over the samples, maybe divided by a constant, so gradients grow with the"
    " batch"
)


@dataclass(frozen=True)
class LossContract:
    """What a check of the loss contract found, in one line.

    `is_sum`: twice the samples have twice the loss, as a sum has, also one divided by a constant.
    `is_checked` is False where no check was possible; then it is taken to hold.
    """

    holds: bool
    description: str
    is_sum: bool = False
    is_checked: bool = True

    @property
    def warning(self) -> str:
        """What a run says that trains with a loss that is not a mean."""
        return str(refused_loss(self))


def not_checked(why: str) -> LossContract:
    """Return the result for a loss that could not be checked."""
    return LossContract(True, f"not checked: {why}", is_checked=False)


@dataclass(frozen=True)
class Pieces:
    """A batch and its two halves."""

    whole: MicroBatch
    halves: tuple[MicroBatch, MicroBatch]

    @property
    def all_three(self) -> tuple[MicroBatch, MicroBatch, MicroBatch]:
        return (self.whole, *self.halves)


def pieces_of(micro_batch: MicroBatch, count_fn: Callable[[Any], int] | None) -> Pieces | None:
    """Return the first half of a micro-batch, and the halves of that half: as many samples as one
    pass has. Returns None if the batch cannot be cut.
    """
    size = len(micro_batch.sample_ids)
    with suppress(Exception):  # a batch without rows cannot be cut
        size = min(size, rows(micro_batch.batch))  # a collate_fn may leave samples out
    if size < 2:
        return None
    taken = max(2, size // 2)
    middle = taken // 2
    pieces = []
    for start, stop in ((0, taken), (0, middle), (middle, taken)):
        batch = select_rows(micro_batch.batch, range(start, stop), of=size)
        if batch is None:
            return None
        try:
            count = (count_fn or rows)(batch)
        except Exception:  # the first step repeats and explains the error
            return None
        ids = micro_batch.sample_ids[start:stop]
        epochs = micro_batch.epochs[start:stop]
        pieces.append(MicroBatch(batch, count, 0, ids, epochs))
    whole, first, second = pieces
    return Pieces(whole, (first, second))


def check_contract(
    mean_of: Callable[[MicroBatch, int], Mean | None],
    pieces: Pieces,
    *,
    tolerance: float,
    gathered: Callable[[Any], list[Any]] = lambda value: [value],
) -> LossContract:
    """Compare the loss of a batch with that of its halves. `mean_of(batch, seed)` computes it in
    evaluation mode. `gathered` returns a value of each rank; the first rank whose loss breaks the
    contract speaks for all. Collective.
    """
    means: list[Mean] = []
    described: dict[str, Any] | None = None  # of this rank, None if the loss failed
    problem: Exception | None = None
    try:
        for piece in pieces.all_three:
            mean = mean_of(piece, 0)
            if mean is not None:
                means.append(mean)
        if len(means) == 3:
            contract = compared(means, pieces, tolerance=tolerance)
        else:
            contract = not_checked("the loss returned None")
        described = asdict(contract)
    except Exception as failure:  # the other ranks wait for this one
        problem = failure
    of_ranks = gathered(described)
    if problem is not None:
        raise problem
    if None in of_ranks:  # the rank that failed takes part in no further exchange of this check
        return not_checked("the loss failed on another rank")
    contracts = [LossContract(**of_rank) for of_rank in of_ranks]
    broken = next((contract for contract in contracts if not contract.holds), None)
    if broken is None:
        return contracts[0]
    again = mean_of(pieces.whole, 1)
    together = float(means[0].value) if means else math.nan
    repeated = together if again is None else float(again.value)
    draws = abs(together - repeated) > _ROUNDING * tolerance * abs(together)
    if any(gathered(draws)):
        return not_checked("the loss draws random numbers even in evaluation mode")
    return broken


def compared(means: Sequence[Mean], pieces: Pieces, *, tolerance: float) -> LossContract:
    """Compare the loss of a batch with that of its halves, given the means of all three.

    >>> import numpy as np
    >>> import torch
    >>> ids = np.arange(4)
    >>> whole = MicroBatch((torch.zeros(4, 1),), 4, 0, ids, ids)
    >>> pieces = pieces_of(whole, None)
    >>> contract = compared([Mean(4.0, 2), Mean(1.0, 1), Mean(1.0, 1)], pieces, tolerance=1e-4)
    >>> contract.holds, contract.is_sum
    (False, True)
    """
    whole, first, second = (float(mean.value) for mean in means)
    halved = float((means[1] + means[2]).value)
    if not math.isfinite(whole):
        return not_checked(f"the loss of a batch is {whole}")
    difference = abs(whole - halved)
    size = max(abs(whole), abs(first), abs(second))
    is_sum = abs(whole - (first + second)) <= 10 * tolerance * size
    is_above_rounding = size > 10 * tolerance or is_sum
    is_clear = difference > CLEAR * size and is_above_rounding
    if difference <= tolerance * max(1.0, abs(whole)) and not is_clear:
        figures = f"{whole:.6g} for a batch, {halved:.6g} for its two halves combined"
        return LossContract(True, f"holds: {figures}")
    counts = " and ".join(str(half.count) for half in pieces.halves)
    figures = (
        f"the loss of a batch is {whole:.6g}, but {halved:.6g} for its two halves combined"
        f" (with counts {counts})"
    )
    return LossContract(False, figures, is_sum=is_sum)


def refused_loss(contract: LossContract) -> ConfigError:
    """Return the error for a loss that is not a mean over what it counts."""
    return ConfigError(
        "loss-not-a-mean",
        problem=contract.description,
        reason=_REASON_OF_SUM if contract.is_sum else _REASON,
        remedy=_remedies(contract),
        is_sum=contract.is_sum,
    )


def refused_scores(
    contract: LossContract, splits: Sequence[str], *, in_run: bool = True
) -> ConfigError:
    """Return the error for splits that are scored with a loss that is not a mean. `in_run` is False
    for a model without a run, to which no setting of `Run` applies.
    """
    remedies = _remedies(contract)
    if not in_run:
        remedies = [remedy for remedy in remedies if "Run(" not in remedy]
    names = ", ".join(splits)
    kind = "is a sum over the samples" if contract.is_sum else "is not a mean over what it counts"
    return ConfigError(
        "scored-loss-not-a-mean",
        problem=f"the loss {kind}, and scores {names}: {contract.description}",
        reason="the score would depend on the batch size of the split",
        remedy=[
            *remedies,
            "score the split with another loss: sf.Split(data, loss=...), or loss=False",
        ],
        splits=list(splits),
        is_sum=contract.is_sum,
    )


def _remedies(contract: LossContract) -> list[str]:
    if contract.is_sum:
        return ["return the mean, such as reduction='mean', or sf.Mean(total, count)"]
    return [
        "return sf.Mean(total, count), as sf.losses.cross_entropy does; with class weights, count is"
        " the sum of the targets' weights",
        "count the targets: Run(count_fn=lambda batch: ...)",
        "for a loss that couples samples (a contrastive loss), Run(loss=sf.losses.whole_batch("
        "encode_fn, loss_fn))",
        "give it outputs and targets of one shape: of (N, 1) and (N,), N x N pairs are compared",
    ]
