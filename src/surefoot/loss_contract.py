"""The contract between a loss and what is counted: the loss of a batch is the count-weighted mean of its parts'."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from surefoot.data.samples import rows
from surefoot.evaluate import scored
from surefoot.micro_batch import MicroBatch
from surefoot.parts import Parts

_TOLERANCE = 1e-4  # relative, for sums in float32


def loss_contract(parts: Parts) -> tuple[bool, str]:
    """Whether the loss of a batch is the count-weighted mean of its two halves', in evaluation mode; and that in words.

    If not, the mean is over something else than what is counted, and gradients would depend on how a batch is cut.
    """
    if parts.task.loss is None:
        return True, "not checked: this run has no loss of its own"
    whole = parts.supply.again(0)[0]
    halves = _halves(whole, parts)
    if halves is None:
        return True, "not checked: a batch that is not tensors of one length, or of one sample, cannot be cut in two"

    def mean(batches: list[MicroBatch]) -> float:
        found = scored(
            parts.task.forward,
            batches,
            loss=parts.task.loss,
            scores=(),
            precision=parts.whole.precision,
            seed=parts.supply.seed,
        )
        return float(found["loss"])

    with parts.numerics():
        together, apart = mean([whole]), mean(halves)
    if abs(together - apart) <= _TOLERANCE * max(1.0, abs(together)):
        return True, f"holds: {together:.6g} for a batch, {apart:.6g} for its halves together"
    counts = " and ".join(str(half.count) for half in halves)
    return False, (
        f"the loss of a batch is {together:.6g}, of its two halves together (counting {counts}) {apart:.6g}\n"
        "  the loss is a mean over something else than is counted: say over what, with Run(count=lambda batch: ...),\n"
        "  or return surefoot.Mean(total, count); a loss that couples samples of a batch cannot be cut at all"
    )


def _halves(whole: MicroBatch, parts: Parts) -> list[MicroBatch] | None:
    size = len(whole.ids)
    count = parts.supply.count or rows
    if size < 2:
        return None
    cut = size // 2
    made = []
    for chosen_rows in (slice(0, cut), slice(cut, size)):
        batch = _part(whole.batch, chosen_rows, size)
        if batch is None:
            return None
        made.append(MicroBatch(batch, count(batch), 0, whole.ids[chosen_rows], whole.epochs[chosen_rows]))
    return made


def _part(batch: Any, chosen_rows: slice, size: int) -> Any:
    """The same nest with those rows of every tensor; None where something in it is no tensor of so many rows."""
    if isinstance(batch, Tensor):
        return batch[chosen_rows] if batch.ndim and len(batch) == size else None
    if isinstance(batch, dict):
        cut = {key: _part(value, chosen_rows, size) for key, value in batch.items()}
        return None if any(value is None for value in cut.values()) else cut
    if isinstance(batch, list | tuple):
        pieces = [_part(value, chosen_rows, size) for value in batch]
        if any(piece is None for piece in pieces):
            return None
        return type(batch)(*pieces) if hasattr(batch, "_fields") else type(batch)(pieces)
    return None
