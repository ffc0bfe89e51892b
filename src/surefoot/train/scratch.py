"""Passes without side effects: all state is restored afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
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
    """Restore all state at the end of the block; inside the block, gradients are None.

    The state comprises weights, buffers, extra state, modes, gradients, the three random
    generators, `user_state`, and the attributes, closures and globals of models and loss. The block
    receives a function that restores all state; with `only_saved`, the function restores only the
    state in a checkpoint. `parameters` are further parameters that an optimizer trains. If
    `with_weights` is false, parameters are not copied, and the block must not change them.
    """
    from surefoot.checkpoint.unsaved import Observation

    every = [
        *parameters,
        *(parameter for model in models.values() for parameter in model.parameters()),
    ]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in every]
    modes = [(part, part.training) for model in models.values() for part in model.modules()]
    extras = [each for model in models.values() for each in extra_states(model)]
    buffers = [
        (buffer, buffer.detach().clone())
        for model in models.values()
        for buffer in model.buffers()
        if not with_weights
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
                part.set_extra_state(
                    deepcopy(extra)
                )  # the module may keep its argument and modify it
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


def zero_rates(task: Task, state: State) -> Task:
    """Return the task with a learning rate of 0. Rates stay if an optimizer gets a closure, since
    they steer its evaluations.
    """
    takes_closure = any(trained.takes_closure for trained in state.optimizers.values())
    return task if takes_closure else replace(task, factors=lambda _: 0.0)


def timed_pass(task: Task, state: State, micro_batch: MicroBatch) -> tuple[float, int]:
    """Time one micro-batch forward and backward, without lasting effects; return the seconds and
    the number of targets.
    """
    # on one CPU thread, process time is independent of other processes
    on_one_thread = task.precision.device.type == "cpu" and torch.get_num_threads() == 1
    clock = process_time if on_one_thread else perf_counter
    began, step = clock(), Step(state.step, [micro_batch], task, state)
    float(forward_backward(step))  # waits for the device
    took_s = clock() - began
    clear(state.parameters)
    state.buffers.undo()
    return took_s, int(step.target_count)
