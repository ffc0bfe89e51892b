"""Passes without side effects: all state is restored afterwards."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

import torch

from surefoot.data.loader import MicroBatch
from surefoot.distributed.shards import reset_passes
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
) -> Iterator[Callable[..., list[str]]]:
    """Restore all state of a `Snapshot` at the end of the block; inside the block, gradients are
    None.

    The block receives the function that restores all state, or with `only_saved` what a checkpoint
    holds. If `with_weights` is false, parameters are not copied, and the block must not change
    them.
    """
    from surefoot.checkpoint.snapshot import Snapshot

    of_models = [parameter for model in models.values() for parameter in model.parameters()]
    gradients = [(parameter, parameter.grad) for parameter in [*parameters, *of_models]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with untouched():
            before = Snapshot(
                models,
                loss,
                user_state=user_state,
                parameters=parameters,
                keep=True,
                weights=with_weights,
            )
            try:
                yield before.restore
            finally:
                reset_passes(models.values())  # after a pass that failed
                before.restore()
    finally:
        for parameter, gradient in gradients:
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
