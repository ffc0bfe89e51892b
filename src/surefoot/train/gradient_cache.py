"""Gradient caching: a loss over the features of a step's whole batch (Gao et al. 2021,
https://arxiv.org/abs/2101.06983).

A first pass without gradients encodes every micro-batch. The ranks exchange features, and each rank
computes the same loss and the gradient of its own features. The loop's pass over a micro-batch
repeats the seeds and starts from this gradient.
"""

from collections.abc import Callable, Iterator, Sequence
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
        self.encode_fn, self.loss_fn, self.step = encode_fn, loss_fn, step
        self.gradients: Iterator[list[Tensor | None] | None] | None = (
            None  # of each pass; None: without targets
        )
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
        tensors, gradients = [*pytree.tree_leaves(features), *self.parameters], next(self.gradients)
        if gradients is None:  # a backward pass that only joins collectives
            return sum((tensor * 0).sum() for tensor in tensors if tensor.requires_grad)
        used = [
            each
            for each in zip(tensors, gradients, strict=True)
            if each[0].requires_grad and each[1] is not None
        ]
        loss = _Surrogate.apply(
            self.value, [gradient for _, gradient in used], *(tensor for tensor, _ in used)
        )  # type: ignore[no-untyped-call]
        further, self.further = self.further, {}
        return (loss, further) if further else loss

    def _first_passes(self) -> "Iterator[tuple[MicroBatch, Any]]":
        step, task = self.step, self.step._task
        for micro_batch in step.micro_batches:
            last = micro_batch is step.micro_batches[-1]
            if not task.ranks.start_pass(micro_batch, last=last):
                continue
            seed_generators(fold(task.key, step.index, micro_batch.index))
            step.state.buffers.start_pass(micro_batch.index, counted=micro_batch.count > 0)
            with torch.no_grad(), task.precision.autocast():
                yield micro_batch, self.encode_fn(task.forward, micro_batch.batch)

    def _compute(self, passes: "Sequence[tuple[MicroBatch, Any]]") -> None:
        task, counted = self.step._task, [each for each in passes if each[0].count]
        for micro_batch, features in counted:
            check_features(features, samples=len(micro_batch.sample_ids))
        own, spec = join_features([features for _, features in counted or passes])
        leaves = [each.detach().requires_grad_(each.is_floating_point()) for each in own]
        together, total = _exchanged(
            leaves, [micro_batch for micro_batch, _ in counted], task.ranks.world
        )
        seed_generators(fold(task.key, self.step.index, _AFTER_ALL))
        with task.precision.autocast():
            features = pytree.tree_unflatten(together, spec)
            returned, self.further, _ = loss_parts(self.loss_fn(task.forward, features))
        loss = scalar(returned.value_or(0.0) if isinstance(returned, Mean) else returned)
        self.value = loss.detach()
        self.parameters = [
            leaf for leaf in _leaves_of(loss) if not any(leaf is each for each in leaves)
        ]
        gradients = self._gradients(loss, [*leaves, *self.parameters])
        self.gradients = _by_pass(
            gradients, len(leaves), [micro_batch for micro_batch, _ in passes], total
        )

    def _gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        precision, wanted = (
            self.step._task.precision,
            [leaf for leaf in leaves if leaf.requires_grad],
        )
        # without it, gradients of half-precision features would underflow
        scale = precision.loss_scale
        with torch.autocast(precision.device.type, enabled=False):
            gradients = iter(
                torch.autograd.grad(
                    loss if scale is None else loss * scale.scale, wanted, allow_unused=True
                )
            )
        every = [next(gradients) if leaf.requires_grad else None for leaf in leaves]
        return [
            each if each is None or scale is None else each.float() / scale.scale for each in every
        ]


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
    flat = [pytree.tree_leaves(part) for part in parts]
    kinds = [[(str(leaf.dtype), *leaf.shape[1:]) for leaf in leaves] for leaves in flat]
    _refuse_differences(kinds, of="micro-batches")
    joined = [torch.cat(each) if each[0].ndim else each[0] for each in zip(*flat, strict=True)]
    return joined, pytree.tree_structure(parts[0])


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
    for first in range(0, samples, group or samples):
        rows = slice(first, min(first + (group or samples), samples))
        few = [(leaf[rows] if leaf.ndim else leaf).to(precision.device) for leaf in leaves]
        with precision.autocast():
            returned, _, _ = loss_parts(loss_fn(model, pytree.tree_unflatten(few, spec)))
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
    # the rows of all ranks, with a graph to the own ones, and the number of targets of all ranks
    rows, count = (
        [len(each.sample_ids) for each in micro_batches],
        sum(each.count for each in micro_batches),
    )
    if world is None or world.size == 1:
        return leaves, count
    pieces = [*zip([each.index for each in micro_batches], rows, strict=True)]
    by_rank = world.gathered(
        [pieces, count, [[str(leaf.dtype), *leaf.shape[1:]] for leaf in leaves]]
    )
    _refuse_differences([kind for _, _, kind in by_rank], of="ranks")
    total = sum(count for _, count, _ in by_rank)
    if not total:  # a pass that only orders DDP's buckets
        return leaves, 0
    return [
        _gathered(leaf[: sum(rows)], [each[0] for each in by_rank], world) if leaf.ndim else leaf
        for leaf in leaves
    ], total


def _refuse_differences(kinds: Sequence[Any], *, of: str) -> None:
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
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


def _gathered(own: Tensor, pieces: Sequence[Sequence[tuple[int, int]]], world: World) -> Tensor:
    # the rows in the order of the micro-batches; `pieces` has the index and the number of rows of
    # each, by rank
    rows = [sum(number for _, number in each) for each in pieces]
    padded = own.new_zeros((max(rows), *own.shape[1:]))
    padded[: len(own)] = own.detach()
    as_bytes = padded.flatten().view(torch.uint8)  # gloo has no bool
    parts = [torch.empty_like(as_bytes) for _ in rows]
    dist.all_gather(parts, as_bytes)
    every = [
        part.view(own.dtype).view(padded.shape)[:count]
        for part, count in zip(parts, rows, strict=True)
    ]
    every[world.rank] = own
    order = [piece for each in pieces for piece in each]
    by_rank = torch.split(torch.cat(every), [number for _, number in order])
    return torch.cat([by_rank[index] for index in sorted(range(len(order)), key=order.__getitem__)])


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
        last, factor = first + len(micro_batch.sample_ids), total / micro_batch.count
        yield [
            each[first:last] * factor
            if each is not None and each.ndim and index < features
            else each
            for index, each in enumerate(gradients)
        ]
        first = last


def _leaves_of(loss: Tensor) -> list[Tensor]:
    # the tensors at which a backward pass from the loss ends
    nodes, known, leaves = [loss.grad_fn], set[Any](), list[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]  # missing in torch's stubs
            leaves.append(node.variable)
        nodes += [each for each, _ in node.next_functions]
    return leaves
