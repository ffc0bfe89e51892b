"""Checks before the first step of several processes, for mistakes that DDP and FSDP2 do not report.

DDP and FSDP2 see only calls of the model itself. For parameters used outside these calls, gradients
are not summed over processes and shards are not gathered. If a parameter has no gradient on one
process, the other processes wait for the gradient.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from surefoot.checkpoint.snapshot import Snapshot
from surefoot.config.train_settings import TrainSettings
from surefoot.data.loader import MicroBatch
from surefoot.distributed.strategy import Called
from surefoot.distributed.used_parameters import refuse_unlike_calls, without_gradient
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, error_of_dict, together
from surefoot.metrics.multiple_choice import eagerly
from surefoot.optim.clipping import clear
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import State, Step, Task, forward_backward
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES
from surefoot.train.module_usage import ModuleUsage
from surefoot.train.precision import Precision
from surefoot.train.step_watch import LossWatch


def check_first_pass(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch | None,
    *,
    precision: Precision,
    world: World,
    allow_unused: bool = False,
    gathered: Sequence[nn.Module] = (),
) -> None:
    """Run one micro-batch forward and backward; raise `ConfigError` for code that works only on a
    single process. Collective.

    The check refuses trained parameters without a gradient (unless `allow_unused`), a loss that
    never calls a model, and uses of submodules outside the model's call, by name and line.
    `gathered` are the modules that FSDP gathers separately, innermost first. With `gathered`, the
    check also refuses weights used while their block is not being called, gradients of gradients,
    and different blocks on different ranks. No rank checks if `micro_batch` is None on any rank. An
    exception in the pass is ignored; the first step reports the exception. All state is restored;
    the device needs memory for the activations only.

    >>> from surefoot.train.precision import precision
    >>> import numpy as np
    >>> import torch
    >>> micro_batch = MicroBatch(torch.ones(4, 2), 4, 0, np.arange(4), np.zeros(4, dtype=np.int64))
    >>> cpu = torch.device("cpu")
    >>> settings = {"precision": precision("fp32", cpu), "world": World(cpu)}
    >>> check_first_pass(
    ...     {"model": nn.Linear(2, 1)},
    ...     lambda model, batch: model(batch).mean(),
    ...     micro_batch,
    ...     **settings,
    ... )
    >>> check_first_pass(
    ...     {"model": nn.Linear(2, 1)},
    ...     lambda model, batch: model.weight.sum(),
    ...     micro_batch,
    ...     **settings,
    ... )
    Traceback (most recent call last):
        ...
    surefoot.errors.ConfigError: the loss never calls the model that it receives
      gradients would not be summed over processes
      call it: def loss(model, batch): outputs = model(...)
      [model-not-called]
    """
    if any(world.gathered(micro_batch is None or micro_batch.count == 0)) or micro_batch is None:
        return
    usage = ModuleUsage(models, gathered=gathered)
    unused: list[str] = []
    order: list[str] | None = usage.order
    try:
        unused = _names_without_gradient(models, loss, micro_batch, precision, usage)
        errors = usage.problems()
    except ConfigError as refused:
        errors = usage.problems() or [refused]
    except Exception:
        errors = usage.outside_problems()
        order = None
    if errors or allow_unused:
        unused = []
    described = [error.to_dict() for error in errors]
    by_rank: list[tuple[list[dict[str, Any]], list[str], list[str] | None]]
    by_rank = world.gathered((described, unused, order))
    errors_by_message: dict[str, dict[str, Any]] = {}
    unused_by_ranks: dict[str, None] = {}  # in order
    orders = []
    for errors_of_rank, unused_of_rank, order_of_rank in by_rank:
        for error in errors_of_rank:
            errors_by_message[error["message"]] = error
        unused_by_ranks |= dict.fromkeys(unused_of_rank)
        orders.append(order_of_rank)
    if errors_by_message:
        raise together([error_of_dict(error) for error in errors_by_message.values()])
    if unused_by_ranks:
        raise without_gradient(list(unused_by_ranks))
    refuse_unlike_calls(orders)


def make_ready(
    task: Task,
    state: State,
    first: Callable[[int], MicroBatch | None],
    *,
    user_state: Mapping[str, Any],
    world: World,
) -> None:
    """Run one warm-up pass without targets if several ranks share a step. Collective.

    DDP orders its gradient buckets by the first pass, and sums over ranks bucket by bucket. Without
    the warm-up, a resumed run would round differently. `first` reads this rank's first micro-batch
    of a step.
    """
    micro_batch = None
    if task.loss is not None:
        micro_batch = first(state.step)
    if any(world.gathered(micro_batch is None)) or micro_batch is None:
        return  # no data: the first step reports the reason
    before = Snapshot(
        state.models, task.loss, user_state=user_state, parameters=state.parameters, keep=True
    )
    with before, warnings.catch_warnings():
        # a one-channel kernel matches two memory formats; torch warns of this once, in the first
        # pass
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        forward_backward(Step(state.step, [replace(micro_batch, count=0)], task, state))
        clear(state.parameters)
        state.buffers.undo()


def _names_without_gradient(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch,
    precision: Precision,
    usage: ModuleUsage,
) -> list[str]:
    """Return the names of the trained parameters to which one pass gives no gradient."""
    called = {}
    for name, model in models.items():
        called[name] = Called(model, partial(usage.through, model))
    forward = sole_or_all(called)
    settings = TrainSettings(length="1 steps", batch_size=len(micro_batch.sample_ids))
    task = Task(forward, loss, 0, precision, factors=lambda _: 1.0, settings=settings)
    used: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        used.add(parameter)
        parameter.grad = None  # the unsharded gradients of a large model may not fit in memory

    before = Snapshot(models, loss, keep=True)
    with before, precision.numerics(), eagerly(), ExitStack() as hooks:
        trained: dict[str, nn.Parameter] = {}
        for model_name, model in models.items():
            prefix = model_name if len(models) > 1 else ""
            for name, parameter in model.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    trained[name] = parameter
                    hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
        step = Step(0, [micro_batch], task, State(dict(models), {}), _watch=LossWatch(usage.over))
        forward_backward(step)
        if SKIPPED_SAMPLES in step._logged:  # the loss returned None
            return []
        return [
            name
            for name, parameter in trained.items()
            if parameter.requires_grad and parameter not in used
        ]
