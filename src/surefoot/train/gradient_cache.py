"""Gradient caching: a loss over the features of a step's whole batch (Gao et al. 2021,
https://arxiv.org/abs/2101.06983).

A first pass without gradients encodes every micro-batch. The ranks exchange features, and each rank
computes the same loss and the gradient of its own features. The loop's pass over a micro-batch
repeats the seeds and starts from this gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from surefoot.distributed.world import World
from surefoot.errors import ConfigError
from surefoot.mean import Mean
from surefoot.seeding import fold, seed_generators
from surefoot.train.loss_accumulator import loss_parts, scalar

if TYPE_CHECKING:
    from surefoot.data.loader import MicroBatch
    from surefoot.train.precision import Precision

_AFTER_ALL = -1  # in the seed of `loss_fn`, instead of the index of a micro-batch


class CachedLoss:
    """A coupled loss during one step, called by `forward_backward` for each micro-batch in order.

    Each call returns the loss of the whole batch, with the gradient of its micro-batch. A single
    micro-batch on a rank needs no first pass.
    """

    def __init__(
        self, encode_fn: Callable[[Any, Any], Any], loss_fn: Callable[[Any, Any], Any], step: Any
    ) -> None:
        self.encode_fn = encode_fn
        self.loss_fn = loss_fn
        self.step = step
        # of each pass; None: without targets
        self.gradients: Iterator[list[Tensor | None] | None] | None = None
        self.parameters: list[Tensor] = []  # that `loss_fn` uses itself
        self.further: Any = {}
        if len(step.micro_batches) > 1:
            with step.state.buffers.repeated():  # the second passes change the buffers
                passes = list(self._first_passes())
            if passes:
                self._compute(passes)

    def __call__(self, model: Any, batch: Any) -> Any:
        features = self.encode_fn(model, batch)
        if self.gradients is None:
            self._compute([(self.step.micro_batches[0], features)])
        assert self.gradients is not None
        tensors = [*pytree.tree_leaves(features), *self.parameters]
        gradients = next(self.gradients)
        if gradients is None:  # a backward pass that only joins collectives
            return sum((tensor * 0).sum() for tensor in tensors if tensor.requires_grad)
        used_tensors = []
        used_gradients = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if tensor.requires_grad and gradient is not None:
                used_tensors.append(tensor)
                used_gradients.append(gradient)
        loss = _Surrogate.apply(self.value, used_gradients, *used_tensors)  # type: ignore[no-untyped-call]
        if not self.further:
            return loss
        further = self.further
        self.further = {}  # of the whole batch: logged once
        return loss, further

    def _first_passes(self) -> "Iterator[tuple[MicroBatch, Any]]":
        step = self.step
        task = step._task
        for micro_batch in step.micro_batches:
            last = micro_batch is step.micro_batches[-1]
            if not task.ranks.start_pass(micro_batch, last=last):
                continue
            seed_generators(fold(task.key, step.index, micro_batch.index))
            step.state.buffers.start_pass(micro_batch.index, counted=micro_batch.count > 0)
            with torch.no_grad(), task.precision.autocast():
                yield micro_batch, self.encode_fn(task.forward, micro_batch.batch)

    def _compute(self, passes: "Sequence[tuple[MicroBatch, Any]]") -> None:
        task = self.step._task
        counted = [(micro_batch, features) for micro_batch, features in passes if micro_batch.count]
        for micro_batch, features in counted:
            check_features(features, samples=len(micro_batch.sample_ids))
        # a rank without targets takes part too
        joined, spec = join_features([features for _, features in counted or passes])
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in joined]
        of_counted = [micro_batch for micro_batch, _ in counted]
        leaves_of_ranks, total = _exchanged(leaves, of_counted, task.ranks.world)
        seed_generators(fold(task.key, self.step.index, _AFTER_ALL))
        with task.precision.autocast():
            features = pytree.tree_unflatten(leaves_of_ranks, spec)
            returned, self.further, _ = loss_parts(self.loss_fn(task.forward, features))
        loss = scalar(returned.value_or(0.0) if isinstance(returned, Mean) else returned)
        self.value = loss.detach()
        ids = {id(leaf) for leaf in leaves}
        self.parameters = [leaf for leaf in _leaves_of(loss) if id(leaf) not in ids]
        gradients = self._gradients(loss, [*leaves, *self.parameters])
        micro_batches = [micro_batch for micro_batch, _ in passes]
        self.gradients = _by_pass(gradients, len(leaves), micro_batches, total)

    def _gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        precision = self.step._task.precision
        scale = precision.loss_scale
        used_leaves = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.autocast(precision.device.type, enabled=False):
            if scale is not None:
                # without it, gradients of half-precision features would underflow
                loss = loss * scale.scale
            of_used_leaves = iter(torch.autograd.grad(loss, used_leaves, allow_unused=True))
        gradients = []
        for leaf in leaves:
            gradient = next(of_used_leaves) if leaf.requires_grad else None
            if gradient is not None and scale is not None:
                gradient = gradient.float() / scale.scale
            gradients.append(gradient)
        return gradients


class _Surrogate(torch.autograd.Function):
    """The value of the loss, with gradients that are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * outer for gradient in ctx.saved_tensors)


