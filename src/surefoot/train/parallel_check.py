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
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from surefoot.config.train_settings import TrainSettings
from surefoot.data.loader import MicroBatch
from surefoot.distributed.strategy import Called
from surefoot.distributed.world import World
from surefoot.errors import ConfigError
from surefoot.metrics.multiple_choice import eagerly
from surefoot.optim.clipping import clear
from surefoot.train.compile import sole_or_all
from surefoot.train.loop import State, Step, Task, forward_backward
from surefoot.train.module_usage import Watch
from surefoot.train.precision import Precision
from surefoot.train.scratch import preserved
from surefoot.train.step_watch import LossWatch

_SHOWN = 3


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
    surefoot.errors.ConfigError: the loss never calls the model that it receives: gradients would not be summed over processes
      call it: def loss(model, batch): outputs = model(...)
    """
    if any(world.gathered(micro_batch is None or micro_batch.count == 0)) or micro_batch is None:
        return
    watch, passed = Watch(models, gathered=gathered), True
    try:
        unused = _passed(models, loss, micro_batch, precision, watch)
        errors = watch.problems() or (
            [_about_unused(unused)] if unused and not allow_unused else []
        )
    except ConfigError as refused:
        errors = watch.problems() or [str(refused)]
    except Exception:
        errors, passed = watch.outside_problems(), False
    by_rank: list[tuple[list[str], list[str] | None]] = world.gathered(
        (errors, watch.order if passed else None)
    )
    all_errors = list(dict.fromkeys(problem for of_rank, _ in by_rank for problem in of_rank))
    if all_errors or (all_errors := _about_order([order for _, order in by_rank])):
        raise ConfigError("\n".join(all_errors))


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
    micro_batch = None if task.loss is None else first(state.step)
    if (
        any(world.gathered(micro_batch is None)) or micro_batch is None
    ):  # no data: the first step reports the reason
        return
    with (
        preserved(state.models, task.loss, user_state, state.parameters),
        warnings.catch_warnings(),
    ):
        # a one-channel kernel matches two memory formats; torch warns of this once, in the first
        # pass
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        forward_backward(Step(state.step, [replace(micro_batch, count=0)], task, state))
        clear(state.parameters)
        state.buffers.undo()


def _passed(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch,
    precision: Precision,
    watch: Watch,
) -> list[str]:
    forward = sole_or_all(
        {name: Called(model, partial(watch.through, model)) for name, model in models.items()}
    )
    settings = TrainSettings(length="1 steps", batch_size=len(micro_batch.sample_ids))
    task = Task(forward, loss, 0, precision, factors=lambda _: 1.0, settings=settings)
    used: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        used.add(parameter)
        parameter.grad = None  # the unsharded gradients of a large model may not fit in memory

    with preserved(models, loss, {}), precision.numerics(), eagerly(), ExitStack() as hooks:
        trained = {
            f"{model_name}." * (len(models) > 1) + name: parameter
            for model_name, model in models.items()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for parameter in trained.values():
            hooks.callback(parameter.register_post_accumulate_grad_hook(note).remove)  # type: ignore[no-untyped-call]
        forward_backward(
            Step(0, [micro_batch], task, State(dict(models), {}), _watch=LossWatch(watch.over))
        )
        return [
            name
            for name, parameter in trained.items()
            if parameter.requires_grad and parameter not in used
        ]


def _about_order(orders: Sequence[Sequence[str] | None]) -> list[str]:
    (base, reference), *others = [
        (rank, order) for rank, order in enumerate(orders) if order is not None
    ] or [(0, ())]
    for rank, order in others:
        for first, other in zip_longest(reference, order, fillvalue="nothing more"):
            if first != other:
                return [
                    f"rank {rank} calls {other}, but rank {base} calls {first}: FSDP gathers each block from all ranks at once,\n"
                    "  so all ranks must call the same blocks in every pass (are some skipped at random, or for some inputs?)\n"
                    "  name blocks that are always called (--fsdp.blocks), or try:\n"
                    "  --parallel ddp --ddp.find-unused-parameters True"
                ]
    return []


def _about_unused(names: Sequence[str]) -> str:
    listed, several = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN), len(names) != 1
    return (
        f"{len(names)} parameter{'s' * several} get{'s' * (not several)} no gradient, and other processes would wait for"
        f" {'them' if several else 'it'}: {listed}\n"
        "  freeze unused parameters: requires_grad_(False), or sf.optim.frozen(...) in the optimizer's lr_multipliers;\n"
        "  or, if that changes from batch to batch, allow it: find_unused_parameters=True of sf.ddp or sf.fsdp"
    )
