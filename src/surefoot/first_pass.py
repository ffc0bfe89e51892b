"""One pass of the plain model before several processes share it: what would be wrong there without a word is named here.

DDP and FSDP2 see only what goes through the model's own call. Gradients of what a loss computes beside it are not added up over
processes, sharded weights are not gathered for it, and a parameter that gets no gradient is waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from surefoot.errors import ConfigError
from surefoot.loop import State, Step, Task, forward_backward
from surefoot.micro_batch import MicroBatch
from surefoot.outside_of_calls import Handed, Watch, Watched
from surefoot.precision import Precision
from surefoot.seeding import untouched
from surefoot.world import World

_SHOWN = 3


def check_first_pass(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch | None,
    *,
    precision: Precision,
    world: World,
    allow_unused: bool = False,
    sharded: bool = False,
) -> None:
    """Pass one micro-batch forward and backward; `ConfigError` with all that several processes could not do; collective.

    Refused are trained parameters that get no gradient (unless `allow_unused`), a loss that never calls a model it is given, and
    what it computes with the model's parts outside of that call, by name and line; with `sharded`, with its parameters too.
    `micro_batch` is this rank's, None where it has none: then no rank checks. A pass that fails is left to the first step,
    where its error is explained. Parameters, buffers, gradients, modes and random generators are afterwards what they were.

    >>> from surefoot.precision import precision
    >>> import numpy as np
    >>> micro_batch = MicroBatch(torch.ones(4, 2), 4, 0, np.arange(4), np.zeros(4, dtype=np.int64))
    >>> cpu = torch.device("cpu")
    >>> settings = {"precision": precision("fp32", cpu), "world": World(cpu)}
    >>> check_first_pass({"model": nn.Linear(2, 1)}, lambda model, batch: model(batch).mean(), micro_batch, **settings)
    >>> check_first_pass({"model": nn.Linear(2, 1)}, lambda model, batch: model.weight.sum(), micro_batch, **settings)
    Traceback (most recent call last):
        ...
    surefoot.errors.ConfigError: the loss never calls the model that it is given: no gradient would be added up over processes
      call it: def loss(model, batch): outputs = model(...)
    """
    if micro_batch is not None and micro_batch.count == 0:
        micro_batch = None
    if any(world.gathered(micro_batch is None)) or micro_batch is None:
        return
    watch = Watch(models, sharded=sharded)
    try:
        unused = _passed(models, loss, micro_batch, precision, watch)
        found = watch.problems()
        if not found and unused and not allow_unused:
            found = [_about_unused(unused)]
    except ConfigError as refused:
        found = watch.problems() or [str(refused)]
    except Exception:
        found = watch.outside_problems()
    told: list[list[str]] = world.gathered(found)
    every = list(dict.fromkeys(problem for of_rank in told for problem in of_rank))
    if every:
        raise ConfigError("\n".join(every))


def _passed(
    models: Mapping[str, nn.Module],
    loss: Callable[[Any, Any], Any],
    micro_batch: MicroBatch,
    precision: Precision,
    watch: Watch,
) -> list[str]:
    """Names of the trained parameters that got no gradient."""
    handed: dict[str, Any] = {name: Handed(model, name, watch) for name, model in models.items()}
    given = handed["model"] if list(handed) == ["model"] else handed
    task = Task(given, Watched(loss, watch), 0, precision, factors=lambda _: 1.0, max_bad_steps=0)
    with _unchanged(models), precision.numerics(), _eagerly():
        forward_backward(Step(0, [micro_batch], task, State(dict(models), {})))
        return [
            f"{prefix}{name}"
            for prefix, model in _prefixed(models)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]


@contextmanager
def _unchanged(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Parameters, buffers, gradients, modes and the generators, afterwards as they were; gradients absent meanwhile."""
    parts = [part for model in models.values() for part in model.modules()]
    parameters = {id(p): p for model in models.values() for p in model.parameters()}.values()
    buffers = [(part, name, held) for part in parts for name, held in part._buffers.items() if held is not None]
    values = [(held, held.detach().clone()) for held in [*parameters, *(held for _, _, held in buffers)]]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    modes = [(part, part.training) for part in parts]
    for parameter in parameters:
        parameter.grad = None
    try:
        with untouched():
            yield
    finally:
        for part, name, held in buffers:
            part._buffers[name] = held
        with torch.no_grad():
            for held, value in values:
                held.copy_(value)
        for parameter, trained, gradient in flags:
            parameter.requires_grad_(trained)
            parameter.grad = gradient
        for part, training in modes:
            part.training = training


def _eagerly() -> AbstractContextManager[Any]:
    """Nothing is compiled for one pass; torch's compiler is not even imported for it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _prefixed(models: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    return [("" if len(models) == 1 else f"{name}.", model) for name, model in models.items()]


def _about_unused(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    several = len(names) != 1
    return (
        f"{len(names)} parameter{'s' * several} get{'s' * (not several)} no gradient, and other processes would wait for"
        f" {'them' if several else 'it'}: {shown}\n"
        "  do not train what is not used: requires_grad_(False), or surefoot.frozen(...) among the optimizer's rates;\n"
        "  or, where that changes from batch to batch, allow it: parallel=surefoot.ddp(unused=True)"
    )