def check_features(features: Any, *, samples: int) -> None:
    """Raise `ConfigError` if the features are not tensors with one row for each sample.

    >>> check_features({"image": torch.ones(4, 8), "scale": torch.ones(())}, samples=4)
    """
    for each in pytree.tree_leaves(features):
        is_tensor = isinstance(each, Tensor)
        if is_tensor and (each.ndim == 0 or len(each) == samples):
            continue
        what = f"of shape {tuple(each.shape)}" if is_tensor else f"as {type(each).__name__}"
        raise ConfigError(
            "features-not-by-sample",
            problem=f"whole_batch: encode_fn returned features {what} for a micro-batch of"
            f" {samples} samples",
            reason="they are tensors with one row for each sample, so that the rows of all"
            " micro-batches can be joined",
            remedy="for two views of a sample, return two tensors:"
            " first, second = model(torch.cat(views)).chunk(2)",
            setting="encode_fn",
            returned=type(each).__name__,
            shape=tuple(each.shape) if is_tensor else None,
            samples=samples,
        )


def join_features(parts: Sequence[Any]) -> tuple[list[Tensor], pytree.TreeSpec]:
    """Return the tensors of all micro-batches joined along their rows, and the structure of the
    features.

    >>> join_features([(torch.ones(2), torch.tensor(5.0)), (torch.zeros(1), torch.tensor(5.0))])[0]
    [tensor([1., 1., 0.]), tensor(5.)]
    """
    leaves_by_part = [pytree.tree_leaves(part) for part in parts]
    _refuse_differences([_kinds_of(leaves) for leaves in leaves_by_part], of="micro-batches")
    joined = []
    for leaves in zip(*leaves_by_part, strict=True):
        joined.append(torch.cat(leaves) if leaves[0].ndim else leaves[0])
    return joined, pytree.tree_structure(parts[0])


