"""Statistics of batch norms for weights that were never trained with, such as the mean of several
checkpoints.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.errors import first_line
from surefoot.seeding import fold, seed_generators
from surefoot.train.compile import sole_or_all
from surefoot.train.components import Components
from surefoot.train.model_weights import norms_with_statistics

Norms = dict[tuple[str, str], _BatchNorm]  # by model and path


def renew_statistics(parts: Components, models: Mapping[str, nn.Module]) -> str | None:
    """Compute the statistics of batch norms anew, over an epoch of training data in training mode,
    as `torch.optim.swa_utils.update_bn` does. Collective.

    `models` are the run's models, or the averages that stand for them. Norms that the run keeps in
    evaluation mode stay as they are. At most as many steps are read as the run has made. Returns
    None, or why nothing was computed; the models then keep their statistics.
    """
    live = parts.state.models
    trained = {key for key, norm in norms_with_statistics(live).items() if norm.training}
    norms = {key: norm for key, norm in norms_with_statistics(models).items() if key in trained}
    if not norms:
        return None
    try:
        statistics = _statistics_of_epoch(parts, models, norms)
    except Exception as problem:  # of the user's data or loss: the norms have usable statistics
        return first_line(problem)
    live_norms = norms_with_statistics(live)
    for key, values in statistics.items():
        _write(norms[key], values)
        _write(live_norms[key], values)  # averages take their buffers from the models
    return None


def copy_statistics(source: nn.Module, target: nn.Module) -> None:
    """Copy the statistics of batch norms to the norms of the same names in another model."""
    targets = norms_with_statistics({"model": target})
    for key, norm in norms_with_statistics({"model": source}).items():
        if key in targets:
            _write(targets[key], _values(norm))


def _statistics_of_epoch(
    parts: Components, models: Mapping[str, nn.Module], norms: Norms
) -> dict[tuple[str, str], list[Tensor]]:
    task = parts.task
    length = parts.length
    if task.loss is None:
        raise ValueError("the loop of the run computes its losses itself")
    steps = math.ceil(length.samples_per_epoch / length.batch_size)
    steps = min(steps, max(1, parts.state.step))
    user_objects = parts.run_state.user_state.objects
    momenta = [(norm, norm.momentum) for norm in norms.values()]
    before = Snapshot(models, task.loss, user_state=user_objects, keep=True)
    with before, parts.numerics(), torch.no_grad():
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # a mean over all passes
            for name, model in models.items():
                live = dict(parts.state.models[name].named_modules())
                for path, module in model.named_modules():
                    module.training = live[path].training
            for step, micro_batch in parts.pipeline.passes(steps):
                seed_generators(fold(task.key, step, micro_batch.index))
                with task.precision.autocast():
                    task.loss(sole_or_all(models), micro_batch.batch)
            statistics = {}
            for key, norm in norms.items():
                statistics[key] = [value.clone() for value in _values(norm)]
            return statistics
        finally:
            for norm, momentum in momenta:
                norm.momentum = momentum


def _values(norm: _BatchNorm) -> list[Tensor]:
    values = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    return [each for each in values if each is not None]


def _write(norm: _BatchNorm, values: list[Tensor]) -> None:
    for buffer, value in zip(_values(norm), values, strict=True):
        buffer.copy_(value)
