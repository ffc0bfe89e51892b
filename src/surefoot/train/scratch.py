"""Passes that leave no trace: whatever is tried with a model and a loss, everything is afterwards as it was."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from time import perf_counter, process_time
from typing import Any

import torch

from surefoot.data.loader import MicroBatch
from surefoot.distributed.shards import extra_states
from surefoot.optim.clipping import clear
from surefoot.seeding import untouched
from surefoot.train.loop import State, Step, Task, forward_backward


@contextmanager
def preserved(
    models: Mapping[str, torch.nn.Module],
    loss: Any,
    user_state: Mapping[str, Any],
    parameters: Sequence[torch.nn.Parameter] = (),
    *,
    with_weights: bool = True,
) -> Iterator[Callable[..., None]]:
    """Put everything back at the end; gradients are absent meanwhile. Yields what puts back all, or only what a checkpoint holds.

    Everything: weights, buffers, extra state, modes, gradients, the three random generators, `user_state`, and what models and
    the loss remember in attributes, closures and globals. `parameters` are further ones that an optimizer trains. Without
    `with_weights` no parameter is copied: for passes that change none.
    """
    from surefoot.checkpoint.unsaved import Observation

    every = [*parameters, *(parameter for model in models.values() for parameter in model.parameters())]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in every]
    modes = [(part, part.training) for model in models.values() for part in model.modules()]
    extras = [each for model in models.values() for each in extra_states(model)]
    buffers = [
        (buffer, buffer.detach().clone()) for model in models.values() for buffer in model.buffers() if not with_weights
    ]
    for parameter in every:
        parameter.grad = None
    before = Observation(models, loss, user_state=user_state, with_weights=with_weights)

    def put_back(*, only_saved: bool = False) -> None:
        try:
            before.put_back(only_saved=only_saved)
        finally:
            with torch.no_grad():
                for buffer, numbers in buffers:
                    buffer.copy_(numbers)
            for part, extra in extras:
                part.set_extra_state(deepcopy(extra))  # it may keep what it is given, and change that
            for part, training in modes:
                part.training = training
            for parameter in every:
                parameter.grad = None

    try:
        with untouched():
            yield put_back
    finally:
        try:
            put_back()
        finally:
            for parameter, trained, gradient in flags:
                parameter.requires_grad_(trained)
                parameter.grad = gradient


def eagerly() -> AbstractContextManager[Any]:
    """Nothing is compiled for one pass; torch's compiler is not even imported for it."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def timed_pass(task: Task, state: State, micro_batch: MicroBatch) -> tuple[float, int]:
    """Pass a micro-batch forward and backward; return the seconds that it took, the device's included, and the targets counted.

    Parameters and buffers stay what they were, and no gradient is left. On one thread of the CPU these are the processor's
    seconds, which other processes do not lengthen.
    """
    on_one_thread = task.precision.device.type == "cpu" and torch.get_num_threads() == 1
    clock = process_time if on_one_thread else perf_counter
    began, step = clock(), Step(state.step, [micro_batch], task, state)
    float(forward_backward(step))  # waits for the device
    took_s = clock() - began
    clear(state.parameters)
    state.buffers.undo()
    return took_s, int(step.target_count)