def _kinds_of(leaves: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Return what must be equal of the features of two micro-batches."""
    return [(str(leaf.dtype), *leaf.shape[1:]) for leaf in leaves]


def loss_of_groups(
    loss_fn: Callable[[Any, Any], Any],
    model: Any,
    features: Sequence[Any],
    *,
    group: int | None,
    precision: "Precision",
) -> float:
    """Return the mean loss over consecutive groups of `group` samples (default: all), given the
    features of each batch. Waits for the device. The last group may be smaller, and counts for its
    samples.
    """
    leaves, spec = join_features(features)
    samples = max((len(leaf) for leaf in leaves if leaf.ndim), default=1)
    check_features(leaves, samples=samples)
    mean = Mean(0.0, 0)
    group = group or samples
    for first in range(0, samples, group):
        rows = slice(first, min(first + group, samples))
        of_group = []
        for leaf in leaves:
            part = leaf[rows] if leaf.ndim else leaf
            of_group.append(part.to(precision.device))
        with precision.autocast():
            returned, _, _ = loss_parts(loss_fn(model, pytree.tree_unflatten(of_group, spec)))
        if isinstance(returned, Mean):
            if float(returned.count) == 0:
                continue
            returned = returned.value
        value = float(returned)
        mean += Mean(value * (rows.stop - first), rows.stop - first)
    return float(mean.value)


def _exchanged(
    leaves: list[Tensor], micro_batches: "Sequence[MicroBatch]", world: World | None
) -> tuple[list[Tensor], int]:
    # the rows of all ranks, with a graph to those of this rank, and the number of targets of all
    # ranks
    count = sum(micro_batch.count for micro_batch in micro_batches)
    if world is None or world.size == 1:
        return leaves, count
    pieces = [(micro_batch.index, len(micro_batch.sample_ids)) for micro_batch in micro_batches]
    by_rank = world.gathered([pieces, count, _kinds_of(leaves)])
    _refuse_differences([kinds for _, _, kinds in by_rank], of="ranks")
    total = sum(count for _, count, _ in by_rank)
    if not total:  # a pass that only orders DDP's buckets
        return leaves, 0
    pieces_by_rank = [pieces for pieces, _, _ in by_rank]
    rows = sum(rows for _, rows in pieces)
    leaves_of_ranks = []
    for leaf in leaves:
        leaves_of_ranks.append(_gathered(leaf[:rows], pieces_by_rank, world) if leaf.ndim else leaf)
    return leaves_of_ranks, total


def _refuse_differences(kinds: Sequence[Any], *, of: str) -> None:
    other = next((kind for kind in kinds if kind != kinds[0]), None)
    if other:
        raise ConfigError(
            "features-differ",
            problem="whole_batch: encode_fn returned features of different types or shapes for"
            f" different {of}: {kinds[0]} and {other}",
            reason="only the number of rows may differ, so that all rows can be joined",
            remedy="let encode_fn return vectors of one size, such as the mean over the tokens of a"
            " text",
            setting="encode_fn",
            among=of,
            features=[kinds[0], other],
        )


def _gathered(
    local: Tensor, pieces_by_rank: Sequence[Sequence[tuple[int, int]]], world: World
) -> Tensor:
    # the rows in the order of the micro-batches; a piece is the index and the number of rows of one
    rows_by_rank = [sum(rows for _, rows in pieces) for pieces in pieces_by_rank]
    padded = local.new_zeros((max(rows_by_rank), *local.shape[1:]))
    padded[: len(local)] = local.detach()
    as_bytes = padded.flatten().view(torch.uint8)  # gloo has no bool
    bytes_by_rank = [torch.empty_like(as_bytes) for _ in rows_by_rank]
    dist.all_gather(bytes_by_rank, as_bytes)
    by_rank = []
    for of_rank, rows in zip(bytes_by_rank, rows_by_rank, strict=True):
        by_rank.append(of_rank.view(local.dtype).view(padded.shape)[:rows])
    by_rank[world.rank] = local  # which has a graph
    pieces = list(chain.from_iterable(pieces_by_rank))
    by_piece = torch.split(torch.cat(by_rank), [rows for _, rows in pieces])
    in_order = sorted(range(len(pieces)), key=pieces.__getitem__)
    return torch.cat([by_piece[index] for index in in_order])


def _by_pass(
    gradients: Sequence[Tensor | None],
    features: int,
    micro_batches: "Sequence[MicroBatch]",
    total: int,
) -> Iterator[list[Tensor | None] | None]:
    """Yield the gradients of each pass, None for a pass without targets. The first `features`
    gradients are of features.

    The loop multiplies a pass by its share of all targets. Scalars and parameters belong to all
    samples, so each pass has the share of their gradient; rows belong to one pass, which has all of
    their gradient.
    """
    first = 0
    for micro_batch in micro_batches:
        if not micro_batch.count:
            yield None
            continue
        last = first + len(micro_batch.sample_ids)
        factor = total / micro_batch.count
        of_pass: list[Tensor | None] = []
        for index, gradient in enumerate(gradients):
            if gradient is not None and gradient.ndim and index < features:
                of_pass.append(gradient[first:last] * factor)
            else:
                of_pass.append(gradient)
        yield of_pass
        first = last


def _leaves_of(loss: Tensor) -> list[Tensor]:
    # the tensors at which a backward pass from the loss ends
    leaves: list[Tensor] = []
    visited: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]  # missing in torch's stubs
            leaves.append(node.variable)
        nodes += [next_node for next_node, _ in node.next_functions]
    return leaves
