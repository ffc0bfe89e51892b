"""The contract between a loss and what is counted: the loss of a batch is the count-weighted mean of its parts'."""

import math
from copy import deepcopy
from dataclasses import replace

from torch import Tensor
from torch.utils import _pytree as pytree

from surefoot.data.dataset_checks import rows
from surefoot.data.loader import MicroBatch
from surefoot.mean import Mean
from surefoot.train.components import Components
from surefoot.train.evaluate import Split, scored_by_batch
from surefoot.train.precision import FORMATS
from surefoot.train.scratch import preserved


def loss_contract(parts: Components) -> tuple[bool, str]:
    """Whether the loss of a batch is the count-weighted mean of its two halves', in evaluation mode; and that in words.

    If not, the mean is over something else than what is counted, or the loss couples samples, and gradients would depend on how
    a batch is cut. Each rank takes its own first micro-batch. Collective.
    """
    if parts.task.loss is None:
        return True, "not checked: this run has no loss of its own"
    batch = parts.supply.first()
    halves = None if batch is None else _halves(batch, parts)
    if not all(parts.world.gathered(halves is not None)) or batch is None or halves is None:
        return True, "not checked: a batch that is not tensors of one length, or of one sample, cannot be cut in two"
    means = []
    state, user_state = parts.state, parts.whole.kept.objects
    with preserved(state.models, parts.task.loss, user_state, state.parameters) as put_back, parts.numerics():
        for one, seed in ((batch, 0), (batch, 1), (halves[0], 0), (halves[1], 0)):
            means.append(_mean(parts, one, seed))
            put_back()  # as in a step, of which each micro-batch begins with the same buffers
    together, again, apart = (float(each.value) for each in (means[0], means[1], means[2] + means[3]))
    tolerance = FORMATS[parts.whole.precision.name].tolerance * max(1.0, abs(together))
    if not math.isfinite(together) or abs(together - apart) <= tolerance:
        return True, f"holds: {together:.6g} for a batch, {apart:.6g} for its halves together"
    if abs(together - again) > tolerance:
        return True, "not checked: the loss draws random numbers in evaluation mode too"
    counts = " and ".join(str(half.count) for half in halves)
    return False, (
        f"the loss of a batch is {together:.6g}, of its two halves together (counting {counts}) {apart:.6g}\n"
        "  the loss is a mean over something else than is counted: say over what, with Run(count=lambda batch: ...),\n"
        "  or return surefoot.Mean(total, count); a loss that couples samples of a batch (a contrastive one) is another one in\n"
        "  every cut: leave micro_batch_size out, in one process (--micro-batch-size)"
    )


def _mean(parts: Components, batch: MicroBatch, seed: int) -> Mean:
    """The loss of a batch of each rank, called with the plain models unless all ranks must gather their weights together."""
    models = parts.state.models
    plain = models["model"] if list(models) == ["model"] else models
    means = scored_by_batch(
        parts.task.forward if parts.parallel.kind == "fsdp" else plain,
        [replace(batch, batch=deepcopy(batch.batch))],  # a loss may write into it
        Split(None),
        score="loss",
        loss=parts.task.loss,
        precision=parts.whole.precision,
        seed=parts.supply.seed + seed,
    )
    assert means is not None  # there is a loss
    return means[0]


def _halves(whole: MicroBatch, parts: Components) -> list[MicroBatch] | None:
    """The same nest with half the rows of every tensor; None where something in it is no tensor of so many rows."""
    size, count = len(whole.ids), parts.supply.count or rows
    leaves, nest = pytree.tree_flatten(whole.batch)
    if size < 2 or any(not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != size for leaf in leaves):
        return None
    halves = []
    for half in (slice(0, size // 2), slice(size // 2, size)):
        batch = pytree.tree_unflatten([leaf[half] for leaf in leaves], nest)
        halves.append(MicroBatch(batch, count(batch), 0, whole.ids[half], whole.epochs[half]))
    return halves
