"""The outputs of a model for every sample of a data set, in its order."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from surefoot.data.loader import MicroBatch
from surefoot.data.nested import children, is_opaque, map_tensors, rebuilt
from surefoot.distributed.world import World
from surefoot.errors import ConfigError
from surefoot.train.evaluate import Split, evaluating
from surefoot.train.loop import Loss
from surefoot.train.metric_results import Messages
from surefoot.train.precision import Precision
from surefoot.train.split_passes import SplitPasses


def predict_batches(
    model: Any,
    batches: Iterable[MicroBatch],
    split: Split,
    *,
    loss: Loss | None,
    precision: Precision,
    seed: int,
    world: World,
) -> Any:
    """Return the outputs of all batches, joined, on the CPU and on every rank. Collective: each
    rank passes its own batches, equally many on all ranks.
    """
    messages = Messages()
    outputs: list[Any] = []
    counts: list[int] = []
    with evaluating(model, seed) as begin:
        passes = SplitPasses(model, split.loss_of(loss), predict=split.predict, needs_pair=True)
        with passes:
            for index, batch in enumerate(batches):
                begin(index * world.size + world.rank)
                with precision.autocast():
                    of_batch = map_tensors(_on_cpu, passes.outputs(batch))
                for of_rank, count in _of_ranks(world, messages, of_batch, batch):
                    outputs.append(of_rank)
                    counts.append(count)
    return join_outputs(outputs, counts)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _of_ranks(
    world: World, messages: Messages, outputs: Any, batch: MicroBatch
) -> Iterator[tuple[Any, int]]:
    """Yield the outputs of one batch of each rank, in order, with their number of samples."""
    if world.size == 1:
        yield outputs, len(batch.sample_ids)
        return
    message = None
    if not batch.is_padding:
        message = [messages.written(outputs), len(batch.sample_ids)]
    for of_rank in world.gathered(message):
        if of_rank is not None:
            text, count = of_rank
            yield messages.read(text), count


def join_outputs(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    """Join the outputs of batches of so many samples each. Tensors are joined along their first
    dimension; if their other dimensions differ, the result is a list with the tensor of each
    sample. A list with one entry per sample stays a list. A list of whole tensors, such as that of
    a model with several heads, has the joined tensors.

    >>> join_outputs([{"x": torch.ones(2, 1)}, {"x": torch.zeros(1, 1)}], [2, 1])["x"].tolist()
    [[1.0], [1.0], [0.0]]
    >>> [row.tolist() for row in join_outputs([torch.ones(1, 2), torch.zeros(1, 1)], [1, 1])]
    [[1.0, 1.0], [0.0]]
    """
    first = outputs[0]
    if all(isinstance(each, Tensor | np.ndarray) for each in outputs):
        return _join_arrays(outputs, counts)
    if all(each is None for each in outputs):
        return None
    if all(isinstance(each, list) for each in outputs) and _is_by_sample(outputs, counts):
        return list(chain.from_iterable(outputs))
    parts_by_batch: list[dict[str, Any]] = []
    for of_batch in outputs:
        parts = None if is_opaque(of_batch) else children(of_batch)
        if not parts or (parts_by_batch and parts.keys() != parts_by_batch[0].keys()):
            _refuse(f"a {type(of_batch).__name__}", counts[0])
        parts_by_batch.append(parts)
    joined = []
    for name in parts_by_batch[0]:
        joined.append(join_outputs([parts[name] for parts in parts_by_batch], counts))
    return rebuilt(first, joined)


def _join_arrays(outputs: Sequence[Any], counts: Sequence[int]) -> Any:
    for each, count in zip(outputs, counts, strict=True):
        if each.ndim == 0 or len(each) != count:
            _refuse(f"a tensor of shape {tuple(each.shape)}", count)
    if len({each.shape[1:] for each in outputs}) > 1:
        return list(chain.from_iterable(outputs))
    if isinstance(outputs[0], Tensor):
        return torch.cat(list(outputs))
    return np.concatenate(outputs)


def _is_by_sample(lists: Sequence[list[Any]], counts: Sequence[int]) -> bool:
    """Return True if lists have an entry for each sample, and False if they hold whole tensors."""
    pairs = list(zip(lists, counts, strict=True))
    is_whole = all(_has_rows(each, count) for each, count in pairs)
    other = next(((each, count) for each, count in pairs if len(each) != count), None)
    if other is not None and not is_whole:
        _refuse(f"a list of {len(other[0])}", other[1])
    # one batch is the same in both ways, and a list of one tensor is of one sample
    if other is None and is_whole and len(lists) > 1 and max(counts) > 1:
        _refuse_two_ways(counts[0])
    return other is None


def _has_rows(value: list[Any], count: int) -> bool:
    """Return True if a list holds whole tensors, each with a row for each sample."""
    return bool(value) and all(
        isinstance(each, Tensor) and each.ndim > 0 and len(each) == count for each in value
    )


def _refuse_two_ways(count: int) -> NoReturn:
    raise ConfigError(
        "outputs-in-two-ways",
        problem=f"run.predict: the outputs of batches of {count} samples are lists of {count}"
        f" tensors with {count} rows",
        reason="each may be of one sample, or have a row of each sample",
        remedy=[
            "return a tuple of tensors, not a list, if each has a row of each sample",
            "choose another batch_size: Split(data, batch_size=)",
        ],
        setting="predict",
        count=count,
    )


def _refuse(what: str, count: int) -> NoReturn:
    raise ConfigError(
        "outputs-not-by-sample",
        problem=f"run.predict: the outputs of a batch of {count} samples have {what}",
        reason="each sample has one row of a tensor, or one entry of a list; a collate_fn that leaves"
        " samples out leaves no place for theirs",
        remedy="return such outputs: Split(data, predict=lambda model, batch: (outputs, targets))",
        setting="predict",
        count=count,
    )
