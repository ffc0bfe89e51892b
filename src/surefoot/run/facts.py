"""The facts of which the plan of a run is made, read from its ranks, data, models and optimizers."""

import sys
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from surefoot.data.buckets import Buckets, varied_batches
from surefoot.data.dataset_checks import fingerprint
from surefoot.data.nested import tensors
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.world import World
from surefoot.memory import instruction_set
from surefoot.optim.build import (
    RunOptimizer,
    TrainingPlan,
    base_groups,
    every_group,
    optimizer_identity,
)
from surefoot.run.history import StepSize
from surefoot.train.compile import sole_or_all
from surefoot.train.evaluate import Split
from surefoot.train.plan import DataFacts, ModelFacts, SizeFacts, WorldFacts
from surefoot.train.precision import computes_bf16

_OTHER_SHARE = 0.01  # largest share of a model's parameters in layers of unmeasured kinds
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def world_facts(world: World) -> WorldFacts:
    """Return the facts of the ranks, as rank 0 knows them. Collective."""
    device = world.device
    own = WorldFacts(
        device=device.type,
        computes_bf16=computes_bf16(device),
        instructions=instruction_set() if device.type == "cpu" else "none",
        torch=".".join(torch.__version__.split(".")[:2]),
    )
    return WorldFacts(**world.from_main(asdict(own)))


def size_facts(pipeline: DataPipeline, earlier: Sequence[StepSize] = ()) -> SizeFacts:
    """Return the sizes of the training data. `earlier` has those of steps before changes of
    settings.
    """
    order = pipeline.plan
    sizes = pipeline.sizes
    sizes_of_segments = []  # of an epoch and of a step
    for size in [*earlier, StepSize(sizes.batch_size, order.samples, order.steps)]:
        if size.steps is None:
            sizes_of_segments.append((size.samples or order.samples, size.batch_size))
        else:
            sizes_of_segments.append((size.steps, 1))  # the samples of a step vary
    epoch, step = sizes_of_segments.pop()
    return SizeFacts(
        sizes,
        epoch=epoch,
        step=step,
        varied=varied_batches(order, pipeline.data),
        earlier=tuple(sizes_of_segments),
    )


def data_facts(
    pipeline: DataPipeline, splits: Mapping[str, Split], *, reads_shape: bool
) -> DataFacts:
    """Return what identifies the data. If `reads_shape`, rank 0 reads the first micro-batch for its
    shape. Collective.
    """
    table_rows = None
    if isinstance(pipeline.plan, Buckets):  # micro-batches differ in shape
        table_rows = (pipeline.sizes.micro_batch_size, int(pipeline.plan.longest.max()))
        reads_shape = False
    return DataFacts(
        identity={"plan": pipeline.plan.to_dict(), **fingerprint(pipeline.dataset)},
        splits={name: fingerprint(split.data) for name, split in splits.items()},
        table_rows=table_rows,
        first_batch=_first_shape(pipeline, reads=reads_shape),
    )


def _first_shape(pipeline: DataPipeline, *, reads: bool) -> tuple[bool, tuple[int, ...]] | None:
    # ranks whose models differ by mistake disagree on `reads`, so all take part
    shape = None
    if reads and pipeline.world.is_main:
        micro_batch = pipeline.first()
        tensor = None if micro_batch is None else next(tensors(micro_batch.batch), None)
        if tensor is not None:
            shape = [tensor.is_floating_point(), list(tensor.shape)]
    shape = pipeline.world.from_main(shape)
    return None if shape is None else (shape[0], tuple(shape[1]))


def model_facts(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, RunOptimizer],
    decisions: Mapping[str, TrainingPlan],
    *,
    was_compiled: bool,
) -> ModelFacts:
    """Return the facts of models and of their optimizers. `decisions` has the parameter groups of
    each trained model.
    """
    identities = {
        name: optimizer_identity(decision, optimizers[name]) for name, decision in decisions.items()
    }
    layers, width = layer_kind(models) or (None, 0)
    return ModelFacts(
        optimizer=sole_or_all(identities),
        groups=base_groups(optimizers.values()),
        every_group=every_group(optimizers.values()),
        layers=layers,
        width=width,
        has_images=any(isinstance(part, nn.Conv2d) for part in _modules(models)),
        takes_closure=any(trained.takes_closure for trained in optimizers.values()),
        was_compiled=was_compiled,
    )


def layer_kind(models: Mapping[str, nn.Module]) -> tuple[str, int] | None:
    """Return a model's layer kind and the width of most of its matrices. Returns None if the
    architecture was not measured.

    >>> layer_kind({"model": nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 200))})
    ('linear', 200)
    >>> layer_kind({"model": nn.LSTM(8, 8)})
    """
    parts = _modules(models)
    matrices = [part for part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
    if len(models) != 1 or not matrices:
        return None
    if any(isinstance(part, nn.Conv2d) and part.groups > 1 for part in matrices):
        return None
    attention = _classes("gpt_layers", "Attention") + _classes("seq2seq_layers", "SelfAttention")
    has_attention = any(isinstance(part, attention) for part in parts)
    measured = (nn.Linear, nn.Conv2d, *_classes("layers", "RMSNorm"), *_NORMS)
    if has_attention:
        measured += (nn.Embedding,)
    other = sum(_own_numbers(part) for part in parts if not isinstance(part, measured))
    if other > _OTHER_SHARE * sum(_own_numbers(part) for part in parts):
        return None

    convolutions = [part for part in matrices if isinstance(part, nn.Conv2d)]
    width = _width(convolutions or matrices)
    if not convolutions:
        crossed = _classes("seq2seq_layers", "CrossAttention")
        if any(isinstance(part, crossed) for part in parts):
            return "encoder-decoder", width
        return "attention" if has_attention else "linear", width
    if has_attention or 4 * sum(map(_own_numbers, convolutions)) < sum(map(_own_numbers, matrices)):
        return None
    networks = _classes("simple_cnn", "SimpleCNN") + _classes("resnet", "ResNet")
    sets_layout = any(isinstance(part, networks) and part.channels_last for part in parts)
    return "convolution, channels last" if sets_layout else "convolution", width


def _classes(module: str, name: str) -> tuple[type[Any], ...]:
    """Return a class of `surefoot.models` as a tuple for `isinstance`; () if its module was not
    imported, so that no model has such a part.
    """
    loaded = sys.modules.get(f"surefoot.models.{module}")
    return () if loaded is None else (getattr(loaded, name),)


def _width(matrices: Collection[nn.Module]) -> int:
    """Return the smaller side of a matrix: half of all parameters are in matrices at least as wide.
    No convolution is grouped.
    """
    widths = sorted(
        ((min(part.weight.shape[:2]), part.weight.numel()) for part in matrices),  # type: ignore[index, operator]
        reverse=True,
    )
    sums = list(accumulate(size for _, size in widths))
    return widths[bisect_left(sums, sums[-1] / 2)][0]


def _modules(models: Mapping[str, nn.Module]) -> list[nn.Module]:
    return [part for model in models.values() for part in model.modules()]


def _own_numbers(part: nn.Module) -> int:
    parameters: Iterable[nn.Parameter] = part.parameters(recurse=False)
    return sum(parameter.numel() for parameter in parameters)
